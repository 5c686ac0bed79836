"""FedFomo: rounds by hand, downloaded models, and held-out samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, again, column, points, row, six_clients
from tiny import (
    all_clients,
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedfomo import FedFomo
from fedbench.algorithms.local import Local
from fedbench.engine.cohort import Cohort


@pytest.mark.parametrize(
    "reference, rows, pref",
    [
        ("aggregated", (0.878571, 1.853226), ((0.714286, 0.285714), (0.548387, 0.451613))),
        ("trained", (1.2, 2.1), ((0, 1), (0, 0))),
    ],
)
def test_fedfomo_by_hand(reference: Any, rows: Sequence[float], pref: Sequence[Sequence[float]]) -> None:
    """c = (1, 2.8), lr 0.5, from 0; all samples of a client are equal, so held-out losses are f_i.

    Round 1: nothing to download; theta = (0.5, 1.4).
    Round 2, ref = 0 (aggregated): client 0: f_0(0) = 0.5, less f_0(theta) = (0.125, 0.08): 0.375 / 0.5 = 0.75 and
    0.42 / 1.4 = 0.3, so omega = (0.75, 0.3) / 1.05 and the mixture is 0.757143; client 1: 3.92 - (2.645, 0.98):
    1.275 / 0.5 = 2.55 and 2.94 / 1.4 = 2.1, the mixture 0.906452.  Half way to c: (0.878571, 1.853226).
    ref = theta (trained): client 0: (0, 0.045 / 0.9), so it takes 1.4 over, and trains it to 1.2; to client 1 the other
    is worse, and its own no better than itself: it keeps 1.4, and trains it to 2.1.
    """
    e = points([[1] * 5, [2.8] * 5])
    a = play(e, FedFomo(reference=reference), 2)
    close(deployed(e, a), column(*rows), 3e-5)  # 1e-5 is added to the distances
    close(a.pref[np.arange(2)], torch.tensor(pref, dtype=torch.float), 3e-5)


def test_fedfomo_without_downloads_is_local_on_kept_samples() -> None:
    e, f = six_clients(), six_clients()
    a = play(e, FedFomo(models=0), 3, COHORTS)
    f.federation.splits["train"] = e.federation.splits["remaining"]
    equal(deployed(e, a), deployed(f, play(f, Local(), 3, COHORTS)))


def test_fedfomo_weights_sum_to_one_or_nothing() -> None:
    e = six_clients(epochs=3)
    a = play(e, FedFomo(), 1)
    for r in range(1, 4):
        before = a.pref[np.arange(6)]
        again(e, a, r)
        omega = a.pref[np.arange(6)] - before
        assert (omega >= -1e-6).all()
        assert ((omega.sum(1) - 1).abs() < 1e-5).logical_or(omega.sum(1) == 0).all()
    assert a.pref[np.arange(6)].sum() > 1


def test_fedfomo_remembers_whom_it_preferred() -> None:
    """By number, not by place in the last cohort."""
    e = six_clients(epochs=3)
    pref = play(e, FedFomo(), 2, [[1, 4], [1, 4]]).pref[np.arange(6)]
    assert pref[[1, 4]].sum() > 0.9 and not pref[:, [0, 2, 3, 5]].any()


def test_fedfomo_is_not_moved_by_copies_of_its_reference() -> None:
    e = six_clients()
    a = play(e, FedFomo())
    ids = np.array([2])
    a.last, a.prev = a.ref[ids].expand(6, -1), torch.arange(6)
    theta = a.theta[ids]
    equal(a.mixed(Cohort(e, ids, 1), theta, a.ref[ids]), theta)
    equal(a.pref[ids], torch.zeros(1, 6))


def test_fedfomo_downloads_by_preference() -> None:
    e = six_clients()
    a = play(e, FedFomo(models=3))
    a.pref[np.array([1])] = row(0.5, 0, 0.2, 2, 1.5, 0)[None]  # and 1 of its own: 3, 4, 1
    chosen = a.choose(all_clients(e, 1))
    assert chosen[1].tolist() == [3, 4, 1]
    own = a.choose(all_clients(e, 2))[:, 0]
    assert own[[0, 2, 3, 4, 5]].tolist() == [0, 2, 3, 4, 5]  # Pref is I at first
    a.prev = torch.tensor([5, 1])  # positions in the last cohort
    assert a.choose(all_clients(e, 3)).shape == (6, 2)
    assert a.choose(all_clients(e, 3))[[1, 5], 0].tolist() == [1, 0]


def test_fedfomo_explores() -> None:
    e = six_clients()
    a = play(e, FedFomo(models=2, epsilon=1.0))
    picks = torch.stack([a.choose(all_clients(e, r)) for r in range(1, 40)])  # [rounds, 6, 2]
    assert (picks[..., 0] != picks[..., 1]).all()
    share = torch.bincount(picks.flatten(), minlength=6) / picks.numel()
    assert (share > 0.1).all() and (share < 0.25).all()  # uniform: 1/6
    a.epsilon = 0.5  # of 39 x 6 first picks, half are greedy
    own = [(a.choose(all_clients(e, r)) == torch.arange(6)[:, None]).any(1).float().mean() for r in range(1, 40)]
    assert 0.65 < float(torch.stack(own).mean()) < 0.95  # 1 - 1/4 (1 - 1/3) = 0.83


def test_held_out_samples() -> None:
    """A fifth, at least one where there are two; nothing lost, the training part whole, the same every time."""
    f, g = six_clients(sizes=[10, 3, 1]).federation, six_clients(sizes=[10, 3, 1]).federation
    f.hold_out(0.2)
    g.hold_out(0.2)
    assert f.splits["held_out"].sizes.tolist() == [2, 1, 0] and f.splits["remaining"].sizes.tolist() == [8, 2, 1]
    for i in range(3):
        both = np.concatenate([f.splits["remaining"][i], f.splits["held_out"][i]])
        assert sorted(both) == sorted(f.splits["train"][i])
    assert np.array_equal(f.splits["held_out"].indices, g.splits["held_out"].indices)
    e = six_clients(sizes=[10, 3, 1])
    assert torch.isfinite(deployed(e, play(e, FedFomo(), 3))).all()  # nothing held out: it keeps its model
