"""FedFomo, FedAMP, HeurFedAMP, FedSLD, APPLE, PGFed-CE, AppleNet: limits, invariants, steps by hand.

By hand means Squares: f_i(theta) = 0.5 (theta - c_i)^2, of gradient theta - c_i, in one number.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    HEAD,
    PLANS,
    SIZES,
    Point,
    close,
    compose,
    deployed,
    engine,
    engine_on,
    equal,
    everyone,
    mlp,
    play,
    ragged,
    seeded,
    targets_federation,
)
from torch import Tensor, nn

from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedamp import FedAMP
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedfomo import FedFomo
from fedbench.algorithms.fedsld import FedSLD
from fedbench.algorithms.heurfedamp import HeurFedAMP
from fedbench.algorithms.local import Local
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_ce import PGFedCE
from fedbench.core.linalg import dot, products, squared_distances
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort, Engine
from fedbench.engine.local import Batch
from fedbench.engine.optim import SGD, Adam
from fedbench.models.applenet import AppleNet
from fedbench.nn.flat import FlatModel
from fedbench.partition.base import Ragged, Split
from fedbench.simulation import build, simulator

COHORTS = ([0, 2, 3], [1, 2], [0, 4, 5])
MODES = ("server_alpha", "drop_mean", "pseudo_gradient")
METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedfomo": FedFomo, "fedfomo_trained": partial(FedFomo, reference="trained", models=2),
    "fedamp": partial(FedAMP, alpha_k=0.2), "fedamp_last": partial(FedAMP, alpha_k=0.2, peers="last_cohort"),
    "heurfedamp": HeurFedAMP, "fedsld": FedSLD, "apple": APPLE, "apple_limited": partial(APPLE, bandwidth=2),
    **{f"pgfed_ce_{mode}": partial(PGFedCE, mode=mode) for mode in MODES}}
STILL = {name: {"eta2": 0.0} for name in METHODS if name.startswith(("apple", "pgfed"))}


def nets(optimizer: SGD | Adam | None = None, sizes: Sequence[int] = SIZES, **options: Any) -> Engine:
    """Six ragged clients, a network of two layers, of which there are independent draws."""
    arrays, split = ragged(sizes)
    model = FlatModel(mlp(), HEAD, draw=lambda j: mlp(seed=j + 1))
    return engine(arrays, split, model, optimizer or SGD(lr=0.1), **options)              # type: ignore[arg-type]


def points(targets: Sequence[Sequence[float]], lr: float = 0.5, momentum: float = 0.0, start: Sequence[float] = (0.0,),
           **options: Any) -> Engine:
    """Squares: client i's samples are targets[i]; rows are `start`."""
    federation = targets_federation([np.array(t, float).reshape(-1, len(start)) for t in targets])
    return engine_on(federation, Point(start), SGD(lr=lr, momentum=momentum), **{"batch_size": 100, **options})


def again(e: Engine, a: Algorithm, round: int = 1, ids: Sequence[int] | None = None) -> Cohort:
    """One more round; returns its cohort."""
    cohort = Cohort(e, np.arange(e.federation.num_clients) if ids is None else np.array(ids), round)
    a.round(cohort)
    return cohort


def row(*values: float) -> Tensor:
    return torch.tensor(values)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


# -- every method ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_nothing_moves_at_learning_rate_zero(name: str) -> None:
    e = nets(SGD(lr=0.0))
    a = play(e, METHODS[name](**STILL.get(name, {})), rounds=0)
    start = deployed(e, a)
    play(e, a, 2, COHORTS, begin=1)
    close(deployed(e, a), start, 1e-6)                                 # a weighted mean of equal rows rounds
    if a.global_row() is not None:
        close(a.global_row(), e.model.init_row(), 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_only_the_cohort_changes_its_rows(name: str) -> None:
    e = nets(SGD(lr=0.1, momentum=0.9, reset="never"))
    a = play(e, METHODS[name](), 1, [[1, 3]])
    assert all(set(store.touched()) <= {1, 3} for store in e.rows.all.values())
    before = deployed(e, a)
    again(e, a, 1, [0, 3])
    unsampled = [1, 2, 4, 5]
    if name != "fedsld":
        equal(deployed(e, a)[unsampled], before[unsampled])


@pytest.mark.parametrize("name", ["fedfomo", "fedfomo_trained", "fedamp", "heurfedamp", "fedsld", "apple",
                                  *(f"pgfed_ce_{mode}" for mode in MODES)])
def test_renumbering_clients_permutes_rows(name: str) -> None:
    """Batches and held-out samples are keyed by client, so all samples of a client are one sample."""
    order = np.array([3, 0, 5, 1, 4, 2])
    arrays, split = ragged()
    first = np.repeat(split.train.offsets[:-1], split.train.sizes)
    arrays.inputs, arrays.targets = arrays.inputs[first], arrays.targets[first]           # type: ignore[index]
    arrays.split, runs = np.zeros(len(first), np.int8), []
    options = {"init": "common"} if name == "apple" else {"models": 6} if name.startswith("fedfomo") else {}
    for ids in (np.arange(6), order):
        parts = Ragged.from_lists([split.train[i] for i in ids])
        e = engine(arrays, Split(parts, split.val, parts), mlp(), SGD(lr=0.1, momentum=0.5), epochs=2)
        a = play(e, METHODS[name](**options), 3)
        runs.append((deployed(e, a, 1), a.global_row()))
    close(runs[1][0], runs[0][0][torch.from_numpy(order)], 2e-4)
    if runs[0][1] is not None:
        close(runs[1][1], runs[0][1], 2e-4)


@pytest.mark.parametrize("name", METHODS)
def test_executors_agree(name: str) -> None:
    found = {}
    for plan in PLANS:
        e = nets(SGD(lr=0.1, momentum=0.9, reset="never"), plan=plan, epochs=2)
        found[plan] = deployed(e, play(e, METHODS[name](), 3, COHORTS))
    for plan in PLANS:
        close(found[plan], found["loop"], 2e-5)


@pytest.mark.parametrize("name", METHODS)
def test_resume_equals_no_interruption(name: str) -> None:
    cohorts = [*COHORTS, [1, 2, 3]]
    e, f = nets(SGD(lr=0.1, momentum=0.9)), nets(SGD(lr=0.1, momentum=0.9))
    a, b = play(e, METHODS[name](), 2, cohorts), play(f, METHODS[name](), rounds=0)
    b.load_state_dict(a.state_dict())
    f.rows.load_state_dict(e.rows.state_dict())
    for x, m in ((e, a), (f, b)):
        play(x, m, 2, cohorts[2:], begin=2)
    equal(deployed(f, b), deployed(e, a))
    equal(b.state_dict(), a.state_dict())


@pytest.mark.parametrize("name, limit", [("fedfomo", Local), ("fedamp", Local), ("heurfedamp", Local),
                                         ("apple", Local), ("pgfed_ce_server_alpha", Local), ("fedsld", FedAvg)])
def test_one_client_is_centralized_training(name: str, limit: type[Algorithm]) -> None:
    """Less what the method adds: APPLE's learned weight of its only core, PGFed's auxiliary risk, FedAMP's pull; full
    batches for FedSLD, whose weights are then 1; FedFomo trains on what it keeps and downloads its own model."""
    options = {"apple": {"eta2": 0.0, "init": "common"}, "pgfed_ce_server_alpha": {"mu": 0.0}, "fedamp": {"lam": 0.0},
               "heurfedamp": {"lam": 0.0}}.get(name, {})
    e, f = (nets(SGD(lr=0.1, momentum=0.9), sizes=[12], epochs=2, batch_size=100 if name == "fedsld" else 5)
            for _ in range(2))
    a = play(e, METHODS[name](**options), rounds=0)
    f.federation.splits["train"] = e.federation.splits.get("kept", f.federation.splits["train"])
    b = play(f, limit(), rounds=0)
    for r in range(3):
        again(e, a, r)
        again(f, b, r)
    close(deployed(e, a), deployed(f, b), 1e-6)


P = 17 * 8 + 9 * 3


@pytest.mark.parametrize("name, first, later", [
    ("fedfomo", (0, P), (2 * P, P + 2)),                  # M, no more than were uploaded, and as many weights back
    ("fedfomo_trained", (0, P), (2 * P, P + 2)),
    ("fedamp", (P, P), (P, P)), ("fedamp_last", (P, P), (P, P)), ("heurfedamp", (P, P), (P, P)),
    ("fedsld", (P + 9, P + 9), (P, P)),                   # label counts and Pt, C numbers of all 6 clients, once
    ("apple", (5 * P, P), (5 * P, P)),
    ("apple_limited", (5 * P, P), (2 * P, P)),            # the first time all
    ("pgfed_ce_server_alpha", (P, 2 * P + 1), (2 * P, 2 * P + 1)),
    ("pgfed_ce_drop_mean", (P, 2 * P + 1), (2 * P + 2, 2 * P + 1 + 2)),
    ("pgfed_ce_pseudo_gradient", (P, P + 1), (3 * P + 2, P + 1 + 2))])
def test_bytes_of_a_round(name: str, first: tuple[int, int], later: tuple[int, int]) -> None:
    """Numbers per client, down and up; two clients a round."""
    e = nets()
    a = play(e, METHODS[name](), rounds=0)
    for r, (down, up) in enumerate((first, later)):
        ledger = again(e, a, r, [1, 4]).ledger
        assert (ledger.bytes_down, ledger.bytes_up) == (2 * 4 * down, 2 * 4 * up)


# -- FedFomo ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reference, rows, pref", [
    ("aggregated", (0.878571, 1.853226), ((0.714286, 0.285714), (0.548387, 0.451613))),
    ("trained", (1.2, 2.1), ((0, 1), (0, 0)))])
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
    close(deployed(e, a), column(*rows), 3e-5)                              # 1e-5 is added to the distances
    close(a.pref[np.arange(2)], torch.tensor(pref, dtype=torch.float), 3e-5)


def test_fedfomo_without_downloads_is_local_on_kept_samples() -> None:
    e, f = nets(), nets()
    a = play(e, FedFomo(models=0), 3, COHORTS)
    f.federation.splits["train"] = e.federation.splits["kept"]
    equal(deployed(e, a), deployed(f, play(f, Local(), 3, COHORTS)))


def test_fedfomo_weights_sum_to_one_or_nothing() -> None:
    e = nets(epochs=3)
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
    e = nets(epochs=3)
    pref = play(e, FedFomo(), 2, [[1, 4], [1, 4]]).pref[np.arange(6)]
    assert pref[[1, 4]].sum() > 0.9 and not pref[:, [0, 2, 3, 5]].any()


def test_fedfomo_is_not_moved_by_copies_of_its_reference() -> None:
    e = nets()
    a = play(e, FedFomo())
    ids = np.array([2])
    a.last, a.prev = a.ref[ids].expand(6, -1), torch.arange(6)
    theta = a.theta[ids]
    equal(a.mixed(Cohort(e, ids, 1), theta, a.ref[ids]), theta)
    equal(a.pref[ids], torch.zeros(1, 6))


def test_fedfomo_downloads_by_preference() -> None:
    e = nets()
    a = play(e, FedFomo(models=3))
    a.pref[np.array([1])] = row(0.5, 0, 0.2, 2, 1.5, 0)[None]                # and 1 of its own: 3, 4, 1
    chosen = a.choose(everyone(e, 1))
    assert chosen[1].tolist() == [3, 4, 1]
    own = a.choose(everyone(e, 2))[:, 0]
    assert own[[0, 2, 3, 4, 5]].tolist() == [0, 2, 3, 4, 5]                   # Pref is I at first
    a.prev = torch.tensor([5, 1])                                            # positions in the last cohort
    assert a.choose(everyone(e, 3)).shape == (6, 2)
    assert a.choose(everyone(e, 3))[[1, 5], 0].tolist() == [1, 0]


def test_fedfomo_explores() -> None:
    e = nets()
    a = play(e, FedFomo(models=2, epsilon=1.0))
    picks = torch.stack([a.choose(everyone(e, r)) for r in range(1, 40)])     # [rounds, 6, 2]
    assert (picks[..., 0] != picks[..., 1]).all()
    share = torch.bincount(picks.flatten(), minlength=6) / picks.numel()
    assert (share > 0.1).all() and (share < 0.25).all()                      # uniform: 1/6
    a.epsilon = 0.5                                                          # of 39 x 6 first picks, half are greedy
    own = [(a.choose(everyone(e, r)) == torch.arange(6)[:, None]).any(1).float().mean() for r in range(1, 40)]
    assert 0.65 < float(torch.stack(own).mean()) < 0.95                      # 1 - 1/4 (1 - 1/3) = 0.83


def test_held_out_samples() -> None:
    """A fifth, at least one where there are two; nothing lost, the training part whole, the same every time."""
    f, g = nets(sizes=[10, 3, 1]).federation, nets(sizes=[10, 3, 1]).federation
    f.hold_out(0.2)
    g.hold_out(0.2)
    assert f.splits["held"].sizes.tolist() == [2, 1, 0] and f.splits["kept"].sizes.tolist() == [8, 2, 1]
    for i in range(3):
        both = np.concatenate([f.splits["kept"][i], f.splits["held"][i]])
        assert sorted(both) == sorted(f.splits["train"][i])
    assert np.array_equal(f.splits["held"].indices, g.splits["held"].indices)
    e = nets(sizes=[10, 3, 1])
    assert torch.isfinite(deployed(e, play(e, FedFomo(), 3))).all()           # nothing held out: it keeps its model


# -- FedAMP and HeurFedAMP -------------------------------------------------------------------------------
def pulled(w: float, u: float, c: float, lr: float, pull: float, steps: int) -> float:
    for _ in range(steps):
        w -= lr * ((w - c) + pull * (w - u))
    return w


@pytest.mark.parametrize("start", ["own", "cloud"])
def test_fedamp_by_hand(start: Any) -> None:
    """w = (0, 1, 3), sigma 2, alpha_k 0.5, so X_ij = e^(-d^2/2) / 4:  X_01 = 0.151633, X_02 = 0.002777,
    X_12 = 0.033834;  u_0 = X_01 + 3 X_02 = 0.159964,  u_1 = 1 - X_01 + 2 X_12 = 0.916035,
    u_2 = 3 - 3 X_02 - 2 X_12 = 2.924001.  Two steps of rate 0.25 on f_i + (lam / (2 alpha_k)) (w - u_i)^2, lam 0.4.
    """
    w, c, u = (0.0, 1.0, 3.0), (2.0, -1.0, 1.0), (0.159964, 0.916035, 2.924001)
    e = points([[x] for x in c], lr=0.25, epochs=2)
    a = play(e, FedAMP(lam=0.4, alpha_k=0.5, sigma=2.0, start=start), rounds=0)
    a.theta[np.arange(3)] = a.w[np.arange(3)] = column(*w)
    close(a.cloud(everyone(e), a.w[np.arange(3)], 0.5), column(*u))
    again(e, a)
    begin = w if start == "own" else u
    close(deployed(e, a), column(*(pulled(*z, 0.25, 0.8, 2) for z in zip(begin, u, c))))


def test_fedamp_without_attraction_is_local() -> None:
    e, f = nets(epochs=2), nets(epochs=2)
    b = deployed(f, play(f, Local(), 3, COHORTS))
    equal(deployed(e, play(e, FedAMP(lam=0.0, alpha_k=0.1), 3, COHORTS)), b)
    for sigma in (1e-9, 1e9):                                                # X is I, so the cloud sends one's own
        e = nets(epochs=2)
        close(deployed(e, play(e, FedAMP(lam=0.0, sigma=sigma, start="cloud"), 3, COHORTS)), b, 1e-6)


def test_fedamp_mixtures() -> None:
    """X: symmetric off the diagonal, rows sum to 1 (a shift of all models shifts all mixtures); equal models stay."""
    e = nets()
    a = play(e, FedAMP(alpha_k=0.1), 1)
    everybody, all_ids = everyone(e), np.arange(6)
    w = a.w[all_ids]
    X = a.attention(squared_distances(w, w), ~torch.eye(6, dtype=torch.bool), 0.1)
    equal(X, X.T.contiguous())
    assert (X.diagonal() == 0).all() and (X.sum(1) > 0).all()
    u = a.cloud(everybody, w, 0.1)
    close(u, X @ w + (1 - X.sum(1, keepdim=True)) * w, 1e-6)
    a.w[all_ids] = w + 1
    close(a.cloud(everybody, w + 1, 0.1), u + 1, 1e-5)
    a.w[all_ids] = w[:1].expand(6, -1)
    close(a.cloud(everybody, a.w[all_ids], 0.1), w[:1].expand(6, -1), 1e-6)


@pytest.mark.parametrize("peers, mixed", [("everyone", [0, 1, 2, 3]), ("last_cohort", [1, 3])])
def test_fedamp_mixes_what_was_uploaded(peers: Any, mixed: list[int]) -> None:
    """After cohorts (0, 1, 2) and (1, 3): nobody mixes clients 4 and 5; client 0 keeps the rest of 1 for itself."""
    e = nets()
    a = play(e, FedAMP(alpha_k=0.2, peers=peers), 2, [[0, 1, 2], [1, 3]])
    w = a.w[np.arange(6)]
    X = 0.2 * torch.exp(-squared_distances(w[[0, 3]], w[mixed]))
    X = torch.where(torch.tensor(mixed) == column(0, 3), 0, X)
    close(a.cloud(Cohort(e, np.array([0, 3]), 2), w[[0, 3]], 0.2),
          X @ w[mixed] + (1 - X.sum(1, keepdim=True)) * w[[0, 3]], 1e-6)


def test_fedamp_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = nets(), nets()
    u = deployed(whole, play(whole, FedAMP(alpha_k=0.2), 3))
    monkeypatch.setattr("fedbench.algorithms.fedamp.BLOCK", 2)
    close(deployed(parts, play(parts, FedAMP(alpha_k=0.2), 3)), u, 1e-6)


class Normed(nn.Module):
    """With BatchNorm, whose statistics travel in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_fedamp_warns_of_negative_weights(caplog: pytest.LogCaptureFixture) -> None:
    play(nets(), FedAMP(alpha_k=0.2), rounds=0)
    play(nets(), HeurFedAMP(), rounds=0)
    assert not caplog.records
    play(nets(), FedAMP(alpha_k=0.3), rounds=0)
    assert "5 other clients" in caplog.text and "alpha_k <= 0.2" in caplog.text
    e = engine(*ragged(), seeded(Normed), drop_last=True)
    with pytest.raises(ConfigError, match=r"alpha_k=0\.3 could extrapolate"):
        play(e, FedAMP(alpha_k=0.3, start="cloud"))


def test_fedamp_with_a_scale_of_its_own() -> None:
    """w = (0, 1, 3): squared distances 1, 4, 9, of median 4.  alpha_k 0.5: X_01 = e^(-1/4) / 8, X_12 = e^(-1) / 8,
    X_02 = e^(-9/4) / 8, below the cap.  alpha_k 1e6: rows in the same proportions, of sum 0.9."""
    a, b, c = (math.exp(-d / 4) / 8 for d in (1, 4, 9))
    w = (0.0, 1.0, 3.0)
    for alpha, p, q, r in ((0.5, 1, 1, 1), (1e6, 0.9 / (a + c), 0.9 / (a + b), 0.9 / (b + c))):
        e = points([[0.0]] * 3)
        method = play(e, FedAMP(alpha_k=alpha, sigma="auto", cap=0.9), rounds=0)
        method.w[np.arange(3)] = column(*w)
        u = (p * (a + 3 * c), 1 + q * (2 * b - a), 3 - r * (3 * c + 2 * b))
        close(method.cloud(everyone(e), method.w[np.arange(3)], alpha), column(*u))


@pytest.mark.parametrize("sigma", ["auto", 1.0, 1e-9])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 1e9])
def test_fedamp_capped_weights(sigma: Any, alpha: float) -> None:
    """All >= 0, those of the others at most 0.8 together; equal models stay; far ones (sigma to 0) do too."""
    e, others = nets(), ~torch.eye(6, dtype=torch.bool)
    a = play(e, FedAMP(lam=alpha, alpha_k=alpha, sigma=sigma, cap=0.8), 1)
    w = a.w[np.arange(6)]
    X = a.attention(squared_distances(w, w), others, alpha)
    assert (X >= 0).all() and (X.sum(1) <= 0.8 + 1e-6).all() and (X.diagonal() == 0).all()
    u = a.cloud(everyone(e), w, alpha)
    close(u, X @ w + (1 - X.sum(1, keepdim=True)) * w, 1e-6)
    if sigma == 1e-9:
        equal(u, w)
    a.w[np.arange(6)] = w[:1].expand(6, -1)
    close(a.cloud(everyone(e), w[:1].expand(6, -1), alpha), w[:1].expand(6, -1), 1e-6)
    play(e, a, 1, begin=1)                                                   # and such a round is finite
    assert deployed(e, a).isfinite().all()


def test_fedamp_finds_the_scale_of_models() -> None:
    """sigma=auto: models farther apart are mixed as before; distances of equal ones and to oneself do not count."""
    e = nets()
    a = play(e, FedAMP(lam=1e9, alpha_k=1e9, sigma="auto", cap=0.9), 1)
    w = a.w[np.arange(6)]
    u = a.cloud(everyone(e), w, 1e9)
    a.w[np.arange(6)] = 100 * w
    close(a.cloud(everyone(e), 100 * w, 1e9), 100 * u, 1e-4)
    distances = torch.tensor([[0.0, 0.0, 4.0, 6.0]])
    X = a.attention(distances, torch.tensor([[False, True, True, True]]), 1.0)       # sigma 4: 1, e^-1, e^-1.5
    close(X, 0.25 * row(0, 1, math.exp(-1), math.exp(-1.5))[None])


def test_fedamp_needs_a_cap_for_a_scale_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sigma=auto needs algorithm\.cap, e\.g\. 0\.9"):
        play(nets(), FedAMP(sigma="auto"))
    play(nets(), FedAMP(sigma="auto", alpha_k=9.0, cap=1.0), rounds=0)
    assert not caplog.records                                                # no weight can be negative
    assert build.algorithm(compose(["algorithm=fedamp", "algorithm.sigma=auto", "algorithm.cap=0.9"])).cap == 0.9


def test_fedamp_alpha_k_decays() -> None:
    a = HeurFedAMP()
    assert [round(a.alpha(r), 6) for r in (0, 29, 30, 60)] == [1e4, 1e4, 1e3, 1e2]
    assert FedAMP().alpha(90) == 1.0


def test_heurfedamp_by_hand() -> None:
    """w = (1, 0), (0, 2), (3, 3): cosines 0, 1/sqrt2, 1/sqrt2; sigma = sqrt2 log 3 gives weights 1 : 3.

    xi = 0.2:  u_0 = 0.2 (1, 0) + 0.8 ((0, 2) + 3 (3, 3)) / 4 = (2, 2.2);  u_1 = 0.2 (0, 2) + 0.8 ((1, 0) + 3 (3, 3))
    / 4 = (2, 2.2);  u_2 = 0.2 (3, 3) + 0.8 ((1, 0) + (0, 2)) / 2 = (1, 1.4).  One step of rate 0.5 from u, at which
    the pull is 0, towards c = 0 halves it.
    """
    e = points([[[0.0, 0.0]]] * 3, start=(0.0, 0.0))
    a = play(e, HeurFedAMP(xi=0.2, sigma=math.sqrt(2) * math.log(3)), rounds=0)
    a.w[np.arange(3)] = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    again(e, a)
    close(2 * deployed(e, a), torch.tensor([[2.0, 2.2], [2.0, 2.2], [1.0, 1.4]]))


def test_heurfedamp_alone_is_local() -> None:
    e, f = nets(), nets()
    close(deployed(e, play(e, HeurFedAMP(xi=1.0, lam=0.0), 3, COHORTS)),
          deployed(f, play(f, Local(), 3, COHORTS)), 1e-6)


def test_heurfedamp_flat_is_fedavg() -> None:
    """sigma 0, xi = 1/N, no attraction, all clients: what is sent in round t + 1 is FedAvg's model after round t."""
    e, f = nets(sizes=[9] * 6, epochs=2), nets(sizes=[9] * 6, epochs=2)
    a, b = play(e, HeurFedAMP(sigma=0.0, lam=0.0), 3), play(f, FedAvg(deploy="local"), 3)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.cloud(everyone(e, 3), a.w[np.arange(6)], 1.0), b.w.expand(6, -1), 1e-6)


def test_heurfedamp_ignores_length() -> None:
    e = nets()
    a = play(e, HeurFedAMP(), 1)
    w, others = a.w[np.arange(6)], ~torch.eye(6, dtype=torch.bool)
    X = a.attention(a.nearness(w, w), others, 1.0)
    scaled = w * column(1, 2, 0.3, 5, 1, 10)
    close(a.attention(a.nearness(scaled, scaled), others, 1.0), X, 1e-4)
    close(X.sum(1), torch.full((6,), 5 / 6), 1e-5)                          # and xi = 1/6 of one's own


def test_products_and_distances_of_long_rows() -> None:
    """Against float64 where cancellation leaves a float32 sum no digits; equal rows are at 0."""
    random = np.random.default_rng(0)
    a = torch.from_numpy(random.normal(size=(3, 200_003)).astype(np.float32)) + 30
    b = torch.cat([a[:1], a[1:2] + 1e-3])
    close(products(a, b), (a.double() @ b.double().T).float(), 1e-6)
    close(squared_distances(a, b), (a[:, None].double() - b.double()).square().sum(2).float(), 5e-5)
    assert float(squared_distances(a, b)[0, 0]) == 0


@pytest.mark.parametrize("size", [0, 7, 1 << 20, 12_000_003])
def test_dot_keeps_its_digits(size: int) -> None:
    """Against float64 where all products have one sign, so that a running float32 sum would lose them one by one."""
    random = np.random.default_rng(0)
    a = torch.from_numpy(random.uniform(size=(2, size)).astype(np.float32)) + 1
    close(dot(a, a[0]), (a.double() @ a[0].double()).float(), 5e-6)
    close(dot(a, a.flip(0)), (a.double() * a.flip(0).double()).sum(1).float(), 2e-6)


# -- FedSLD ----------------------------------------------------------------------------------------------
def class_balanced(model: FlatModel, w: Tensor, x: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """Gradient of the sum over the classes of (x, y) of Pt(c) times their mean cross-entropy, written out."""
    leaf = w.clone().requires_grad_()
    each = nn.functional.cross_entropy(model.forward(leaf, x), y, reduction="none")
    loss = sum((prior[c] * each[y == c].mean() for c in y.unique()), torch.zeros(()))
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("counts, cohort", [("all", [0, 1, 3]), ("cohort", [0, 1, 3])])
def test_fedsld_is_a_prior_weighted_class_mean(reduction: Any, counts: Any, cohort: list[int]) -> None:
    """Ragged full batches of 7, 21, 4 samples, padded to 21; "sum" is b times "mean"."""
    e = nets(SGD(lr=0.1), batch_size=100)
    f, w = e.federation, e.model.init_row()
    n = f.label_counts if counts == "all" else f.label_counts[cohort]
    prior = torch.from_numpy(n.sum(0) / n.sum()).float()
    rows = []
    for i in cohort:
        x, y = f.gather(torch.from_numpy(f.splits["train"][i]))
        b = len(y) if reduction == "sum" else 1
        rows.append(w - 0.1 * b * class_balanced(e.model, w, x, y, prior))
    weights = Cohort(e, np.array(cohort), 0).weights
    close(play(e, FedSLD(reduction, counts), 1, [cohort]).w, weights @ torch.stack(rows), 1e-5)


def ratio(y: Sequence[Sequence[int]], real: Sequence[int], prior: Tensor, **options: Any) -> Tensor:
    """FedSLD's Pt(y) / pb(y) on padded batches y of which the first `real` count."""
    slots = torch.arange(len(y[0])) < torch.tensor(real)[:, None]
    weight = slots / torch.tensor(real)[:, None]
    return FedSLD(**options).ratio(Batch(torch.zeros(0), torch.tensor(y), weight, np.array(real)), prior)


def test_fedsld_weights_by_hand() -> None:
    """Pt = (0.5, 0.3, 0.2).  Batch (0, 0, 1, 1 | padding): pb = (1/2, 1/2), so 1, 1, 0.6, 0.6 and nothing for padding;
    the mean of CE so weighted is 0.5 CE_0 + 0.3 CE_1.  Of one class: Pt(c).  Of Pt's own shares: 1 everywhere."""
    prior = row(0.5, 0.3, 0.2)
    close(ratio([[0, 0, 1, 1, 2]], [4], prior), row(1, 1, 0.6, 0.6, 0)[None])
    close(ratio([[2, 2, 2]], [3], prior), row(0.2, 0.2, 0.2)[None])
    close(ratio([[0] * 5 + [1] * 3 + [2] * 2], [10], prior), torch.ones(1, 10))
    close(ratio([[0, 0, 1, 1, 2]], [4], prior, renormalize=True), row(1.25, 1.25, 0.75, 0.75, 0)[None])
    close(ratio([[0, 0, 1, 1, 2]], [4], prior, reduction="sum"), row(4, 4, 2.4, 2.4, 0)[None])


def test_fedsld_does_not_count_copies_within_a_batch() -> None:
    """Every sample of class 0 twice: the classes' weights in the batch stay Pt."""
    prior = row(0.5, 0.3, 0.2)
    for y in ([0, 1, 2, 1], [0, 0, 1, 2, 1]):
        total = ratio([y], [len(y)], prior)[0] / len(y)
        close(torch.zeros(3).scatter_add(0, torch.tensor(y), total), prior)


def test_fedsld_on_even_shares_is_fedavg() -> None:
    """Every client has the federation's class shares, full batches: equal up to rounding; and exactly one client."""
    arrays, split = ragged([6, 12, 9], classes=3)
    arrays.targets[:] = np.arange(len(arrays.targets)) % 3
    runs = []
    for method in (FedSLD, FedAvg):
        e = engine(arrays, split, mlp(), SGD(lr=0.2), batch_size=100, epochs=3)
        runs.append(play(e, method(), 2).w)
    close(*runs, 1e-6)


def test_fedsld_needs_classes() -> None:
    with pytest.raises(ConfigError, match="classification data set, not squares"):
        play(points([[1]]), FedSLD())


# -- APPLE -----------------------------------------------------------------------------------------------
def apple_by_hand(c: Sequence[float], core: list[float], d: list[list[float]], q: Sequence[float], lr: float,
                  eta2: float, pull: float, momentum: float, steps: int) -> tuple[list[float], list[list[float]]]:
    """Cores and D after a round of full-batch steps: everybody uses the old cores of the others."""
    new, n = list(core), len(core)
    for i in range(n):
        mine, v_c, v_d = core[i], 0.0, [0.0] * n
        for _ in range(steps):
            held = [mine if j == i else core[j] for j in range(n)]
            g = sum(d[i][j] * held[j] for j in range(n)) - c[i]
            v_c = momentum * v_c + d[i][i] * g
            v_d = [momentum * v_d[j] + g * held[j] + pull * (d[i][j] - q[j]) for j in range(n)]
            mine -= lr * v_c
            d[i] = [d[i][j] - eta2 * v_d[j] for j in range(n)]
        new[i] = mine
    return new, d


@pytest.mark.parametrize("prox_half", [False, True])
@pytest.mark.parametrize("momentum, steps", [(0.0, 1), (0.9, 3)])
def test_apple_by_hand(prox_half: bool, momentum: float, steps: int) -> None:
    """c = (1, 3, 2), cores (1, 2, -1), n = (1, 2, 1), so q = (1/4, 1/2, 1/4) = d_i.  All start from w = 1; gradients
    (0, -2, -1).  One step, lr 0.2, eta2 0.1:  cores 1, 2 + 0.2 x 0.5 x 2 = 2.2, -1 + 0.2 x 0.25 = -0.95;
    d_1 = q + 0.1 x 2 (1, 2, -1) = (0.45, 0.9, 0.05), d_2 = q + 0.1 (1, 2, -1) = (0.35, 0.7, 0.15).  The penalty is 0
    at q, and from the second step mu (d - q), or twice that.  Further steps and rounds as in apple_by_hand.
    """
    c, q, core = (1.0, 3.0, 2.0), [0.25, 0.5, 0.25], [1.0, 2.0, -1.0]
    pull = 0.3 * (1 if prox_half else 2)
    by_hand = partial(apple_by_hand, c, q=q, lr=0.2, eta2=0.1, momentum=momentum, steps=steps)
    if steps == 1:
        new, d = by_hand(core, [list(q) for _ in c], pull=pull)
        assert np.allclose(new, [1, 2.2, -0.95]) and np.allclose(d, [q, [0.45, 0.9, 0.05], [0.35, 0.7, 0.15]])
    e = points([[1.0], [3.0, 3.0], [2.0]], lr=0.2, momentum=momentum, epochs=steps, rounds=4)
    a = play(e, APPLE(mu=0.3, eta2=0.1, fraction=0.5, prox_half=prox_half, init="common"), rounds=0)
    a.cores = column(*core)
    d = [list(q) for _ in c]
    for r in range(3):                                                   # lambda = 1, 1e-3^(1/2), 0
        old = list(core)
        core, d = by_hand(core, d, pull=pull * (1, 1e-3 ** 0.5, 0)[r])
        again(e, a, r)
        close(a.cores, column(*core))
        close(a.d[np.arange(3)], torch.tensor(d))
        mixed = [sum(d[i][j] * (core if i == j else old)[j] for j in range(3)) for i in range(3)]
        close(deployed(e, a), column(*mixed))                            # the others' cores as downloaded


def test_apple_gradients_by_finite_differences() -> None:
    """One full-batch step at rates 1: the moves are minus the gradients of f_i(sum_j d_ij c_j) in c_i and d_i."""
    e = nets(SGD(lr=1.0), batch_size=100)
    a = play(e, APPLE(mu=0.0, eta2=1.0), rounds=0)
    cores, d, i = a.cores.double(), torch.linspace(-0.2, 0.5, 6).double(), 3
    a.d[np.arange(6)] = d.float().expand(6, -1)
    x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][i]))

    def loss(cores: Tensor, d: Tensor) -> float:
        return float(nn.functional.cross_entropy(e.model.forward(d @ cores, x.double()), y))

    direction = torch.from_numpy(np.random.default_rng(0).normal(size=P))
    step = torch.zeros_like(cores)
    step[i] = 1e-5 * direction
    slope = (loss(cores + step, d) - loss(cores - step, d)) / 2e-5
    slopes = [(loss(cores, d + 1e-5 * k) - loss(cores, d - 1e-5 * k)) / 2e-5 for k in torch.eye(6).double()]
    again(e, a, 0)
    assert math.isclose(float((cores[i] - a.cores[i]) @ direction), slope, rel_tol=1e-4)
    close(d.float() - a.d[np.array([i])][0], torch.tensor(slopes), 1e-4)


@pytest.mark.parametrize("bandwidth", [None, 2])
def test_apple_with_itself_only_is_local(bandwidth: int | None) -> None:
    """D = I, frozen; kept momentum included."""
    e, f = (nets(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a = play(e, APPLE(eta2=0.0, init="common", bandwidth=bandwidth), rounds=0)
    a.d[np.arange(6)] = torch.eye(6)
    play(e, a, 3, COHORTS, begin=1)
    b = play(f, Local(), rounds=0)
    play(f, b, 3, COHORTS, begin=1)
    close(deployed(e, a)[[0, 1, 2, 3, 4, 5]], deployed(f, b), 1e-6)


@pytest.mark.parametrize("scale_lr, power", [("none", 2), ("inverse_dii", 1)])
def test_apple_frozen_at_shares_is_fedsgd(scale_lr: Any, power: int) -> None:
    """D = q, one core for all, one full-batch step: the next mixture is w - lr sum_j q_j grad f_j where client j's rate
    is lr / q_j, and has q_j^2 otherwise."""
    e = nets(SGD(lr=0.1), batch_size=100)
    a = play(e, APPLE(eta2=0.0, init="common", scale_lr=scale_lr))
    w = e.model.init_row()
    grads = everyone(e).gradient(w)[0]
    close(a.q @ a.cores, w - 0.1 * (a.q ** power) @ grads, 1e-6)


def test_apple_is_unmoved_by_those_it_gives_no_weight() -> None:
    """d_ij = 0 for j != i = 0 and eta2 = 0: other data, other rows of D, the same client 0."""
    runs = []
    for change in (0, 1):
        e = nets()
        f = e.federation
        others = f.splits["train"].indices[f.splits["train"].offsets[1]:]
        f.targets[torch.from_numpy(others)] = (f.targets[torch.from_numpy(others)] + change) % 3
        a = play(e, APPLE(eta2=0.0), rounds=0)
        a.d[np.array([0])] = row(0.7, 0, 0, 0, 0, 0)[None]
        play(e, a, 3, begin=1)
        runs.append(deployed(e, a))
    equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("scheduler, middle", [("exponential", 1e-3 ** 0.5), ("cosine", 0.5)])
def test_apple_scheduler(scheduler: Any, middle: float) -> None:
    """T = 80, over the first quarter: from 1 at round 0 down, 0 from round 20 on."""
    strength = [APPLE(scheduler=scheduler, fraction=0.25).strength(r, 80) for r in range(80)]
    assert strength[0] == 1 and math.isclose(strength[10], middle)
    assert all(a > b for a, b in pairwise(strength[:21]))
    assert strength[20:] == [0.0] * 60
    assert APPLE().strength(15, 160) > 0 == APPLE().strength(16, 160)
    assert APPLE(fraction=0.29).strength(28, 100) > 0 == APPLE(fraction=0.29).strength(29, 100)   # 28.999999999999996
    assert APPLE(fraction=0.0).strength(0, 160) == 0


def test_apple_without_penalty_needs_no_scheduler() -> None:
    e, f, g = nets(), nets(), nets()
    rows = [deployed(x, play(x, APPLE(mu=mu, eta2=0.05, scheduler=s, fraction=1.0), 3))
            for x, mu, s in ((e, 0.0, "exponential"), (f, 0.0, "cosine"), (g, 1.0, "cosine"))]
    equal(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2], atol=1e-4)


def test_apple_rates_follow_the_schedule() -> None:
    """Both do: at half the rates from round 1 on, a step from the same state goes half as far."""
    schedules = ({"name": "constant"}, {"name": "exponential", "gamma": 0.5})
    moves = []
    for schedule in schedules:
        e = points([[1.0], [3.0]], lr=0.2)
        e.optimizer = SGD(lr=0.2, schedule=schedule)
        a = play(e, APPLE(eta2=0.1, init="common"), rounds=0)
        a.cores = column(1.0, 2.0)
        again(e, a, 1)
        moves.append(torch.cat([a.cores.T - row(1, 2), a.d[np.arange(2)] - a.q]))
    close(moves[1], 0.5 * moves[0])


def test_apple_starts_from_independent_cores() -> None:
    e = nets()
    a = play(e, APPLE(), rounds=0)
    for j in range(6):
        close(a.cores[j], FlatModel(mlp(seed=j + 1)).init_row(), 0)
    close(deployed(e, a), (a.q @ a.cores).expand(6, -1), 1e-6)
    close(a.q, torch.tensor(SIZES) / sum(SIZES), 1e-6)
    f = nets()
    equal(play(f, APPLE(init="common"), rounds=0).cores, f.model.init_row().expand(6, -1))


def test_independent_cores_come_from_the_seed() -> None:
    """Two builds of one config draw the same rows, in which only what is initialized at random differs."""
    cfg = compose(["model=resnet", "hardware=cpu", "hardware.executor=vmap", "partition=iid",
                   "partition.num_clients=3"])
    arrays = build.data(cfg)
    models = [build.engine(cfg, arrays, build.partition(cfg, arrays)).model for _ in range(2)]
    rows = models[0].init_rows(2)
    equal(rows, models[1].init_rows(2))
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], models[0].init_row())
    buffers = models[0].trained.rest(models[0].size)
    equal(buffers.take(rows), buffers.take(models[0].init_row()).expand(2, -1))
    with pytest.raises(ValueError, match="draw="):
        FlatModel(mlp()).init_rows(2)


def test_apple_keeps_batch_statistics_its_own() -> None:
    """Weights of either sign mix the trained columns only: variances stay positive, and the core carries its own."""
    arrays, split = ragged()
    model = FlatModel(seeded(Normed), draw=lambda j: seeded(Normed, j + 1))
    e = engine(arrays, split, model, SGD(lr=0.05), drop_last=True)           # type: ignore[arg-type]
    a = play(e, APPLE(), rounds=0)
    a.d[np.arange(6)] = torch.linspace(-1, 1, 36).view(6, 6)
    play(e, a, 2, begin=1)
    a_, b_ = model.spans["body.2.running_var"]
    assert (deployed(e, a)[:, a_:b_] > 0).all()
    buffers = model.trained.rest(model.size)
    equal(buffers.take(a.cores), buffers.take(deployed(e, a)))
    assert not torch.equal(buffers.take(a.cores)[0], buffers.take(model.init_row()))


def test_apple_with_full_bandwidth_is_unlimited() -> None:
    e, f = nets(epochs=2), nets(epochs=2)
    a, b = play(e, APPLE(eta2=0.05, bandwidth=5), 3, COHORTS), play(f, APPLE(eta2=0.05), 3, COHORTS)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.cores[a.newest], b.cores, 1e-6)


def test_apple_keeps_stale_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's version of a core is that of the start of the round in which it last chose it, or first took part."""
    e = nets()
    a = play(e, APPLE(bandwidth=2), rounds=0)
    stale: dict[int, Tensor] = {}
    picked: list[Tensor] = []
    choose = a.choose
    monkeypatch.setattr(a, "choose", lambda *args: picked.append(choose(*args)) or picked[-1])
    for r in range(8):
        ids = [0, 1, 2, 3, 4, 5] if r % 2 else [(r + k) % 6 for k in (0, 1, 2)]
        now = a.cores[a.newest].clone()
        again(e, a, r, sorted(ids))
        for i, which in zip(sorted(ids), picked[-1]):
            assert which.sum() == (2 if i in stale else 5) and not which[i]
            stale[i] = torch.where(which[:, None], now, stale.get(i, now))
        for i, expected in stale.items():
            others = [j for j in range(6) if j != i]
            equal(a.cores[a.held[i]][others], expected[others])
        assert len(a.cores) == len(torch.cat([a.held[a.held >= 0], a.newest]).unique()) <= 6 * 6


def test_apple_downloads_the_unseen_first_then_by_weight() -> None:
    """intended: after the first round, M = 2 of five others: all five within three rounds; then those of large |d_ij|
    more often, base^|d| = 1.5^4 = 5.1 times as probable.  uniform: alike throughout."""
    shares = {}
    for selection in ("intended", "uniform"):
        e = nets()
        a = play(e, APPLE(bandwidth=2, selection=selection))
        own = torch.eye(6, dtype=torch.bool)
        a.d[np.arange(6)] = row(-4, 0, 0, 0, 0, 0).expand(6, -1)
        picks = torch.stack([a.choose(everyone(e, r, f"pick {r}"), own) for r in range(1, 200)])
        assert (picks.sum(2) == 2).all() and not (picks & own).any()
        if selection == "intended":
            assert (picks[:3].any(0) | own).all() and (picks[:2].sum(0) <= 1).all()
        shares[selection] = picks[3:, 1:].float().mean((0, 1))               # how often clients 1.. chose each
    assert shares["intended"][0] > 0.7 and (shares["intended"][1:] < 0.35).all()
    assert 0.35 < shares["uniform"][0] < 0.45


def test_apple_states_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cores of 163 numbers take 4,056 bytes with D; six clients' versions of them five times that."""
    monkeypatch.setattr("fedbench.algorithms.apple.memory", lambda device: 4_056)
    play(nets(), APPLE(), rounds=0)
    with pytest.raises(ConfigError, match=r"30 cores of 163 numbers for 6 clients take .* GiB"):
        play(nets(), APPLE(bandwidth=2), rounds=0)
    monkeypatch.setattr("fedbench.algorithms.apple.memory", lambda device: 4_055)
    with pytest.raises(ConfigError, match=r"6 cores of 163 numbers for 6 clients take"):
        play(nets(), APPLE(), rounds=0)


def test_apple_resumes_with_kept_momentum(tmp_path: Path) -> None:
    """The optimizer's buffers of D are N wide, those of the cores P."""
    cfg = compose(["algorithm=apple", "algorithm.bandwidth=2", "optimizer.momentum=0.9", "optimizer.reset=never",
                   "partition=iid", "partition.num_clients=4", "local.epochs=1", "local.batch_size=64", "hardware=cpu",
                   "sample_rate=0.5", "hardware.executor=vmap"])
    sim = simulator.prepare(cfg, tmp_path, None)
    play(sim.engine, sim.algorithm, 2, [[0, 1], [1, 3]], begin=1)
    sim.done = 2
    assert sim.matrices is not None
    sim.matrices.save()
    other = simulator.prepare(cfg, tmp_path, sim.state())
    assert {n: s.default.shape[0] for n, s in other.engine.rows.all.items() if "optimizer" in n} == {
        "optimizer/core/momentum": sim.engine.model.size, "optimizer/d/momentum": 4}
    for s in (sim, other):
        play(s.engine, s.algorithm, 2, [[1, 2], [0, 3]], begin=3)
    equal(deployed(other.engine, other.algorithm), deployed(sim.engine, sim.algorithm))


# -- PGFed-CE --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode, rows, A, G", [
    ("server_alpha", (1.1, 2.1), ((0.5035, 0.4655), (0.5135, 0.4955)), (0.1, -0.9)),
    ("drop_mean", (1.1, 2.1), ((0.5125, 0.4525), (0.5125, 0.4525)), (0.1, -0.9)),
    ("pseudo_gradient", (1.2, 2.2), ((0.52, 0.36), (0.52, 0.36)), (0.0, -2.0))])
def test_pgfed_ce_by_hand(mode: Any, rows: Sequence[float], A: Sequence[Sequence[float]], G: Sequence[float]) -> None:
    """c = (1, 3), lr 0.5, mu 0.2, eta2 0.1, one step a round from w = 0, A = 1/2.

    Round 1: theta = (0.5, 1.5), w = 1.  g = (-0.5, -1.5), c_j = f_j - g_j theta_j = (0.375, 3.375).
    Round 2: aux = 0.2 x 0.5 x (-2) = -0.2; theta = 1 - 0.5 (1 - c_i - 0.2) = (1.1, 2.1), g = (0.1, -0.9).
      server_alpha: c_j + g_j theta_i = ((-0.175, 1.725), (-0.675, 0.225)), times 0.1 x 0.2 off A.
      drop_mean: s = -0.2 x 1 / (sum a = 1); mu c_j + s = (-0.125, 0.475), times 0.1 off A.
    pseudo_gradient: round 1: g = (0 - theta) / 0.5 = (-1, -3), f = (0.5, 4.5) at w = 0, c_j = (1, 9).  Round 2:
      aux = -0.4, theta = (1.2, 2.2); mu c_j + gbar w = (0.2, 1.8) - 0.4;  g = (1 - theta) / 0.5 + 0.4 = (0, -2), which
      are the gradients at w = 1.
    """
    e = points([[1], [3]])
    a = play(e, PGFedCE(0.2, 0.1, mode), 2)
    close(deployed(e, a), column(*rows))
    close(a.A[np.arange(2)], torch.tensor(A))
    close(a.G, column(*G))


def test_pgfed_ce_server_alpha_counts_local_steps() -> None:
    """One and three steps:  a_ij = 1/2 - eta2 steps_i mu (c_j + g_j theta_i), c and g of the round before."""
    e = points([[1], [3, 3, 3]], lr=0.2, batch_size=1)
    a = play(e, PGFedCE(0.2, 0.1))
    c, g = a.c, a.G                                                         # mu is in c
    again(e, a)
    close(a.A[np.arange(2)], 0.5 - 0.1 * column(1.0, 3.0) * (c + 0.2 * deployed(e, a) @ g.T))


def test_pgfed_ce_pseudo_gradient_over_epochs() -> None:
    """c = 1, lr 0.5, momentum 0.5, three epochs of two batches (two equal samples), from 0, round 1:  v: -1, -1, -0.75,
    -0.5, -0.3125, -0.1875 ... g = -theta (1 - 0.5) / (0.5 x 6), f the mean loss of the last two steps."""
    theta, v, losses = 0.0, 0.0, []
    for _ in range(6):
        losses.append(0.5 * (theta - 1) ** 2)
        v = 0.5 * v + (theta - 1)
        theta -= 0.5 * v
    e = points([[1, 1]], momentum=0.5, epochs=3, batch_size=1)
    a = play(e, PGFedCE(mu=0.1, mode="pseudo_gradient"))
    g = -theta * 0.5 / (0.5 * 6)
    close(a.G, column(g))
    close(a.c, row(0.1 * ((losses[4] + losses[5]) / 2 - g * theta)))


@pytest.mark.parametrize("mode", MODES)
def test_pgfed_ce_without_others_is_fedavg_local(mode: Any) -> None:
    e, f = (nets(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, PGFedCE(mu=0.0, mode=mode), 3, COHORTS), play(f, FedAvg(deploy="local"), 3, COHORTS)
    equal(deployed(e, a), deployed(f, b))
    equal(a.w, b.w)
    assert not len(a.A.touched())


@pytest.mark.parametrize("mode", MODES)
def test_pgfed_ce_begins_as_fedavg_and_keeps_A_in_bounds(mode: Any) -> None:
    """A: at most alpha_max, at least 0; unchanged outside [S, S'], and altogether at eta2 = 0."""
    e, f = nets(epochs=2), nets(epochs=2)
    a, b = play(e, PGFedCE(0.5, 2.0, mode, alpha_max=0.4), 1, COHORTS), play(f, FedAvg(), 1, COHORTS)
    equal(a.w, b.w)
    again(e, a, 1, COHORTS[1])
    A = a.A[np.arange(6)]
    assert (A >= 0).all() and (A <= 0.4).all() and (A == 0).any()
    outside = torch.ones(6, 6, dtype=torch.bool)
    outside[np.ix_(COHORTS[1], COHORTS[0])] = False
    assert (A[outside] == 1 / 6).all() and (A[~outside] != 1 / 6).all()
    g = nets()
    assert (play(g, PGFedCE(0.5, 0.0, mode), 3, COHORTS).A[np.arange(6)] == 1 / 6).all()


def test_pgfed_ce_without_the_mean_is_pgfed_while_A_is_even() -> None:
    """Even coefficients make the auxiliary gradient, over their sum, the mean one: rounds 1 and 2 are PGFed's."""
    e, f = nets(epochs=2), nets(epochs=2)
    a, b = play(e, PGFedCE(0.3, 0.05, "drop_mean"), 2), play(f, PGFed(0.3, 0.05), 2)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.A[np.arange(6)], b.A[np.arange(6)], 1e-5)
    assert not torch.allclose(a.A[np.arange(6)], torch.tensor(1 / 6), atol=1e-4)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, clip=1.0)])
def test_pgfed_ce_pseudo_gradient_refuses_other_optimizers(optimizer: SGD | Adam) -> None:
    play(nets(optimizer), PGFedCE())
    with pytest.raises(ConfigError, match="mode=pseudo_gradient needs optimizer=sgd"):
        play(nets(optimizer), PGFedCE(mode="pseudo_gradient"))


# -- AppleNet --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels, classes, total", [
    (1, 10, 431_080), (3, 10, 432_080), (1, 11, 431_581), (3, 9, 431_579)])
def test_applenet_parameters(channels: int, classes: int, total: int) -> None:
    """MNIST, CIFAR-10, OrganMNIST, PathMNIST, all at 28x28 (APPLE's released code)."""
    model = FlatModel(AppleNet((channels, 28, 28), classes), HEAD)
    assert (model.size, model.columns["head"].size) == (total, 501 * classes)
    assert model.forward(model.init_row(), torch.zeros(2, channels, 28, 28)).shape == (2, classes)


def test_applenet_refuses_small_images() -> None:
    with pytest.raises(ConfigError, match="at least 16x16"):
        AppleNet((1, 8, 8), 10)
