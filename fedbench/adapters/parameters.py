"""Tuning a part of a model's own parameters: biases (BitFit, Ben Zaken et al., ACL 2022), or the norms'."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from fedbench.adapters.base import Adapter
from fedbench.core.options import listed, require


class Parameters(Adapter):
    """Adapter that trains parameters of the model itself.

    Args:
        parameters: Patterns of parameter names, such as "*.bias", or of layer classes, such as "type:LayerNorm".  Each
            must match a parameter.
    """

    def __init__(self, parameters: Sequence[str], train: Sequence[str] = ("head.*",)):
        super().__init__((), train)
        self.parameters = list(parameters)

    def add(self, model: nn.Module) -> list[str]:
        """Make these learn; none is new."""
        names = [name for name, _ in model.named_parameters()]
        chosen: set[str] = set()
        for pattern in self.parameters:
            matched = {name for name in names if _is_matched(model, name, pattern)}
            require(
                bool(matched),
                f"adapter.parameters={self.parameters}: {pattern!r} matches none of the model's parameters: "
                f"{listed(names)}",
            )
            chosen |= matched
        for name in chosen:
            model.get_parameter(name).requires_grad_()
        return [name for name in names if name in chosen]


def _is_matched(model: nn.Module, name: str, pattern: str) -> bool:
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    return fnmatch.fnmatch(owner, pattern[5:]) if pattern.startswith("type:") else fnmatch.fnmatch(name, pattern)
