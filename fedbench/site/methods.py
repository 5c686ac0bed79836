"""A method's facts, read from its source and YAML without building anything: header, docstring, options."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedbench.report.words import printed
from fedbench.site.results import Result, results_of

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
    """name: what algorithm= takes.  printed: what papers call it.  title: the header's first line, or of a variant the
    YAML's.  text: the header's other lines, as they are laid out.  departs: those of them that say what is not as in
    the paper.  about: the class's docstring.  released: the code that it equals, or None.  results: what results/ has
    of it."""

    name: str
    printed: str
    file: str
    yaml: str
    title: str
    text: str
    departs: str
    about: str
    options: list[Option]
    released: Released | None
    results: list[Result]


def methods(root: Path) -> list[Method]:
    """All options of algorithm=, by name."""
    released, paths = _released(root / "docs" / "released.md"), sorted((root / "conf" / "algorithm").glob("*.yaml"))
    results = results_of(root, [path.stem for path in paths])
    return [_method(path, root, released.get(path.stem), results[path.stem]) for path in paths]


def _method(path: Path, root: Path, released: Released | None, results: list[Result]) -> Method:
    source = path.read_text(encoding="utf-8")
    target = yaml.safe_load(source)["_target_"]
    module, _, name = target.rpartition(".")
    file = root / f"{module.replace('.', '/')}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    title, _, text = (ast.get_docstring(tree) or name).partition("\n")
    classes = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
    shown = printed(path.stem)
    return Method(
        path.stem,
        shown,
        str(file.relative_to(root)),
        source,
        title.strip() if title.startswith(f"{shown}:") else source.partition("\n")[0].removeprefix("# "),
        text.strip("\n"),
        departures(f"{title}\n{text}"),
        classes.get(name, ""),
        _options(source),
        released,
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
