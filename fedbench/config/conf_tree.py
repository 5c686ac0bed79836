"""The conf folder: where it is and what its groups offer.  Imports nothing heavy: --help is instant."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedbench.config.paper_tables import read_row, row_names, row_text
from fedbench.core.options import ConfigError

GROUPS = (
    *("dataset", "task", "partition", "model", "adapter", "algorithm", "optimizer"),
    *("compression", "hardware", "tracking", "callbacks", "experiment"),
)


def find_conf_dir() -> Path:
    """The folder with config.yaml: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the conf folder of fedbench is missing (looked beside and inside {package})")


def conf_dirs(extra: str | None = None) -> list[Path]:
    """Ours, and the user's --config-dir where one is given."""
    return [find_conf_dir(), *([Path(extra).resolve()] if extra else [])]


def group_options(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names of a group's options, sorted: its files, nested ones as folder/name, and rows of tables."""
    folders = folders or [find_conf_dir()]
    files = [(path, folder / group) for folder in folders for path in (folder / group).rglob("*.yaml")]
    names = {path.relative_to(root).with_suffix("").as_posix() for path, root in files}
    return sorted(names | set(row_names(folders) if group == "experiment" else ()))


def target_of(group: str, option: str, folders: Sequence[Path] | None = None) -> str | None:
    """The ``_target_`` that an option's file names, or one of the options that it stands on."""
    text = _text(f"{group}/{option}", folders)
    if match := re.search(r"^_target_:\s*['\"]?([\w.]+)['\"]?\s*(?:#|$)", text, re.MULTILINE):
        return match[1]  # in a thirtieth of the time that parsing takes
    values = _mapping(text)
    below = (name.removeprefix(f"{group}/") for name in _defaults(values, f"{group}/{option}"))
    return values.get("_target_") or next((t for name in below if (t := target_of(group, name, folders))), None)


def label_of(group: str, option: str | None, target: str | None, folders: Sequence[Path] | None = None) -> str | None:
    """What a run that builds ``target`` is called in this group: the option, where it is the option's class.

    An option that no folder here has is believed: it may be one of a --config-dir.
    """
    known = target_of(group, option, folders) if option and target else None
    moved = known is not None and _moved(known, str(target))
    same = known in (None, target) or "${" in str(known) or moved
    return option if same else class_name(group, str(target), folders)


def _moved(known: str, target: str) -> bool:
    """Whether both are one class of ours, whose file has moved since a run was stored."""
    return (
        all(path.startswith("fedbench.") for path in (known, target))
        and known.rpartition(".")[2] == target.rpartition(".")[2]
    )


def class_name(group: str, target: str, folders: Sequence[Path] | None = None) -> str:
    """MyNet of my_package.MyNet, to name a run after.

    Where an option goes by that name it is the option, if that is its class, else the whole path.
    """
    parts = target.split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)  # Net.small of my.Net.small
    name = ".".join(parts[first:])
    same = [option for option in group_options(group, folders) if _letters(option) == _letters(name)]
    exact = [option for option in same if target_of(group, option, folders) == target]
    return exact[0] if exact else target if same else name


def printed_name(group: str, option: str, folders: Sequence[Path] | None = None) -> str | None:
    """What papers call an option: the name that its file begins with (# PGFed-CE: ...), which is the option's own
    (pgfed_ce) in other letters; None where there is no such file or name."""
    text = _text(f"{group}/{option}", folders) if re.fullmatch(r"\w{1,99}", option) else ""
    name = text.partition(":")[0].removeprefix("# ")
    return name if _letters(name) == _letters(option) else None


def is_class(group: str, choice: str | None, target: str | None, folders: Sequence[Path] | None = None) -> bool:
    """Whether what a run is called in this group is its class's name, and no option's."""
    if not choice or not target or target_of(group, choice, folders) == target:
        return False
    return choice == class_name(group, target, folders)


def _letters(name: str) -> str:
    """FedAvg and fedavg, PGFedCE and pgfed_ce are one name to a reader, and to some file systems."""
    return re.sub(r"[\W_]", "", name).casefold()


def includes_itself(name: str, folders: Sequence[Path] | None = None) -> bool:
    """Return whether a file of the conf folders (model/mine) includes itself, directly or through others."""
    above = [*_defaults(read_option(name, folders), name)]
    met: set[str] = set()
    while above:
        if (below := above.pop()) == name:
            return True
        if below not in met:
            met.add(below)
            above += _defaults(read_option(below, folders), below)
    return False


def keys_set(name: str, group: str, folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the keys of a group that an option (experiment/table/row) sets or inherits, with their values as text."""
    return {str(key): str(value) for key, value in inherited(name, group, folders).items()}


def inherited(name: str, key: str, folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """Return the mapping that an option has below a key, over those of the options that it includes."""
    values = read_option(name, folders)
    found: dict[str, Any] = {}
    for below in _defaults(values, name):
        found |= inherited(below, key, folders)
    here = values.get(key)
    return found | (here if isinstance(here, dict) else {})


def read_option(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """Return the content of an option's file, or of a table's row; empty where there is neither."""
    text = _file(name, folders)
    row = read_row(name, folders or [find_conf_dir()]) if text is None and name.startswith("experiment/") else None
    return row or _mapping(text or "")


def option_files(group: str, option: str, folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the text of an option's file, after those of the options that it includes, by option.

    Raises:
        ConfigError: The group has no such option.
    """
    known = group_options(group, folders)
    if option not in known:
        hint = nearest(option, known) or f" {group} has {', '.join(menu(known))}"
        raise ConfigError(f"{group}={option} is not an option:{hint}")
    text = _text(f"{group}/{option}", folders)
    below = [name.removeprefix(f"{group}/") for name in _defaults(_mapping(text), f"{group}/{option}")]
    files = {k: v for name in below if name in known for k, v in option_files(group, name, folders).items()}
    return {**files, option: text}


def _text(name: str, folders: Sequence[Path] | None) -> str:
    """Return the text of an option's file, or of a table's row as a file; "" where there is neither."""
    text = _file(name, folders)
    is_row = text is None and name.startswith("experiment/")
    return row_text(name, folders or [find_conf_dir()]) if is_row else text or ""


def _file(name: str, folders: Sequence[Path] | None) -> str | None:
    """Return the text of the first file of that name; None where there is none."""
    paths = (folder / f"{name}.yaml" for folder in folders or [find_conf_dir()])
    path = next((path for path in paths if path.is_file()), None)
    return path.read_text(encoding="utf-8") if path else None


def _mapping(text: str) -> dict[str, Any]:
    import yaml

    values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return values if isinstance(values, dict) else {}


def _defaults(values: dict[str, Any], name: str) -> list[str]:
    """The files of the same kind that one with this name stands on: /experiment/x as it is, x beside the file."""
    entries = [str(entry).partition("@")[0] for entry in values.get("defaults") or [] if isinstance(entry, str)]
    folder = name.rpartition("/")[0]
    return [entry[1:] if entry.startswith("/") else f"{folder}/{entry}" for entry in entries if entry != "_self_"]


def models_with(columns: str) -> list[str]:
    """The options of model that declare a column group."""
    import yaml

    folder = find_conf_dir() / "model"
    texts = {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in group_options("model")}
    return [name for name, text in texts.items() if columns in (yaml.safe_load(text).get("columns") or {})]


def menu(names: Iterable[str]) -> list[str]:
    """The options to show: the nested ones as their topmost folder, ``table/*``, once."""
    return list(dict.fromkeys(f"{name.split('/')[0]}/*" if "/" in name else name for name in names))


def families(names: Iterable[str], least: int = 3) -> list[str]:
    """The menu once more shortened: ``least`` folders or more that share their first word are ``word_*/*``."""
    names = list(names)
    words = Counter(name.split("_")[0] for name in names if name.endswith("/*"))
    short = (n.split("_")[0] + "_*/*" if n.endswith("/*") and words[n.split("_")[0]] >= least else n for n in names)
    return list(dict.fromkeys(short))


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """' did you mean a or b?', or '' when nothing is near; ``prefix`` is put before each name."""
    by_fold = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.6)
    return f" did you mean {' or '.join(prefix + by_fold[other] for other in near)}?" if near else ""
