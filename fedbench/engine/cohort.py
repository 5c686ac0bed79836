"""A cohort: any set of clients, and what can be computed on them.

The round's cohort is one; all clients, a slice at a time, are others (evaluation).  Results come in the order of `ids`,
whatever way the executor chose to compute them.

Letters: N clients of the federation, K of the cohort, P numbers of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.channel import aggregate
from fedbench.channel.channel import Channel
from fedbench.channel.cost import RoundCost
from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.core.round_context import Mode, RoundContext
from fedbench.engine import full_batch, local_work
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Inputs
from fedbench.engine.optim import Optimizer, Rate
from fedbench.engine.per_client import PerClient
from fedbench.engine.step import Loss, Step, StepFunction, plain_step
from fedbench.engine.training import BatchSchedule, CohortTraining, LocalTraining, check_states, rate_sums
from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import SampleStatistics

DIVERGED = 1e8  # a mean training loss beyond this has left every useful scale, even while it is finite


class Cohort:
    """Some clients in one round.

    Args:
        engine: What all cohorts of a run share.
        ids: The clients, ascending.  # [K], host
        round: The round, from 0.
        mode: What is computed.  Only "round" may change the state of clients.
        dropped: Number of clients that dropped out after their download.

    Attributes:
        context: The clients and the round, for the channel.
        num_clients: N.
        rounds: Number of rounds of the run.
    """

    def __init__(self, engine: Engine, ids: np.ndarray, round: int, mode: Mode = "round", dropped: int = 0):
        self.engine, self.federation, self.model = engine, engine.federation, engine.model
        self.num_clients, self.rounds = engine.federation.num_clients, engine.rounds
        self.context = self._context(np.asarray(ids, np.int64), round, mode)
        self._channel = Channel(engine.privacy, engine.compression, (len(ids) + dropped) / max(len(ids), 1))
        if mode == "round":
            engine.rows.setting_up = False

    def _context(self, ids: np.ndarray, round: int, mode: Mode) -> RoundContext:
        num_samples = self.federation.num_samples[ids]
        by_samples = self.engine.client_weights == "samples"
        return RoundContext(
            ids=ids,
            num_samples=num_samples,
            client_weights=num_samples.astype(np.float64) if by_samples else np.ones(len(ids)),
            num_clients=self.num_clients,
            round=round,
            mode=mode,
            seed=self.engine.seed,
            device=self.engine.device,
        )

    def _of(self, ids: np.ndarray) -> Cohort:
        """Return a cohort of other clients in this round, with the same channel."""
        other = copy.copy(self)
        other.context = self._context(ids, self.round, self.mode)
        return other

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> np.ndarray:
        """The clients, ascending.  # [K] int64, host"""
        return self.context.ids

    @property
    def round(self) -> int:
        """The round, from 0."""
        return self.context.round

    @property
    def mode(self) -> Mode:
        """What is computed.  Only "round" may change the state of clients."""
        return self.context.mode

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.engine.device

    @property
    def num_samples(self) -> Tensor:
        """Training samples per client.  # [K] float32"""
        return torch.from_numpy(self.context.num_samples).float().to(self.device)

    @property
    def num_steps(self) -> np.ndarray:
        """Local steps of each client in a training as configured.  # [K]"""
        return local_work.num_steps(self.engine, self.context)

    @property
    def epochs(self) -> int | np.ndarray:
        """Epochs of a training as configured: one number for all, or each client's [K]."""
        return local_work.epochs_of(self.engine, self.context)

    @property
    def max_local_steps(self) -> int:
        """Local steps of the client that takes most, in a training as configured."""
        return int(self.num_steps.max(initial=0))

    def step_record(self) -> Tensor:
        """Return a state into which `s.record` writes one number of each local step.  # [K, T]"""
        return torch.zeros(len(self), self.max_local_steps, device=self.device)

    @property
    def client_weights(self) -> np.ndarray:
        """Weights in a mean, not normalized: n_i, or 1 in a run with client_weights=uniform.  # [K] float64"""
        return self.context.client_weights

    @property
    def weights(self) -> Tensor:
        """Weights in a mean: n_i / sum over the cohort, or 1 / K.  # [K]"""
        return self.context.mean_weights

    @property
    def index(self) -> Tensor:
        """ids as an int64 tensor on the device.  # [K]"""
        return torch.from_numpy(self.ids).to(self.device)

    def rate(self, optimizer: Optimizer | None = None) -> Rate:
        """Return the learning rate of this round's first local step: one, or one a client [K, 1]."""
        return local_work.first_rate(self.engine, self.context, optimizer or self.engine.optimizer)

    def value(self, hyperparameter: float | PerClient | None) -> Any:
        """A hyperparameter for these clients, outside of a step: the number that all have, or each one's.  # [K, 1]"""
        each = isinstance(hyperparameter, PerClient)
        return hyperparameter.of(self.ids, self.device) if each else hyperparameter

    @property
    def positions(self) -> Tensor:
        """0 to K - 1, on the device.  # [K]"""
        return torch.arange(len(self), device=self.device)

    def all_clients(self) -> Cohort:
        """Return all clients in this round, dropped ones included, with the same channel."""
        return self._of(np.arange(self.num_clients))

    def subset(self, which: np.ndarray) -> Cohort:
        """Return some of these clients, which [K] bool, in this round, with the same channel."""
        return self._of(self.ids[which])

    def generator(self, *purpose: int | str) -> np.random.Generator:
        """A keyed generator for a method's own draws in this round."""
        return rng.generator(self.engine.seed, *purpose, self.round)

    def random(self, purpose: str) -> rng.RowRandom:
        """Keyed draws with one row per client of the cohort."""
        base = rng.key(self.engine.seed, purpose, self.round)
        return rng.RowRandom(torch.from_numpy(rng.client_keys(base, self.ids)).to(self.device))

    # -- communication -----------------------------------------------------------------------------------
    @property
    def cost(self) -> RoundCost:
        """The cost of the round so far."""
        return self._channel.cost

    @property
    def is_lossless(self) -> bool:
        """Whether the server sees every upload as it was sent."""
        return self._channel.is_lossless

    def broadcast(self, *, uncompressed: Collection[str] = (), **tensors: Tensor) -> SimpleNamespace:
        """Send the same tensors to every client.

        Args:
            uncompressed: Names of tensors that are sent uncompressed, such as counts and coefficients.
            **tensors: The tensors, by name.  # [...]

        Returns:
            The tensors as the clients see them.
        """
        return self._channel.broadcast(self.context, tensors, uncompressed)

    def download(self, *, uncompressed: Collection[str] = (), **tensors: Tensor) -> SimpleNamespace:
        """Send each client its row of tensors [K, ...].  Arguments and result as in `broadcast`."""
        return self._channel.download(self.context, tensors, uncompressed)

    def fetch(self, which: Tensor, **rows: Tensor) -> SimpleNamespace:
        """Let clients download rows that they choose.

        Args:
            which: The rows that each client downloads.  # [K, n] bool
            **rows: Tensors, by name.  A method must not use rows of a client that it did not download.  # [n, ...]

        Returns:
            The tensors, uncompressed.
        """
        return self._channel.fetch(self.context, which, rows)

    def upload(
        self,
        *,
        relative_to: Mapping[str, str | None] | None = None,
        replaces: Mapping[str, Tensor | None] | None = None,
        uncompressed: Collection[str] = (),
        **tensors: Tensor,
    ) -> SimpleNamespace:
        """Send each client's row of the tensors [K, ...] to the server.

        Every floating-point tensor stands in relative_to or in replaces.  Privacy clips the row minus this reference,
        and compression sends that difference.

        Args:
            relative_to: The name by which `broadcast` or `download` sent, in this round, the tensor that a row was
                trained from; None for a difference.  {"theta": "w"}: theta was trained from w.  If clients saw a
                version of w that lags behind the server's, the row is shifted by the lag.  Compression adds the
                residual of an upload to the client's next one (compression.error_feedback).
            replaces: The server's version, [...] or [K, ...], that a tensor replaces; None if it has none.  Use it for
                a row that a client keeps and trains on: its next upload makes up for the residual of this one.  The
                residual of gradients, coefficients and counts is lost.  The version must not depend on values that
                the server does not have.
            uncompressed: Names of tensors that are sent uncompressed.
            **tensors: The rows, by name.

        Returns:
            The tensors as the server sees them, after privacy and compression.

        Raises:
            UnknownReference: These clients were not sent a tensor by that name in this round.
        """
        return self._channel.upload(
            self.context, tensors, relative_to or {}, replaces or {}, uncompressed, first_rate=self.rate
        )

    # -- aggregation -------------------------------------------------------------------------------------
    def mean(
        self,
        uploads: Tensor,
        weights: Literal["samples", "uniform"] | Tensor = "samples",
        groups: Tensor | None = None,
    ) -> Tensor:
        """Return the server's mean of the clients' uploads.

        Args:
            uploads: One row for each client, as `upload` returned them.  # [K, ...]
            weights: "samples": by the number of training samples, or 1 / K with client_weights=uniform.  "uniform":
                1 / K.  A tensor: these weights, as they are.  # [K]
            groups: The members of each of M groups.  A group without clients has the mean 0.  # [M, K]

        Returns:
            The mean, or the mean of each group.  # [...] or [M, ...]
        """
        self.cost.takes_means |= isinstance(weights, str) and weights == "samples"
        return aggregate.mean(self.context, uploads, weights, groups)

    def sum(self, uploads: Tensor) -> Tensor:
        """Return the server's sum of the clients' uploads [K, ...].  # [...]"""
        return aggregate.total(uploads)

    # -- training ----------------------------------------------------------------------------------------
    def rate_sums(self, how: LocalTraining | None = None) -> np.ndarray:
        """Return how far each client's local steps would move a row along a constant gradient of 1.  # [K] float64

        It is the sum of the learning rates of the steps, momentum included.
        """
        return rate_sums(self.engine, self.context, how or LocalTraining())

    def train(
        self,
        start: Tensor,
        *,
        step: StepFunction | None = None,
        extra_grad: Callable[[Step], Tensor] | None = None,
        loss: Loss | None = None,
        columns: Columns | None = None,
        how: LocalTraining | None = None,
        **state: Tensor,
    ) -> SimpleNamespace:
        """Train the clients locally.

        Args:
            start: The rows to start from: one for all [P], or one for each client [K, P].
            step: step(s, batch) replaces the default: the gradient, plus extra_grad(s), then descend.
            extra_grad: Returns a tensor that is added to the gradient.  # [k, P]
            loss: loss(s, rows, batch) replaces the task's loss.  It returns losses of samples [k, B] or clients [k].
            columns: The columns that learn.  Default: all trained ones.
            how: What differs from the run's configuration.
            **state: Tensors by name, a row for each client, which a step reads as s.state.name and may change in
                place.  # [K, ...]

        Returns:
            theta [K, P], every state, steps [K] float32, loss [K] and lr (the last two are means over the steps).

        Raises:
            ValueError: A state is no tensor, or its name is a setting.
            RunError: The loss or the parameters of a client are not finite, or the loss has diverged.
        """
        check_states(state)
        step, how = step or plain_step(extra_grad), how or LocalTraining()
        training = CohortTraining(self.engine, self.context, start, state, step, loss, columns, how)
        training.run()
        training.exchange()
        training.store_buffers()
        out = training.result()
        self._account(training.schedule, how.throughput_weight, out)
        return out

    def _account(self, schedule: BatchSchedule, throughput_weight: float, out: SimpleNamespace) -> None:
        """Add a training to the cost of the round.  Raises RunError if it diverged."""
        self.cost.steps += int(schedule.steps.sum())
        self.cost.samples += round(throughput_weight * int(schedule.samples.sum()))
        trained = torch.from_numpy(np.flatnonzero(schedule.steps)).to(out.loss.device)
        if len(trained):
            sound = (out.loss.abs() < DIVERGED) & torch.isfinite(out.theta.sum(1))
            if not bool(sound.all()):
                self._refuse_divergence(int(torch.nonzero(~sound)[0].item()), out.loss)
            self.cost.loss = float(out.loss[trained].mean())
            self.cost.losses = out.loss

    def _refuse_divergence(self, position: int, loss: Tensor) -> None:
        value = abs(float(loss[position]))
        lr, client = self.engine.optimizer.lr, self.ids[position]
        what = f"the training loss of client {client} is not finite"
        if value < DIVERGED:
            what = f"parameters of client {client} are not finite"
        elif np.isfinite(value):
            what = f"the training loss of client {client} has diverged ({value:.3g})"
        raise RunError(
            f"{what} in round {self.round + 1}: "
            f"optimizer.lr={lr[client] if isinstance(lr, list) else lr:g} is probably too large"
        )

    # -- whole splits ------------------------------------------------------------------------------------
    def gradient(self, rows: Tensor, split: str = "train", drop_last: bool = False) -> tuple[Tensor, Tensor]:
        """Gradient [K, P] and mean loss [K] of rows [P] or [K, P] over each client's whole split.

        drop_last: leave out the samples beyond the last full local batch, as some released codes do.
        """
        return full_batch.gradient(self.engine, self.context, rows, split, drop_last)

    def loss(self, rows: Tensor, split: str = "train") -> Tensor:
        """Mean loss of rows [P], [K, P] or [K, M, P] over each client's whole split.  # [K] or [K, M]"""
        if rows.dim() < 3:
            return full_batch.loss(self.engine, self.context, rows, split)
        each = [full_batch.loss(self.engine, self.context, rows[:, m], split) for m in range(rows.shape[1])]
        return torch.stack(each, dim=1) if each else rows.new_zeros(len(rows), 0)

    def forward(
        self,
        rows: Any,
        fn: Callable[[FlatModel, Any, Inputs], Tensor] | None = None,
        split: str = "test",
        limit: int | None = None,
        key: str = "forward",
    ) -> list[Tensor]:
        """fn(model, rows [k, ...], inputs [k, b, ...]) -> [k, b, ...] over each client's whole split, in order.

        rows: one row for all [P], or [K, P], or a dict of such.  limit: of this many samples of each client at most,
        drawn anew in every round; calls with the same key see the same ones.  Returns one tensor [n_i, ...] per client.
        """
        predict, no_output = fn or FlatModel.predict, {"": torch.zeros(0, device=self.device)}

        def outputs(model: FlatModel, rows: Any, x: Inputs, y: Tensor, mask: Tensor | None) -> SampleStatistics:
            return {"": predict(model, rows, x)}

        part = self.federation.splits[split]
        if limit is not None:
            part = full_batch.subsample(self.engine, self.context, split, limit, key)
        return full_batch.each_sample(self.engine, self.context, rows, outputs, part, no_output)[""]

    def sample_statistics(
        self, rows: Any, predict: Callable[[FlatModel, Any, Inputs], Tensor] | None, split: str
    ) -> SampleStatistics:
        """Return the task's statistics of the predictions for every sample of a split, in client order.

        rows, predict: as in `forward`.  Outputs themselves are kept no longer than their block.  # each [n, ...]
        """
        task, predict, y = (
            self.engine.task,
            predict or FlatModel.predict,
            self.federation.gather(torch.zeros(1, dtype=torch.int64, device=self.device))[1],
        )
        outputs = task.output_shape(y, task.outputs(self.federation.num_classes))
        some = task.sample_statistics(torch.zeros(1, *outputs, device=self.device), y[None])
        of_none = {name: t[0, :0] for name, t in some.items()}

        def sample_statistics(
            model: FlatModel, rows: Any, x: Inputs, y: Tensor, mask: Tensor | None
        ) -> SampleStatistics:
            return task.sample_statistics(predict(model, rows, x), y, mask)

        part = self.federation.splits[split]
        each = full_batch.each_sample(self.engine, self.context, rows, sample_statistics, part, of_none)
        return {name: torch.cat(tensors) for name, tensors in each.items()}
