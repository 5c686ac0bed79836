"""pFedNet: shared parameters x, and personal parameters z_i that are fused between similar clients.

"Medical Federated Model with Mixture of Personalized and Shared Components", Algorithms 1 to 5, for
    min  1/N sum_i f_i(x, z_i) + lam sum over edges (i, j) of ||z_i - z_j||      (not squared: neighbours become equal)
on a network of similar clients (_similarity.py).  A round has two phases.  In the x-phase clients train x from x_t with
z_i fixed and upload dx_i = x_t - x_i: x_{t+1} = x_t - sum_i w_i dx_i.  In the z-phase they train z_i with x fixed and
upload dz_i.  The server solves (_fusion.py)
    Z_{t+1} = argmin_Z  sum_i ||z_i - v_i||^2 / (2 eta_i) + N lam sum ||z_i - z_j||,   V = Z_t - dZ
and sends each client its z_i.  Deployed: (x, z_i).
eta_i is the effective step size of client i's round: the sum of its learning rates, each multiplied by the momentum sum
1 + m + m^2 + ... up to that step.  A constant gradient would move z_i by eta_i times the gradient.  So lam balances the
penalty and f_i for any number of local steps: exactly for one step, approximately for more, if the gradient changes
little within a round.  Adam normalizes gradients, so lam balances the penalty and normalized gradients.
Departs from the paper: mode="local_epochs" trains for epochs, as its released code ("weight"), with w_i = n_i / sum n
(client_weights=uniform: the paper's 1/N).  mode="gradient" takes single gradients, as the paper, always with uniform
weights.
z_step="paper" has V = Z_t - dZ / N and lam instead of N lam, which makes z N times slower.  The default is that step
with learning rates N eta_i.  z_step="single" is the default with one eta for all, the rate of a single local step, so
lam counts as lam / (local steps).  If only K clients take part, the others have dz_i = 0, and the penalty still moves
their z_i.  lam is then scaled by K / N, because a client's gradient arrives in this fraction of the rounds.
Departs from the released code: it overwrites Z_t by Z inside ADMM.  In its tables, an edge exists only if the lower of
two clients lists the other.  Its values of lam are 72, 1 and 5.
Only trained columns of z are fused and uploaded.  Running statistics in z are personal; those in x are averaged.
Reduces to: FedRep with the phases swapped at lam = 0; FedAvg if z is empty; network lasso if x is empty (no x-phase).
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms import _similarity as similarity
from fedbench.algorithms._fusion import Network, Norm, fuse
from fedbench.algorithms._similarity import Metric, Sketch
from fedbench.algorithms.base import (
    Algorithm,
    Cohort,
    Columns,
    Federation,
    FlatModel,
    LocalTraining,
    Optimizer,
    RowStore,
)
from fedbench.core.memory import size_text
from fedbench.core.options import Count, NonNegative, NonNegativeInt, require
from fedbench.core.rows import free_memory

MAX_SDWD = 1001  # maximum number of SDWD values recorded in matrices.npz
ALL_COLUMNS = "all"  # value of `personal`


class PFedNet(Algorithm):
    """pFedNet.  x: the d1 shared parameters; z_i: the d2 personal parameters of client i; Z [N, d2]: all z_i.

    Args:
        lam: Weight of the sum over edges of ||z_i - z_j||, >= 0.
        personal: Column group of z, or "all".
        norm: Norm of z_i - z_j: "l1", "l2" or "linf".
        mode: "local_epochs", or "gradient" as in the paper's Algorithms 1 to 5.
        x_steps: Number of x-steps in a round of mode="gradient"; None is 1.
        z_steps: Number of z-steps in a round of mode="gradient"; None is 1.
        z_step: Scale of the z-step: "full", "paper" or "single"; None is "paper" with mode="gradient", else "full".
        k: Number of nearest clients to which a client is linked.
        sketch: What is compared to find the nearest clients; None is chosen by the task.
        samples: Maximum number of samples in a sketch; None uses all.
        edges: Pairs of linked clients; an empty list links the nearest clients.

    State:
        x: Shared parameters, [d1].
        Z: Trained personal parameters at the server, [N, d2].
        adjacency: The network, [N, N] bool.
        sketch_of: Uploaded sketches, [N, q] (if edges is empty).
        iterations: ADMM iterations of the last z-step, [1].
        holds: Which clients have the newest x and z_i, [N] bool.
        x_sent: x as these clients received it, [d1].
        z: Personal parameters and running statistics of the clients, [N, |z|].
    """

    def __init__(
        self,
        lam: NonNegative = 0.01,
        personal: str = "head",
        norm: Norm = "l2",
        mode: Literal["local_epochs", "gradient"] = "local_epochs",
        x_steps: Count | None = None,
        z_steps: Count | None = None,
        z_step: Literal["full", "paper", "single"] | None = None,
        k: Count = 3,
        sketch: Sketch | None = None,
        samples: Count | None = 64,
        edges: Sequence[Sequence[NonNegativeInt]] = (),
    ):
        self.lam, self.personal, self.mode = lam, personal, mode
        self.norm: Norm = norm
        self.x_steps, self.z_steps = x_steps, z_steps
        self.z_step = z_step or ("full" if mode == "local_epochs" else "paper")
        self.k, self.samples = k, samples
        self.edges = [list(edge) for edge in edges]
        self.sketch: Sketch | None = sketch
        self.requires = () if personal == ALL_COLUMNS else (personal,)
        self._network: Network | None = None

    # -- checks and setup ----------------------------------------------------------------------------------
    def check_settings(self, num_clients: int | None, groups: Any, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the options fit the mode and the edges are pairs of clients.

        Args:
            num_clients: Number of training clients; None if only the data set determines it.
            groups: Names of the model's sets of parameters (columns of a row), such as "head".
            optimizer: The local optimizer; plain SGD for mode="gradient".
        """
        super().check_settings(num_clients, groups, optimizer)
        for name, steps in (("x_steps", self.x_steps), ("z_steps", self.z_steps)):
            require(
                self.mode == "gradient" or steps is None,
                f"algorithm.{name}={steps} needs algorithm.mode=gradient, got algorithm.mode={self.mode}: set "
                f"algorithm.mode=gradient, or algorithm.{name}=null",
            )
        require(
            self.mode == "local_epochs" or getattr(optimizer, "is_plain_sgd", False),
            "algorithm.mode=gradient needs plain SGD, because clients upload gradients and the server takes the step: "
            "set optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0 optimizer.clip=null, or "
            "algorithm.mode=local_epochs",
        )
        for edge in self.edges:
            inside = num_clients is None or max(edge, default=0) < num_clients  # whether all clients of the edge exist
            require(
                len(edge) == 2 and edge[0] != edge[1] and inside,
                f"algorithm.edges contains {edge}, but an edge must be a pair of different clients"
                + (f" from 0 to {num_clients - 1}" if num_clients else "")
                + ": correct the pair, or remove it",
            )

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError if sketch="label_hist" but samples have not one class each, or if memory is too small.

        The server stores the personal parameters of all clients, and matrices of the pairs of similar clients.
        """
        super().check(federation, model, optimizer)
        require(
            self.sketch != "label_hist" or federation.task.single_label,
            f"algorithm.sketch=label_hist compares class counts, but task={federation.task.kind} does not have one "
            "class per sample: set algorithm.sketch=feature_mean, sample_mean or second_moment",
        )
        _, fused = self._columns(model)  # the trained columns of z
        n, d, have = federation.num_clients, fused.size, free_memory(federation.device)
        M = len(self.edges) or min(self.k * n, n * (n - 1) // 2)  # largest number of edges
        width = min(d, n) if self.norm == "l2" else d  # dimension in which ADMM iterates
        # bytes: four float32 copies of Z, and float64 matrices: six [N, N] of the network, six [M, width] of ADMM
        need = 4 * n * d * 4 + 8 * (6 * n * n + 6 * M * width)
        require(
            need <= have,
            f"algorithm=pfednet stores z of all clients at the server: {n:,} times {d:,} numbers and {M:,} edges take "
            f"{size_text(need)}, but {federation.device} has {size_text(have)} free. Lower "
            "partition.num_clients or algorithm.k, or make fewer parameters personal (algorithm.personal)",
        )

    def _columns(self, model: FlatModel) -> tuple[Columns, Columns]:
        """Return the positions of the personal parameters in a parameter vector, and those of the trained ones of them.

        The server makes only the trained ones similar between clients; the others are running statistics or frozen.
        """
        personal = model.all if self.personal == ALL_COLUMNS else model.columns[self.personal]
        return personal, personal & model.trained

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: shared parameters x, and personal parameters z_i, with the same initial values.

        Row i of `Z` is the server's z_i, trained parameters only.  Row i of `z` is the client's own z_i, with running
        statistics.
        """
        n, w = federation.num_clients, model.init_row()
        self.columns, self.fused = self._columns(model)  # columns of z, and the trained ones among them
        self.shared = self.columns.rest(model.size)  # columns of x
        self.x, self.Z = self.shared.take(w).clone(), self.fused.take(w).repeat(n, 1)  # [d1], [N, d2]
        self.z = rows("z", default=self.columns.take(w))  # [N, |z|]; a row equals the default until it is set
        # which clients have the newest x and z_i [N], none yet; and x as these clients received it  [d1]
        self.holds, self.x_sent = torch.zeros(n, dtype=torch.bool, device=w.device), self.x
        # whether clients are compared by their class counts
        classes = self.sketch in (None, "label_hist") and federation.task.single_label
        self.compared: Sketch = self.sketch or ("label_hist" if classes else "feature_mean")
        self.distance: Metric = "l2" if self.compared == "label_hist" else "l1"  # as the released code
        # the network of linked clients; if `edges` is empty, the first round builds it from sketches (data summaries)
        self.adjacency = similarity.of_edges(n, self.edges).to(w.device)  # [N, N] bool
        self.sketch_of = None  # these sketches as uploaded, [N, q]
        self.iterations = torch.zeros(1, device=w.device)  # of ADMM in the last z-step
        self._network = None  # the network factorized for ADMM, computed when first used

    # -- a round -------------------------------------------------------------------------------------------
    def round(self, cohort: Cohort) -> None:
        """Run the x-phase, then the z-phase; the first round also builds the network of similar clients.

        x are the shared parameters, z_i the personal ones, which the server pulls together between similar clients.
        """
        # in the first round, unless the option edges lists the network; sketches are summaries of the clients' data
        if not self.edges and self.sketch_of is None and self.fused.size:
            self.sketch_of = self.upload_sketches(cohort.all_clients())
            self.adjacency = similarity.knn(self.sketch_of, self.k, self.distance)
            self._network = None  # to be factorized again
        theta = self.begin(cohort)  # (x_t, z_i)  [K, P]
        x = self.shared.take(theta)  # a copy of x_t, because training updates running statistics in theta
        theta = self.z_phase(cohort, self.x_phase(cohort, theta, x))
        self.z[cohort.ids] = self.columns.take(theta)
        # these clients have the newest x and z_i; cohort.index: their ids as a tensor
        self.holds = torch.zeros_like(self.holds).index_fill(0, cohort.index, value=True)

    def upload_sketches(self, clients: Cohort) -> Tensor:
        """Let the clients upload sketches (summaries) of their training data.

        Args:
            clients: The clients.

        Returns:
            One sketch of q numbers per client, as the server receives them.  # [K, q]
        """
        # compared: the kind of sketch, class counts or mean features; samples: the most that it is made from
        sketch = similarity.sketches(clients, self.compared, self.samples)
        # None: sketches are sent as they are, because the server has no version
        return clients.upload(sketch=sketch, previous={"sketch": None}, uncompressed=["sketch"]).sketch

    def begin(self, cohort: Cohort) -> Tensor:
        """Return each client's row of the newest x and z_i, from which it trains in this round.

        x are the shared parameters, z_i the personal ones.  Participants of the last round have both (`holds`); the
        others download them.  Before the first round they download x only.

        Args:
            cohort: The clients.

        Returns:
            The rows (x_t, z_i).  # [K, P]
        """
        outdated = ~self.holds[cohort.index]  # [K]
        downloading = cohort.subset(outdated.cpu().numpy())  # the cohort of these clients only
        theta = self.join(self.x_sent, self.z[cohort.ids])  # x_sent: x as the last round's participants received it
        if len(downloading):
            theta[outdated] = self.shared.put(theta[outdated], downloading.broadcast(x_t=self.x).x_t)
        if len(downloading) and self.holds.any():
            z_t = downloading.download(z_t=self.Z[downloading.index]).z_t
            theta[outdated] = self.fused.put(theta[outdated], z_t)
        return theta

    def join(self, x: Tensor, z: Tensor) -> Tensor:
        """Return whole models of the shared part x, [d1] or [K, d1], and the clients' personal parameters z [K, |z|].

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = z.new_empty(len(z), self.shared.size + self.columns.size)
        return self.columns.put(self.shared.put(rows, x), z)

    def x_phase(self, cohort: Cohort, theta: Tensor, x: Tensor) -> Tensor:
        """Train the shared parameters x with z_i fixed, and average their changes: x <- x - sum_i w_i dx_i.

        With mode="gradient" there are x_steps single steps, each averaged with equal weights.

        Args:
            cohort: The clients.
            theta: Their rows (x_t, z_i).  # [K, P]
            x: Their x_t.  # [K, d1]

        Returns:
            Their rows (x_{t+1}, z_i).  # [K, P]
        """
        if not self.shared.size:  # all parameters are personal
            return theta
        weights = "samples" if self.mode == "local_epochs" else "uniform"
        for i in range(self.x_steps or 1):
            how = self.how("local", i, self.shared)  # "local": key of the random batches
            out = cohort.train(theta, columns=self.shared, how=how)
            dx = x - self.shared.take(out.theta)  # [K, d1]
            up = cohort.upload(dx=dx, relative_to={"dx": None})  # dx is already a difference
            self.x = self.x - cohort.mean(up.dx, weights=weights)
            x = self.x_sent = cohort.broadcast(x=self.x).x
            theta = self.shared.put(out.theta, x)
        return theta

    def z_phase(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Train the personal parameters z_i with x fixed, upload their changes, and fuse them at the server.

        With mode="gradient" this is repeated z_steps times, with a single step each.

        Args:
            cohort: The clients.
            theta: Their rows (x, z_i).  # [K, P]

        Returns:
            Their rows with the new z_i.  # [K, P]
        """
        if not self.fused.size:  # no personal parameter is trained
            return theta
        for j in range(self.z_steps or 1):
            how = self.how("head", j, self.fused)  # "head" and the repetition j: key of the random batches
            out = cohort.train(theta, columns=self.fused, how=how)
            dz = self.fused.take(theta) - self.fused.take(out.theta)  # [K, d2]
            dz = cohort.upload(dz=dz, relative_to={"dz": None}).dz  # dz is already a difference
            # changes of all clients, 0 for those that took no part [N, d2], and the mean learning rate
            dZ, lr = torch.zeros_like(self.Z).index_copy(0, cohort.index, dz), float(torch.as_tensor(out.lr).mean())
            self.move(dZ, self.rates(cohort, how, lr))  # the server fuses self.Z - dZ; rates: step size of each client
            # each client downloads its row of Z
            theta = self.fused.put(out.theta, cohort.download(z=self.Z[cohort.index]).z)
        return theta

    def how(self, key: str, step: int, columns: Columns) -> LocalTraining:
        """Return the settings of one training in the x-phase (shared parameters) or the z-phase (personal parameters).

        Args:
            key: Key of the random batches: "local" or "head", those of FedRep's phases, so both can be compared.
            step: How many trainings of the phase came before in this round; more than 0 only with mode="gradient".
            columns: The columns that are trained: those of x, or the trained ones of z.

        Returns:
            Training of the local epochs, or with mode="gradient" of one step.
        """
        steps = None if self.mode == "local_epochs" else 1
        buffers = "z" if columns is self.fused else "x"  # name under which the optimizer state is stored
        key = f"{key}/{step}" if step else key
        # uploaded: the columns that leave the client, whose gradients privacy clips
        return LocalTraining(steps=steps, key=key, buffers=buffers, uploaded=columns)

    def rates(self, cohort: Cohort, how: LocalTraining, lr: float) -> np.ndarray:
        """Return the step size of each client in the server's z-step.

        It is the sum of the client's effective learning rates, by which a constant gradient would move z_i in the
        round, times the fraction K / N of clients that take part.  With z_step="single" it is lr for all.

        Args:
            cohort: The K clients of this round.
            how: Their training in the z-phase.
            lr: Mean of their learning rates.

        Returns:
            The step sizes of all clients.  # [N]
        """
        n = len(self.Z)
        if self.z_step == "single":
            return np.full(n, lr)
        # rate_sums: sum of each client's effective learning rates  [N]
        return cohort.all_clients().rate_sums(how) * (len(cohort) / n)

    def move(self, dZ: Tensor, rates: np.ndarray) -> None:
        """Take the server's z-step: fuse Z - dZ along the network, where similar clients become equal.

        `fuse` minimizes sum_i c_i |Z_i - V_i|^2 / 2 + tau times the penalty on differences between neighbours.  Client
        i's step size divides its first term.  Here both terms are multiplied by the largest step size: so c_i is the
        largest rate divided by that of client i, and 1 for a client whose rate is 0.

        Args:
            dZ: Uploaded dz_i, the received personal parameters minus the trained ones, 0 for clients that took no
                part.  # [N, d2]
            rates: Step size of each client.  # [N]
        """
        n, largest = len(self.Z), float(rates.max())
        # factor of dZ, and step size eta of the z-step: with z_step="paper" both are N times smaller
        factor, eta = (1.0, n * largest) if self.z_step in ("full", "single") else (1 / n, largest)
        weights = np.divide(largest, rates, out=np.ones(n), where=rates > 0)  # c_i  [N]
        V, network = self.Z - factor * dZ, self.network(weights)
        fused = fuse(V, network, tau=eta * self.lam, norm=self.norm, keep_dual=False)  # lam: weight of the penalty
        self.Z, self.iterations = fused.Z, torch.full_like(self.iterations, fused.iterations)

    def network(self, weights: np.ndarray) -> Network:
        """Return the client network, factorized for `fuse`; computed again only if the weights change.

        Args:
            weights: The clients' weights c_i.  # [N]
        """
        c = torch.from_numpy(weights).to(self.adjacency.device)
        if self._network is None or not torch.equal(self._network.weights, c):
            self._network = Network(self.adjacency, c)
        return self._network

    # -- deployed models and new clients ---------------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: x with each client's z_i from the last z-step.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        rows = self.join(cohort.broadcast(x=self.x).x, self.z[cohort.ids])
        return self.fused.put(rows, cohort.download(z=self.Z[cohort.index]).z)  # each downloads its row of Z

    def initial_row_for_new_clients(self, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the model of all new clients if no sketches (summaries of data) tell which clients are similar.  # [P]

        It has the shared parameters x, the unweighted mean of all N clients' z_i from the last z-step, and initial
        running statistics.  `cohorts`, the training clients, is not used.
        """
        return self.row_of_new_client(self.Z.mean(0))

    def initial_rows_for_new_clients(self, new_clients: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """Return x with the mean z of the k clients whose sketches are nearest to that of each new client.

        A sketch is a vector that summarizes a client's training data.  If algorithm.edges lists the network,
        clients have no sketches, and all new clients get the mean z.

        Args:
            new_clients: M clients that took no part in training.  They upload their sketches.
            cohorts: All training clients, split into cohorts.

        Returns:
            Rows [M, P], or one row [P] for all.
        """
        if self.sketch_of is None:
            return self.initial_row_for_new_clients(cohorts)
        near = similarity.nearest(self.upload_sketches(new_clients), self.sketch_of, self.k, self.distance)  # [M, k]
        return self.row_of_new_client(self.Z[near].mean(1))

    def row_of_new_client(self, z: Tensor) -> Tensor:
        """Return the row of a new client: shared parameters x, the given z, and initial running statistics.

        Args:
            z: Trained personal parameters.  # [..., d2]

        Returns:
            The row.  # [..., P]
        """
        row = self.join(self.x, self.z.default[None])[0]  # x and the initial z with running statistics  [P]
        return self.fused.put(row, z)  # fused: the d2 columns of z without running statistics; put returns a copy

    # -- records for figures -----------------------------------------------------------------------------------
    def matrices(self) -> dict[str, Tensor]:
        """Return the network, and the spread of the z_i.

        Returns:
            network [N, N]; iterations of the last z-step [1]; and for each coordinate of z, in ascending order and
            subsampled evenly [min(d2, 1001)], "sdwd", the standard deviation over clients, and "sdwd_pairwise", the
            root mean square of z_i - z_j over linked clients.
        """
        if not self.fused.size:  # no personal parameter is trained, so nothing is fused
            return {}
        spread = {
            "sdwd": similarity.sdwd(self.Z),
            "sdwd_pairwise": similarity.sdwd_pairwise(self.Z, self.adjacency),
        }
        spread = {name: ordered(values, MAX_SDWD) for name, values in spread.items()}
        return {"network": self.adjacency, "iterations": self.iterations, **spread}


def ordered(values: Tensor, limit: int) -> Tensor:
    """Sort values [n] in ascending order, and keep at most `limit` at even distances, with both ends.

    # [min(n, limit)]
    """
    values = values.sort().values
    if len(values) <= limit:
        return values
    return values[torch.linspace(0, len(values) - 1, limit, dtype=torch.float64).round().long().to(values.device)]
