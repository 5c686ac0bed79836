"""Local, FedAvg, FedProx, FedPer, Ditto, SCAFFOLD, PGFed(Mo) and fine-tuning: limits of their specs, and steps by hand.

Most steps are on least squares: client i's risk is f_i(theta) = 0.5 ||theta - b_i||^2, its gradient theta - b_i, and
n full-batch steps of rate r lead from w to b_i + (1 - r)^n (w - b_i).
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import (
    HEAD,
    Affine,
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
    targets_federation,
)
from torch import Tensor

from fedbench.algorithms import pgfed
from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.local import Local
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.scaffold import Scaffold
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort, Engine
from fedbench.engine.optim import SGD, Adam, Optimizer
from fedbench.nn import compiled
from fedbench.nn.flat import Columns
from fedbench.simulation.build import algorithm as built

LR = 0.1
COHORTS = ([0, 1, 3, 5], [1, 2, 3, 4], [0, 2, 4, 5], [0, 1, 3, 4])
START = (1.0, -2.0, 0.5)
B = torch.tensor([[2.0, 1.0, 0.0], [-1.0, 0.0, 3.0], [0.0, 4.0, 1.0]])          # b_i of three clients
NUMBERS = (1, 3, 2)                                                            # of their samples
P = torch.tensor(NUMBERS) / 6


def network(optimizer: Optimizer | None = None, columns: dict | None = None, **options) -> Engine:
    """Ragged classification with 6 clients; columns default to body and head."""
    arrays, split = ragged()
    return engine(arrays, split, mlp(), optimizer or SGD(lr=LR, momentum=0.9, reset="never"), columns=columns or HEAD,
                  **{"cohort_size": 4, **options})


def squares(steps: int = 1, targets: Tensor = B, numbers: tuple = NUMBERS, **options) -> Engine:
    """f_i = 0.5 ||theta - b_i||^2, `steps` full-batch steps a round."""
    f = targets_federation([np.repeat(b[None].numpy(), n, 0) for b, n in zip(targets, numbers)])
    return engine_on(f, Point(START), options.pop("optimizer", SGD(lr=LR)), batch_size=10,
                     **{"epochs": steps, **options})


def state(e: Engine, algorithm: Algorithm) -> dict[str, Tensor]:
    n = np.arange(e.federation.num_clients)
    return {**algorithm.state_dict(), **{name: rows[n] for name, rows in e.rows.all.items()}}


def descent(w: Tensor, to: Tensor, steps: int, rate: float = LR) -> Tensor:
    """Where `steps` steps of gradient theta - to lead."""
    return to + (1 - rate) ** steps * (w - to)


W = torch.tensor(START)


# -- FedAvg ----------------------------------------------------------------------------------------------
def test_fedavg_by_hand() -> None:
    """theta_i = b_i + 0.9^2 (w - b_i);  w <- sum p_i theta_i with p = n_i / n = (1, 3, 2) / 6; twice."""
    e = squares(steps=2)
    algorithm, w = play(e, FedAvg(), 2), W
    for _ in range(2):
        w = P @ descent(w, B, 2)
    close(algorithm.w, w)
    equal(deployed(e, algorithm), algorithm.w.expand(3, -1))


def test_fedavg_weights_are_those_of_the_cohort() -> None:
    e = squares()
    w = play(e, FedAvg(), 1, [[0, 2]]).w
    close(w, torch.tensor([1 / 3, 2 / 3]) @ descent(W, B[[0, 2]], 1))


def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_union() -> None:
    """sum q_i grad f_i is the gradient of the mean loss over everybody's samples."""
    e = network(SGD(lr=LR), batch_size=100)
    w = play(e, FedAvg(), 3).w
    index = torch.from_numpy(e.federation.splits["train"].indices)
    x, y = e.federation.gather(index)
    row = e.model.init_row()
    for _ in range(3):
        row = row.detach().requires_grad_()
        row = row - LR * torch.autograd.grad(F.cross_entropy(e.model.predict(row, x), y), row)[0]
    close(w, row.detach())


def test_fedavg_with_one_client_is_centralized_sgd() -> None:
    """N = 1: the rounds are the epochs of a plain loop, momentum kept."""
    arrays, split = ragged(sizes=(17,))
    e = engine(arrays, split, mlp(), SGD(lr=LR, momentum=0.9, reset="never"))
    w = play(e, FedAvg(), 3).w
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), LR, 0.9)
    for r in range(3):
        batches: list = []
        everyone(e, r, "trial").train(w, step=lambda s, b: batches.append((b.x[0], b.y[0], b.counts[0])))  # noqa: B023
        for x, y, n in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x[:n]), y[:n]).backward()
            optimizer.step()
    close(w, torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def test_fedavg_of_one_sampled_client_is_its_sgd() -> None:
    e = network()
    algorithm = play(e, FedAvg(), 1, [[3]])
    close(algorithm.w, Cohort(network(), np.array([3]), 0).train(e.model.init_row()).theta[0])


def test_fedavg_local_deploys_what_a_client_last_trained() -> None:
    """By hand: round 1 with clients 0 and 1, round 2 with 1 and 2; client 0 keeps its first model."""
    e = squares(cohort_size=2)
    algorithm = play(e, FedAvg("local"), 2, [[0, 1], [1, 2]])
    w1 = torch.tensor([1 / 4, 3 / 4]) @ descent(W, B[:2], 1)
    close(deployed(e, algorithm), torch.stack([descent(W, B[0], 1), descent(w1, B[1], 1), descent(w1, B[2], 1)]))
    equal(algorithm.w, play(squares(cohort_size=2), FedAvg(), 2, [[0, 1], [1, 2]]).w)
    before = play(squares(cohort_size=2), FedAvg("local"), 1, [[0, 1]])
    equal(before.theta[np.array([2])][0], W)


def test_a_client_of_no_weight_changes_nothing() -> None:
    """As n_i / n goes to 0 a client disappears from the mean: one sample against ten thousand."""
    arrays, split = ragged(sizes=(1, 10_000))
    e = engine(arrays, split, mlp(), batch_size=10_000)
    both = play(e, FedAvg()).w
    alone = Cohort(e, np.array([1]), 0).train(e.model.init_row()).theta[0]
    close(both, alone, 1e-4)


# -- Local -----------------------------------------------------------------------------------------------
def test_local_trains_alone_and_when_sampled() -> None:
    e = squares(steps=2, cohort_size=2)
    rows = deployed(e, play(e, Local(), 3, [[0, 1], [1, 2], [0, 1]]))
    close(rows, torch.stack([descent(W, B[0], 4), descent(W, B[1], 6), descent(W, B[2], 2)]))


def test_local_does_not_see_the_others_data() -> None:
    one, other = network(), network()
    mine = other.federation.splits["train"][1]
    elsewhere = np.setdiff1d(np.arange(len(other.federation.targets)), mine)
    other.federation.inputs[torch.from_numpy(elsewhere)] += 1
    a, b = (deployed(e, play(e, Local(), 3, COHORTS)) for e in (one, other))
    equal(a[1], b[1])
    assert not torch.allclose(a[0], b[0])


def test_local_is_fedavg_local_without_aggregation() -> None:
    """Aggregation replaced by the identity: what a client sends back is what it gets again."""
    class Kept(FedAvg):
        def round(self, cohort):
            self.theta[cohort.ids] = cohort.train(self.theta[cohort.ids]).theta
    a, b = network(), network()
    equal(deployed(a, play(a, Local(), 4, COHORTS)), deployed(b, play(b, Kept("local"), 4, COHORTS)))


# -- FedProx ---------------------------------------------------------------------------------------------
def test_fedprox_without_its_term_is_fedavg_bit_for_bit() -> None:
    a, b = network(), network()
    equal(play(a, FedProx(0.0), 4, COHORTS).w, play(b, FedAvg(), 4, COHORTS).w)
    c = network()
    close(play(c, FedProx(1e-12), 4, COHORTS).w, play(network(), FedAvg(), 4, COHORTS).w)


@pytest.mark.parametrize("mu", [0.01, 1.0, 7.0])
def test_fedprox_with_one_local_step_is_fedavg(mu: float) -> None:
    """The term is 0 at theta = w, where the only step is taken."""
    a, b = network(SGD(lr=LR), batch_size=100), network(SGD(lr=LR), batch_size=100)
    equal(play(a, FedProx(mu), 3, COHORTS).w, play(b, FedAvg(), 3, COHORTS).w)


def test_fedprox_by_hand() -> None:
    """The gradient (theta - b) + mu (theta - w) = (1 + mu) (theta - c) with c = (b + mu w) / (1 + mu): a descent to c
    at the rate lr (1 + mu)."""
    mu, e = 0.5, squares(steps=3)
    algorithm, w = play(e, FedProx(mu), 2), W
    for _ in range(2):
        w = P @ descent(w, (B + mu * w) / (1 + mu), 3, LR * (1 + mu))
    close(algorithm.w, w)


def test_fedprox_with_a_large_mu_stays_near_the_server() -> None:
    near, far = squares(steps=50), squares(steps=50)
    close(play(near, FedProx(9.0)).w, W + 0.1 * (P @ B - W))       # (b + 9 w) / 10
    close(play(far, FedAvg()).w, P @ B, 0.02)


# -- FedPer ----------------------------------------------------------------------------------------------
def test_fedper_with_an_empty_head_is_fedavg() -> None:
    a, b = network(columns={"head": []}), network()
    one, other = play(a, FedPer(), 4, COHORTS), play(b, FedAvg(), 4, COHORTS)
    equal(one.u, other.w)
    equal(deployed(a, one), other.w.expand(6, -1))


def test_fedper_with_an_empty_base_is_local() -> None:
    a, b = network(columns={"head": ["*"]}), network()
    equal(deployed(a, play(a, FedPer(), 4, COHORTS)), deployed(b, play(b, Local(), 4, COHORTS)))


def test_fedper_by_hand() -> None:
    """theta = [u, h], h the last number.  Clients 0 and 1 in round 1, 1 and 2 in round 2.  u is averaged, h is each
    client's own descent; client 0 deploys the new u with its old h."""
    e = squares(steps=2, cohort_size=2)
    e.model.columns["head"] = Columns([(2, 3)])
    algorithm = play(e, FedPer(), 2, [[0, 1], [1, 2]])
    one = descent(W, B, 2)                                         # [3, 3]
    u = torch.tensor([1 / 4, 3 / 4]) @ one[:2, :2]
    two = torch.tensor([3 / 5, 2 / 5]) @ descent(u, B[1:, :2], 2)
    h = torch.stack([one[0, 2], descent(W, B[1], 4)[2], one[2, 2]])
    close(algorithm.u, two)
    close(deployed(e, algorithm), torch.cat([two.expand(3, -1), h[:, None]], 1))


def test_fedper_never_sampled_clients_have_the_first_head() -> None:
    e = network()
    algorithm = play(e, FedPer(), 2, [[0, 1, 2, 3], [0, 1, 2, 3]])
    head, rows = e.model.columns["head"], deployed(e, algorithm)
    equal(head.take(rows[5]), head.take(e.model.init_row()))
    equal(e.model.without("head").take(rows[5]), algorithm.u)


def test_fedper_needs_a_head() -> None:
    arrays, split = ragged()
    with pytest.raises(ConfigError, match=r"algorithm=fedper needs the column group 'head'"):
        play(engine(arrays, split, mlp()), FedPer())


# -- Ditto -----------------------------------------------------------------------------------------------
def test_ditto_without_its_pull_is_local() -> None:
    a, b = network(), network()
    equal(deployed(a, play(a, Ditto(0.0), 4, COHORTS)), deployed(b, play(b, Local(), 4, COHORTS)))


def test_the_path_of_dittos_global_model_does_not_depend_on_lam() -> None:
    rows = [play(network(), Ditto(lam), 4, COHORTS).w for lam in (0.0, 1.0, 5.0)]
    equal(rows[0], rows[1])
    equal(rows[0], rows[2])
    equal(rows[0], play(network(), FedAvg(), 4, COHORTS).w)


def test_ditto_by_hand() -> None:
    """v descends to (b + lam w) / (1 + lam) at the rate lr (1 + lam), w being what was *received*; over two rounds
    w moves and v goes on from where it was."""
    lam, e = 2.0, squares(steps=2)
    algorithm, w, v = play(e, Ditto(lam), 2), W, W.expand(3, -1)
    for _ in range(2):
        v = descent(v, (B + lam * w) / (1 + lam), 2, LR * (1 + lam))
        w = P @ descent(w, B, 2)
    close(deployed(e, algorithm), v)
    close(algorithm.w, w)


def test_ditto_with_many_steps_reaches_its_minimizer() -> None:
    """(H + lam I)^-1 (H b + lam w) with H = I."""
    e = squares(steps=1)
    close(deployed(e, play(e, Ditto(3.0, personal_epochs=200))), (B + 3 * W) / 4)


def test_dittos_personal_epochs() -> None:
    e = squares(steps=1)
    algorithm = play(e, Ditto(0.0, personal_epochs=4))
    close(deployed(e, algorithm), descent(W, B, 4))
    close(algorithm.w, P @ descent(W, B, 1))


# -- SCAFFOLD --------------------------------------------------------------------------------------------
def test_scaffolds_first_round_is_fedavg_with_uniform_weights() -> None:
    class Uniform(FedAvg):
        def round(self, cohort):
            self.w = cohort.train(self.w).theta.mean(0)
    a, b, c = (network(SGD(lr=LR)) for _ in range(3))
    close(play(a, Scaffold(), 1, COHORTS).x, play(b, Uniform(), 1, COHORTS).w)
    close(play(c, Scaffold(weights="samples"), 1, COHORTS).x, play(network(SGD(lr=LR)), FedAvg(), 1, COHORTS).w)


def test_scaffolds_variates_sum_to_the_servers() -> None:
    e = network(SGD(lr=LR))
    algorithm = Scaffold()
    for r in range(4):
        play(e, algorithm, 1, COHORTS[r:r + 1], begin=r)
        close(algorithm.c_i[np.arange(6)].sum(0), 6 * algorithm.c, 1e-4)
        assert algorithm.c.abs().max() > 0


def test_scaffold_with_one_full_batch_step_learns_the_mean_gradient() -> None:
    """c_i+ = c_i - c + (x - theta_i) / lr, theta_i = x - lr (grad f_i(x) + c - c_i): c_i+ = grad f_i(x)."""
    e = network(SGD(lr=LR), batch_size=100)
    algorithm = play(e, Scaffold(), 1)
    for r in range(1, 3):
        g, _ = everyone(e).gradient(algorithm.x)
        play(e, algorithm, 1, begin=r)
        close(algorithm.c_i[np.arange(6)], g, 1e-4)
        close(algorithm.c, g.mean(0), 1e-4)


@pytest.mark.parametrize("server_lr, weights", [(1.0, "uniform"), (0.5, "samples")])
def test_scaffold_by_hand(server_lr: float, weights: str) -> None:
    """Algorithm 1, option II, in numbers: three clients, two of them a round, 2 steps on squares of gradient
    theta - b_i + c - c_i, so a descent to b_i + c_i - c; c_i+ = c_i - c + (x - theta_i) / (2 lr);
    c <- c + sum (c_i+ - c_i) / 3."""
    e, cohorts = squares(steps=2, cohort_size=2), [[0, 1], [1, 2], [0, 2], [0, 1]]
    algorithm = play(e, Scaffold(server_lr, weights), 4, cohorts)
    x, c, c_i, n = W, torch.zeros(3), torch.zeros(3, 3), torch.tensor(NUMBERS).float()
    for s in cohorts:
        theta = descent(x, B[s] + c_i[s] - c, 2)
        new = c_i[s] - c + (x - theta) / (2 * LR)
        p = n[s] / n[s].sum() if weights == "samples" else torch.full((2,), 0.5)
        x, c = x + server_lr * p @ (theta - x), c + (new - c_i[s]).sum(0) / 3
        c_i[s] = new
    close(algorithm.x, x)
    close(algorithm.c, c)
    close(algorithm.c_i[np.arange(3)], c_i)


def test_scaffold_counts_the_steps_a_client_really_takes() -> None:
    """Ragged clients: with constant gradients -d_i the variates are exactly -d_i, whatever the number of steps."""
    d = [np.full((n, 3), -i - 1.0, np.float32) for i, n in enumerate((2, 7, 11))]
    e = engine_on(targets_federation(d, Affine()), Point(START), SGD(lr=LR), batch_size=3)
    algorithm = play(e, Scaffold())
    close(algorithm.c_i[np.arange(3)], -torch.arange(1.0, 4)[:, None].expand(-1, 3))
    assert everyone(e).train(e.model.init_row()).steps.tolist() == [1, 3, 4]


@pytest.mark.parametrize("optimizer", [SGD(lr=LR, momentum=0.9), SGD(lr=LR, weight_decay=0.1), SGD(lr=LR, clip=1.0),
                                       Adam(lr=LR)])
def test_scaffold_refuses_what_its_variates_are_not_derived_for(optimizer: Optimizer) -> None:
    with pytest.raises(ConfigError, match=r"algorithm=scaffold needs plain SGD"):
        play(network(optimizer), Scaffold())


# -- PGFed -----------------------------------------------------------------------------------------------
def test_pgfed_without_mu_is_fedavg_local_bit_for_bit() -> None:
    a, b = network(), network()
    one, other = play(a, PGFed(mu=0.0), 4, COHORTS), play(b, FedAvg("local"), 4, COHORTS)
    equal(one.w, other.w)
    equal(deployed(a, one), deployed(b, other))
    assert len(one.A.touched()) == 0


def test_pgfed_tends_to_fedavg_local_as_mu_goes_to_zero() -> None:
    """Not only where the code asks whether mu is 0."""
    a, b = network(), network()
    close(deployed(a, play(a, PGFed(mu=1e-9), 4, COHORTS)), deployed(b, play(b, FedAvg("local"), 4, COHORTS)), 1e-5)


@pytest.mark.parametrize("mu", [0.1, 3.0])
def test_pgfeds_first_round_is_fedavg(mu: float) -> None:
    a, b = network(), network()
    one, other = play(a, PGFed(mu=mu), 1, COHORTS), play(b, FedAvg("local"), 1, COHORTS)
    equal(one.w, other.w)
    equal(deployed(a, one), deployed(b, other))
    assert len(one.A.touched()) == 0


def test_pgfed_without_eta2_uses_the_mean_gradient_for_everybody() -> None:
    """A stays 1/K, so the auxiliary gradient mu sum_j a_ij g_j is gbar = (mu / K) sum_j g_j: round 2 is FedAvg with
    that gradient added."""
    e, again = network(), network()
    algorithm = play(e, PGFed(mu=0.5, eta2=0.0), 1, COHORTS)
    gbar, w = algorithm.gbar.clone(), algorithm.w.clone()
    close(gbar, 0.5 * algorithm.G.mean(0))
    play(e, algorithm, 1, COHORTS[1:], begin=1)
    equal(algorithm.A[np.arange(6)], torch.full((6, 6), 0.25))
    play(again, FedAvg(), 1, COHORTS)                              # for the momentum of round 1
    out = Cohort(again, np.array(COHORTS[1]), 1).train(w, extra_grad=lambda s: gbar.expand(s.k, -1))
    close(algorithm.theta[np.array(COHORTS[1])], out.theta)


def reference_pgfed(targets: Tensor, cohorts: list, steps: int, mu: float, eta2: float, momentum: float = 0.0,
                    beta: float = 0.0, size: int = 2) -> dict[str, Tensor]:
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


@pytest.mark.parametrize("mu, eta2, momentum, beta", [(0.5, 0.05, 0.0, 0.0), (1.0, 0.2, 0.9, 0.0), (0.3, 0.0, 0.9, 0.0),
                                                      (0.5, 0.05, 0.0, 0.5), (0.5, 0.05, 0.9, 1.0)])
@pytest.mark.parametrize("in_one_pass", [False, True])
def test_pgfed_is_its_spec_written_out(mu: float, eta2: float, momentum: float, beta: float, in_one_pass: bool,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds of two clients out of three, two local steps, kept momentum, PGFedMo included; steps in operations
    of torch, or in the compiled pass that large rows take on a CPU."""
    if in_one_pass:
        pytest.importorskip("numba", reason="the compiled pass needs numba")
        monkeypatch.setattr(compiled, "LARGE", 0)
    e = squares(steps=2, numbers=(1, 1, 1), cohort_size=2,
                optimizer=SGD(lr=LR, momentum=momentum, reset="never"))
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
    close(step.train(algorithm.w, steps=1, extra_grad=lambda s: s.aux, aux=0.5 * a @ algorithm.G).theta,
          algorithm.w - LR * (d + 0.5 * a @ d))


def test_pgfeds_coefficients_move_by_a_rank_one_term_and_a_constant() -> None:
    """Before any clamp a round changes a_ij by -eta2 (steps_i mu c_j + sum over steps of s_i): the differences between
    columns are eta2 steps_i mu (c_k - c_j)."""
    e = network()
    algorithm = PGFed(mu=0.1, eta2=1e-4)
    play(e, algorithm, 1, COHORTS)
    c, prev = algorithm.c.clone(), algorithm.prev.clone()
    assert prev.tolist() == COHORTS[0]
    play(e, algorithm, 1, COHORTS[1:], begin=1)
    ids = np.array(COHORTS[1])
    steps = torch.tensor([-(-n // 5) for n in (7, 21, 12, 4, 18, 9)]).clamp_min(1).float()[ids]
    change = (algorithm.A[ids] - 0.25)[:, prev]
    close(change[:, 1:] - change[:, :1], -1e-4 * steps[:, None] * (c[1:] - c[:1])[None], 1e-6)


def test_pgfeds_coefficients_stay_where_nobody_was() -> None:
    """a_ij changes for i in the cohort and j in the one before, nowhere else; it never falls below 0 or above
    alpha_max."""
    e = network()
    algorithm = PGFed(mu=0.5, eta2=0.5, alpha_max=0.26)
    play(e, algorithm, 1, COHORTS)
    for r in range(1, 4):
        before = algorithm.A[np.arange(6)]
        play(e, algorithm, 1, COHORTS[r:], begin=r)
        after, touched = algorithm.A[np.arange(6)], torch.zeros(6, 6, dtype=torch.bool)
        touched[np.ix_(COHORTS[r], COHORTS[r - 1])] = True
        equal(after[~touched], before[~touched])
        assert not torch.equal(after[touched], before[touched])
        assert (after >= 0).all() and (after[touched] <= 0.26).all()
    assert (after == 0).any()
    assert algorithm.G.shape[0] == 4                             # of the last cohort, whatever N is


@pytest.mark.parametrize("most", [None, 0.4, torch.tensor([[0.3], [0.5], [9.0]])])
@pytest.mark.parametrize("moves", [1, 20, pgfed.MOVES])
def test_pgfeds_coefficients_follow_every_step(most: Any, moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made up for after the last local step, some steps at a time: what a step after the other gives, with clients of
    7, 0 and 12 steps whose coefficients are held at their bounds on the way."""
    monkeypatch.setattr(pgfed, "MOVES", moves)
    g = torch.Generator().manual_seed(0)
    alpha, c = torch.full((3, 4), 0.25), torch.randn(4, generator=g)
    lift, rate, steps = torch.randn(3, 12, generator=g), torch.tensor([[0.1], [0.2], [0.3]]), torch.tensor([7., 0, 12])
    expected, held = alpha.clone(), 0
    for i in range(3):
        for t in range(int(steps[i])):
            moved = expected[i] - rate[i] * (c + lift[i, t])
            top = torch.inf if most is None else most if isinstance(most, float) else float(most[i])
            expected[i] = moved.clamp(0, top)
            held += int((moved != expected[i]).sum())
    assert held > 5 and (expected[0] > 0).any() and (expected[2] > 0).any()
    close(pgfed.learned(alpha, rate, c, lift, steps, most), expected, 1e-6)
    equal(alpha, torch.full((3, 4), 0.25))


def test_pgfeds_gradients_are_those_of_the_trained_models() -> None:
    e = network()
    algorithm = play(e, PGFed(mu=0.2), 2, COHORTS)
    g, f = Cohort(e, np.array(COHORTS[1]), 1).gradient(algorithm.theta[np.array(COHORTS[1])])
    close(algorithm.G, g)
    close(algorithm.c, 0.2 * (f - (g * algorithm.theta[np.array(COHORTS[1])]).sum(1)))
    close(algorithm.gbar, 0.2 * g.mean(0))


def test_pgfedmo_without_beta_is_pgfed_and_with_one_keeps_its_first_auxiliary_gradient() -> None:
    a, b = network(), network()
    equal(deployed(a, play(a, PGFed(beta=0.0), 4, COHORTS)), deployed(b, play(b, PGFed(), 4, COHORTS)))
    e = network()
    algorithm = play(e, PGFed(mu=0.3, beta=1.0), 2, COHORTS)
    first = algorithm.smooth[np.array([1, 3])]
    assert first.abs().sum() > 0
    play(e, algorithm, 2, COHORTS[2:], begin=2)
    equal(algorithm.smooth[np.array([1, 3])], first)


# -- fine-tuning -----------------------------------------------------------------------------------------
def test_fine_tuning_for_no_epochs_is_no_fine_tuning() -> None:
    cfg = compose(["algorithm=fedavg", "finetune.epochs=0"])
    assert type(built(cfg)) is FedAvg
    tuned = built(compose(["algorithm=fedavg", "finetune.epochs=2", "finetune.part=head"]))
    assert isinstance(tuned, FineTuned) and type(tuned.inner) is FedAvg and (tuned.epochs, tuned.part) == (2, "head")
    e = network()
    algorithm = play(e, FineTuned(FedAvg(), 0, None, "evaluation", "all"), 2, COHORTS)
    equal(deployed(e, algorithm), algorithm.inner.w.expand(6, -1))


def test_fine_tuning_by_hand() -> None:
    """Each client descends from w for 3 epochs at its own rate; the server's model and everybody's state stay."""
    e = squares(steps=2)
    algorithm = play(e, FineTuned(FedAvg(), 3, 0.2, "evaluation", "all"), 2)
    w = play(squares(steps=2), FedAvg(), 2).w
    before = state(e, algorithm)
    close(deployed(e, algorithm), descent(w, B, 3, 0.2))
    equal(state(e, algorithm), before)
    equal(algorithm.global_row(), w)
    close(deployed(e, FineTuned(algorithm.inner, 3, None, "evaluation", "all")), descent(w, B, 3))


def test_fine_tuning_at_each_clients_own_rate() -> None:
    rates = [0.05 * (i + 1) for i in range(len(B))]
    e = squares(steps=2)
    rows = deployed(e, play(e, FineTuned(FedAvg(), 3, rates, "evaluation", "all"), 2))
    for i, rate in enumerate(rates):
        alone = squares(steps=2)
        tuned = deployed(alone, play(alone, FineTuned(FedAvg(), 3, rate, "evaluation", "all"), 2))
        close(rows[i], tuned[i])
    with pytest.raises(ConfigError, match=rf"finetune.lr lists 1 rates, and there are {len(B)} clients"):
        play(squares(), FineTuned(FedAvg(), 1, [0.1], "evaluation", "all"))
    cfg = compose(["algorithm=fedavg", "finetune.epochs=1", "finetune.lr=[0.1,0.2]"])
    assert len(built(cfg).lr) == 2


def test_fine_tuning_leaves_the_training_alone() -> None:
    """With kept momentum, evaluated after every round or not at all."""
    a, b = network(), network()
    tuned, plain = FineTuned(PGFed(), 2, None, "evaluation", "all"), PGFed()
    for r in range(4):
        play(a, tuned, 1, COHORTS[r:], begin=r)
        deployed(a, tuned, r, False)
        play(b, plain, 1, COHORTS[r:], begin=r)
    assert not tuned.personal_is_global
    mine, theirs = state(a, tuned), state(b, plain)
    equal(mine, theirs)


def test_fine_tuning_of_a_part_and_at_the_end() -> None:
    e = network()
    algorithm = play(e, FineTuned(FedAvg(), 2, None, "end", "head"), 2, COHORTS)
    base = e.model.without("head")
    equal(deployed(e, algorithm, final=False), algorithm.inner.w.expand(6, -1))
    rows = deployed(e, algorithm, final=True)
    equal(base.take(rows), base.take(algorithm.inner.w).expand(6, -1))
    assert (e.model.columns["head"].take(rows) != e.model.columns["head"].take(algorithm.inner.w)).any(1).all()
    with pytest.raises(ConfigError, match=r"finetune.part needs the column group 'neck'"):
        play(network(), FineTuned(FedAvg(), 1, None, "end", "neck"))


def test_fine_tuning_of_personal_models_starts_from_them() -> None:
    e = squares(steps=1)
    algorithm = play(e, FineTuned(Local(), 2, None, "evaluation", "all"))
    close(deployed(e, algorithm), descent(W, B, 3))


# -- communication ---------------------------------------------------------------------------------------
SIZE, BASE = 163, 136
SENT = {"local": (0, 0), "fedavg": (SIZE, SIZE), "fedavg_local": (SIZE, SIZE), "fedprox": (SIZE, SIZE),
        "fedper": (BASE, BASE), "ditto": (SIZE, SIZE), "scaffold": (2 * SIZE, 2 * SIZE),
        "pgfed": (3 * SIZE + 4, 2 * SIZE + 1 + 4), "pgfed_mo": (3 * SIZE + 4, 2 * SIZE + 1 + 4)}


@pytest.mark.parametrize("name", SENT)
def test_what_a_client_exchanges_in_a_round(name: str) -> None:
    """Numbers per sampled client from the second round on, by the table of the methods: PGFed gets w, its auxiliary
    gradient, gbar and K' coefficients c, and sends theta, g, c and K' coefficients a."""
    e = network(SGD(lr=LR))
    algorithm = play(e, built(compose([f"algorithm={name}"])), 1, COHORTS)
    assert (e.model.size, e.model.without("head").size) == (SIZE, BASE)
    cohort = Cohort(e, np.array(COHORTS[1]), 1)
    algorithm.round(cohort)
    assert (cohort.ledger.bytes_down / 16, cohort.ledger.bytes_up / 16) == SENT[name]      # 4 clients x 4 bytes
