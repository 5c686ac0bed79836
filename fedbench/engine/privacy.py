"""Differential privacy of what clients upload, for any method: clip, and Gaussian noise, at `cohort.upload`.

calibration=paper, a reconstruction: Luo et al., ICLR 2025 (pFedMoAP), Table 6, clip "the gradients of the prompts",
add noise "to the uploaded prompts" with delta = 0.05, and say no more; their code has none of it.  Here every local
step clips a client's batch gradient to l2 norm C, and every number of every uploaded tensor gets N(0, sigma^2),
sigma = Delta sqrt(2 ln(1.25/delta)) / epsilon (Dwork and Roth, 2014, Theorem A.1), Delta = C or 2 lr C / n_i.  That is
noise to be robust against, no guarantee: the theorem asks for epsilon < 1, and for a Delta that bounds the upload.

calibration=analytic: what an upload adds to what the server expected of it is clipped to norm C, so that any two data
sets of a client are at most Delta = 2 C apart, and sigma is the least that makes one release (epsilon, delta)-private
(Balle and Wang, ICML 2018, Theorem 8).  Releases add up in rho = Delta^2 / (2 sigma^2) (Bun and Steinke, TCC 2016);
as all are Gaussian, together they are as one Gaussian release of the summed rho (Dong, Roth and Su, JRSS-B 2022).

What never passes `upload` (a personal row, a gate) has no noise: clients evaluate what they keep as it is.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbench.core import rng
from fedbench.core.options import require
from fedbench.engine.rows import RowStore

if TYPE_CHECKING:
    from fedbench.engine.cohort import Cohort
    from fedbench.engine.optim import Optimizer

BLOCK = 1 << 20  # numbers whose noise is drawn at a time
UNPROTECTED = (
    "numbers of samples, who takes part when and the scores reported here are not protected, and the noise "
    "is a simulation's, drawn from the run's seed"
)


class Privacy:
    """epsilon (inf: no noise), delta: of one release, a tensor that a client uploads once; clip: C (None: nothing is
    clipped, which goes with no noise); sensitivity: Delta of calibration=paper.

    State: releases [N, 1], how many each client has made.
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
        """Whether a release is what was uploaded."""
        return self.ratio == 0 and self.clip is None

    @property
    def step_clip(self) -> float | None:
        """Largest norm of a client's gradient in a local step; None: steps are not clipped."""
        return self.clip if self.calibration == "paper" else None

    def clipping(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as it acts on what is uploaded, for a method's check."""
        if self.step_clip is None:
            return optimizer
        other = copy.copy(optimizer)
        other.clip, other.plain = self.step_clip, False
        return other

    @property
    def sigma(self) -> float | None:
        """Standard deviation of the noise; None: it differs by client (lr_over_n)."""
        if self.ratio == 0:
            return 0.0
        width = {"clip": self.clip, "2 clip": 2 * (self.clip or 0)}.get(self.sensitivity)
        return None if width is None else width * self.ratio

    def sigmas(self, cohort: Cohort) -> Tensor:
        """Standard deviation of the noise on what each client uploads in this round.  # [K]"""
        if self.sigma is not None:
            return torch.full((len(cohort),), self.sigma, device=cohort.device)
        rate = torch.as_tensor(cohort.rate(), device=cohort.device).reshape(-1)  # [1] or [K]
        return 2 * rate * (self.clip or 0) * self.ratio / cohort.num_samples.clamp_min(1)

    def release(self, cohort: Cohort, name: str, value: Tensor, expected: Tensor | None, again: int) -> Tensor:
        """What the server sees of value [K, ...], uploaded as `name`, for the again-th time in this round (from 0).

        expected: what the server knew of it before, [...] or [K, ...]; None: 0.
        """
        require(
            value.is_floating_point(),
            f"privacy.epsilon={self.epsilon:g}: noise needs floating-point numbers, and "
            f"the method uploads {name!r} as {str(value.dtype).removeprefix('torch.')}",
        )
        if self.calibration == "analytic" and self.clip is not None:
            value = clipped_towards(value, expected, self.clip)
        counted = cohort.ids[cohort.ids < self.releases.num_clients]  # new clients have made less than anybody of these
        self.releases[counted] = self.releases[counted] + 1
        if self.ratio == 0:
            return value
        key = rng.key(cohort.engine.seed, "privacy", name, cohort.round, again)
        keys = torch.from_numpy(rng.client_keys(key, cohort.ids)).to(value.device)
        return noisy(value, self.sigmas(cohort), keys)

    # -- what is said of it ------------------------------------------------------------------------------
    def spent(self) -> tuple[int, float | None]:
        """The most releases that one client has made, and the epsilon (at delta) of them all together; None where no
        finite one is known."""
        most = int(self.releases.store[: self.releases.used].max()) if self.releases.used else 0
        sound = self.calibration == "analytic" and self.ratio > 0
        return most, epsilon_of(most / (2 * self.ratio**2), self.delta) if sound else None

    def guarantee(self) -> str:
        """What the noise of this run does and does not promise, in one sentence."""
        given = f"epsilon={self.epsilon:g}, delta={self.delta:g}"
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
        delta = "C" if self.sensitivity == "clip" else "2 lr C / n_i"
        size = f" = {self.sigma:.4g}" if self.sigma is not None else ""
        return (
            f"noise robustness, not a certified guarantee: gradients are clipped to norm C = {self.clip:g} by "
            f"batch, not by sample, and uploads get Gaussian noise of standard deviation {delta} sqrt(2 "
            f"ln(1.25/delta)) / epsilon{size} ({given}); the formula is valid for epsilon < 1 only, for one "
            f"release, and where {delta} bounds an upload, which nothing ensures here; tensors and rounds are not "
            f"accounted for; {UNPROTECTED}"
        )

    def summary(self) -> dict[str, Any]:
        """For summary.json.  epsilon null: infinite; sigma null: differs by client; releases, epsilon_spent: of the
        client that made the most."""
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
    """value [K, ...], each row that is further than radius from center moved to that distance.

    center: [...] or [K, ...]; None: 0.
    """
    offset = value if center is None else value - center
    norm = offset.reshape(len(value), math.prod(value.shape[1:])).norm(dim=1).view(-1, *(1,) * (value.dim() - 1))
    clipped = offset * (radius / norm.clamp_min(1e-30)).clamp_max(1)
    return torch.where(norm <= radius, value, clipped if center is None else center + clipped)


def noisy(value: Tensor, sigma: Tensor, keys: Tensor) -> Tensor:
    """value [K, ...] plus N(0, sigma_i^2) on every number of row i, drawn from keys[i]; sigma, keys [K]."""
    numbers = math.prod(value.shape[1:])
    out = value.reshape(len(value), numbers).clone()  # [K, n]
    for some in torch.arange(len(value), device=value.device).split(max(1, BLOCK // max(numbers, 1))):
        draws = rng.RowRandom(keys[some]).normal(numbers)
        out[some] += (sigma[some, None] * draws).to(out.dtype)
    return out.view(value.shape)


# -- calibration -----------------------------------------------------------------------------------------
def classic_ratio(epsilon: float, delta: float) -> float:
    """sigma / Delta of the classical Gaussian mechanism, a theorem for epsilon < 1 only."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def delta_of(epsilon: float, ratio: float) -> float:
    """The least delta at which noise of sigma = ratio Delta is (epsilon, delta)-private: Phi(a) - e^epsilon Phi(-b),
    with a = 1/(2 ratio) - epsilon ratio and b = 1/(2 ratio) + epsilon ratio.  Since e^epsilon = phi(a) / phi(b), the
    second term is phi(a) times Mills' ratio of b, which cannot overflow."""
    a, b = 1 / (2 * ratio) - epsilon * ratio, 1 / (2 * ratio) + epsilon * ratio
    density = 0.5 * math.exp(-a * a / 2)
    if a > 0:
        return 0.5 * math.erfc(-a / math.sqrt(2)) - density * _erfcx(b / math.sqrt(2))
    return density * (_erfcx(-a / math.sqrt(2)) - _erfcx(b / math.sqrt(2)))


def _erfcx(x: float) -> float:
    """exp(x^2) erfc(x), for x >= 0."""
    return float(torch.special.erfcx(torch.tensor(x, dtype=torch.float64)))


def analytic_ratio(epsilon: float, delta: float) -> float:
    """The least sigma / Delta that is (epsilon, delta)-private, from above."""
    return _least(lambda ratio: delta_of(epsilon, ratio) <= delta)


def epsilon_of(rho: float, delta: float) -> float:
    """The least epsilon, from above, of Gaussian releases of rho in all: of one with sigma / Delta = (2 rho)^-1/2."""
    if rho == 0 or delta_of(0, ratio := 1 / math.sqrt(2 * rho)) <= delta:
        return 0.0
    return _least(lambda epsilon: delta_of(epsilon, ratio) <= delta)


def _least(holds: Any) -> float:
    """The least x > 0 from which on holds(x), by bisection; to 1e-12 of it, on the side where it holds."""
    low = high = 1.0
    while not holds(high):
        high *= 2
    while holds(low):
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
