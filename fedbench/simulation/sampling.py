"""Random choices of clients: those of a round, those that drop out, slow ones, and evaluated ones.

Draws are keyed by the seed and the round (core/rng.py), so all methods get the same clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from omegaconf import DictConfig

from fedbench.core import rng
from fedbench.core.options import check_each, require
from fedbench.core.settings import check_cohort
from fedbench.simulation.instantiate import component


def cohort_size(cfg: DictConfig, num_clients: int) -> int:
    """Return the number of clients per round: clients_per_round, or max(1, floor(N * sample_rate)).

    Args:
        cfg: The checked configuration.
        num_clients: N.

    Raises:
        ConfigError: clients_per_round is larger than N.
    """
    if cfg.clients_per_round is None:
        return max(1, int(num_clients * cfg.sample_rate + 1e-9))  # 1e-9: a product may be too small by rounding
    check_cohort(cfg.clients_per_round, num_clients)
    return int(cfg.clients_per_round)


def draw_cohort(seed: int, round: int, num_clients: int, size: int) -> np.ndarray:
    """Sample the clients of a round uniformly without replacement.

    Args:
        seed: The run's seed.
        round: The round, from 0.
        num_clients: N.
        size: K, the number of clients to sample.

    Returns:
        Sorted client ids [K], the same for all algorithms.
    """
    if size == num_clients:
        return np.arange(num_clients)
    return np.sort(rng.generator(seed, "cohort", round).choice(num_clients, size, replace=False, shuffle=False))


def participants(seed: int, round: int, ids: np.ndarray, dropout: float) -> np.ndarray:
    """Return the sampled clients that do not drop out.

    Args:
        seed: The run's seed.
        round: The round, from 0.
        ids: The sampled clients [K].
        dropout: The probability that a client drops out, in [0, 1].

    Returns:
        Client ids [k].  Draws are keyed per client, so all algorithms see the same dropouts.
    """
    uniform = rng.bits(rng.key(seed, "lost", round), ids) / 2.0**64  # [K] in [0, 1)
    return ids[uniform >= dropout]


def step_fractions(cfg: DictConfig, num_clients: int) -> np.ndarray | None:
    """Return the fraction of its local steps that each client completes in a round.

    It is system.slow_steps for a fraction system.slow of the clients, and 1 for the others.  The same clients are slow
    in all rounds.

    Args:
        cfg: The checked configuration.
        num_clients: N.

    Returns:
        Fractions [N]; None if no client is slow.

    Raises:
        ConfigError: system.slow rounds to no client.
    """
    slow_share = cfg.system.slow
    if not slow_share:
        return None
    count = int(num_clients * slow_share + 0.5 + 1e-9)  # the nearest integer, halves up despite rounding errors
    require(
        count > 0,
        f"system.slow={slow_share:g} of {num_clients} clients rounds to no client: use 0, or at least "
        f"{0.5 / num_clients:.2g}",
    )
    fractions = np.ones(num_clients)
    slow_clients = rng.generator(int(cfg.seed), "slow").choice(num_clients, count, replace=False)
    fractions[slow_clients] = cfg.system.slow_steps
    return fractions


def per_client(key: str, option: float | Sequence[float], num_clients: int) -> float | np.ndarray:
    """Return an option of local training: one number for all clients, or an array [N] with one per client.

    Args:
        key: The option, such as "local.epochs".
        option: Its value.
        num_clients: N.

    Raises:
        ConfigError: A list does not have N entries.
    """
    check_each(key, option, num_clients, "numbers")
    return option if isinstance(option, int | float) else np.array(list(option))


def evaluated_clients(cfg: DictConfig, num_clients: int) -> np.ndarray:
    """Return the ids of the training clients that the run evaluates, the same in all rounds.

    Args:
        cfg: The checked configuration.  With eval.clients, this many honest clients are drawn at random.
        num_clients: N.

    Returns:
        Ascending ids [n]; all honest clients without eval.clients.
    """
    honest = np.setdiff1d(np.arange(num_clients), attacker_ids(cfg, num_clients))
    count = cfg.eval.clients
    if count is None or count >= len(honest):
        return honest
    chosen = rng.generator(int(cfg.seed), "evaluated").choice(len(honest), count, replace=False, shuffle=False)
    return honest[np.sort(chosen)]


def attacker_ids(cfg: DictConfig, num_clients: int) -> np.ndarray:
    """Return the training clients that attack the run, ascending; none with attack=none.  # [f]

    Args:
        cfg: The checked configuration.
        num_clients: N.

    Raises:
        ConfigError: attack.fraction or attack.clients does not fit N.
    """
    return component(cfg, "attack").choose(int(cfg.seed), num_clients)
