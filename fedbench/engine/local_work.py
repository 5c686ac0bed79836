"""How much a client trains in a round: epochs, the fraction of steps of a slow device, steps, learning rate.

Letters: K clients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.engine.engine import Engine
from fedbench.engine.optim import Optimizer, Rate


def epochs_of(engine: Engine, context: RoundContext) -> float | np.ndarray:
    """Return the epochs of a training as configured: one number for all, or each client's [K].

    With system.fewest_epochs, each client draws its number anew in every round.
    """
    most = engine.epochs[context.ids] if isinstance(engine.epochs, np.ndarray) else engine.epochs
    if engine.fewest_epochs is None or not context.changes_state:
        return most
    chance = rng.bits(rng.key(engine.seed, "epochs", context.round), context.ids) / 2.0**64  # [K] in [0, 1)
    return engine.fewest_epochs + (chance * (most - engine.fewest_epochs + 1)).astype(np.int64)


def step_fraction(engine: Engine, context: RoundContext) -> np.ndarray | None:
    """Return the fraction of its local steps that each client does [K]; None: all do all, as outside of rounds."""
    return None if engine.step_fraction is None or not context.changes_state else engine.step_fraction[context.ids]


def num_steps(engine: Engine, context: RoundContext) -> np.ndarray:
    """Return the local steps of each client in a training as configured.  # [K]"""
    return rng.lengths(
        context.num_samples,
        engine.batch_size,
        epochs=None if engine.steps else epochs_of(engine, context),
        steps=engine.steps,
        drop_last=engine.drop_last,
        step_fraction=step_fraction(engine, context),
    )[0]


def first_rate(engine: Engine, context: RoundContext, optimizer: Optimizer) -> Rate:
    """Return the learning rate of the first local step: one, or one a client [K, 1]."""
    by_steps = optimizer.schedule.per == "step"
    rate = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=not by_steps)
    if by_steps:
        steps = np.maximum(num_steps(engine, context), 1)
        factors = optimizer.schedule.of_steps(context.round, engine.rounds, steps)[0]  # [K]
        rate = rate * torch.from_numpy(factors).float()[:, None]
    return rate.to(context.device) if isinstance(rate, Tensor) else rate
