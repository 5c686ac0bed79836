"""Central differential privacy of clients, for any method that averages its uploads.

A trusted server clips each client's upload, adds Gaussian noise to their sum, and divides it by the expected number of
clients.  Everything after that is post-processing.  Neighbouring federations differ by a whole client.

References:
    McMahan, Ramage, Talwar and Zhang, ICLR 2018 (DP-FedAvg with a fixed denominator).
    Andrew, Thakkar, McMahan and Ramaswamy, NeurIPS 2021 (adaptive clipping).

Letters: N clients of the federation, K clients of a round, q sampling probability, z noise multiplier, C clipping norm,
m releases of a round.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.channel import accounting
from fedbench.channel.accounting import Accountant, Sampling, Setting
from fedbench.channel.sealed import Sealed, opened, refuse
from fedbench.core import rng
from fedbench.core.options import Count, NonNegative, OpenUnit, Positive, PositiveOrInf, RunError, require
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import RowStore

BLOCK = 1 << 20  # random numbers that are drawn at a time
UNPROTECTED = (
    "not covered are numbers of samples, sizes of messages, statistics that standardize inputs and targets, the scores "
    "and losses reported here, what is chosen by them, and models that clients keep; the noise is a simulation's, "
    "drawn from the run's seed"
)


class CentralPrivacy:
    """Clips uploads to norm C, and adds Gaussian noise to their sum, of standard deviation noise_multiplier C.

    State: the rows "central/clip", the clipping norm of each of the m releases of a round.  # [m, 1]

    Args:
        rows: Creates the state.
        num_clients: N.
        expected: Expected number of clients of a round: q N, or K with sampling="fixed".
        rounds: Number of rounds of the run.
        target_epsilon: Largest epsilon of all rounds, from which the noise multiplier is computed; null: not set.
        noise_multiplier: z, the standard deviation of the noise of a sum over C; null: from target_epsilon.
        delta: Delta of the whole run, less than 1 / N.
        clip: C, the largest l2 norm of a client's change; with adaptive_clip, that of the first round.
        sampling: "poisson": each client takes part with probability q.  "fixed": K clients without replacement.
        accountant: "pld" (tighter) or "rdp".  sampling="fixed" needs "rdp", unless all clients take part.
        releases: m, the number of means and sums that the method computes in a round.
        adaptive_clip: Whether C follows a quantile of the norms.
        quantile: Fraction of the clients whose norm should be at most C.
        clip_lr: Step size of log C.
        count_noise: Standard deviation of the noise of the number of clients below C; null: expected / 20.
    """

    def __init__(
        self,
        rows: RowStore,
        num_clients: int,
        expected: float,
        rounds: int,
        target_epsilon: Positive | None = None,
        noise_multiplier: NonNegative | None = None,
        delta: OpenUnit = 1e-5,
        clip: PositiveOrInf = 1.0,
        sampling: Sampling = "poisson",
        accountant: Accountant = "pld",
        releases: Count = 1,
        adaptive_clip: bool = False,
        quantile: OpenUnit = 0.5,
        clip_lr: Positive = 0.2,
        count_noise: Positive | None = None,
    ):
        require(
            (target_epsilon is None) != (noise_multiplier is None),
            "privacy=central needs exactly one of privacy.target_epsilon and privacy.noise_multiplier, got "
            f"{'neither' if target_epsilon is None else 'both'}: set one, such as privacy.target_epsilon=4, and leave "
            "the other null",
        )
        require(
            delta < 1 / num_clients,
            f"privacy.delta={delta:g} must be less than 1 / N = {1 / num_clients:.3g} for the {num_clients} training "
            "clients, because publishing one client's data whole would satisfy a larger one: lower it",
        )
        require(
            sampling == "poisson" or accountant == "rdp" or expected == num_clients,
            "privacy.sampling=fixed needs privacy.accountant=rdp, because the accountant pld has no sampling without "
            "replacement: set it, or use privacy.sampling=poisson",
        )
        require(
            math.isfinite(clip) or noise_multiplier == 0,
            "privacy.clip=inf needs privacy.noise_multiplier=0, because noise is a multiple of the clip: give a finite "
            "clip such as 1.0",
        )
        require(
            not adaptive_clip or math.isfinite(clip),
            "privacy.adaptive_clip=true needs a finite initial privacy.clip, got inf: give one such as 0.1",
        )
        self.num_clients, self.expected, self.rounds, self.sampling = num_clients, expected, rounds, sampling
        self.releases, self.adaptive, self.target_epsilon = releases, adaptive_clip, target_epsilon
        self.quantile, self.clip_lr = quantile, clip_lr
        setting = Setting(noise_multiplier or 0.0, num_clients, expected, releases, sampling, accountant, delta)
        if target_epsilon is not None:
            z = accounting.least_noise_multiplier(setting, target_epsilon, rounds)
            setting = Setting(z, num_clients, expected, releases, sampling, accountant, delta)
        self.setting = setting
        self.count_noise = count_noise if count_noise is not None else expected / 20
        self.sum_multiplier = self._sum_multiplier()
        self.clips = rows("central/clip", torch.tensor([clip], dtype=torch.float64), releases)

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier z of one release; 0 without noise.

        With adaptive clipping, a release is a noisy sum and a noisy number of clients, and z is that of both together.
        """
        return self.setting.noise_multiplier

    def _sum_multiplier(self) -> float:
        """Return the noise multiplier of the sum: (z^-2 - (2 sigma_b)^-2)^(-1/2) with adaptive clipping, else z.

        A whole release has the multiplier z.  With adaptive clipping, it includes the number of uploads that are not
        clipped; sigma_b is the noise of this count (privacy.count_noise).

        Raises:
            ConfigError: The noise of the count alone spends more than z allows.
        """
        z = self.noise_multiplier
        if not self.adaptive or z == 0:
            return z
        require(
            2 * self.count_noise > z,
            f"privacy.count_noise={self.count_noise:g} must be more than {z / 2:.4g}, half of the noise multiplier, so "
            "that noise is left for the uploads: raise it (by default, it is a twentieth of the clients per round)",
        )
        return (z**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def clip(self, release: int = 0) -> float:
        """Return the current clipping norm C of a release.

        Args:
            release: Index of the release in a round, from 0.  With adaptive clipping, each index has its own C.
        """
        return float(self.clips[np.array([release])][0, 0])

    # -- sampling ----------------------------------------------------------------------------------------
    def draw_poisson(self, seed: int, round: int) -> np.ndarray:
        """Return the clients of a round, each of all N drawn independently with probability q = expected / N.

        Args:
            seed: The run's seed.
            round: Index of the round, from 0.

        Returns:
            Their ids, ascending; there may be none.  # [K] int64
        """
        uniform = rng.bits(rng.key(seed, "poisson cohort", round), np.arange(self.num_clients)) / 2.0**64
        return np.flatnonzero(uniform < self.expected / self.num_clients)

    # -- releases ----------------------------------------------------------------------------------------
    def release(
        self, context: RoundContext, upload: Any, members: np.ndarray, center: Tensor | None, index: int, average: bool
    ) -> Tensor:
        """Return the private mean or sum of an upload.

        Args:
            context: The clients of the call, and the round.
            upload: What `Cohort.upload` returned.
            members: The clients of the round.  # [K]
            center: A value that the server published, from which changes are measured.  None: for a mean, the tensor
                from which clients trained, if all received the same; for a sum, 0.  # [...]
            index: Number of earlier releases in the round.
            average: Whether to divide by the expected number of clients.

        Returns:
            center + (sum of clipped changes + noise) / (q N), or the sum.  # [...]

        Raises:
            RunError: The release is not covered by the accounting.
        """
        if not isinstance(upload, Sealed):
            raise RunError(
                "privacy=central does not cover this method: it averages a tensor that cohort.upload did not return; "
                "choose another method, or privacy=local"
            )
        rows, name, source, reference = opened(upload)
        if center is None and average:
            center = reference
        if not context.changes_state:
            refuse(name, f"combines it outside of the rounds, in mode {context.mode!r}")
        if source.round != context.round or not source.changes_state:
            refuse(name, f"combines it in round {context.round + 1}, but it was uploaded at another time")
        if not (np.array_equal(source.ids, members) and np.array_equal(context.ids, members)):
            refuse(name, "combines it over other clients than those of the round")
        if not rows.is_floating_point():
            refuse(name, f"combines it, and it has the type {rows.dtype}")
        if index >= self.releases:
            raise RunError(
                f"privacy.releases={self.releases} is too small, because the server averages or sums at least "
                f"{index + 1} uploads in a round ({name!r} is number {index + 1}): set privacy.releases={index + 1} or "
                "more, which adds more noise to each, or choose another method"
            )
        clip = self.clip(index)
        total, below = clipped_sum(rows, center, clip)
        key = rng.key(context.seed, "central noise", context.round, index)
        noisy = total + self.sum_multiplier * clip * normal(key, total) if self.sum_multiplier else total
        if self.adaptive:
            self._move_clip(context, index, clip, below)
        if not average:
            return noisy
        mean = noisy / self.expected
        return mean if center is None else center + mean

    def _move_clip(self, context: RoundContext, index: int, clip: float, below: int) -> None:
        """Move C towards the quantile of the norms: C exp(-clip_lr (b - quantile)), b the noisy fraction below C.

        Each client adds its indicator minus 1/2, whose sum has sensitivity 1/2.

        Args:
            context: The clients, and the round.
            index: Number of earlier releases in the round.
            clip: C.
            below: Number of clients whose norm is at most C.
        """
        key = rng.key(context.seed, "central count", context.round, index)
        noise = self.count_noise * float(normal(key, torch.zeros(1))) if self.noise_multiplier else 0.0
        fraction = (below - len(context) / 2 + noise) / self.expected + 0.5
        new = clip * math.exp(-self.clip_lr * (fraction - self.quantile))
        self.clips[np.array([index])] = torch.tensor([[new]], dtype=torch.float64)  # row of this release

    # -- report ------------------------------------------------------------------------------------------
    def epsilon(self, rounds: int) -> float:
        """Return the epsilon that `rounds` finished rounds have spent together, at the option privacy.delta."""
        return accounting.epsilon(self.setting, rounds)

    def metrics(self, rounds: int) -> dict[str, float]:
        """Return columns of metrics.csv by name, after a number of finished rounds.

        Args:
            rounds: The number of finished rounds.

        Returns:
            "privacy/epsilon", the epsilon spent so far.  With adaptive clipping, also "privacy/clip", the norm C of the
            first release of a round, "privacy/clip_2" of the second, and so on.
        """
        values = {"privacy/epsilon": self.epsilon(rounds)}
        for index in range(self.releases if self.adaptive else 0):
            values[f"privacy/clip{f'_{index + 1}' if index else ''}"] = self.clip(index)
        return values

    def guarantee(self, rounds: int | None = None) -> str:
        """Return a sentence with the guarantee, and what it does not cover.

        Args:
            rounds: Number of finished rounds; None: all rounds of the run.
        """
        z, s = self.noise_multiplier, self.setting
        neighbour = "added or removed" if self.sampling == "poisson" else "replaced"
        if z == 0:
            return "no guarantee: privacy.noise_multiplier=0 adds no noise, so that epsilon is infinite"
        num_rounds = self.rounds if rounds is None else rounds
        joint = f", {self.releases} releases a round" if self.releases > 1 else ""
        clip = f"clip {self.clip():.4g}{' (adaptive)' if self.adaptive else ''}"
        return (
            f"what the server sends is ({self.epsilon(num_rounds):.4g}, {s.delta:g})-differentially private after "
            f"{num_rounds} rounds for one {neighbour} client with all its data, if the server is trusted: noise "
            f"multiplier {z:.4g}, {clip}{joint}, {self.sampling} sampling of {self.expected:g} of {self.num_clients} "
            f"clients, accountant {s.accountant}; {UNPROTECTED}"
        )

    def summary(self, rounds: int) -> dict[str, Any]:
        """Return the section "privacy" of summary.json: options, the epsilon spent and a sentence with the guarantee.

        Args:
            rounds: The number of finished rounds.
        """
        return {
            "mode": "central",
            "epsilon_spent": self.epsilon(rounds),
            "delta": self.setting.delta,
            "target_epsilon": self.target_epsilon,
            "noise_multiplier": self.noise_multiplier,
            "clip": self.clip(),
            "sampling": self.sampling,
            "expected_clients": self.expected,
            "accountant": self.setting.accountant,
            "releases": self.releases,
            "guarantee": self.guarantee(rounds),
        }


def check_uniform(upload: Any, weights: Any, groups: Any, client_weights: str) -> Literal["uniform"]:
    """Return "uniform"; raise RunError unless a mean has equal weights and one group.

    Args:
        upload: What is averaged.
        weights: The argument `weights` of the mean.
        groups: The argument `groups` of the mean.
        client_weights: The option of the run.
    """
    name = "?"  # in the message, for tensors that were not uploaded
    if isinstance(upload, Sealed):
        _, name, _, _ = opened(upload)
    if groups is not None:
        refuse(name, "averages it in groups, which it may have chosen by uploads")
    if not isinstance(weights, str):
        refuse(name, "averages it by weights of its own, which may depend on clients")
    if weights == "samples" and client_weights != "uniform":
        refuse(name, "averages it by numbers of samples, which client_weights=uniform prevents")
    return "uniform"


def clipped_sum(rows: Tensor, center: Tensor | None, clip: float) -> tuple[Tensor, int]:
    """Return the sum of clipped changes, and the number of clients whose change has at most norm C.

    Args:
        rows: One row per client; there may be none.  # [K, ...]
        center: What changes are measured from.  None: 0.  # [...]
        clip: C.

    Returns:
        The sum of (row - center) min(1, C / |row - center|) [...], and the number.
    """
    change = rows if center is None else rows - center
    flat = change.reshape(len(rows), math.prod(rows.shape[1:]))  # [K, p]
    norm = flat.double().norm(dim=1)  # [K]
    is_finite = torch.isfinite(norm)
    flat = torch.where(is_finite[:, None], flat, 0)  # an upload that is not finite counts as no change
    # 1e-30: no division by 0  [K]
    factor = torch.where(is_finite, (clip / norm.clamp_min(1e-30)).clamp_max(1), 0).to(flat)
    return (factor @ flat).view(rows.shape[1:]), int((norm <= clip).sum())


def normal(key: int, like: Tensor) -> Tensor:
    """Return keyed standard normal numbers with the shape, type and device of a tensor.

    They are drawn a block at a time, to limit memory.  Each block has a key of its own, from `key` and its number.
    """
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    for number, block in enumerate(out.split(BLOCK)):
        keys = torch.from_numpy(rng.client_keys(key, np.array([number]))).to(like.device)
        block.copy_(rng.RowRandom(keys).normal(len(block))[0])
    return out.view(like.shape)
