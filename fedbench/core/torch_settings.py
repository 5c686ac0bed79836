"""Restore torch's process-wide settings after a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def preserved() -> Iterator[None]:
    """Restore torch's number of threads and the precision of matrix products after the block.

    Otherwise the next run in this process could differ in the last digits.
    """
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allow_tf32
