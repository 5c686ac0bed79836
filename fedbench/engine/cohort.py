"""A cohort: a set of clients, and the communication, training and aggregation that a method runs on them.

A method receives the clients of a round as a cohort.  Evaluation uses cohorts of other clients.  Results are in the
order of `ids`, for every executor.

Letters: N clients of the federation, K clients of the cohort, P length of a row, T local steps, n samples.
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
from fedbench.channel.central import CentralPrivacy, check_uniform
from fedbench.channel.channel import Channel
from fedbench.channel.cost import RoundCost
from fedbench.channel.sealed import Sealed
from fedbench.channel.server_update import server_step
from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.core.round_context import Mode, RoundContext
from fedbench.core.split import Ragged
from fedbench.engine import full_batch, local_work
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Inputs
from fedbench.engine.optim import Optimizer, Rate
from fedbench.engine.per_client import PerClient
from fedbench.engine.step import Loss, Step, StepFunction, default_step
from fedbench.engine.training import BatchSchedule, CohortTraining, LocalTraining, check_states, rate_sums
from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.server.base import ServerRule, ServerStep
from fedbench.tasks.base import SampleStatistics

MAX_LOSS = 1e8  # a larger training loss counts as diverged
TINY = torch.finfo(torch.float32).tiny  # instead of a sum of weights that is 0


class Cohort:
    """Some clients in one round, with which a method sends, trains and aggregates; `engine` is shared by all cohorts.

    Args:
        engine: The run's engine, with model, task, data, optimizer, executor, client states and options.
        ids: The clients, ascending, on the host.  # [K]
        round: Index of the round, from 0.
        mode: "round", "evaluation", "trial" or "new clients".  Only "round" may change the state of clients.
        dropped: Number of clients that dropped out after their download.

    Attributes:
        engine: The run's engine.
        federation: The clients' data.
        model: The model whose parameters are rows.
        context: The clients and the round.
        num_clients: Number of clients of the federation, N.
        rounds: Number of rounds of the run.
    """

    def __init__(self, engine: Engine, ids: np.ndarray, round: int, mode: Mode = "round", dropped: int = 0):
        self.engine, self.federation, self.model = engine, engine.federation, engine.model
        self.num_clients, self.rounds = engine.federation.num_clients, engine.rounds
        self.context = self._context(np.asarray(ids, np.int64), round, mode)
        factor = (len(ids) + dropped) / max(len(ids), 1)  # downloads per participant
        self._channel = Channel(engine.privacy, engine.compression, factor, engine.attackers, engine.client_ranks)
        self._round_ids = self.context.ids  # the clients of the round, over which central privacy combines uploads
        if mode == "round":
            engine.rows.setting_up = False
        if engine.lora_sync is not None and engine.lora_sync.backbone is not None:
            engine.lora_sync.backbone.restore()

    def _context(self, ids: np.ndarray, round: int, mode: Mode) -> RoundContext:
        """Return the context of clients in a round, with their numbers of samples and weights.

        Args:
            ids: The clients, ascending.  # [K]
            round: Index of the round, from 0.
            mode: What the cohort is used for: "round", "evaluation", "trial" or "new clients".
        """
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

    def _with_clients(self, ids: np.ndarray) -> Cohort:
        """Return a cohort of other clients in the same round.

        Its messages and trainings use the channel of this cohort, and count in the same cost.

        Args:
            ids: The clients, ascending.  # [K] int64
        """
        other = copy.copy(self)
        other.context = self._context(ids, self.round, self.mode)
        return other

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> np.ndarray:
        """The indices of the cohort's clients in the federation, ascending, as an array.  # [K] int64"""
        return self.context.ids

    @property
    def round(self) -> int:
        """Index of the current round, from 0."""
        return self.context.round

    @property
    def mode(self) -> Mode:
        """What the cohort is used for: "round", "evaluation", "trial" (a measurement of speed) or "new clients".

        Only "round" may change the states of clients.
        """
        return self.context.mode

    @property
    def device(self) -> torch.device:
        """The device that has the model parameters and computes: cpu or a GPU."""
        return self.engine.device

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client of the cohort, n_i.  # [K] float32"""
        return torch.from_numpy(self.context.num_samples).float().to(self.device)

    @property
    def num_steps(self) -> np.ndarray:
        """Number of local steps of each client in this round by the options local.*; 0 without samples.  # [K] int64"""
        return local_work.num_steps(self.engine, self.context)

    @property
    def epochs(self) -> float | np.ndarray:
        """Number of local epochs of a client in this round: one number for all clients, or one for each [K].

        It is local.epochs, which may be a fraction, or with system.fewest_epochs a random whole number.
        """
        return local_work.epochs_of(self.engine, self.context)

    @property
    def batch_size(self) -> int | np.ndarray:
        """The option local.batch_size, in samples: an int for all clients, or an array with one for each [K] int64."""
        return local_work.batch_size_of(self.engine, self.context)

    @property
    def max_local_steps(self) -> int:
        """T, the largest of the clients' `num_steps` in this round; 0 without clients."""
        return int(self.num_steps.max(initial=0))

    def step_record(self) -> Tensor:
        """Return a tensor of zeros with one column per local step, [K, T] float32, T = max_local_steps.

        Pass it to `train` as a state, for example norms=cohort.step_record().  In step t, s.record("norms", values)
        writes column t; read the result as out.norms.  Columns after a client's last step stay 0.
        """
        return torch.zeros(len(self), self.max_local_steps, device=self.device)

    @property
    def client_weights(self) -> np.ndarray:
        """Weight of each client in a mean, not normalized: n_i, or 1 with client_weights=uniform.  # [K] float64"""
        return self.context.client_weights

    @property
    def weights(self) -> Tensor:
        """Weight of each client in a mean, with sum 1: n_i / sum_j n_j, or 1 / K with client_weights=uniform.

        # [K] float32, on the device
        """
        return self.context.mean_weights

    @property
    def index(self) -> Tensor:
        """The indices of the cohort's clients in the federation, ascending, as a tensor on the device.  # [K] int64"""
        return torch.from_numpy(self.ids).to(self.device)

    def rate(self, optimizer: Optimizer | None = None) -> Rate:
        """Return the learning rate of the first local step of this round.

        Args:
            optimizer: The optimizer.  Default: the run's.

        Returns:
            One learning rate, or one for each client.  # [K, 1]
        """
        return local_work.first_rate(self.engine, self.context, optimizer or self.engine.optimizer)

    def value(self, hyperparameter: float | PerClient | None) -> Any:
        """Return the value of a hyperparameter, outside of a local step.

        Args:
            hyperparameter: One value for all clients, or one for each of the N clients.

        Returns:
            The one value as it is, or the values of the cohort's clients.  # [K, 1]
        """
        if isinstance(hyperparameter, PerClient):
            return hyperparameter.of(self.ids, self.device)
        return hyperparameter

    @property
    def positions(self) -> Tensor:
        """The numbers 0 to K - 1 as a tensor on the device: positions of the clients in the cohort.  # [K] int64"""
        return torch.arange(len(self), device=self.device)

    def all_clients(self) -> Cohort:
        """Return a cohort of all N clients of the federation in this round, sampled or not, with the same channel."""
        return self._with_clients(np.arange(self.num_clients))

    def subset(self, which: np.ndarray) -> Cohort:
        """Return a cohort of some of these clients in this round, with the same channel.

        Args:
            which: Whether to select each client.  # [K] bool
        """
        return self._with_clients(self.ids[which])

    def generator(self, *purpose: int | str) -> np.random.Generator:
        """Return a NumPy generator for the method's random numbers in this round.

        Args:
            *purpose: Parts of the key, which separate different uses in the same round.
        """
        return rng.generator(self.engine.seed, *purpose, self.round)

    def random(self, purpose: str) -> rng.RowRandom:
        """Return random numbers with one row for each client, which do not depend on the other clients of the cohort.

        Args:
            purpose: Part of the key, which separates different uses in the same round.
        """
        round_key = rng.key(self.engine.seed, purpose, self.round)
        return rng.RowRandom(torch.from_numpy(rng.client_keys(round_key, self.ids)).to(self.device))

    # -- communication -----------------------------------------------------------------------------------
    @property
    def cost(self) -> RoundCost:
        """Local steps, training samples and bytes sent in this round so far, over all its clients."""
        return self._channel.cost

    @property
    def is_lossless(self) -> bool:
        """Whether uploads reach the server unchanged: no compressor, noise, clipping or attack changes them."""
        return self._channel.is_lossless

    def broadcast(
        self,
        *,
        uncompressed: Collection[str] = (),
        num_values: Mapping[str, Tensor] | None = None,
        **tensors: Tensor,
    ) -> SimpleNamespace:
        """Send the same tensors to every client.

        Args:
            uncompressed: Names of tensors that are not compressed, such as counts and coefficients.
            num_values: How many numbers a method uses to encode a tensor, by name.  They determine its bytes, unless
                the run compresses it.
            **tensors: The tensors, by name.  # [...]

        Returns:
            The tensors that the clients receive, as attributes.  # [...]
        """
        num_values = num_values or {}
        if self.engine.lora_sync is not None:  # adapter.sync may send fewer or more numbers than a tensor has
            num_values = {**self.engine.lora_sync.numbers(self.context, tensors), **num_values}
        return self._channel.broadcast(self.context, tensors, uncompressed, num_values)

    def download(self, *, uncompressed: Collection[str] = (), **tensors: Tensor) -> SimpleNamespace:
        """Send each client its row of the tensors.

        Args:
            uncompressed: Names of tensors that are not compressed.
            **tensors: The tensors, by name.  # [K, ...]

        Returns:
            The tensors that the clients receive, as attributes.  # [K, ...]
        """
        return self._channel.download(self.context, tensors, uncompressed)

    def fetch(self, which: Tensor, **rows: Tensor) -> SimpleNamespace:
        """Let each client download some rows of the tensors.

        Args:
            which: Whether each client downloads each of M rows.  # [K, M] bool
            **rows: The tensors, by name.  A client must not use a row that it did not download.  # [M, ...]

        Returns:
            The tensors, uncompressed, as attributes.  # [M, ...]
        """
        return self._channel.fetch(self.context, which, rows)

    def upload(
        self,
        *,
        relative_to: Mapping[str, str | None] | None = None,
        previous: Mapping[str, Tensor | None] | None = None,
        uncompressed: Collection[str] = (),
        num_values: Mapping[str, Tensor] | None = None,
        **tensors: Tensor,
    ) -> SimpleNamespace:
        """Send each client's row of the tensors to the server.

        Each floating-point tensor needs a reference, in `relative_to` or in `previous`.  Privacy clips the row minus
        its reference, and compression sends that difference.

        Args:
            relative_to: For each tensor, the name of the tensor that `broadcast` or `download` sent in this round and
                from which the row was trained.  None: the row is already a difference.  {"theta": "w"} means that
                theta was trained from w.  If clients received a compressed w, the difference between both versions
                of w is added to the row.  With compression.error_feedback, the residual of an upload is added to the
                client's next upload.
            previous: For each tensor, the server's previous version, which the row replaces.  None if the server has
                no version, as for gradients, coefficients and counts.  No error feedback is applied.  If a client
                keeps the row and trains it further, its next upload contains the residual of this one.  The version
                must not depend on values that the server does not have.  # [...] or [K, ...]
            uncompressed: Names of tensors that are not compressed.
            num_values: How many numbers a method uses to encode each client's row of a tensor, by name.  They determine
                the bytes of the tensor, unless the run compresses it.  # [K]
            **tensors: The rows, by name.  # [K, ...]

        Returns:
            The tensors that the server receives, after privacy and compression, as attributes.  With privacy=central,
            only `mean` and `sum` can read them.  # [K, ...]

        Raises:
            UnknownReference: A name in relative_to was not sent to these clients in this round.
        """
        num_values = num_values or {}
        if self.engine.lora_sync is not None:
            tensors = {name: self.engine.lora_sync.without_personal(value) for name, value in tensors.items()}
            num_values = {**self.engine.lora_sync.numbers(self.context, tensors), **num_values}
        received = self._channel.upload(
            self.context,
            tensors,
            relative_to or {},
            previous or {},
            uncompressed,
            num_values,
            first_rate=self.rate,
        )
        if self.engine.central is None:
            return received
        centers = {name: self._channel.published(handle) for name, handle in (relative_to or {}).items()}
        sealed = {name: Sealed(rows, name, self.context, centers.get(name)) for name, rows in vars(received).items()}
        return SimpleNamespace(**sealed)

    def with_personal_factors(self, rows: Any) -> Any:
        """Return the clients' models with the LoRA factors that they keep, and cut to their ranks.

        Args:
            rows: One row for all clients [P], one for each [K, P], or a dict of tensors, which is returned as it is.

        Returns:
            One row for each client [K, P].  If all clients have equal ranks and share all factors: the rows.
        """
        # ranks: the LoRA rank of each client, None if equal; sync: the rule that combines factors, or None
        ranks, sync = self.engine.client_ranks, self.engine.lora_sync
        if not isinstance(rows, Tensor):
            return rows
        rows = rows if sync is None else sync.with_personal(self.ids, rows)
        return rows if ranks is None else ranks.truncated(self.ids, rows)

    # -- aggregation -------------------------------------------------------------------------------------
    def mean(
        self,
        uploads: Tensor,
        weights: Literal["samples", "uniform"] | Tensor = "samples",
        groups: Tensor | None = None,
        updates: str | None = None,
        rule: ServerRule | None = None,
    ) -> Tensor:
        """Return the mean of the clients' uploads, or the estimate of the run's aggregation rule (option aggregator).

        A server model is averaged by `self.w = cohort.mean(up.theta, updates="w")`.  The run's server rule (option
        server) then replaces the mean.  An aggregation rule leaves out clients whose uploads are not finite.

        Args:
            uploads: One row for each client, as `upload` returned them.  # [K, ...]
            weights: "samples": by the number of training samples, or 1 / K with client_weights=uniform.  "uniform":
                1 / K.  A tensor: these weights, not normalized.  # [K]
            groups: Whether each client is in each of M groups.  A group without clients has the mean 0.  # [M, K]
            updates: Name by which the server broadcast, in this round, the tensor [n] whose new value is returned.
                None: the mean is not a new value of such a tensor, so that no server rule is applied.
            rule: The method's own server rule, instead of the run's.  It needs `updates`.

        Returns:
            The mean, the mean of each group, or the server's new value.  # [...] or [M, ...]

        Raises:
            UnknownReference: The server did not broadcast a tensor named `updates` in this round.
            RunError: With an aggregation rule, no client (or none of a group) uploaded finite values.
        """
        if self.engine.aggregator is not None and not bool((is_finite := aggregate.finite_rows(uploads)).all()):
            # a rule leaves out clients whose uploads have NaN or infinite values: the mean of the others
            others = self._without(~is_finite.cpu().numpy(), weights[None] if isinstance(weights, Tensor) else groups)
            if isinstance(weights, Tensor):  # their sum stays
                weights = weights[is_finite] * (weights.sum() / weights[is_finite].sum().clamp_min(TINY))
            groups = None if groups is None else groups[:, is_finite]
            return others.mean(uploads[is_finite], weights, groups, updates, rule)
        # which options the method used: others that are set have no effect, which is an error
        self.cost.takes_means |= isinstance(weights, str) and weights == "samples"
        self.cost.takes_server_steps |= updates is not None and rule is None
        self.cost.takes_aggregates = True
        rule, aggregator, central = rule or self.engine.server, self.engine.aggregator, self.engine.central
        if central is not None:
            weights = check_uniform(uploads, weights, groups, self.engine.client_weights)
            mean = self._private(central, uploads, updates, average=True)
        elif aggregator is None:
            mean = aggregate.mean(self.context, uploads, weights, groups)
        else:
            center = None if updates is None else self._channel.broadcast_value(updates)
            mean = aggregate.robust_mean(self.context, aggregator, uploads, weights, groups, center)
        if updates is not None and self.engine.lora_sync is not None:  # the option adapter.sync
            weights = aggregate.mean_weights(self.context, weights)
            return self.engine.lora_sync.combine(self.context, mean, uploads, weights)
        if updates is None or rule is None:
            return mean
        w = self._channel.broadcast_value(updates)  # the old value, from which the server rule moves  [n]
        weights = uploads if central is not None else aggregate.mean_weights(self.context, weights)  # sealed, too
        step = ServerStep(w, mean, uploads, weights, self.round)
        return server_step(rule, step, updates, self.engine.rows, self.model, self.context.changes_state)

    def sum(self, uploads: Tensor, exact: bool = False, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the clients' uploads, or an estimate of it by the run's aggregation rule.

        The estimate is K times the rule's estimate of an upload.  With privacy=central the sum is private, whatever
        `exact` is, and `weights` must be None.

        Args:
            uploads: One row for each client, as `upload` returned them.  # [K, ...]
            exact: Whether to sum whatever the rule is, such as counts, whose sum is no multiple of a typical count.
            weights: Factors of M parts of each client's row [K, M, p], such as its counts of M classes.  With a rule,
                the sum of each part is the sum of its weights times the rule's estimate with these weights.  # [K, M]

        Returns:
            The sum.  # [...]
        """
        if self.engine.central is not None:  # privacy=central
            given_weights = "uniform" if weights is None else weights
            check_uniform(uploads, given_weights, groups=None, client_weights="uniform")  # refuses other weights
            return self._private(self.engine.central, uploads, updates=None, average=False)
        if exact or self.engine.aggregator is None:
            return aggregate.total(uploads if weights is None else weights[..., None] * uploads)
        if weights is None:
            return len(self) * self.mean(uploads, weights="uniform")
        return torch.stack([self.mean(uploads[:, i], weights[:, i]) for i in range(weights.shape[1])])

    @property
    def mean_size(self) -> float:
        """The number by which a uniform mean divides the sum over clients.

        It is K; with privacy=central the expected number of clients of a round, even if another number was sampled.
        """
        return len(self) if self.engine.central is None else self.engine.central.expected

    def _private(self, central: CentralPrivacy, uploads: Any, updates: str | None, average: bool) -> Tensor:
        """Return the private mean or sum of uploads (`CentralPrivacy.release`), and count the release.

        Args:
            central: The mechanism.
            uploads: What `upload` returned.
            updates: Name of the broadcast tensor that the mean replaces, from which changes are then measured.  None:
                it replaces none.
            average: Whether to return the mean.
        """
        center = None if updates is None else self._channel.broadcast_value(updates)
        released = central.release(
            self.context,
            uploads,
            members=self._round_ids,  # all clients of the round, of which this cohort may be a part
            center=center,
            index=self.cost.releases,  # number of earlier releases in the round
            average=average,
        )
        self.cost.releases += 1
        return released

    def _without(self, left_out: np.ndarray, groups: Tensor | None) -> Cohort:
        """Return the cohort without clients whose uploads are not finite, and record these clients in the cost.

        Args:
            left_out: Whether to leave out each client.  # [K] bool
            groups: Not 0 for the clients of each of M groups.  None: one group of all clients.  # [M, K]

        Raises:
            RunError: A group has clients, and all of them are left out.
        """
        self.cost.left_out.update(self.ids[left_out].tolist())
        is_member = np.ones((1, len(self)), bool) if groups is None else groups.cpu().numpy() != 0  # [M, K]
        if (is_member.any(1) & ~is_member[:, ~left_out].any(1)).any():  # a group with clients, none of which remains
            raise RunError(
                f"in round {self.round + 1}, all uploads that the server combines have NaN or infinite values, so that "
                "no aggregation rule has an estimate: lower optimizer.lr, for example to a tenth, or use fewer "
                "attackers"
            )
        return self.subset(~left_out)

    # -- training ----------------------------------------------------------------------------------------
    def rate_sums(self, how: LocalTraining | None = None) -> np.ndarray:
        """Return how far each client's local steps would move its parameters along a constant gradient of 1.

        It is the sum over the local steps of the learning rate times the effect of momentum.

        Args:
            how: Settings that differ from the run's.  Default: none.

        Returns:
            One sum for each client.  # [K] float64
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
            start: The rows to start from: one for all clients [P], or one for each [K, P].
            step: step(s, batch) replaces the default step, which computes the gradient, adds extra_grad(s), and
                descends.
            extra_grad: extra_grad(s) returns a tensor that is added to the gradient.  # [k, P]
            loss: loss(s, rows, batch) replaces the task's loss.  It returns losses of samples [k, B] or clients [k].
            columns: The columns that learn.  Default: all trained columns.
            how: Settings that differ from the run's.  Default: none.
            **state: Tensors by name, with one row for each client.  A step reads them as s.state.name and may change
                them in place.  # [K, ...]

        Returns:
            A namespace with theta [K, P], each state [K, ...], steps [K] float32, loss [K], and lr.  loss and lr are
            means over the local steps.

        Raises:
            ValueError: A state is not a tensor, or its name is reserved.
            RunError: The loss or the parameters of a client are not finite, or the loss has diverged.
        """
        check_states(state)
        step = step or default_step(extra_grad)
        how = how or LocalTraining()
        # new clients have no personal factors before they train
        sync = self.engine.lora_sync if how.uploaded is not False and self.mode != "new clients" else None
        start = start if sync is None else sync.with_personal(self.ids, start)
        training = CohortTraining(self.engine, self.context, start, state, step, loss, columns, how)
        training.run()
        training.exchange()
        training.save_buffers()
        out = training.result()
        self._add_cost(training.schedule, how.throughput_weight, out)
        if sync is not None and self.context.changes_state:
            sync.keep_personal(self.ids, out.theta)
        return out

    def _add_cost(self, schedule: BatchSchedule, throughput_weight: float, out: SimpleNamespace) -> None:
        """Add a training to the cost of the round, and raise RunError if it diverged.

        Args:
            schedule: The batches, for numbers of steps and samples.
            throughput_weight: Fraction of the samples that counts in images/s.
            out: The result of the training, for loss [K] and theta [K, P].
        """
        self.cost.steps += int(schedule.num_steps.sum())
        self.cost.samples += round(throughput_weight * int(schedule.num_samples.sum()))
        if schedule.num_steps.any():  # else no client trained, and there are no losses
            # a loss of MAX_LOSS has diverged, and the sum of a row with NaN or infinite values is not finite
            is_sound = (out.loss.abs() < MAX_LOSS) & torch.isfinite(out.theta.sum(1))  # [K]
            if not bool(is_sound.all()):
                self._raise_divergence(int(torch.nonzero(~is_sound)[0].item()), out.loss)
            self.cost.loss = self._honest_loss(out.loss, schedule.num_steps)  # mean over honest clients
            self.cost.losses = out.loss

    def _honest_loss(self, loss: Tensor, num_steps: np.ndarray) -> float:
        """Return the mean training loss of the clients that trained and are no attackers; NaN without any.

        Args:
            loss: Mean training loss of each client.  # [K]
            num_steps: Number of local steps of each client.  # [K]
        """
        attackers = self.engine.attackers
        is_counted = num_steps > 0 if attackers is None else (num_steps > 0) & attackers.are_honest(self.ids)  # [K]
        return float(loss[torch.from_numpy(np.flatnonzero(is_counted)).to(loss.device)].mean())

    def _raise_divergence(self, position: int, loss: Tensor) -> None:
        """Raise RunError, with the reason and the learning rate to lower, for one client.

        Args:
            position: Position of the client in the cohort.
            loss: Mean training loss of each client.  # [K]
        """
        value = abs(float(loss[position]))  # from MAX_LOSS = 1e8 on, it has diverged
        lr, client = self.engine.optimizer.lr, self.ids[position]
        if value < MAX_LOSS:
            problem = f"parameters of client {client} are not finite"
        elif np.isfinite(value):
            problem = f"the training loss of client {client} has diverged ({value:.3g})"
        else:
            problem = f"the training loss of client {client} is not finite"
        if self.engine.attackers is not None:
            raise RunError(
                f"{problem} in round {self.round + 1}, probably because of the attack: use a rule that withstands it, "
                "for example aggregator=median, or weaken the attack by its options"
            )
        raise RunError(
            f"{problem} in round {self.round + 1}: "
            f"optimizer.lr={lr[client] if isinstance(lr, list) else lr:g} is probably too large: lower optimizer.lr, "
            "for example to a tenth, or set optimizer.clip"
        )

    # -- full splits -------------------------------------------------------------------------------------
    def gradient(self, rows: Tensor, split: str = "train", drop_last: bool = False) -> tuple[Tensor, Tensor]:
        """Return the gradient and the mean loss over all samples of each client's split.

        Args:
            rows: Model parameters: one row for all clients [P], or one for each [K, P].
            split: Name of the split, such as "train".
            drop_last: Whether to omit the samples after the last full local batch, as some released codes do.

        Returns:
            The gradient [K, P] and the mean loss [K].
        """
        return full_batch.gradient(self.engine, self.context, rows, split, drop_last)

    def loss(self, rows: Tensor, split: str = "train") -> Tensor:
        """Return the mean loss over all samples of each client's split.

        Args:
            rows: Model parameters: one row for all clients [P], one for each [K, P], or M for each [K, M, P].
            split: Name of the split, such as "train".

        Returns:
            The mean losses.  # [K] or [K, M]
        """
        if rows.dim() < 3:
            return full_batch.loss(self.engine, self.context, rows, split)
        losses = [full_batch.loss(self.engine, self.context, rows[:, m], split) for m in range(rows.shape[1])]
        return torch.stack(losses, dim=1) if losses else rows.new_zeros(len(rows), 0)

    def forward(
        self,
        rows: Any,
        fn: Callable[[FlatModel, Any, Inputs], Tensor] | None = None,
        split: str | Ragged = "test",
        limit: int | None = None,
        key: str = "forward",
    ) -> list[Tensor]:
        """Apply a function, by default the model's forward pass, to all samples of each client's split.

        Args:
            rows: Model parameters: one row for all clients [P], one for each [K, P], or a dict of such tensors.
            fn: fn(model, rows [k, ...], inputs [k, b, ...]) returns a tensor [k, b, ...].  Default: the logits.
            split: Name of the split, such as "test", or the result of `subsample`.
            limit: Maximum number of samples of each client of a split, sampled anew in every round.  None: all.
            key: Key of the sampling.  Calls with the same key in a round use the same samples.

        Returns:
            For each client one tensor, in the order of its samples.  # [n_i, ...] each
        """
        # no_output: the result of a client without samples; "" is the name of the one result
        predict, no_output = fn or FlatModel.predict, {"": torch.zeros(0, device=self.device)}

        # map_samples also passes labels y and a mask of samples, which predictions do not need
        def outputs(model: FlatModel, rows: Any, x: Inputs, y: Tensor, mask: Tensor | None) -> SampleStatistics:
            return {"": predict(model, rows, x)}

        samples = self.federation.splits[split] if isinstance(split, str) else split
        if limit is not None:
            assert isinstance(split, str), "limit is for a split"
            samples = full_batch.subsample(self.engine, self.context, split, limit, key)
        return full_batch.map_samples(self.engine, self.context, rows, outputs, samples, no_output)[""]

    def subsample(self, split: str, fraction: float, key: str) -> Ragged:
        """Sample a fraction of each client's samples, new in each round.

        Args:
            split: Name of the split to sample from, such as "train".
            fraction: Fraction of the samples, in (0, 1].  Each client gets at least one sample, if it has one.
            key: Calls of a round with the same key return the same samples.

        Returns:
            The samples, for `forward` and LocalTraining(split=...).
        """
        return full_batch.fraction_of(self.engine, self.context, split, fraction, key)

    def sample_statistics(
        self, rows: Any, predict: Callable[[FlatModel, Any, Inputs], Tensor] | None, split: str
    ) -> SampleStatistics:
        """Return the task's statistics of the predictions for each sample, from which it computes its metrics.

        The predictions of one block of samples at a time are in memory.

        Args:
            rows: Model parameters: one row for all clients [P], one for each [K, P], or a dict of such tensors.
            predict: predict(model, rows [k, ...], inputs [k, b, ...]) returns predictions [k, b, ...].  None: the
                logits.
            split: Name of the split, such as "test".

        Returns:
            The statistics by name, for the samples of one client after the other.  # [n, ...] each
        """
        task, predict = self.engine.task, predict or FlatModel.predict
        # for clients without samples: tensors of length 0, with the names and types of the statistics of any sample
        _, y = self.federation.gather(torch.zeros(1, dtype=torch.int64, device=self.device))
        output_shape = task.output_shape(y, task.outputs(self.federation.num_classes))
        of_one = task.sample_statistics(torch.zeros(1, *output_shape, device=self.device), y[None])
        of_none = {name: values[0, :0] for name, values in of_one.items()}

        def statistics(
            model: FlatModel, rows: Any, x: Inputs, y: Tensor, class_mask: Tensor | None
        ) -> SampleStatistics:
            return task.sample_statistics(predict(model, rows, x), y, class_mask)

        samples = self.federation.splits[split]
        by_client = full_batch.map_samples(self.engine, self.context, rows, statistics, samples, of_none)
        return {name: torch.cat(tensors) for name, tensors in by_client.items()}
