"""FedAMP: rounds by hand, its weights, and its limits."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, again, column, points, row, six_clients
from tiny import (
    all_clients,
    close,
    compose,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedamp import FedAMP
from fedbench.algorithms.heurfedamp import HeurFedAMP
from fedbench.algorithms.local import Local
from fedbench.core.linalg import squared_distances
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.simulation import build


def pulled(w: float, u: float, c: float, lr: float, pull: float, steps: int) -> float:
    for _ in range(steps):
        w -= lr * ((w - c) + pull * (w - u))
    return w


def test_fedamp_by_hand() -> None:
    """w = (0, 1, 3), sigma 2, alpha_k 0.5, so X_ij = e^(-d^2/2) / 4:  X_01 = 0.151633, X_02 = 0.002777,
    X_12 = 0.033834;  u_0 = X_01 + 3 X_02 = 0.159964,  u_1 = 1 - X_01 + 2 X_12 = 0.916035,
    u_2 = 3 - 3 X_02 - 2 X_12 = 2.924001.  Two steps of rate 0.25 on f_i + (lam / (2 alpha_k)) (w - u_i)^2, lam 0.4.
    """
    w, c, u = (0.0, 1.0, 3.0), (2.0, -1.0, 1.0), (0.159964, 0.916035, 2.924001)
    e = points([[x] for x in c], lr=0.25, epochs=2)
    a = play(e, FedAMP(lam=0.4, alpha_k=0.5, sigma=2.0), rounds=0)
    a.theta[np.arange(3)] = a.w[np.arange(3)] = column(*w)
    close(a.cloud(all_clients(e), a.w[np.arange(3)], 0.5), column(*u))
    again(e, a)
    close(deployed(e, a), column(*(pulled(*z, 0.25, 0.8, 2) for z in zip(w, u, c))))


def test_fedamp_without_attraction_is_local() -> None:
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    b = deployed(f, play(f, Local(), 3, COHORTS))
    equal(deployed(e, play(e, FedAMP(lam=0.0, alpha_k=0.1), 3, COHORTS)), b)


def test_fedamp_mixtures() -> None:
    """X: symmetric off the diagonal, rows sum to 1 (a shift of all models shifts all mixtures); equal models stay."""
    e = six_clients()
    a = play(e, FedAMP(alpha_k=0.1), 1)
    everybody, all_ids = all_clients(e), np.arange(6)
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


def test_fedamp_mixes_what_was_uploaded() -> None:
    """After cohorts (0, 1, 2) and (1, 3): nobody mixes clients 4 and 5; client 0 keeps the rest of 1 for itself."""
    e, mixed = six_clients(), [0, 1, 2, 3]
    a = play(e, FedAMP(alpha_k=0.2), 2, [[0, 1, 2], [1, 3]])
    w = a.w[np.arange(6)]
    X = 0.2 * torch.exp(-squared_distances(w[[0, 3]], w[mixed]))
    X = torch.where(torch.tensor(mixed) == column(0, 3), 0, X)
    close(
        a.cloud(Cohort(e, np.array([0, 3]), 2), w[[0, 3]], 0.2),
        X @ w[mixed] + (1 - X.sum(1, keepdim=True)) * w[[0, 3]],
        1e-6,
    )


def test_fedamp_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = six_clients(), six_clients()
    u = deployed(whole, play(whole, FedAMP(alpha_k=0.2), 3))
    monkeypatch.setattr("fedbench.algorithms.fedamp.BLOCK", 2)
    close(deployed(parts, play(parts, FedAMP(alpha_k=0.2), 3)), u, 1e-6)


def test_fedamp_warns_of_negative_weights(caplog: pytest.LogCaptureFixture) -> None:
    play(six_clients(), FedAMP(alpha_k=0.2), rounds=0)
    play(six_clients(), HeurFedAMP(), rounds=0)
    assert not caplog.records
    play(six_clients(), FedAMP(alpha_k=0.3), rounds=0)
    assert "5 other clients" in caplog.text and "at most 0.2" in caplog.text


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
        close(method.cloud(all_clients(e), method.w[np.arange(3)], alpha), column(*u))


@pytest.mark.parametrize("sigma", ["auto", 1.0, 1e-9])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 1e9])
def test_fedamp_capped_weights(sigma: Any, alpha: float) -> None:
    """All >= 0, those of the others at most 0.8 together; equal models stay; far ones (sigma to 0) do too."""
    e, others = six_clients(), ~torch.eye(6, dtype=torch.bool)
    a = play(e, FedAMP(lam=alpha, alpha_k=alpha, sigma=sigma, cap=0.8), 1)
    w = a.w[np.arange(6)]
    X = a.attention(squared_distances(w, w), others, alpha)
    assert (X >= 0).all() and (X.sum(1) <= 0.8 + 1e-6).all() and (X.diagonal() == 0).all()
    u = a.cloud(all_clients(e), w, alpha)
    close(u, X @ w + (1 - X.sum(1, keepdim=True)) * w, 1e-6)
    if sigma == 1e-9:
        equal(u, w)
    a.w[np.arange(6)] = w[:1].expand(6, -1)
    close(a.cloud(all_clients(e), w[:1].expand(6, -1), alpha), w[:1].expand(6, -1), 1e-6)
    play(e, a, 1, begin=1)  # and such a round is finite
    assert deployed(e, a).isfinite().all()


def test_fedamp_finds_the_scale_of_models() -> None:
    """sigma=auto: models farther apart are mixed as before; distances of equal ones and to oneself do not count."""
    e = six_clients()
    a = play(e, FedAMP(lam=1e9, alpha_k=1e9, sigma="auto", cap=0.9), 1)
    w = a.w[np.arange(6)]
    u = a.cloud(all_clients(e), w, 1e9)
    a.w[np.arange(6)] = 100 * w
    close(a.cloud(all_clients(e), 100 * w, 1e9), 100 * u, 1e-4)
    distances = torch.tensor([[0.0, 0.0, 4.0, 6.0]])
    X = a.attention(distances, torch.tensor([[False, True, True, True]]), 1.0)  # sigma 4: 1, e^-1, e^-1.5
    close(X, 0.25 * row(0, 1, math.exp(-1), math.exp(-1.5))[None])


def test_fedamp_needs_a_cap_for_a_scale_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sigma=auto needs algorithm\.cap, e\.g\. 0\.9"):
        play(six_clients(), FedAMP(sigma="auto"))
    play(six_clients(), FedAMP(sigma="auto", alpha_k=9.0, cap=1.0), rounds=0)
    assert not caplog.records  # no weight can be negative
    assert build.algorithm(compose(["algorithm=fedamp", "algorithm.sigma=auto", "algorithm.cap=0.9"])).cap == 0.9


def test_fedamp_alpha_k_decays() -> None:
    a = HeurFedAMP()
    assert [round(a.alpha(r), 6) for r in (0, 29, 30, 60)] == [1e4, 1e4, 1e3, 1e2]
    assert FedAMP().alpha(90) == 1.0
