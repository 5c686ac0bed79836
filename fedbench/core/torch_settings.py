"""What a run sets of torch for the whole process, and what the process finds again when the run is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """Intra-op threads and the precision of products are after the block as they were before it.

    So that the next run of the process begins as one in a process of its own, where sums over other numbers of threads
    would have other last digits.
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
