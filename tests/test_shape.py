"""The package stays readable: functions fit a screen, files are short, and few names are at the root."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

LINES_OF_A_FUNCTION = 60
PARAMETERS = 10
LINES_OF_A_FILE = 400
MODULES_AT_THE_ROOT = 8
PACKAGE = ROOT / "fedbench"
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below a node with its dotted name: methods and functions inside functions too."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, Function | ast.ClassDef) else prefix.removesuffix(".")
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if name else "")


def parameters(function: Function) -> int:
    """Without self and cls; *args and **kwargs count as one each."""
    given = function.args
    named = [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return len([a for a in named if a not in ("self", "cls")]) + (given.vararg is not None) + (given.kwarg is not None)


def is_compiled(name: str, file: Path) -> bool:
    """A loop that numba compiles, which takes arrays and numbers one by one."""
    return file.name == "compiled.py" and name.endswith(".loop")


def is_configuration(name: str, file: Path) -> bool:
    """A constructor whose parameters are the keys of an option in conf/."""
    return name.endswith("__init__") and file.parent.name in ("algorithms", "models", "data", "partition")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_and_its_functions_are_short(file: Path) -> None:
    text = file.read_text()
    wrong = []
    if (lines := len(text.splitlines())) > LINES_OF_A_FILE:
        wrong.append(f"the file has {lines} lines, more than {LINES_OF_A_FILE}: split it")
    for name, function in functions(ast.parse(text)):
        assert function.end_lineno is not None
        if (lines := function.end_lineno - function.lineno + 1) > LINES_OF_A_FUNCTION:
            wrong.append(f"{name} has {lines} lines, more than {LINES_OF_A_FUNCTION}: split it")
        if (count := parameters(function)) > PARAMETERS and not (
            is_configuration(name, file) or is_compiled(name, file)
        ):
            wrong.append(f"{name} has {count} parameters, more than {PARAMETERS}: describe some by one object")
    assert not wrong, "\n".join(wrong)


def test_few_modules_are_at_the_root() -> None:
    """Commands and the package itself; everything else is in a wing."""
    modules = sorted(file.name for file in PACKAGE.glob("*.py"))
    assert len(modules) <= MODULES_AT_THE_ROOT, f"{len(modules)} modules at the root of fedbench/: {', '.join(modules)}"


def test_the_measures_are_taken_right() -> None:
    source = "class A:\n    def f(self, a, *b, c=1, **d):\n        def g():\n            pass\n        return g\n"
    found = dict(functions(ast.parse(source)))
    assert list(found) == ["A.f", "A.f.g"] and parameters(found["A.f"]) == 4
