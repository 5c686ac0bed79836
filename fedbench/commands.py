"""The console script ``fedbench``, and ``python -m fedbench``: a run or a sweep, or ``fedbench check``."""

from __future__ import annotations

import sys

from fedbench.core import collector
from fedbench.core.streams import lasting


@lasting()
def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the process's own); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["check"]:
        from fedbench.testing.command import main as check

        return check(words[1:])
    with collector.resting():
        from fedbench.app.app import main as run

        return run(argv)
