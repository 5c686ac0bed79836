"""The layout of a row: the names, shapes and columns of a model's numbers.

A row [P] is [trained | extras | buffers].  Trained: the module's parameters that require a gradient, in order.
Extras: columns that a method adds.  Buffers: float buffers such as BatchNorm's running statistics; they are sent and
averaged, and never differentiated.
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
    """The parameters in a message: a whole row, or some of its columns.

    Attributes:
        spans: First column of each parameter, the column after its last, and its shape.
        parameters: Numbers of all parameters.  Buffers, such as running variances, come behind them.
    """

    spans: Mapping[str, tuple[int, int, tuple[int, ...]]]
    parameters: int


class RowLayout:
    """The layout of rows.

    Args:
        trained: The module's parameters that learn.
        extras: The columns that a method added.
        buffers: The module's running statistics.

    Attributes:
        shapes: Shape of each named tensor.
        sizes: Its number of columns.
        spans: Its first column, and the column after its last.
        size: P.
        trained: The columns that learn.
        all: All columns.
        columns: The named groups of columns.
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
        learns = sum(t.numel() for t in {**trained, **extras}.values())
        self.trained, self.all = Columns([(0, learns)]), Columns([(0, self.size)])
        self.columns: dict[str, Columns] = {}

    def group_columns(self, patterns: Mapping[str, Sequence[str]], class_of: Callable[[str], str]) -> None:
        """Make the named groups of columns.

        Args:
            patterns: Of each group, patterns of names (fnmatch), or "type:*Norm*" for the parameters of such modules.
            class_of: Returns the class name of the module that a tensor belongs to, or "".
        """
        self.columns = {
            group: Columns(span for n, span in self.spans.items() if matches(n, class_of(n), some))
            for group, some in patterns.items()
        }

    def without(self, name: str) -> Columns:
        """Return every column, buffers included, that is not in the group: without("head") is the base."""
        return self.columns[name].rest(self.size)

    def group(self, name: str, needed_by: str) -> Columns:
        """Return columns[name], or raise one sentence that this model declares no such group."""
        require_group(name, needed_by, self.columns)
        return self.columns[name]

    @property
    def extended(self) -> bool:
        """Whether a method added columns, which the module's own forward pass does not use."""
        return bool(self._extra_names)

    def init_row(self) -> Tensor:
        """Return the module's own initialization as a row.  # [P]"""
        return torch.cat([t.detach().reshape(-1).float() for t in self._initial.values()])

    def parameter_spans(self, width: int) -> list[tuple[int, int]]:
        """Return the spans of the parameters in rows of this width: the model's, or one span of another width."""
        return list(self.spans.values()) if width == self.size else [(0, width)]

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views of rows [..., P] by name, each [..., *shape]."""
        lead = rows.shape[:-1]
        parts = rows.split(self.sizes, dim=-1)
        return {n: part.view((*lead, *shape)) for (n, shape), part in zip(self.shapes.items(), parts)}

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Return a row [P] as the module's state_dict, for module.load_state_dict(..., strict=False)."""
        return {n: t.clone() for n, t in self.named(row).items() if n not in self._extra_names}

    def message_layout(self, width: int) -> MessageLayout | None:
        """Return the layout of messages of this width, or None if it is ambiguous.

        A message may be a row, a group of columns, all columns without those of a group, or the trained columns of one
        of these.
        """
        parts = [self.all, *self.columns.values(), *(self.without(name) for name in self.columns)]
        parts += [part & self.trained for part in parts]
        names = {tuple(self._names_in(part)) for part in parts if part.size == width}
        if len(names) != 1:
            return None
        spans, at = {}, 0
        for name in names.pop():
            if name in self.buffer_names:
                break  # they are the last ones of every row
            a, b = self.spans[name]
            spans[name] = (at, at + b - a, tuple(self.shapes[name]))
            at += b - a
        return MessageLayout(spans, at)

    def _names_in(self, part: Columns) -> list[str]:
        return [name for name, span in self.spans.items() if part.meets(*span)]


def matches(name: str, owner: str, patterns: Sequence[str]) -> bool:
    """Return whether a tensor's name, or the class name of its module (`type:`), matches one of the patterns."""
    return any(
        fnmatch.fnmatch(owner, p.removeprefix("type:")) if p.startswith("type:") else fnmatch.fnmatch(name, p)
        for p in patterns
    )


def refuse_dead_patterns(
    patterns: Mapping[str, Sequence[str]],
    names: Sequence[str],
    class_of: Callable[[str], str],
    modules: Sequence[str],
    spans: Sequence[str],
) -> None:
    """Raise ConfigError for a pattern of model.columns that matches nothing.

    Args:
        patterns: The patterns of each group.
        names: Names of all tensors, frozen ones included, because a group may be frozen.
        class_of: As in `RowLayout.group_columns`.
        modules: Names of all modules.  "body.*" may match a body without parameters.
        spans: The names that the error message lists.
    """
    for group, some in patterns.items():
        for pattern in some:
            is_empty_module = pattern.endswith(".*") and pattern[:-2] in modules
            require(
                any(matches(n, class_of(n), [pattern]) for n in names)
                or is_empty_module
                or pattern.startswith(("*", "type:")),
                f"model.columns.{group}: the pattern {pattern!r} matches no parameter; "
                f"the parameters are {listed(spans)}",
            )
