"""Find and read the files of the conf folder: the options, such as fedavg, of each group, such as algorithm.

Imports only light modules, so that --help is fast.
"""

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
    *("server", "aggregator", "attack", "compression", "privacy", "hardware", "tracking", "callbacks", "experiment"),
)


def find_conf_dir() -> Path:
    """Return the folder with config.yaml: next to the package in a checkout, inside it in a wheel.

    Raises:
        ConfigError: There is no such folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"fedbench's conf folder is missing (looked next to and inside {package}): reinstall fedbench")


def conf_dirs(extra: str | None = None) -> list[Path]:
    """Return the conf folders: first that of fedbench, then the user's --config-dir ``extra``, unless it is None."""
    return [find_conf_dir(), *([Path(extra).resolve()] if extra else [])]


def group_options(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """Return the sorted names of a group's options: its files, nested ones as folder/name, and rows of papers' tables.

    Args:
        group: The group, such as "algorithm".
        folders: The conf folders.  None: fedbench's.
    """
    folders = folders or [find_conf_dir()]
    files = [(path, folder / group) for folder in folders for path in (folder / group).rglob("*.yaml")]
    names = {path.relative_to(root).with_suffix("").as_posix() for path, root in files}
    return sorted(names | set(row_names(folders) if group == "experiment" else ()))


def target_of(group: str, option: str, folders: Sequence[Path] | None = None) -> str | None:
    """Return the ``_target_`` of an option's file, or of an option in its defaults; None if there is none.

    Args:
        group: The group of options, such as "algorithm".
        option: The option of the group, such as "fedavg".
        folders: The conf folders.  None: fedbench's.
    """
    text = _text(f"{group}/{option}", folders)
    if match := re.search(r"^_target_:\s*['\"]?([\w.]+)['\"]?\s*(?:#|$)", text, re.MULTILINE):
        return match[1]  # much faster than parsing
    values = _mapping(text)
    included = (name.removeprefix(f"{group}/") for name in _defaults(values, f"{group}/{option}"))  # other options
    return values.get("_target_") or next((t for name in included if (t := target_of(group, name, folders))), None)


def label_of(group: str, option: str | None, target: str | None, folders: Sequence[Path] | None = None) -> str | None:
    """Return the name of a run's choice in a group: the option, or the class if it is not that of the option.

    An unknown option is returned unchanged, because it may be in the --config-dir of the run.

    Args:
        group: The group of options, such as "algorithm".
        option: The chosen option; if it is None, so is the result.
        target: The dotted path of the class that the run uses, its value of ``_target_``.
        folders: The conf folders.  None: fedbench's.
    """
    option_target = target_of(group, option, folders) if option and target else None
    # the same class whose module has been renamed since
    moved = option_target is not None and _moved(option_target, str(target))
    # "${": the option's file takes its class from another key
    is_same_class = option_target in (None, target) or "${" in str(option_target) or moved
    return option if is_same_class else class_name(group, str(target), folders)


def _moved(path: str, other: str) -> bool:
    """Return whether two different dotted paths are of one class of fedbench, whose module was renamed or moved."""
    in_fedbench = path.startswith("fedbench.") and other.startswith("fedbench.")
    return in_fedbench and path.rpartition(".")[2] == other.rpartition(".")[2]


def class_name(group: str, target: str, folders: Sequence[Path] | None = None) -> str:
    """Return a name for a class: MyNet for my_package.MyNet.

    If an option has the same name, it is the option's name if it is the option's class, else the whole path.

    Args:
        group: The group of options, such as "algorithm".
        target: The dotted path of the class.
        folders: The conf folders.  None: fedbench's.
    """
    parts = target.split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)  # Net.small of my.Net.small
    name = ".".join(parts[first:])
    # options of the same name, whatever the case and punctuation
    namesakes = [option for option in group_options(group, folders) if _letters(option) == _letters(name)]
    exact = [option for option in namesakes if target_of(group, option, folders) == target]
    return exact[0] if exact else target if namesakes else name


def printed_name(group: str, option: str, folders: Sequence[Path] | None = None) -> str | None:
    """Return the name of an option in papers, such as PGFed-CE for pgfed_ce, from the first line of its file.

    Args:
        group: The group of options, such as "algorithm".
        option: The option of the group, such as "fedavg".
        folders: The conf folders.  None: fedbench's.

    Returns:
        The name; None if the file does not begin with the option's name in another spelling.
    """
    # an option of an old run may be any text, also one that is no file name
    text = _text(f"{group}/{option}", folders) if re.fullmatch(r"\w{1,99}", option) else ""
    name = text.partition(":")[0].removeprefix("# ")
    return name if _letters(name) == _letters(option) else None


def is_class(group: str, choice: str | None, target: str | None, folders: Sequence[Path] | None = None) -> bool:
    """Return whether the choice of a group is the name of a class, not of an option.

    Args:
        group: The group of options, such as "algorithm".
        choice: The run's choice, such as the option "fedavg" or the class "MyMethod".
        target: The dotted path of the class that the run uses, its value of ``_target_``.
        folders: The conf folders.  None: fedbench's.
    """
    if not choice or not target or target_of(group, choice, folders) == target:
        return False
    return choice == class_name(group, target, folders)


def _letters(name: str) -> str:
    """Return the letters and digits of a name in lower case: "pgfedce" for "PGFed-CE"."""
    return re.sub(r"[\W_]", "", name).casefold()


def includes_itself(name: str, folders: Sequence[Path] | None = None) -> bool:
    """Return whether a file of options includes itself by its defaults, directly or through other files.

    Args:
        name: The file, such as model/mine.
        folders: The conf folders.  None: fedbench's.
    """
    stack = [*_defaults(read_option(name, folders), name)]
    visited: set[str] = set()
    while stack:
        if (included := stack.pop()) == name:
            return True
        if included not in visited:
            visited.add(included)
            stack += _defaults(read_option(included, folders), included)
    return False


def keys_set(name: str, group: str, folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the keys of a group that a file sets or inherits, with their values as text.

    Args:
        name: The file, such as experiment/table/row.
        group: The group of options, such as "algorithm".
        folders: The conf folders.  None: fedbench's.
    """
    return {str(key): str(value) for key, value in inherited(name, group, folders).items()}


def inherited(name: str, key: str, folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """Return the mapping at a key of a file, merged with those of the files in its defaults.

    Args:
        name: The file, such as experiment/table/row.
        key: A top-level key of the file, such as "optimizer".
        folders: The conf folders.  None: fedbench's.
    """
    values = read_option(name, folders)
    merged: dict[str, Any] = {}
    for included in _defaults(values, name):
        merged |= inherited(included, key, folders)
    mapping = values.get(key)
    return merged | (mapping if isinstance(mapping, dict) else {})


def read_option(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """Return the content of an option's file, or of a row of a paper's table as an experiment file.

    Args:
        name: The file, such as model/mlp or experiment/table/row.
        folders: The conf folders.  None: fedbench's.

    Returns:
        The nested values; {} if there is neither a file nor a row.
    """
    text = _file(name, folders)
    row = read_row(name, folders or [find_conf_dir()]) if text is None and name.startswith("experiment/") else None
    return row or _mapping(text or "")


def option_files(group: str, option: str, folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the texts of an option's file and of the files of options that it includes by its defaults.

    Args:
        group: The group of options, such as "algorithm".
        option: The option of the group, such as "fedavg".
        folders: The conf folders.  None: fedbench's.

    Returns:
        The texts by option.  Included options precede the one that includes them, so that ``option`` is the last.

    Raises:
        ConfigError: The group has no such option.
    """
    options = group_options(group, folders)
    if option not in options:
        hint = nearest(option, options) or f" {group} has {', '.join(group_overview(options))}"
        raise ConfigError(f"{group}={option} is not an option:{hint}")
    text = _text(f"{group}/{option}", folders)
    files: dict[str, str] = {}
    for name in _defaults(_mapping(text), f"{group}/{option}"):
        included = name.removeprefix(f"{group}/")
        if included in options:  # else it is a file of another group
            files |= option_files(group, included, folders)
    return {**files, option: text}


def _text(name: str, folders: Sequence[Path] | None) -> str:
    """Return the text of an option's file, or of a row of a paper's table as an experiment file.

    Args:
        name: The file, such as model/mlp or experiment/table/row.
        folders: The conf folders.  None: fedbench's.

    Returns:
        The text; "" if there is neither a file nor a row.
    """
    text = _file(name, folders)
    is_row = text is None and name.startswith("experiment/")
    return row_text(name, folders or [find_conf_dir()]) if is_row else text or ""


def _file(name: str, folders: Sequence[Path] | None) -> str | None:
    """Return the text of NAME.yaml in the first conf folder that has this file; None if no folder has it.

    Args:
        name: The file, such as model/mlp.
        folders: The conf folders.  None: fedbench's.
    """
    paths = (folder / f"{name}.yaml" for folder in folders or [find_conf_dir()])
    path = next((path for path in paths if path.is_file()), None)
    return path.read_text(encoding="utf-8") if path else None


def _mapping(text: str) -> dict[str, Any]:
    """Return the mapping that a YAML text contains, as nested dicts; {} if the text contains something else."""
    import yaml

    values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return values if isinstance(values, dict) else {}


def _defaults(values: dict[str, Any], name: str) -> list[str]:
    """Return the files that a file includes by its defaults list.

    Entries that choose an option of a group (``- model: mlp``) are left out.

    Args:
        values: The content of the file.
        name: The file, such as experiment/debug.

    Returns:
        The files: experiment/x for the entry "/experiment/x", and the file next to ``name`` for the entry "x".
    """
    # without the place in the configuration that may follow an @
    entries = [str(entry).partition("@")[0] for entry in values.get("defaults") or [] if isinstance(entry, str)]
    folder = name.rpartition("/")[0]
    return [entry[1:] if entry.startswith("/") else f"{folder}/{entry}" for entry in entries if entry != "_self_"]


def models_with(columns: str) -> list[str]:
    """Return the options of the group model whose files name a column group; [] if none does.

    A column group is a named set of a model's parameters, such as "head" for those of the last layer.

    Args:
        columns: The name of the column group.
    """
    import yaml

    folder = find_conf_dir() / "model"
    texts = {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in group_options("model")}
    return [name for name, text in texts.items() if columns in (yaml.safe_load(text).get("columns") or {})]


def group_overview(names: Iterable[str]) -> list[str]:
    """Return a shorter list of options, in which those of a folder, such as table/a and table/b, become "table/*"."""
    return list(dict.fromkeys(f"{name.split('/')[0]}/*" if "/" in name else name for name in names))


def families(names: Iterable[str], least: int = 3) -> list[str]:
    """Return a shorter list of options: folders with the same first word become one entry, ``word_*/*``.

    Args:
        names: Names of options, and of folders of options as ``folder/*``.
        least: With fewer folders of the same first word, these remain.
    """
    names = list(names)
    first_words = {name: name.split("_")[0] for name in names if name.endswith("/*")}  # of folders only
    counts = Counter(first_words.values())
    short = [f"{first_words[n]}_*/*" if n in first_words and counts[first_words[n]] >= least else n for n in names]
    return list(dict.fromkeys(short))


def nearest(name: str, valid_names: Iterable[str], prefix: str = "") -> str:
    """Return " did you mean a or b?" with similar names, or "" if there are none.

    Args:
        name: The misspelt name.
        valid_names: The valid names.
        prefix: A text before each name.
    """
    by_fold = {other.casefold(): other for other in valid_names}
    similar = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.6)
    return f" did you mean {' or '.join(prefix + by_fold[other] for other in similar)}?" if similar else ""
