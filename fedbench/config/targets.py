"""Find code that a stored configuration would run: unknown classes and trusted pickles.

A class is unknown if no file in this installation's conf folder has it.  Such code runs only if the command repeats it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import get_importer
from typing import Any

from fedbench.config.conf_tree import conf_dirs
from fedbench.config.override_text import value_text
from fedbench.core.moved import current


def foreign(stored: Mapping[str, Any], config_dir: str | None) -> list[tuple[str, str]]:
    """Return (dotted key, target) for each class of a stored configuration that the conf folders do not have.

    Args:
        stored: The stored configuration.
        config_dir: The user's --config-dir; None without.
    """
    in_conf = _targets_of_conf(config_dir)
    # current: paths of earlier releases become those of this one
    return [(key, target) for key, target in _targets(stored) if current(target) not in in_conf]


def trusted(stored: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (dotted key, value) for each option `trust` that a stored configuration sets.

    The option names a file that is read by pickle, which may run code.
    """
    values = {f"{group}.trust": (stored.get(group) or {}).get("trust") for group in ("dataset", "partition")}
    return [(key, value) for key, value in values.items() if value is not None]


def to_repeat(stored: Mapping[str, Any], config_dir: str | None) -> list[str]:
    """Return the overrides that a command must have, so that a stored configuration may run its code.

    Args:
        stored: The stored configuration.
        config_dir: The user's --config-dir; None without.
    """
    return [f"{key}={value_text(value)}" for key, value in [*foreign(stored, config_dir), *trusted(stored)]]


def user_classes(stored: Mapping[str, Any], config_dir: str | None, run_dir: Path) -> list[str]:
    """Return overrides (key=target) for the stored classes that are the user's own.

    Such a class is defined in a Python file in the working directory or below it.  The file is neither in the subfolder
    that contains the run nor a part of fedbench.  No module is imported.

    Args:
        stored: The stored configuration.
        config_dir: The user's --config-dir; None without.
        run_dir: The run folder.
    """
    return [f"{key}={target}" for key, target in foreign(stored, config_dir) if _is_user_class(target, run_dir)]


def _is_user_class(target: str, run_dir: Path) -> bool:
    """Return whether a class is the user's own: defined in a Python file in or below the working directory.

    The subfolder of the working directory that contains the run does not count, nor does fedbench itself.

    Args:
        target: The dotted path of the class.
        run_dir: The run folder.
    """
    modules = _modules(target)  # the files and folders of the package, of the module in it, and so on
    if not modules or not all(modules) or not _defines_class(modules[-1][0], target.split(".")[len(modules) :]):
        return False
    working_dir, run = Path.cwd().resolve(), run_dir.resolve()
    folders = run.relative_to(working_dir).parts if run.is_relative_to(working_dir) else ()
    # the subfolder with the run, which may be copied from another person, with classes of its own
    run_tree = working_dir / folders[0] if folders else run
    package = Path(__file__).resolve().parents[1]
    files = [path.resolve() for paths in modules for path in paths]
    excluded = any(folder in path.parents or folder == path for path in files for folder in (run_tree, package))
    source = modules[-1][0].resolve()
    return not excluded and working_dir in source.parents and "site-packages" not in source.parts


def _modules(target: str) -> list[list[Path]]:
    """Return the files and folders of each module that an import of a dotted path would run, without importing it.

    Args:
        target: The dotted path, package.module.Class.

    Returns:
        A list for the package, one for the module in it, and so on, until a name is not a module.  A module may have
        several folders, as a namespace package.
    """
    head, *rest = target.split(".")
    try:
        first = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        return []
    # specs: what Python knows of the modules of the current name; several if folders of a namespace package have it
    specs, paths_by_depth = [first] if first else [], []
    while specs:
        folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
        files = [spec.origin for spec in specs if spec.origin and spec.has_location]
        paths_by_depth.append([Path(path) for path in [*files, *folders]])
        if len(paths_by_depth) > len(rest):
            break
        importers = [importer for folder in folders if (importer := get_importer(folder)) is not None]
        below = [
            spec for importer in importers if (spec := importer.find_spec(rest[len(paths_by_depth) - 1])) is not None
        ]
        specs = next(([spec] for spec in below if spec.loader is not None), below)  # a file precedes folders
    return paths_by_depth


def _defines_class(path: Path, names: list[str]) -> bool:
    """Return whether a Python file defines a class at its top level, or a classmethod of one.

    Args:
        path: The file.
        names: ["Net"] for a class, or ["Net", "small"] for its classmethod.
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else []
    except (OSError, ValueError, SyntaxError):
        return False
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if len(names) != 2 or names[0] not in classes:
        return len(names) == 1 and names[0] in classes
    methods = [n for n in classes[names[0]].body if isinstance(n, ast.FunctionDef) and n.name == names[1]]
    return any(ast.unparse(mark) == "classmethod" for method in methods for mark in method.decorator_list)


def _targets(values: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, class) for each key ``_target_`` in nested values: ("model._target_", "my.Net")."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        if key == "_target_":
            yield "_target_", str(value)
        yield from ((f"{key}.{inner}", target) for inner, target in _targets(value))


def _targets_of_conf(config_dir: str | None) -> set[str]:
    """Return the dotted paths of all classes under ``_target_`` in the YAML files of conf folders.

    Args:
        config_dir: The user's --config-dir, whose files are read besides those of fedbench; None without.
    """
    files = [path for folder in conf_dirs(config_dir) for path in folder.rglob("*.yaml")]
    return {t for path in files for t in re.findall(r"_target_:\s*['\"]?([\w.]+)", path.read_text("utf-8"))}
