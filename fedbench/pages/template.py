"""page.md as a Jinja template, and the functions that it can call (docs/pages.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.options import ConfigError, require
from fedbench.pages.page import FORMS, Group, Page, float_or_none, groups_of, one_group, read_page
from fedbench.report import paper
from fedbench.report.display import for_readers, label_columns
from fedbench.report.runs import Run
from fedbench.report.summary import over_seeds, score_columns, sort_key
from fedbench.report.table import Column, Spread, Table, as_markdown, format_cell

cached_page = lru_cache(read_page)


class PageFunctions:
    """Functions for page.md.  part: a set of its runs; labels (method, ...) name groups; _columns: a Column per score.

    These arguments are the same in all of them.  ``part`` is a part of the page; None is the first one.  ``names`` are
    values of labels, such as the name of a method, and ``where`` are values by label, such as seed=0: together, they
    choose one group of runs.  ``key`` is a column of runs.csv, such as "last".

    Args:
        page: The page.
        root: The folder of all pages.
    """

    def __init__(self, page: Page, root: Path) -> None:
        self._page = page
        self._root = root
        self._columns = score_columns(page.about["percent"], page.about["target"]) if page.about else {}

    def groups(self, part: str | None = None, order: str = "", **where: Any) -> list[Group]:
        """Return the groups of a part of the page.  A group has the runs that differ only in the seed.

        Args:
            part: The part of the page; None for the first one.
            order: Labels or scores by which groups are sorted, separated by spaces.  A minus sorts in descending order.
            **where: Values that the groups must have, by label.
        """
        groups = groups_of(self._page, part, where)
        for key in reversed(order.split()):
            groups = _sorted(groups, key.removeprefix("-"), -1 if key.startswith("-") else 1)
        return groups

    def spread(self, key: str, *names: Any, part: str | None = None, **where: Any) -> Spread:
        """Return mean and standard deviation over seeds of a score of a group.

        They are in percent if the page shows this score in percent, else as stored.

        Args:
            key: The score, a column of runs.csv such as "last".
            *names: Values of labels that choose the group, such as the name of a method.
            part: The part of the page; None for the first one.
            **where: Values by label that choose the group.
        """
        group = one_group(self._page, part, names, where)
        spread = group.spread(key).scaled(self._columns.get(key, Column(key, key)).scale)
        requested = " ".join([*map(str, names), *(f"{label}={value}" for label, value in where.items())])
        require(
            spread.count > 0,
            f"{self._page.folder}: {requested} has no number {key} in runs.csv: name another score or group",
        )
        return spread

    def value(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """Return the mean over seeds of a score ``key``, a column of runs.csv; in percent if the page shows it so.

        The group is that of ``part`` (None: the first) whose labels have the values ``names`` and ``where`` (by label).
        """
        return self.spread(key, *names, part=part, **where).mean

    def std(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """Return the standard deviation over seeds of a score ``key``, a column of runs.csv; 0 with one seed.

        It is in percent if the page shows the score in percent.

        The group is that of ``part`` (None: the first) whose labels have the values ``names`` and ``where`` (by label).
        """
        return float(self.spread(key, *names, part=part, **where).std or 0.0)

    def each(self, key: str, *names: Any, part: str | None = None, digits: int | None = None, **where: Any) -> str:
        """Return the scores of the runs of a group, one per seed, as text, separated by commas.

        Args:
            key: The score, a column of runs.csv such as "last".
            *names: Values of labels that choose the group, such as the name of a method.
            part: The part of the page; None for the first one.
            digits: The number of decimal places of a score that has no column in tables; None for 0.
            **where: Values by label that choose the group.
        """
        group = one_group(self._page, part, names, where)
        column = self._columns.get(key, Column(key, key, digits))
        values = [run.spread(key).mean * column.scale for run in group.seeds.values()]
        return ", ".join(f"{value:,.{column.digits or 0}f}" for value in values)

    def paired(self, key: str, these: Any, those: Any, part: str | None = None, **where: Any) -> Spread:
        """Return mean and standard deviation over seeds of the difference between two groups of runs, paired by seed.

        Args:
            key: The score, a column of runs.csv such as "last".
            these: The first group: a value of a label, such as the name of a method, or a dict of values by label.
            those: The second group, whose score is subtracted; given like the first one.
            part: The part of the page; None for the first one.
            **where: Values by label that both groups have.
        """
        values = []
        for group in (these, those):
            names, labels = ([], group) if isinstance(group, Mapping) else ([group], {})
            seeds = one_group(self._page, part, names, {**where, **labels}).seeds
            values.append(pd.Series({seed: run.spread(key).mean for seed, run in seeds.items()}))
        differences = (values[0] - values[1]).dropna()
        require(
            len(differences) > 0,
            f"{self._page.folder}: {these} and {those} have no seed in common, so no difference: name other groups",
        )
        return over_seeds(differences).scaled(self._columns[key].scale)

    def curve(self, round: int, *names: Any, key: str = "", part: str | None = None, **where: Any) -> float:
        """Return the mean over seeds of a metric in curves.csv at a round.

        Args:
            round: The round.
            *names: Values of labels that choose the group of runs.
            key: A column of curves.csv; "" for the metric of the page.
            part: The part of the page; None for the first one.
            **where: Values by label that choose the group.
        """
        return self.curve_spread(round, *names, key=key, part=part, **where).mean

    def curve_spread(self, round: int, *names: Any, key: str = "", part: str | None = None, **where: Any) -> Spread:
        """Return mean and standard deviation over seeds of a recorded metric at a round.

        Args:
            round: The round.
            *names: Values of labels that choose the group, such as the name of a method.
            key: A column of curves.csv; "" for the metric of the page.
            part: The part of the page; None for the first one.
            **where: Values by label that choose the group.
        """
        key = key or self._page.about["metric"]
        spread = one_group(self._page, part, names, where).curve_spread(self._page, key, round)
        return spread.scaled(1 if "loss" in key else self._page.scale)

    def printed(self, method: Any, cell: str = "printed", **where: Any) -> float:
        """Return the mean that a paper's table prints for a method.

        Args:
            method: The printed name of the method.
            cell: A name under the key "cells" of page.json, which gives the printed table and the values of its other
                columns.
            **where: Further values by column.
        """
        message = f"the printed table of {cell} has no number of {method} with {where}: name another cell"
        return self._mean(self.printed_spread(method, cell, **where), message)

    def printed_spread(self, method: Any, cell: str = "printed", **where: Any) -> Spread | None:
        """Return a method's mean and standard deviation as printed in a paper; None if the table does not have it.

        Args:
            method: The name of the method in the paper.
            cell: A name under the key "cells" of page.json.  It selects the paper's table, and the row by the values of
                other columns, such as the data set.
            **where: Further values by column.
        """
        columns = {"method": method, **self._page.entry("cells", cell), **where}
        row = self._one_row(pd.DataFrame(paper.read_table(columns.pop("table"))), columns)
        return None if row is None else paper.Cell(row).reported

    def ours(self, method: Any, cell: str) -> float:
        """Return the mean over our runs of a method for a cell of a paper's table, from cells.csv.

        Args:
            method: The printed name of the method.
            cell: A name under the key "cells" of page.json, which gives the printed table and the values of its other
                columns.
        """
        return self._mean(
            self.ours_spread(method, cell), f"cells.csv has no run of {method} for {cell}: name another cell"
        )

    def ours_spread(self, method: Any, cell: str) -> Spread | None:
        """Return mean and standard deviation of our runs of a method, from cells.csv; None if it was not run.

        Args:
            method: The printed name of the method.
            cell: A name under the key "cells" of page.json, which gives the printed table and the values of its other
                columns.
        """
        cells = self._page.cells[self._page.cells["ours"].notna()]
        row = self._one_row(cells, {"method": method, **self._page.entry("cells", cell)})
        return None if row is None else _ours(row)

    def _mean(self, spread: Spread | None, message: str) -> float:
        """Return the mean of a Spread; if it is None, raise ConfigError("FOLDER: MESSAGE") with the page's folder."""
        if spread is None:
            raise ConfigError(f"{self._page.folder}: {message}")
        return spread.mean

    def _one_row(self, table: Any, columns: Mapping[str, Any]) -> Any:
        """Return the only row of a paper's table with certain values.

        Args:
            table: A DataFrame with a row per printed cell.
            columns: The values that the row must have, by column.

        Returns:
            The row as a dict by column; None if there is none.

        Raises:
            ConfigError: There is no such column, or several rows have these values.
        """
        for key, value in columns.items():
            require(
                key in table,
                f"{self._page.folder}: the printed table has no column {key}; name one of {', '.join(map(str, table))}",
            )
            table = table[table[key].astype(str) == str(value)]
        require(
            len(table) < 2,
            f"{self._page.folder}: {len(table)} printed cells have the values {columns}: give values of more columns",
        )
        return table.iloc[0].to_dict() if len(table) else None

    def tau(self, table: str, **where: Any) -> float:
        """Return Kendall's tau-b between the order of methods in a paper's table and in our runs, for one column.

        Args:
            table: The name of the paper's table.
            **where: Values that choose the column, such as dataset="CIFAR10".
        """
        ranking = paper.ranking_table(cells_of(self._page, table))
        rows = [row for row in ranking.rows if all(row.get(k) == v for k, v in where.items())] if ranking else []
        require(
            len(rows) == 1,
            f"{self._page.folder}: tau needs one column of {table}, but {len(rows)} match {where}: give values that "
            "only one column has",
        )
        return rows[0]["tau"]

    def table(self, columns: str, part: str | None = None, order: str = "", has: str = "", title: str = "",
              labels: str = "", titles: Mapping[str, str] | None = None, **where: Any) -> str:  # fmt: skip
        """Return a table of scores in Markdown.  A row is about a group: the runs that differ only in the seed.

        Args:
            columns: The scores, separated by spaces.
            part: The part of the page; None for the first one.
            order: Labels or scores by which rows are sorted, separated by spaces.  A minus sorts in descending order.
            has: A score; groups without it are omitted.
            title: The title.
            labels: The columns that name rows, separated by spaces; "" for those of page.json.
            titles: Headings of columns by key, instead of the default ones.
            **where: Values of labels.
        """
        label_keys = labels.split() or self._page.labels(self._page.part(part))
        keys = columns.split()
        unknown = [key for key in keys if key not in self._columns]
        require(
            not unknown,
            f"{self._page.folder}: no column {', '.join(unknown)}; name some of {', '.join(self._columns)}",
        )
        rows = []
        # a true value under "tuned" marks a method with a dagger: it fine-tunes after the last round only
        for group in self.groups(part, order, **where):
            if not has or group.spread(has).count:
                # counted: the number of clients for which the score is defined, if not all
                client_counts = group.rows["counted"].dropna().unique() if "counted" in group.rows else []
                row: dict[str, Any] = {key: group.spread(key) for key in keys if key not in ("n", "counted")}
                row |= {"n": group.n, "counted": ", ".join(map(str, client_counts)) or None, "tuned": group.tuned}
                rows.append(group.labels | row)
        all_columns = [*label_columns(label_keys), *(self._columns[key] for key in keys)]
        all_columns = [replace(column, title=(titles or {}).get(column.key, column.title)) for column in all_columns]
        # for_readers drops columns that are equal in all rows or repeat others
        return _markdown(for_readers(Table(title, all_columns, rows), label_keys))

    def csv(self, file: str, indent: int = 0) -> str:
        """Return a CSV file as a table in Markdown.  Columns whose cells begin with numbers are aligned to the right.

        Args:
            file: The name of the file in the folder of the page.
            indent: The number of spaces before each line but the first, for a table inside of a list.
        """
        path = self._page.folder / file
        require(path.is_file(), f"page.md shows {path}, but there is no such file: add it, or remove the call")
        frame = pd.read_csv(path, header=None, dtype=str, keep_default_na=False)  # headings may be equal or empty
        head, *rows = frame.values.tolist()
        numeric = [all(re.match(r"\**~?[-+]?\d", cell) for cell in column if cell) for column in zip(*rows)]
        rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
        lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
        return f"\n{' ' * indent}".join(lines)

    def paper(self, table: str, columns: str = "", title: str | None = None) -> str:
        """Return a table in Markdown with the cells of a paper's table that we ran: printed values beside ours.

        Args:
            table: The name of the paper's table.
            columns: The keys of columns, separated by spaces; "" for all.
            title: The title; None for the default one.
        """
        cells = [cell for cell in cells_of(self._page, table) if cell.runs]
        return _markdown(paper.cell_table(table, cells, keys=columns.split() or None, title=title))

    def ranking(self, table: str) -> str:
        """Return a table in Markdown with a row per column of a paper's table.

        A row has Kendall's tau-b between the printed values of the column and ours, over the methods that were run.

        Args:
            table: The name of the paper's table.
        """
        ranking = paper.ranking_table(cells_of(self._page, table))
        require(
            ranking is not None,
            f"{self._page.folder}: no column of {table} has two methods that were run: run more methods, or remove the "
            "call ranking(...)",
        )
        return _markdown(ranking or Table("", []))

    def coverage(self, table: str) -> str:
        """Return a sentence that says how many cells of a paper's printed table have not been run.

        Args:
            table: The name of the printed table, that of its file in fedbench/papers without .csv.
        """
        return paper.commands(table, cells_of(self._page, table), [])[0]  # the other lines are commands

    def figure(self, name: str) -> str:
        """Return the Markdown of an image, "![ALT](NAME.svg)".

        Args:
            name: The name of a figure in page.json.  ALT is its key alt, else the name.
        """
        return f"![{self._page.entry('figures', name).get('alt', name)}]({name}.svg)"

    def picture(self, name: str) -> str:
        """Return the Markdown that shows a picture, given by its file name, which page.json has under "pictures".

        Pictures are files that cannot be drawn from the data of the page; page.json states why.
        """
        return f"![{self._page.entry('pictures', name)['alt']}]({name})"

    def commands(self, part: str | None = None) -> str:
        """Return commands of page.json as a code block in Markdown, one command per line.

        Args:
            part: The name in its key commands; None for the first one.
        """
        name = part or next(iter(self._page.about["commands"]), "")
        return "\n".join(["```bash", *self._page.entry("commands", name), "```"])

    def ran(self, part: str | None = None) -> str:
        """Return a line on the runs of a part: commit, seeds, number of runs per group, machine.

        Successive seeds are written as "0 to 4".

        Args:
            part: The part; None for the first one.
        """
        rows = self._page.runs[self._page.runs["part"] == self._page.part(part)]
        # pandas reads integers as floats if a row has no seed, hence ".0"; a seed that is no number is shown as it is
        seeds = sorted({int(seed) for seed in rows["seed"].dropna() if str(seed).replace(".0", "").isdigit()})
        is_range = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
        text = f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds)) or _unique(rows, "seed")
        n = " or ".join(map(str, sorted({group.n for group in groups_of(self._page, part)})))
        noun = "seed" if text.isdigit() else "seeds"
        return f"Commit {_unique(rows, 'commit')}; {noun} {text}, n = {n}; {_unique(rows, 'machine')}"

    def commit(self, part: str | None = None) -> str:
        """Return the distinct commits of fedbench with which runs were made, separated by commas.

        Args:
            part: The part of the page; None for the first one.
        """
        return _unique(self._page.runs[self._page.runs["part"] == self._page.part(part)], "commit")

    def page(self, name: str) -> PageFunctions:
        """Return the functions of another page, as in ``page("ablations").value("last", "PGFed")``.

        Args:
            name: The name of the other page's folder.
        """
        return PageFunctions(cached_page(self._root / name), self._root)

    def index(self, *names: str) -> str:
        """Return a table in Markdown with a row per page: summary, cells that were run, runs per group, commits.

        Args:
            *names: The folders of all pages, in the order of the rows.

        Raises:
            ConfigError: A page is missing, or is not named.
        """
        folders = {path.parent.name for path in self._root.glob("*/page.json")}
        missing, unknown = sorted(folders - {*names}), sorted({*names} - folders)
        require(
            not missing,
            f"{self._root} has the page {', '.join(missing)}, which index(...) in page.md does not name: add it there",
        )
        require(
            not unknown,
            f"index(...) in page.md names {', '.join(unknown)}, but {self._root} has no such page: correct the name",
        )
        rows = []
        for name in names:
            page = cached_page(self._root / name)
            summary = render(page.about["summary"], page, self._root, f"{page.folder / 'page.json'}: summary")
            groups = [group for part in page.parts for group in groups_of(page, part)]
            n = "; ".join(dict.fromkeys(str(group.n) for group in groups if group.rows["seed"].notna().any()))
            row = {"page": f"[{name}]({name}/README.md)", "what": summary, "form": _forms(page), "n": n}
            rows.append(row | {"commit": _unique(page.runs, "commit", "; ")})
        return _markdown(Table("", [Column(key, key) for key in rows[0]], rows))


def cells_of(page: Page, table: str) -> list[paper.Cell]:
    """Return the cells of a paper's table whose metric a run can have, with our values from cells.csv.

    If cells.csv has several values of a cell, from runs of different settings, the cell occurs several times.

    Args:
        page: The page.
        table: The name of the paper's table.

    Raises:
        ConfigError: cells.csv has a cell that the table does not have.
    """
    keys = ["method", *paper.KEYS]  # the columns that identify a cell
    ours_by_cell: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # rows of cells.csv by the values of keys
    # the rows of the table, without notes on cells that were not run
    run = page.cells[(page.cells["table"] == table) & (page.cells["form"] != "not run")]
    for our_row in run.to_dict("records"):
        ours_by_cell.setdefault(tuple(str(our_row[key]) for key in keys), []).append(our_row)
    cells = []
    for row in (row for row in paper.read_table(table) if paper.is_measured(row["metric"])):
        our_rows = ours_by_cell.pop(tuple(row[key] for key in keys), [])
        cells += [_cell(page, row, our_row) for our_row in our_rows] or [paper.Cell(row)]
    unknown = ", ".join(map(str, ours_by_cell))
    require(
        not ours_by_cell,
        f"{page.folder / 'cells.csv'}: the printed table {table} has no cell {unknown}: remove this row, or write the "
        "page again",
    )
    return cells


def _cell(page: Page, row: dict[str, str], our_row: Mapping[str, Any]) -> paper.Cell:
    """Return a cell of a paper's table with our value.

    Args:
        page: The page.
        row: The cell: its row of the CSV file of the paper's table, a dict from column to text.
        our_row: Its row of the page's cells.csv, a dict from column to value.  Pages of earlier releases lack the
            columns tuned_at_end (1 if our value is after fine-tuning) and counted (text such as "3 of 6": how many
            clients the mean includes; empty for all).
    """
    our_row = {key: None if pd.isna(value) else value for key, value in our_row.items()}
    ours = _ours(our_row)  # mean, standard deviation and number of runs
    return paper.Cell(
        row,
        runs=[Run(page.folder)] * ours.total,  # only their number is used
        overrides=our_row["run_with"] or "",  # how our runs depart from their experiment file
        reduced=our_row["form"] == "reduced",  # run in a smaller setting than the paper's
        ours=ours,
        std_over_seeds=our_row["sigma"],
        tuned=bool(our_row.get("tuned_at_end")),
        clients=our_row.get("counted"),
    )


def _ours(our_row: Mapping[str, Any]) -> Spread:
    """Return mean and standard deviation of our runs for a cell of a printed table.

    Args:
        our_row: The row of cells.csv, from column to value.
    """
    count = int(our_row["ours_n"])  # runs with a defined value, of "ours_of" runs
    total = our_row.get("ours_of", count)
    std = float_or_none(our_row["ours_std"])
    return Spread(float(our_row["ours"]), std, count, count if pd.isna(total) else int(total))


def _sorted(groups: list[Group], key: str, sign: int) -> list[Group]:
    """Return the groups sorted by a label or a score.

    Args:
        groups: Groups of runs that differ only in the seed.
        key: The label, or else the score, a column of runs.csv.
        sign: 1 for ascending numbers, -1 for descending ones.  Text and missing scores are last.
    """

    def order(group: Group) -> tuple[bool, float, str]:
        value = group.labels[key] if key in group.labels else group.spread(key).mean
        is_text, number, text = sort_key(value)
        return (is_text, sign * number, text)

    return sorted(groups, key=order)


def _markdown(table: Table) -> str:
    """Return a table as text in Markdown, without a line break at its end."""
    return as_markdown(table).rstrip("\n")


def _forms(page: Page) -> str:
    """Return how many printed cells of a page have each form, such as "3 full, 1 not run".

    The form is "full" (run in the setting of the paper), "reduced" (in a smaller setting) or "not run".  For a page
    without printed cells, return the different forms of its runs, such as "full, reduced".
    """
    if not len(page.cells):
        return _unique(page.runs, "form")
    counts = page.cells["form"].value_counts()
    return ", ".join(f"{counts[status]} {status}" for status in FORMS if status in counts)


def _unique(rows: Any, key: str, separator: str = ", ") -> str:
    """Return the distinct values of a column as text.

    Args:
        rows: A DataFrame, such as rows of runs.csv.
        key: The name of the column.
        separator: The text between values.

    Returns:
        The values in their order; "" if there is no such column.
    """
    return separator.join(map(str, rows[key].dropna().unique())) if key in rows else ""


def digits(value: Any, digits: int = 1, none: str = "-") -> str:
    """Return a number or a Spread as text.

    Args:
        value: The number or the Spread, which is shown as mean and standard deviation.
        digits: The number of decimal places.
        none: The text for None and NaN.
    """
    number = float(value) if isinstance(value, int) else value
    return format_cell(number, Column(key="", title="", digits=digits, missing=none))


def signed(value: float, digits: int = 1) -> str:
    """Return a number as text with a plus or minus sign and ``digits`` decimal places."""
    return f"{value:+,.{digits}f}"


def render(template: str, page: Page, root: Path, where: str) -> str:
    """Return the text of a Jinja template that is filled with the data of a page.

    Args:
        template: The template, which can call the functions of `PageFunctions`.
        page: The page.
        root: The folder of all pages.
        where: The file of the template, for error messages.

    Raises:
        ConfigError: The template is invalid, or uses data that the page does not have.
    """
    try:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import SandboxedEnvironment
    except ImportError as error:
        raise ConfigError("pages need jinja2: pip install jinja2") from error
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(digits=digits, signed=signed)
    functions = PageFunctions(page, root)
    names = [name for name in dir(functions) if not name.startswith("_")]  # all public methods
    try:
        return environment.from_string(template).render({name: getattr(functions, name) for name in names})
    except (TemplateError, TypeError, KeyError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{where}{f', line {line}' if line else ''}: {error}; correct this call") from error
