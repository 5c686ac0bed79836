"""SuPerFed: a step by hand, its cosine, the deployed mixture, and its limits."""

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, Normed, points, six_clients
from tiny import HEAD, all_clients, close, deployed, engine, equal, play, ragged, seeded

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.superfed import GRID, SuPerFed
from fedbench.core.rng import RowRandom
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel


def fixed(**options: Any) -> SuPerFed:
    return SuPerFed(**{"mixture": 0.5, "start": 0.0, **options})


def test_before_the_start_it_is_fedavg() -> None:
    e, f = six_clients(epochs=2, rounds=10), six_clients(epochs=2, rounds=10)
    a, b = play(e, fixed(mu=0.0, nu=0.0, start=1.0), 3, COHORTS), play(f, FedAvg(), 3, COHORTS)
    equal(a.w, b.w)
    equal(deployed(e, a), deployed(f, b))


def test_before_the_start_w_is_held_near_the_global_model() -> None:
    """mu ||w_f - w||^2 is FedProx's penalty at 2 mu."""
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, fixed(mu=0.3, start=1.0), 3, COHORTS), play(f, FedProx(0.6), 3, COHORTS)
    close(a.w, b.w, 1e-6)


@pytest.mark.parametrize("mode", ["model", "layer"])
def test_at_lambda_zero_it_is_fedavg(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And w_l stays where it was."""
    monkeypatch.setattr(RowRandom, "uniform", lambda self, *shape: torch.zeros(len(self.keys), *shape))
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, fixed(mu=0.0, nu=0.0, mode=mode), 3, COHORTS), play(f, FedAvg(), 3, COHORTS)
    close(a.w, b.w, 1e-6)
    equal(a.wl[np.arange(6)], e.model.init_rows(6, "superfed"))


@pytest.mark.parametrize("mu, nu, lam", [(0.0, 0.0, 0.25), (0.3, 0.0, 0.25), (0.3, 2.0, 0.75)])
def test_a_step_by_hand(mu: float, nu: float, lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd of the whole loss, in w_f and w_l, two steps; f = ||W - c||^2 / 2."""
    monkeypatch.setattr(RowRandom, "uniform", lambda self, *shape: torch.full((len(self.keys), *shape), lam))
    c, start, local = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.5]), torch.tensor([-0.5, 1.5])
    e = points([[c.tolist()]], lr=0.1, start=start.tolist(), epochs=2)
    e.model._draw = lambda *key: e.model.module
    m = play(e, fixed(mu=mu, nu=nu), rounds=0)
    m.wl[np.arange(1)] = local[None]
    play(e, m, begin=1)
    f, l = start.clone(), local.clone()  # noqa: E741
    for _ in range(2):
        f.requires_grad_(), l.requires_grad_()
        W = (1 - lam) * f + lam * l
        cos = (f @ l) / (f.norm() * l.norm())
        loss = 0.5 * (W - c).square().sum() + mu * (f - start).square().sum() + nu * cos**2
        g_f, g_l = torch.autograd.grad(loss, (f, l))
        f, l = (f - 0.1 * g_f).detach(), (l - 0.1 * g_l).detach()  # noqa: E741
    close(m.w, f, 1e-5)
    close(m.wl[np.arange(1)][0], l, 1e-5)
    close(deployed(e, m)[0], 0.5 * (f + l), 1e-5)


def test_the_cosines_gradients() -> None:
    m = play(six_clients(), fixed(), rounds=0)
    g = torch.Generator().manual_seed(0)
    f, l = (torch.randn(3, m.trained.size, generator=g) for _ in range(2))  # noqa: E741
    leaves = [t.double().requires_grad_() for t in (f, l)]
    cos = torch.cosine_similarity(*leaves, dim=1)
    expected = torch.autograd.grad(cos.square().sum(), leaves)
    for found, wanted in zip(m.cosine_gradients(f, l), expected):
        close(found, wanted.float(), 1e-5)
    orthogonal = f - (f * l).sum(1, keepdim=True) / l.square().sum(1, keepdim=True) * l
    assert all(float(t.abs().max()) < 1e-5 for t in m.cosine_gradients(orthogonal, l))
    same, other = m.cosine_gradients(f, l)[0], m.cosine_gradients(f, 7 * l)[0]
    close(same, other, 1e-5)  # the length of w_l does not count


def test_a_model_of_zeros_has_no_cosine() -> None:
    """Its direction is none: the gradient is 0 and not a quotient of zeros."""
    m = play(six_clients(), fixed(), rounds=0)
    f, zeros = torch.ones(2, m.trained.size), torch.zeros(2, m.trained.size)
    for pair in ((f, zeros), (zeros, f), (zeros, zeros)):
        for gradient in m.cosine_gradients(*pair):
            equal(gradient, zeros)


def test_every_local_model_begins_elsewhere() -> None:
    """By its client's number, whoever is asked beside it and whoever trained before."""
    e = six_clients()
    m = play(e, fixed(), rounds=0)
    begin = m.local_models(all_clients(e))
    assert len({tuple(row.tolist()) for row in (*begin, m.w)}) == 7
    equal(m.local_models(Cohort(e, np.array([1, 4]), 0)), begin[[1, 4]])
    m.round(Cohort(e, np.array([1, 3]), 0))
    after = m.local_models(all_clients(e))
    equal(after[[0, 2, 4, 5]], begin[[0, 2, 4, 5]])
    assert not torch.equal(after[[1, 3]], begin[[1, 3]])


def test_mixing_begins_after_the_given_share_of_the_rounds() -> None:
    """In Python 0.29 * 100 is 28.999999999999996."""
    e = six_clients(rounds=100)
    begun = [fixed(start=0.29).mixes(Cohort(e, np.arange(6), r)) for r in range(100)]
    assert begun.index(True) == 29 and all(begun[29:])


@pytest.mark.parametrize("mode, numbers", [("model", 1), ("layer", 2)])
def test_lambda_is_one_a_model_or_one_a_layer(mode: Any, numbers: int) -> None:
    e = six_clients()
    m = play(e, fixed(mode=mode), rounds=0)
    assert m.draws == numbers == len(m.layer.unique())
    for name, (a, b) in e.model.spans.items():
        assert len(m.layer[a:b].unique()) == 1, name


def test_the_mixture_is_chosen_on_held_out_samples() -> None:
    e = six_clients(sizes=(20, 25, 30, 20, 22, 28), rounds=3)
    m = play(e, SuPerFed(start=0.0, held_out=0.3), 3)
    everybody = all_clients(e)
    for cohort in (everybody, Cohort(e, np.array([1, 4]), 2, "evaluation")):
        rows = m.personalized(cohort, False)
        w, wl = m.w.expand(len(cohort), -1), m.local_models(cohort)
        losses = [cohort.loss(w.lerp(wl, lam), "held_out") for lam in GRID]
        close(cohort.loss(rows, "held_out"), torch.stack(losses).min(0).values, 1e-5)
    assert {"remaining", "held_out"} <= e.federation.splits.keys()


def test_before_the_start_clients_deploy_the_global_model() -> None:
    e = six_clients(rounds=10)
    m = play(e, fixed(start=0.3), 2)
    equal(deployed(e, m, 1), m.w.expand(6, -1))
    play(e, m, 2, begin=2)
    assert not torch.equal(deployed(e, m, 3), m.w.expand(6, -1))


def test_both_models_keep_the_statistics_that_the_mixture_saw() -> None:
    arrays, split = ragged((12, 15))
    model = FlatModel(seeded(Normed, 0), HEAD, new_module=lambda *key: seeded(Normed, key[-1] + 9))
    e = engine(arrays, split, model, SGD(lr=0.1))  # type: ignore[arg-type]
    m = play(e, fixed(), 1)
    buffers = model.trained.rest(model.size)
    assert buffers.size
    mean = e.federation.num_samples / e.federation.num_samples.sum()
    averaged = torch.from_numpy(mean).float() @ buffers.take(m.wl[np.arange(2)])
    close(buffers.take(m.w), averaged, 1e-5)
    assert not torch.allclose(buffers.take(m.w), buffers.take(model.init_row()))
