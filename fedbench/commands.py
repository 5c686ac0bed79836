"""``python -m fedbench`` and the console script ``fedbench``: a run, a sweep, or one of the subcommands."""

from __future__ import annotations

import importlib
import os
import sys

from fedbench.app.help import SUBCOMMANDS, requested_help
from fedbench.config.conf_tree import GROUPS, group_options, nearest
from fedbench.core import gc_pause
from fedbench.core.command import command
from fedbench.core.options import require


@command
def main(argv: list[str]) -> int:
    """Run a command line.

    Args:
        argv: The arguments, without the name of the program.

    Returns:
        The exit status: 0 for success, 1 if a run failed, 2 for a mistake in the command, 130 if interrupted.
    """
    if argv and argv[0] in SUBCOMMANDS:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the console script should also find modules there
        module, _ = SUBCOMMANDS[argv[0]]  # and its line in the help
        return importlib.import_module(f"fedbench.{module}").main(argv[1:])
    if {"-h", "--help"} & set(argv):
        print(requested_help(argv), flush=True)
        return 0
    _check_subcommand(argv)
    with gc_pause.paused():  # of Python's garbage collector, until the modules are imported
        from fedbench.app.launch import launch  # imports Hydra, which --help does not need

        return launch(argv)


def _check_subcommand(argv: list[str]) -> None:
    """Refuse a misspelled subcommand.  A value of a group without the group (``mlp``) is refused later."""
    name = argv[0] if argv else ""
    is_group_value = any(name in group_options(group) for group in GROUPS)
    suggestion = nearest(name, SUBCOMMANDS) if name.isidentifier() and not is_group_value else ""
    require(not suggestion, f"{name} is not a subcommand:{suggestion}")
