"""Read torch.save files with tensors and plain values safely, without running code from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

NO_WEIGHTS = (
    "the file is damaged, or contains other objects than tensors and plain values; only state dicts that torch.save "
    "wrote can be read"
)


def read_weights(path: Path, device: torch.device | str = "cpu", mmap: bool = False) -> Any:
    """Return the content of a torch.save file.

    Args:
        path: The file.
        device: The device of the tensors.
        mmap: Whether to map the file instead of reading it.

    Raises:
        ValueError: The file is damaged or holds other objects.  The message replaces PyTorch's, which would advise
            weights_only=False and so run code from the file.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(NO_WEIGHTS) from error
    except Exception as error:  # torch.load may raise any exception on a damaged file
        # its first sentence, of at most 160 characters
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0][:160]
        raise ValueError(f"torch.load cannot read the file ({reason}): replace it by an intact one") from error
