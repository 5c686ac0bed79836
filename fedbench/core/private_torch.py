"""Private names of PyTorch.  fedbench uses them only here.

tests/core/test_private_torch.py checks that the installed version has all NAMES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NAMES", "BatchNorm", "MoveListener", "TorchDispatchMode", "fused_sgd", "has_hooks", "tensor_without_memory"]
NAMES = (
    "torch._fused_sgd_",
    "torch.Tensor._make_wrapper_subclass",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.Module._apply",
    "torch.nn.Module()._forward_hooks",
    "torch.nn.Module()._forward_pre_hooks",
    "torch.utils._python_dispatch.TorchDispatchMode",
)

BatchNorm: Any = nn.modules.batchnorm._BatchNorm  # the base class of BatchNorm1d, 2d and 3d

# the kernel of torch.optim.SGD(fused=True), which reads and writes each number once; None if this version lacks it
fused_sgd: Any = getattr(torch, "_fused_sgd_", None)


def tensor_without_memory(cls: type, shape: tuple[int, ...], like: Tensor) -> Any:
    """Return a tensor of a subclass that has a shape, and the type and device of another tensor, but no memory.

    Args:
        cls: The subclass of Tensor.  It handles all operations by __torch_function__.
        shape: The shape.
        like: The other tensor.
    """
    return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module or any of its layers has forward hooks or forward pre-hooks."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class MoveListener(nn.Module):
    """A module whose ``on_move`` is called after it is moved or cast (``to``, ``cuda``, ``double``)."""

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.on_move()
        return self

    def on_move(self) -> None:
        """Do nothing.  Subclasses override it: it is called after each move or cast of the module."""
