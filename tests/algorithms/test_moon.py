"""MOON: its limits, and the contrastive term."""

import math

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six
from tiny import HEAD, close, engine, equal, mlp, play, ragged

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.moon import Moon
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    equal(play(four_of_six(), Moon(0.0), 3, COHORTS_OF_FOUR).w, play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w)


def test_round_1_is_fedavg_with_log_2_added_to_the_loss() -> None:
    """z_g = z_old, so the term is log 2 and has no gradient."""
    one, other = four_of_six(), four_of_six()
    close(play(one, Moon(5.0), 1, COHORTS_OF_FOUR).w, play(other, FedAvg(), 1, COHORTS_OF_FOUR).w, 1e-6)
    losses = []
    for method in (Moon(5.0), FedAvg()):
        e = four_of_six()
        method.setup(e.federation, e.model, e.rows)
        cohort = Cohort(e, np.array([0, 1, 2, 3]), 0)
        method.round(cohort)
        losses.append(cohort.cost.losses)
    close(losses[0], losses[1] + 5 * math.log(2), 1e-5)


def test_later_rounds_are_not_fedavg() -> None:
    a = play(four_of_six(), Moon(5.0), 2, [[0, 1, 2, 3]] * 2).w
    b = play(four_of_six(), FedAvg(), 2, [[0, 1, 2, 3]] * 2).w
    assert float((a - b).abs().max()) > 1e-4


def test_the_term_leaves_the_head() -> None:
    """Features do not depend on the head, so the heads of one step are FedAvg's."""
    rows = []
    for method in (Moon(5.0), FedAvg()):
        e = four_of_six(batch_size=1000, epochs=1)
        play(e, method, 1, [[0, 1, 2, 3]])
        method.w = torch.full_like(method.w, 0.1)
        if isinstance(method, Moon):
            method.v[np.arange(4)] = torch.linspace(-1, 1, method.w.numel()).expand(4, -1)
        play(e, method, 1, [[0, 1, 2, 3]], begin=1)
        rows.append(method.w)
    head = HEAD_COLUMNS(e)
    close(head.take(rows[0]), head.take(rows[1]), 1e-6)
    assert float((rows[0] - rows[1]).abs().max()) > 1e-4


def HEAD_COLUMNS(e):
    return e.model.columns["head"]


def test_a_small_temperature_does_not_overflow() -> None:
    w = play(four_of_six(), Moon(1.0, tau=1e-3), 3, COHORTS_OF_FOUR).w
    assert bool(torch.isfinite(w).all())


def test_the_weight_may_differ_by_client() -> None:
    a = play(four_of_six(), Moon([0.7] * 6), 2, COHORTS_OF_FOUR).w
    close(a, play(four_of_six(), Moon(0.7), 2, COHORTS_OF_FOUR).w, 1e-6)


def test_a_model_without_a_linear_head_is_refused() -> None:
    arrays, split = ragged()
    module = mlp()
    module.head = torch.nn.Sequential(module.head)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="named head must be a linear layer"):
        play(engine(arrays, split, module, columns=HEAD), Moon())
