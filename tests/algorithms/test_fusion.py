"""The fused proximal step against a generic solver, and its exact invariants."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tiny import close, equal
from torch import Tensor

from fedbench.algorithms._fusion import RELAXED, Network, dual_norm, fuse, onto_l1_ball, prox
from fedbench.algorithms._similarity import of_edges

NORMS = ("l1", "l2", "linf")
ORDER = {"l1": 1, "l2": 2, "linf": float("inf")}
SPARSE = of_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2)])
COMPLETE = ~torch.eye(5, dtype=torch.bool)
STAR = of_edges(20, [(0, i) for i in range(1, 20)])
EXACT = {"iterations": 20_000, "tolerance": 1e-12}


def drawn(n: int = 5, d: int = 4, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def objective(Z: Tensor, V: Tensor, adjacency: Tensor, tau: float, norm: str) -> float:
    apart = sum(
        float(torch.linalg.vector_norm(Z[i] - Z[j], ORDER[norm]))
        for i, j in itertools.combinations(range(len(Z)), 2)
        if adjacency[i, j]
    )
    return 0.5 * float((Z - V).square().sum()) + tau * apart


def solved(V: Tensor, adjacency: Tensor, tau: float, norm: str) -> Tensor:
    """By SLSQP, in variables Z and bounds on the norms: each edge's t_m >= ||z_i - z_j||.

    l1 and linf: linear constraints on auxiliary variables; l2: squares, started from a feasible point.
    """
    n, d = V.shape
    edges = [(i, j) for i, j in itertools.combinations(range(n), 2) if adjacency[i, j]]
    count = {"l1": d, "l2": 1, "linf": 1}[norm]  # bounds of an edge
    v, i, j = V.numpy(), *np.array(edges).T
    eye = np.eye(n)
    B = eye[i] - eye[j]  # [M, N]
    sums = np.kron(B, np.eye(d))  # [M d, N d]: z_i - z_j of all edges
    bound = np.kron(np.eye(len(edges)), np.ones((d, 1)) if count == 1 else np.eye(d))  # [M d, M count]
    start = np.concatenate([v.ravel(), np.repeat(np.abs(B @ v).sum(1) + 1, count)])
    size = n * d

    def cost(y: np.ndarray) -> tuple[float, np.ndarray]:
        away = y[:size] - v.ravel()
        return 0.5 * away @ away + tau * y[size:].sum(), np.concatenate([away, np.full(len(y) - size, tau)])

    if norm == "l2":
        # sqrt(|| ||^2 + eps^2) instead of a cone: eps of 1e-6 moves the solution by as much
        def smooth(z: np.ndarray) -> tuple[float, np.ndarray]:
            away, apart = z - v.ravel(), B @ z.reshape(n, d)
            length = np.sqrt((apart**2).sum(1) + 1e-14)
            grad = away + tau * (B.T @ (apart / length[:, None])).ravel()
            return 0.5 * away @ away + tau * length.sum(), grad

        found = minimize(smooth, v.ravel(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000})
        return torch.from_numpy(found.x.reshape(n, d))
    linear = np.concatenate([np.hstack([-sums, bound]), np.hstack([sums, bound])])
    constraint = {"type": "ineq", "fun": lambda y: linear @ y, "jac": lambda y: linear}
    found = minimize(cost, start, jac=True, method="SLSQP", constraints=constraint, options={"ftol": 1e-14})
    return torch.from_numpy(found.x[:size].reshape(n, d))


# -- the whole step ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("lam", [0.0, 0.05, 0.4, 50.0])
@pytest.mark.parametrize("adjacency", [SPARSE, COMPLETE], ids=["sparse", "complete"])
def test_a_generic_solver_finds_the_same(norm: str, lam: float, adjacency: Tensor) -> None:
    V = drawn()
    ours = fuse(V, Network(adjacency), lam, norm, **EXACT).Z
    theirs = V.mean(0).expand(5, -1) if lam == 50 else solved(V, adjacency, lam, norm)
    assert float((ours - theirs).abs().max()) < 2e-4
    assert objective(ours, V, adjacency, lam, norm) <= objective(theirs, V, adjacency, lam, norm) + 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_near_is_better(norm: str) -> None:
    V, net = drawn(seed=1), Network(SPARSE)
    Z = fuse(V, net, 0.3, norm, **EXACT).Z
    best, rng = objective(Z, V, SPARSE, 0.3, norm), np.random.default_rng(0)
    for size in (1e-4, 1e-2, 1.0):
        for _ in range(100):
            assert objective(Z + size * torch.from_numpy(rng.normal(size=Z.shape)), V, SPARSE, 0.3, norm) >= best


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("d", [1, 4, 40])
@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1, 1], [1, 4, 0.5, 2, 30, 1]])
def test_a_dual_solution_comes_with_it(norm: str, d: int, weights: list) -> None:
    """C Z = C V - B' U with ||U_m||* <= tau, and <U_m, (B Z)_m> = tau ||(B Z)_m||: Z is the minimizer, of any size."""
    c = torch.tensor(weights).double()
    V, net = drawn(6, d, 2), Network(of_edges(6, [(0, 1), (1, 2), (3, 4), (0, 2)]), c)
    tau = 0.5 * float(dual_norm(net.flows(V), norm).max())
    Z, U, iterations = fuse(V, net, tau, norm, **EXACT)
    assert iterations > 0
    close(Z, V - net.sums(U) / c[:, None], 1e-8)
    assert float(dual_norm(U, norm).max()) <= tau * (1 + 1e-8)
    apart = net.differences(Z)
    close((U * apart).sum(1), tau * torch.linalg.vector_norm(apart, ORDER[norm], dim=1), 1e-8)
    equal(Z[5], V[5])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tau", [0.0, 0.05, 0.4, 50.0])
def test_means_of_components_stay(norm: str, tau: float) -> None:
    V, net = drawn(6), Network(of_edges(6, [(0, 1), (1, 2), (3, 4)]))
    Z = fuse(V, net, tau, norm).Z
    for part in ([0, 1, 2], [3, 4], [5]):
        close(Z[part].mean(0), V[part].mean(0), 1e-12)


def test_weighted_means_of_components_stay() -> None:
    V, c = drawn(6), torch.tensor([1, 4, 0.5, 2, 30, 1]).double()
    for tau in (0.4, 1e6):
        Z = fuse(V, Network(of_edges(6, [(0, 1), (1, 2), (3, 4)]), c), tau).Z
        for part in ([0, 1, 2], [3, 4], [5]):
            close(c[part] @ Z[part], c[part] @ V[part], 1e-10)
    equal(Z[[0, 3]], Z[[1, 4]])  # one number, where all merge


@pytest.mark.parametrize("norm", NORMS)
def test_limits(norm: str) -> None:
    """No penalty, or no edge: V; a large one: every component at its mean, its clients equal bit for bit."""
    V, adjacency = drawn(), of_edges(5, [(0, 1), (1, 2), (3, 4)])
    net = Network(adjacency)
    equal(fuse(V, net, 0.0, norm).Z, V)
    equal(fuse(V, Network(torch.zeros(5, 5)), 1.0, norm).Z, V)
    equal(fuse(V[:1], Network(torch.zeros(1, 1)), 1.0, norm).Z, V[:1])
    Z = fuse(V.float(), net, 1e6, norm).Z
    equal(Z[[0, 3]], Z[[1, 4]])
    equal(Z[0], Z[2])
    assert not torch.allclose(Z[0], Z[3])
    threshold = float(dual_norm(net.flows(V), norm).max())
    assert fuse(V, net, threshold * 1.0001, norm).iterations == 0


@pytest.mark.parametrize("norm", NORMS)
def test_clients_may_be_numbered_and_edges_turned_otherwise(norm: str) -> None:
    V, order = drawn(), torch.tensor([3, 0, 4, 1, 2])  # turns some edges round
    Z = fuse(V, Network(SPARSE), 0.4, norm, **EXACT).Z
    close(fuse(V[order], Network(SPARSE[order][:, order]), 0.4, norm, **EXACT).Z, Z[order], 1e-8)


@pytest.mark.parametrize("norm", NORMS)
def test_neighbours_come_nearer_as_the_penalty_grows(norm: str) -> None:
    V, net = drawn(), Network(SPARSE)
    apart = [
        float(torch.linalg.vector_norm(net.differences(fuse(V, net, tau, norm, **EXACT).Z), ORDER[norm], dim=1).sum())
        for tau in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    ]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(apart)) and apart[0] > 2 * apart[-1]


def test_equal_clients_stay_equal() -> None:
    V = drawn(1, 300).expand(5, -1).clone()
    for norm, tau in itertools.product(NORMS, (1e-3, 1.0)):
        close(fuse(V, Network(COMPLETE), tau, norm).Z, V, 1e-12)


def test_fewer_dimensions_give_the_same_as_all() -> None:
    """l2 goes by the space that V spans: with 3 numbers or 300 that are these 3 turned, the same Z turned."""
    V, net = drawn(5, 3), Network(SPARSE)
    turn = torch.linalg.qr(drawn(300, 3, 5)).Q.T  # [3, 300]
    close(fuse(V @ turn, net, 0.3, **EXACT).Z, fuse(V, net, 0.3, **EXACT).Z @ turn, 1e-9)


def test_it_stops_by_shares_of_the_way() -> None:
    """A federation in other units takes as many iterations, and the default ends near the exact solution."""
    V, net = drawn(20, 60), Network(STAR)
    counts = [fuse(scale * V, net, scale * 0.5).iterations for scale in (1e-5, 1.0, 1e5)]
    assert len(set(counts)) == 1 and counts[0] < 200
    move = (fuse(V, net, 0.5, **EXACT).Z - V).norm()
    assert (fuse(V, net, 0.5).Z - fuse(V, net, 0.5, **EXACT).Z).norm() < 1e-4 * move
    assert fuse(V, net, 0.5, iterations=7).iterations == 7
    assert fuse(V, net, 0.5, tolerance=0.1).iterations < counts[0]


def test_any_penalty_of_admm_leads_to_the_same() -> None:
    V, high, low = drawn(), Network(SPARSE), Network(SPARSE)
    high.r, low.r = 3.0, 0.2
    for norm in NORMS:
        close(fuse(V, high, 0.3, norm, **EXACT).Z, fuse(V, low, 0.3, norm, **EXACT).Z, 1e-8)


@pytest.mark.parametrize("norm", NORMS)
def test_iterations_are_the_papers(norm: str) -> None:
    """Eqs. (8) to (10) with W and U as they are printed, B Z relaxed, before r is first changed."""
    V, net, tau, r = drawn(), Network(SPARSE), 0.2, 0.7
    net.r = r
    ours = fuse(V, net, tau, norm, iterations=7)
    U = torch.zeros(len(net), 4).double()
    A = torch.eye(5).double() + r * net.B.T @ net.B
    W = net.B @ V
    for _ in range(7):
        Z = torch.linalg.solve(A, V + net.B.T @ (r * W - U))
        relaxed = RELAXED * net.B @ Z + (1 - RELAXED) * W
        W = prox(relaxed + U / r, tau / r, norm)
        U = U + r * (relaxed - W)
    close(ours.Z, Z, 1e-10)
    close(ours.U, U, 1e-10)


# -- proximal operators ------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
def test_prox_is_the_best_of_many(norm: str) -> None:
    R, rng = drawn(6, 3, 3), np.random.default_rng(1)
    for s in (0.3, 1.0):
        W = prox(R, s, norm)

        def cost(W: Tensor, s: float = s) -> Tensor:
            return 0.5 * (W - R).square().sum(1) + s * torch.linalg.vector_norm(W, ORDER[norm], dim=1)

        for size in (1e-3, 0.1, 1.0):
            for _ in range(200):
                assert (cost(W + size * torch.from_numpy(rng.normal(size=R.shape))) >= cost(W) - 1e-12).all()
        assert (cost(torch.zeros_like(W)) >= cost(W)).all()


def test_prox_by_hand() -> None:
    r = torch.tensor([[3.0, -4.0]])
    close(prox(r, 1.0, "l1"), torch.tensor([[2.0, -3.0]]))
    close(prox(r, 1.0, "l2"), r * 0.8)
    close(prox(r, 1.0, "linf"), torch.tensor([[3.0, -3.0]]))
    close(prox(r, 3.0, "linf"), torch.tensor([[2.0, -2.0]]))
    for norm in NORMS:
        equal(prox(r, 0.0, norm), r)
        equal(prox(torch.zeros(1, 2), 1.0, norm), torch.zeros(1, 2))
        equal(prox(r, 8.0, norm).abs(), torch.zeros(1, 2))


def test_the_l1_ball() -> None:
    close(
        onto_l1_ball(torch.tensor([[0.2, -0.3], [3.0, 1.0], [1.0, -1.0]]), 1.0),
        torch.tensor([[0.2, -0.3], [1, 0], [0.5, -0.5]]),
    )


def test_a_network_knows_its_parts() -> None:
    net = Network(of_edges(7, [(5, 1), (1, 3), (2, 6)]))
    assert len(net) == 3 and net.num_components == 4
    assert net.component[[1, 3, 5]].unique().numel() == 1 and net.component[[2, 6]].unique().numel() == 1
    assert len(set(net.component[[0, 1, 2, 4]].tolist())) == 4
    x = drawn(7, 2)
    close(net.B @ x, net.differences(x))
    close(net.B.T @ (net.B @ x), net.sums(net.differences(x)))
    close(net.inverse(0.7) @ (x + 0.7 * net.B.T @ net.B @ x), x)
    path = Network(of_edges(50, [(i, i + 1) for i in range(49)]))
    assert path.num_components == 1
