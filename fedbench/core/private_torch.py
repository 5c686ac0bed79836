"""Names of PyTorch that it keeps private: all that fedbench uses stand here, and nowhere else.

NAMES is what tests/core/test_private_torch.py looks for in the version that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NAMES", "BatchNorm", "MoveListener", "TorchDispatchMode", "fused_sgd", "has_hooks"]
NAMES = (
    "torch._fused_sgd_",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.Module._apply",
    "torch.nn.Module()._forward_hooks",
    "torch.nn.Module()._forward_pre_hooks",
    "torch.utils._python_dispatch.TorchDispatchMode",
)

BatchNorm: Any = nn.modules.batchnorm._BatchNorm  # the base of batch norms of all dimensions

# torch.optim.SGD(fused=True)'s kernel: it reads and writes each number once, where three operations move 8 / 5 as much;
# None where this version has none, and the operations are used
fused_sgd: Any = getattr(torch, "_fused_sgd_", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether code runs before or after the forward pass of a module or of any of its layers."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class MoveListener(nn.Module):
    """A module that is told when it has been moved or cast (``to``, ``cuda``, ``double``), by a call of ``on_move``."""

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.on_move()
        return self

    def on_move(self) -> None:
        """Called after every move or cast."""
