"""The command ``fedbench check``: check a method, model, task, partition, compressor, adapter or callback."""

from __future__ import annotations

import argparse
import logging
from contextlib import nullcontext
from typing import Any

from fedbench.config.conf_tree import GROUPS, conf_dirs, group_options, option_files
from fedbench.core.command import Arguments, add_config_dir, add_json, arguments, command
from fedbench.core.json_output import output_on_stderr, print_json
from fedbench.core.options import require

EXAMPLES = """examples:
  python -m fedbench check my_package.MyMethod                  a class that can be imported from here
  python -m fedbench check my_package.MyMethod mu=0.1 --json    an argument of its constructor; JSON, for programs
  python -m fedbench check algorithm=pgfed                      an option of conf/algorithm
  python -m fedbench check my_package.MyNet --input 3,32,32     a model, on inputs of this shape
  python -m fedbench check my_package.MyMethod --only resume    one check; --list prints all

exit status: 0 if no check failed, 1 if a check failed, 2 if the target cannot be checked"""
KIND_OF_FLAG = {  # argument of the check: (flag, kind)
    "model": ("--model", "algorithm"),
    "input_shape": ("--input", "model"),
    "num_clients": ("--clients", "partition"),
}


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench check``."""
    p = arguments("check", "Check a method, model, task, partition, compressor, adapter or callback.", EXAMPLES)
    p.add_argument("target", nargs="?", help="the dotted path of a class, or group=option")
    p.add_argument("options", nargs="*", metavar="key=value", help="arguments of its constructor")
    add_json(p)
    p.add_argument("--only", metavar="NAMES", help="run only these checks, separated by commas")
    p.add_argument("--model", help="for a method: the option of conf/model")
    p.add_argument(
        "--input", metavar="SHAPE", dest="input_shape", help="for a model: the shape of a sample, as 3,32,32"
    )
    p.add_argument(
        "--clients", type=int, metavar="N", dest="num_clients", help="for a partition: the number of clients"
    )
    p.add_argument("--list", action="store_true", help="list all checks with a description")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench check`` with the words typed after it, and return the exit status.

    It is 0 if no check failed, 1 if one did, and 2 after a mistake of the user.
    """
    args = parser().parse_intermixed_args(argv)
    if args.list:
        if args.json:
            print_json("checks", {"checks": _all_checks()})
        else:
            print(_list_of_checks(), flush=True)
        return 0
    require(
        args.target is not None,
        "no target is given: name a class or an option to check, such as my_package.MyMethod or algorithm=pgfed",
    )
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # methods and models log each time they are built
    try:
        with output_on_stderr() if args.json else nullcontext():  # classes of users may print
            report = _report(args)
    finally:
        logging.disable(disabled)
    print(report.as_json().rstrip() if args.json else report, flush=True)
    return 0 if report.ok else 1


def _report(args: argparse.Namespace) -> Any:
    """Return the Report of the checks of the target, the class or option that the command names.

    Raises:
        ConfigError: The target cannot be built, or a flag is for another kind of target.
    """
    import torch

    from fedbench.testing._kinds import KINDS, kind_of

    torch.set_num_threads(1)  # threads slow down small operations
    target, values = _option_in_folder(args.target, args.config_dir)
    kind, target = kind_of(target)
    # KIND_OF_FLAG: from name of an argument to (its flag, the only kind that has it)
    given = {name: getattr(args, name) for name in KIND_OF_FLAG if getattr(args, name) is not None}
    for name in given:
        flag, expected = KIND_OF_FLAG[name]
        require(
            expected == kind,
            f"{flag} is only for a target of the kind {expected}, but {target} is of {kind}: omit {flag}",
        )
    if args.input_shape is not None:
        given["input_shape"] = _shape(args.input_shape)
    only = None if args.only is None else [name.strip() for name in args.only.split(",")]
    return KINDS[kind].check(target, {**values, **_options(args.options)}, only=only, **given)


def _option_in_folder(target: str, config_dir: str | None) -> tuple[str, dict[str, Any]]:
    """Replace an option in --config-dir by its class.

    Args:
        target: The target of the command line.
        config_dir: A folder with the user's own options; None without the flag.

    Returns:
        group=class and the other values of the option.  A target that is no option in the folder is returned unchanged,
        without values.
    """
    import yaml

    from fedbench.testing._targets import entry_of

    group, _, name = target.partition("=")
    # a name with a dot is the path of a class
    if config_dir is None or group not in GROUPS or name in group_options(group) or "." in name:
        return target, {}
    texts = option_files(group, name, conf_dirs(config_dir)).values()
    values = {key: value for text in texts for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"}
    values = entry_of(group, values)
    require(
        "_target_" in values,
        f"{target}: its file in {config_dir} has no key _target_: add _target_ with the dotted path of the class",
    )
    return f"{group}={values.pop('_target_')}", values


def _options(arguments: list[str]) -> dict[str, Any]:
    """Return arguments of a constructor by name.

    Args:
        arguments: Texts key=value of the command line, with values in YAML, such as "mu=0.1".

    Raises:
        ConfigError: A text is not of this form.
    """
    import yaml

    options = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        require(
            bool(equals and key),
            f"{argument} is not of the form key=value: write an argument of the constructor, such as mu=0.1",
        )
        options[key] = yaml.safe_load(value)
    return options


def _shape(text: str) -> tuple[int, ...]:
    """Return (3, 32, 32) for the value "3,32,32" or "3x32x32" of ``--input``; ConfigError for other values."""
    sizes = text.replace("x", ",").split(",")
    require(
        all(size.isdigit() and int(size) > 0 for size in sizes),
        f"--input {text} is not the shape of a sample: write integers >= 1 separated by commas, such as 3,32,32",
    )
    return tuple(map(int, sizes))


def _all_checks() -> list[dict[str, str]]:
    """Return the checks of all kinds, each as a dict with its kind, its name and what it tests (description)."""
    from fedbench.testing._kinds import KINDS

    suites = {name: kind.suite for name, kind in KINDS.items()}
    return [
        {"kind": kind, "name": name, "description": suite.description(name)}
        for kind, suite in suites.items()
        for name in suite.checks
    ]


def _list_of_checks() -> str:
    """Return a text with the name and description of every check, one line each, below the name of its kind."""
    from fedbench.testing._kinds import KINDS

    blocks = []
    for name, kind in KINDS.items():
        width = max(map(len, kind.suite.checks))
        lines = [f"  {check:<{width}}  {kind.suite.description(check)}" for check in kind.suite.checks]
        blocks.append("\n".join([name, *lines]))
    return "\n\n".join(blocks)
