"""Early stopping on validation scores (stop.patience)."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import require
from fedbench.core.split import Split
from fedbench.engine.engine import Engine


class EarlyStopping:
    """Stores the state of the round with the best validation score, and decides when to stop.

    Args:
        patience: Evaluations without a better validation score after which the run stops.

    Attributes:
        best_state: State of server and clients after the best round (`state_of`).  None before the first evaluation.
        stopped_at: Round after which the run stopped.  None while it runs.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.best_state: dict[str, Any] | None = None
        self.stopped_at: int | None = None

    def is_due(self, round: int, best_round: int, every: int) -> bool:
        """Return whether the run stops early after a round.

        Args:
            round: The evaluated round, from 1.
            best_round: The round with the best validation score, from 1.
            every: Rounds between evaluations.

        Returns:
            Whether there were `patience` evaluations since the best one.
        """
        # rounded up, because the last round is evaluated even if it is not a multiple of `every`
        evaluations_since_best = -(-(round - best_round) // every)
        return evaluations_since_best >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the entry of a checkpoint.

        Returns:
            "state": `best_state`, {} for None; "record": JSON text with `stopped_at`, the round after which the run
            stopped early, or null.
        """
        return {"state": self.best_state or {}, "record": json.dumps({"stopped_at": self.stopped_at})}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Restore `best_state` and `stopped_at` from `stored`, a result of `state_dict`."""
        self.best_state = stored["state"] or None
        self.stopped_at = json.loads(stored["record"])["stopped_at"]


def require_validation(patience: int, split: Split) -> None:
    """Check that some client has validation samples.

    Args:
        patience: The option stop.patience, for the message.
        split: The partition of the data over the clients.

    Raises:
        ConfigError: No client has any.
    """
    require(
        bool(split.val.sizes.any()),
        f"stop.patience={patience} needs validation samples, and there are none: set dataset.val_fraction, for example "
        "to 0.2, or folds",
    )


def state_of(algorithm: Algorithm, engine: Engine) -> dict[str, Any]:
    """Return the state of server and clients, without copying tensors.

    Args:
        algorithm: The federated method, such as FedAvg.
        engine: The clients with their data, the model, the executor and the client states.

    Returns:
        "algorithm": the tensors of the method; "compression": those of the compressor; "rows": the written rows of all
        client states (`RowStore.state_dict`).
    """
    return {
        "algorithm": algorithm.state_dict(),
        "compression": engine.compression.compressor.state_dict() if engine.compression else {},
        "rows": engine.rows.state_dict(),
    }


def copied(state: Any) -> Any:
    """Return a copy of nested dicts in which tensors are copied to host memory.  Other values are not copied."""
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def restore(state: dict[str, Any], algorithm: Algorithm, engine: Engine) -> None:
    """Restore the state of server and clients.

    Args:
        state: The result of `state_of`.  States of clients that were created later return to their initial values.
        algorithm: The federated method, such as FedAvg.
        engine: The clients with their data, the model, the executor and the client states.
    """
    for name, rows in engine.rows.all.items():
        # the state of rows that no client has stored yet: [0, ...], with the shape of the default row
        empty = {"ids": torch.empty(0, dtype=torch.int64), "rows": rows.default[None][:0].cpu()}
        rows.load_state_dict(state["rows"].get(name, empty))
    algorithm.load_state_dict({name: t.to(engine.device, copy=True) for name, t in state["algorithm"].items()})
    if engine.compression is not None:
        engine.compression.compressor.load_state_dict(state["compression"])
