"""Who asked for a run: a command line, which is told how it went, or Python, which gets values and exceptions; and how
commands are suggested.

Nobody passes this on from `fedbench.run` to the run, because Hydra is between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

UV = "UV"  # `uv run` gives this to what it starts


@dataclass
class Caller:
    """Python that asked for a run.  errors: what ended it, to be raised instead of printed."""

    errors: list[BaseException] = field(default_factory=list)


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current() -> Caller | None:
    """The Python that asked for the run under way; None: a command line did."""
    return _caller.get()


@contextmanager
def calling() -> Iterator[Caller]:
    """Runs of this block are asked for by Python."""
    token = _caller.set(caller := Caller())
    try:
        yield caller
    finally:
        _caller.reset(token)


def suggested(command: str) -> str:
    """A command as the user would type it: by uv where uv started this process."""
    return f"uv run {command}" if os.environ.get(UV) else command
