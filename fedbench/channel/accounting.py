"""Privacy accounting of sampled Gaussian releases, by the library dp-accounting.

z is the noise multiplier of one release: the noise's standard deviation over the clipping norm.  m releases of a round
with the same z are together one release with z / sqrt(m).

Sampling "poisson" takes each client with probability q.  Neighbouring federations differ by one added or removed
client.  Sampling "fixed" takes K of N clients without replacement.  Neighbouring federations differ by one replaced
client, so that the sensitivity is twice the clipping norm, and the multiplier z / 2.

References:
    Abadi et al., CCS 2016, and Mironov, Talwar and Zhang, 2019 (Poisson sampling).
    Wang, Balle and Kasiviswanathan, AISTATS 2019 (sampling without replacement).
    Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, PoPETs 2022 (privacy loss distributions).
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedbench.core.options import ConfigError

Accountant = Literal["pld", "rdp"]
Sampling = Literal["poisson", "fixed"]
TOLERANCE = 1e-3  # of a calibrated noise multiplier, relative to it


@dataclass(frozen=True)
class Setting:
    """What epsilon depends on, besides the number of rounds: z, m releases a round, and `expected` clients of all N.

    Attributes:
        noise_multiplier: z of one release, >= 0.
        num_clients: N.
        expected: Expected number of clients of a round, q N or K.
        releases: Number of releases of a round, m.
        sampling: "poisson" or "fixed".
        accountant: "pld" or "rdp".  "fixed" needs "rdp" unless all clients are in each round.
        delta: Delta of the run.
    """

    noise_multiplier: float
    num_clients: int
    expected: float
    releases: int
    sampling: Sampling
    accountant: Accountant
    delta: float


def library() -> Any:
    """Import and return the package dp_accounting, with its parts pld and rdp; raise ConfigError without it."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise ConfigError(
            'privacy=central needs the package dp-accounting: pip install "dp-accounting>=0.4", or choose privacy=local'
        ) from None
    # RDP skips orders for which a series does not converge, which makes epsilon larger, never smaller
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting


def event(s: Setting) -> Any:
    """Return the description of one round's releases for dp-accounting, an event.

    Args:
        s: The sampling, the noise and the number of releases of a round.
    """
    dp = library()  # dp.PoissonSampledDpEvent(q, event): each client takes part with probability q
    # the m releases of a round together move by up to sqrt(m) clipping norms, against the noise of one
    joint = s.noise_multiplier / math.sqrt(s.releases)
    if s.sampling == "poisson":
        return dp.PoissonSampledDpEvent(s.expected / s.num_clients, dp.GaussianDpEvent(joint))
    gaussian = dp.GaussianDpEvent(joint / 2)  # one replaced client moves a sum by up to twice the clipping norm
    if s.expected == s.num_clients:
        return gaussian
    return dp.SampledWithoutReplacementDpEvent(s.num_clients, int(s.expected), gaussian)


def accountant(s: Setting) -> Any:
    """Return a new dp-accounting accountant for a setting.

    Neighbouring federations differ by one client that is added or removed (sampling="poisson"), or replaced ("fixed").
    """
    dp = library()
    if s.accountant == "pld":
        return dp.pld.PLDAccountant()  # without sampling, a Gaussian release is the same for both kinds of neighbours
    relations = dp.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if s.sampling == "poisson" else relations.REPLACE_ONE
    return dp.rdp.RdpAccountant(neighboring_relation=relation)


@functools.lru_cache(maxsize=1)
def _sampled_round(s: Setting) -> Any:
    """Return the privacy loss distribution of one round with sampling="poisson".

    It takes most of the time of `epsilon`, and does not depend on the number of rounds.
    """
    sampled = event(s)  # a sampled event, which contains the Gaussian one
    return library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sampled.event.noise_multiplier,
        value_discretization_interval=1e-4,  # the default of dp-accounting, rounded pessimistically
        sampling_prob=sampled.sampling_probability,
    )


@functools.lru_cache(maxsize=4096)
def epsilon(s: Setting, rounds: int) -> float:
    """Return the epsilon that rounds spend together, at s.delta.

    Args:
        s: The noise, sampling and releases of each round.
        rounds: Number of rounds, all with this setting.

    Returns:
        Epsilon >= 0; 0 for no rounds, and infinity without noise.
    """
    if rounds == 0:
        return 0.0
    if s.noise_multiplier == 0:
        return math.inf
    if s.accountant == "pld" and s.sampling == "poisson":
        # composed with the distribution of no release, as dp-accounting's PLDAccountant does
        no_release = library().pld.privacy_loss_distribution.identity(value_discretization_interval=1e-4)
        return float(no_release.compose(_sampled_round(s).self_compose(rounds)).get_epsilon_for_delta(s.delta))
    composition = accountant(s)
    composition.compose(event(s), rounds)
    return float(composition.get_epsilon(s.delta))


def least_noise_multiplier(s: Setting, target: float, rounds: int) -> float:
    """Return a noise multiplier with which all rounds spend at most an epsilon, rounded up by a relative TOLERANCE.

    Args:
        s: The setting, whose noise multiplier is ignored.
        target: The largest epsilon, > 0.
        rounds: Number of rounds.

    Raises:
        ConfigError: Not even a multiplier of 1e6 is enough.
    """

    def holds(z: float) -> bool:
        """Return whether `rounds` rounds with the noise multiplier z spend an epsilon of at most `target`."""
        return epsilon(replace(s, noise_multiplier=z), rounds) <= target

    high, factor = 1.0, 2.0
    if s.accountant == "pld" and s.sampling == "poisson":  # the fast accountant gives a nearby start
        high, factor = least_noise_multiplier(replace(s, accountant="rdp"), target, rounds), 1.1
    while not holds(high):  # then halve an interval: high holds, low = high / factor does not
        high *= factor
        if high > 1e6:
            raise ConfigError(
                f"privacy.target_epsilon={target:g} needs a noise multiplier above 1e6: raise it, or privacy.delta"
            )
    low = high / factor
    while holds(low):
        low, high = low / factor, low
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
