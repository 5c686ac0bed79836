"""Columns of a row: which of a model's numbers a method shares, trains or keeps.

FedPer shares model.columns["base"] and keeps model.columns["head"].
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import MissingColumns


class Columns:
    """A set of columns of a row, as merged slices [(start, stop), ...].  Empty sets are allowed and mean no column."""

    def __init__(self, slices: Iterable[tuple[int, int]]):
        self.slices = _merge(slices)
        self.size = sum(b - a for a, b in self.slices)

    def take(self, rows: Tensor) -> Tensor:
        """The chosen columns.  [..., P] -> [..., size], a copy unless it is one slice."""
        if len(self.slices) == 1:
            return rows[..., self.slices[0][0] : self.slices[0][1]]
        return torch.cat([rows[..., a:b] for a, b in self.slices] or [rows[..., :0]], dim=-1)

    def view(self, rows: Tensor) -> Tensor:
        """The chosen columns as a view, to write into rows; ValueError unless they are one slice, or none.

        [..., P] -> [..., size].
        """
        if len(self.slices) > 1:
            raise ValueError(f"{len(self.slices)} slices of a row are no view of it, take and put them: {self.slices}")
        a, b = self.slices[0] if self.slices else (0, 0)
        return rows[..., a:b]

    def put(self, rows: Tensor, values: Tensor) -> Tensor:
        """A copy of rows [..., P] with the chosen columns replaced by values [..., size]."""
        lead = np.broadcast_shapes(rows.shape[:-1], values.shape[:-1])  # torch's own imports sympy: seconds
        out, taken = rows.expand(*lead, rows.shape[-1]).clone(), 0
        for a, b in self.slices:
            out[..., a:b] = values[..., taken : taken + b - a]
            taken += b - a
        return out

    def __and__(self, other: Columns) -> Columns:
        return Columns((max(a, c), min(b, d)) for a, b in self.slices for c, d in other.slices if max(a, c) < min(b, d))

    def __or__(self, other: Columns) -> Columns:
        return Columns([*self.slices, *other.slices])

    def meets(self, a: int, b: int) -> bool:
        """Whether any of the columns a to b is among these."""
        return any(max(a, c) < min(b, d) for c, d in self.slices)

    def rest(self, size: int) -> Columns:
        """The columns of a row of `size` numbers that are not among these."""
        edges = [0, *(edge for span in self.slices for edge in span), size]
        return Columns(zip(edges[::2], edges[1::2]))

    def __len__(self) -> int:
        return self.size


def _merge(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The slices in order, those that touch as one."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted(s for s in slices if s[0] < s[1]):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def require_group(name: str, needed_by: str, groups: Iterable[str]) -> None:
    """Refuse a model that does not declare a group of columns; groups: those that it does."""
    if name not in groups:
        raise MissingColumns(
            f"{needed_by} needs the column group {name!r}, which this model does not declare: "
            f"add it under model.columns (it has {', '.join(groups) or 'none'})",
            name,
        )
