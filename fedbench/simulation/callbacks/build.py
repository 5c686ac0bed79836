"""Build the callbacks of a run."""

from __future__ import annotations

from omegaconf import DictConfig

from fedbench.core.options import require
from fedbench.simulation.build import divides_rows
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
    """Return the callbacks of a run in calling order: those of every run, and those of the group ``callbacks``.

    Args:
        cfg: The checked configuration.
        output: What the run prints.  Progress is shown unless it is "warnings".

    Raises:
        ConfigError: A callback of the group cannot be built.
    """
    progress = [] if output == "warnings" else [Progress(transient=output == "bar")]
    # Matrices first: if their file is damaged, they raise an error before the tables are cut.
    others = [Matrices(), Tables(), *progress, Wandb(cfg.tracking.mode), *group_callbacks(cfg)]
    # The checkpoint last: it refers to files that the others have written.
    return [*others, Checkpoint(cfg.checkpoint.every, others)]


def build_on_other_ranks(cfg: DictConfig) -> list[Callback]:
    """Return the callbacks of ranks other than 0, which take part when those of rank 0 read the rows of clients.

    Args:
        cfg: The checked configuration.
    """
    return [Matrices(), Checkpoint(cfg.checkpoint.every)] if divides_rows(cfg) else []


def group_callbacks(cfg: DictConfig) -> list[Callback]:
    """Return the callbacks of the group ``callbacks``, in order, each in `Guarded`, which logs exceptions."""
    return [Guarded(f"callbacks.{name}", _build_one(cfg, name)) for name in cfg.callbacks]


def _build_one(cfg: DictConfig, name: str) -> Callback:
    """Build the callback of this name in the group ``callbacks``; raise ConfigError if it is not a Callback."""
    key = f"callbacks.{name}"
    callback = make(cfg.callbacks[name], key=key)
    require(
        isinstance(callback, Callback),
        f"{key}._target_={cfg.callbacks[name]._target_} makes an object of type {type(callback).__name__}, expected a "
        "fedbench.simulation.callbacks.base.Callback: name a subclass of it",
    )
    return callback
