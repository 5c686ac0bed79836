"""One run: its parts, how far it has come, and what of it a checkpoint holds."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from fedbench.algorithms.base import Algorithm
from fedbench.channel.cost import RoundCost
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import config_hash, plain
from fedbench.core.split import Split
from fedbench.engine.engine import Engine
from fedbench.simulation import checkpoint
from fedbench.simulation.environment import now, peak_memory
from fedbench.tasks import scores

COSTS = ("train_s", "eval_s", "total_s", "steps", "samples", "bytes_down", "bytes_up")


@dataclass
class Simulation:
    """One run: its parts and its progress.

    Attributes:
        done: Number of finished rounds.
        last: Metrics of the last evaluation.
        best: Metrics of the best evaluation by test score.
        best_val: Metrics of the best evaluation by validation score.
        new_clients: Scores of the clients that took no part in training.
        is_last_round: Whether no round follows in this process.
        is_sound: Whether checkpoint.pt may become the previous checkpoint.
        ranks_differ: Whether a difference between processes was reported.
        counted: Metrics whose number of clients was logged.
        origin: The source of the request for this run (see ``simulator.run``).
        cost: Totals over the rounds, in seconds and bytes.
        personal_is_global: Whether every client deployed the server's row at all evaluations.  None before the first.
        takes_means: Whether the server has averaged clients by the run's `weights`.
    """

    cfg: DictConfig
    run_dir: Path
    engine: Engine
    algorithm: Algorithm
    split: Split
    done: int = 0
    best: dict[str, Any] | None = None
    best_val: dict[str, Any] | None = None
    last: dict[str, float] = field(default_factory=dict)
    personal_is_global: bool | None = None
    takes_means: bool = False
    new_clients: dict[str, Any] | None = None
    data_hash: str = ""
    is_last_round: bool = False
    is_sound: bool = True
    ranks_differ: bool = False
    counted: set[str] = field(default_factory=set)
    origin: Mapping[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=now)
    cost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0))

    @property
    def primary(self) -> str:
        """The column of the score that the best round goes by."""
        return f"personal/{self.engine.task.primary}"

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of what can change the run's numbers, computed once: 8 ms, more than the rest of a small
        checkpoint."""
        return config_hash(self.cfg)

    @functools.cached_property
    def config_text(self) -> str:
        """The whole configuration as JSON, dotted key -> value."""
        return json.dumps(flatten(plain(self.cfg)))

    def state(self) -> dict[str, Any]:
        """Everything the rounds to come depend on, as plain tensors, numbers and text."""
        return {
            "round": self.done,
            "config_hash": self.config_hash,
            "partition_hash": self.split.hash,
            "config": self.config_text,
            "data_hash": self.data_hash,
            "algorithm": self.algorithm.state_dict(),
            "compression": self.engine.compression.compressor.state_dict() if self.engine.compression else {},
            "rows": self.engine.rows.state_dict(),
            "late_rows": json.dumps(sorted(self.engine.rows.late)),
            "record": json.dumps(
                {
                    "best": self.best,
                    "best_val": self.best_val,
                    "last": self.last,
                    "cost": self.cost,
                    "personal_is_global": self.personal_is_global,
                }
            ),
            "executor": json.dumps(self.engine.executor.state()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; ConfigError where it, or the data, do not fit the run."""
        then, now = state.get("data_hash", self.data_hash), self.data_hash
        require(
            then == now,
            f"resume={self.run_dir}: the data have changed since the run began (digest {now[:12]}, the "
            f"run's {then[:12]}): put its files back, or start a new run",
        )
        require(
            state["partition_hash"] == self.split.hash,
            f"resume={self.run_dir}: the data now gives another partition ({self.split.hash[:12]}) than the "
            f"run's ({state['partition_hash'][:12]}); the data set's files have changed",
        )
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ConfigError(f"resume={self.run_dir}: the checkpoint does not fit the run ({why})") from error

    def _load(self, state: dict[str, Any]) -> None:
        # before checkpoints said which stores their rounds had made, those were the optimizer's
        of_optimizer = [name for name in state["rows"] if name.startswith("optimizer/")]
        widths: dict[str, int] = {}  # of the rows that these are the buffers of; a count is narrower
        for name in of_optimizer:
            owner = name.split("/")[1]
            widths[owner] = max(widths.get(owner, 1), state["rows"][name]["rows"].shape[1])
        for name in of_optimizer:
            _, owner, buffer = name.split("/")
            self.engine.memory(owner, buffer, widths[owner])
        late = json.loads(state["late_rows"]) if "late_rows" in state else of_optimizer
        self.engine.rows.load_state_dict(state["rows"], late)
        device = self.engine.device  # checkpoints are read to host memory
        check_like(self.algorithm.state_dict(), state["algorithm"])
        self.algorithm.load_state_dict({n: t.to(device, copy=True) for n, t in state["algorithm"].items()})
        if self.engine.compression is not None:
            self.engine.compression.compressor.load_state_dict(state["compression"])
        record = json.loads(state["record"])
        self.done, self.best, self.best_val = state["round"], record["best"], record["best_val"]
        self.last, self.cost = record["last"], record["cost"]
        self.personal_is_global = record.get("personal_is_global")  # checkpoints of older versions do not have it
        self.is_sound = state.get("file", checkpoint.NAME) == checkpoint.NAME

    def record_metrics(self, values: dict[str, float]) -> None:
        """Remember the last evaluation, the best one, and the best one by validation."""
        self.last = values
        nan, test, validation = float("nan"), self.primary, f"val/{self.engine.task.primary}"
        score, best = (v.get(test, nan) for v in (values, self.best["values"] if self.best else {}))
        if scores.is_better(test, score, best) or best != best:
            self.best = {"metric": test, "round": self.done, "values": values}
        score, best = (v.get(validation, nan) for v in (values, self.best_val["values"] if self.best_val else {}))
        if scores.is_better(validation, score, best):
            self.best_val = {"metric": validation, "round": self.done, "values": values}

    def add_cost(self, cost: RoundCost, seconds: dict[str, float], survivors: int) -> dict[str, float]:
        """Add a round to the totals; returns its row of costs.csv.  seconds: round_s, and eval_s where it was
        evaluated.  survivors: how many of its clients were not lost."""
        row = {
            "cohort": self.engine.federation.cohort_size,
            **({"survivors": survivors} if self.cfg.system.dropout else {}),
            "steps": cost.steps,
            "samples": cost.samples,
            "train_s": seconds["round_s"],
            "eval_s": seconds.get("eval_s", 0.0),
            "images_per_s": cost.samples / max(seconds["round_s"], 1e-9),
            "bytes_down": cost.bytes_down,
            "bytes_up": cost.bytes_up,
            **({"dense_down": cost.dense_down, "dense_up": cost.dense_up} if self.engine.compression else {}),
            "peak_memory_mb": peak_memory(self.engine.device),
        }
        for name in row.keys() & (*COSTS, "dense_down", "dense_up"):
            self.cost[name] = self.cost.get(name, 0) + row[name]
        return row


def check_like(fresh: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """ValueError unless a method's stored tensors are those that it begins with, and of their kinds; more may have
    come in its rounds.

    The first axis of a matrix may have grown (APPLE's downloaded cores).
    """
    for name, tensor in fresh.items():
        other = stored[name]
        grown = other.dim() > 1 and other.shape[1:] == tensor.shape[1:]
        if other.dtype != tensor.dtype or not (grown or other.shape == tensor.shape):
            raise ValueError(f"{name} is {other.dtype} {tuple(other.shape)}, not {tensor.dtype} {tuple(tensor.shape)}")
