"""``python -m fedbench check my_package.MyMethod``: test a method, model, task, partition or operator of your own."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from fedbench.config.conf_tree import GROUPS, conf_dirs, group_options, option_files
from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.options import require

EXAMPLES = """examples:
  python -m fedbench check my_package.MyMethod                  a class that can be imported from here
  python -m fedbench check my_package.MyMethod mu=0.1 --json    an option of its constructor; JSON, for programs
  python -m fedbench check algorithm=pgfed                      an option of conf/algorithm
  python -m fedbench check my_package.MyNet --input 3,32,32     a model, on inputs of this shape
  python -m fedbench check my_package.MyMethod --only resume    one of the checks; --list names them all

0: everything holds; 1: something is broken; 2: it could not be checked."""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments(
        "check",
        "Check a method, model, task, partition, operator or callback on tiny problems: what holds, and what does not.",
        EXAMPLES,
    )
    p.add_argument("target", nargs="?", help="the dotted path of a class, or group=option")
    p.add_argument("options", nargs="*", metavar="key=value", help="options of its constructor")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--only", metavar="NAMES", help="some of the checks, separated by commas")
    p.add_argument("--model", help="a method's: the option of conf/model that it runs on")
    p.add_argument("--input", metavar="SHAPE", help="a model's: the shape of a sample, as 3,32,32")
    p.add_argument("--clients", type=int, metavar="N", help="a partition's: how many clients")
    p.add_argument("--list", action="store_true", help="name all checks, and what they say")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status: 1 if something is broken."""
    args = parser().parse_intermixed_args(argv)
    if args.list:
        print(_listed(), flush=True)
        return 0
    require(args.target is not None, "name what to check, such as my_package.MyMethod or algorithm=pgfed")
    with _quiet():
        report = _report(args)
    print(report.as_json() if args.json else report, flush=True)
    return 0 if report.ok else 1


def _report(args: argparse.Namespace) -> Any:
    import torch

    from fedbench.testing._kinds import KINDS, kind_of

    torch.set_num_threads(1)  # of small operations, threads that wait for each other
    asked, values = _own_option(args.target, args.config_dir)
    kind, target = kind_of(asked)
    special = {
        "model": ("algorithm", args.model),
        "input_shape": ("model", None if args.input is None else _shape(args.input)),
        "num_clients": ("partition", args.clients),
    }
    given = {name: value for name, (_, value) in special.items() if value is not None}
    wrong = [name for name in given if special[name][0] != kind]
    require(not wrong, f"{target} is checked as a {kind}, and {', '.join(wrong)} is for another kind")
    only = None if args.only is None else [name.strip() for name in args.only.split(",")]
    return KINDS[kind].check(target, {**values, **_options(args.options)}, only=only, **given)


def _own_option(target: str, config_dir: str | None) -> tuple[str, dict[str, Any]]:
    """Return group=class and the values of an option in --config-dir; any other target as it is."""
    import yaml

    from fedbench.testing._targets import entry_of

    group, _, name = target.partition("=")
    if config_dir is None or group not in GROUPS or name in group_options(group) or "." in name:
        return target, {}
    texts = option_files(group, name, conf_dirs(config_dir)).values()
    values = {key: value for text in texts for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"}
    values = entry_of(group, values)
    require("_target_" in values, f"{target}: its file in {config_dir} names no class in _target_")
    return f"{group}={values.pop('_target_')}", values


def _options(words: list[str]) -> dict[str, Any]:
    """key=value, the values as in YAML."""
    import yaml

    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        require(bool(equals and key), f"{word} is no option of the constructor, which is written key=value")
        options[key] = yaml.safe_load(value)
    return options


def _shape(words: str) -> tuple[int, ...]:
    parts = words.replace("x", ",").split(",")
    require(all(p.isdigit() and int(p) > 0 for p in parts), f"--input {words} is no shape, such as 3,32,32")
    return tuple(map(int, parts))


def _listed() -> str:
    """All checks by kind."""
    from fedbench.testing._kinds import KINDS

    blocks = []
    for kind, k in KINDS.items():
        width = max(map(len, k.suite.checks))
        lines = [f"  {name:<{width}}  {k.suite.says(name)}" for name in k.suite.checks]
        blocks.append("\n".join([kind, *lines]))
    return "\n\n".join(blocks)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Runs without what methods and models log: checks make each of them many times."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
