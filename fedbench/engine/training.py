"""Local training of a cohort: what a method may ask for beside the loss, the batches of all clients, and the way of
their rows through the executor and back.

Letters: K clients of the cohort, k of a chunk, P numbers of a row, B batch, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.engine.batch import BatchLoader
from fedbench.engine.engine import Engine
from fedbench.engine.local_work import epochs_of, first_rate, step_fraction
from fedbench.engine.optim import Optimizer, Rate
from fedbench.engine.step import Chunk, Loss, Step, StepFunction, TrainingSetup
from fedbench.nn.columns import Columns


@dataclass(frozen=True)
class LocalTraining:
    """Settings of a local training that differ from the run's: `cohort.train(..., how=LocalTraining(...))`.

    Attributes:
        epochs: Epochs over each client's samples.  Default: local.epochs.
        steps: Local steps of every client, instead of epochs.
        batch_size: Default: local.batch_size.
        drop_last: Default: local.drop_last.
        lr: One learning rate, or one a client [K, 1].  Default: the optimizer's in this round.
        optimizer: Replaces the run's optimizer.
        split: The split of the federation to train on.
        key: Trainings of a round with the same key draw the same batches.
        buffers: Name under which optimizer buffers are stored between rounds (optimizer.reset=never).  A second
            personal row needs another name.  Use a dict such as {"theta": name, "v": name} if a step descends on
            states, too.
        throughput_weight: Fraction of the drawn samples that counts in images/s, in [0, 1].  A second pass over the
            same samples counts 0.
        uploaded: Whether the rows are uploaded afterwards, or which of their columns.  Privacy clips their steps.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    lr: Rate | None = None
    optimizer: Optimizer | None = None
    split: str = "train"
    key: str = "local"
    buffers: str | Mapping[str, str] = "theta"
    throughput_weight: float = 1.0
    uploaded: bool | Columns = True

    @property
    def buffer_names(self) -> dict[str, str]:
        """Under which name the kept buffers of theta, and of states, are stored."""
        return {"theta": self.buffers} if isinstance(self.buffers, str) else dict(self.buffers)


SETTINGS = {field.name for field in fields(LocalTraining)}


def check_states(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a named state of `train` that is a setting, is called theta, or is no tensor."""
    for name, value in state.items():
        if name in SETTINGS:
            raise ValueError(f"train({name}=...): say it as train(..., how=LocalTraining({name}=...))")
        if name == "theta":
            raise ValueError("train(theta=...): theta is the row that is trained; choose another name")
        if not isinstance(value, Tensor):
            raise ValueError(
                f"train({name}=...): a state is a tensor [K, ...], a row for each client, not a {type(value).__name__}"
            )


@dataclass
class BatchSchedule:
    """Which sample is in which batch.

    Of all clients: steps [K] and samples [K] that they train on.  assigned: for each rank the clients that it trains,
    as positions in the cohort, most steps first.  Of those of this rank: order [k], their positions, index [T, k, B],
    the numbers of their samples in the federation, and counts [T, k], how many of the B are real.
    """

    steps: np.ndarray
    samples: np.ndarray
    assigned: list[np.ndarray]
    order: np.ndarray
    index: np.ndarray
    counts: np.ndarray

    @classmethod
    def draw(cls, engine: Engine, context: RoundContext, how: LocalTraining) -> BatchSchedule:
        """The keyed batches of one training."""
        split = engine.federation.splits[how.split]
        sizes, batch_size, length = _lengths(engine, context, how)
        steps, samples = rng.lengths(sizes, batch_size, **length)  # [K]
        ranks = engine.executor.ranks
        assigned = ranks.assign(steps)
        order = assigned[ranks.rank]
        batches_key = rng.key(engine.seed, "batches", how.key, context.round)
        length = {name: each[order] if np.ndim(each) else each for name, each in length.items()}
        position, counts = rng.batches(batches_key, context.ids[order], sizes[order], batch_size, **length)
        begin = split.offsets[context.ids[order]]
        index = split.indices[np.minimum(begin[None, :, None] + position, max(len(split.indices) - 1, 0))]
        return cls(steps, samples, assigned, order, index, counts)


def _lengths(engine: Engine, context: RoundContext, how: LocalTraining) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Return the samples of each client [K], the batch size, and the length options of `rng.lengths`."""
    epochs = epochs_of(engine, context) if how.epochs is None else how.epochs
    length = {
        "epochs": epochs if how.steps is None else None,
        "steps": how.steps,
        "drop_last": engine.drop_last if how.drop_last is None else how.drop_last,
        "step_fraction": step_fraction(engine, context),
    }
    return engine.federation.splits[how.split].sizes_of(context.ids), how.batch_size or engine.batch_size, length


def rate_sums(engine: Engine, context: RoundContext, how: LocalTraining) -> np.ndarray:
    """Return the distance that each client's local steps move a row along a constant gradient of 1.  # [K] float64

    It is the sum of the learning rates, each multiplied by the effect of momentum.
    """
    optimizer = how.optimizer or engine.optimizer
    sizes, batch_size, length = _lengths(engine, context, how)
    steps = rng.lengths(sizes, batch_size, **length)[0]  # [K]
    reach = optimizer.reach(int(steps.max(initial=0)))[:, None]  # [T, 1]
    by_steps = optimizer.schedule.per == "step" and how.lr is None
    if by_steps:
        reach = reach * optimizer.schedule.of_steps(context.round, engine.rounds, steps)  # [T, K]
    lr = how.lr
    if lr is None:
        lr = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=not by_steps)
    taken = np.arange(len(reach))[:, None] < steps  # [T, K]
    return torch.as_tensor(lr).double().cpu().numpy().reshape(-1) * (reach * taken).sum(0)


class CohortTraining:
    """One local training of a cohort: what its clients start from, and the rows that they arrive at.

    outputs: theta [K, P], every named state [K, ...], loss [K].  kept: the optimizer buffers that clients keep between
    rounds, {"theta" or a state: {buffer: [K, ...]}}.
    """

    def __init__(
        self,
        engine: Engine,
        context: RoundContext,
        start: Tensor,
        state: dict[str, Tensor],
        step: StepFunction,
        loss: Loss | None,
        columns: Columns | None,
        how: LocalTraining,
    ):
        model = engine.model
        columns = model.trained if columns is None else columns & model.trained
        optimizer = how.optimizer or engine.optimizer
        step_key = rng.key(engine.seed, how.key, context.round)
        self.engine, self.context, self.how = engine, context, how
        self.start, self.state, self.step = start, state, step
        self.setup = TrainingSetup(engine, optimizer, columns, loss, step_key, _step_clip(engine, context, how))
        self.schedule = BatchSchedule.draw(engine, context, how)
        self.lr, self.lr_factors = self._rates(optimizer)
        self.kept = self._kept_buffers()
        self.outputs = {
            "theta": torch.empty(len(context), start.shape[-1], device=context.device),
            **{name: torch.empty_like(values) for name, values in state.items()},
            "loss": torch.zeros(len(context), device=context.device),
        }
        self.changed = {"theta", "loss"}  # what the other ranks need from this one

    def _rates(self, optimizer: Optimizer) -> tuple[Rate, Tensor | None]:
        """The learning rates of this training, and the factor of each local step where a schedule goes by steps.

        Rates that the method gives are taken as they are.  # factors: [T, K]
        """
        engine, context = self.engine, self.context
        if self.how.lr is not None:
            return self.how.lr, None
        if optimizer.schedule.per == "round":
            return first_rate(engine, context, optimizer), None
        rate = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=False)
        factors = optimizer.schedule.of_steps(context.round, engine.rounds, self.schedule.steps)
        rate = rate.to(context.device) if isinstance(rate, Tensor) else rate
        return rate, torch.from_numpy(factors).float().to(context.device)

    @property
    def mean_lr(self) -> Rate:
        """The learning rate over the local steps, on average: one, or one a client.  # [K, 1]"""
        if self.lr_factors is None:
            return self.lr
        steps = torch.from_numpy(self.schedule.steps).to(self.lr_factors.device)[:, None]  # [K, 1]
        taken = torch.arange(len(self.lr_factors), device=self.lr_factors.device) < steps  # [K, T]
        return self.lr * (self.lr_factors.T * taken).sum(1, keepdim=True) / steps.clamp_min(1)

    @property
    def start_is_shared(self) -> bool:
        """Whether all clients start from one row [P]."""
        return self.start.dim() == 1

    def run(self) -> None:
        """Train this rank's clients, chunk by chunk."""
        order = self.schedule.order
        self.engine.executor.run(self._train_chunk, len(order))

    def _train_chunk(self, a: int, b: int) -> None:
        """Train the clients at order[a:b]."""
        schedule, context, executor = self.schedule, self.context, self.engine.executor
        positions = schedule.order[a:b]
        where = torch.from_numpy(positions).to(context.device)
        begin = self.start.expand(b - a, -1).clone() if self.start_is_shared else self.start[where]
        chunk = Chunk(
            context.ids[positions],
            schedule.steps[positions],
            self.lr[where] if isinstance(self.lr, Tensor) else self.lr,
            None if self.lr_factors is None else self.lr_factors[:, where],
            executor.gradients.place_rows(begin),
            {name: values[where] for name, values in self.state.items()},
            {rows: {name: m[where] for name, m in buffers.items()} for rows, buffers in self.kept.items()},
        )
        index, counts = schedule.index[:, a:b], schedule.counts[:, a:b]
        loader = BatchLoader(self.engine.federation, chunk.ids, index, counts, draw_key=self.setup.step_key)
        train_chunk(self.setup, chunk, loader, self.step)
        self._write(where, chunk)

    def _write(self, where: Tensor, chunk: Chunk) -> None:
        """Put the rows of a chunk that has been trained where its clients are in the cohort."""
        distributed = self.engine.executor.ranks.is_distributed
        self.outputs["theta"][where], self.outputs["loss"][where] = chunk.theta, chunk.loss
        for name, values in chunk.state.items():
            self.outputs[name][where] = values
            if distributed and not torch.equal(values, self.state[name][where]):
                self.changed.add(name)
        for rows, buffers in self.kept.items():
            for name, values in buffers.items():
                values[where] = chunk.optimizer_state[rows][name]

    def exchange(self) -> None:
        """Give every rank the rows that the others trained.  A state that no step changed travels nowhere."""
        ranks = self.engine.executor.ranks
        buffers = {f"{rows}/{name}": m for rows, kept in self.kept.items() for name, m in kept.items()}
        exchanged = ranks.exchange(self.schedule.assigned, self.outputs | buffers, self.changed | buffers.keys())
        if ranks.is_distributed:  # a rank has filled in its own clients alone: all others' are as they were given
            for name in self.state.keys() - exchanged:
                self.outputs[name].copy_(self.state[name])

    def _kept_buffers(self) -> dict[str, dict[str, Tensor]]:
        """What clients kept of the optimizer; what is trained for an evaluation or a trial leaves no trace."""
        context, optimizer = self.context, self.setup.optimizer
        if optimizer.reset != "never" or not optimizer.buffers or not context.changes_state:
            return {}
        moved = {"theta": self.start, **self.state}
        return {
            rows: {b: self.engine.memory(owner, b, moved[rows].shape[-1])[context.ids] for b in optimizer.buffers}
            for rows, owner in self.how.buffer_names.items()
        }

    def store_buffers(self) -> None:
        """Write the kept optimizer buffers into their stores."""
        owners = self.how.buffer_names
        for rows, buffers in self.kept.items():
            for name, values in buffers.items():
                self.engine.memory(owners[rows], name, values.shape[1])[self.context.ids] = values

    def result(self) -> SimpleNamespace:
        """What `train` returns."""
        steps = torch.from_numpy(self.schedule.steps).float().to(self.context.device)
        return SimpleNamespace(**self.outputs, steps=steps, lr=self.mean_lr)


def _step_clip(engine: Engine, context: RoundContext, how: LocalTraining) -> tuple[Columns, float] | None:
    """The columns that will be uploaded and the norm to which privacy clips a step's gradient in them, if any."""
    privacy, uploaded = engine.privacy, how.uploaded
    if privacy is None or privacy.step_clip is None or not context.changes_state:
        return None
    if not isinstance(uploaded, Columns):
        uploaded = engine.model.all if uploaded else Columns([])
    return uploaded, privacy.step_clip


def train_chunk(setup: TrainingSetup, chunk: Chunk, loader: BatchLoader, step: StepFunction) -> None:
    """Run all local steps of a chunk, in place."""
    s, longest = Step(setup, chunk), int(chunk.num_steps.max(initial=0))
    active = (chunk.num_steps[None] > np.arange(longest)[:, None]).sum(1)  # [T]
    for t, k in enumerate(active.tolist()):
        setup.engine.executor.raise_if_stopped()
        s.begin(t, k)
        step(s, loader(t, k))
    chunk.loss /= torch.from_numpy(np.maximum(chunk.num_steps, 1)).to(chunk.loss)
