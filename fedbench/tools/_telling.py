"""How a command ends after a mistake: one sentence on standard error, and a status that says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fedbench.core.options import ConfigError, refused


@dataclass
class Status:
    """code: 0 done, 2 a mistake in the command or a file that cannot be read or written."""

    code: int = 0


@contextmanager
def telling() -> Iterator[Status]:
    """Tell what went wrong in the block in one sentence, instead of raising it."""
    status = Status()
    try:
        yield status
    except ConfigError as mistake:
        print(f"fedbench: {mistake}", file=sys.stderr)
        status.code = 2
    except OSError as error:
        print(f"fedbench: {refused(error)}", file=sys.stderr)
        status.code = 2
