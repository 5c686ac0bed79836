"""Tables of text and of means with their spread, written as text, Markdown, CSV, LaTeX, JSON or HTML."""

from __future__ import annotations

import html
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedbench.core.options import ConfigError

DataFrame = Series = Any  # pandas is imported when it is first used; its type hints reject correct calls
DAGGER = "†"
MACHINE_FORMATS = ("csv", "json")  # unrounded numbers, without notes
OBJECT = "object"  # the format of --json: all tables and notes, unrounded
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {DAGGER: r"$^\dagger$"} | {c: rf"\{c}" for c in "&%$#_{}"}


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of those of several values that are defined, and their number.

    Attributes:
        mean: The mean of the defined values, those that are neither None nor NaN.
        std: Their standard deviation; None if it is unknown or there are fewer than two of them.
        count: The number of defined values.
        total: The number of all values.
    """

    mean: float
    std: float | None = None
    count: int = 1
    total: int = 1

    def scaled(self, factor: float) -> Spread:
        """Return a Spread whose mean and std are multiplied by a factor; a std of None stays None."""
        return replace(self, mean=self.mean * factor, std=None if self.std is None else self.std * factor)


@dataclass(frozen=True)
class Column:
    """A column of a table: its key in the rows, its heading, and how its values are formatted.

    Attributes:
        key: The key of its cells in rows, and its heading in CSV and JSON.
        title: The heading in the other formats.
        digits: The number of decimal places; None for all.  CSV and JSON have all.
        scale: A factor for numbers, 100 for fractions that are shown in percent.  CSV and JSON have unscaled numbers.
        missing: The text of a missing value.
        display: A function from the text of a cell to the displayed text; None to display it unchanged.
        dagger_key: The key of a flag in the row.  If the flag is true, a dagger follows the cell.
    """

    key: str
    title: str
    digits: int | None = 2
    scale: float = 1
    missing: str = "-"
    display: Callable[[str], str] | None = None
    dagger_key: str | None = None


@dataclass
class Table:
    """A table: title, columns, rows (a dict from column key to cell each), and notes below it.

    Attributes:
        title: The title; may be empty.
        columns: The columns; may be empty for a table of notes only.
        rows: One dict per row, from the key of a column to text, a number, a Spread or None.
        notes: The lines below the table.
        name: The name of the table in the JSON object of ``--json``, such as "results".
    """

    title: str
    columns: list[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    name: str = ""


def render(tables: list[Table], table_format: str) -> str:
    """Return the tables as one text that ends in a newline.

    Args:
        tables: The tables.
        table_format: The format: "text", "markdown", "csv", "latex", "json" or "html".
    """
    texts = []
    for table in tables:
        notes = [escape_control(note) for note in table.notes]
        # FORMATS: from format to the function that returns a table as text
        texts.append(FORMATS[table_format](replace(table, title=escape_control(table.title), notes=notes)))
    return "\n".join(texts)


def as_text(table: Table) -> str:
    """Return the table as text: its title, aligned columns (those of numbers to the right), and its notes."""
    lines = [table.title] if table.title else []
    if table.columns:
        grid = [[column.title for column in table.columns], *(format_row(table, row) for row in table.rows)]
        widths = [max(map(len, cells)) for cells in zip(*grid)]
        numeric = [_is_numeric(table, column) for column in table.columns]
        for line in grid:
            cells = [t.rjust(w) if right else t.ljust(w) for t, w, right in zip(line, widths, numeric)]
            lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *table.notes]) + "\n"


def as_markdown(table: Table) -> str:
    """Return the table in Markdown, with its title in bold above it, and its notes below."""
    lines = [f"**{table.title}**", ""] if table.title else []
    if table.columns:
        rule = ["---:" if _is_numeric(table, column) else "---" for column in table.columns]
        titles = [column.title for column in table.columns]
        for line in (titles, rule, *(format_row(table, row) for row in table.rows)):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    lines += ["", *(f"{note}  " for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """Return the table as CSV, without title and notes.

    An apostrophe precedes text that a spreadsheet would evaluate as a formula.
    """

    def quote(text: str) -> str:
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text

    return to_frame(table, quote).to_csv(index=False, lineterminator="\n")


def as_json(table: Table) -> str:
    """Return the table as a JSON list with one object per row, without title and notes."""
    frame = to_frame(table)
    return json.dumps(frame.where(frame.notna(), None).to_dict("records"), indent=1, ensure_ascii=False) + "\n"


def as_latex(table: Table) -> str:
    """Return the table in LaTeX for the package booktabs, with its title as caption.

    The note on the dagger (of fine-tuned methods) is printed below the table.  Other notes are comments.
    """
    comments = [f"% {note}" for note in table.notes if not note.startswith(DAGGER)]
    if not table.columns:
        return "\n".join([*([f"% {table.title}"] if table.title else []), *comments]) + "\n"
    alignment = "".join("r" if _is_numeric(table, column) else "l" for column in table.columns)
    style = _text_frame(table, escape_latex).style.hide(axis="index")
    caption = escape_latex(table.title) or None
    text = style.to_latex(column_format=alignment, hrules=True, position_float="centering", caption=caption)
    daggers = [rf"\par\smallskip\footnotesize {escape_latex(n)}" for n in table.notes if n.startswith(DAGGER)]
    return "\n".join([text.removesuffix("\\end{table}\n").rstrip(), *daggers, r"\end{table}", *comments]) + "\n"


def escape_latex(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    return "".join(LATEX.get(c, c) for c in text)


def as_html(table: Table) -> str:
    """Return an HTML table with its title as caption and its notes as paragraphs."""
    from pandas.io.formats.style import Styler

    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in table.notes)
    if not table.columns:
        return (f"<p>{html.escape(table.title)}</p>\n" if table.title else "") + notes
    numeric = [html.escape(column.title) for column in table.columns if _is_numeric(table, column)]
    alignment: dict[Any, Any] = {title: [{"selector": "td", "props": "text-align: right"}] for title in numeric}
    identifier = f"{zlib.crc32(table.title.encode()):08x}"  # pandas' random one would differ between equal reports
    style = Styler(_text_frame(table, html.escape), uuid=identifier, cell_ids=False).hide(axis="index")
    return style.set_caption(html.escape(table.title)).set_table_styles(alignment).to_html() + notes


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
    "json": as_json,
    "html": as_html,
}


def to_frame(table: Table, quote: Callable[[str], str] = str) -> DataFrame:
    """Return the unrounded rows as a DataFrame.

    Args:
        table: The table.
        quote: A function that is applied to cells of text.

    Returns:
        A column per key.  A key with a Spread in any row has three columns: key_mean, key_std and key_n.
    """
    columns: dict[str, list[Any]] = {}
    for key in (column.key for column in table.columns):
        cells = [row.get(key) for row in table.rows]
        spreads = [cell if isinstance(cell, Spread) else None for cell in cells]
        if any(spreads):
            columns[f"{key}_mean"] = [spread.mean if spread else cell for spread, cell in zip(spreads, cells)]
            columns[f"{key}_std"] = [spread.std if spread else None for spread in spreads]
            columns[f"{key}_n"] = [spread.count if spread else None for spread in spreads]
        else:
            columns[key] = [quote(escape_control(cell)) if isinstance(cell, str) else cell for cell in cells]
    return pandas().DataFrame(columns, dtype=object)


def as_object(tables: list[Table]) -> dict[str, Any]:
    """Return the unrounded tables and their notes as the JSON object of ``--json`` has them.

    Args:
        tables: The tables.

    Returns:
        "tables": a dict per table with columns; and "notes": the lines below and between the tables.  A cell with a
        Spread is a dict with mean, std, n (number of defined values) and total.
    """
    return {
        "tables": [_table_object(table) for table in tables if table.columns],
        "notes": [line for table in tables for line in ([] if table.columns else [table.title]) + table.notes if line],
    }


def _table_object(table: Table) -> dict[str, Any]:
    """Return a table for JSON: a dict of name, title, columns (list of {key, title}) and rows (dicts by column)."""

    def cell(value: Any) -> Any:
        if isinstance(value, Spread):
            return {"mean": value.mean, "std": value.std, "n": value.count, "total": value.total}
        return value

    columns = [{"key": column.key, "title": column.title} for column in table.columns]
    rows = [{column.key: cell(row.get(column.key)) for column in table.columns} for row in table.rows]
    return {"name": table.name, "title": table.title, "columns": columns, "rows": rows}


def _text_frame(table: Table, escape: Callable[[str], str]) -> DataFrame:
    """Return the formatted cells as a DataFrame of text.

    Args:
        table: The table.
        escape: A function that escapes the special characters of the output format, for cells and headings.
    """
    cells = [[escape(text) for text in format_row(table, row)] for row in table.rows]
    return pandas().DataFrame(cells, columns=[escape(column.title) for column in table.columns])


def pandas() -> Any:
    """Return the module pandas.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("tables of runs need pandas: pip install 'fedbench-pfl[report]'") from error
    return pandas


def format_cell(value: Any, column: Column) -> str:
    """Return the text of a cell, without line breaks.

    Args:
        value: Text, a number, a Spread, or None.  Floats and Spreads are scaled and rounded, integers are not.
        column: The column, with the scale, the digits, and the text for None and NaN.

    Returns:
        The text, such as "93.25" or, for a Spread, "93.25 ± 0.40"; with "(2 of 3)" behind it if values are undefined.
    """
    if isinstance(value, Spread):
        if not value.count or math.isnan(value.mean):
            return column.missing
        text = format_cell(float(value.mean), column)
        if value.std is not None:
            text += " ± " + format_cell(float(value.std), column)
        return text if value.count == value.total else f"{text} ({value.count} of {value.total})"
    if isinstance(value, float) and column.digits is not None:
        return column.missing if math.isnan(value) else f"{value * column.scale:,.{column.digits}f}"
    if value is None:
        return column.missing
    return escape_control(column.display(value) if column.display and isinstance(value, str) else str(value))


def escape_control(text: str) -> str:
    """Return the text with line breaks and other control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_row(table: Table, row: dict[str, Any]) -> list[str]:
    """Return the texts of a row's cells, in the order of the columns.

    A dagger follows a cell if the row has a true value under the column's ``dagger_key``: its method fine-tunes.
    """
    daggers = [DAGGER if column.dagger_key and row.get(column.dagger_key) else "" for column in table.columns]
    return [format_cell(row.get(column.key), column) + dagger for column, dagger in zip(table.columns, daggers)]


def _is_numeric(table: Table, column: Column) -> bool:
    """Return whether any cell of a column is a number or a Spread."""
    return any(isinstance(row.get(column.key), (int, float, Spread)) for row in table.rows)
