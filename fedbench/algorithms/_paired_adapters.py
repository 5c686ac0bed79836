"""Columns of paired bottlenecks: with adapter.twin=true, each adapted layer has two.

An adapted layer then has two bottlenecks, and adds the mean of their outputs.  If both bottlenecks are equal, the mean
equals the output of a single one.
"""

from __future__ import annotations

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel


def columns_of_pairs(model: FlatModel) -> tuple[Columns, Columns]:
    """Return the columns of all first and of all second bottlenecks of a model.

    An adapted layer with paired bottlenecks has two of equal shape: a first one named adapter, a second one named twin.
    Columns are positions in a row, the flat vector of a model's parameters.

    Args:
        model: The model.

    Returns:
        Two groups of columns in the same order, so values can be copied from one to the other.  Both are empty if the
        model has no paired bottlenecks.
    """
    # spans: columns (start, stop) of each parameter by name
    names = [name for name in model.spans if ".twin." in name]
    first = [model.spans[name.replace(".twin.", ".adapter.")] for name in names]
    return Columns(first), Columns([model.spans[name] for name in names])
