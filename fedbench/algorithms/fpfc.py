"""FPFC: clustered federated learning by a concave fusion penalty on all pairs of client models.

Yu et al., "Clustered Federated Learning Based on Nonconvex Pairwise Fusion", 2022, Algorithm 1, for
sum_i f_i(w_i) + sum_{i<j} P_a(||w_i - w_j||; lam), P_a being SCAD, by ADMM with theta_ij for w_i - w_j and duals v_ij.
zeta_i = (1/N) sum_j (w_j + theta_ij - v_ij/rho);  client i: local steps on f_i(w) + rho/2 ||w - zeta_i||^2 from w_i;
then for every pair with a client of the cohort, delta = w_i - w_j + v_ij/rho:
theta_ij <- s delta, v_ij <- v_ij + rho (w_i - w_j - theta_ij) = rho (1 - s) delta,  s by SCAD of ||delta|| (`scad`).
theta and v are multiples of delta, so only delta and s are stored for a pair.  While all pairs have the same s in every
round (all within xi + lam/rho, or lam = 0), delta_ij = D_i - D_j with D_i <- (1 - s) D_i + w_i, which takes N vectors.
Departs from the paper: local SGD by epochs of batches; norms are over the trained columns; running statistics are
personal.  merge is the last step of the released code, a mean weighted by samples (client_weights=uniform: uniform).
Departs from the released code: each pair is updated once per round.  There, two loops visit a pair of two sampled
clients twice, the second time with the updated dual.  With merge, clusters are the connected components of pairs within
the radius.  There, they are each client's direct neighbours within less than merge, and may overlap.
Reduces to: Local with a pull to the client's last upload at lam = 0, where clients do not affect each other.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.core.memory import size_text
from fedbench.core.options import NonNegative, Positive, require
from fedbench.core.rows import free_memory


class FPFC(Algorithm):
    """FPFC.  W: last uploads w_i; theta_ij = s_ij delta_ij, near w_i - w_j; M = N (N - 1) / 2 pairs (0, 1), (0, 2) ..

    Args:
        lam: Weight of the penalty, >= 0; at 0 clients are independent.
        rho: Penalty parameter of ADMM and weight of the pull towards zeta_i, > 0.
        a: SCAD is constant beyond a lam; > 1 + 1 / rho.
        xi: Radius within which SCAD is smoothed by a quadratic, > 0 and at most lam.
        merge: Radius of ||theta_ij|| within which clients deploy their cluster's mean after the last round; None
            deploys their personal models.

    State:
        personal: Client models, [N, P].
        W: Trained columns of the last uploads, [N, p].
        n: Client weights in the mean of a cluster, [N].
        s: Factors of the pairs, theta = s delta, [M].
        delta: delta of the pairs, [M, p]; while all pairs have one s, D minus its mean, [N, p], if this is smaller.
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
            f"algorithm.a={a:g} must be more than 1 + 1 / algorithm.rho = {1 + 1 / rho:g}, because the penalty SCAD "
            "has no unique minimum otherwise: raise algorithm.a or algorithm.rho",
        )
        require(
            lam == 0 or 0 < xi <= lam,
            f"algorithm.xi={xi:g} must be positive and at most algorithm.lam={lam:g}: set it to such a number, for "
            "example 0.0001, or set algorithm.lam=0",
        )
        self.lam, self.rho, self.a, self.xi, self.merge = lam, rho, a, xi, merge
        self.fine_tunes_after_training = merge is not None

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the device has enough free memory for one parameter vector per pair of clients."""
        super().check(federation, model, optimizer)
        n, p, free = federation.num_clients, model.trained.size, free_memory(federation.device)
        # Bytes of float32.  The n (n - 1) / 2 pairs count twice, because a round computes new ones beside the old.
        # About four vectors per client are needed besides, such as uploads and zeta.
        need = 4 * p * (n * (n - 1) + 4 * n)
        require(
            need <= free,
            f"algorithm=fpfc stores a vector for each pair of clients: {n * (n - 1) // 2:,} pairs of {p:,} numbers "
            f"take {size_text(need)}, but {federation.device} has {size_text(free)} free. Lower "
            "partition.num_clients, or choose a smaller model or an adapter",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the clients' models [N, P] to the initial model, so the difference of every pair is 0.

        `rows` stores the models.
        """
        # columns: without running statistics
        w, n, self.columns = model.init_row(), federation.num_clients, model.trained
        self.personal = rows("own", default=w)  # [N, P]; a row equals the default until it is set
        self.W = self.columns.take(w).repeat(n, 1)  # last uploads  [N, p]
        # client weights in cluster means; with merge, `round` replaces them
        self.n: np.ndarray | Tensor = federation.num_samples
        self.s = w.new_ones(n * (n - 1) // 2)  # factor of each pair, whose difference is s delta  [M]
        # delta of the pairs [M, p]; while all pairs have one s, a vector per client suffices [N, p]
        self.delta = w.new_zeros(min(n, len(self.s)), self.W.shape[1])

    def round(self, cohort: Cohort) -> None:
        """Run one round of FPFC: clients train towards zeta_i and upload; the server updates their pairs.

        zeta_i is the mean of all models, corrected by the pairs' variables: clients of a cluster get nearly the same.
        """
        if self.merge is not None:  # after the last round, clients deploy their cluster's mean, weighted by n
            self.n = torch.from_numpy(cohort.all_clients().client_weights)
            cohort.cost.takes_means = True  # tells the run that the option client_weights has an effect
        zeta = cohort.download(zeta=self.zeta()[cohort.index]).zeta  # [K, p]
        columns, rho = self.columns, self.rho

        def pull(s: Step) -> Tensor:
            """Return the gradient of rho/2 ||w - zeta_i||^2 at the model w = s.theta; 0 for running statistics.

            # [k, P]
            """
            return columns.put(torch.zeros_like(s.theta), rho * (columns.take(s.theta) - s.state.zeta))

        out = cohort.train(self.personal[cohort.ids], extra_grad=pull, zeta=zeta)
        self.personal[cohort.ids] = out.theta
        w = cohort.upload(w=columns.take(out.theta), previous={"w": self.W[cohort.index]}).w  # its change is sent
        self.W = self.W.index_copy(0, cohort.index, w)  # cohort.index: the clients' ids as a tensor
        self.fuse(cohort.ids)  # updates the variables of all pairs with one of these clients

    def zeta(self) -> Tensor:
        """Return zeta_i, towards which client i trains: (1/N) sum_j (w_j + theta_ij - v_ij/rho).

        theta_ij stands for w_i - w_j, and v_ij is its dual variable.  Both are multiples of the stored delta_ij, so
        that theta_ij - v_ij/rho = (2 s_ij - 1) delta_ij.

        Returns:
            zeta of all clients.  # [N, p]
        """
        if self.lam == 0:
            return self.W  # zeta_i = w_i up to rounding, and exactly independent of other clients
        if self.one_s:  # s_ij is the same for all pairs, and delta stores D with delta_ij = D_i - D_j
            return self.W.mean(0) + (2 * self.s[0] - 1) * self.delta
        total, c = torch.zeros_like(self.W), 2 * self.s - 1  # c: factor of delta in theta_ij - v_ij/rho  [M]
        for i, later, at in self.pairs():  # pairs (i, j) for all j > i in `later`; `at`: their positions among all M
            total[i] += c[at] @ self.delta[at]
            total[later].addcmul_(self.delta[at], c[at, None], value=-1)  # theta_ji = -theta_ij
        return self.W.mean(0) + total / len(self.W)

    def fuse(self, ids: np.ndarray) -> None:
        """Update delta and s of every pair of clients that contains at least one of this round.

        Args:
            ids: The clients of this round.  # [K]
        """
        if self.one_s and len(ids) == len(self.W):  # all clients take part, and all pairs have the same s
            # self.delta then is D, from which delta_ij = D_i - D_j; its mean does not matter.  The update is
            # delta_ij <- W_i - W_j + (1 - s) delta_ij
            D = (1 - self.s[0]) * self.delta + self.W - self.W.mean(0)  # [N, p]
            s = self.scad(torch.pdist(D))  # from the norms of delta_ij  [M]
            if bool(s.min() == s.max()):  # all pairs still have the same s
                self.delta, self.s = D, s
                return
        # all_pairs: delta of each pair, computed from D if all have the same s
        self.delta, self.s = self.fuse_pairs(ids, self.all_pairs(), self.s)

    def fuse_pairs(self, ids: np.ndarray, delta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return delta and s after the update of all pairs that contain at least one of these clients.

        For the last uploads W and the dual v_ij, delta_ij = W_i - W_j + v_ij/rho, where v_ij = rho (1 - s) delta_ij
        before the update.  s depends on the norm of delta.  Pairs are updated client by client, because the pairs of
        one client stay in the processor's cache.

        Args:
            ids: The clients of this round.
            delta: delta of all pairs before.  # [M, p]
            s: Factors of all pairs before.  # [M]

        Returns:
            The new delta [M, p] and s [M]; pairs without any of these clients are unchanged.
        """
        new = torch.empty_like(delta) if len(ids) == len(self.W) else delta.clone()
        dual, length = (1 - s)[:, None], torch.full_like(s, -1)  # v_ij = rho dual delta; -1: pair is not updated
        for i, later, at in self.pairs(ids):  # pairs (i, j) for all j in `later`; `at`: their positions among all M
            target = new[at]  # [m, p]: a view of consecutive pairs, else a copy
            length[at] = torch.sub(self.W[i], self.W[later], out=target).addcmul_(delta[at], dual[at]).norm(dim=1)
            if not isinstance(at, slice):
                new[at] = target
        return new, torch.where(length < 0, s, self.scad(length))  # scad: the new s, by the SCAD penalty

    @property
    def one_s(self) -> bool:
        """Whether `delta` has one vector per client, instead of one per pair of clients (i, j).

        It has if the factors s_ij of all pairs are equal, and there are more pairs than clients.
        """
        return len(self.delta) < len(self.s)

    def all_pairs(self) -> Tensor:
        """Return delta_ij = w_i - w_j + v_ij / rho of all M pairs (i, j) of clients, i < j.  # [M, p]

        It is stored for each pair, or as one vector D_i for each client, with delta_ij = D_i - D_j.
        """
        if not self.one_s:  # pairs have different factors s, and delta is stored for each pair
            return self.delta
        delta = self.W.new_empty(len(self.s), self.W.shape[1])
        for i, later, at in self.pairs():  # pairs (i, j) for all j > i in `later`; `at`: their positions among all M
            torch.sub(self.delta[i], self.delta[later], out=delta[at])
        return delta

    def scad(self, n: Tensor) -> Tensor:
        """Return s such that theta = s delta minimizes rho/2 ||theta - delta||^2 + P_a(||theta||), with n = ||delta||.

        P_a is the SCAD penalty of weight lam and shape a, smoothed by a quadratic for ||theta|| <= xi.  This is its
        proximal operator (Yu et al., 2022).

        Args:
            n: Norms of delta.  # [M]

        Returns:
            Factors of the pairs, in [0, 1].  # [M]
        """
        lam, rho, a, xi = self.lam, self.rho, self.a, self.xi
        if lam == 0:
            return torch.ones_like(n)
        smoothed = torch.full_like(n, xi * rho / (lam + xi * rho))  # s if ||theta|| is within xi
        soft = 1 - lam / (rho * n)  # s if ||theta|| is at most lam: the linear part of SCAD
        # s between lam and a lam: the concave part
        beyond = (1 - a * lam / ((a - 1) * rho * n)).clamp_min(0) / (1 - 1 / ((a - 1) * rho))
        s = torch.where(n <= xi + lam / rho, smoothed, torch.where(n <= lam + lam / rho, soft, beyond))
        return torch.where(n > a * lam, 1.0, s)  # SCAD is constant beyond a lam, and theta = delta

    def pairs(self, ids: np.ndarray | None = None) -> Iterator[tuple[int, Any, Any]]:
        """Iterate over the pairs (i, j), client by client.

        Args:
            ids: Iterate only over pairs with at least one of these clients; None: over all pairs.

        Yields:
            i, the indices of the clients j > i, and the positions of these pairs among all M.  Both are slices
            if i is one of `ids`, and tensors if only some j are.
        """
        n, first = len(self.W), 0  # first: position of the pair (i, i + 1)
        subset = None if ids is None or len(ids) == n else torch.from_numpy(ids).to(self.W.device)  # None: all
        members = set(range(n)) if subset is None or ids is None else set(ids.tolist())
        for i in range(n - 1):
            if i in members:
                yield i, slice(i + 1, n), slice(first, first + n - 1 - i)
            elif subset is not None and bool((later := subset[subset > i]).numel()):
                yield i, later, first + later - i - 1
            first += n - 1 - i

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: w_i, or after the last round with merge the cluster's mean.

        # [K, P]
        """
        rows = self.personal[cohort.ids]
        if self.merge is None or not final:
            return rows
        label = self.clusters(self.merge)  # number of each client's cluster, for this radius  [N]
        means = self.means(label)[label[cohort.index]]  # of each client's cluster  [K, p]
        return self.columns.put(rows, cohort.download(w=means).w)  # download: each client gets its row

    def clusters(self, radius: float) -> Tensor:
        """Return the number of each client's cluster.

        Clusters are the connected components of the pairs with ||theta_ij|| <= radius.

        Args:
            radius: Largest distance of a pair that belongs to the same cluster.

        Returns:
            Numbers from 0.  # [N]
        """
        n = len(self.W)
        # norms of delta_ij [M]: stored for each pair, or as D of each client with delta_ij = D_i - D_j
        lengths = torch.pdist(self.delta) if self.one_s else self.delta.norm(dim=1)
        joined = np.zeros((n, n), dtype=bool)
        joined[np.triu_indices(n, 1)] = (self.s * lengths <= radius).cpu().numpy()  # ||theta|| = s ||delta||
        _, labels = connected_components(joined, directed=False)
        return torch.from_numpy(labels).long().to(self.W.device)

    def means(self, label: Tensor) -> Tensor:
        """Return the mean of the last uploads of every cluster, weighted by the client weights n [N].

        Args:
            label: Cluster of each client, counted from 0.  # [N]

        Returns:
            The means.  # [clusters, p]
        """
        n, clusters = torch.as_tensor(self.n).to(self.W), int(label.max()) + 1
        sums = self.W.new_zeros(clusters, self.W.shape[1]).index_add(0, label, self.W * n[:, None])
        return sums / n.new_zeros(clusters).index_add(0, label, n)[:, None]

    def initial_row_for_new_clients(self, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the model of new clients without samples: the unweighted mean of all N clients' last uploads.  # [P]

        Running statistics have their initial values.  `cohorts`, the training clients, is not used.
        """
        return self.columns.put(self.personal.default, self.W.mean(0))

    def initial_rows_for_new_clients(self, new_clients: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """Return for each new client the cluster mean with the lowest loss on its training samples.

        Without algorithm.merge, clusters are the connected pairs within algorithm.xi.

        Args:
            new_clients: n clients that took no part in training.
            cohorts: Unused.

        Returns:
            The models.  # [n, P]
        """
        means = self.means(self.clusters(self.xi if self.merge is None else self.merge))
        rows = self.columns.put(self.personal.default.expand(len(means), -1), means)  # [clusters, P]
        losses = torch.stack([new_clients.loss(row) for row in rows], 1)  # [n, clusters]
        return rows[losses.argmin(1)]
