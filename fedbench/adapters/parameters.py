"""Training of selected parameters of the model: biases (BitFit, Ben Zaken et al., ACL 2022), or layer norms."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from fedbench.adapters.base import Adapter
from fedbench.core.options import listed, require


class Parameters(Adapter):
    """Adapter that trains selected parameters of the model and adds none.

    Args:
        parameters: Patterns of parameter names, such as "*.bias", or of layer classes, such as "type:LayerNorm".  Each
            must match a parameter.
        train: Patterns of parameters that are trained too.
    """

    def __init__(self, parameters: Sequence[str], train: Sequence[str] = ("head.*",)):
        super().__init__((), train)
        self.parameters = list(parameters)

    def add(self, model: nn.Module) -> list[str]:
        """Unfreeze the selected parameters of a frozen model, in place.

        Returns:
            Names of the selected parameters, in the order of the model.

        Raises:
            ConfigError: A pattern of the option `parameters` matches none.
        """
        names = [name for name, _ in model.named_parameters()]
        selected: set[str] = set()
        for pattern in self.parameters:
            matched = {name for name in names if _is_matched(model, name, pattern)}
            require(
                bool(matched),
                f"adapter.parameters={self.parameters}: {pattern!r} matches no parameter of the model. Remove it, or "
                f"write a pattern that matches one of {listed(names)}",
            )
            selected |= matched
        for name in selected:
            model.get_parameter(name).requires_grad_()
        return [name for name in names if name in selected]


def _is_matched(model: nn.Module, name: str, pattern: str) -> bool:
    """Return whether a pattern selects a parameter.

    Args:
        model: The model.
        name: Name of the parameter, such as "blocks.0.norm.bias".
        pattern: A pattern of parameter names, or after "type:" a pattern of the class names of layers.
    """
    if not pattern.startswith("type:"):
        return fnmatch.fnmatch(name, pattern)
    layer_class = type(model.get_submodule(name.rpartition(".")[0])).__name__
    return fnmatch.fnmatch(layer_class, pattern.removeprefix("type:"))
