"""A local step of a chunk of clients: what a method's step reads, computes and changes.

A chunk is k >= 1 clients in descending order of their number of steps, so that those still training are its first k.
`Step` (called s in methods) shows every state cut to these; `Batch` carries padding as weight 0.  Chunks run one after
the other, in threads or on other ranks, with equal results.

Letters: k clients still training, K of the chunk, P numbers of a row, B batch, T steps, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.channel.privacy import clipped_towards
from fedbench.core.rng import RowRandom, client_keys, key
from fedbench.engine.batch import Batch, to_device
from fedbench.engine.engine import Engine
from fedbench.engine.gradients import (
    DifferentiatedParameters,
    GradientRequest,
    differentiate,
    plus_extra,
    training_pass,
    write_statistics,
)
from fedbench.engine.optim import Optimizer, OptimizerState, ParameterIndex, Rate
from fedbench.engine.per_client import PerClient
from fedbench.nn.columns import Columns
from fedbench.tasks.base import Task

Loss = Callable[["Step", Tensor, Batch], Tensor]  # (s, rows [k, P], batch) -> [k, B] or [k]
StepFunction = Callable[["Step", Batch], None]


@dataclass(frozen=True)
class TrainingSetup:
    """What all chunks of one training share.

    Attributes:
        engine: What all cohorts of the run share.
        optimizer: The optimizer of this training.
        columns: The columns that learn.
        loss: Replaces the task's loss, if not None.
        step_key: Key of the random draws in steps.
        clip: With privacy, the columns that will be uploaded and the largest norm of a step's gradient in them.
    """

    engine: Engine
    optimizer: Optimizer
    columns: Columns
    loss: Loss | None
    step_key: int
    clip: tuple[Columns, float] | None = None


@dataclass
class Chunk:
    """The rows of a chunk, which training changes in place.  Clients are in the order of the chunk.

    Attributes:
        ids: The clients.  # [K]
        num_steps: Their numbers of local steps, descending, on the host.  # [K]
        lr: The learning rate: one, or one a client [K, 1].
        lr_factors: Factors of lr in each step, if the schedule goes by steps.  # [T, K]
        theta: The rows that are trained.  # [K, P]
        state: The named states.  # [K, ...] each
        optimizer_state: The optimizer's buffers, by the name of the rows that they belong to.
        loss: Losses summed over the steps, and after the last step their mean.  # [K]
    """

    ids: np.ndarray
    num_steps: np.ndarray
    lr: Rate
    lr_factors: Tensor | None
    theta: Tensor
    state: dict[str, Tensor]
    optimizer_state: dict[str, OptimizerState]
    loss: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.loss = torch.zeros(len(self.ids), device=self.theta.device)

    def lr_of_step(self, t: int, k: int) -> Rate:
        """Return the learning rate of the first k clients in step t: one, or one a client [k, 1]."""
        lr = self.lr[:k] if isinstance(self.lr, Tensor) else self.lr
        return lr if self.lr_factors is None else self.lr_factors[t, :k, None] * lr


@dataclass(slots=True)
class StepProgress:
    """What the current local step has computed so far.

    Attributes:
        gradients: Number of gradients that were requested.
        tensors: Number of gradient tensors in use.
        random: Keyed draws of this step.
        differentiated: The rows that a custom loss was given.
        statistics: Running statistics that the step has updated.
        extra: Extra losses [k, B] of the module at the differentiated rows.
    """

    gradients: int = 0
    tensors: int = 0
    random: RowRandom | None = None
    differentiated: Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    extra: list[Tensor] = field(default_factory=list)

    def keep(self, rows: Tensor, statistics: dict[str, Tensor], extra: list[Tensor]) -> None:
        """Keep the running statistics and extra losses of a forward pass at some rows.

        Those of the differentiated rows count.  Statistics of other rows, such as a teacher's, are kept only until
        there are some.
        """
        if rows is self.differentiated or not self.statistics:
            self.statistics = statistics
        if rows is self.differentiated and extra:
            self.extra = extra

    def restart(self) -> None:
        """Begin another step."""
        self.gradients = self.tensors = 0
        self.random = self.differentiated = None
        self.statistics.clear()
        self.extra = []


@functools.cache
def _state_class(names: tuple[str, ...]) -> type:
    """Return a frozen dataclass with a field for each state: writing into a state works, rebinding it does not."""
    return make_dataclass("State", [(name, Tensor) for name in names], frozen=True, eq=False)


class Step:
    """A local step of a chunk, of the k clients that are still training.

    Attributes:
        state: The tensors that were passed to `cohort.train`, by name: s.state.alpha, ...  A step changes them in
            place: s.state.alpha.copy_(value).  # [k, ...] each
        t: The step, from 0.
        k: Number of clients.
        lr: The learning rate: one, or one a client [k, 1].
        num_steps: All local steps of each client, on the host.  # [k]
        columns: The columns that learn.
        engine: What all cohorts of the run share.
        model: The model as a row.
        task: The loss and the scores of the data set.
    """

    def __init__(self, setup: TrainingSetup, chunk: Chunk):
        self.engine, self.model = setup.engine, setup.engine.model
        self.task: Task = setup.engine.task
        self.columns = setup.columns
        self.k, self.t = 0, -1
        self.state: Any = None
        self._theta = chunk.theta
        self.lr, self.num_steps = chunk.lr, chunk.num_steps
        self._setup, self._chunk, self._progress = setup, chunk, StepProgress()
        self._gradients: list[Tensor] = []  # [K, P] each, used again in every step
        self._client_keys = to_device(client_keys(setup.step_key, chunk.ids), chunk.theta.device)  # [K]
        self._parameters: dict[tuple[tuple[int, int], ...], DifferentiatedParameters] = {}  # by the slices of columns
        self._named_views: dict[tuple[int, int], dict[str, Tensor]] = {}  # by address and k
        self._hyperparameters: dict[PerClient, Tensor] = {}  # [K, 1] each
        self._indices: dict[int, ParameterIndex] = {}  # by the width of rows

    def begin(self, t: int, k: int) -> None:
        """Move to step t with k clients."""
        self.t = t
        self._progress.restart()
        chunk = self._chunk
        if k != self.k:
            self.k = k
            self.num_steps = chunk.num_steps[:k]
            self._theta = chunk.theta[:k]
            self.state = _state_class(tuple(chunk.state))(*(values[:k] for values in chunk.state.values()))
            self.lr = chunk.lr_of_step(t, k)
            self._named_views = {}
        elif chunk.lr_factors is not None:
            self.lr = chunk.lr_of_step(t, k)

    @property
    def theta(self) -> Tensor:
        """The rows that are trained.  # [k, P]"""
        return self._theta

    def _rows(self, name: str) -> Tensor:
        """Return theta or a state by name.  # [k, ...]"""
        return self.theta if name == "theta" else getattr(self.state, name)

    @property
    def rng(self) -> RowRandom:
        """Keyed draws of this step, one row per client."""
        if self._progress.random is None:
            self._progress.random = RowRandom(self._client_keys[: self.k] ^ (key("t", self.t) >> 1))
        return self._progress.random

    def value(self, hyperparameter: float | PerClient) -> float | Tensor:
        """Return a hyperparameter for these clients: the number that all have, or each one's [k, 1]."""
        if not isinstance(hyperparameter, PerClient):
            return hyperparameter
        if hyperparameter not in self._hyperparameters:
            each = hyperparameter.of(self._chunk.ids, self._chunk.theta.device)  # [K, 1]
            self._hyperparameters[hyperparameter] = each
        return self._hyperparameters[hyperparameter][: self.k]

    @property
    def summed_loss(self) -> Tensor:
        """Each client's batch losses (of the first gradient of every step) so far, summed.  # [k]"""
        return self._chunk.loss[: self.k]

    def record(self, name: str, value: Tensor) -> None:
        """Write value [k] of this step into column t of a state [K, T], which `cohort.step_record()` makes."""
        self._rows(name)[:, self.t] = value

    # -- gradients ---------------------------------------------------------------------------------------
    def grad(
        self, batch: Batch, rows: Tensor | None = None, loss: Loss | None = None, columns: Columns | None = None
    ) -> Tensor:
        """Return the gradient of the batch loss.  Running statistics (BatchNorm) of the rows are updated in place.

        Args:
            batch: One batch of every client.
            rows: Where to take the gradient.  Default: theta.  # [k, P]
            loss: loss(s, rows, batch) replaces the task's loss.  It returns losses of samples [k, B], which are
                weighted by batch.weight, or losses of clients [k].
            columns: The columns to differentiate.  Default: those that learn.

        Returns:
            The gradient, zero in all other columns.  The tensor is used again in the next step.  # [k, P]
        """
        rows = self.theta if rows is None else rows
        loss = loss or self._setup.loss
        columns = self.columns if columns is None else columns & self.model.trained
        number = self._progress.gradients
        self._progress.gradients += 1
        if self.model.batch_statistics and not batch.full:
            grad, losses = self._gradient_by_batch_size(batch, rows, loss, columns, number)
        else:
            grad, losses = self._gradient(batch, rows, loss, columns, number)
        if number == 0:  # the first gradient of a step is the training loss
            self._chunk.loss[: len(losses)] += losses
        return grad

    def _gradient(
        self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, number: int
    ) -> tuple[Tensor, Tensor]:
        """Gradient [k, P] and losses [k] of the task's loss, or of the given one."""
        request = GradientRequest(
            self.model,
            self.task,
            rows,
            batch,
            columns,
            self._parameters_of(columns),
            self._next_gradient,
            self._dropout_keys,
            number,
            self._named,
        )
        if loss is None:
            return self.engine.executor.gradients(request)
        progress = self._progress
        progress.statistics, progress.extra = {}, []

        def losses(leaves: list[Tensor]) -> Tensor:
            progress.differentiated = torch.cat(leaves, dim=-1)
            return plus_extra(loss(self, progress.differentiated, batch), progress.extra, batch.weight)

        gradient_and_losses = differentiate(request, losses)
        write_statistics(self.model, rows, progress.statistics)
        return gradient_and_losses

    def _gradient_by_batch_size(
        self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, number: int
    ) -> tuple[Tensor, Tensor]:
        """Models with batch statistics: clients grouped by batch size, so that no padding enters the statistics."""
        grad = self._next_gradient()
        losses = torch.zeros(len(rows), device=rows.device)
        for size in np.unique(batch.counts):
            positions = np.flatnonzero(batch.counts == size)
            where = to_device(positions, rows.device)
            some_rows = rows[where]
            grad[where], losses[where] = self._subset(positions, where)._gradient(
                batch.take_clients(positions, where, int(size)), some_rows, loss, columns, number
            )
            rows[where] = some_rows  # the running statistics that the forward pass updated
        return grad, losses

    def _subset(self, positions: np.ndarray, where: Tensor) -> Step:
        """This step seen by some of its clients, for reading.  positions on the host, where: the same on the device."""
        chunk = Chunk(
            self._chunk.ids[positions],
            self.num_steps[positions],
            self.lr[where] if isinstance(self.lr, Tensor) else self.lr,  # of this step
            None,
            self.theta[where],
            {name: values[where] for name, values in vars(self.state).items()},
            {},
        )
        step = Step(self._setup, chunk)
        step.begin(self.t, len(positions))
        return step

    @property
    def _dropout_keys(self) -> Tensor | None:
        return self.rng.keys if self.model.has_dropout else None

    def _named(self, rows: Tensor) -> dict[str, Tensor]:
        """model.named(rows), remembered for the tensors that every step uses: the states and the gradients."""
        where = (rows.data_ptr(), self.k)
        if where not in self._named_views:
            named = self.model.named(rows)
            lasts = rows is self.theta or any(rows is state for state in vars(self.state).values())
            if lasts or any(rows.data_ptr() == g.data_ptr() for g in self._gradients):
                self._named_views[where] = named
            return named
        return self._named_views[where]

    def _parameters_of(self, columns: Columns) -> DifferentiatedParameters:
        slices = tuple(columns.slices)
        if slices not in self._parameters:
            self._parameters[slices] = DifferentiatedParameters.of(self.model, columns)
        return self._parameters[slices]

    def _next_gradient(self) -> Tensor:
        """A tensor [k, P] that no gradient of this step lies in yet."""
        number = self._progress.tensors
        if number == len(self._gradients):
            self._gradients.append(torch.empty_like(self._chunk.theta))
        self._progress.tensors += 1
        return self._gradients[number][: self.k]

    # -- forward passes, for losses of a method's own ------------------------------------------------------
    def forward(self, rows: Tensor, batch: Batch) -> Tensor:
        """Logits of rows [k, P] on the batch; differentiable inside a loss.  # [k, B, C]"""
        return self._run(rows, batch, None)

    def features(self, rows: Tensor, batch: Batch) -> Tensor:
        """What enters the head.  # [k, B, F]"""
        return self._run(rows, batch, "head")

    def _run(self, rows: Tensor, batch: Batch, until: str | None) -> Tensor:
        """A pass in training mode, of which the step keeps what goes with a gradient (StepProgress.keep)."""
        out, statistics, extra = training_pass(self.model, self.model.named(rows), batch.x, self._dropout_keys, until)
        self._progress.keep(rows, statistics, extra)
        return out

    def task_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The task's per-sample loss of logits [k, B, C].  # [k, B]"""
        return self.task.loss(logits, batch.y, batch.class_mask)

    # -- optimizer steps ---------------------------------------------------------------------------------
    def descend(
        self,
        grad: Tensor,
        name: str = "theta",
        lr: Rate | None = None,
        columns: Columns | None = None,
        uploaded: bool = True,
    ) -> None:
        """Take one step of the optimizer.

        Args:
            grad: The gradient.  # [k, P]
            name: The rows that move: "theta", or the name of a state, which has its own optimizer state.  All columns
                of a state of another width than the model's rows move.
            lr: Replaces the learning rate.
            columns: The columns that move; others keep their momentum.  Default: those that learn.
            uploaded: Whether these rows leave the client.  Privacy does not clip the others.
        """
        optimizer, rows = self._setup.optimizer, self._rows(name)
        columns = self.columns if columns is None else columns & self.model.trained
        if rows.shape[1] != self.model.size:
            columns = Columns([(0, rows.shape[1])])
        rate = self.lr if lr is None else lr
        if optimizer.clip is not None:
            grad = optimizer.clipped(grad, columns.take(grad))
        if self._setup.clip is not None and uploaded:
            grad = self._privately_clipped(grad, columns)
        index = self._parameter_index(rows.shape[1]) if "count" in optimizer.buffers else None
        optimizer.step(rows, grad, columns, self._optimizer_state(name), rate, index)

    def _optimizer_state(self, name: str) -> OptimizerState:
        """Return the optimizer's buffers of these rows."""
        optimizer, state = self._setup.optimizer, self._chunk.optimizer_state.setdefault(name, {})
        rows = self._chunk.theta if name == "theta" else self._chunk.state[name]
        for buffer in optimizer.buffers:
            if buffer not in state:
                state[buffer] = optimizer.new(buffer, rows, len(self.model.parameter_spans(rows.shape[1])))
        return {n: m[: self.k] for n, m in state.items()}

    def _parameter_index(self, width: int) -> ParameterIndex:
        if width not in self._indices:
            self._indices[width] = ParameterIndex(self.model.parameter_spans(width), self.theta.device)
        return self._indices[width]

    def _privately_clipped(self, grad: Tensor, columns: Columns) -> Tensor:
        """Clip the part of the gradient that moves uploaded columns."""
        assert self._setup.clip is not None
        uploaded, largest = self._setup.clip
        part = columns if grad.shape[1] != self.model.size else columns & uploaded
        return part.put(grad, clipped_towards(part.take(grad), None, largest))


def plain_step(extra_grad: Callable[[Step], Tensor] | None) -> StepFunction:
    """Gradient of the loss, plus extra_grad(s) [k, P] in the trained columns, then descend."""

    def step(s: Step, batch: Batch) -> None:
        g = s.grad(batch)
        if extra_grad is not None:
            extra = extra_grad(s)
            for a, b in s.columns.slices:
                g[:, a:b] += extra[:, a:b]
        s.descend(g)

    return step
