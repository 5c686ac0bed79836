"""The proximal step of the network lasso: the clients' vectors are fused along the edges of a network, by ADMM.

    Z = argmin_Z  0.5 sum_i c_i ||z_i - v_i||^2 + tau sum over edges (i, j) of ||z_i - z_j||,    in norm l1, l2 or linf

B [M, N] is the signed incidence matrix of M edges, (B Z)_m = z_i - z_j, and L = B' B.  C is the diagonal matrix of the
clients' weights c_i, which are 1 if all clients have the same step size.  pFedNet's ADMM, eqs. (8) to (10), multiplied
by its step size eta, with penalty r = eta rho, dual U (eta Omega) and W replacing B Z:
    Z <- (C + r L)^-1 (C V + B' (r W - U));   W <- prox_{tau / r} (B Z + U / r);   U <- U + r (B Z - W).
Departs from the paper: its eq. (9) scales by [1 - s / ||.||_q]_+ with the dual norm q for every norm, which is the
proximal operator of l2 only.  Here every norm has its proximal operator.
ADMM stops when ||B Z - W|| and r ||B' (W - W_before)|| are small relative to ||V - mean V||, so the criterion does not
depend on the scale of Z.  It is checked every 10 iterations, because a check synchronizes with a GPU.  r starts at
1 / sqrt(l_2 l_max) of L's positive eigenvalues, the optimal penalty for quadratic problems.  It is doubled or halved if
one residual is 4 times the other, and B Z is over-relaxed, 1.6 B Z - 0.6 W (Boyd et al., 2011, sections 3.4.1 and
3.4.3).
The l2 norm is invariant under rotations, so V is first rotated into the at most N dimensions that it spans.

Letters: N clients, M edges, d entries of a vector.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

Norm = Literal["l1", "l2", "linf"]
EVERY = 10  # iterations between two checks of the residuals
RELAXED = 1.6  # over-relaxation, in (0, 2)
UNEVEN, BALANCE = 4.0, 2.0  # ratio of the residuals above which r changes, and the factor of the change


# -- proximal operators, row by row ------------------------------------------------------------------------
def prox(R: Tensor, s: float, norm: Norm) -> Tensor:
    """Apply the proximal operator of s ||.|| to every row of R: argmin_W 0.5 ||W - R||^2 + s sum_m ||W_m||.

    Args:
        R: One row for each of M edges.  # [M, d]
        s: Weight of the norm, >= 0; 0 returns R.
        norm: Norm of a row.

    Returns:
        W.  # [M, d]
    """
    if s == 0:
        return R
    if norm == "l1":
        return torch.nn.functional.softshrink(R, s)
    if norm == "l2":
        length = R.norm(dim=1, keepdim=True)  # [M, 1]
        return R * (1 - s / length).clamp_min(0)  # a length of 0 gives 0
    return R - onto_l1_ball(R, s)  # linf, whose dual ball is that of l1; by Moreau's decomposition


def onto_l1_ball(R: Tensor, s: float) -> Tensor:
    """Project the rows of R [M, d] onto the l1 ball of radius s > 0.  # [M, d]

    References:
        Held, Wolfe and Crowder, 1974; by sorting, Duchi et al., ICML 2008.
    """
    size = R.abs()
    largest = size.sort(1, descending=True).values  # absolute entries of each row, largest first  [M, d]
    rank = torch.arange(1, R.shape[1] + 1, device=R.device, dtype=R.dtype)
    threshold = (largest.cumsum(1) - s) / rank  # threshold if the `rank` largest entries stay positive  [M, d]
    positive = (largest > threshold).sum(1, keepdim=True).clamp_min(1)  # [M, 1]
    shrink = threshold.gather(1, positive - 1).clamp_min(0)  # 0 for rows within the ball
    return R.sign() * (size - shrink).clamp_min(0)


def dual_norm(U: Tensor, norm: Norm) -> Tensor:
    """Return the dual norm of each row of U [M, d]: linf for norm="l1", l2 for "l2", l1 for "linf".  # [M]"""
    if norm == "l1":
        return U.abs().amax(1)
    return U.norm(dim=1) if norm == "l2" else U.abs().sum(1)


# -- networks ------------------------------------------------------------------------------------------------
class Network:
    """N clients linked by M edges (i, j).  B [M, N]: 1 at i, -1 at j.  L = B' B.  vectors S: L S = C S diag(values).

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
        """The signed incidence matrix: row m has 1 at client i and -1 at client j of edge m = (i, j).  # [M, N]"""
        m = torch.arange(len(self), device=self.i.device)
        B = torch.zeros(len(self), self.N, dtype=torch.float64, device=self.i.device)
        B[m, self.i], B[m, self.j] = 1, -1
        return B

    @functools.cached_property
    def incident(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose of the incidence matrix B in compressed form, for sums over each client's edges.

        Returns:
            Indices of the edges of client 0, then of client 1, and so on [2 M]; the sign of each in B [2 M]; and for
            each client, where its edges begin in both [N].
        """
        clients = torch.cat([self.i, self.j])  # both ends of each edge  [2 M]
        # ends sorted by client; below M it is the end i of an edge, else its end j
        order = clients.argsort(stable=True)
        first = clients.bincount(minlength=self.N).cumsum(0).roll(1)
        first[0] = 0  # number of ends of all clients before
        return order % len(self), torch.where(order < len(self), 1.0, -1.0), first  # len(self) is M

    @functools.cached_property
    def pseudoinverse(self) -> Tensor:
        """A generalized inverse of the graph Laplacian L = B' B: its zero eigenvalues stay 0, the others are inverted.

        # [N, N]
        """
        # the first eigenvalues are 0, one for each connected component; they have no inverse
        inverse = torch.cat([torch.zeros_like(self.values[: self.num_components]), 1 / self.positive])
        return (self.vectors * inverse) @ self.vectors.T

    def differences(self, Z: Tensor) -> Tensor:
        """Return B Z: for each edge (i, j), the row z_i minus the row z_j of Z [N, d].  # [M, d]"""
        return Z.index_select(0, self.i) - Z.index_select(0, self.j)

    def sums(self, W: Tensor) -> Tensor:
        """Return B' W: for each client, the sum of the rows of W [M, d] of edges (client, j) minus that of (j, client).

        0 for a client without edges.  # [N, d]
        """
        if W.is_cuda:  # on a GPU a matrix product is faster
            return self.B.T.to(W) @ W
        # edges of client 0, then 1, ...; their signs in B; where each client's edges begin
        edges, signs, first = self.incident
        # sums the signed rows of each client's edges, on a CPU faster than index_add_
        return embedding_bag(edges, W, first, mode="sum", per_sample_weights=signs.to(W))

    def weighted(self, V: Tensor) -> Tensor:
        """Return each client's row of V [N, d] multiplied by the client's weight c_i (C V with C = diag(c_i)).

        # [N, d]
        """
        return self.weights[:, None].to(V) * V

    def inverse(self, r: float) -> Tensor:
        """Return (C + r L)^-1 for the client weights C, the graph Laplacian L and a penalty r > 0.  # [N, N]

        The columns of `vectors` S are eigenvectors with S' C S = I and S' L S = diag(`values`).
        """
        return self.vectors / (1 + r * self.values) @ self.vectors.T

    def means(self, V: Tensor) -> Tensor:
        """Return for each client the weighted mean of V [N, d] over the clients connected to it.  # [N, d]

        Two clients are connected if a path of edges leads from one to the other.
        """
        # component: number of each client's connected component  [N]
        member = torch.nn.functional.one_hot(self.component, self.num_components).to(V)  # [N, components]
        member = self.weighted(member)  # one-hot component, times the client's weight
        return ((member.T @ V) / member.sum(0)[:, None])[self.component]

    def flows(self, V: Tensor) -> Tensor:
        """Return a dual variable U for the solution in which all connected clients have their mean.

        Of all U with B' U = C (V - means of V), it is the one of minimal norm.  B [M, N] is the incidence matrix of the
        M edges, C the diagonal matrix of the clients' weights, and the means are over connected clients.

        Args:
            V: The clients' vectors.  # [N, d]

        Returns:
            U, one row per edge.  # [M, d]
        """
        # U = B L^+ C V with the Laplacian L = B' B; L^+ maps means of connected clients to 0, so they can be left out
        return self.differences(self.pseudoinverse.to(V) @ self.weighted(V))


def _components(linked: Tensor) -> Tensor:
    """Return the number of each client's connected component, counted from 0.

    Args:
        linked: Adjacency matrix of the clients, 1 for an edge and else 0.  # [N, N]

    Returns:
        The numbers; equal for clients that a path connects.  # [N]
    """
    reach = linked + torch.eye(len(linked)).to(linked)  # whether a path leads from i to j  [N, N]
    for _ in range(len(linked).bit_length()):  # the length of paths doubles each time
        reach = ((reach @ reach) > 0).to(linked)
    return torch.unique(reach.argmax(1), return_inverse=True)[1]  # a component is identified by its first member


# -- the step ------------------------------------------------------------------------------------------------
class Fused(NamedTuple):
    """Solution of the proximal step.

    Attributes:
        Z: The fused vectors, [N, d].
        U: Last dual variable, [M, d]; None without iterations or with keep_dual=False.
        iterations: Number of iterations.
    """

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
    """Fuse the clients' vectors along the edges of a network, so that linked clients become similar or equal.

    It returns argmin_Z 0.5 sum_i c_i |z_i - v_i|^2 + tau sum over edges (i, j) of |z_i - z_j|, by ADMM.

    Args:
        V: The clients' vectors.  # [N, d]
        network: The network.
        tau: Weight of the penalty, >= 0.
        norm: Norm of the penalty.
        iterations: Maximum number of iterations.
        tolerance: Maximum of both residuals, relative to ||V - mean V||.
        keep_dual: Whether to return the last dual U.

    Returns:
        Z in V's type [N, d], the dual U [M, d] for M edges, and the number of iterations.  The dual is None if it is
        not kept, or if no iteration was needed.
    """
    if tau == 0 or len(network) == 0 or V.shape[1] == 0:  # len(network): number of edges
        return Fused(V, U=None, iterations=0)
    mean = network.means(V.double())
    X = (V - mean).to(V)  # centered: the step does not change the means
    basis = None  # orthonormal basis of the span of X's rows if N < d, as the l2 norm permits to compute in this basis
    if norm == "l2" and len(X) < X.shape[1]:
        basis, R = torch.linalg.qr(X.T)  # [d, N], [N, N]
        X = R.T.contiguous()  # the rows of X in this basis  [N, N]
    # Z = mean is the solution if it has a dual variable, such as flows(X), whose rows have dual norms of at most tau
    if (dual_norm(network.flows(X), norm) <= tau).all():
        return Fused(mean.to(V), U=None, iterations=0)
    Z, U, count = _admm(X, network, tau, norm, iterations, tolerance)
    if basis is not None:
        Z, U = Z @ basis.T, U @ basis.T if keep_dual else U
    return Fused((mean + Z).to(V), U if keep_dual else None, count)


def _admm(
    V: Tensor, network: Network, tau: float, norm: Norm, iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, int]:
    """Minimize 0.5 sum_i c_i |z_i - v_i|^2 + tau sum over edges |z_i - z_j| over Z, by ADMM.

    B [M, N] is the signed incidence matrix of the edges, L = B' B, and C the diagonal matrix of the client weights c_i.
    W [M, d] stands for B Z, with dual U and penalty r.  With R = B Z + U / r, an iteration is
    Z <- (C + r L)^-1 (C V + r B' (2 W - R));   R <- R + RELAXED (B Z - W);   W <- prox_{tau / r} (R).
    RELAXED = 1.6 is the factor of over-relaxation.
    The primal residual is B Z - W, and the dual one r B' (W - W of the iteration before).

    Args:
        V: The clients' vectors, centered in each component.  # [N, d]
        network: The network.
        tau: Weight of the penalty, > 0.
        norm: Norm of the penalty.
        iterations: Maximum number of iterations.
        tolerance: Maximum of both residuals, relative to ||V||.

    Returns:
        Z [N, d], the dual U [M, d] and the number of iterations.
    """
    max_residual = tolerance * float(V.norm())
    Z, r, count = V, network.r, 0  # [N, d]; network.r: first value of the penalty r
    W = R = network.differences(Z)  # [M, d]
    inverse = network.inverse(r).to(V)  # [N, N]
    pull = network.weighted(V)  # C V  [N, d]
    start = inverse @ pull  # the part of Z that only r changes  [N, d]
    for count in range(1, iterations + 1):
        Z = torch.addmm(start, inverse, network.sums(torch.lerp(R, W, 2)), alpha=r)  # lerp: 2 W - R
        gap, before = network.differences(Z).sub_(W), W  # gap: B Z - W
        R = torch.add(R, gap, alpha=RELAXED)
        W = prox(R, tau / r, norm)
        if count % EVERY == 0:  # every 10th iteration, because a check synchronizes with a GPU
            primal, dual = (gap + before - W).norm(), r * network.sums(W - before).norm()
            primal, dual = torch.stack([primal, dual]).tolist()
            if max(primal, dual) <= max_residual:
                break
            # one residual is more than UNEVEN = 4 times the other: multiply or divide the penalty r by BALANCE = 2
            if max(primal, dual) > UNEVEN * min(primal, dual):
                factor = BALANCE if primal > dual else 1 / BALANCE
                r, R = factor * r, W + (R - W) / factor  # U is unchanged
                inverse = network.inverse(r).to(V)
                start = inverse @ pull
    return Z, r * (R - W), count
