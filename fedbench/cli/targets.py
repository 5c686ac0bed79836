"""What a stored configuration would build, and which of it this installation's conf does not name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbench.cli.conf_tree import conf_dirs
from fedbench.core.moved import current


def foreign(stored: Mapping[str, Any], config_dir: str | None) -> list[tuple[str, str]]:
    """(dotted key, target) of what a stored config builds and this installation's conf does not name."""
    known = _targets_of_conf(config_dir)
    return [(key, target) for key, target in _targets(stored) if current(target) not in known]


def own_classes(stored: Mapping[str, Any], config_dir: str | None, run_dir: Path) -> list[str]:
    """Overrides (key=target) that name those classes of a stored config which are the user's own: in Python files below
    the working directory, the run's folder apart.  Nothing is imported."""
    named = []
    for key, target in foreign(stored, config_dir):
        spec = _spec(target.partition(".")[0])
        files = [Path(path).resolve() for path in _files(spec)]
        here, run = Path.cwd().resolve(), run_dir.resolve()
        if any(
            here in path.parents and run not in path.parents and "site-packages" not in path.parts for path in files
        ):
            named.append(f"{key}={target}")
    return named


def _spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except (ImportError, ValueError):
        return None


def _files(spec: ModuleSpec | None) -> list[str]:
    """Where a module's code is: its file, or the folders of its package."""
    if spec is None:
        return []
    return [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin and spec.has_location else [])]


def _targets(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, target) of everything in a config that could be built, inside lists too."""
    for key, value in values.items():
        if key == "_target_":
            yield key, str(value)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from ((f"{key}.{inner}", target) for inner, target in _targets(item))


def _targets_of_conf(config_dir: str | None) -> set[str]:
    files = [path for folder in conf_dirs(config_dir) for path in folder.rglob("*.yaml")]
    return {t for path in files for t in re.findall(r"_target_:\s*['\"]?([\w.]+)", path.read_text("utf-8"))}
