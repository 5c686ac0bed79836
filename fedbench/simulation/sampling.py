"""Which clients take part in a round, and which are evaluated: drawn by keys, the same for every method."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

from fedbench.core import rng
from fedbench.core.options import check_each, require
from fedbench.core.settings import check_cohort


def cohort_size(cfg: DictConfig, num_clients: int) -> int:
    """K: clients_per_round, or max(1, floor(N * sample_rate)); ConfigError for more clients than there are."""
    if cfg.clients_per_round is None:
        return max(1, int(num_clients * cfg.sample_rate + 1e-9))
    check_cohort(cfg.clients_per_round, num_clients)
    return int(cfg.clients_per_round)


def draw_cohort(seed: int, round: int, num_clients: int, size: int) -> np.ndarray:
    """The clients of a round, uniform without replacement; the same for every algorithm under one seed.  # [K]"""
    if size == num_clients:
        return np.arange(num_clients)
    return np.sort(rng.generator(seed, "cohort", round).choice(num_clients, size, replace=False, shuffle=False))


def survivors(seed: int, round: int, ids: np.ndarray, dropout: float) -> np.ndarray:
    """Those of a round's clients that are not lost, each by its own key and the same for every algorithm.  # [k]"""
    chance = rng.bits(rng.key(seed, "lost", round), ids) / 2.0**64  # [K] in [0, 1)
    return ids[chance >= dropout]


def step_fractions(cfg: DictConfig, num_clients: int) -> np.ndarray | None:
    """The share of its local steps that each client does: system.slow_steps for system.slow of them (to the nearest
    number, halves up), the same ones throughout the run, all for the others; None where nobody is slow.  # [N]"""
    slow = cfg.system.slow
    if not slow:
        return None
    count = int(num_clients * slow + 0.5 + 1e-9)
    require(
        count > 0,
        f"system.slow={slow:g} of {num_clients} clients is nobody: take 0, or at least {0.5 / num_clients:.2g}",
    )
    each = np.ones(num_clients)
    each[rng.generator(int(cfg.seed), "slow").choice(num_clients, count, replace=False)] = cfg.system.slow_steps
    return each


def epochs(cfg: DictConfig, num_clients: int) -> int | np.ndarray:
    """local.epochs: one number for all clients, or each one's; ConfigError for a list of another length.  # [N]"""
    each = cfg.local.epochs
    check_each("local.epochs", each, num_clients, "numbers")
    return int(each) if isinstance(each, int) else np.array(list(each), np.int64)


def evaluated_clients(cfg: DictConfig, num_clients: int) -> np.ndarray:
    """All clients, or eval.clients of them, the same ones throughout the run.  # [n]"""
    count = cfg.eval.clients
    if count is None or count >= num_clients:
        return np.arange(num_clients)
    return np.sort(rng.generator(int(cfg.seed), "evaluated").choice(num_clients, count, replace=False, shuffle=False))
