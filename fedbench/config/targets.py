"""Code that a stored configuration would run: classes that this installation's conf does not name, and trusted pickles.

None of it runs before a command repeats it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbench.config.conf_tree import conf_dirs
from fedbench.config.source import files_of, locate
from fedbench.core.moved import current
from fedbench.core.options import ConfigError


def foreign(stored: Mapping[str, Any], config_dir: str | None) -> list[tuple[str, str]]:
    """(dotted key, target) of what a stored config builds and this installation's conf does not name."""
    known = _targets_of_conf(config_dir)
    return [(key, target) for key, target in _targets(stored) if current(target) not in known]


def trusted(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted key, value) of each `trust` that a stored config sets: reading its file may run code."""
    values = {f"{group}.trust": (stored.get(group) or {}).get("trust") for group in ("dataset", "partition")}
    return [(key, str(value)) for key, value in values.items() if value is not None]


def to_repeat(stored: Mapping[str, Any], config_dir: str | None) -> list[tuple[str, str]]:
    """Return (dotted key, value) of all that a command must repeat before a stored config is used."""
    return [*foreign(stored, config_dir), *trusted(stored)]


def as_word(key: str, value: str) -> str:
    """Return key=value as an override, quoted unless its characters are plain in Hydra's grammar."""
    text = value.replace("'", "\\'")
    return f"{key}={value}" if re.fullmatch(r"[\w.\-/]+", value) else f"{key}='{text}'"


def own_classes(stored: Mapping[str, Any], config_dir: str | None, run_dir: Path) -> list[str]:
    """Return overrides (key=target) for the stored classes that are the user's own.

    Such a class is defined in a Python file below the working directory.  The file is neither in the subfolder that
    contains the run nor a part of fedbench.  Nothing is imported.
    """
    return [f"{key}={target}" for key, target in foreign(stored, config_dir) if _is_own(target, run_dir)]


def _is_own(target: str, run_dir: Path) -> bool:
    try:
        found = locate(target, "_target_")
    except ConfigError:
        return False
    if found is None or not (isinstance(found.node, ast.ClassDef) or found.bound):
        return False  # a function or an imported name, such as os.system
    here, run = Path.cwd().resolve(), run_dir.resolve()
    inside = run.relative_to(here).parts if run.is_relative_to(here) else ()
    given = here / inside[0] if inside else run  # the folder that came with the run, if another person made it
    package = Path(__file__).resolve().parents[1]
    files = [found.module.path.resolve(), *(path.resolve() for path in files_of(target))]
    elsewhere = any(folder in path.parents for path in files for folder in (given, package))
    return not elsewhere and here in files[0].parents and "site-packages" not in files[0].parts


def _targets(values: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, target) of everything in a config that could be built, inside lists too."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        if key == "_target_":
            yield "_target_", str(value)
        yield from ((f"{key}.{inner}", target) for inner, target in _targets(value))


def _targets_of_conf(config_dir: str | None) -> set[str]:
    files = [path for folder in conf_dirs(config_dir) for path in folder.rglob("*.yaml")]
    return {t for path in files for t in re.findall(r"_target_:\s*['\"]?([\w.]+)", path.read_text("utf-8"))}
