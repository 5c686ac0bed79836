"""A local step of a chunk, the clients computed at once: what a method's step function reads, computes and changes.

The clients of a chunk are in descending order of their number of steps.  The k clients that still train in a step are
therefore the first k rows.  `Step` (called s in methods) shows only these rows.  A `Batch` pads smaller batches with
weight 0.  Chunks run one after the other, in threads or on several ranks, and give the same results.

Letters: k clients still training, K clients of the chunk, P length of a row, B batch size, T local steps, C classes,
F features.
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
    add_extra_losses,
    differentiate,
    training_pass,
    write_running_statistics,
)
from fedbench.engine.optim import Optimizer, OptimizerState, ParameterIndex, Rate
from fedbench.engine.per_client import PerClient
from fedbench.nn.columns import Columns
from fedbench.tasks.base import Task

Loss = Callable[["Step", Tensor, Batch], Tensor]  # (s, rows [k, P], batch) -> losses of samples [k, B] or clients [k]
StepFunction = Callable[["Step", Batch], None]


@dataclass(frozen=True)
class TrainingSetup:
    """What all chunks of one training share.

    Attributes:
        engine: The run's engine, with model, task, data, executor and client states.
        optimizer: The optimizer of this training.
        columns: The parameters that learn, as columns of a row.
        loss: Replaces the task's loss, if not None.
        step_key: Key of the random numbers in steps.
        privacy_clip: With privacy, the columns that will be uploaded, and the maximum norm of a step's gradient in
            these columns.
    """

    engine: Engine
    optimizer: Optimizer
    columns: Columns
    loss: Loss | None
    step_key: int
    privacy_clip: tuple[Columns, float] | None = None


@dataclass
class Chunk:
    """The clients of a chunk and their rows, which training changes in place.

    Attributes:
        ids: The clients.  # [K]
        num_steps: Local steps of each client, descending, on the host.  # [K]
        lr: The learning rate: one, or one for each client [K, 1].
        lr_factors: Factors of lr in each step if the schedule changes with the steps, or None.  # [T, K]
        theta: The trained rows.  # [K, P]
        state: Further tensors of the clients by name, which steps may change.  # [K, ...] each
        optimizer_state: The optimizer's buffers, by "theta" or the name of a state.
        loss: Sum of each client's batch losses, and after the last step their mean.  # [K]
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
        """Return the learning rate in a local step, with the factor of a schedule that changes with steps.

        Args:
            t: Index of the step, from 0.
            k: Number of clients that train in it, the first k of the chunk.

        Returns:
            One number for all, or one for each of these clients [k, 1].
        """
        lr = self.lr[:k] if isinstance(self.lr, Tensor) else self.lr
        return lr if self.lr_factors is None else self.lr_factors[t, :k, None] * lr


@dataclass(slots=True)
class StepProgress:
    """Intermediate values of the current local step.

    Attributes:
        num_gradients: Number of calls of `Step.grad` so far.
        num_buffers: Number of gradient buffers in use.
        random: Random numbers of this step, or None before their first use.
        differentiated_rows: The rows that the last custom loss received, or None.
        running_statistics: Running statistics (BatchNorm) that a forward pass updated, by name.
        extra_losses: Additional losses of the module at the differentiated rows.  # [k, B] each
    """

    num_gradients: int = 0
    num_buffers: int = 0
    random: RowRandom | None = None
    differentiated_rows: Tensor | None = None
    running_statistics: dict[str, Tensor] = field(default_factory=dict)
    extra_losses: list[Tensor] = field(default_factory=list)

    def store_pass(self, rows: Tensor, running_statistics: dict[str, Tensor], extra_losses: list[Tensor]) -> None:
        """Store the running statistics and additional losses of a forward pass.

        The pass at the differentiated rows has priority.  Statistics of other rows, such as a teacher's, are stored
        only if there are none yet.  Additional losses of other rows are ignored.

        Args:
            rows: The parameters of the pass, one model per client.  # [k, P]
            running_statistics: The updated statistics, by name.  # [k, ...] each
            extra_losses: The additional losses of the module.  # [k, B] each
        """
        is_differentiated = rows is self.differentiated_rows
        if is_differentiated or not self.running_statistics:
            self.running_statistics = running_statistics
        if is_differentiated and extra_losses:
            self.extra_losses = extra_losses

    def reset(self) -> None:
        """Begin the next step: set counts to 0, `random` and `differentiated_rows` to None, and empty the rest."""
        self.num_gradients = 0
        self.num_buffers = 0
        self.random = None
        self.differentiated_rows = None
        self.running_statistics.clear()
        self.extra_losses = []


@functools.cache
def _state_class(names: tuple[str, ...]) -> type:
    """Return a frozen dataclass with a field for each of these states.

    A step can change the tensors in place.  Assigning another tensor to a field raises an error.
    """
    return make_dataclass("State", [(name, Tensor) for name in names], frozen=True, eq=False)


class Step:
    """A local step of the k clients of `_chunk` that still train; `_setup`: what chunks share; `_progress`: results.

    Args:
        setup: What all chunks of the training share.
        chunk: The clients and their rows.

    Attributes:
        state: The tensors that were passed to `cohort.train`, by name: s.state.alpha, ...  Change them in place:
            s.state.alpha.copy_(value).  # [k, ...] each
        t: Index of the step, from 0.
        k: Number of clients.
        lr: The learning rate: one, or one for each client [k, 1].
        num_steps: Local steps of each client in this training, on the host.  # [k]
        columns: The parameters that learn, as columns of a row.
        engine: The run's engine, with model, task, data, executor and client states.
        model: The model whose parameters are rows.
        task: The loss and the metrics.
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
        self._gradient_buffers: list[Tensor] = []  # [K, P] each, reused in every step
        self._client_keys = to_device(client_keys(setup.step_key, chunk.ids), chunk.theta.device)  # [K]
        self._parameters: dict[tuple[tuple[int, int], ...], DifferentiatedParameters] = {}  # by the slices of columns
        self._named_views: dict[tuple[int, int], dict[str, Tensor]] = {}  # by memory address and k
        self._hyperparameters: dict[PerClient, Tensor] = {}  # [K, 1] each
        self._parameter_indices: dict[int, ParameterIndex] = {}  # by the length of rows
        ranks = setup.engine.client_ranks
        # columns up to each client's rank [K, P] bool; None: all columns
        self._has_column = None if ranks is None else ranks.has(chunk.ids, self.model.size)

    def begin(self, t: int, k: int) -> None:
        """Begin step t.

        Args:
            t: Index of the step, from 0.
            k: Number of clients that train in it.
        """
        self.t = t
        self._progress.reset()
        chunk = self._chunk
        if k != self.k:  # clients with more steps come first, so the k that still train are the first k rows
            self.k = k
            self.num_steps = chunk.num_steps[:k]
            self._theta = chunk.theta[:k]
            # a dataclass with a field for each state, by name
            self.state = _state_class(tuple(chunk.state))(*(values[:k] for values in chunk.state.values()))
            self.lr = chunk.lr_of_step(t, k)
            self._named_views = {}  # the cache of `_named`, for the former number of rows
        elif chunk.lr_factors is not None:
            self.lr = chunk.lr_of_step(t, k)

    @property
    def theta(self) -> Tensor:
        """The model parameters that are trained, a row for each client of this step; change them in place.  # [k, P]"""
        return self._theta

    def _rows(self, name: str) -> Tensor:
        """Return the trained parameters if name is "theta", else the tensor of this name given to `cohort.train`."""
        return self.theta if name == "theta" else getattr(self.state, name)

    @property
    def rng(self) -> RowRandom:
        """Random numbers of this step: s.rng.normal(5), for example, are 5 normal numbers for each client, [k, 5].

        The numbers of a client depend only on the seed, the round, the key of the training, the step and the client.
        """
        if self._progress.random is None:
            # Keys are int64, so the unsigned 64-bit key of the step is shifted by one bit.
            self._progress.random = RowRandom(self._client_keys[: self.k] ^ (key("t", self.t) >> 1))
        return self._progress.random

    def value(self, hyperparameter: float | PerClient) -> float | Tensor:
        """Return the value of a hyperparameter.

        Args:
            hyperparameter: One value for all clients, or one for each.

        Returns:
            The value of all clients, or one for each of these clients.  # [k, 1]
        """
        if not isinstance(hyperparameter, PerClient):
            return hyperparameter
        if hyperparameter not in self._hyperparameters:
            values = hyperparameter.of(self._chunk.ids, self._chunk.theta.device)  # [K, 1]
            self._hyperparameters[hyperparameter] = values
        return self._hyperparameters[hyperparameter][: self.k]

    @property
    def summed_loss(self) -> Tensor:
        """Sum over the steps so far of each client's batch loss.  # [k]

        If a step computes several gradients, the loss of the first one counts.
        """
        return self._chunk.loss[: self.k]

    def record(self, name: str, value: Tensor) -> None:
        """Record one value for each client in this step.

        Args:
            name: Name of a state that `cohort.step_record()` created.  # [K, T]
            value: The values, written to column t.  # [k]
        """
        self._rows(name)[:, self.t] = value

    # -- gradients ---------------------------------------------------------------------------------------
    def grad(
        self, batch: Batch, rows: Tensor | None = None, loss: Loss | None = None, columns: Columns | None = None
    ) -> Tensor:
        """Return the gradient of the batch loss.  Running statistics (BatchNorm) of the rows are updated in place.

        Args:
            batch: One batch of every client.
            rows: The rows at which to compute the gradient.  Default: theta.  # [k, P]
            loss: loss(s, rows, batch) replaces the task's loss.  It returns losses of samples [k, B], which are
                weighted by batch.weight, or losses of clients [k].
            columns: The columns to differentiate.  Default: those that learn.

        Returns:
            The gradient, zero in all other columns.  Its memory is reused in the next step.  # [k, P]
        """
        rows = self.theta if rows is None else rows
        loss = loss or self._setup.loss
        columns = self.columns if columns is None else columns & self.model.trained
        index = self._progress.num_gradients  # of this gradient in the step
        self._progress.num_gradients += 1
        if self.model.batch_statistics and not batch.full:  # padding must not enter the statistics of a batch
            grad, losses = self._gradient_by_batch_size(batch, rows, loss, columns, index)
        else:
            grad, losses = self._gradient(batch, rows, loss, columns, index)
        if index == 0:  # the first gradient of a step is the training loss
            self._chunk.loss[: len(losses)] += losses
        return grad

    def _gradient(
        self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient [k, P] and the losses [k].

        Args:
            batch: One batch of every client.
            rows: The parameters of one model per client.  # [k, P]
            loss: Replaces the task's loss, if not None.
            columns: The parameters to differentiate, as columns of a row.
            index: Index of this gradient among those of the step.

        Returns:
            The gradient, zero in all other columns [k, P], and the losses of the clients [k].
        """
        request = GradientRequest(
            model=self.model,
            task=self.task,
            rows=rows,
            batch=batch,
            columns=columns,
            parameters=self._parameters_of(columns),
            new_gradient=self._new_gradient,
            dropout_keys=self._dropout_keys,
            index=index,
            named=self._named,
        )
        if loss is None:
            return self.engine.executor.gradients(request)
        progress = self._progress
        progress.running_statistics = {}
        progress.extra_losses = []

        def losses(leaves: list[Tensor]) -> Tensor:  # [k, B] or [k]
            # by this tensor, `store_pass` recognizes forward passes of the differentiated rows
            progress.differentiated_rows = torch.cat(leaves, dim=-1)
            values = loss(self, progress.differentiated_rows, batch)
            return add_extra_losses(values, progress.extra_losses, batch.weight)

        gradient_and_losses = differentiate(request, losses)
        write_running_statistics(self.model, rows, progress.running_statistics)
        return gradient_and_losses

    def _gradient_by_batch_size(
        self, batch: Batch, rows: Tensor, loss: Loss | None, columns: Columns, index: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient for clients with equal numbers of samples at a time.

        Padding would otherwise enter the batch statistics (BatchNorm).

        Args:
            batch: One batch of every client, of different sizes.
            rows: The rows, whose running statistics are updated.  # [k, P]
            loss: Replaces the task's loss, if not None.
            columns: The parameters to differentiate, as columns of a row.
            index: Index of this gradient among those of the step.

        Returns:
            The gradient, zero in all other columns [k, P], and the losses of the clients [k].
        """
        grad = self._new_gradient()
        losses = torch.zeros(len(rows), device=rows.device)
        for size in np.unique(batch.counts):
            positions = np.flatnonzero(batch.counts == size)
            device_positions = to_device(positions, rows.device)
            subset_rows = rows[device_positions]
            subset = self._subset(positions, device_positions)
            grad[device_positions], losses[device_positions] = subset._gradient(
                batch.take_clients(positions, device_positions, int(size)), subset_rows, loss, columns, index
            )
            if loss is not None:  # a loss may change states, such as sums of its features
                for name, values in vars(subset.state).items():
                    getattr(self.state, name)[device_positions] = values
            rows[device_positions] = subset_rows  # the forward pass updated their running statistics
        return grad, losses

    def _subset(self, positions: np.ndarray, device_positions: Tensor) -> Step:
        """Return a copy of this step for some of its clients.

        Args:
            positions: Positions of the clients, on the host.  # [n]
            device_positions: The same positions, on the device.  # [n]
        """
        chunk = Chunk(
            ids=self._chunk.ids[positions],
            num_steps=self.num_steps[positions],
            lr=self.lr[device_positions] if isinstance(self.lr, Tensor) else self.lr,
            lr_factors=None,  # self.lr is already that of this step
            theta=self.theta[device_positions],
            state={name: values[device_positions] for name, values in vars(self.state).items()},
            optimizer_state={},  # the copy computes a gradient only
        )
        step = Step(self._setup, chunk)
        step.begin(self.t, len(positions))
        return step

    @property
    def _dropout_keys(self) -> Tensor | None:
        """One random key per client, [k] int64, from which dropout masks of this step follow; None without dropout."""
        return self.rng.keys if self.model.has_dropout else None

    def _named(self, rows: Tensor) -> dict[str, Tensor]:
        """Return a dict from name to parameters or running statistics in rows [k, P], as views.  # [k, ...] each

        Views of theta, states and gradient buffers are cached, because their memory stays the same in all steps.
        """
        cache_key = (rows.data_ptr(), self.k)  # memory address, and number of rows
        if cache_key not in self._named_views:
            named = self.model.named(rows)
            is_state = rows is self.theta or any(rows is state for state in vars(self.state).values())
            if is_state or any(rows.data_ptr() == buffer.data_ptr() for buffer in self._gradient_buffers):
                self._named_views[cache_key] = named
            return named
        return self._named_views[cache_key]

    def _parameters_of(self, columns: Columns) -> DifferentiatedParameters:
        """Return the parameters that have at least one of these columns, and so need a gradient; cached."""
        slices = tuple(columns.slices)
        if slices not in self._parameters:
            self._parameters[slices] = DifferentiatedParameters.of(self.model, columns)
        return self._parameters[slices]

    def _new_gradient(self) -> Tensor:
        """Return an uninitialized tensor [k, P] for a gradient.  Calls in one step return different tensors."""
        index = self._progress.num_buffers
        if index == len(self._gradient_buffers):
            self._gradient_buffers.append(torch.empty_like(self._chunk.theta))
        self._progress.num_buffers += 1
        return self._gradient_buffers[index][: self.k]

    # -- forward passes, for custom losses ---------------------------------------------------------------
    def forward(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the logits in training mode, differentiable inside a loss.

        Args:
            rows: The parameters of one model per client.  # [k, P]
            batch: One batch of every client.

        Returns:
            The logits.  # [k, B, C]
        """
        return self._forward_pass(rows, batch, until=None)

    def features(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the input of the module named head in training mode, differentiable inside a loss.

        Args:
            rows: The parameters of one model per client.  # [k, P]
            batch: One batch of every client.

        Returns:
            The features.  # [k, B, F]
        """
        return self._forward_pass(rows, batch, until="head")

    def _forward_pass(self, rows: Tensor, batch: Batch, until: str | None) -> Tensor:
        """Run a forward pass in training mode, and store what a gradient needs (`StepProgress`).

        Args:
            rows: The parameters of one model per client.  # [k, P]
            batch: One batch of every client.
            until: Name of a module.  None: the whole pass.

        Returns:
            The logits [k, B, C], or the input of the module `until`.
        """
        out, running_statistics, extra_losses = training_pass(
            self.model, self.model.named(rows), batch.x, self._dropout_keys, until
        )
        self._progress.store_pass(rows, running_statistics, extra_losses)
        return out

    def task_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the task's loss of each sample.

        Args:
            logits: The logits.  # [k, B, C]
            batch: The batch of which they are logits.

        Returns:
            The losses.  # [k, B]
        """
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
            name: The rows to update: "theta", or the name of a state, which has its own optimizer state.  If a state
                has another length than the model's rows, all its columns are updated.
            lr: Replaces the learning rate.
            columns: The columns to update.  Others keep their momentum.  Default: those that learn.
            uploaded: Whether these rows are uploaded.  Privacy clips only gradients of uploaded rows.
        """
        optimizer, rows = self._setup.optimizer, self._rows(name)
        columns = self.columns if columns is None else columns & self.model.trained
        if rows.shape[1] != self.model.size:
            columns = Columns([(0, rows.shape[1])])
        rate = self.lr if lr is None else lr
        # with LoRA ranks that differ, only some columns of the row are the client's
        if self._has_column is not None and rows.shape[1] == self.model.size:
            grad = torch.where(self._has_column[: self.k], grad, 0)
        if optimizer.clip is not None:
            grad = optimizer.clipped(grad, columns.take(grad))
        if self._setup.privacy_clip is not None and uploaded:
            grad = self._clip_for_privacy(grad, columns)
        counts_steps = "count" in optimizer.buffers  # Adam counts the steps of each parameter
        index = self._parameter_index(rows.shape[1]) if counts_steps else None
        optimizer.step(rows, grad, columns, self._optimizer_state(name), rate, index)

    def _optimizer_state(self, name: str) -> OptimizerState:
        """Return the optimizer's buffers of theta or a state.  Missing ones are created.

        Args:
            name: "theta", or the name of the state.

        Returns:
            The buffers of the k clients, by name.  # [k, ...] each
        """
        optimizer, state = self._setup.optimizer, self._chunk.optimizer_state.setdefault(name, {})
        rows = self._chunk.theta if name == "theta" else self._chunk.state[name]
        for buffer in optimizer.buffers:
            if buffer not in state:
                num_parameters = len(self.model.parameter_spans(rows.shape[1]))  # for buffers with a number for each
                state[buffer] = optimizer.new(buffer, rows, num_parameters)
        return {buffer: values[: self.k] for buffer, values in state.items()}  # clients that still train come first

    def _parameter_index(self, length: int) -> ParameterIndex:
        """Return which parameter each column belongs to, for rows of `length` columns; cached.

        Rows of another length than the model's, such as a state, count as one parameter.
        """
        if length not in self._parameter_indices:
            self._parameter_indices[length] = ParameterIndex(self.model.parameter_spans(length), self.theta.device)
        return self._parameter_indices[length]

    def _clip_for_privacy(self, grad: Tensor, columns: Columns) -> Tensor:
        """Clip the gradient of each client in the updated columns that will be uploaded.

        Args:
            grad: The gradient.  # [k, P], or of another length for a state
            columns: The columns that are updated.

        Returns:
            The gradient, whose norm in the clipped columns is at most that of `TrainingSetup.privacy_clip`.
        """
        assert self._setup.privacy_clip is not None
        uploaded, max_norm = self._setup.privacy_clip
        # `uploaded` are columns of the model's rows; of a state of another length, all updated columns are clipped
        clipped_columns = columns if grad.shape[1] != self.model.size else columns & uploaded
        clipped = clipped_towards(clipped_columns.take(grad), center=None, radius=max_norm)
        return clipped_columns.put(grad, clipped)


def default_step(extra_grad: Callable[[Step], Tensor] | None) -> StepFunction:
    """Return the step function that methods use by default.

    Args:
        extra_grad: Returns a tensor that is added to the gradient in the columns that learn, or None.  # [k, P]

    Returns:
        A function that computes the gradient, adds `extra_grad(s)`, and takes a step of the optimizer.
    """

    def step(s: Step, batch: Batch) -> None:
        """Take one local step of the clients of s with one batch of each; extra_grad(s) is added, if it is not None."""
        gradient = s.grad(batch)
        if extra_grad is not None:
            extra = extra_grad(s)  # [k, P]
            for start, stop in s.columns.slices:
                gradient[:, start:stop] += extra[:, start:stop]
        s.descend(gradient)

    return step
