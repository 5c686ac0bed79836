"""The layout of a row: the names, shapes and columns of a model's parameters and running statistics.

A row [P] is the concatenation of three parts:
  - trained: the module's parameters that require a gradient, in their order;
  - extras: columns that a method added;
  - buffers: float buffers such as BatchNorm's running statistics.  They are sent and averaged like parameters, but
    have no gradient.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.core.options import listed, require
from fedbench.nn.columns import Columns, require_group


@dataclass(frozen=True)
class MessageLayout:
    """The parameters in a message, which is a row or some of its columns.

    Attributes:
        spans: Start column, stop column (exclusive) and shape of each parameter, by name.
        parameters: Total size of all parameters.  Columns after them are buffers.
    """

    spans: Mapping[str, tuple[int, int, tuple[int, ...]]]
    parameters: int


class RowLayout:
    """Where each tensor is in a row [P]: trained parameters first, then tensors added by methods, then buffers.

    Args:
        trained: The module's parameters that require a gradient, by name.
        extras: The tensors that a method added, by name.
        buffers: The module's running statistics, by name.

    Attributes:
        shapes: Shape of each tensor, by name.
        sizes: Number of elements of each tensor.
        spans: Start and stop column (exclusive) of each tensor, by name.
        size: Length of a row, P.
        trained: The columns with a gradient: trained parameters and extras.
        all: All columns.
        columns: The groups of columns, by name.
        buffer_names: Names of the running statistics.
    """

    def __init__(self, trained: dict[str, Tensor], extras: dict[str, Tensor], buffers: dict[str, Tensor]):
        self._initial = {**trained, **extras, **buffers}
        self._extra_names = set(extras)
        self.shapes = {n: t.shape for n, t in self._initial.items()}
        self.sizes = [t.numel() for t in self._initial.values()]
        self.size = sum(self.sizes)
        self.buffer_names = list(buffers)
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self.spans = {n: (end - size, end) for n, end, size in zip(self.shapes, ends, self.sizes)}
        num_trained = sum(t.numel() for t in {**trained, **extras}.values())
        self.trained, self.all = Columns([(0, num_trained)]), Columns([(0, self.size)])
        self.columns: dict[str, Columns] = {}

    def group_columns(self, patterns: Mapping[str, Sequence[str]], class_of: Callable[[str], str]) -> None:
        """Set the groups of columns.

        Args:
            patterns: For each group, patterns of names (fnmatch), or "type:*Norm*" for the parameters of modules whose
                class name matches *Norm*.
            class_of: Returns the class name of the module that a tensor belongs to, or "".
        """
        self.columns = {
            group: Columns(span for n, span in self.spans.items() if matches(n, class_of(n), group_patterns))
            for group, group_patterns in patterns.items()
        }

    def without(self, name: str) -> Columns:
        """Return all columns of a row, buffers included, except those of the group columns[name], such as "head"."""
        return self.columns[name].rest(self.size)

    def group(self, name: str, needed_by: str) -> Columns:
        """Return the columns of a group.

        Args:
            name: Name of the group.
            needed_by: What needs the group, for the error message.

        Raises:
            MissingColumns: The model does not declare the group.
        """
        require_group(name, needed_by, self.columns)
        return self.columns[name]

    @property
    def extended(self) -> bool:
        """Whether a method has added columns to rows, which the module's own forward pass does not read."""
        return bool(self._extra_names)

    def init_row(self) -> Tensor:
        """Return a new row with the initial values of all parameters, added columns and buffers.  # [P] float32"""
        return torch.cat([t.detach().reshape(-1).float() for t in self._initial.values()])

    def parameter_spans(self, length: int) -> list[tuple[int, int]]:
        """Return the (start, stop) columns of each tensor in rows of `length` columns.

        Rows of another length than P, such as states of a method, count as one tensor: [(0, length)].
        """
        return list(self.spans.values()) if length == self.size else [(0, length)]

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views of rows by name.

        Args:
            rows: Model parameters, one model or several.  # [..., P]

        Returns:
            The views.  # [..., *shape] each
        """
        leading_shape = rows.shape[:-1]
        flat_views = rows.split(self.sizes, dim=-1)
        return {n: view.view((*leading_shape, *shape)) for (n, shape), view in zip(self.shapes.items(), flat_views)}

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Return a row [P] as a state_dict for module.load_state_dict(..., strict=False).

        It has the module's trained parameters and running statistics, without columns that a method added.
        """
        return {n: t.clone() for n, t in self.named(row).items() if n not in self._extra_names}

    def message_layout(self, length: int) -> MessageLayout | None:
        """Return which parameters a message of `length` numbers contains.

        A message can be a row, a group of columns, all columns that are not in a group, or the trained columns of one
        of these.

        Returns:
            The layout, without buffers.  None: no message has this length, or messages with different tensors have it.
        """
        candidates = self.columns_of(length)
        if len(candidates) != 1:
            return None
        spans, start = {}, 0
        for name in self._names_in(candidates[0]):
            if name in self.buffer_names:
                break  # running statistics, which are the last tensors of a row
            size = self.shapes[name].numel()
            spans[name] = (start, start + size, tuple(self.shapes[name]))
            start += size
        return MessageLayout(spans, start)

    def columns_of(self, length: int) -> list[Columns]:
        """Return the columns of which a message of `length` numbers may consist, several if it is ambiguous.

        Args:
            length: The number of numbers of the message.
        """
        # all sets of columns that a message of a method can consist of; without(name): all but a group
        candidates = [self.all, *self.columns.values(), *(self.without(name) for name in self.columns)]
        candidates += [columns & self.trained for columns in candidates]
        # by the names of their tensors, because several candidates may be the same columns
        of_length = {tuple(self._names_in(columns)): columns for columns in candidates if columns.size == length}
        return list(of_length.values())

    def _names_in(self, columns: Columns) -> list[str]:
        """Return the names of all tensors that have at least one column in `columns`, in the order of a row."""
        return [name for name, span in self.spans.items() if columns.overlaps(*span)]


def matches(name: str, owner: str, patterns: Sequence[str]) -> bool:
    """Return whether a tensor matches any of the patterns.

    Args:
        name: Name of the tensor.
        owner: Class name of the module that it belongs to; "" if it belongs to none.
        patterns: Patterns of names, or of class names after "type:" (fnmatch).
    """
    return any(
        fnmatch.fnmatch(owner, p.removeprefix("type:")) if p.startswith("type:") else fnmatch.fnmatch(name, p)
        for p in patterns
    )


def check_patterns(
    patterns: Mapping[str, Sequence[str]],
    names: Sequence[str],
    class_of: Callable[[str], str],
    modules: Sequence[str],
    suggestions: Sequence[str],
) -> None:
    """Check that each pattern of model.columns matches something.

    Args:
        patterns: The patterns of each group.
        names: Names of all tensors, including frozen ones, because a group may be frozen.
        class_of: Returns the class name of the module that a tensor belongs to, or "".
        modules: Names of all modules.  "body.*" may match a module without parameters.
        suggestions: Names of tensors that the error message lists.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    for group, group_patterns in patterns.items():
        for pattern in group_patterns:
            # general patterns, which begin with "*" or "type:", may match nothing in some models
            is_empty_module = pattern.endswith(".*") and pattern[:-2] in modules
            require(
                any(matches(n, class_of(n), [pattern]) for n in names)
                or is_empty_module
                or pattern.startswith(("*", "type:")),
                f"model.columns.{group}: the pattern {pattern!r} matches no parameter. Remove it, or write a pattern "
                f"that matches one of {listed(suggestions)}",
            )
