"""What a command changes of its process and ends with it, and what Python that goes on must find as it was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase


@contextmanager
def kept() -> Iterator[None]:
    """Hydra's state, logging and the search path for modules are after the block as they were before it.

    What the run itself sets, such as torch's threads, it puts back by itself (core/torch_settings.py).
    """
    path = sys.path[:]
    with ExitStack() as stack:
        stack.callback(sys.path.__setitem__, slice(None), path)
        stack.enter_context(_hydra())
        stack.enter_context(_logging())
        yield


@contextmanager
def _hydra() -> Iterator[None]:
    """A Hydra of its own for the block, whatever application of it the caller is."""
    application, config, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    before = application.hydra, config.cfg, version.version_base
    application.clear()
    try:
        yield
    finally:
        application.hydra, config.cfg, version.version_base = before


@contextmanager
def _logging() -> Iterator[None]:
    """Python's loggers for the block: Hydra sets them up anew for a run, and closes every handler that there is."""
    loggers = [logging.root, logging.getLogger("fedbench")]
    loggers += [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    before = [(one, one.handlers[:], one.level, one.disabled, one.propagate) for one in loggers]
    handlers = {handler for one in loggers for handler in one.handlers}
    for handler in handlers:
        vars(handler)["close"] = lambda: None  # of this one, which is the caller's
    try:
        yield
    finally:
        of_runs = [handler for handler in logging.root.handlers if handler not in handlers]
        for one, its_handlers, level, disabled, propagate in before:
            one.handlers[:], one.disabled, one.propagate = its_handlers, disabled, propagate
            one.setLevel(level)
        for handler in handlers:
            del vars(handler)["close"]
        for handler in of_runs:
            handler.close()
