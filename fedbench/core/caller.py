"""Who asked for a run: a command line, which is told how it went, or Python, which gets values and exceptions.

Nobody passes this on from `fedbench.run` to the run, because Hydra is between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


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
