"""Run one command in several processes: rank 0 reads the command, the others take part in its runs."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedbench.core.options import ConfigError, PeerLost

if TYPE_CHECKING:
    from fedbench.engine.ranks import Ranks

log = logging.getLogger(__name__)
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return TORCHRUN in os.environ


def take_part(command: Callable[[], int]) -> int:
    """Execute a command on rank 0, and its runs on all ranks.

    Args:
        command: Executes the command, and returns its exit status.

    Returns:
        The exit status of this process.
    """
    from fedbench.engine.ranks import OtherRankFailed, connect, disconnect  # here: torch is slow to import

    ranks = connect()
    if not ranks.is_first:
        return _run_as_worker(ranks)
    status = 1
    try:
        status = command()
    finally:
        with suppress(OtherRankFailed, PeerLost):
            broadcast_run(None)  # None: there are no more runs
            disconnect()
    return status


def broadcast_run(run: tuple[Mapping[str, Any], Path, bool] | None) -> None:
    """Send a run from rank 0 to the other ranks.  Does nothing without torchrun.

    Args:
        run: Configuration, run folder, and whether to resume.  None: there are no more runs.
    """
    if not under_torchrun():
        return
    from fedbench.engine.ranks import current

    message = None if run is None else (dict(run[0]), str(run[1].resolve()), run[2])
    current().gather("beginning of a run", message)  # every rank gets the messages of all, of which only rank 0 has one


def _run_as_worker(ranks: Ranks) -> int:
    """Take part in all runs that rank 0 starts, as another rank, and print only warnings.

    Returns:
        The exit status of this process: 1 if another process died, else 0.
    """
    from fedbench.engine.ranks import disconnect
    from fedbench.simulation.simulator import run

    logging.basicConfig(level=logging.WARNING, format=f"rank {ranks.rank}: %(message)s", stream=sys.stderr)
    try:
        while (message := ranks.gather("beginning of a run", None)[0]) is not None:
            values, folder, resume = message
            try:
                config = OmegaConf.create(dict(values))
                OmegaConf.set_readonly(config, value=True)
                run(config, Path(folder), resume)
            except PeerLost:
                raise
            except (ConfigError, KeyboardInterrupt):
                continue  # rank 0 prints the error
            except (Exception, SystemExit):
                log.warning("%s", traceback.format_exc())  # rank 0 prints only the message
    except PeerLost as error:
        log.error("%s", error)
        return 1
    disconnect()
    return 0
