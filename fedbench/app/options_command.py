"""``python -m fedbench options``: all keys of a run with type, range, default, meaning and source."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from fedbench.app import meanings
from fedbench.app.help import SETTINGS, WIDTH, commented_keys, described_keys, header, of_every_option
from fedbench.config.conf_tree import GROUPS, conf_dirs, find_conf_dir, group_options, nearest, option_files
from fedbench.config.run_keys import INJECTED, KEYS, RESERVED, RunConfig
from fedbench.config.schema import bounds_of, choices_of, fields_of, model_of, nested_model, options_of
from fedbench.core.command import Arguments, add_config_dir, add_json, arguments, command
from fedbench.core.json_output import output_on_stderr, print_json
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import show

EXAMPLES = """examples:
  python -m fedbench options                          all keys
  python -m fedbench options algorithm=pgfed          the keys of an option
  python -m fedbench options optimizer local --json   those of a group and of a top-level key, as JSON for programs
"""
NOT_SET = ("defaults", "hydra", "_recursive_", "paper")  # entries of files that users do not set
Row = dict[str, Any]


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench options``."""
    p = arguments("options", "List the keys of a run: type, range, default, meaning and source.", EXAMPLES)
    p.add_argument("names", nargs="*", metavar="NAME", help="a group, group=option, or a top-level key (default: all)")
    add_json(p)
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench options`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_args(argv)
    folders = conf_dirs(args.config_dir)
    names = args.names or [*_top_level(), *GROUPS]
    with output_on_stderr():  # some classes log when they are imported
        rows = [row for name in names for row in rows_of(name, folders)]
    if args.json:
        groups = [group for group in GROUPS if group in [name.partition("=")[0] for name in names]]
        print_json("options", {"groups": {group: group_options(group, folders) for group in groups}, "keys": rows})
    else:
        print(as_text(rows), flush=True)
    return 0


def _top_level() -> dict[str, Any]:
    """Return {key: default} of the keys of config.yaml that are no groups, such as "seed" and "local"."""
    values = yaml.safe_load((find_conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if key not in (*NOT_SET, *GROUPS)}


def rows_of(name: str, folders: list[Path]) -> list[Row]:
    """Return the rows of a group, an option or a top-level key.  Experiments set keys of other groups, and have none.

    A row is a dict that describes one key of a run: key, type, default, meaning and so on.

    Args:
        name: The name, such as "optimizer", "algorithm=pgfed" or "local".
        folders: The folders of options.

    Raises:
        ConfigError: There is no such group, option or key.
    """
    group, _, option = name.partition("=")
    if group == "experiment":
        return []
    if group in GROUPS:
        options = [option] if option else group_options(group, folders)
        return [row for chosen in options for row in _option_rows(group, chosen, folders)]
    names = [*GROUPS, *_top_level()]
    hint = nearest(name, names) or f" there are {', '.join(names)}"
    require(name in _top_level(), f"{name} is not a group of options or a top-level key:{hint}")
    return _top_level_rows(name)


def _top_level_rows(key: str) -> list[Row]:
    """Return the rows (see `rows_of`) of a key of config.yaml, such as "local": one for each key nested in it.

    A key whose value is not a mapping, such as "seed", has one row.
    """
    text = (find_conf_dir() / "config.yaml").read_text(encoding="utf-8")
    field, value = fields_of(options_of(RunConfig))[key], _top_level()[key]
    # SETTINGS: pairs of key and meaning in the general help, which replace the comments in config.yaml
    described = {name: meaning for name, (_, meaning) in commented_keys(text).items()} | dict(SETTINGS)
    head = {"group": None, "option": None}  # entries of each row
    # nested keys are described by the docstring of their class
    return list(_rows(head, key, field, value, {} if nested_model(field) else {key: described.get(key, "")}))


def _option_rows(group: str, option: str, folders: list[Path]) -> list[Row]:
    """Return the rows (see `rows_of`) of all keys of an option.

    Args:
        group: The group of options, such as "algorithm".
        option: The option of the group, such as "fedavg".
        folders: The folders of options.
    """
    files = option_files(group, option, folders)
    values = {key: value for text in files.values() for key, value in (yaml.safe_load(text) or {}).items()}
    target, described = described_keys(group, files)
    prefix = group
    if group == "callbacks":  # the keys are below the name of the callback
        prefix, values = next(((f"{group}.{name}", entry) for name, entry in values.items()), (group, {}))
        target = str(values.get("_target_", ""))
        described = {key: ("", meaning) for key, meaning in meanings.of_target(target).items()}
    source = next(iter(header(files[option])), None)
    head = {"group": group, "option": option, "source": source}
    types = _types(group, target)
    # the keys of the file come first, then those that all options of the group have
    values = values | (_shared_defaults(group) | values)
    texts = of_every_option(group) | {key: meaning for key, (_, meaning) in described.items() if meaning}
    texts = {f"{prefix}.{key}": meaning for key, meaning in texts.items()}
    keys = dict.fromkeys([*values, *types])
    return [
        row
        for key in keys
        if key not in (*NOT_SET, "_target_")  # entries of files that are no options
        for row in _rows(head, f"{prefix}.{key}", types.get(key), values.get(key), texts)
    ]


def _shared_defaults(group: str) -> dict[str, Any]:
    """Return {key: default} of the keys that all options of a group have, and that their YAML files may leave out.

    The result is {} if the group, such as "optimizer", has no such keys.
    """
    shared = KEYS.get(group)  # the class that declares these keys; None for a group without such keys
    declared = fields(shared) if shared and is_dataclass(shared) else ()
    # a dataclass has a default_factory in place of a default that is a list or dict
    immutable = {field.name: field.default for field in declared if field.default is not MISSING}
    mutable = {field.name: field.default_factory() for field in declared if field.default_factory is not MISSING}
    return immutable | mutable


def _types(group: str, target: str) -> dict[str, FieldInfo]:
    """Return the fields of the keys of an option; {} if its class needs a package that is not installed.

    Args:
        group: The group of options, such as "algorithm".
        target: The dotted path of the class; "" for groups without classes.
    """
    if not target or "${" in target:  # ${: the class is that of another key
        shared = KEYS.get(group)
        return fields_of(options_of(shared)) if shared else {}
    try:
        # hidden: arguments that fedbench passes to the class; reserved: further keys, which fedbench reads itself
        return fields_of(model_of(group, target, hidden=INJECTED.get(group, ()), reserved=RESERVED.get(group)))
    except ConfigError:
        return {}


def _rows(head: Row, key: str, field: FieldInfo | None, default: Any, described: Mapping[str, str]) -> Iterator[Row]:
    """Yield the row of a key; those of its keys if its default is a mapping of declared keys.

    Args:
        head: Group, option and source.
        key: The dotted key.
        field: Its type; None if it is unknown.
        default: Its default.
        described: Descriptions by dotted key.
    """
    inner = nested_model(field) if field else None
    if inner is not None and isinstance(default, Mapping):
        texts = {f"{key}.{name}": text for name, text in meanings.of_docstring(inner.__doc__ or "").items()}
        for name, part in fields_of(inner).items():
            yield from _rows(head, f"{key}.{name}", part, default.get(name), texts)
        return
    yield {
        **{"key": key, "group": head["group"], "option": head["option"]},
        "type": field.description if field else None,
        "choices": list(choices_of(field.annotation)) if field else [],
        "bounds": bounds_of(field) if field else {},
        # JSON has no infinity
        "default": show(default) if isinstance(default, float) and math.isinf(default) else default,
        "meaning": described.get(key, ""),
        "source": head.get("source"),
    }


def as_text(rows: list[Row]) -> str:
    """Return rows (see `rows_of`) as text: a heading for each option, and a paragraph for each row."""
    lines: list[str] = []
    heading = None
    for row in rows:
        title = f"{row['group']}={row['option']}" if row["group"] else "top level"
        if title != heading:
            heading = title
            lines += ["", title + (f"  {row['source']}" if row["source"] else "")]
        text = f"{row['key']}={show(row['default'])}  ({row['type']})  {row['meaning']}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join(lines[1:])
