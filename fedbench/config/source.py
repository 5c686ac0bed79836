"""Finding what a dotted path names in the source files, without importing anything.

Modules are parsed (ast), never executed, and names are followed through imports, re-exports and star imports.
What cannot be followed (a compiled module, a name made at run time) exists but stays opaque.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import get_importer
from typing import Any, NamedTuple

from fedbench.config.conf_tree import nearest
from fedbench.core.options import ConfigError, require

MAX_HOPS = 20  # imports followed for one name; only circular re-exports need more
MISSING: Any = object()


class Definition(NamedTuple):
    """A definition or value and the module whose names it uses; bound: called without its first argument."""

    module: Module
    node: ast.AST
    bound: bool = False


class Import(NamedTuple):
    """``from module import name``, or ``import module`` where name is None."""

    module: str
    name: str | None


class Module:
    """One parsed file: top-level names -> definition, value or import; and its star imports."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.scope: dict[str, ast.AST | Import] = {}
        self.stars: list[str] = []
        for node in _flat(ast.parse(path.read_text(encoding="utf-8")).body):
            self._add(node)

    @property
    def is_package(self) -> bool:
        """Whether the file is a package's __init__.py."""
        return self.path.name == "__init__.py"

    def definitions(self) -> list[str]:
        """Names of the classes and functions defined here."""
        return [n for n, node in self.scope.items() if isinstance(node, ast.ClassDef | ast.FunctionDef)]

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            self.scope[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                self.scope[alias.asname or whole] = Import(whole, None)
        elif isinstance(node, ast.ImportFrom):
            self._add_from(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self.scope.update({t.id: node.value for t in targets if isinstance(t, ast.Name)})
        elif type(node).__name__ == "TypeAlias":  # Python 3.12: type X = ...
            self.scope[node.name.id] = node.value  # type: ignore[attr-defined]

    def _add_from(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node.module or "", node.level)
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(base)
            else:
                self.scope[alias.asname or alias.name] = Import(base, alias.name)

    def _absolute(self, module: str, level: int) -> str:
        if level == 0:
            return module
        parts = self.name.split(".")
        up = level - 1 if self.is_package else level
        return ".".join([*parts[: len(parts) - up], *([module] if module else [])])


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those under if and try (optional imports, TYPE_CHECKING)."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])
        else:
            yield node


def locate(target: str, key: str) -> Definition | None:
    """Where a dotted path is defined; None: it exists, but not in a form that can be read.

    ConfigError, naming ``key``, where there is no such module or no such name in it.
    """
    parts = target.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        name, inside = ".".join(parts[:depth]), parts[depth:]
        module = load(name)
        if module is not None:
            definition = lookup(module, inside)
            require(definition is not MISSING, f"{key}: {_has_no(module, '.'.join(inside))}")
            return definition
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:  # folders without __init__.py have none
            return None  # compiled
    raise ConfigError(
        f"{key}: there is no module for {target!r} (write package.module.Class; a module of your own must be "
        "importable from where you start)"
    )


def _has_no(module: Module, name: str) -> str:
    known = module.definitions()
    hint = nearest(name, known) or f" it has {', '.join(known) or 'no classes'}"
    return f"{module.name} has no {name};{hint}"


@cache
def load(name: str) -> Module | None:
    """The parsed module of a dotted name; None where it has no readable source."""
    path = _source(name)
    try:
        return Module(name, path) if path else None
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _source(name: str) -> Path | None:
    spec = find_spec(name)
    path = Path(spec.origin) if spec and spec.origin else None
    return path if path and path.suffix == ".py" and path.is_file() else None


def find_spec(name: str) -> ModuleSpec | None:
    """importlib's find_spec, except that it never imports the parents."""
    found = list(_modules(name))
    return found[-1][0] if len(found) == name.count(".") + 1 else None


def files_of(name: str) -> list[Path]:
    """Return the files and folders of the modules that an import of a dotted path would run."""
    files = []
    for spec, folders in _modules(name):
        files += map(Path, [*folders, *([spec.origin] if spec.origin and spec.has_location else [])])
    return files


def _modules(name: str) -> Iterator[tuple[ModuleSpec, list[str]]]:
    """Yield the spec of each module of a dotted path and the folders of its submodules, up to the last module."""
    head, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        return
    found = [spec] if spec else []
    for depth in range(len(rest) + 1):
        if not found:
            return
        folders = [folder for spec in found for folder in spec.submodule_search_locations or ()]
        yield found[0], folders
        if depth < len(rest):
            found = _below(folders, ".".join([head, *rest[: depth + 1]]))


def _below(folders: list[str], name: str) -> list[ModuleSpec]:
    """Return the specs of a submodule, found in its parent's folders; without __init__.py, one spec for each folder.

    PathFinder would look up the parent of such a submodule in sys.modules.
    """
    finders = [finder for folder in folders if (finder := get_importer(folder)) is not None]
    specs = [spec for finder in finders if (spec := finder.find_spec(name)) is not None]
    return next(([spec] for spec in specs if spec.loader is not None), specs)


def lookup(module: Module, path: list[str], hops: int = 0) -> Any:
    """Definition; None for a name that cannot be followed; MISSING for one that does not exist."""
    entry, rest = module.scope.get(path[0]), path[1:]
    if hops > MAX_HOPS:
        return None
    if isinstance(entry, Import):
        return _follow(entry, rest, hops)
    if isinstance(entry, ast.ClassDef) and rest:
        return _member(module, entry, rest)
    if entry is not None:
        return None if rest else Definition(module, entry)
    return _elsewhere(module, path, hops)


def _follow(entry: Import, rest: list[str], hops: int) -> Any:
    path = [entry.name, *rest] if entry.name else rest
    name = entry.module
    while path and (find_spec(f"{name}.{path[0]}") if name else True):  # as far as submodules go
        deeper = load(f"{name}.{path[0]}" if name else path[0])
        if deeper is None:
            break
        name, path = deeper.name, path[1:]
    module = load(name) if name else None
    return lookup(module, path, hops + 1) if module and path else None


def _member(module: Module, owner: ast.ClassDef, rest: list[str]) -> Definition | None:
    inside = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    node = inside.get(rest[0])
    if node is None or len(rest) > 1:
        return None
    bound = isinstance(node, ast.FunctionDef) and "staticmethod" not in decorators(node)
    return Definition(module, node, bound)


def _elsewhere(module: Module, path: list[str], hops: int) -> Any:
    """A name that the module does not define itself: a submodule, or behind a star import."""
    if module.is_package and find_spec(f"{module.name}.{path[0]}"):
        return _follow(Import(module.name, path[0]), path[1:], hops)
    for star in module.stars:
        behind = load(star)
        definition = lookup(behind, path, hops + 1) if behind else None
        if definition is not MISSING:
            return definition
    return None if "__getattr__" in module.scope else MISSING


def family(definition: Definition | None) -> set[str] | None:
    """The names of a class, of its bases and of their methods; None: it is no class, or a base cannot be followed."""
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        return None
    known = {definition.node.name, *(n.name for n in definition.node.body if isinstance(n, ast.FunctionDef))}
    for base in definition.node.bases:
        path = words(base.value if isinstance(base, ast.Subscript) else base)
        if path in (["object"], ["ABC"], ["Protocol"], ["Generic"]):
            continue
        above = lookup(definition.module, path) if path else None
        inherited = family(above) if isinstance(above, Definition) else None
        if inherited is None:
            return None
        known |= inherited
    return known


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Last words of the decorators: dataclass for @dataclasses.dataclass(frozen=True)."""
    return {last_word(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}


def last_word(node: ast.AST) -> str:
    """Literal of typing.Literal; '' for what is no name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def words(node: ast.AST) -> list[str]:
    """[nn, Module] of nn.Module; [] for what is no name."""
    if isinstance(node, ast.Attribute):
        inner = words(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []
