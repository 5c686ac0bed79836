"""A method's facts, read from its source and YAML without building anything: header, docstring, options."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedbench.report.words import printed
from fedbench.site.results import results_of, rows_of_tables

DEPARTS = re.compile(r"(?:Departs from|Departs:|As in the released code).*?(?=\s*Reduces to|$)")  # of a paragraph
RECONSTRUCTED = "A reconstruction: the paper's own text or code could not be had, so that all of it may depart."


@dataclass
class Option:
    """A key of a method's YAML: its default and the comment behind it."""

    key: str
    default: str
    note: str


@dataclass
class Released:
    """A row of docs/released.md: whose code, at which commit, and the largest difference of a number."""

    code: str
    commit: str
    apart: str


@dataclass
class Method:
    """A method's facts.

    Attributes:
        name: The value of ``algorithm=``.
        printed: Its name in papers.
        file: Its module's path.
        title: The header's first line, or the YAML's for a variant.
        header: The module's docstring.
        departs: The header's sentences on departures from the paper.
        about: The class's docstring.
        equations: Its section of docs/equations.md.
        released: The code that it equals.
        experiments: Rows of printed tables that run it.
        results: Its groups of runs in results/.
    """

    name: str
    printed: str
    file: str
    yaml: str
    title: str
    header: str
    departs: str
    about: str
    equations: str
    options: list[Option]
    released: Released | None
    experiments: list[str]
    results: list[dict[str, Any]]


def methods(root: Path) -> list[Method]:
    """Return all options of algorithm=, by name."""
    paths = sorted((root / "conf" / "algorithm").glob("*.yaml"))
    released = _released(root / "docs" / "released.md")
    equations = _equations(root / "docs" / "equations.md")
    rows = rows_of_tables(root / "conf")
    chosen = rows.groupby("algorithm")["experiment"].unique()
    results = results_of(root, [path.stem for path in paths], rows)
    return [
        _method(path, root, released.get(path.stem), equations.get(path.stem, ""), list(chosen.get(path.stem, [])),
                results[path.stem])
        for path in paths
    ]  # fmt: skip


def _method(
    path: Path,
    root: Path,
    released: Released | None,
    equations: str,
    experiments: list[str],
    results: list[dict[str, Any]],
) -> Method:
    source = path.read_text(encoding="utf-8")
    module, _, name = yaml.safe_load(source)["_target_"].rpartition(".")
    file = root / f"{module.replace('.', '/')}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    header = ast.get_docstring(tree) or name
    classes = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
    shown, title = printed(path.stem), header.partition("\n")[0]
    return Method(
        path.stem,
        shown,
        str(file.relative_to(root)),
        source.strip(),
        title if title.startswith(f"{shown}:") else source.partition("\n")[0].removeprefix("# "),
        header,
        departures(header),
        classes.get(name, ""),
        equations,
        _options(source),
        released,
        experiments,
        results,
    )


def departures(header: str) -> str:
    """What a header says is not as in the paper, from "Departs" to what the method reduces to or an empty line."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", header)]
    said = [found for part in paragraphs for found in DEPARTS.findall(part)]
    return " ".join([RECONSTRUCTED] * ("A reconstruction" in header) + said)


def _options(source: str) -> list[Option]:
    rows = re.findall(r"^(\w+):[ \t]*([^#\n]*?)[ \t]*(?:#[ \t]*(.*))?$", source, re.MULTILINE)
    return [Option(name, default, note) for name, default, note in rows if name not in ("_target_", "defaults")]


def _released(page: Path) -> dict[str, Released]:
    """The table of docs/released.md, by method."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\w+) \| ([^|]+) \|$", page.read_text("utf-8"), re.MULTILINE)
    return {name: Released(code, commit, apart) for name, code, commit, apart in rows}


def _equations(page: Path) -> dict[str, str]:
    """The sections of docs/equations.md, by the methods that their headings name in code."""
    found = {}
    for section in re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", heading), text.strip())
    return found
