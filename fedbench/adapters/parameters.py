"""Tuning a part of a model's own parameters: biases (BitFit, Ben Zaken et al., ACL 2022), or the norms'."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from fedbench.adapters.base import Adapter
from fedbench.core.options import listed, require


class Parameters(Adapter):
    """parameters: patterns of names of parameters, such as "*.bias", or of their layers' classes, "type:LayerNorm"."""

    def __init__(self, parameters: Sequence[str], train: Sequence[str] = ("head.*",)):
        super().__init__((), train)
        self.parameters = list(parameters)

    def add(self, model: nn.Module) -> list[str]:
        """Make these learn; none is new."""
        chosen = [name for name, _ in model.named_parameters() if self._is_chosen(model, name)]
        require(
            bool(chosen),
            f"adapter.parameters={self.parameters} matches none of the model's parameters: "
            f"{listed(name for name, _ in model.named_parameters())}",
        )
        for name in chosen:
            model.get_parameter(name).requires_grad_()
        return chosen

    def _is_chosen(self, model: nn.Module, name: str) -> bool:
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        return any(
            fnmatch.fnmatch(owner, p[5:]) if p.startswith("type:") else fnmatch.fnmatch(name, p)
            for p in self.parameters
        )
