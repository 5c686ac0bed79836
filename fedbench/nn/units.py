"""Hidden units that may be renumbered: W2 s(W1 h + b1) + b2 is one function for all m! orders of W1's rows, b1's
entries and W2's columns.  The axes that other layers read or write, and b2, stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

Parts = dict[str, tuple[tuple[int, ...], int]]  # by a parameter's name: the shape it is seen in, the axis of the units


@dataclass(frozen=True)
class Units:
    """The m hidden units of a module, whose parameters are named as in it.

    Attributes:
        size: m.
        parts: The parameters that are renumbered.
        members: All parameters of the bottleneck.  No other module has them.
        before: The layer that gives the units' values before the nonlinearity, in `blocks` blocks of m.
        incoming: incoming(named, prefix) returns the weights that lead to each unit.  # [k, m, d]
        blocks: Number of blocks.
    """

    size: int
    parts: Parts
    members: tuple[str, ...]
    before: str
    incoming: Callable[[Mapping[str, Tensor], str], Tensor]
    blocks: int = 1


@runtime_checkable
class HasUnits(Protocol):
    """A module with hidden units of its own."""

    def units(self) -> Units | None:
        """They; None where renumbering would change what the module computes."""
        ...


@runtime_checkable
class UnitLayer(Protocol):
    """A layer that is none of nn.Linear and may stand on either side of hidden units."""

    def units_given(self) -> tuple[int, int, Parts]:
        """m, the blocks of m numbers that it gives, and what is renumbered when the units behind it are."""
        ...

    def units_read(self) -> Parts:
        """What is renumbered when the units before it are."""
        ...

    def incoming(self, named: Mapping[str, Tensor], prefix: str) -> Tensor:
        """The weights that lead to each unit, all blocks side by side.  # [k, m, d]"""
        ...


def units_between(down: nn.Module, up: nn.Module, prefix: str) -> Units | None:
    """The units of prefix.down, prefix.act and prefix.up; None where a layer is of an unknown kind."""
    given, read = _given(down), _read(up)
    if given is None or read is None:
        return None
    size, blocks, parts = given
    names = [
        f"{prefix}.{end}.{n}" for end, m in (("down", down), ("up", up)) for n, _ in m.named_parameters(recurse=False)
    ]

    def incoming(named: Mapping[str, Tensor], module: str) -> Tensor:
        if isinstance(down, UnitLayer):
            return down.incoming(named, f"{module}{prefix}.down.")
        return named[f"{module}{prefix}.down.weight"]

    return Units(
        size,
        {f"{prefix}.down.{n}": part for n, part in parts.items()} | {f"{prefix}.up.{n}": p for n, p in read.items()},
        tuple(names),
        f"{prefix}.down",
        incoming,
        blocks,
    )


def _given(layer: nn.Module) -> tuple[int, int, Parts] | None:
    if isinstance(layer, UnitLayer):
        return layer.units_given()
    if type(layer) is not nn.Linear:
        return None
    bias: Parts = {} if layer.bias is None else {"bias": ((layer.out_features,), 0)}
    return layer.out_features, 1, {"weight": (tuple(layer.weight.shape), 0), **bias}


def _read(layer: nn.Module) -> Parts | None:
    if isinstance(layer, UnitLayer):
        return layer.units_read()
    return {"weight": (tuple(layer.weight.shape), 1)} if type(layer) is nn.Linear else None
