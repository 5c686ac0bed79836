"""The console script ``fedbench``, and ``python -m fedbench``: a run or a sweep, or ``fedbench check``."""

from __future__ import annotations

import os
import sys

from fedbench.core import collector


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the process's own); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["check"]:
        from fedbench.testing.command import main as check

        try:
            return check(words[1:])
        except BrokenPipeError:  # `... | head`: nobody reads on, and Python must not complain at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    with collector.resting():
        from fedbench.cli.app import main as run

        return run(argv)
