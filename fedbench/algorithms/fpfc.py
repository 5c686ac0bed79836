"""FPFC: every two clients' models are pulled together by a concave penalty, which vanishes for distant models.

Yu et al., "Clustered Federated Learning Based on Nonconvex Pairwise Fusion", 2022, Algorithm 1, for
sum_i f_i(w_i) + sum_{i<j} P_a(||w_i - w_j||; lam), P_a being SCAD, by ADMM with theta_ij for w_i - w_j and duals v_ij.
zeta_i = (1/N) sum_j (w_j + theta_ij - v_ij/rho);  client i: local steps on f_i(w) + rho/2 ||w - zeta_i||^2 from w_i;
then for every pair with a client of the cohort, delta = w_i - w_j + v_ij/rho:
theta_ij <- s delta, v_ij <- v_ij + rho (w_i - w_j - theta_ij) = rho (1 - s) delta,  s by SCAD of ||delta|| (`scad`).
So a pair is kept as delta and s alone, theta and v being multiples of one vector.  While all pairs have had one s in
every round (all within xi + lam/rho, or lam = 0) delta_ij = D_i - D_j, D_i <- (1 - s) D_i + w_i: N vectors.
Departs from the paper: local SGD by epochs of batches; norms are over the trained columns, and running statistics stay
with the client.  merge is the released code's last step, a mean weighted by samples (client_weights=uniform: plain).
Departs from the released code: each pair is updated once a round.  Its two loops visit a pair of two sampled clients
twice, the second time from the dual of the first.  With merge, clusters are the connected components of near pairs.
The code takes each client's direct neighbours, within less than merge, so that its clusters may overlap.
Reduces to: Local with a pull to the client's last upload at lam = 0, where no client's data affect other rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.core.options import NonNegative, Positive, require
from fedbench.core.rows import memory


class FPFC(Algorithm):
    """lam, rho, a, xi, merge: see the header and the YAML.

    State: own [N, P], the models of clients.  On the server: W [N, p], the last uploads; n [N], each client's weight in
    a cluster's mean; and for all M = N (N - 1) / 2 pairs i < j, in the order (0, 1), (0, 2) ... (1, 2) ..., s [M] and
    delta [M, p].  While all pairs have one s, D [N, p] without its mean replaces delta if that is smaller.
    """

    def __init__(
        self,
        lam: NonNegative = 0.6,
        rho: Positive = 1.0,
        a: Positive = 3.7,
        xi: NonNegative = 1e-4,
        merge: NonNegative | None = None,
    ):
        require(
            a > 1 + 1 / rho,
            f"algorithm.a={a:g} must be more than 1 + 1 / rho = {1 + 1 / rho:g}: SCAD would have no single minimum",
        )
        require(lam == 0 or 0 < xi <= lam, f"algorithm.xi={xi:g} must be positive and at most algorithm.lam={lam:g}")
        self.lam, self.rho, self.a, self.xi, self.merge = lam, rho, a, xi, merge
        self.tuned_at_end = merge is not None

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Memory for all pairs of clients."""
        super().check(federation, model, optimizer)
        n, p, have = federation.num_clients, model.trained.size, memory(federation.device)
        need = 4 * p * (n * (n - 1) + 4 * n)  # the pairs twice, as a round makes them anew
        require(
            need <= have,
            f"algorithm=fpfc holds a vector for every two clients: {n * (n - 1) // 2:,} pairs of {p:,} numbers take "
            f"{need / 2**30:,.1f} GiB and {federation.device} has {have / 2**30:,.1f} GiB; lower "
            "partition.num_clients or take a smaller model or an adapter",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All start from one model, so that every delta is 0."""
        w, n, self.columns = model.init_row(), federation.num_clients, model.trained
        self.own = rows("own", default=w)  # lazy [N, P]
        self.W = self.columns.take(w).repeat(n, 1)  # [N, p]
        self.n: np.ndarray | Tensor = federation.num_samples
        self.s = w.new_ones(n * (n - 1) // 2)  # [M]
        self.delta = w.new_zeros(min(n, len(self.s)), self.W.shape[1])  # D [N, p], or [M, p]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        if self.merge is not None:
            self.n = torch.from_numpy(cohort.all_clients().client_weights)
            cohort.cost.takes_means = True  # of clusters, in `personalized`
        zeta = cohort.download(zeta=self.zeta()[cohort.index]).zeta  # [K, p]
        columns, rho = self.columns, self.rho

        def pull(s: Step) -> Tensor:
            """rho (w - zeta_i).  # [k, P]"""
            return columns.put(torch.zeros_like(s.theta), rho * (columns.take(s.theta) - s.state.zeta))

        out = cohort.train(self.own[cohort.ids], extra_grad=pull, zeta=zeta)
        self.own[cohort.ids] = out.theta
        known = self.W[cohort.index]
        w = cohort.upload(w=columns.take(out.theta), replaces={"w": known}).w
        self.W = self.W.index_copy(0, cohort.index, w)
        self.fuse(cohort.ids)

    def zeta(self) -> Tensor:
        """zeta_i = (1/N) sum_j (w_j + theta_ij - v_ij/rho), theta_ij - v_ij/rho being (2 s - 1) delta.  # [N, p]"""
        if self.lam == 0:
            return self.W  # up to rounding it is, and nobody's rounding shall be another's
        if self.one_s:
            return self.W.mean(0) + (2 * self.s[0] - 1) * self.delta
        total, c = torch.zeros_like(self.W), 2 * self.s - 1
        for i, later, at in self.pairs():
            total[i] += c[at] @ self.delta[at]
            total[later].addcmul_(self.delta[at], c[at, None], value=-1)  # theta_ji = -theta_ij
        return self.W.mean(0) + total / len(self.W)

    def fuse(self, ids: np.ndarray) -> None:
        """delta, theta and v of every pair with one of these clients."""
        if self.one_s and len(ids) == len(self.W):
            D = (1 - self.s[0]) * self.delta + self.W - self.W.mean(0)  # [N, p]
            s = self.scad(torch.pdist(D))  # [M]
            if bool(s.min() == s.max()):
                self.delta, self.s = D, s
                return
        self.delta, self.s = self.fuse_pairs(ids, self.all_pairs(), self.s)

    def fuse_pairs(self, ids: np.ndarray, delta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """delta [M, p] and s [M] after the update of pairs with one of these clients.

        A client's pairs at a time, which stay in the cache: 100 clients have 4,950 vectors, and each is read once and
        written once.
        """
        new = torch.empty_like(delta) if len(ids) == len(self.W) else delta.clone()
        kept, n = (1 - s)[:, None], torch.full_like(s, -1)  # v_ij = rho kept delta; -1: nobody of these
        for i, later, at in self.pairs(ids):
            place = new[at]  # [m, p]: a view of consecutive pairs, else a copy
            n[at] = torch.sub(self.W[i], self.W[later], out=place).addcmul_(delta[at], kept[at]).norm(dim=1)
            if not isinstance(at, slice):
                new[at] = place
        return new, torch.where(n < 0, s, self.scad(n))

    @property
    def one_s(self) -> bool:
        """Whether delta is D."""
        return len(self.delta) < len(self.s)

    def all_pairs(self) -> Tensor:
        """delta of all pairs.  # [M, p]"""
        if not self.one_s:
            return self.delta
        delta = self.W.new_empty(len(self.s), self.W.shape[1])
        for i, later, at in self.pairs():
            torch.sub(self.delta[i], self.delta[later], out=delta[at])
        return delta

    def scad(self, n: Tensor) -> Tensor:
        """s of theta = s delta, which minimizes rho/2 ||theta - delta||^2 + P_a(||theta||), for norms n of delta."""
        lam, rho, a, xi = self.lam, self.rho, self.a, self.xi
        if lam == 0:
            return torch.ones_like(n)
        smoothed = torch.full_like(n, xi * rho / (lam + xi * rho))
        soft = 1 - lam / (rho * n)
        beyond = (1 - a * lam / ((a - 1) * rho * n)).clamp_min(0) / (1 - 1 / ((a - 1) * rho))
        s = torch.where(n <= xi + lam / rho, smoothed, torch.where(n <= lam + lam / rho, soft, beyond))
        return torch.where(n > a * lam, 1.0, s)

    def pairs(self, ids: np.ndarray | None = None) -> Iterator[tuple[int, Any, Any]]:
        """For every i the later j, and where the pairs (i, j) stand; ids: pairs with one of these clients alone."""
        n, first = len(self.W), 0
        some = None if ids is None or len(ids) == n else torch.from_numpy(ids).to(self.W.device)
        chosen = set(range(n)) if some is None or ids is None else set(ids.tolist())
        for i in range(n - 1):
            if i in chosen:
                yield i, slice(i + 1, n), slice(first, first + n - 1 - i)
            elif some is not None and bool((later := some[some > i]).numel()):
                yield i, later, first + later - i - 1
            first += n - 1 - i

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w_i; with merge, after the last round, the mean of its cluster."""
        own = self.own[cohort.ids]
        if self.merge is None or not final:
            return own
        label = self.clusters(self.merge)
        means = self.means(label)[label[cohort.index]]
        return self.columns.put(own, cohort.download(w=means).w)

    def clusters(self, radius: float) -> Tensor:
        """Each client's cluster, those whom a path of pairs with ||theta_ij|| <= radius joins.  # [N]"""
        n = len(self.W)
        lengths = torch.pdist(self.delta) if self.one_s else self.delta.norm(dim=1)  # of delta  [M]
        joined = np.zeros((n, n), dtype=bool)
        joined[np.triu_indices(n, 1)] = (self.s * lengths <= radius).cpu().numpy()
        return torch.from_numpy(connected_components(joined, directed=False)[1]).long().to(self.W.device)

    def means(self, label: Tensor) -> Tensor:
        """Return the mean model of every cluster, weighted by n.  # [clusters, p]"""
        n, clusters = torch.as_tensor(self.n).to(self.W), int(label.max()) + 1
        sums = self.W.new_zeros(clusters, self.W.shape[1]).index_add(0, label, self.W * n[:, None])
        return sums / n.new_zeros(clusters).index_add(0, label, n)[:, None]

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        """The mean of all models, for one that cannot choose."""
        return self.columns.put(self.own.default, self.W.mean(0))

    def newcomer_rows(self, newcomers: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """The mean model of the cluster that has the least loss on a new client's own samples.  # [n, P]"""
        means = self.means(self.clusters(self.xi if self.merge is None else self.merge))
        rows = self.columns.put(self.own.default.expand(len(means), -1), means)  # [clusters, P]
        losses = torch.stack([newcomers.loss(row) for row in rows], 1)  # [n, clusters]
        return rows[losses.argmin(1)]
