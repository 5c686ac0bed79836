"""FedPAC: its quadratic program, statistics by hand, and its limits."""

import itertools

import numpy as np
import pytest
import torch
from by_hand import COHORTS, six_clients
from tiny import HEAD, arrays_of, close, engine, equal, mlp, play, split_of
from torch import Tensor

from fedbench.algorithms._features import class_statistics, features_of_samples
from fedbench.algorithms._simplex import minimize_on_simplex
from fedbench.algorithms.fedpac import FedPAC
from fedbench.algorithms.fedrep import FedRep
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD


def best_of_all_supports(Q: np.ndarray) -> float:
    """Smallest a^T Q a on the simplex: on each support, 1 / (1^T Q^-1 1) if the weights there are positive."""
    best = np.inf
    for size in range(1, len(Q) + 1):
        for support in itertools.combinations(range(len(Q)), size):
            x = np.linalg.solve(Q[np.ix_(support, support)], np.ones(size))
            if (x > 0).all():
                best = min(best, 1 / x.sum())
    return best


@pytest.mark.parametrize("seed", range(10))
def test_program_over_the_simplex_finds_the_best_support(seed: int) -> None:
    g = np.random.default_rng(seed)
    h = g.standard_normal((6, 4))
    h -= h[0] * (seed % 2)  # as in FedPAC: one row is zero
    Q = h @ h.T + np.diag(g.random(6) * 0.3)
    a = minimize_on_simplex(Q)
    np.testing.assert_allclose(a.sum(), 1)
    assert (a >= 0).all()
    np.testing.assert_allclose(a @ Q @ a, best_of_all_supports(Q), rtol=1e-8)


def test_program_over_the_simplex_has_its_limits() -> None:
    np.testing.assert_allclose(minimize_on_simplex(np.array([[3.0]])), [1])
    np.testing.assert_allclose(minimize_on_simplex(np.zeros((4, 4))), 0.25)
    np.testing.assert_allclose(minimize_on_simplex(np.diag([1.0, 2.0])), [2 / 3, 1 / 3])
    np.testing.assert_allclose(minimize_on_simplex(np.diag([0.0, 2.0])), [1, 0], atol=1e-9)


def test_weights_of_heads() -> None:
    """Equal clients share equally; a client of infinite variance is not used; distant ones keep their own head."""
    same, distant = torch.ones(3, 2, 4), 100 * torch.eye(3)[:, None].expand(3, 2, 3)
    close(FedPAC().head_weights(torch.ones(3), same), torch.full((3, 3), 1 / 3))
    close(FedPAC().head_weights(torch.tensor([1.0, 1e9, 1.0]), same), torch.tensor([[0.5, 0, 0.5]]).expand(3, 3))
    close(FedPAC().head_weights(torch.ones(3), distant), torch.eye(3))
    assert torch.isfinite(FedPAC().head_weights(-torch.ones(3), same)).all()  # variances with privacy noise


def test_small_weights_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights below 0.001 become 0, but for those of more than 1,000 equal clients."""
    same = torch.ones(3, 2, 4)
    for weights, expected in (
        ([0.6, 0.3995, 0.0005], [0.6 / 0.9995, 0.3995 / 0.9995, 0]),
        ([0.0008, 0.0008, 0.0004], [0.5, 0.5, 0]),
    ):
        monkeypatch.setattr("fedbench.algorithms.fedpac.minimize_on_simplex", lambda Q, w=weights: np.array(w))
        close(FedPAC().head_weights(torch.ones(3), same), torch.tensor([expected] * 3))


def test_statistics_by_hand() -> None:
    """V_i is the variance of the estimate H_i: the trace of the covariance of the vector of all 1[y = c] z, over n_i,
    where classes are separate blocks."""
    e = six_clients()
    a = play(e, FedPAC(), rounds=0)
    cohort, row = Cohort(e, np.array([1, 4]), 0), e.model.init_row()
    z, y = features_of_samples(cohort, row)
    V, H = a.variance_and_means(cohort, class_statistics(z, y, 3))
    for k, (features, labels) in enumerate(zip(z, y)):
        blocks = torch.nn.functional.one_hot(labels, 3)[:, :, None] * features[:, None]  # [n, C, F]
        close(H[k], blocks.mean(0))
        close(V[k], (blocks.square().sum((1, 2)).mean() - blocks.mean(0).square().sum(1).sum()) / len(labels))


class OwnHeads(FedPAC):
    """FedPAC whose clients keep their heads."""

    def head_weights(self, V: Tensor, H: Tensor) -> Tensor:
        return torch.eye(len(V))


def test_fedpac_without_prototypes_and_mixing_is_fedrep() -> None:
    e, other = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, OwnHeads(lam=0.0), 3, COHORTS), play(other, FedRep(), 3, COHORTS)
    close(a.u, b.u, 1e-6)
    close(a.h.whole(), b.v.whole(), 1e-6)


def test_fedpac_of_one_client_keeps_its_head_and_prototypes() -> None:
    e = six_clients(sizes=(9,))
    a = play(e, FedPAC(), 2)
    theta = a.with_heads(Cohort(e, np.array([0]), 2), a.u)
    means = class_statistics(*features_of_samples(Cohort(e, np.array([0]), 2), theta), 3)
    close(a.G, means.means[0])
    equal(a.has_prototype, (means.counts[0] > 0).float())


def test_fedpac_needs_classes() -> None:
    x = np.zeros((4, 16), np.float32)
    e = engine(arrays_of(x, x[:, :3], 3, task="regression"), split_of([2, 2]), mlp(), columns=HEAD)
    with pytest.raises(ConfigError, match="algorithm=fedpac needs one class per sample"):
        FedPAC().check(e.federation, e.model, e.optimizer)
