"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from omegaconf import DictConfig

from fedbench.core.options import require
from fedbench.simulation.callbacks.base import Callback
from fedbench.simulation.callbacks.checkpoint import Checkpoint
from fedbench.simulation.callbacks.guarded import Guarded
from fedbench.simulation.callbacks.matrices import Matrices
from fedbench.simulation.callbacks.progress import Progress
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.callbacks.wandb import Wandb
from fedbench.simulation.instantiate import make
from fedbench.simulation.log import Output


def build(cfg: DictConfig, output: Output = "lines") -> list[Callback]:
    """Return the callbacks of a run: those that every run has, and those of the group ``callbacks``.

    Matrices come first, because they refuse a damaged file before the tables are cut.  The checkpoint comes last,
    because it refers to what the others have written.

    Args:
        cfg: The checked config.
        output: What the run prints; progress unless it is "warnings".

    Raises:
        ConfigError: A callback of the group cannot be built.
    """
    shown = [] if output == "warnings" else [Progress(transient=output == "bar")]
    others = [Matrices(), Tables(), *shown, Wandb(cfg.tracking.mode), *asked(cfg)]
    return [*others, Checkpoint(cfg.checkpoint.every, others)]


def asked(cfg: DictConfig) -> list[Callback]:
    """Return the callbacks of the group, each guarded against its errors."""
    return [Guarded(f"callbacks.{name}", _made(cfg, name)) for name in cfg.callbacks]


def _made(cfg: DictConfig, name: str) -> Callback:
    key = f"callbacks.{name}"
    callback = make(cfg.callbacks[name], key=key)
    require(
        isinstance(callback, Callback),
        f"{key}._target_={cfg.callbacks[name]._target_} makes an object of type {type(callback).__name__}, expected a "
        "fedbench.simulation.callbacks.base.Callback",
    )
    return callback
