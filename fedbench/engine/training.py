"""Local training of a cohort, chunk by chunk.  A chunk has the clients that are computed at once.

`LocalTraining` holds the settings that a method may change.  `BatchSchedule` holds the random batches of all clients.
`CohortTraining` runs the chunks of a cohort on the executor and collects their rows.

Letters: K clients of the cohort, k clients of a chunk or rank, P length of a row, B batch size, T local steps.
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
from fedbench.core.split import Ragged
from fedbench.engine.batch import BatchLoader
from fedbench.engine.divided_tensor import DividedTensor, divided
from fedbench.engine.engine import Engine
from fedbench.engine.local_work import batch_size_of, epochs_of, first_rate, step_fraction
from fedbench.engine.optim import Optimizer, Rate
from fedbench.engine.step import Chunk, Loss, Step, StepFunction, TrainingSetup
from fedbench.nn.columns import Columns


@dataclass(frozen=True)
class LocalTraining:
    """Settings of one local training that differ from the run's: `cohort.train(..., how=LocalTraining(...))`.

    Attributes:
        epochs: Epochs over each client's samples.  Default: local.epochs.
        steps: Local steps of every client, instead of epochs.
        batch_size: Batch size, one or one for each client [K].  Default: local.batch_size.
        drop_last: Whether to drop a smaller last batch of an epoch.  Default: local.drop_last.
        lr: One learning rate, or one for each client [K, 1].  Default: the optimizer's in this round.
        optimizer: Optimizer that replaces the run's.
        split: Samples to train on: a split of the federation, or the result of `cohort.subsample`.
        key: Key of the batches.  Trainings with the same key in a round use the same batches.
        buffers: Name under which optimizer buffers are stored between rounds (optimizer.reset=never).  A second
            personal row needs another name.  If a step also descends on states, pass a dict from "theta" and the
            states' names to names of buffers.
        throughput_weight: Fraction of the samples that counts in images/s, in [0, 1].  Pass 0 for a second pass over
            the same samples.
        uploaded: Whether the rows are uploaded afterwards, or which of their columns.  Privacy clips the gradients of
            uploaded columns.
    """

    epochs: float | None = None
    steps: int | None = None
    batch_size: int | np.ndarray | None = None
    drop_last: bool | None = None
    lr: Rate | None = None
    optimizer: Optimizer | None = None
    split: str | Ragged = "train"
    key: str = "local"
    buffers: str | Mapping[str, str] = "theta"
    throughput_weight: float = 1.0
    uploaded: bool | Columns = True

    @property
    def buffer_names(self) -> dict[str, str]:
        """The setting `buffers` as a dict: from "theta" or a state to the name under which its buffers are stored."""
        return {"theta": self.buffers} if isinstance(self.buffers, str) else dict(self.buffers)


SETTING_NAMES = {field.name for field in fields(LocalTraining)}


def check_states(state: Mapping[str, Any]) -> None:
    """Check the named states that a method passed to `cohort.train`.

    Args:
        state: The states, by name.

    Raises:
        ValueError: A state is named theta, has the name of a setting, or is not a tensor.
    """
    for name, value in state.items():
        if name in SETTING_NAMES:
            raise ValueError(
                f"cohort.train({name}=...) passes {name} as a state of clients, but it is a setting of the training: "
                f"pass cohort.train(..., how=LocalTraining({name}=...))"
            )
        if name == "theta":
            raise ValueError(
                "cohort.train(theta=...) passes theta as a state of clients, but theta are the trained parameters: "
                "give the state another name"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"cohort.train({name}=...) must be a tensor [K, ...] with one row for each of the K clients, got "
                f"{type(value).__name__}: pass other values by a closure of the step function"
            )


@dataclass
class BatchSchedule:
    """The batches of one local training.

    Attributes:
        num_steps: Local steps of each client of the cohort.  # [K]
        num_samples: Samples that each client trains on, repetitions included.  # [K]
        positions_by_rank: For each rank, the positions in the cohort of its clients.  Clients with more steps come
            first.
        positions: The positions of this rank's clients.  # [k]
        sample_index: Indices of this rank's samples in the federation.  # [T, k, B]
        counts: How many of the B samples are real.  The others are padding.  # [T, k]
        batch_sizes_differ: Whether clients have different batch sizes, so that B is the largest of them.
    """

    num_steps: np.ndarray
    num_samples: np.ndarray
    positions_by_rank: list[np.ndarray]
    positions: np.ndarray
    sample_index: np.ndarray
    counts: np.ndarray
    batch_sizes_differ: bool

    @classmethod
    def create(cls, engine: Engine, context: RoundContext, how: LocalTraining) -> BatchSchedule:
        """Assign the clients to ranks, and sample the batches of this rank's clients.

        Args:
            engine: Has the samples, the options local.*, the seed, and the processes that train.
            context: The clients and the round.
            how: The settings of the training.

        Returns:
            The schedule.
        """
        split = _samples(engine, how)
        sizes, options = _schedule_options(engine, context, how)
        num_steps, num_samples = rng.lengths(sizes, **options)  # [K] each
        ranks = engine.executor.ranks
        positions_by_rank = ranks.assign(num_steps, context.ids)  # positions of each rank's clients in the cohort
        positions = positions_by_rank[ranks.rank]  # [k]
        ids = context.ids[positions]
        rank_options: dict[str, Any] = {
            name: value[positions] if isinstance(value, np.ndarray) else value for name, value in options.items()
        }
        batches_key = rng.key(engine.seed, "batches", how.key, context.round)
        # positions in a client's list of samples [T, k, B], and how many are real [T, k]
        index_in_list, counts = rng.batches(batches_key, ids, sizes[positions], **rank_options)
        first = split.offsets[ids]  # where the list of each client begins in split.indices  [k]
        last_index = max(len(split.indices) - 1, 0)  # padding of a client without samples may point behind the end
        return cls(
            num_steps=num_steps,
            num_samples=num_samples,
            positions_by_rank=positions_by_rank,
            positions=positions,
            sample_index=split.indices[np.minimum(first[None, :, None] + index_in_list, last_index)],
            counts=counts,
            batch_sizes_differ=isinstance(options["batch_size"], np.ndarray),
        )

    def width(self, start: int, stop: int) -> int:
        """Return B, the samples of a client in a batch, padding included, for the clients positions[start:stop]."""
        return int(self.counts[:, start:stop].max(initial=1)) if self.batch_sizes_differ else self.sample_index.shape[2]


def _samples(engine: Engine, how: LocalTraining) -> Ragged:
    """Return the samples to train on, indices for each of the N clients: the split named how.split, or how.split."""
    return engine.federation.splits[how.split] if isinstance(how.split, str) else how.split


def _schedule_options(engine: Engine, context: RoundContext, how: LocalTraining) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the arguments of `rng.lengths` for a training: the run's, unless `how` has others.

    Args:
        engine: Has the samples, and the options local.* and system.*, which `how` may replace.
        context: The clients and the round.
        how: The settings of the training.

    Returns:
        The number of samples of each client [K], and the other arguments by name.
    """
    steps = how.steps
    if steps is None and how.epochs is None:  # how.epochs replaces the run's number of steps, too
        steps = engine.steps
    epochs = epochs_of(engine, context) if how.epochs is None else how.epochs
    options = {
        "batch_size": batch_size_of(engine, context) if how.batch_size is None else how.batch_size,
        "epochs": epochs if steps is None else None,
        "steps": steps,
        "drop_last": engine.drop_last if how.drop_last is None else how.drop_last,
        "step_fraction": step_fraction(engine, context),
    }
    sizes = _samples(engine, how).sizes_of(context.ids)
    return sizes, options


def rate_sums(engine: Engine, context: RoundContext, how: LocalTraining) -> np.ndarray:
    """Return how far each client's local steps move its parameters along a constant gradient of 1.

    It is the sum over the local steps of the learning rate times the effect of momentum (`Optimizer.reach`).

    Args:
        engine: Has the optimizer, the number of rounds, the samples and local.*, which `how` may replace.
        context: The clients and the round.
        how: The settings of the training.

    Returns:
        One sum for each client.  # [K] float64
    """
    optimizer = how.optimizer or engine.optimizer
    sizes, options = _schedule_options(engine, context, how)
    num_steps = rng.lengths(sizes, **options)[0]  # [K]
    reach = optimizer.reach(int(num_steps.max(initial=0)))[:, None]  # [T, 1]
    scheduled_by_step = optimizer.schedule.per == "step" and how.lr is None
    if scheduled_by_step:
        reach = reach * optimizer.schedule.of_steps(context.round, engine.rounds, num_steps)  # [T, K]
    lr = how.lr
    if lr is None:
        lr = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=not scheduled_by_step)
    is_active = np.arange(len(reach))[:, None] < num_steps  # [T, K]
    rates = torch.as_tensor(lr).double().cpu().numpy().reshape(-1)  # [1] or [K]
    return rates * (reach * is_active).sum(0)


class CohortTraining:
    """One local training of a cohort, from the rows `start` and the tensors `state`, with the settings `how`.

    Call `run`, `exchange`, `save_buffers` and `result`, in this order.

    Args:
        engine: Has the model, data, optimizer, executor and client states of the run.
        context: The clients and the round.
        start: The rows to start from: one for all clients [P], or one for each [K, P].
        state: Further tensors of the clients by name, which steps may change.  # [K, ...] each
        step: The function of a local step.
        loss: Replaces the task's loss, if not None.
        columns: The columns that learn.  None: all trained columns.
        how: The settings of the training.

    Attributes:
        schedule: The batches.
        lr: The learning rate: one, or one for each client [K, 1].
        lr_factors: Factors of lr in each step [T, K], or None.
        stored_buffers: Optimizer buffers that clients keep between rounds [K, ...].  The outer key is "theta" or a
            state, the inner key is the name of a buffer.
        outputs: theta [K, P], each state [K, ...] and loss [K], by name.
        changed_names: Names of the outputs that this rank changed.
        is_divided: Whether this rank keeps the rows that it trained, instead of sending them to the others.  Then,
            theta and the states in `outputs` have k rows, in ascending order of the clients.
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
        self.setup = TrainingSetup(engine, optimizer, columns, loss, step_key, _privacy_clip(engine, context, how))
        self.schedule = BatchSchedule.create(engine, context, how)
        self.lr, self.lr_factors = self._rates(optimizer)
        self.stored_buffers = self._load_buffers()
        self._mine = torch.from_numpy(np.sort(self.schedule.positions)).to(context.device)  # [k]
        self.is_divided = engine.executor.ranks.is_distributed and engine.rows.is_sharded
        count = len(self.schedule.positions) if self.is_divided else len(context)
        self.outputs = {
            "theta": torch.empty(count, start.shape[-1], device=context.device),
            **{name: values.new_empty(count, *values.shape[1:]) for name, values in state.items()},
            "loss": torch.zeros(len(context), device=context.device),
        }
        self.changed_names = {"theta", "loss"}

    def _rates(self, optimizer: Optimizer) -> tuple[Rate, Tensor | None]:
        """Return the learning rate and its factors.

        Args:
            optimizer: The optimizer, with its schedule.

        Returns:
            The learning rate, one or one for each client [K, 1]; and its factors in the local steps [T, K], or None if
            the schedule changes with rounds only.  A learning rate that the method passed is not scheduled.
        """
        engine, context = self.engine, self.context
        if self.how.lr is not None:
            return self.how.lr, None
        if optimizer.schedule.per == "round":
            return first_rate(engine, context, optimizer), None
        rate = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=False)
        factors = optimizer.schedule.of_steps(context.round, engine.rounds, self.schedule.num_steps)
        rate = rate.to(context.device) if isinstance(rate, Tensor) else rate
        return rate, torch.from_numpy(factors).float().to(context.device)

    @property
    def mean_lr(self) -> Rate:
        """The mean learning rate over a client's local steps: one number if all clients share it, else [K, 1]."""
        if self.lr_factors is None:
            return self.lr
        # lr_factors [T, K]: the factor of each step, of which a client takes the first num_steps
        num_steps = torch.from_numpy(self.schedule.num_steps).to(self.lr_factors.device)[:, None]  # [K, 1]
        is_active = torch.arange(len(self.lr_factors), device=self.lr_factors.device) < num_steps  # [K, T]
        return self.lr * (self.lr_factors.T * is_active).sum(1, keepdim=True) / num_steps.clamp_min(1)

    @property
    def start_is_shared(self) -> bool:
        """Whether all clients start from the same row [P], rather than each from its own row of [K, P]."""
        return self.start.dim() == 1

    def run(self) -> None:
        """Train all clients of this process, chunk by chunk, and write their results to `self.outputs`."""
        with self.engine.executor.ranks.undistributed():
            self.engine.executor.run(self._train_chunk, len(self.schedule.positions))

    def _train_chunk(self, start: int, stop: int) -> None:
        """Train one chunk, the clients at schedule.positions[start:stop], and write their results to `outputs`."""
        schedule, context, executor = self.schedule, self.context, self.engine.executor
        positions = schedule.positions[start:stop]
        index = torch.from_numpy(positions).to(context.device)
        # a copy of the start for each client of the chunk  [k, P]
        rows = self.start.expand(stop - start, -1).clone() if self.start_is_shared else self.start[index]
        if self.engine.client_ranks is not None:  # 0 in columns above the LoRA rank of a client
            rows = self.engine.client_ranks.truncated(context.ids[positions], rows)
        chunk = Chunk(
            ids=context.ids[positions],
            num_steps=schedule.num_steps[positions],
            lr=self.lr[index] if isinstance(self.lr, Tensor) else self.lr,
            lr_factors=None if self.lr_factors is None else self.lr_factors[:, index],
            theta=executor.gradients.to_static_rows(rows),  # CUDA graphs need a fixed memory address
            state={name: values[index] for name, values in self.state.items()},
            optimizer_state={
                rows_name: {buffer: values[index] for buffer, values in buffers.items()}
                for rows_name, buffers in self.stored_buffers.items()
            },
        )
        loader = BatchLoader(
            self.engine.federation,
            chunk.ids,
            schedule.sample_index[:, start:stop, : schedule.width(start, stop)],
            schedule.counts[:, start:stop],
            random_key=self.setup.step_key,  # for augmentation and other random inputs
        )
        train_chunk(self.setup, chunk, loader, self.step)
        self._collect(index, chunk)

    def _collect(self, index: Tensor, chunk: Chunk) -> None:
        """Copy the results of a trained chunk to its positions in the cohort.

        Args:
            index: The positions, on the device.  # [k]
            chunk: The trained clients.
        """
        has_other_ranks = self.engine.executor.ranks.world_size > 1
        # _mine: positions of this rank's clients in the cohort, ascending
        where = torch.searchsorted(self._mine, index) if self.is_divided else index  # rows of `outputs`  [k]
        self.outputs["theta"][where] = chunk.theta
        self.outputs["loss"][index] = chunk.loss
        for name, values in chunk.state.items():
            self.outputs[name][where] = values
            if has_other_ranks and not torch.equal(values, self.state[name][index]):  # only these are sent
                self.changed_names.add(name)
        for rows_name, buffers in self.stored_buffers.items():  # buffers that clients keep between rounds
            for buffer, values in buffers.items():
                values[index] = chunk.optimizer_state[rows_name][buffer]

    def exchange(self) -> None:
        """Exchange trained rows, states and optimizer buffers between processes, so that each has those of all clients.

        States that no step changed are not sent.  If rows are divided, only losses are sent.
        """
        ranks = self.engine.executor.ranks
        if self.is_divided:
            ranks.exchange(self.schedule.positions_by_rank, {"loss": self.outputs["loss"]})
            for name in ("theta", *self.state):
                self.outputs[name] = divided(self.outputs[name], self.context.ids, ranks)
            for stored in self.stored_buffers.values():
                for buffer, values in stored.items():
                    if not isinstance(values, DividedTensor):  # only this rank's rows are new
                        stored[buffer] = divided(values[self._mine], self.context.ids, ranks)
            return
        buffers = {
            f"{rows_name}/{buffer}": values
            for rows_name, stored in self.stored_buffers.items()
            for buffer, values in stored.items()
        }
        # the third argument: names of what may have changed; the result: names of what any rank changed
        exchanged = ranks.exchange(
            self.schedule.positions_by_rank, self.outputs | buffers, self.changed_names | buffers.keys()
        )
        # States that were not sent are equal to their initial values, which this rank has for all clients.
        if ranks.is_distributed:
            for name in self.state.keys() - exchanged:
                self.outputs[name].copy_(self.state[name])

    def _load_buffers(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer buffers that the clients keep from earlier rounds (optimizer.reset=never).

        Returns:
            The buffers [K, ...], by "theta" or the name of a state, and then by the name of the buffer.  Empty with
            optimizer.reset=round, and in evaluations and trials, which use new buffers.
        """
        engine, context, optimizer = self.engine, self.context, self.setup.optimizer
        if optimizer.reset != "never" or not optimizer.buffers or not context.changes_state:
            return {}
        start_rows = {"theta": self.start, **self.state}  # [P] or [K, P], and [K, ...] each, for the lengths of buffers
        # rows_name: "theta" or a state; owner: the name under which its buffers are stored
        return {
            rows_name: {
                buffer: engine.optimizer_state(owner, buffer, start_rows[rows_name].shape[-1])[context.ids]
                for buffer in optimizer.buffers
            }
            for rows_name, owner in self.how.buffer_names.items()
        }

    def save_buffers(self) -> None:
        """Store the trained clients' optimizer buffers for their next round; nothing unless optimizer.reset=never."""
        owners = self.how.buffer_names  # from "theta" or a state to the name under which its buffers are stored
        for rows_name, buffers in self.stored_buffers.items():
            for buffer, values in buffers.items():  # such as momentum [K, ...]
                stored = self.engine.optimizer_state(owners[rows_name], buffer, values.shape[1])
                stored[self.context.ids] = values

    def result(self) -> SimpleNamespace:
        """Return the result of `cohort.train`.

        Returns:
            A namespace with theta [K, P], each state [K, ...], loss [K] (the mean over a client's local steps), steps
            [K] float32, and lr, the mean learning rate of the local steps (a number, or [K, 1] if clients differ).
        """
        steps = torch.from_numpy(self.schedule.num_steps).float().to(self.context.device)
        return SimpleNamespace(**self.outputs, steps=steps, lr=self.mean_lr)


def _privacy_clip(engine: Engine, context: RoundContext, how: LocalTraining) -> tuple[Columns, float] | None:
    """Return what privacy clips in each local step.

    Args:
        engine: Has the local privacy of the run, or None, and the model.
        context: The clients and the round.
        how: The settings of the training.

    Returns:
        The columns that will be uploaded, and the largest norm of their gradient.  None if steps are not clipped:
        without privacy, with calibration=analytic, which clips uploads, or outside of rounds.
    """
    privacy, uploaded = engine.privacy, how.uploaded
    if privacy is None or privacy.step_clip is None or not context.changes_state:
        return None
    if not isinstance(uploaded, Columns):  # True: all columns; False: none
        uploaded = engine.model.all if uploaded else Columns([])
    return uploaded, privacy.step_clip


def train_chunk(setup: TrainingSetup, chunk: Chunk, loader: BatchLoader, step: StepFunction) -> None:
    """Run all local steps of a chunk.  Its rows, states and losses change in place.

    Args:
        setup: What all chunks of the training share.
        chunk: The clients, in descending order of their number of steps.
        loader: Returns the batch of a step.
        step: The function of a local step.
    """
    s = Step(setup, chunk)
    max_steps = int(chunk.num_steps.max(initial=0))
    num_active = (chunk.num_steps[None] > np.arange(max_steps)[:, None]).sum(1)  # clients that train in step t  [T]
    for t, k in enumerate(num_active.tolist()):
        setup.engine.executor.raise_if_stopped()
        s.begin(t, k)
        step(s, loader(t, k))
    chunk.loss /= torch.from_numpy(np.maximum(chunk.num_steps, 1)).to(chunk.loss)
