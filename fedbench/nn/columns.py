"""Columns of a row: the parameters that a method shares, trains or keeps on the clients.

FedPer shares model.columns["base"] and keeps model.columns["head"].
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import MissingColumns


class Columns:
    """A set of columns of a row [P], kept as slices (start, stop).  It may be empty.

    Args:
        slices: (start, stop) of each slice.  Overlapping and adjacent slices are merged.

    Attributes:
        slices: The merged slices, ascending.
        size: Number of columns.
    """

    def __init__(self, slices: Iterable[tuple[int, int]]):
        self.slices = _merge(slices)
        self.size = sum(b - a for a, b in self.slices)

    def take(self, rows: Tensor) -> Tensor:
        """Return these columns of rows.

        Args:
            rows: Model parameters, one model or several.  # [..., P]

        Returns:
            The columns: a view of rows if they are one slice, else a copy.  # [..., size]
        """
        if len(self.slices) == 1:
            return self.view(rows)
        parts = [rows[..., start:stop] for start, stop in self.slices]
        return torch.cat(parts or [rows[..., :0]], dim=-1)

    def view(self, rows: Tensor) -> Tensor:
        """Return these columns as a view, through which rows can be changed.

        Args:
            rows: Model parameters, one model or several.  # [..., P]

        Returns:
            The view.  # [..., size]

        Raises:
            ValueError: The columns are more than one slice.
        """
        if len(self.slices) > 1:
            raise ValueError(
                f"these columns are {len(self.slices)} slices {self.slices}, and only one slice can be a view of a "
                "tensor: read them by Columns.take(rows), and replace them by Columns.put"
            )
        start, stop = self.slices[0] if self.slices else (0, 0)
        return rows[..., start:stop]

    def put(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return a copy of rows in which these columns are replaced.  Leading axes are broadcast.

        Args:
            rows: Model parameters, one model or several.  # [..., P]
            values: The new values of the columns.  # [..., size]

        Returns:
            The changed copy.  # [..., P]
        """
        # NumPy's function, because torch.broadcast_shapes imports sympy, which is slow
        leading_shape = np.broadcast_shapes(rows.shape[:-1], values.shape[:-1])
        values, parts = values.to(rows.dtype), []
        end = done = 0  # end of the last slice, and number of values that are in parts
        for start, stop in self.slices:
            parts += [rows[..., end:start], values[..., done : done + stop - start]]
            end, done = stop, done + stop - start
        parts.append(rows[..., end:])
        return torch.cat([part.expand(*leading_shape, part.shape[-1]) for part in parts], dim=-1)

    def __and__(self, other: Columns) -> Columns:
        """Return the intersection, self & other: a new set with the columns that are in both sets."""
        # the intersection of each pair of slices, which is empty if it does not start before it stops
        overlaps = ((max(a, c), min(b, d)) for a, b in self.slices for c, d in other.slices)
        return Columns((start, stop) for start, stop in overlaps if start < stop)

    def __or__(self, other: Columns) -> Columns:
        """Return the union, self | other: a new set with the columns that are in at least one of the sets."""
        return Columns([*self.slices, *other.slices])

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether this set has at least one of the columns start, ..., stop - 1."""
        return any(max(start, a) < min(stop, b) for a, b in self.slices)

    def rest(self, size: int) -> Columns:
        """Return the complement in rows of length `size`: all columns 0, ..., size - 1 that are not in this set."""
        edges = [0, *(edge for span in self.slices for edge in span), size]  # of the gaps between the slices
        return Columns(zip(edges[::2], edges[1::2]))

    def __len__(self) -> int:
        return self.size


def _merge(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return an equal set of columns as slices that are sorted, not empty and separated by gaps.

    [(5, 7), (0, 2), (2, 3), (4, 4)] becomes [(0, 3), (5, 7)].

    Args:
        slices: (start, stop) of each slice, stop exclusive.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(s for s in slices if s[0] < s[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def require_group(name: str, needed_by: str, groups: Iterable[str]) -> None:
    """Check that a model declares a column group.

    Args:
        name: Name of the group.
        needed_by: What needs the group, for the error message.
        groups: Names of the groups that the model declares.

    Raises:
        MissingColumns: The model does not declare the group.
    """
    if name not in groups:
        raise MissingColumns(
            f"{needed_by} needs the parameter group {name!r}, but model.columns has "
            f"{', '.join(groups) or 'no groups'}. Name another group, or add this one with patterns of parameter "
            f"names, as in 'model.columns={{{name}: [\"fc.*\"]}}'",
            name,
        )
