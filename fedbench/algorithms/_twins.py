"""Places with two bottlenecks, adapter.twin=true, whose mean a model computes: where both are equal, one alone."""

from __future__ import annotations

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel


def columns_of_twins(model: FlatModel) -> tuple[Columns, Columns]:
    """Of all places the columns of the first bottleneck and of the second, number by number; none without twins."""
    twins = [name for name in model.spans if ".twin." in name]
    first = [model.spans[name.replace(".twin.", ".adapter.")] for name in twins]
    return Columns(first), Columns([model.spans[name] for name in twins])
