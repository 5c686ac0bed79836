"""``python -m fedbench`` and the console script ``fedbench``: a run, a sweep, or one of the subcommands."""

from __future__ import annotations

import importlib
import os
import sys

from fedbench.app.help import SUBCOMMANDS
from fedbench.core import collector


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the process's) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SUBCOMMANDS:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the console script, too, finds modules in the working directory
        module, _ = SUBCOMMANDS[words[0]]
        return importlib.import_module(f"fedbench.{module}").main(words[1:])
    with collector.paused():
        from fedbench.app.app import main as run

        return run(words)
