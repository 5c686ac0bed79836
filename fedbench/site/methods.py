"""The facts about a method in its source and YAML: header, docstring, options, released code and results."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedbench.report.display import method_name
from fedbench.site.results import results_of, rows_of_tables

DEPARTURE = re.compile(r"(?:Departs from|Departs:|As in the released code).*?(?=\s*Reduces to|$)")  # in a paragraph
RECONSTRUCTED = "A reconstruction: the paper's own text or code could not be had, so that all of it may depart."


@dataclass
class Option:
    """A key of a method's YAML with its default and its comment."""

    key: str
    default: str
    comment: str


@dataclass
class ReleasedCode:
    """A row of docs/released.md: the repository, the commit, and the largest difference from the method's values."""

    repository: str
    commit: str
    difference: str


@dataclass
class Method:
    """The facts about a method that its page shows: names, header, options, released code and results.

    Attributes:
        name: The option of ``algorithm=``.
        paper_name: The name in papers.
        file: The path of the module.
        yaml: The text of the YAML.
        title: The first line of the module's docstring; for a variant, of the YAML.
        header: The docstring of the module.
        departures: The sentences of the header on departures from the paper.
        docstring: The docstring of the class.
        equations: The section of one of the pages docs/equations_*.md.
        page: The name of this page, without the suffix; empty if there is no section.
        options: The options.
        released: The released code that the method equals; None if there is none.
        experiments: The rows of printed tables that run it.
        results: The groups of runs in results/.
    """

    name: str
    paper_name: str
    file: str
    yaml: str
    title: str
    header: str
    departures: str
    docstring: str
    equations: str
    page: str
    options: list[Option]
    released: ReleasedCode | None
    experiments: list[str]
    results: list[dict[str, Any]]


def read_methods(root: Path) -> list[Method]:
    """Return all options of ``algorithm=``, sorted by name.

    Args:
        root: The root of the repository.
    """
    paths = sorted((root / "conf" / "algorithm").glob("*.yaml"))
    released = _released_code(root / "docs" / "released.md")
    equations = _equations(root / "docs")
    rows = rows_of_tables(root / "conf")
    experiments = rows.groupby("algorithm")["experiment"].unique()
    results = results_of(root, [path.stem for path in paths], rows)
    methods = []
    for path in paths:
        name, paper_name = path.stem, method_name(path.stem)
        page, section = equations.get(name, ("", ""))
        text = path.read_text(encoding="utf-8")
        module, _, class_name = yaml.safe_load(text)["_target_"].rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        docstrings = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
        header = ast.get_docstring(tree) or class_name
        title = header.partition("\n")[0]
        # The module of a variant has the title of the method it varies; its own is the first line of its YAML file.
        is_variant = not title.startswith(f"{paper_name}:")
        methods.append(
            Method(
                name=name,
                paper_name=paper_name,
                file=file,
                yaml=text.strip(),
                title=text.partition("\n")[0].removeprefix("# ") if is_variant else title,
                header=header,
                departures=departures(header),
                docstring=docstrings.get(class_name, ""),
                equations=section,
                page=page,
                options=_options(text),
                released=released.get(name),
                experiments=list(experiments.get(name, [])),
                results=results[name],
            )
        )
    return methods


def departures(header: str) -> str:
    """Return the sentences of a module's docstring on departures from the paper.

    They begin with "Departs" or "As in the released code", and end before "Reduces to" or an empty line.  If the
    docstring states that the method is a reconstruction, the sentence RECONSTRUCTED precedes them.

    Args:
        header: The docstring of the module.
    """
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", header)]
    sentences = [RECONSTRUCTED] if "A reconstruction" in header else []
    return " ".join([*sentences, *(match for part in paragraphs for match in DEPARTURE.findall(part))])


def _options(text: str) -> list[Option]:
    """Return the options of a method, with default and comment: the keys of its YAML but ``_target_`` and ``defaults``.

    Args:
        text: The text of conf/algorithm/NAME.yaml.
    """
    rows = re.findall(r"^(\w+):[ \t]*([^#\n]*?)[ \t]*(?:#[ \t]*(.*))?$", text, re.MULTILINE)
    return [Option(*row) for row in rows if row[0] not in ("_target_", "defaults")]


def _released_code(path: Path) -> dict[str, ReleasedCode]:
    """Return the rows of the table in the file ``path``, docs/released.md, by the method in their first column.

    The key is the option of ``algorithm=``.  Each row is of one method.
    """
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\w+) \| ([^|]+) \|$", path.read_text("utf-8"), re.MULTILINE)
    return {name: ReleasedCode(*row) for name, *row in rows}


def _equations(docs: Path) -> dict[str, tuple[str, str]]:
    """Return the page and the section of each method in docs/equations_*.md, by the option of ``algorithm=``.

    The heading of a section names the methods that it is about.
    """
    sections = {}
    for path in sorted(docs.glob("equations_*.md")):
        for section in re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            sections |= dict.fromkeys(re.findall(r"`(\w+)`", heading), (path.stem, text.strip()))
    return sections
