"""A table of text and of numbers with their spread, and its four forms: text, Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

DAGGER = "†"
FORMATS = ("text", "markdown", "csv", "latex")
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {DAGGER: r"$^\dagger$"} | {c: rf"\{c}" for c in "&%$#_{}"}


@dataclass(frozen=True)
class Spread:
    """``mean`` and ``std`` of ``count`` values out of ``of`` (the rest do not exist); std None: no spread."""

    mean: float
    std: float | None = None
    count: int = 1
    of: int = 1


@dataclass(frozen=True)
class Column:
    """``key`` is its name in a CSV, ``title`` in text, where numbers are times ``scale`` with ``digits``.

    ``digits`` None: as they are.  ``none`` stands for what is missing.  ``words`` says text as a reader is to see it,
    which a CSV keeps as it is; ``mark``: the key under which a row says that a dagger stands behind this cell.
    """

    key: str
    title: str
    digits: int | None = 2
    scale: float = 1
    none: str = "-"
    words: Callable[[str], str] | None = None
    mark: str | None = None


@dataclass
class Table:
    """Rows map a column's key to text, a number, a Spread or None; ``notes`` are lines below."""

    title: str
    columns: list[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(tables: list[Table], form: str) -> str:
    """The tables as one text, ending in a newline; a CSV holds them one below the other, without notes."""
    tables = [replace(table, title=one_line(table.title), notes=[*map(one_line, table.notes)]) for table in tables]
    write = {"text": as_text, "markdown": as_markdown, "csv": as_csv, "latex": as_latex}[form]
    return "\n".join(write(table) for table in tables)


def as_text(table: Table) -> str:
    """Aligned columns; numbers to the right."""
    grid = [[c.title for c in table.columns], *(_shown(table, row) for row in table.rows)]
    widths = [max(len(line[i]) for line in grid) for i in range(len(table.columns))]
    right = [_is_number(table, c) for c in table.columns]
    lines = [table.title] if table.title else []
    for line in grid if table.columns else []:
        cells = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *table.notes]) + "\n"


def as_markdown(table: Table) -> str:
    """A pipe table, its title in bold above."""
    lines = [f"**{table.title}**", ""] if table.title else []
    if table.columns:
        rule = ["---:" if _is_number(table, c) else "---" for c in table.columns]
        for line in ([c.title for c in table.columns], rule, *(_shown(table, row) for row in table.rows)):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    return "\n".join([*lines, *([""] if table.notes else []), *(f"{note}  " for note in table.notes)]) + "\n"


def as_csv(table: Table) -> str:
    """Every number in full and unscaled; a Spread is three columns, key_mean, key_std, key_n."""
    wide = {c.key for c in table.columns if any(isinstance(row.get(c.key), Spread) for row in table.rows)}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ends = ("_mean", "_std", "_n")
    writer.writerow([name for c in table.columns for name in ([c.key + e for e in ends] if c.key in wide else [c.key])])
    for row in table.rows:
        cells: list[Any] = []
        for c in table.columns:
            value = row.get(c.key)
            if c.key not in wide:
                cells.append(_plain(value))
            elif isinstance(value, Spread):
                cells += [_plain(value.mean), _plain(value.std), value.count]
            else:
                cells += [_plain(value), "", ""]
        writer.writerow(cells)
    return out.getvalue()


def as_latex(table: Table) -> str:
    """A table of the package booktabs, its title as the caption; what a dagger means below it, all other notes, and
    what is no table, as comments."""
    notes = [f"% {note}" for note in table.notes if not note.startswith(DAGGER)]
    below = [rf"\par\smallskip\footnotesize {latex(note)}" for note in table.notes if note.startswith(DAGGER)]
    if not table.columns:
        return "\n".join([*([f"% {table.title}"] if table.title else []), *notes]) + "\n"
    kinds = "".join("r" if _is_number(table, column) else "l" for column in table.columns)
    head, *rows = [[c.title for c in table.columns], *(_shown(table, row) for row in table.rows)]
    line, *lines = [" & ".join(map(latex, cells)) + r" \\" for cells in (head, *rows)]
    return "\n".join([
        r"\begin{table}", r"\centering", *([rf"\caption{{{latex(table.title)}}}"] if table.title else []),
        rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", line, r"\midrule", *lines, r"\bottomrule",
        r"\end{tabular}", *below, r"\end{table}", *notes]) + "\n"  # fmt: skip


def latex(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(LATEX.get(c, c) for c in text)


def show(value: Any, column: Column) -> str:
    """A cell as a reader sees it."""
    if isinstance(value, Spread):
        return _show_spread(value, column)
    if isinstance(value, float) and column.digits is not None:
        return column.none if math.isnan(value) else f"{value * column.scale:,.{column.digits}f}"
    if value is None:
        return column.none
    return one_line(column.words(value) if column.words and isinstance(value, str) else str(value))


def one_line(text: str) -> str:
    """The text with line breaks and other control characters written out: a name is no part of a table's form."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _show_spread(value: Spread, column: Column) -> str:
    if not value.count or math.isnan(value.mean):
        return column.none
    text = show(float(value.mean), column)
    if value.std is not None:
        text += " ± " + show(float(value.std), column)
    return text if value.count == value.of else f"{text} ({value.count} of {value.of})"


def _shown(table: Table, row: dict[str, Any]) -> list[str]:
    return [show(row.get(c.key), c) + DAGGER * bool(c.mark and row.get(c.mark)) for c in table.columns]


def _is_number(table: Table, column: Column) -> bool:
    return any(isinstance(row.get(column.key), (int, float, Spread)) for row in table.rows)


def _plain(value: Any) -> Any:
    """A cell of a CSV; text that a spreadsheet would compute has a ' before it."""
    if isinstance(value, str):
        return f"'{one_line(value)}" if value.startswith(("=", "+", "-", "@")) else one_line(value)
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
