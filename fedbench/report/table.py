"""A table of text and of numbers with their spread, as text, Markdown, CSV, LaTeX, JSON or HTML."""

from __future__ import annotations

import html
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedbench.core.options import ConfigError

DataFrame = Series = Any  # pandas is imported at its first use; its type hints refuse much of what it does
DAGGER = "†"
FORMATS = ("text", "markdown", "csv", "latex", "json", "html")
FOR_PROGRAMS = ("csv", "json")  # every number in full, without notes
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
    """A column of a table.

    Attributes:
        key: Its name in rows and in CSV.
        title: Its heading for readers.
        digits: Decimal places for readers; None: all.
        scale: What numbers are multiplied by for readers.
        none: Text for a missing value.
        words: Maps text to what readers see.
        mark: The key of a row that puts a dagger behind this cell.
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
    """Return the tables as one text that ends in a newline."""
    tables = [replace(table, title=one_line(table.title), notes=[*map(one_line, table.notes)]) for table in tables]
    write = {"text": as_text, "markdown": as_markdown, "csv": as_csv, "latex": as_latex, "json": as_json,
             "html": as_html}[form]  # fmt: skip
    return "\n".join(write(table) for table in tables)


def as_text(table: Table) -> str:
    """Return aligned columns; numbers to the right."""
    grid = [[c.title for c in table.columns], *(shown(table, row) for row in table.rows)]
    widths = [max(map(len, cells)) for cells in zip(*grid)]
    right = [_is_number(table, c) for c in table.columns]
    lines = [table.title] if table.title else []
    for line in grid if table.columns else []:
        cells = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *table.notes]) + "\n"


def as_markdown(table: Table) -> str:
    """Return a pipe table, its title in bold above."""
    lines = [f"**{table.title}**", ""] if table.title else []
    if table.columns:
        rule = ["---:" if _is_number(table, c) else "---" for c in table.columns]
        for line in ([c.title for c in table.columns], rule, *(shown(table, row) for row in table.rows)):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    return "\n".join([*lines, *([""] if table.notes else []), *(f"{note}  " for note in table.notes)]) + "\n"


def as_csv(table: Table) -> str:
    """Return CSV; text that a spreadsheet would compute has a ' before it."""

    def quoted(text: str) -> str:
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text

    return numbers(table, quoted).to_csv(index=False, lineterminator="\n")


def as_json(table: Table) -> str:
    """Return a JSON list of the rows."""
    frame = numbers(table)
    rows = frame.where(frame.notna(), None).to_dict("records")
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def as_latex(table: Table) -> str:
    """Return a table of the package booktabs with its title as the caption.

    What a dagger means stands below it.  All other notes, and what is no table, are comments.
    """
    notes = [f"% {note}" for note in table.notes if not note.startswith(DAGGER)]
    if not table.columns:
        return "\n".join([*([f"% {table.title}"] if table.title else []), *notes]) + "\n"
    kinds = "".join("r" if _is_number(table, column) else "l" for column in table.columns)
    style = _texts(table, latex).style.hide(axis="index")
    caption = latex(table.title) or None
    text = style.to_latex(column_format=kinds, hrules=True, position_float="centering", caption=caption)
    below = [rf"\par\smallskip\footnotesize {latex(note)}" for note in table.notes if note.startswith(DAGGER)]
    return "\n".join([text.removesuffix("\\end{table}\n").rstrip(), *below, r"\end{table}", *notes]) + "\n"


def latex(text: str) -> str:
    """Return text as LaTeX prints it."""
    return "".join(LATEX.get(c, c) for c in text)


def as_html(table: Table) -> str:
    """Return an HTML table with its title as the caption and its notes as paragraphs."""
    from pandas.io.formats.style import Styler

    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in table.notes)
    if not table.columns:
        return (f"<p>{html.escape(table.title)}</p>\n" if table.title else "") + notes
    uuid = f"{zlib.crc32(table.title.encode()):08x}"  # the same in every report
    right: dict[Any, Any] = {html.escape(column.title): [{"selector": "td", "props": "text-align: right"}]
             for column in table.columns if _is_number(table, column)}  # fmt: skip
    style = Styler(_texts(table, html.escape), uuid=uuid, cell_ids=False)
    style = style.hide(axis="index").set_caption(html.escape(table.title)).set_table_styles(right)
    return style.to_html() + notes


def numbers(table: Table, quoted: Callable[[str], str] = str) -> DataFrame:
    """Return a table's rows for programs: a Spread is three columns, key_mean, key_std, key_n."""
    wide = {c.key for c in table.columns if any(isinstance(row.get(c.key), Spread) for row in table.rows)}

    def cells(row: dict[str, Any], key: str) -> dict[str, Any]:
        value = row.get(key)
        if key not in wide:
            return {key: quoted(one_line(value)) if isinstance(value, str) else value}
        spread = value if isinstance(value, Spread) else None
        std, count = (spread.std, spread.count) if spread else (None, None)
        return {f"{key}_mean": spread.mean if spread else value, f"{key}_std": std, f"{key}_n": count}

    rows = [{name: cell for c in table.columns for name, cell in cells(row, c.key).items()} for row in table.rows]
    return pandas().DataFrame(rows, columns=None if rows else [c.key for c in table.columns], dtype=object)


def _texts(table: Table, escape: Callable[[str], str]) -> DataFrame:
    """Return the cells as readers see them."""
    cells = [[escape(text) for text in shown(table, row)] for row in table.rows]
    return pandas().DataFrame(cells, columns=[escape(column.title) for column in table.columns])


def pandas() -> Any:
    """Return pandas.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("tables of runs need pandas: pip install 'fedbench-pfl[report]'") from error
    return pandas


def show(value: Any, column: Column) -> str:
    """Return a cell as a reader sees it."""
    if isinstance(value, Spread):
        return _show_spread(value, column)
    if isinstance(value, float) and column.digits is not None:
        return column.none if math.isnan(value) else f"{value * column.scale:,.{column.digits}f}"
    if value is None:
        return column.none
    return one_line(column.words(value) if column.words and isinstance(value, str) else str(value))


def one_line(text: str) -> str:
    """Return the text with line breaks and other control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _show_spread(value: Spread, column: Column) -> str:
    if not value.count or math.isnan(value.mean):
        return column.none
    text = show(float(value.mean), column)
    if value.std is not None:
        text += " ± " + show(float(value.std), column)
    return text if value.count == value.of else f"{text} ({value.count} of {value.of})"


def shown(table: Table, row: dict[str, Any]) -> list[str]:
    """Return the cells of a row as a reader sees them."""
    return [show(row.get(c.key), c) + DAGGER * bool(c.mark and row.get(c.mark)) for c in table.columns]


def _is_number(table: Table, column: Column) -> bool:
    return any(isinstance(row.get(column.key), (int, float, Spread)) for row in table.rows)
