"""Names that other libraries keep private are used in one module for each library, and nowhere else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from torch import nn

MODULES = {
    "fedbench/core/private_torch.py",
    "fedbench/app/private_hydra.py",
    "fedbench/models/_private_open_clip.py",
    "fedbench/data/images/_private_torchvision.py",
}
FILES = sorted(path for folder in ("fedbench", "scripts") for path in (ROOT / folder).rglob("*.py"))
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, whatever they look like
OWNERS = ("self", "cls")


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*?(?<!_)", name)) or name == "_C"


def defined(tree: ast.AST) -> set[str]:
    """Names of functions and classes of a file, and attributes and names that it sets."""
    nodes = list(ast.walk(tree))
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return functions | attributes | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def uses(source: str, ours: set[str]) -> Iterator[str]:
    """What a file uses of other libraries' private names.  ours: the names that the package itself defines."""
    tree = ast.parse(source)
    here = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (is_private(node.attr) or node.attr == "_fused_sgd_"):
            on_self = isinstance(node.value, ast.Name) and node.value.id in OWNERS
            known = node.attr in (ours | here if on_self else here) or node.attr in NAMED_TUPLES
            if not known:
                yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            foreign = [n for n in names if not n.startswith("fedbench.") and any(map(is_private, n.split(".")))]
            if foreign:
                yield f"line {node.lineno}: {foreign[0]}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and re.match(r"_[A-Za-z]", name) and name not in here:
                yield f"line {node.lineno}: {name!r}"
        elif isinstance(node, ast.ClassDef) and node.bases:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and is_private(method.name) and hasattr(nn.Module, method.name):
                    yield f"line {method.lineno}: {method.name} of torch.nn.Module is overridden"


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return set().union(*(defined(ast.parse(path.read_text())) for path in FILES))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stand_in_one_module_each(path: Path, ours: set[str]) -> None:
    name = str(path.relative_to(ROOT))
    found = list(uses(path.read_text(), ours)) if name not in MODULES else []
    assert not found, f"{name} uses what another library keeps private ({', '.join(found)}): see {', '.join(MODULES)}"


@pytest.mark.parametrize(
    "line",
    [
        "from hydra._internal.utils import get_args_parser",
        "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._C._set_grad_enabled(True)",
        "torch._fused_sgd_([], [])",
        "getattr(torch, '_fused_sgd_', None)",
        "module._forward_hooks",
        "class A(nn.Module):\n    def _apply(self, fn):\n        pass",
        "class A(Sampler):\n    def f(self):\n        return self._hidden_of_the_base",
    ],
)
def test_such_uses_are_seen(line: str) -> None:
    assert list(uses(line, set()))


@pytest.mark.parametrize(
    "line",
    [
        "from __future__ import annotations",
        "from fedbench.data._files import download",
        "self._x = 1\nself._x",
        "point._replace(x=1)",
        "cfg._target_",
        "def _f(): ...\nmodule._f()",
    ],
)
def test_what_is_our_own_is_not(line: str) -> None:
    assert not list(uses(line, set()))
