"""Several processes, one command: rank 0 reads it, the others take part in the runs that it begins."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedbench.core.options import ConfigError, PeerLost
from fedbench.engine.ranks import Ranks, Stopped, connect, current, disconnect
from fedbench.simulation.simulator import run

log = logging.getLogger(__name__)


def take_part(command: Callable[[], int]) -> int:
    """On rank 0 the command, on the others whatever runs it begins; returns the exit status."""
    ranks = connect()
    if not ranks.first:
        return follow(ranks)
    status = 1
    try:
        status = command()
    finally:
        with suppress(Stopped, PeerLost):
            announce_run(None)
            disconnect()
    return status


def announce_run(run: tuple[Mapping[str, Any], Path, bool] | None) -> None:
    """Rank 0 to the others: the config, folder and resume of a run that begins now; None: there is no more."""
    message = None if run is None else (dict(run[0]), str(run[1].resolve()), run[2])
    current().gather("beginning of a run", message)


def follow(ranks: Ranks) -> int:
    """Take part in every run that rank 0 begins, in silence but for warnings; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {ranks.rank}: %(message)s", stream=sys.stderr)
    try:
        while (message := ranks.gather("beginning of a run", None)[0]) is not None:
            values, folder, resume = message
            try:
                cfg = OmegaConf.create(dict(values))
                OmegaConf.set_readonly(cfg, True)
                run(cfg, Path(folder), resume)
            except PeerLost:
                raise
            except (ConfigError, KeyboardInterrupt):
                continue  # rank 0 says so
            except (Exception, SystemExit):
                log.warning("%s", traceback.format_exc())  # rank 0 says what, this says where
    except PeerLost as error:
        log.error("%s", error)
        return 1
    disconnect()
    return 0
