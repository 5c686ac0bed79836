"""Frozen parameters, and the layers that stay in evaluation mode because of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from fedbench.core.options import listed, require
from fedbench.core.private_torch import BatchNorm


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Freeze the parameters that match a pattern.

    Args:
        module: The module, whose parameters' requires_grad changes.
        patterns: Patterns of names of parameters and buffers (fnmatch), from model.freeze.

    Returns:
        Names of the layers that stay in evaluation mode: those whose weight matches a pattern, and batch norms whose
        parameters are all frozen.

    Raises:
        ConfigError: A pattern matches nothing, or all parameters are frozen.
    """
    names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    for pattern in patterns:
        require(
            any(fnmatch.fnmatch(n, pattern) for n in names),
            f"model.freeze={list(patterns)}: the pattern {pattern!r} matches none of the model's parameters. Remove "
            f"it, or write a pattern that matches one of {listed(n for n, _ in module.named_parameters())}",
        )
    for name, p in module.named_parameters():
        if is_frozen_by_name(name, patterns):
            p.requires_grad_(False)
    require(  # without patterns, a module that has nothing to train is not an error of the option
        any(p.requires_grad for p in module.parameters()) or not patterns,
        f"model.freeze={list(patterns)} freezes all parameters, so nothing is left to train: remove a pattern, or "
        "write one that matches fewer parameters",
    )
    return {
        name
        for name, m in module.named_modules()
        if is_frozen_norm(m) or (name and is_frozen_by_name(f"{name}.weight", patterns))
    }


def is_frozen_by_name(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a parameter or buffer of this name matches any of the patterns (fnmatch) of model.freeze."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def is_frozen_norm(module: nn.Module) -> bool:
    """Return whether a layer is a batch norm with parameters, all of which are frozen.

    Its running statistics are then frozen as well.
    """
    parameters = list(module.parameters(recurse=False))
    return isinstance(module, BatchNorm) and bool(parameters) and not any(p.requires_grad for p in parameters)
