"""page.md: the words of a page, with places for what its files hold (Jinja; docs/results.md lists the places).

A number in a page is a place, part of a command or of a name, or stands between ``{% said "why" %}`` and
``{% endsaid %}``, which says that it is from no file of the page. Any other is refused, and so is a typed table.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedbench.core.options import ConfigError, listed, require
from fedbench.pages.figures import make_drawing
from fedbench.pages.groups import Group, alone, groups_of, one_group
from fedbench.pages.printed import cells_of, ours_spread, printed_spread
from fedbench.pages.store import FORMS, Page, check_keys, read_page
from fedbench.pages.tables import column_of, curve_at, make_table
from fedbench.report import paper
from fedbench.report.summary import over_seeds
from fedbench.report.table import Column, Spread, Table, as_markdown, show

SAID = {
    "setting": "what the commands and the configuration say",
    "machine": "when, where and how long",
    "measured": "measured, and in no file of the page",
    "derived": "worked out or rounded by hand from numbers of the page",
    "paper": "from a paper, and not in fedbench/papers",
}
# Digits that are no number: of a name (CIFAR-10, H100, Table 1), of code, of a link.
NO_NUMBER = re.compile(
    r"```.*?```|`[^`\n]*`|^(?: {4}|\t).*$|\]\([^)\n]*\)|<!--.*?-->|https?://\S+"
    r"|\b(?:Tables?|Figures?|Tasks?|Sections?|Algorithms?|Equations?) \d+(?:(?:,| to| and) \d+)*",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(?<![A-Za-z0-9_][-/.])\d[\d.,]*")


class Text(str):
    """What a place gives: only this is printed, so that no constant is taken for a number of the files."""


@lru_cache
def stored(folder: Path) -> Page:
    """A page, read once."""
    return read_page(folder)


class Places:
    """What a template may call, of one page; ``count`` says how many places gave a number."""

    def __init__(self, page: Page, root: Path) -> None:
        self._page, self._root = page, root
        self.count = 0
        self.used: set[str] = set()  # tables, figures, pictures and commands that the template shows

    def page(self, name: str) -> Places:
        """The places of another page."""
        return Places(stored(self._root / name), self._root)

    def index(self, *names: str) -> Text:
        """A table of pages: what each says of itself, its forms, seeds and commits; ConfigError if one is missing."""
        there = {path.parent.name for path in self._root.glob("*/page.json")}
        odd = sorted(there.symmetric_difference(names))
        require(not odd, f"{self._root}: the index and the folders differ in {', '.join(odd)}")
        rows = []
        for name in names:
            page = stored(self._root / name)
            where = f"{page.folder / 'page.json'}: summary"
            require(page.about["summary"] != "", f"{where} is empty: what the page is, for the index")
            other = Places(page, self._root)
            words = render(page.about["summary"], other, where)
            self.count += other.count
            groups = [group for part in page.parts for group in groups_of(page, part)]
            of_groups = [str(group.n) for group in groups if any(row["seed"] is not None for row in group.rows)]
            n, commits = "; ".join(dict.fromkeys(of_groups)), _joined(page.runs, "commit", "; ")
            link = f"[{name}]({name}/README.md)"
            rows.append({"page": link, "what": words, "form": _forms(page), "n": n, "commit": commits})
        return Text(as_markdown(Table("", [Column(key, key) for key in rows[0]], rows)).rstrip("\n"))

    def table(self, name: str, indent: int = 0) -> Text:
        """A table of page.json, as Markdown; in an item of a list its lines after the first are indented."""
        self.used.add(f"table {name}")
        lines = as_markdown(make_table(self._page, name)).rstrip("\n").split("\n")
        return Text(f"\n{' ' * indent}".join(lines))

    def notes(self, name: str) -> Text:
        """What page.json has to say below a table."""
        spec = self._page.about["tables"].get(name, {})
        require("notes" in spec, f"{self._page.folder}: page.json has no notes of a table {name}")
        return Text(as_markdown(Table("", [], notes=spec["notes"])).strip("\n"))

    def figure(self, name: str) -> Text:
        """A figure of page.json, drawn from the page's files."""
        self.used.add(f"figure {name}")
        make_drawing(self._page, name)
        return Text(f"![{self._page.about['figures'][name].get('alt', name)}]({name}.svg)")

    def picture(self, name: str) -> Text:
        """A file that was drawn before and cannot be drawn again from the page's files."""
        pictures = self._page.about["pictures"]
        require(name in pictures, f"{self._page.folder}: page.json has no picture {name}; there are {listed(pictures)}")
        where = f"{self._page.folder}: picture {name}"
        check_keys(pictures[name], ("alt", "why"), where)
        require("why" in pictures[name], f"{where}: why says what it was drawn from, and why it is not drawn again")
        self.used.add(f"picture {name}")
        return Text(f"![{pictures[name]['alt']}]({name})")

    def commands(self, part: str | None = None) -> Text:
        """The commands that made a part, as they were typed."""
        commands = self._page.about["commands"]
        part = part if part is not None else next(iter(commands), "")
        require(
            part in commands, f"{self._page.folder}: page.json has no commands {part}; there are {listed(commands)}"
        )
        self.used.add(f"commands {part}")
        return Text("\n".join(f"    {line}" for command in commands[part] for line in command.split("\n")))

    def ran(self, part: str | None = None) -> Text:
        """Commit, seeds, number of seeds and machine of a part."""
        rows = self._rows(part)
        seeds = sorted({row["seed"] for row in rows if isinstance(row.get("seed"), int)})
        whole = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
        words = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds)) or _joined(rows, "seed")
        n = sorted({group.n for group in self._groups(part)})
        several = "seed" if words.isdigit() else "seeds"
        said = [f"Commit {_joined(rows, 'commit')}", f"{several} {words}, n = {' or '.join(map(str, n))}",
                _joined(rows, "machine")]  # fmt: skip
        return Text("; ".join(said))

    def commit(self, part: str | None = None) -> Text:
        """The commits of a part."""
        return Text(_joined(self._rows(part), "commit"))

    def n(self, *names: Any, part: str | None = None, **where: Any) -> Text:
        """How many seeds a group has, or all groups of a part have."""
        groups = [one_group(self._page, part, names, where)] if names or where else self._groups(part)
        return Text(" or ".join(map(str, sorted({group.n for group in groups}))))

    def coverage(self, table: str) -> Text:
        """How many cells of a printed table are run."""
        return Text(paper.commands(table, cells_of(self._page, table), [])[0])

    def cells(self, table: str, form: str) -> Text:
        """How many cells of a printed table are full, reduced or not run."""
        found = cells_of(self._page, table)
        forms = ["not run" if not cell.runs else "reduced" if cell.reduced else "full" for cell in found]
        return Text(str(forms.count(form)))

    def spread(self, key: str, *names: Any, part: str | None = None, **where: Any) -> Spread:
        """A score of the group with the labels ``names``, in the unit of the page's tables, with its spread over seeds.

        ``where`` says more: seed=0, or a label by its key (or the last part of that).
        """
        shown = column_of(self._page, key)
        value = one_group(self._page, part, names, where).value(shown.column.key, shown.over)
        known = isinstance(value, Spread) and value.count > 0
        require(known, f"{self._page.folder}: {' '.join(map(str, names))} {where} has no number {key}")
        return scaled(value, shown.column.scale)

    def value(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """The mean of a score of a group, in the unit of the page's tables."""
        return self.spread(key, *names, part=part, **where).mean

    def std(self, key: str, *names: Any, part: str | None = None, **where: Any) -> float:
        """The population standard deviation of a score over a group's seeds."""
        found = self.spread(key, *names, part=part, **where).std
        require(found is not None, f"{self._page.folder}: {' '.join(map(str, names))} {where} has no spread of {key}")
        return float(found or 0.0)

    def paired(self, key: str, these: Any, those: Any, part: str | None = None, **where: Any) -> Spread:
        """The difference of two groups' scores (these less those), seed by seed, with its spread over seeds.

        these, those: a group's name, or its labels by key.
        """
        both = []
        for group in (these, those):
            names, labels = ([], group) if isinstance(group, Mapping) else ([group], {})
            found = one_group(self._page, part, names, {**where, **labels})
            both.append({each.rows[0]["seed"]: each for each in alone(found)})
        shown = column_of(self._page, key)
        seeds = sorted(both[0].keys() & both[1].keys())
        require(bool(seeds), f"{self._page.folder}: {these} and {those} have no seed in common")
        pairs = [[group[seed].value(shown.column.key).mean for group in both] for seed in seeds]
        return scaled(over_seeds(a - b for a, b in pairs), shown.column.scale)

    def curve(self, round: int, *names: Any, key: str | None = None, part: str | None = None, **where: Any) -> float:
        """The mean of a recorded metric (the page's, unless one is given) at a round."""
        key = str(key or self._page.about["metric"])
        scale = 100 if self._page.about["percent"] and "loss" not in key else 1
        return scale * curve_at(self._page, one_group(self._page, part, names, where), key, round).mean

    def printed(self, name: Any, column: str = "printed", **where: Any) -> float:
        """The printed mean that a column of page.json shows for a row."""
        asked = column_of(self._page, column).printed
        require(asked is not None, f"{self._page.folder}: the column {column} shows nothing printed")
        found = printed_spread({**(asked or {}), **where}, defaultdict(lambda: name))
        require(found is not None, f"{self._page.folder}: {name} {where} is not printed")
        return float("nan") if found is None else found.mean

    def ours(self, name: Any, column: str) -> float:
        """The mean of ours that a column of page.json shows, from cells.csv, for a row."""
        asked = column_of(self._page, column).ours
        require(asked is not None, f"{self._page.folder}: the column {column} shows nothing of cells.csv")
        found = ours_spread(self._page, asked or {}, defaultdict(lambda: name))
        require(found is not None, f"{self._page.folder}: {name} of {column} is not run")
        return float("nan") if found is None else found.mean

    def tau(self, table: str, **where: Any) -> float:
        """Kendall's tau-b of one column of a printed table."""
        ranking = paper.ranking_table(cells_of(self._page, table))
        rows = [row for row in ranking.rows if all(row.get(k) == v for k, v in where.items())] if ranking else []
        require(len(rows) == 1, f"{self._page.folder}: {len(rows)} rankings of {table} are {where}")
        return rows[0]["tau"]

    def digits(self, value: Any, digits: int = 1) -> Text:
        """A number, or a mean and its spread, with so many digits after the point."""
        require(not isinstance(value, str), f"{value!r} is no number")
        whole = float(value) if isinstance(value, int) else value
        require(isinstance(whole, Spread) or math.isfinite(whole), "a place gives no number")
        self.count += 1
        return Text(show(whole, Column("", "", digits)))

    def signed(self, value: float, digits: int = 1) -> Text:
        """A number with its sign."""
        self.count += 1
        return Text(f"{value:+,.{digits}f}")

    def _groups(self, part: str | None) -> list[Group]:
        return groups_of(self._page, self._page.parts[0] if part is None else part)

    def _rows(self, part: str | None) -> list[dict[str, Any]]:
        part = self._page.parts[0] if part is None else part
        rows = [row for row in self._page.runs if part == row["part"]]
        require(bool(rows), f"{self._page.folder}: runs.csv has no part {part!r}; there are {listed(self._page.parts)}")
        return rows


def scaled(value: Spread, scale: float) -> Spread:
    """A spread in another unit."""
    return Spread(value.mean * scale, None if value.std is None else value.std * scale, value.count, value.of)


def _forms(page: Page) -> str:
    """How many cells of printed tables are full, reduced and not run; without any, what the runs are."""
    forms = [row["form"] for row in page.cells]
    counted = [f"{forms.count(form)} {form}" for form in FORMS if form in forms]
    return ", ".join(counted or dict.fromkeys(row["form"] for row in page.runs))


def _joined(rows: list[dict[str, Any]], key: str, between: str = ", ") -> str:
    return between.join(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))


def render(template: str, places: Places, where: str) -> str:
    """The page's text; ConfigError for a place that is not there, a number that is none, or a table typed by hand."""
    check_words(_fill(template, places, where, blank=True), where)
    places.count = 0
    return _fill(template, places, where)


def check_words(words: str, where: str) -> None:
    """Refuse numbers and tables in what is left of a template without its places and without what is said by hand."""
    code_free = NO_NUMBER.sub("", words)
    table = re.search(r"^\s*\|.*", code_free, re.MULTILINE)
    require(
        table is None, f"{where} has a table typed by hand ({table and table.group()[:60]!r}): put it into a CSV file"
    )
    number = NUMBER.search(code_free)
    if number is not None:
        near = " ".join(code_free[max(0, number.start() - 50) : number.end() + 30].split())
        reasons = ", ".join(SAID)
        raise ConfigError(f"{where}: the number {number.group()} in {near!r} is no place and is not marked as said by "
                          f'hand: {{% said "why" %}} ... {{% endsaid %}}, why is one of {reasons}')  # fmt: skip


def said_by_hand(template: str) -> dict[str, int]:
    """How many numbers of a template are said by hand, by reason."""
    counts: dict[str, int] = {}
    for why, words in re.findall(r'{% said "(\w+)" %}(.*?){% endsaid %}', template, re.DOTALL):
        free = NO_NUMBER.sub("", re.sub(r"{{.*?}}", "", words, flags=re.DOTALL))
        counts[why] = counts.get(why, 0) + len(NUMBER.findall(free))
    return counts


def _fill(template: str, places: Places, where: str, blank: bool = False) -> str:
    jinja, tag = _jinja()

    def finalize(value: Any) -> str:
        require(isinstance(value, Text), f"{where}: a place gives {value!r}; digits(...) writes a number")
        return "" if blank else value

    environment = jinja.sandbox.SandboxedEnvironment(
        extensions=[tag], finalize=finalize, undefined=jinja.StrictUndefined, keep_trailing_newline=True)  # fmt: skip
    environment.filters.update(digits=places.digits, signed=places.signed)
    environment.extend(leave_out=blank)
    names = ("index", "page", "table", "notes", "figure", "picture", "commands", "ran", "commit", "n", "coverage",
             "cells", "spread", "value", "std", "paired", "curve", "printed", "ours", "tau")  # fmt: skip
    known: Mapping[str, Callable[..., Any]] = {name: getattr(places, name) for name in names}
    try:
        return environment.from_string(template).render(**known)
    except (jinja.TemplateError, TypeError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{where}{f', line {line}' if line else ''}: {error}") from error


@lru_cache
def _jinja() -> tuple[Any, Any]:
    """The module jinja2 and the tag ``said``; ConfigError where it is not installed."""
    try:
        import jinja2
        import jinja2.sandbox
        from jinja2 import nodes
        from jinja2.ext import Extension
    except ImportError as error:
        raise ConfigError("pages need jinja2: pip install jinja2") from error

    class Said(Extension):
        """What is said by hand, and why."""

        tags = {"said"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            why = parser.parse_expression()
            body = parser.parse_statements(("name:endsaid",), drop_needle=True)
            return nodes.CallBlock(self.call_method("write", [why]), [], [], body).set_lineno(line)

        def write(self, why: str, caller: Callable[[], str]) -> str:
            require(why in SAID, f"said {why!r}: why is one of {', '.join(SAID)}")
            words = caller()
            return "" if getattr(self.environment, "leave_out", False) else words

    return jinja2, Said
