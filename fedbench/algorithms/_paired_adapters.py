"""Columns of paired bottlenecks (adapter.twin=true).

An adapted layer adds the mean of both outputs.  If the two are equal, this is the output of one.
"""

from __future__ import annotations

from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel


def columns_of_pairs(model: FlatModel) -> tuple[Columns, Columns]:
    """Return the columns of all first and of all second bottlenecks, in the same order.

    Both are empty if the model has no paired bottlenecks.
    """
    names = [name for name in model.spans if ".twin." in name]
    first = [model.spans[name.replace(".twin.", ".adapter.")] for name in names]
    return Columns(first), Columns([model.spans[name] for name in names])
