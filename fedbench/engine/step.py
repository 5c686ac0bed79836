"""Inside a local step of a chunk of clients: what a method's step sees, and what it can ask for.

A chunk is k >= 1 clients in descending order of their number of steps, so that those still training are a
prefix.  `Step` (called s in methods) shows every state cut to that prefix; `Batch` carries padding as weight 0.
A chunk sees only itself: chunks run one after the other, in threads or on other ranks, with equal results.

Letters: k clients still training, K of the chunk, P numbers of a row, B batch, T steps, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbench.channel.privacy import clipped_towards
from fedbench.core.rng import RowRandom, client_keys, key
from fedbench.engine.batch import Batch, to_device
from fedbench.engine.chunk import Chunk, Loss, StepFunction, StepProgress, TrainingSetup
from fedbench.engine.gradients import (
    DifferentiatedParameters,
    GradientRequest,
    differentiate,
    plus_extra,
    training_pass,
    write_statistics,
)
from fedbench.engine.optim import Memory, Rate, StepGroups
from fedbench.engine.per_client import PerClient
from fedbench.nn.flat import Columns, FlatModel
from fedbench.tasks.base import Task

if TYPE_CHECKING:
    from fedbench.engine.engine import Engine


class Step:
    """Inside a local step: states by name, cut to the k rows still training, and what can be computed on them.

    s.theta [k, P] and every tensor passed to `train` as state: s.alpha, s.c_i, ... ; writing into them in place, or
    assigning s.alpha = value, changes the state.  s.t: the step.  s.lr: the learning rate.  s.rng: keyed draws.
    s.model, s.num_steps [k] (host): all local steps of each client.
    """

    engine: Engine
    model: FlatModel
    task: Task
    columns: Columns
    k: int
    t: int
    lr: Rate
    num_steps: np.ndarray
    _setup: TrainingSetup
    _chunk: Chunk
    _progress: StepProgress
    _states: dict[str, Tensor]
    _pool: list[Tensor]
    _client_keys: Tensor
    _parameters: dict[tuple[tuple[int, int], ...], DifferentiatedParameters]
    _layouts: dict[tuple[int, int], dict[str, Tensor]]
    _hyperparameters: dict[PerClient, Tensor]
    _step_groups: dict[str, StepGroups]

    def __init__(self, setup: TrainingSetup, chunk: Chunk):
        # Assigning to an attribute writes into a state (see __setattr__): what is no state goes into __dict__ here and
        # in `begin`, nowhere else.
        self.__dict__.update(
            engine=setup.engine,
            model=setup.engine.model,
            task=setup.engine.task,
            columns=setup.columns,
            k=0,
            t=-1,
            lr=chunk.lr,
            num_steps=chunk.num_steps,
            _setup=setup,
            _chunk=chunk,
            _progress=StepProgress(),
            _states={},  # theta and the named ones, cut to the clients still training
            _pool=[],  # tensors [K, P] for gradients, used again in every step
            _client_keys=to_device(client_keys(setup.step_key, chunk.ids), chunk.theta.device),  # [K]
            _parameters={},  # by the slices of columns
            _layouts={},  # named views of states and gradients, by address and k
            _hyperparameters={},  # of the chunk, each [K, 1]
            _step_groups={},  # by the name of the rows
        )

    def begin(self, t: int, k: int) -> None:
        """Move to step t with k clients active."""
        self.__dict__["t"] = t
        self._progress.restart()
        if k != self.k:
            chunk = self._chunk
            self.__dict__.update(
                k=k,
                num_steps=chunk.num_steps[:k],
                lr=chunk.lr[:k] if isinstance(chunk.lr, Tensor) else chunk.lr,
                _states={"theta": chunk.theta[:k], **{name: values[:k] for name, values in chunk.state.items()}},
                _layouts={},
            )
        if self._chunk.pace is not None:
            self.__dict__["lr"] = self._chunk.lr_of_step(t, k)

    # -- states ------------------------------------------------------------------------------------------
    if TYPE_CHECKING:
        theta: Tensor

        def __getattr__(self, name: str) -> Tensor: ...
        def __setattr__(self, name: str, value: Tensor) -> None: ...

    else:

        def __getattr__(self, name: str) -> Tensor:
            try:
                return self.__dict__["_states"][name]
            except KeyError:
                raise AttributeError(f"this step has no state {name!r}: pass it to cohort.train({name}=...)") from None

        def __setattr__(self, name: str, value: Tensor) -> None:
            if name not in self._states:
                raise AttributeError(f"{name!r} is no state of this step: pass it to cohort.train({name}=...)")
            if value is not self._states[name]:
                self._states[name].copy_(value)

    @property
    def rng(self) -> RowRandom:
        """Keyed draws of this step, one row per active client."""
        if self._progress.random is None:
            self._progress.random = RowRandom(self._client_keys[: self.k] ^ (key("t", self.t) >> 1))
        return self._progress.random

    def value(self, hyperparameter: float | PerClient) -> float | Tensor:
        """A hyperparameter for the active clients: the number that all have, or each one's.  # [k, 1]"""
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
        """Keep value [k] of this step in column t of a state [K, T], `cohort.step_record()` as passed to `train`."""
        self._states[name][:, self.t] = value

    # -- gradients ---------------------------------------------------------------------------------------
    def grad(
        self, batch: Batch, rows: Tensor | None = None, loss: Loss | None = None, columns: Columns | None = None
    ) -> Tensor:
        """Gradient of the batch loss at rows (default s.theta), zero outside the trained columns.  # [k, P]

        loss(s, rows, batch) -> per-sample losses [k, B] (weighted here by batch.weight) or per-client ones [k].
        The result lives until the next step.  Running statistics (BatchNorm) of rows are updated in place.
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
            self.lr[where] if isinstance(self.lr, Tensor) else self.lr,  # of this step, paced already
            None,
            self.theta[where],
            {name: values[where] for name, values in self._states.items() if name != "theta"},
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
        if where not in self._layouts:
            named = self.model.named(rows)
            pooled = any(rows.data_ptr() == g.data_ptr() for g in self._pool)
            if pooled or any(rows is state for state in self._states.values()):
                self._layouts[where] = named
            return named
        return self._layouts[where]

    def _parameters_of(self, columns: Columns) -> DifferentiatedParameters:
        slices = tuple(columns.slices)
        if slices not in self._parameters:
            self._parameters[slices] = DifferentiatedParameters.of(self.model, columns)
        return self._parameters[slices]

    def _next_gradient(self) -> Tensor:
        """A tensor [k, P] that no gradient of this step lies in yet."""
        number = self._progress.tensors
        if number == len(self._pool):
            self._pool.append(torch.empty_like(self._chunk.theta))
        self._progress.tensors += 1
        return self._pool[number][: self.k]

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
        """One step of the configured optimizer on the named rows, in the trained columns (or these ones).

        The rows' buffers are their own.  Columns that are not named stand still, momentum included.  A state that is
        no row of the model (of another width) has no such columns: all of it moves.  uploaded=False: what moves here
        never leaves the client (`train` may say so of all steps), so that privacy does not clip it.
        """
        optimizer, rows = self._setup.optimizer, self._states[name]
        columns = self.columns if columns is None else columns & self.model.trained
        if rows.shape[1] != self.model.size:
            columns = Columns([(0, rows.shape[1])])
        memory, rate = self._memory(name), self.lr if lr is None else lr
        if optimizer.clip is not None:
            grad = optimizer.clipped(grad, columns.take(grad))
        if self._setup.clip is not None and uploaded:
            grad = self._privately_clipped(grad, columns)
        for part, buffers in self._counted(name, columns, memory):
            for a, b in part.slices:
                some = {n: m if n == "count" else m[:, a:b] for n, m in buffers.items()}
                optimizer.update(rows[:, a:b], grad[:, a:b], some, rate)

    def _memory(self, name: str) -> Memory:
        """The optimizer's buffers of the named rows, of the clients still training."""
        optimizer, memory = self._setup.optimizer, self._chunk.memory.setdefault(name, {})
        if "count" in optimizer.buffers and name not in self._step_groups:
            self._step_groups[name] = StepGroups(self._parameters_in(name), memory.get("count"))
        for buffer in optimizer.buffers:
            if buffer not in memory:
                rows = self._chunk.theta if name == "theta" else self._chunk.state[name]
                memory[buffer] = optimizer.new(buffer, rows, len(self._parameters_in(name)))
        return {n: m[: self.k] for n, m in memory.items()}

    def _parameters_in(self, name: str) -> list[tuple[int, int]]:
        """The spans of the parameters of the named rows: of the model, or of a state that is no row of it, one."""
        return self.model.parameter_spans(self._states[name].shape[1])

    def _counted(self, name: str, columns: Columns, memory: Memory) -> list[tuple[Columns, Memory]]:
        """The columns in parts whose parameters have made equally many steps, this one included."""
        counts = self._step_groups.get(name)
        return [(columns, memory)] if counts is None else counts.step(columns, memory)

    def _privately_clipped(self, grad: Tensor, columns: Columns) -> Tensor:
        """grad with the part that moves what is uploaded clipped, for privacy."""
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
