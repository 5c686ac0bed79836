"""The command line of runs and sweeps: help, or launch.py, which is imported when it is needed."""

from __future__ import annotations

from fedbench.app.help import SUBCOMMANDS, asked_help
from fedbench.config.conf_tree import GROUPS, group_options, nearest
from fedbench.core.command import command
from fedbench.core.options import require


@command
def main(argv: list[str]) -> int:
    """Run a command line (default: the process's).

    Returns the exit status: 0 done, 1 a run failed, 2 a mistake in the command, 130 interrupted.
    """
    if {"-h", "--help"} & set(argv):
        print(asked_help(argv), flush=True)
        return 0
    check_subcommand(argv)
    from fedbench.app.launch import launch  # Hydra: half a second that --help need not pay

    return launch(argv)


def check_subcommand(argv: list[str]) -> None:
    """Refuse a misspelt subcommand; the name of an option is refused later, with its group."""
    word = argv[0] if argv else ""
    is_option = any(word in group_options(group) for group in GROUPS)
    hint = nearest(word, SUBCOMMANDS) if word.isidentifier() and not is_option else ""
    require(not hint, f"{word} is no subcommand:{hint}")
