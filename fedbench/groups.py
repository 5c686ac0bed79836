"""The conf folder: where it is and what its groups offer.  Imports nothing heavy: --help is instant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedbench.options import ConfigError

GROUPS = ("dataset", "partition", "model", "algorithm", "optimizer", "hardware", "tracking", "experiment")


def find_conf_dir() -> Path:
    """The folder with config.yaml: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the conf folder of fedbench is missing (looked beside and inside {package})")


def conf_dirs(extra: str | None = None) -> list[Path]:
    """Ours, and the user's --config-dir where one is given."""
    return [find_conf_dir(), *([Path(extra).resolve()] if extra else [])]


def group_options(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """Names of a group's options, sorted: the files of its folder, nested ones as folder/name."""
    roots = [folder / group for folder in folders or [find_conf_dir()]]
    files = [(path, root) for root in roots for path in root.rglob("*.yaml")]
    return sorted({path.relative_to(root).with_suffix("").as_posix() for path, root in files})


def target_of(group: str, option: str, folders: Sequence[Path] | None = None) -> str | None:
    """The ``_target_`` that an option's file names, or one of the options that it stands on."""
    import yaml

    paths = (folder / group / f"{option}.yaml" for folder in folders or [find_conf_dir()])
    path = next((path for path in paths if path.is_file()), None)
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path else {}
    below = re.findall(rf"/{group}/([\w/]+)", str(values.get("defaults") or ""))
    return values.get("_target_") or next((t for name in below if (t := target_of(group, name, folders))), None)


def models_with(columns: str) -> list[str]:
    """The options of model that declare a column group."""
    import yaml

    folder = find_conf_dir() / "model"
    texts = {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in group_options("model")}
    return [name for name, text in texts.items() if columns in (yaml.safe_load(text).get("columns") or {})]


def menu(names: Iterable[str]) -> list[str]:
    """The options to show: the nested ones as their topmost folder, ``table/*``, once."""
    return list(dict.fromkeys(f"{name.split('/')[0]}/*" if "/" in name else name for name in names))


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """' did you mean a or b?', or '' when nothing is near; ``prefix`` is put before each name."""
    by_fold = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.6)
    return f" did you mean {' or '.join(prefix + by_fold[other] for other in near)}?" if near else ""
