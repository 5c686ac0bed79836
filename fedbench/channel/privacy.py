"""Local differential privacy of uploads, for any method: clipping and Gaussian noise.

calibration=paper is a reconstruction of Luo et al., ICLR 2025 (pFedMoAP), Table 6.  The paper clips "the gradients of
the prompts" and adds noise "to the uploaded prompts" with delta = 0.05; its released code has neither.  Here each local
step clips a client's batch gradient to l2 norm C, and uploads get N(0, sigma^2) with
sigma = Delta sqrt(2 ln(1.25/delta)) / epsilon (Dwork and Roth, 2014, Theorem A.1), Delta = C or 2 lr C / n_i.  This is
noise robustness, not a guarantee: the theorem requires epsilon < 1 and a Delta that bounds the upload.

calibration=analytic: each upload minus its reference is clipped to norm C, so that any two data sets of a client are at
most Delta = 2 C apart.  sigma is the least that makes one release (epsilon, delta)-private (channel/calibration.py).

Tensors that are not uploaded, such as personal parameters, have no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbench.channel.calibration import analytic_ratio, classic_ratio, epsilon_of
from fedbench.core import rng
from fedbench.core.options import require
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import RowStore

FirstRate = Callable[[], float | Tensor]  # returns the learning rate of the first local step, shared or [K, 1]
BLOCK = 1 << 20  # random numbers that are drawn at a time
UNPROTECTED = (
    "numbers of samples, who takes part when and the scores reported here are not protected, and the noise "
    "is a simulation's, drawn from the run's seed"
)


class Privacy:
    """Clips uploads and adds Gaussian noise to them; `ratio` is the noise per sensitivity, sigma / Delta, 0 for none.

    State: the rows "privacy", the number of releases of each client.  # [N, 1]

    Args:
        rows: Creates the state.
        epsilon: Epsilon of one release, that is, of one uploaded tensor of a client.  inf: no noise.
        delta: Delta of one release.
        clip: The clipping norm C.  None or inf: no clipping, which needs epsilon = inf.
        calibration: "paper" or "analytic".
        sensitivity: Delta of calibration=paper: "clip" for C, "lr_over_n" for 2 lr C / n_i.
    """

    def __init__(
        self,
        rows: RowStore,
        epsilon: float,
        delta: float,
        clip: float | None,
        calibration: str = "paper",
        sensitivity: str = "clip",
    ):
        self.epsilon, self.delta = epsilon, delta
        self.clip = None if clip is None or math.isinf(clip) else clip
        self.calibration, self.sensitivity = calibration, "2 clip" if calibration == "analytic" else sensitivity
        ratio = analytic_ratio if calibration == "analytic" else classic_ratio
        self.ratio = 0.0 if math.isinf(epsilon) else ratio(epsilon, delta)  # sigma / Delta
        self.releases = rows("privacy", default=torch.zeros(1))

    @property
    def is_lossless(self) -> bool:
        """Whether no upload is changed: True if epsilon is infinite (no noise) and there is no clipping norm."""
        return self.ratio == 0 and self.clip is None

    @property
    def step_clip(self) -> float | None:
        """Largest l2 norm of a client's batch gradient in a local step, C with calibration="paper".

        None if steps are not clipped: with calibration="analytic", which clips uploads, or without a clipping norm.
        """
        return self.clip if self.calibration == "paper" else None

    @property
    def sigma(self) -> float | None:
        """Standard deviation of the noise, equal for all clients; 0 without noise, None if it differs by client.

        It is the sensitivity Delta times self.ratio, sigma / Delta.
        """
        if self.ratio == 0:
            return 0.0
        # the sensitivity Delta, how far a client's data can move an upload; None for lr_over_n
        sensitivity = {"clip": self.clip, "2 clip": 2 * (self.clip or 0)}.get(self.sensitivity)
        return None if sensitivity is None else sensitivity * self.ratio

    def sigmas(self, context: RoundContext, first_rate: FirstRate) -> Tensor:
        """Return the standard deviation of the noise of each client in this round.

        Args:
            context: The clients.
            first_rate: Returns the learning rate of the first local step.  It is called for the option
                sensitivity=lr_over_n only.

        Returns:
            The standard deviations.  # [K]
        """
        if self.sigma is not None:
            return torch.full((len(context),), self.sigma, device=context.device)
        # learning rate of the first local step
        rate = torch.as_tensor(first_rate(), device=context.device).reshape(-1)  # [1] or [K]
        num_samples = torch.from_numpy(context.num_samples).float().to(context.device)  # n_i
        return 2 * rate * (self.clip or 0) * self.ratio / num_samples.clamp_min(1)  # Delta = 2 lr C / n_i, times ratio

    def release(
        self,
        context: RoundContext,
        name: str,
        value: Tensor,
        reference: Tensor | None,
        call: int,
        first_rate: FirstRate,
    ) -> Tensor:
        """Clip an upload and add noise.

        Args:
            context: The clients.
            name: The name of the message.
            value: One row per client.  # [K, ...]
            reference: The tensor that the server has, [...] or [K, ...].  None: 0.
            call: The number of earlier uploads of this name in the round.
            first_rate: Returns the learning rate of the first local step.

        Returns:
            The upload that the server receives.  # [K, ...]

        Raises:
            ConfigError: The upload is not a floating-point tensor.
        """
        require(
            value.is_floating_point(),
            f"privacy.epsilon={self.epsilon:g}: noise needs floating-point numbers, but the method uploads {name!r} as "
            f"{str(value.dtype).removeprefix('torch.')}; upload it as float32, choose another algorithm, or set "
            "privacy.epsilon=null",
        )
        if self.calibration == "analytic" and self.clip is not None:  # calibration="paper" clips gradients instead
            value = clipped_towards(value, reference, self.clip)
        ids = context.ids[context.ids < self.releases.num_clients]  # new clients are not in the table
        self.releases[ids] = self.releases[ids] + 1  # counts one release of each client
        if self.ratio == 0:  # epsilon is infinite: no noise
            return value
        key = rng.key(context.seed, "privacy", name, context.round, call)  # new noise for each name, round and call
        keys = torch.from_numpy(rng.client_keys(key, context.ids)).to(value.device)
        return noisy(value, self.sigmas(context, first_rate), keys)

    # -- report ------------------------------------------------------------------------------------------
    def spent(self) -> tuple[int, float | None]:
        """Return the largest number of releases of a client, and their epsilon.

        Returns:
            The number of releases, and the epsilon of all of them together at `delta`.  Epsilon is None if noise and
            clipping imply no bound: with calibration=paper, or without noise.
        """
        # largest number of releases of a client
        most = int(self.releases.store[: self.releases.used].max()) if self.releases.used else 0
        has_bound = self.calibration == "analytic" and self.ratio > 0
        # rho of one release is Delta^2 / (2 sigma^2) = 1 / (2 ratio^2)
        return most, epsilon_of(most / (2 * self.ratio**2), self.delta) if has_bound else None

    def guarantee(self) -> str:
        """Return a sentence for reports: the run's privacy guarantee and its limits, or why it has none."""
        given = f"epsilon={self.epsilon:g}, delta={self.delta:g}"  # the options, for the sentence
        if self.ratio == 0:
            clip = "nothing is clipped" if self.clip is None else f"only the clip at {self.clip:g}"
            return f"no guarantee: epsilon is infinite, so that there is no noise, {clip}"
        if self.calibration == "analytic":
            return (
                f"each upload of a tensor, by itself, is differentially private ({given}) for a client's whole "
                f"data set, towards the server too: clipped to norm {self.clip:g}, Gaussian noise of standard "
                f"deviation {self.sigma:.4g}; tensors and rounds add up, and the sum is accounted for; "
                f"{UNPROTECTED}"
            )
        delta = "C" if self.sensitivity == "clip" else "2 lr C / n_i"  # formula of the sensitivity Delta
        size = f" = {self.sigma:.4g}" if self.sigma is not None else ""
        return (
            f"noise robustness, not a certified guarantee: gradients are clipped to norm C = {self.clip:g} by "
            f"batch, not by sample, and uploads get Gaussian noise of standard deviation {delta} sqrt(2 "
            f"ln(1.25/delta)) / epsilon{size} ({given}); the formula is valid for epsilon < 1 only, for one "
            f"release, and where {delta} bounds an upload, which nothing ensures here; tensors and rounds are not "
            f"accounted for; {UNPROTECTED}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the values for summary.json.

        epsilon is the option: the privacy loss of one release (with calibration=paper: as that paper computes it).  It
        is null if it is infinite, and sigma, the noise's standard deviation, is null if it differs between clients.
        releases and epsilon_spent, the loss of all of them, are those of the client with most releases.
        guarantee: a sentence on what is protected.
        """
        most, total = self.spent()
        return {
            "calibration": self.calibration,
            "epsilon": None if math.isinf(self.epsilon) else self.epsilon,
            "delta": self.delta,
            "clip": self.clip,
            "sensitivity": self.sensitivity,
            "sigma": self.sigma,
            "releases": most,
            "epsilon_spent": total,
            "guarantee": self.guarantee(),
        }


def clipped_towards(value: Tensor, center: Tensor | None, radius: float) -> Tensor:
    """Project each row onto the ball around a center.

    Args:
        value: The rows [K, ...].
        center: The center, [...] or [K, ...].  None: 0.
        radius: The radius of the ball.

    Returns:
        The projected rows [K, ...].
    """
    offset = value if center is None else value - center  # from the center to the row
    # of each row, in a shape that multiplies rows  [K, 1, ...]
    norm = offset.reshape(len(value), math.prod(value.shape[1:])).norm(dim=1).view(-1, *(1,) * (value.dim() - 1))
    clipped = offset * (radius / norm.clamp_min(1e-30)).clamp_max(1)  # 1e-30: no division by 0
    return torch.where(norm <= radius, value, clipped if center is None else center + clipped)


def noisy(value: Tensor, sigma: Tensor, keys: Tensor) -> Tensor:
    """Add Gaussian noise to each row.

    Args:
        value: The rows [K, ...].
        sigma: The standard deviation of the noise of each row [K].
        keys: The key of the random numbers of each row [K] int64.

    Returns:
        The noisy rows [K, ...].
    """
    size = math.prod(value.shape[1:])  # n
    out = value.reshape(len(value), size).clone()  # [K, n]
    # a few rows at a time, to limit memory
    for positions in torch.arange(len(value), device=value.device).split(max(1, BLOCK // max(size, 1))):
        draws = rng.RowRandom(keys[positions]).normal(size)
        out[positions] = out[positions] + (sigma[positions, None] * draws).to(out.dtype)
    return out.view(value.shape)
