"""The public API as its docstrings have it: names, signatures and texts, read from the source."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

PUBLIC = {  # what users call, by heading: names by file
    "From Python and notebooks": {"api/commands.py": "run sweep load", "api/runs.py": "Run Runs"},
    "A method": {
        "algorithms/base.py": "Algorithm",
        "engine/cohort.py": "Cohort",
        "engine/step.py": "Step",
        "engine/training.py": "LocalTraining",
    },
    "Rows": {"core/rows.py": "Rows RowStore", "nn/flat.py": "FlatModel", "engine/federation.py": "Federation"},
    "Data, partitions, tasks": {
        "data/base.py": "Arrays",
        "data/spec.py": "DataSpec",
        "partition/base.py": "Partition",
        "core/split.py": "Split Ragged",
        "tasks/base.py": "Task",
    },
    "Adapters and compression": {"adapters/base.py": "Adapter", "compression/base.py": "Operator"},
    "Optimizers": {"engine/optim.py": "SGD Adam"},
    "Checks of one's own": {
        "testing/algorithm.py": "check_algorithm",
        "testing/model.py": "check_model",
        "testing/partition.py": "check_partition",
        "testing/task.py": "check_task",
        "testing/compression.py": "check_compression",
        "testing/adapter.py": "check_adapter",
    },
    "Out of a run": {"tools/export.py": "open_run client_state client_module predictions save_peft"},
}


@dataclass
class Entry:
    """A function or class: its signature, its docstring, and of a class its public methods."""

    name: str
    signature: str
    text: str
    methods: list[Entry]


def reference(package: Path) -> dict[str, list[tuple[str, list[Entry]]]]:
    """By heading, each file with its entries; KeyError for a name that its file does not define."""
    return {
        heading: [(file, _entries(package / file, names.split())) for file, names in files.items()]
        for heading, files in PUBLIC.items()
    }


def _entries(path: Path, names: list[str]) -> list[Entry]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    by_name = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return [_entry(by_name[name]) for name in names]


def _entry(node: ast.FunctionDef | ast.ClassDef) -> Entry:
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        return Entry(node.name, _signature(node), text, [])
    methods = [of for of in node.body if isinstance(of, ast.FunctionDef) and not of.name.startswith("_")]
    init = next((of for of in node.body if isinstance(of, ast.FunctionDef) and of.name == "__init__"), None)
    signature = _signature(init).replace("__init__", node.name) if init else node.name
    return Entry(node.name, signature, text, [_entry(of) for of in methods if ast.get_docstring(of)])


def _signature(node: ast.FunctionDef) -> str:
    """name(arguments) -> type, without self."""
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{node.name}({arguments}){returns}"
