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
    """Run a command line (default: the process's).

    Returns the exit status: 0 done, 1 a run failed, 2 a mistake in the command, 130 interrupted.
    """
    if argv and argv[0] in SUBCOMMANDS:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the console script, too, finds modules in the working directory
        module, _ = SUBCOMMANDS[argv[0]]
        return importlib.import_module(f"fedbench.{module}").main(argv[1:])
    if {"-h", "--help"} & set(argv):
        print(requested_help(argv), flush=True)
        return 0
    check_subcommand(argv)
    with gc_pause.paused():
        from fedbench.app.launch import launch  # Hydra: half a second that --help need not pay

        return launch(argv)


def check_subcommand(argv: list[str]) -> None:
    """Refuse a misspelt subcommand; the name of an option is refused later, with its group."""
    word = argv[0] if argv else ""
    is_option = any(word in group_options(group) for group in GROUPS)
    hint = nearest(word, SUBCOMMANDS) if word.isidentifier() and not is_option else ""
    require(not hint, f"{word} is no subcommand:{hint}")
