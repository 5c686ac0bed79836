"""Reading files of torch.save: tensors and plain values, of which nothing can run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

NO_WEIGHTS = "it is damaged, or holds more than tensors and plain values"


def read_weights(path: Path, device: torch.device | str = "cpu", mmap: bool = False) -> Any:
    """Return what torch.save wrote.

    Raises:
        ValueError: in one sentence, where the file is damaged or holds other objects.  PyTorch's own words would
            advise to read it with weights_only=False, which runs what the file says.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(NO_WEIGHTS) from error
    except Exception as error:  # torch.load raises anything on a damaged file
        first = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise ValueError(first) from error
