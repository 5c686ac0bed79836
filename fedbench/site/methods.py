"""A method's facts, read from its source and YAML without building anything: header, docstring, options, results."""

from __future__ import annotations

import ast
import csv
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

DEPARTURES = ("Departs", "As in the released code")  # how a header begins to say what is not as in the paper


@dataclass
class Option:
    """A key of a method's YAML: its default and the comment behind it."""

    key: str
    default: str
    note: str


@dataclass
class Method:
    """name: what algorithm= takes.  title: the header's first line.  text: the header's other lines, as they are laid
    out.  departs: those of them that say what is not as in the paper.  about: the class's docstring.  released: a row
    of docs/released.md (code, commit), or None.  runs: of results/, as rows of page, setting, last, best."""

    name: str
    file: str
    yaml: str
    title: str
    text: str
    departs: str
    about: str
    options: list[Option]
    released: tuple[str, str] | None
    runs: list[dict[str, str]]


def methods(root: Path) -> list[Method]:
    """All options of algorithm=, by name."""
    released, runs = _released(root / "docs" / "released.md"), _runs(root / "results")
    return [_method(path, root, released, runs) for path in sorted((root / "conf" / "algorithm").glob("*.yaml"))]


def _method(path: Path, root: Path, released: dict[str, tuple[str, str]], runs: dict[str, list]) -> Method:
    source = path.read_text(encoding="utf-8")
    target = yaml.safe_load(source)["_target_"]
    module, _, name = target.rpartition(".")
    file = root / f"{module.replace('.', '/')}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    title, _, text = (ast.get_docstring(tree) or name).partition("\n")
    classes = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
    return Method(
        path.stem,
        str(file.relative_to(root)),
        source,
        title.strip(),
        text.strip("\n"),
        departures(text),
        classes.get(name, ""),
        _options(source),
        released.get(path.stem),
        [row for found, rows in runs.items() for row in rows if key(found) == key(path.stem)],
    )


def departures(text: str) -> str:
    """The lines of a header from where it says what is not as in the paper, to what it reduces to or an empty line."""
    kept, taking = [], False
    for line in text.splitlines():
        ends = not line.strip() or line.startswith("Reduces to")
        taking = line.startswith(DEPARTURES) or (taking and not ends)
        kept += [line.strip()] if taking else []
    return " ".join(kept)


def key(name: str) -> str:
    """A method's name without the differences of spelling: FedAvg-local, fedavg_local."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _options(source: str) -> list[Option]:
    rows = re.findall(r"^(\w+):[ \t]*([^#\n]*?)[ \t]*(?:#[ \t]*(.*))?$", source, re.MULTILINE)
    return [Option(name, default, note) for name, default, note in rows if name not in ("_target_", "defaults")]


def _released(page: Path) -> dict[str, tuple[str, str]]:
    """The table of docs/released.md: code and commit by method."""
    found = {}
    for names, code, commit in re.findall(
        r"^\| (`[^|]+) \| ([^|]+) \| (\w+) \|$", page.read_text("utf-8"), re.MULTILINE
    ):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), (code, commit))
    return found


def _runs(results: Path) -> dict[str, list[dict[str, str]]]:
    """By method's label, the groups of runs.csv of every page: page, part, n, last and best, means over seeds."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(results.glob("*/runs.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get("status") == "finished" and row.get("last")]
        groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for row in rows:
            labels = [row.get("part") or "", row.get("method") or row.get("name") or ""]
            groups.setdefault(tuple(labels), []).append(row)
        for (part, method), of in groups.items():
            shown = {"page": path.parent.name, "part": part, "runs": str(sum(int(r.get("n") or 1) for r in of))}
            shown |= {score: _mean([r[score] for r in of if r.get(score)]) for score in ("last", "best")}
            found.setdefault(method, []).append(shown)
    return found


def _mean(values: list[str]) -> str:
    """The mean of scores: in % where all are shares."""
    numbers = [float(value) for value in values]
    if not numbers:
        return ""
    mean = sum(numbers) / len(numbers)
    return f"{100 * mean:.2f}" if all(0 <= n <= 1 for n in numbers) else f"{mean:.3g}"
