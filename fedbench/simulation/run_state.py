"""The state of a run: its components, its progress, and the content of its checkpoints."""

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
from fedbench.core.settings import config_hash, to_dict
from fedbench.core.split import Split
from fedbench.engine.engine import Engine
from fedbench.engine.sharded_rows import gathered
from fedbench.simulation import checkpoint
from fedbench.simulation.early_stopping import EarlyStopping, copied, restore, state_of
from fedbench.simulation.environment import now, peak_memory
from fedbench.tasks import scores

COSTS = ("train_s", "eval_s", "total_s", "steps", "samples", "bytes_down", "bytes_up")


@dataclass
class Simulation:
    """The components of a run and its progress: `done` rounds, and the `last`, `best` and `best_val` metrics.

    Attributes:
        cfg: The checked configuration.
        run_dir: The run folder.
        engine: The engine, which trains and evaluates cohorts.
        algorithm: The federated method, such as FedAvg.
        split: The partition of the data over the clients.
        done: The number of finished rounds.
        best: Round and metrics of the best evaluation by test score.
        best_val: Round and metrics of the best evaluation by validation score.
        last: Metrics of the last evaluation.
        personal_is_global: Whether every client deployed the global model at all evaluations.  None before the first.
        takes_means: Whether the server has averaged clients by the option `client_weights`.
        new_clients: Scores of the new clients, which took no part in training.
        data_hash: The digest of the data set.
        is_last_round: Whether this process runs no further round.
        is_sound: Whether checkpoint.pt is intact, so that it may become the previous checkpoint.
        ranks_differ: Whether a difference between processes was reported.
        reported_counts: Metrics whose number of clients was logged.
        command_entries: Entries for summary.json about the command (see ``simulator.run``).
        started: The time at which this process began the run, ISO 8601.
        early_stopping: Decides when to stop, with stop.patience; else None.
        cost: Totals over the rounds, in seconds, steps, samples and bytes.
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
    reported_counts: set[str] = field(default_factory=set)
    command_entries: Mapping[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=now)
    early_stopping: EarlyStopping | None = None
    cost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0))

    @property
    def primary(self) -> str:
        """The name of the metric that determines the best round, such as "personal/accuracy"."""
        return f"personal/{self.engine.task.primary}"

    @functools.cached_property
    def config_hash(self) -> str:
        """The sha256 (hex) of all options that affect results.  Cached, because it is slow to compute."""
        return config_hash(self.cfg)

    @functools.cached_property
    def config_text(self) -> str:
        """The whole configuration as JSON: one object from dotted key to value."""
        return json.dumps(flatten(to_dict(self.cfg)))

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: everything that later rounds depend on, as tensors, numbers and text.

        If processes divide the rows of clients, all processes must call this together.  The result of rank 0 is
        complete.
        """
        early = self.early_stopping.state_dict() if self.early_stopping else {}
        return {
            "round": self.done,
            "config_hash": self.config_hash,
            "partition_hash": self.split.hash,
            "config": self.config_text,
            "data_hash": self.data_hash,
            **self._with_all_rows(state_of(self.algorithm, self.engine)),
            **({"early_stopping": {**early, "state": self._with_all_rows(early["state"])}} if early else {}),
            "late_rows": json.dumps(sorted(self.engine.rows.late)),  # names of rows that were created in rounds
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

    def _with_all_rows(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the client states that other processes store to a state.

        Args:
            state: The result of `state_of` in this process, or {}.

        Returns:
            The state; {} for {}.  On rank 0, its "rows" are those of all clients.  On other ranks, states that
            processes divide (hardware.rows=sharded) have no rows.
        """
        return state and state | {"rows": gathered(state["rows"], self.engine.executor.ranks, self.run_dir)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the run from a checkpoint.

        Args:
            state: The content of the checkpoint, a dict that `state` returned.

        Raises:
            ConfigError: The data have changed, or the checkpoint does not fit the run.
        """
        stored_hash = state.get("data_hash", self.data_hash)
        require(
            stored_hash == self.data_hash,
            f"resume={self.run_dir}: the data have changed since the run began (digest {self.data_hash[:12]}, the "
            f"run's {stored_hash[:12]}): restore the data files, or start a new run",
        )
        require(
            state["partition_hash"] == self.split.hash,
            f"resume={self.run_dir}: the data files have changed, because their partition is {self.split.hash[:12]} "
            f"now and was {state['partition_hash'][:12]}: restore the data files, or start a new run",
        )
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            why = f"it has no entry {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ConfigError(
                f"resume={self.run_dir}: the checkpoint does not fit the run ({why}): restore the checkpoint, or start "
                "a new run"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        """Restore the run from a checkpoint as `load`, but without checking the data.

        Raises:
            Exception: The state does not fit the run.  `load` lists the types.
        """
        buffers = [name for name in state["rows"] if name.startswith("optimizer/")]  # optimizer/<rows>/<buffer>
        widths: dict[str, int] = {}  # number of parameters per kind of rows: the widest buffer (a step count is 1 wide)
        for name in buffers:
            owner = name.split("/")[1]
            widths[owner] = max(widths.get(owner, 1), state["rows"][name]["rows"].shape[1])
        for name in buffers:
            _, owner, buffer = name.split("/")
            self.engine.optimizer_state(owner, buffer, widths[owner])  # creates the rows, which are restored below
        # checkpoints of older versions have no late_rows: only the optimizer made rows during rounds
        late = json.loads(state["late_rows"]) if "late_rows" in state else buffers
        self.engine.rows.load_state_dict(state["rows"], late)
        device = self.engine.device  # the checkpoint is in host memory
        check_like(self.algorithm.state_dict(), state["algorithm"])
        self.algorithm.load_state_dict({n: t.to(device, copy=True) for n, t in state["algorithm"].items()})
        if self.engine.compression is not None:
            self.engine.compression.compressor.load_state_dict(state["compression"])
        if self.early_stopping is not None:
            self.early_stopping.load_state_dict(state["early_stopping"])
        record = json.loads(state["record"])
        self.done, self.best, self.best_val = state["round"], record["best"], record["best_val"]
        self.last, self.cost = record["last"], record["cost"]
        self.personal_is_global = record.get("personal_is_global")  # not in checkpoints of older versions
        # whether checkpoint.pt is intact: it is damaged if the previous checkpoint was loaded
        self.is_sound = state.get("file", checkpoint.NAME) == checkpoint.NAME

    @property
    def is_stopped_early(self) -> bool:
        """Whether stop.patience ended the run before its last round, because validation scores did not improve."""
        return self.early_stopping is not None and self.early_stopping.stopped_at is not None

    @property
    def is_paused(self) -> bool:
        """Whether the run pauses now, because of checkpoint.pause_after, before its last round."""
        pause_after = self.cfg.checkpoint.pause_after
        return pause_after is not None and pause_after <= self.done < self.cfg.rounds and not self.is_stopped_early

    def keep_best_state(self) -> None:
        """Store a copy of the states of server and clients, if this round has the best validation score so far.

        Do nothing without stop.patience.
        """
        if self.early_stopping is not None and self.best_val is not None and self.best_val["round"] == self.done:
            self.early_stopping.best_state = copied(state_of(self.algorithm, self.engine))

    def return_to_best(self) -> bool:
        """Restore the state of the round with the best validation score, if the run ends after this round.

        Returns:
            Whether the state was restored.  It is not if the run goes on, or if this round is the best one.
        """
        early, best = self.early_stopping, self.best_val
        if early is None or early.best_state is None or best is None:  # no early stopping, or not yet evaluated
            return False
        if early.is_due(self.done, best["round"], self.cfg.eval.every):  # the run stops early
            early.stopped_at = self.done
        elif self.done < self.cfg.rounds:  # the run goes on
            return False
        if best["round"] == self.done:
            return False
        restore(early.best_state, self.algorithm, self.engine)
        return True

    def record_metrics(self, values: dict[str, float]) -> None:
        """Store the metrics of an evaluation as the last ones.

        If their test score is better than all earlier ones, they are also stored in `best`.  The same holds for the
        validation score and `best_val`.

        Args:
            values: The metrics over clients, by name.
        """
        self.last = values
        nan, test, validation = float("nan"), self.primary, f"val/{self.engine.task.primary}"
        earlier = self.best["values"] if self.best else {}
        score, best = values.get(test, nan), earlier.get(test, nan)
        # best != best, NaN: no score so far; then any evaluation counts, so that `best` has the metrics of one
        if scores.is_better(test, score, best) or best != best:
            self.best = {"metric": test, "round": self.done, "values": values}
        earlier = self.best_val["values"] if self.best_val else {}
        score, best = values.get(validation, nan), earlier.get(validation, nan)
        if scores.is_better(validation, score, best):
            self.best_val = {"metric": validation, "round": self.done, "values": values}

    def add_cost(self, cost: RoundCost, seconds: dict[str, float], participants: int) -> dict[str, float]:
        """Add the cost of a round to the totals.

        Args:
            cost: Steps, samples and bytes of the round.
            seconds: round_s, and eval_s if the round was evaluated.
            participants: The number of sampled clients that did not drop out.

        Returns:
            The line of costs.csv.
        """
        row = {
            "cohort": self.engine.federation.cohort_size,
            **({"survivors": participants} if self.cfg.system.dropout else {}),
            "steps": cost.steps,
            "samples": cost.samples,
            "train_s": seconds["round_s"],
            "eval_s": seconds.get("eval_s", 0.0),
            "images_per_s": cost.samples / max(seconds["round_s"], 1e-9),
            "bytes_down": cost.bytes_down,
            "bytes_up": cost.bytes_up,
            # bytes that the same messages would have without compression
            **({"dense_down": cost.dense_down, "dense_up": cost.dense_up} if self.engine.compression else {}),
            **({"left_out": len(cost.left_out)} if self.engine.aggregator else {}),
            "peak_memory_mb": peak_memory(self.engine.device),
        }
        for name in row.keys() & (*COSTS, "dense_down", "dense_up", "left_out"):  # the columns that have totals
            self.cost[name] = self.cost.get(name, 0) + row[name]
        return row


def check_like(fresh: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Check that the stored state of a method fits its initial state.

    The stored state may have more tensors.  The first axis of a tensor with several axes may have another length:
    methods such as APPLE store as many models as clients have downloaded.

    Args:
        fresh: The initial tensors by name.
        stored: The tensors in the checkpoint by name.

    Raises:
        ValueError: A stored tensor has another type or shape.
        KeyError: A tensor is missing.
    """
    for name, tensor in fresh.items():
        saved = stored[name]
        fits = saved.shape == tensor.shape or (saved.dim() > 1 and saved.shape[1:] == tensor.shape[1:])
        if saved.dtype != tensor.dtype or not fits:
            expected = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"the tensor {name!r} of the checkpoint is {saved.dtype} {tuple(saved.shape)}, but the method now has "
                f"{expected}: undo changes of the method or the model"
            )
