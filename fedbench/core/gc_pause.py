"""Pause Python's garbage collector while a command imports modules, which shortens its start.

At the end of the pause, all objects are frozen, so that later collections skip them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_paused = False


@contextmanager
def paused() -> Iterator[None]:
    """Pause Python's garbage collector until `resume` is called, or until the end of the block.

    Imports create many objects, which the collector would search again and again.  A pause inside another one ends
    both.
    """
    global _is_paused
    _is_paused = _is_paused or gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        resume()


def resume() -> None:
    """End the pause of the garbage collector, if there is one.

    The first time, all existing objects are frozen: later collections skip them.
    """
    global _is_paused
    if _is_paused:
        if not gc.get_freeze_count():  # only once: later there may be garbage of an earlier run
            gc.freeze()
        gc.enable()
    _is_paused = False
