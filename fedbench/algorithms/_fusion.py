"""The fused proximal step: vectors of clients are drawn to those of their neighbours, and merge with near ones.

    Z = argmin_Z  0.5 sum_i c_i ||z_i - v_i||^2 + tau sum over edges (i, j) of ||z_i - z_j||,    in norm l1, l2 or linf

B [M, N] is the signed incidence of M edges, (B Z)_m = z_i - z_j, L = B' B, and C the diagonal of the clients' weights
c_i, which are 1 where all clients take steps of one size.  pFedNet's ADMM, eqs. (8) to (10), times its step eta:
penalty r = eta rho, dual U (eta Omega), W in the place of B Z,
    Z <- (C + r L)^-1 (C V + B' (r W - U));   W <- prox_{tau / r} (B Z + U / r);   U <- U + r (B Z - W).
Departs from the paper: its eq. (9) scales by [1 - s / ||.||_q]_+ with the dual norm q for each of the norms, which is
the proximal operator of l2 alone; here each has its own.  It stops when ||B Z - W|| and r ||B' (W - W_before)|| are
small against ||V - mean V||, so that the stop does not depend on the units of Z (every 10 iterations it is looked at:
on a GPU that waits).  r begins at 1 / sqrt(l_2 l_max) of L's positive eigenvalues, the best rate of ADMM on quadratic
problems: 20 to 70 iterations where r = 1 takes 50 to 1,400 (5 to 100 clients, sparse and complete networks); it is
doubled or halved where one residual is 4 times the other, and B Z is over-relaxed, 1.6 B Z - 0.6 W (Boyd et al., 2011,
sections 3.4.1 and 3.4.3): together a quarter of the iterations, or less.
With l2 only distances matter: V is turned into the at most N dimensions that it spans, where an iteration on 100
clients and 220 edges takes 0.12 ms on a CPU, whatever d is.

Letters: N clients, M edges, d numbers of a vector.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

Norm = Literal["l1", "l2", "linf"]
EVERY = 10  # iterations from one look at the residuals to the next
RELAXED = 1.6  # in (0, 2); at 1.8 complete networks of 100 take twice the iterations, others up to 1.5 times
UNEVEN, BALANCE = 4.0, 2.0  # from which ratio of the residuals on r is changed, and by which factor


# -- proximal operators, row by row ------------------------------------------------------------------------
def prox(R: Tensor, s: float, norm: Norm) -> Tensor:
    """argmin_W 0.5 ||W - R||^2 + s sum over rows of ||W_m||, R [M, d], s >= 0.  # [M, d]"""
    if s == 0:
        return R
    if norm == "l1":
        return torch.nn.functional.softshrink(R, s)
    if norm == "l2":
        length = R.norm(dim=1, keepdim=True)  # [M, 1]
        return R * (1 - s / length).clamp_min(0)  # a length of 0 gives 0
    return R - onto_l1_ball(R, s)  # Moreau


def onto_l1_ball(R: Tensor, s: float) -> Tensor:
    """The nearest rows with sum |.| <= s > 0.  Held and Wolfe, 1974; by sorting: Duchi et al., ICML 2008.  # [M, d]"""
    size = R.abs()
    largest = size.sort(1, descending=True).values
    rank = torch.arange(1, R.shape[1] + 1, device=R.device, dtype=R.dtype)
    excess = (largest.cumsum(1) - s) / rank  # what to take off, if the first `rank` ones stay above 0  [M, d]
    stay = (largest > excess).sum(1, keepdim=True).clamp_min(1)  # [M, 1]
    shrink = excess.gather(1, stay - 1).clamp_min(0)  # 0 within the ball
    return R.sign() * (size - shrink).clamp_min(0)


def dual_norm(U: Tensor, norm: Norm) -> Tensor:
    """Of every row of U [M, d] the norm whose unit ball holds the subgradients of `norm`.  # [M]"""
    if norm == "l1":
        return U.abs().amax(1)
    return U.norm(dim=1) if norm == "l2" else U.abs().sum(1)


# -- networks ------------------------------------------------------------------------------------------------
class Network:
    """A network of clients, factored for the fused proximal step.

    Args:
        adjacency: [N, N], symmetric.
        weights: [N], c_i > 0 of the header.  Default: 1.

    Attributes:
        i, j: [M], the edges, i < j.
        values, vectors: [N] and S [N, N], with L S = C S values and S' C S = I.
        component: [N], the number of each client's connected component.
        r: Default penalty of ADMM.
    """

    def __init__(self, adjacency: Tensor, weights: Tensor | None = None):
        self.N = len(adjacency)
        self.weights = adjacency.new_ones(self.N, dtype=torch.float64) if weights is None else weights.double()
        self.i, self.j = adjacency.triu(1).nonzero().T  # [M] each
        linked = (adjacency != 0).double()
        L = linked.sum(1).diag() - linked
        scale = self.weights.rsqrt()[:, None]  # C^-1/2  [N, 1]
        self.values, vectors = torch.linalg.eigh(scale * L * scale.T)
        self.vectors = scale * vectors
        self.component = _components(linked)
        self.num_components = int(self.component.max()) + 1
        self.positive = self.values[self.num_components :]  # ascending, the others are 0
        self.r = float((self.positive[0] * self.positive[-1]) ** -0.5) if len(self.positive) else 1.0

    def __len__(self) -> int:
        return len(self.i)

    @functools.cached_property
    def B(self) -> Tensor:
        """The incidence.  # [M, N]"""
        m = torch.arange(len(self), device=self.i.device)
        B = torch.zeros(len(self), self.N, dtype=torch.float64, device=self.i.device)
        B[m, self.i], B[m, self.j] = 1, -1
        return B

    @functools.cached_property
    def incident(self) -> tuple[Tensor, Tensor, Tensor]:
        """Client by client the edges that it is an end of [2 M], their signs in B [2 M] and where they begin [N]."""
        clients = torch.cat([self.i, self.j])
        order = clients.argsort(stable=True)
        begins = clients.bincount(minlength=self.N).cumsum(0).roll(1)
        begins[0] = 0
        return order % len(self), torch.where(order < len(self), 1.0, -1.0), begins

    @functools.cached_property
    def pseudoinverse(self) -> Tensor:
        """Return a generalized inverse of L.  # [N, N]"""
        inverse = torch.cat([torch.zeros_like(self.values[: self.num_components]), 1 / self.positive])
        return (self.vectors * inverse) @ self.vectors.T

    def differences(self, Z: Tensor) -> Tensor:
        """B Z.  # [M, d]"""
        return Z.index_select(0, self.i) - Z.index_select(0, self.j)

    def sums(self, W: Tensor) -> Tensor:
        """B' W.  # [N, d]"""
        if W.is_cuda:
            return self.B.T.to(W) @ W
        edges, signs, first = self.incident  # index_add_ takes 2 to 3.5 times as long
        return embedding_bag(edges, W, first, mode="sum", per_sample_weights=signs.to(W))

    def weighted(self, V: Tensor) -> Tensor:
        """Return C V.  # [N, d]"""
        return self.weights[:, None].to(V) * V

    def inverse(self, r: float) -> Tensor:
        """Return (C + r L)^-1.  # [N, N]"""
        return self.vectors / (1 + r * self.values) @ self.vectors.T

    def means(self, V: Tensor) -> Tensor:
        """Return for each client the weighted mean of V over its connected component.  # [N, d]"""
        member = torch.nn.functional.one_hot(self.component, self.num_components).to(V)  # [N, components]
        member = self.weighted(member)
        return ((member.T @ V) / member.sum(0)[:, None])[self.component]

    def flows(self, V: Tensor) -> Tensor:
        """Return the shortest U with B' U = C (V - means of V).  # [M, d]"""
        return self.differences(self.pseudoinverse.to(V) @ self.weighted(V))


def _components(linked: Tensor) -> Tensor:
    """The number, from 0, of the connected part that each of the clients linked [N, N] is in.  # [N]"""
    reach = linked + torch.eye(len(linked)).to(linked)
    for _ in range(len(linked).bit_length()):  # paths of twice the length each time
        reach = ((reach @ reach) > 0).to(linked)
    return torch.unique(reach.argmax(1), return_inverse=True)[1]  # told apart by their first members


# -- the step ------------------------------------------------------------------------------------------------
class Fused(NamedTuple):
    """Z [N, d], the dual U [M, d] at which it ended (None: nothing was iterated, or it is not kept), and after how many
    iterations."""

    Z: Tensor
    U: Tensor | None
    iterations: int


def fuse(
    V: Tensor,
    network: Network,
    tau: float,
    norm: Norm = "l2",
    *,
    iterations: int = 200,
    tolerance: float = 1e-5,
    keep_dual: bool = True,
) -> Fused:
    """The Z of the header for V [N, d], in V's type.

    iterations: at most so many.  tolerance: of the two residuals, against ||V - mean V||.  keep_dual: whether to return
    the last dual U.
    """
    if tau == 0 or len(network) == 0 or V.shape[1] == 0:
        return Fused(V, None, 0)
    mean = network.means(V.double())
    X = (V - mean).to(V)  # from here on about the means, which the step leaves where they are
    basis = None  # orthonormal columns that span the rows of X, where those are fewer
    if norm == "l2" and len(X) < X.shape[1]:
        basis, R = torch.linalg.qr(X.T)  # [d, N], [N, N]
        X = R.T.contiguous()  # X @ basis is R'
    if (dual_norm(network.flows(X), norm) <= tau).all():  # a dual solution of Z = mean
        return Fused(mean.to(V), None, 0)
    Z, U, count = _admm(X, network, tau, norm, iterations, tolerance)
    if basis is not None:
        Z, U = Z @ basis.T, U @ basis.T if keep_dual else U
    return Fused((mean + Z).to(V), U if keep_dual else None, count)


def _admm(
    V: Tensor, network: Network, tau: float, norm: Norm, iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, int]:
    """Eqs. (8) to (10) with V fixed throughout: Z [N, d], U [M, d] and the number of iterations.

    W is prox_{tau / r} of R = B Z + U / r, so that U / r = R - W, and eqs. (8) to (10) with a relaxed B Z are
    Z <- (C + r L)^-1 (C V + r B' (2 W - R));   R <- R + RELAXED (B Z - W).
    """
    small = tolerance * float(V.norm())
    Z, r, count = V, network.r, 0  # [N, d]
    W = R = network.differences(Z)  # [M, d]
    inverse = network.inverse(r).to(V)  # [N, N]
    pull = network.weighted(V)  # [N, d]
    start = inverse @ pull  # [N, d]
    for count in range(1, iterations + 1):
        Z = torch.addmm(start, inverse, network.sums(torch.lerp(R, W, 2)), alpha=r)
        gap, before = network.differences(Z).sub_(W), W
        R = torch.add(R, gap, alpha=RELAXED)
        W = prox(R, tau / r, norm)
        if count % EVERY == 0:
            primal, dual = (gap + before - W).norm(), r * network.sums(W - before).norm()
            primal, dual = torch.stack([primal, dual]).tolist()
            if max(primal, dual) <= small:
                break
            if max(primal, dual) > UNEVEN * min(primal, dual):
                factor = BALANCE if primal > dual else 1 / BALANCE
                r, R = factor * r, W + (R - W) / factor  # U stays
                inverse = network.inverse(r).to(V)
                start = inverse @ pull
    return Z, r * (R - W), count
