"""Tables of papers, conf/paper/<table>.yaml: each row is an experiment, ``+experiment=<table>/<row>``.

    title: PGFed (Luo et al., ICCV 2023), Table 1
    common: {base: setting/pgfed_cifar}
    rows:
      fedavg: {method: FedAvg, algorithm: fedavg}
      pgfed: {method: PGFed, algorithm: pgfed, algorithm.drop_last: true, note: a remark}
      pgfed_again: pgfed_table1_cifar/pgfed

The keys of a row are those of a command line, such as algorithm and algorithm.mu.  ``base`` is a list of experiments
that the row extends.  A row without other keys may be just this list.  ``method`` is the name of the row in
fedbench/papers/<table>.csv.  The keys of a row have priority over those of ``common``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedbench.core.options import ConfigError, require

FOLDER = "paper"
KEYS = ("title", "remarks", "command", "time", "common", "rows")
NO_OVERRIDES = ("base", "note", "method")  # keys of a row that are not options of a run
PREFIX = "experiment/"


def read_tables(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the papers' tables in conf folders: {name of the table: content of conf/paper/<name>.yaml}.

    Args:
        folders: The conf folders.  If several have a table of the same name, that of the first one is used.

    Raises:
        ConfigError: A file is not a valid table.
    """
    names = {path.stem for folder in folders for path in (folder / FOLDER).glob("*.yaml")}
    return {name: table for name in sorted(names) if (table := read_table(name, folders)) is not None}


def read_table(name: str, folders: Sequence[Path]) -> dict[str, Any] | None:
    """Return the table of this name in the first folder that has one; None if there is none.

    Args:
        name: The name of the table.
        folders: The conf folders.

    Raises:
        ConfigError: The file is not a valid table.
    """
    paths = (folder / FOLDER / f"{name}.yaml" for folder in folders)
    path = next((path for path in paths if path.is_file()), None)
    # _read is cached, so that it needs the time of the last change
    return None if path is None else _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=500)
def _read(path: Path, changed: int) -> dict[str, Any]:
    """Return the content of a table's file.

    Args:
        path: The file.
        changed: Its modification time, so that the cache does not return an older content.

    Raises:
        ConfigError: The file is not a valid table.
    """
    import yaml

    try:
        table = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read as YAML ({reason}): correct this line") from error
    require(
        isinstance(table, dict) and isinstance(table.get("rows"), dict),
        f"{path} is not a table: it needs the key rows, with a line such as 'fedavg: {{algorithm: fedavg}}' for each "
        "row",
    )
    unknown = [key for key in table if key not in KEYS]
    require(
        not unknown,
        f"{path} has the unknown key {', '.join(map(str, unknown))}; a table has {', '.join(KEYS)}: correct the name",
    )
    for row, content in table["rows"].items():
        require(
            isinstance(content, str | list | dict),
            f"{path}: row {row} must be a mapping of keys, or the name or list of the experiments that it extends, "
            f"got {content}",
        )
    return table


def row_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of all experiments in the papers' tables of conf folders, as "table/row"."""
    return [f"{name}/{row}" for name, table in read_tables(folders).items() for row in table["rows"]]


def find_row(option: str, folders: Sequence[Path]) -> dict[str, Any] | None:
    """Return the keys of a row of a paper's table, merged with the keys that all rows of the table have in common.

    Args:
        option: The row, as table/row or experiment/table/row.
        folders: The conf folders.

    Returns:
        The keys; None if there is no such row.
    """
    name, _, row = option.removeprefix(PREFIX).partition("/")
    table = read_table(name, folders)
    if table is None or row not in table["rows"]:
        return None
    content = table["rows"][row]  # a mapping of keys, or only the value of the key base
    return {**(table.get("common") or {}), **(content if isinstance(content, dict) else {"base": content})}


def read_row(option: str, folders: Sequence[Path]) -> dict[str, Any] | None:
    """Return a row of a paper's table as the content of an experiment file, with a list `defaults` for Hydra.

    Args:
        option: The row, as table/row or experiment/table/row.
        folders: The conf folders.

    Returns:
        The nested keys; None if there is no such row.
    """
    row = find_row(option, folders)
    if row is None:
        return None
    base = row.get("base") or []  # the experiments that the row extends
    base = [base] if isinstance(base, str) else base
    # the chosen options of groups, such as {"algorithm": "pgfed"}; all other entries are values of dotted keys
    chosen = {key: value for key, value in row.items() if isinstance(value, str) and _is_group(key, folders)}
    overrides = [{f"override /{group}": name} for group, name in chosen.items()]
    content: dict[str, Any] = {"defaults": [*(f"/{PREFIX}{name}" for name in base), "_self_", *overrides]}
    table = option.removeprefix(PREFIX).partition("/")[0]
    paper_keys = {"paper.table": table, "paper.method": row["method"]} if "method" in row else {}
    for key, value in {**paper_keys, **row}.items():
        if key not in NO_OVERRIDES and key not in chosen:  # NO_OVERRIDES: keys that describe the row, such as note
            _set(content, key, value)
    return content


def _is_group(key: str, folders: Sequence[Path]) -> bool:
    """Return whether a key is the name of a group of options, such as "algorithm": a subfolder of a conf folder."""
    return "." not in key and any((folder / key).is_dir() for folder in folders)


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a value in nested dicts, in place.  Missing inner dicts are created.

    Args:
        content: The nested dicts.
        key: The dotted key, such as "algorithm.mu".
        value: The value.
    """
    *above, last = key.split(".")
    for part in above:
        content = content.setdefault(part, {})
    content[last] = value


def row_text(option: str, folders: Sequence[Path]) -> str:
    """Return a row of a paper's table as the text of an experiment file; "" if there is no such row.

    Args:
        option: The row, as table/row or experiment/table/row.
        folders: The conf folders.
    """
    import yaml

    content = read_row(option, folders)  # what the experiment file contains
    if content is None:
        return ""
    name, _, row = option.removeprefix(PREFIX).partition("/")
    table, keys = read_table(name, folders) or {}, find_row(option, folders) or {}  # as written in the table's file
    remarks = [f"{table.get('title', name)}, row {keys.get('method', row)}", keys.get("note")]
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return "\n".join([*(f"# {line}" for line in remarks if line), body])
