"""The amount of local training in a round: epochs, batch sizes, steps, fractions of slow clients and learning rate.

Letters: K clients of the cohort.
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
    """Return the number of epochs of the configured training.

    With system.fewest_epochs, the number of each client is a uniform whole number, drawn anew in every round.

    Args:
        engine: Has local.epochs, one number for all N clients or one for each, system.fewest_epochs and the seed.
        context: The clients and the round.

    Returns:
        One number for all clients, or one for each.  # [K]
    """
    max_epochs = engine.epochs[context.ids] if isinstance(engine.epochs, np.ndarray) else engine.epochs
    if engine.fewest_epochs is None or not context.changes_state:
        return max_epochs
    uniform = rng.bits(rng.key(engine.seed, "epochs", context.round), context.ids) / 2.0**64  # [K] in [0, 1)
    # a whole number from fewest_epochs to max_epochs
    return engine.fewest_epochs + (uniform * (max_epochs - engine.fewest_epochs + 1)).astype(np.int64)


def batch_size_of(engine: Engine, context: RoundContext) -> int | np.ndarray:
    """Return local.batch_size: one number for all clients, or one for each.  # [K]

    Args:
        engine: Has local.batch_size, one number for all N clients or one for each.
        context: The clients and the round.
    """
    return engine.batch_size[context.ids] if isinstance(engine.batch_size, np.ndarray) else engine.batch_size


def step_fraction(engine: Engine, context: RoundContext) -> np.ndarray | None:
    """Return the fraction of its local steps that each client completes.

    Only in a round are there slow clients.  In evaluations and trials, all clients complete all steps.

    Args:
        engine: Has the fraction of each of the N clients, or None if the run has no slow clients.
        context: The clients and the round.

    Returns:
        Fractions in (0, 1].  None: all clients complete all steps.  # [K]
    """
    if engine.step_fraction is None or not context.changes_state:
        return None
    return engine.step_fraction[context.ids]


def num_steps(engine: Engine, context: RoundContext) -> np.ndarray:
    """Return the number of local steps of each client in a round with the run's options (local.*, system.*).

    Args:
        engine: Has the options local.* and system.*, and the fractions of slow clients.
        context: The clients and the round.

    Returns:
        Numbers of steps, 0 for a client without samples.  # [K]
    """
    steps, _ = rng.lengths(  # _: numbers of samples
        context.num_samples,
        batch_size_of(engine, context),
        epochs=None if engine.steps else epochs_of(engine, context),
        steps=engine.steps,
        drop_last=engine.drop_last,
        step_fraction=step_fraction(engine, context),
    )
    return steps


def first_rate(engine: Engine, context: RoundContext, optimizer: Optimizer) -> Rate:
    """Return the learning rate of the first local step of a round.

    Args:
        engine: Has the number of rounds and the options local.*, on which the schedule may depend.
        context: The clients and the round.
        optimizer: The optimizer.

    Returns:
        One learning rate, or one for each client.  # [K, 1]
    """
    scheduled_by_step = optimizer.schedule.per == "step"
    rate = optimizer.rate(context.round, engine.rounds, context.ids, scheduled=not scheduled_by_step)
    if scheduled_by_step:
        at_least_one_step = np.maximum(num_steps(engine, context), 1)
        # of the first step  [K]
        factors = optimizer.schedule.of_steps(context.round, engine.rounds, at_least_one_step)[0]
        rate = rate * torch.from_numpy(factors).float()[:, None]
    return rate.to(context.device) if isinstance(rate, Tensor) else rate
