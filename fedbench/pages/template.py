"""page.md as a Jinja template, and the functions that give it numbers from the page's files (docs/results.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.options import ConfigError, listed, require
from fedbench.pages.page import FORMS, Group, Page, curve_at, groups_of, one_group, read_page
from fedbench.report import paper
from fedbench.report.runs import Run
from fedbench.report.summary import over_seeds
from fedbench.report.table import Column, Spread, Table, as_markdown, show
from fedbench.report.words import label_columns, told

stored = lru_cache(read_page)


def known_columns(page: Page) -> dict[str, tuple[Column, str | None]]:
    """Return the columns of scores by name, each with the column that holds its std, or None."""
    scale, digits = (100, 2) if page.about["percent"] else (1, 4)
    target = f"{page.about['target'] * scale:g}" + ("%" if scale == 100 else "")
    titles = {"last": "last", "best": "best", "best_val": "best by val", "worst": "worst tenth", "global": "global"}
    columns = [
        Column("n", "n"),
        Column("counted", "over clients", none="all"),
        *(Column(key, title, digits, scale) for key, title in titles.items()),
        Column("gain_last", "gain@last", digits, scale),
        Column("rounds_to_target", f"rounds to {target}", 1, none="never"),
        Column("seconds_to_target", f"s to {target}", 1, none="never"),
        Column("images_per_s", "images/s", 0),
        Column("mb_up", "MB up"),
        Column("mb_down", "MB down"),
        Column("part_up", "up (% of dense)", scale=100),
        Column("part_down", "down (% of dense)", scale=100),
        Column("mb_to_target", f"MB to {target}", none="never"),
    ]
    return {column.key: (column, "gain_last_clients" if column.key == "gain_last" else None) for column in columns}


class Functions:
    """The functions of a template, of one page."""

    def __init__(self, page: Page, root: Path) -> None:
        self._page, self._root = page, root
        self._columns = known_columns(page) if page.about else {}

    # -- numbers ---------------------------------------------------------------------------------------------
    def groups(self, part: str | None = None, order: str = "", **where: Any) -> list[Group]:
        """Return the groups of a part; order: keys with spaces, a - before a key puts the largest first."""
        groups = groups_of(self._page, part, where)
        for key in reversed(order.split()):
            groups = _sorted(groups, key.removeprefix("-"), -1 if key.startswith("-") else 1)
        return groups

    def spread(self, key: str, *names: Any, part: str | None = None, **where: Any) -> Spread:
        """Return a score of the group with these labels, in the unit of tables, with its spread over seeds."""
        group = one_group(self._page, part, names, where)
        column, over = self._columns.get(key, (Column(key, key), None))
        found = _scaled(group.spread(key, over), column.scale)
        require(found.count > 0, f"{self._page.folder}: {' '.join(map(str, names))} {where} has no number {key}")
        return found

    def value(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """Return the mean over seeds of a score."""
        return self.spread(key, *names, part=part, **where).mean

    def std(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """Return the standard deviation over seeds of a score."""
        return float(self.spread(key, *names, part=part, **where).std or 0.0)

    def each(self, key: str, *names: Any, part: str | None = None, digits: int | None = None, **where: Any) -> str:
        """Return the value of each seed, with commas."""
        group = one_group(self._page, part, names, where)
        column, _ = self._columns.get(key, (Column(key, key, digits), None))
        return ", ".join(
            f"{one.spread(key).mean * column.scale:,.{column.digits or 0}f}" for one in group.seeds.values()
        )

    def paired(self, key: str, these: Any, those: Any, part: str | None = None, **where: Any) -> Spread:
        """Return the difference of two groups (names, or labels by key), seed by seed, with its spread."""
        values = []
        for group in (these, those):
            names, labels = ([], group) if isinstance(group, Mapping) else ([group], {})
            found = one_group(self._page, part, names, {**where, **labels})
            values.append(pd.Series({seed: one.spread(key).mean for seed, one in found.seeds.items()}))
        apart = (values[0] - values[1]).dropna()
        require(len(apart) > 0, f"{self._page.folder}: {these} and {those} have no seed in common")
        return _scaled(over_seeds(list(apart)), self._columns[key][0].scale)

    def curve(self, round: int, *names: Any, key: str = "", part: str | None = None, **where: Any) -> float:
        """Return the mean of a recorded metric (default: the page's) at a round."""
        return self.curve_spread(round, *names, key=key, part=part, **where).mean

    def curve_spread(self, round: int, *names: Any, key: str = "", part: str | None = None, **where: Any) -> Spread:
        """Return a recorded metric at a round with its spread over seeds."""
        key = key or self._page.about["metric"]
        found = curve_at(self._page, one_group(self._page, part, names, where), key, round)
        return _scaled(found, 1 if "loss" in key else self._page.scale)

    def printed(self, method: Any, cell: str = "printed", **where: Any) -> float:
        """Return the printed mean of a method's cell, which page.json names under ``cells``."""
        found = self.printed_spread(method, cell, **where)
        require(found is not None, f"{self._page.folder}: {method} {where} is not printed")
        return float("nan") if found is None else found.mean

    def printed_spread(self, method: Any, cell: str = "printed", **where: Any) -> Spread | None:
        """Return the printed mean and std of a method's cell, None if there is none."""
        wanted = self._wanted(method, cell, where)
        table = pd.DataFrame(paper.read_table(wanted.pop("table")))
        row = self._one(table, wanted)
        return None if row is None else paper.Cell(row).printed

    def ours(self, method: Any, cell: str) -> float:
        """Return our mean of a method's cell, from cells.csv."""
        found = self.ours_spread(method, cell)
        require(found is not None, f"{self._page.folder}: {method} of {cell} is not run")
        return float("nan") if found is None else found.mean

    def ours_spread(self, method: Any, cell: str) -> Spread | None:
        """Return ours of a method's cell, from cells.csv, None if it is not run."""
        cells = self._page.cells[self._page.cells["ours"].notna()]
        row = self._one(cells, self._wanted(method, cell, {}))
        return None if row is None else _ours(row)

    def _wanted(self, method: Any, cell: str, where: Mapping[str, Any]) -> dict[str, Any]:
        cells = self._page.about["cells"]
        require(cell in cells, f"{self._page.folder}: page.json names no cell {cell}; there are {listed(cells)}")
        return {"method": method, **cells[cell], **where}

    def _one(self, table: Any, wanted: Mapping[str, Any]) -> Any:
        for key, value in wanted.items():
            require(key in table, f"{self._page.folder}: the printed table has no column {key}")
            table = table[table[key].astype(str) == str(value)]
        require(len(table) < 2, f"{self._page.folder}: {len(table)} cells are {wanted}: name more columns")
        return table.iloc[0].to_dict() if len(table) else None

    def tau(self, table: str, **where: Any) -> float:
        """Return Kendall's tau-b of one column of a printed table."""
        ranking = paper.ranking_table(cells_of(self._page, table))
        rows = [row for row in ranking.rows if all(row.get(k) == v for k, v in where.items())] if ranking else []
        require(len(rows) == 1, f"{self._page.folder}: {len(rows)} rankings of {table} are {where}")
        return rows[0]["tau"]

    # -- tables ----------------------------------------------------------------------------------------------
    def table(self, columns: str, part: str | None = None, order: str = "", has: str = "", title: str = "",
              labels: str = "", titles: Mapping[str, str] | None = None, **where: Any) -> str:  # fmt: skip
        """Return a table of scores, a row for each group.

        Args:
            columns: Names of scores, with spaces.
            part: The part of the page (default: the first).
            order: Keys by which rows are sorted, see ``groups``.
            has: Leave out groups without this score.
            title: The table's title.
            labels: Columns that name the rows, with spaces (default: those of page.json).
            titles: Headings of columns by key, in place of the usual ones.
            **where: Values of labels that rows must have.
        """
        names = labels.split() or self._page.labels(self._page.part(part))
        odd = [key for key in columns.split() if key not in self._columns]
        require(not odd, f"{self._page.folder}: no column {', '.join(odd)}; there are {', '.join(self._columns)}")
        shown = [self._columns[key] for key in columns.split()]
        rows = []
        for group in self.groups(part, order, **where):
            if not has or group.spread(has).count:
                scores = {c.key: group.spread(c.key, over) for c, over in shown if c.key not in ("n", "counted")}
                others = {"n": group.n, "counted": self._text(group, "counted")}
                rows.append({**group.labels, "tuned": group.tuned, **others, **scores})
        heads = [*label_columns(names), *(column for column, _ in shown)]
        heads = [Column(**{**vars(head), "title": (titles or {}).get(head.key, head.title)}) for head in heads]
        return _markdown(told(Table(title, heads, rows), names))

    def _text(self, group: Group, key: str) -> str | None:
        texts = group.rows[key].dropna().unique() if key in group.rows else []
        return ", ".join(map(str, texts)) or None

    def csv(self, file: str, indent: int = 0) -> str:
        """Return a CSV file as a table; a column whose cells begin with numbers is set to the right."""
        path = self._page.folder / file
        require(path.is_file(), f"{path} is not there; page.md asks for it")
        frame = pd.read_csv(path, header=None, dtype=str, keep_default_na=False)  # headings may be equal, or empty
        head, *rows = frame.values.tolist()
        numbers = [all(re.match(r"\**~?[-+]?\d", cell) for cell in column if cell) for column in zip(*rows)]
        rule = ["---:" if is_number else "---" for is_number in numbers]
        lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
        return f"\n{' ' * indent}".join(lines)

    def paper(self, table: str, columns: str = "", title: str | None = None) -> str:
        """Return the cells of a printed table that were run, beside print; columns: keys with spaces."""
        cells = [cell for cell in cells_of(self._page, table) if cell.runs]
        return _markdown(paper.cell_table(table, cells, wanted=columns.split() or None, title=title))

    def ranking(self, table: str) -> str:
        """Return Kendall's tau of each column of a printed table."""
        found = paper.ranking_table(cells_of(self._page, table))
        require(found is not None, f"{self._page.folder}: no column of {table} has two methods")
        return _markdown(found or Table("", []))

    def coverage(self, table: str) -> str:
        """Return how many cells of a printed table are run."""
        return paper.commands(table, cells_of(self._page, table), [])[0]

    # -- words -----------------------------------------------------------------------------------------------
    def figure(self, name: str) -> str:
        """Return a figure that page.json defines."""
        figures = self._page.about["figures"]
        require(name in figures, f"{self._page.folder}: page.json has no figure {name}; there are {listed(figures)}")
        return f"![{figures[name].get('alt', name)}]({name}.svg)"

    def picture(self, name: str) -> str:
        """Return a picture that cannot be drawn again; page.json says why."""
        pictures = self._page.about["pictures"]
        require(name in pictures, f"{self._page.folder}: page.json has no picture {name}; there are {listed(pictures)}")
        return f"![{pictures[name]['alt']}]({name})"

    def commands(self, part: str | None = None) -> str:
        """Return the commands of a part (default: the first), as they were typed."""
        commands = self._page.about["commands"]
        part = part or next(iter(commands), "")
        require(part in commands, f"{self._page.folder}: page.json has no commands {part}; there are "
                + listed(commands))  # fmt: skip
        return "\n".join(["```bash", *commands[part], "```"])

    def ran(self, part: str | None = None) -> str:
        """Return commit, seeds, number of seeds and machine of a part."""
        rows = self._page.runs[self._page.runs["part"] == self._page.part(part)]
        seeds = sorted({int(seed) for seed in rows["seed"].dropna() if str(seed).replace(".0", "").isdigit()})
        whole = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
        words = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds)) or _joined(rows, "seed")
        n = " or ".join(map(str, sorted({group.n for group in groups_of(self._page, part)})))
        several = "seed" if words.isdigit() else "seeds"
        return f"Commit {_joined(rows, 'commit')}; {several} {words}, n = {n}; {_joined(rows, 'machine')}"

    def commit(self, part: str | None = None) -> str:
        """Return the commits of a part."""
        return _joined(self._page.runs[self._page.runs["part"] == self._page.part(part)], "commit")

    # -- other pages -----------------------------------------------------------------------------------------
    def page(self, name: str) -> Functions:
        """Return the functions of another page."""
        return Functions(stored(self._root / name), self._root)

    def index(self, *names: str) -> str:
        """Return a table of pages: what each is, its forms, seeds and commits."""
        there = {path.parent.name for path in self._root.glob("*/page.json")}
        odd = sorted(there.symmetric_difference(names))
        require(not odd, f"{self._root}: the index and the folders differ in {', '.join(odd)}")
        rows = []
        for name in names:
            page = stored(self._root / name)
            what = render(page.about["summary"], page, self._root, f"{page.folder / 'page.json'}: summary")
            groups = [group for part in page.parts for group in groups_of(page, part)]
            n = "; ".join(dict.fromkeys(str(group.n) for group in groups if group.rows["seed"].notna().any()))
            commits = _joined(page.runs, "commit", "; ") if len(page.runs) else ""
            rows.append({"page": f"[{name}]({name}/README.md)", "what": what, "form": _forms(page), "n": n,
                         "commit": commits})  # fmt: skip
        return _markdown(Table("", [Column(key, key) for key in rows[0]], rows))


def cells_of(page: Page, table: str) -> list[paper.Cell]:
    """Return the cells of a printed table as the page answers them; a cell that is not in cells.csv is not run."""
    rows = [row for row in paper.read_table(table) if paper.is_measured(row["metric"])]
    keys = ["method", *paper.KEYS]
    ours = page.cells[(page.cells["table"] == table) & (page.cells["form"] != "not run")].copy()
    ours["key"] = [tuple(map(str, values)) for values in ours[keys].values]
    lost = set(ours["key"]) - {tuple(row[key] for key in keys) for row in rows}
    require(not lost, f"{page.folder / 'cells.csv'}: {table} has no cell {', '.join(map(str, lost))}")
    cells = []
    for row in rows:
        answers = ours[ours["key"] == tuple(row[key] for key in keys)].to_dict("records")
        cells += [_answered(page, row, answer) for answer in answers] or [paper.Cell(row)]
    return cells


def _answered(page: Page, row: dict[str, str], ours: Mapping[str, Any]) -> paper.Cell:
    known = {key: None if pd.isna(value) else value for key, value in ours.items() if key != "key"}
    value = _ours(ours)
    runs = [Run(page.folder)] * value.of  # only their number counts
    return paper.Cell(row, runs, known["run_with"] or "", known["form"] == "reduced", value, known["sigma"],
                      bool(known.get("tuned_at_end")), known.get("counted"))  # fmt: skip


def _ours(cell: Mapping[str, Any]) -> Spread:
    std, of, count = cell["ours_std"], cell.get("ours_of", float("nan")), int(cell["ours_n"])
    return Spread(float(cell["ours"]), None if pd.isna(std) else float(std), count, count if pd.isna(of) else int(of))


def _sorted(groups: list[Group], key: str, sign: int) -> list[Group]:
    """Sort groups by a label or a score; groups without a number come last."""

    def place(group: Group) -> tuple[bool, float, str]:
        value = group.labels[key] if key in group.labels else group.spread(key).mean
        is_number = isinstance(value, int | float) and value == value
        return (not is_number, sign * value if is_number else 0.0, str(value))

    return sorted(groups, key=place)


def _scaled(value: Spread, scale: float) -> Spread:
    return Spread(value.mean * scale, None if value.std is None else value.std * scale, value.count, value.of)


def _markdown(table: Table) -> str:
    return as_markdown(table).rstrip("\n")


def _forms(page: Page) -> str:
    """Return how many cells are full, reduced and not run; for a page without cells, the forms of its runs."""
    if not len(page.cells):
        return ", ".join(page.runs["form"].unique()) if len(page.runs) else ""
    counts = page.cells["form"].value_counts()
    return ", ".join(f"{counts[form]} {form}" for form in FORMS if form in counts)


def _joined(rows: Any, key: str, between: str = ", ") -> str:
    return between.join(map(str, rows[key].dropna().unique())) if key in rows else ""


def digits(value: Any, digits: int = 1, none: str = "-") -> str:
    """Write a number, or a mean with its spread; ``none`` for None."""
    whole = float(value) if isinstance(value, int) else value
    return show(whole, Column("", "", digits, none=none))


def signed(value: float, digits: int = 1) -> str:
    """Write a number with its sign."""
    return f"{value:+,.{digits}f}"


def render(template: str, page: Page, root: Path, where: str) -> str:
    """Fill a template with a page's numbers.

    Raises:
        ConfigError: The template is wrong, or asks for what the files do not have.
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
    functions = Functions(page, root)
    offered = {name: getattr(functions, name) for name in dir(functions) if not name.startswith("_")}
    try:
        return environment.from_string(template).render(**offered)
    except (TemplateError, TypeError, KeyError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{where}{f', line {line}' if line else ''}: {error}") from error
