"""``fedbench check my_package.MyMethod``: the contract of a method, model, task, partition or operator of anybody's."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from fedbench.core.options import ConfigError, require

EXAMPLES = """examples:
  fedbench check my_package.MyMethod                  a class that can be imported from here
  fedbench check my_package.MyMethod mu=0.1 --json    an option of its constructor; JSON, for programs
  fedbench check algorithm=pgfed                      an option of conf/algorithm
  fedbench check my_package.MyNet --input 3,32,32     a model, on inputs of this shape
  fedbench check my_package.MyMethod --only resume    one of the checks; --list names them all

0: everything holds; 1: something is broken; 2: it could not be checked."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="fedbench check",
        description="Check a method, model, task, partition or operator on tiny problems: what holds, and what is not.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", nargs="?", help="the dotted path of a class, or group=option")
    p.add_argument("options", nargs="*", metavar="key=value", help="options of its constructor")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--only", metavar="NAMES", help="some of the checks, separated by commas")
    p.add_argument("--model", help="a method's: the option of conf/model that it runs on")
    p.add_argument("--input", metavar="SHAPE", help="a model's: the shape of a sample, as 3,32,32")
    p.add_argument("--clients", type=int, metavar="N", help="a partition's: how many clients")
    p.add_argument("--list", action="store_true", help="name all checks, and what they say")
    return p


def main(argv: list[str]) -> int:
    """Run the command line (without ``fedbench check``); returns the exit status."""
    args = parser().parse_intermixed_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the console script, too, finds a user's own module where it is started
    try:
        if args.list:
            print(_listed(), flush=True)
            return 0
        require(args.target is not None, "name what is to be checked: fedbench check my_package.MyMethod")
        with _quiet():
            report = _report(args)
    except ConfigError as mistake:
        print(f"fedbench: {mistake}", file=sys.stderr)
        return 2
    print(report.as_json() if args.json else report, flush=True)
    return 0 if report.ok else 1


def _report(args: argparse.Namespace) -> Any:
    import torch

    from fedbench.testing._kinds import KINDS, kind_of

    torch.set_num_threads(1)  # of small operations, threads that wait for each other
    kind, target = kind_of(args.target)
    special = {
        "model": ("algorithm", args.model),
        "input_shape": ("model", None if args.input is None else _shape(args.input)),
        "num_clients": ("partition", args.clients),
    }
    given = {name: value for name, (_, value) in special.items() if value is not None}
    wrong = [name for name in given if special[name][0] != kind]
    require(not wrong, f"{target} is checked as a {kind}, and {', '.join(wrong)} is for another kind")
    only = None if args.only is None else [name.strip() for name in args.only.split(",")]
    return KINDS[kind].check(target, _options(args.options), only=only, **given)


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
