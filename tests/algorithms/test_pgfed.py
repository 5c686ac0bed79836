"""PGFed and PGFedMo: limits, updates of the coefficients, and rounds by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, LR, START, B, W, four_of_six, squares
from tiny import (
    Affine,
    Point,
    close,
    deployed,
    engine_on,
    equal,
    play,
    targets_federation,
)
from torch import Tensor

from fedbench.algorithms import _deferred, pgfed
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining


def test_pgfed_without_mu_is_fedavg_local_bit_for_bit() -> None:
    a, b = four_of_six(), four_of_six()
    one, other = play(a, PGFed(mu=0.0), 4, COHORTS_OF_FOUR), play(b, FedAvg("local"), 4, COHORTS_OF_FOUR)
    equal(one.w, other.w)
    equal(deployed(a, one), deployed(b, other))
    assert len(one.A.touched()) == 0


def test_pgfed_tends_to_fedavg_local_as_mu_goes_to_zero() -> None:
    """Not only where the code asks whether mu is 0."""
    a, b = four_of_six(), four_of_six()
    close(
        deployed(a, play(a, PGFed(mu=1e-9), 4, COHORTS_OF_FOUR)),
        deployed(b, play(b, FedAvg("local"), 4, COHORTS_OF_FOUR)),
        1e-5,
    )


@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_pgfeds_first_round_is_fedavg(mu: float) -> None:
    a, b = four_of_six(), four_of_six()
    one, other = play(a, PGFed(mu=mu), 1, COHORTS_OF_FOUR), play(b, FedAvg("local"), 1, COHORTS_OF_FOUR)
    equal(one.w, other.w)
    equal(deployed(a, one), deployed(b, other))
    assert len(one.A.touched()) == 0


def test_pgfed_without_eta2_uses_the_mean_gradient_for_everybody() -> None:
    """A stays 1/K, so the auxiliary gradient mu sum_j a_ij g_j is gbar = (mu / K) sum_j g_j: round 2 is FedAvg with
    that gradient added."""
    e, again = four_of_six(), four_of_six()
    algorithm = play(e, PGFed(mu=0.5, eta2=0.0), 1, COHORTS_OF_FOUR)
    gbar, w = algorithm.gbar.clone(), algorithm.w.clone()
    close(gbar, 0.5 * algorithm.G.mean(0))
    play(e, algorithm, 1, COHORTS_OF_FOUR[1:], begin=1)
    equal(algorithm.A[np.arange(6)], torch.full((6, 6), 0.25))
    play(again, FedAvg(), 1, COHORTS_OF_FOUR)  # for the momentum of round 1
    out = Cohort(again, np.array(COHORTS_OF_FOUR[1]), 1).train(w, extra_grad=lambda s: gbar.expand(s.k, -1))
    close(algorithm.theta[np.array(COHORTS_OF_FOUR[1])], out.theta)


def reference_pgfed(
    targets: Tensor,
    cohorts: list,
    steps: int,
    mu: float,
    eta2: float,
    momentum: float = 0.0,
    beta: float = 0.0,
    size: int = 2,
) -> dict[str, Tensor]:
    """Section 21 of the spec client by client, on squares; one sample per client, so p_i = 1 / |S|."""
    n, w, A = len(targets), W.clone(), torch.full((len(targets), len(targets)), 1 / size)
    theta, velocity, smooth = W.expand(n, -1).clone(), torch.zeros(n, 3), {}
    G, c, before = {}, {}, []
    for s in cohorts:
        for i in s:
            v = w.clone()
            aux = mu * sum((A[i, j] * G[j] for j in before), torch.zeros(3))
            if before:
                aux = (1 - beta) * aux + beta * smooth[i] if beta and i in smooth else aux
                smooth[i] = aux
            gbar = mu / max(len(before), 1) * sum(G.values(), torch.zeros(3))
            for _ in range(steps):
                g = v - targets[i] + aux
                for j in before:
                    A[i, j] = max(0.0, A[i, j] - eta2 * (mu * c[j] + gbar @ v))
                velocity[i] = momentum * velocity[i] + g
                v = v - LR * velocity[i]
            theta[i] = v
        w = theta[s].mean(0)
        G = {j: theta[j] - targets[j] for j in s}
        c = {j: 0.5 * (theta[j] - targets[j]).square().sum() - G[j] @ theta[j] for j in s}
        before = s
    return {"w": w, "theta": theta, "A": A}


PAIRS = [[0, 1], [1, 2], [0, 2], [0, 1], [1, 2]]


@pytest.mark.parametrize(
    "mu, eta2, momentum, beta",
    [(0.5, 0.05, 0.0, 0.0), (1.0, 0.2, 0.9, 0.0), (0.3, 0.0, 0.9, 0.0), (0.5, 0.05, 0.0, 0.5), (0.5, 0.05, 0.9, 1.0)],
)
def test_pgfed_is_its_spec_written_out(mu: float, eta2: float, momentum: float, beta: float) -> None:
    """Five rounds of two clients out of three, two local steps, momentum that clients keep, PGFedMo included."""
    e = squares(steps=2, numbers=(1, 1, 1), cohort_size=2, optimizer=SGD(lr=LR, momentum=momentum, reset="never"))
    algorithm = play(e, PGFed(mu, eta2, beta), 5, PAIRS)
    expected = reference_pgfed(B, PAIRS, 2, mu, eta2, momentum, beta)
    close(algorithm.w, expected["w"])
    close(deployed(e, algorithm), expected["theta"])
    close(algorithm.A[np.arange(3)], expected["A"])


def test_pgfed_by_hand() -> None:
    """Two clients in one dimension: f_0 = 0.5 (t - 2)^2, f_1 = 0.5 (t + 2)^2, w = 0, lr 0.1, mu 0.5, eta2 0.1, K = 2.

    Round 1 (FedAvg): theta_0 = 0.2, theta_1 = -0.2; w = 0.
      g_0 = 0.2 - 2 = -1.8, f_0 = 1.62, c_0 = 1.62 + 1.8 0.2 = 1.98;   g_1 = 1.8, c_1 = 1.98 by symmetry.
    Round 2, one step from w = 0, a = 1/2 everywhere:
      aux_i = 0.5 (0.5 (-1.8) + 0.5 1.8) = 0; gbar = 0, so s = 0 and a <- 0.5 - 0.1 (0.5 1.98) = 0.401 everywhere.
      theta_0 = 0.2, theta_1 = -0.2, w = 0 again, same g and c.
    Round 3: only client 0 takes part: aux_0 = 0.5 (0.401 (-1.8) + 0.401 1.8) = 0 again; a_0. = 0.401 - 0.099 = 0.302,
      a_1. stays.  theta_0 = 0.2 = w.  g_0 = -1.8, c_0 = 1.98 and only these are kept.
    Round 4, both: aux_0 = 0.5 0.302 (-1.8) = -0.2718, aux_1 = 0.5 0.401 (-1.8) = -0.3609; gbar = 0.5 (-1.8) = -0.9;
      s = -0.9 0.2 = -0.18;  a_i0 <- a_i0 - 0.1 (0.99 - 0.18) = a_i0 - 0.081;
      theta_0 = 0.2 - 0.1 (0.2 - 2 - 0.2718) = 0.40718; theta_1 = 0.2 - 0.1 (0.2 + 2 - 0.3609) = 0.01609.
    """
    f = targets_federation([np.array([[2.0]]), np.array([[-2.0]])])
    e = engine_on(f, Point([0.0]), SGD(lr=0.1), cohort_size=2)
    algorithm = PGFed(mu=0.5, eta2=0.1)
    play(e, algorithm, 1)
    close(algorithm.G[:, 0], torch.tensor([-1.8, 1.8]))
    close(algorithm.c, torch.tensor([0.99, 0.99]))
    play(e, algorithm, 1, begin=1)
    close(algorithm.A[np.arange(2)], torch.full((2, 2), 0.401))
    play(e, algorithm, 1, [[0]], begin=2)
    close(algorithm.A[np.arange(2)], torch.tensor([[0.302, 0.302], [0.401, 0.401]]))
    play(e, algorithm, 1, begin=3)
    close(algorithm.A[np.arange(2)], torch.tensor([[0.221, 0.302], [0.320, 0.401]]))
    close(deployed(e, algorithm)[:, 0], torch.tensor([0.40718, 0.01609]))
    close(algorithm.w, torch.tensor([(0.40718 + 0.01609) / 2]))


def test_pgfeds_linear_models_are_exact_for_affine_losses() -> None:
    """f_j(t) = d_j . t: c_j + g_j . t is f_j(t) at every t, so that the auxiliary risk is sum a_ij f_j exactly."""
    d = torch.randn(3, 3)
    e = engine_on(targets_federation([x[None].repeat(2, 1).numpy() for x in d], Affine()), Point(START), SGD(lr=LR))
    algorithm = play(e, PGFed(mu=0.5), 2)
    close(algorithm.G, d)
    t = torch.randn(7, 3)
    close(algorithm.c / 0.5 + t @ algorithm.G.T, t @ d.T)
    a = algorithm.A[np.arange(3)]
    step = Cohort(e, np.arange(3), 2)
    close(
        step.train(
            algorithm.w, extra_grad=lambda s: s.state.aux, how=LocalTraining(steps=1), aux=0.5 * a @ algorithm.G
        ).theta,
        algorithm.w - LR * (d + 0.5 * a @ d),
    )


def test_pgfeds_coefficients_move_by_a_rank_one_term_and_a_constant() -> None:
    """Before any clamp a round changes a_ij by -eta2 (steps_i mu c_j + sum over steps of s_i): the differences between
    columns are eta2 steps_i mu (c_k - c_j)."""
    e = four_of_six()
    algorithm = PGFed(mu=0.1, eta2=1e-4)
    play(e, algorithm, 1, COHORTS_OF_FOUR)
    c, prev = algorithm.c.clone(), algorithm.prev.clone()
    assert prev.tolist() == COHORTS_OF_FOUR[0]
    play(e, algorithm, 1, COHORTS_OF_FOUR[1:], begin=1)
    ids = np.array(COHORTS_OF_FOUR[1])
    steps = torch.tensor([-(-n // 5) for n in (7, 21, 12, 4, 18, 9)]).clamp_min(1).float()[ids]
    change = (algorithm.A[ids] - 0.25)[:, prev]
    close(change[:, 1:] - change[:, :1], -1e-4 * steps[:, None] * (c[1:] - c[:1])[None], 1e-6)


def test_pgfeds_coefficients_stay_where_nobody_was() -> None:
    """a_ij changes for i in the cohort and j in the one before, nowhere else; it never falls below 0 or above
    alpha_max."""
    e = four_of_six()
    algorithm = PGFed(mu=0.5, eta2=0.5, alpha_max=0.26)
    play(e, algorithm, 1, COHORTS_OF_FOUR)
    for r in range(1, 4):
        before = algorithm.A[np.arange(6)]
        play(e, algorithm, 1, COHORTS_OF_FOUR[r:], begin=r)
        after, touched = algorithm.A[np.arange(6)], torch.zeros(6, 6, dtype=torch.bool)
        touched[np.ix_(COHORTS_OF_FOUR[r], COHORTS_OF_FOUR[r - 1])] = True
        equal(after[~touched], before[~touched])
        assert not torch.equal(after[touched], before[touched])
        assert (after >= 0).all() and (after[touched] <= 0.26).all()
    assert (after == 0).any()
    assert algorithm.G.shape[0] == 4  # of the last cohort, whatever N is


@pytest.mark.parametrize("alpha_max", [None, 0.4, torch.tensor([[0.3], [0.5], [9.0]])])
@pytest.mark.parametrize("at_once", [1, 20, _deferred.AT_ONCE])
def test_pgfeds_coefficients_follow_every_step(alpha_max: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last local step, some steps at a time: what the box's update gives, one step after the other, with
    clients of 7, 0 and 12 steps whose coefficients are held at their bounds on the way; bit for bit with an upper
    bound."""
    monkeypatch.setattr(_deferred, "AT_ONCE", at_once)
    g = torch.Generator().manual_seed(0)
    alpha, c = torch.full((3, 4), 0.25), torch.randn(4, generator=g)
    gbar_theta, eta2 = torch.randn(3, 12, generator=g), torch.tensor([[0.1], [0.2], [0.3]])
    steps = torch.tensor([7.0, 0, 12])
    expected, held = alpha.clone(), 0
    for t in range(12):
        training = (t < steps)[:, None]
        stepped = pgfed.coefficient_step(expected, eta2, c, gbar_theta[:, t, None], alpha_max)
        unbounded = expected - eta2 * (c + gbar_theta[:, t, None])
        held += int(((stepped != unbounded) & training).sum())
        expected = torch.where(training, stepped, expected)
    assert held > 5 and (expected[0] > 0).any() and (expected[2] > 0).any()
    assert (expected >= 0).all() and (alpha_max is None or (expected <= alpha_max).all())
    found = _deferred.coefficients_after(alpha, eta2, c, gbar_theta, steps, alpha_max)
    close(found, expected, 1e-6) if alpha_max is None else equal(found, expected)
    equal(alpha, torch.full((3, 4), 0.25))


def test_pgfeds_gradients_are_those_of_the_trained_models() -> None:
    e = four_of_six()
    algorithm = play(e, PGFed(mu=0.2), 2, COHORTS_OF_FOUR)
    g, f = Cohort(e, np.array(COHORTS_OF_FOUR[1]), 1).gradient(algorithm.theta[np.array(COHORTS_OF_FOUR[1])])
    close(algorithm.G, g)
    close(algorithm.c, 0.2 * (f - (g * algorithm.theta[np.array(COHORTS_OF_FOUR[1])]).sum(1)))
    close(algorithm.gbar, 0.2 * g.mean(0))


def test_pgfedmo_without_beta_is_pgfed_and_with_one_keeps_its_first_auxiliary_gradient() -> None:
    a, b = four_of_six(), four_of_six()
    equal(deployed(a, play(a, PGFed(beta=0.0), 4, COHORTS_OF_FOUR)), deployed(b, play(b, PGFed(), 4, COHORTS_OF_FOUR)))
    e = four_of_six()
    algorithm = play(e, PGFed(mu=0.3, beta=1.0), 2, COHORTS_OF_FOUR)
    first = algorithm.aux[np.array([1, 3])]
    assert first.abs().sum() > 0
    play(e, algorithm, 2, COHORTS_OF_FOUR[2:], begin=2)
    equal(algorithm.aux[np.array([1, 3])], first)
