"""Which parameters stand where in what a method sends: a whole row, a group of columns, or all but one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel


@dataclass(frozen=True)
class Layout:
    """spans: of each parameter its columns a to b and its shape, in their order.  parameters: how many numbers these
    are; buffers, such as running variances, come behind them."""

    spans: Mapping[str, tuple[int, int, tuple[int, ...]]]
    parameters: int


def layout_of(model: FlatModel, width: int) -> Layout | None:
    """The layout of rows of this width, where it can be only one: the model's, a group of columns, all columns but
    those of a group, or the trained ones of these."""
    parts = [model.all, *model.columns.values(), *(model.without(name) for name in model.columns)]
    parts += [part & model.trained for part in parts]
    names = {tuple(_names(model, part)) for part in parts if part.size == width}
    if len(names) != 1:
        return None
    spans, at = {}, 0
    for name in names.pop():
        if name in model.buffer_names:
            break  # they are the last ones of every row
        a, b = model.spans[name]
        spans[name] = (at, at + b - a, tuple(model.shapes[name]))
        at += b - a
    return Layout(spans, at)


def _names(model: FlatModel, part: Columns) -> list[str]:
    """The parameters and buffers that these columns are."""
    return [name for name, span in model.spans.items() if part.meets(*span)]
