"""The command line of runs and sweeps: help, or launch.py, which is imported when it is needed."""

from __future__ import annotations

from fedbench.core.command import command


@command
def main(argv: list[str]) -> int:
    """Run a command line (default: the process's).

    Returns the exit status: 0 done, 1 a run failed, 2 a mistake in the command, 130 interrupted.
    """
    if {"-h", "--help"} & set(argv):
        from fedbench.app.help import asked_help

        print(asked_help(argv), flush=True)
        return 0
    from fedbench.app.launch import launch  # Hydra: half a second that --help need not pay

    return launch(argv)
