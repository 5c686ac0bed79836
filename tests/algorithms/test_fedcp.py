"""FedCP: its policy and discrepancy by hand, and its limits."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, six_clients
from tiny import close, deployed, engine, equal, mlp, play, ragged
from torch import Tensor

from fedbench.algorithms import fedcp
from fedbench.algorithms._features import BANDWIDTHS, mmd
from fedbench.algorithms.base import FlatModel
from fedbench.algorithms.fedcp import FedCP
from fedbench.algorithms.fedper import FedPer
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD


def test_discrepancy_is_that_of_all_pairs() -> None:
    g = torch.Generator().manual_seed(0)
    z, other = (3 * torch.randn(2, 5, 4, generator=g) for _ in range(2))
    counts = (5, 3)
    weight = torch.tensor([[1 / n] * n + [0.0] * (5 - n) for n in counts])

    def kernel(a: Tensor, b: Tensor) -> float:
        return sum(float((-(a - b).square().sum() / (2 * s)).exp()) for s in BANDWIDTHS)

    for client, n in enumerate(counts):
        pairs = [(i, j) for i in range(n) for j in range(n)]
        a, b = z[client], other[client]
        by_hand = sum(kernel(a[i], a[j]) + kernel(b[i], b[j]) - 2 * kernel(a[i], b[j]) for i, j in pairs) / n**2
        assert float(mmd(z, other, weight)[client]) == pytest.approx(by_hand, abs=1e-5)
    close(mmd(z, z, weight), torch.zeros(2))


def test_policy_is_that_of_the_module() -> None:
    torch.manual_seed(0)
    module = fedcp.policy(5)
    for p in module.parameters():
        p.data = torch.randn_like(p)
    named = {f"policy.{name}": p.detach()[None] for name, p in module.named_parameters()}
    z, v, noise = torch.randn(1, 3, 5), torch.randn(1, 5), torch.randn(1, 3, 2, 5)
    by_hand = (module(z[0] * v[0]).view(3, 2, 5) + noise[0]).softmax(1)
    shares = fedcp.split(named, z, v, noise)
    close(shares[0], by_hand.detach())
    close(shares.sum(2), torch.ones(1, 3, 5))


class PersonalOnly(FedCP):
    """FedCP with s = 1 whose global head has no bias."""

    def logits(self, model: FlatModel, rows: Tensor, z: Tensor, v: Tensor, noise: Tensor | float) -> Tensor:
        return model.head(rows, z)


def test_fedcp_of_personal_features_alone_is_fedper() -> None:
    e, other = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, PersonalOnly(lam=0.0), 3, COHORTS), play(other, FedPer(), 3, COHORTS)
    close(a.w[: len(b.u)], b.u, 1e-6)
    close(a.h.whole(), b.v.whole(), 1e-6)


def test_the_global_head_is_the_mean_of_halves() -> None:
    e = six_clients()
    a = play(e, FedCP(), 1, [[0, 2]])
    before = a.head.take(e.model.init_row())
    n = torch.from_numpy(e.federation.num_samples[[0, 2]]).float()
    h = a.h[np.array([0, 2])]
    close(a.g, (n / n.sum()) @ ((h + before) / 2), 1e-6)


def test_the_context_does_not_change_in_a_round() -> None:
    """The gradient of a softmax loss sums to 0 over classes, and so do the changes of the head's rows."""
    e = six_clients(epochs=3)
    a = play(e, FedCP(), 2)
    start = e.model.init_row().expand(6, -1)
    close(fedcp.context(e.model, deployed(e, a)), fedcp.context(e.model, start), 1e-5)


def test_fedcp_deploys_without_noise() -> None:
    e = six_clients()
    a = play(e, FedCP(), 1)
    x = torch.linspace(-1, 1, 6 * 4 * 16).view(6, 4, 1, 4, 4)
    equal(a.predict(e.model, deployed(e, a), x), a.predict(e.model, deployed(e, a), x))


def test_fedcp_needs_a_linear_head() -> None:
    arrays, split = ragged()
    module = mlp()
    module.head = torch.nn.Sequential(module.head)
    e = engine(arrays, split, module, columns={"base": ["body.*"], "head": ["head.*"]})
    with pytest.raises(ConfigError, match=r"algorithm=fedcp .* linear layer"):
        FedCP().check(e.federation, e.model, e.optimizer)
