"""pFedNet: shared parameters x for all, personal parameters z_i fused between similar clients.

"Medical Federated Model with Mixture of Personalized and Shared Components", Algorithms 1 to 5, for
    min  1/N sum_i f_i(x, z_i) + lam sum over edges (i, j) of ||z_i - z_j||      (not squared: neighbours become equal)
on a network of similar clients (_similarity.py).  A round has two phases.  In the x-phase clients train x from x_t at
their z_i and send dx_i = x_t - x_i: x_{t+1} = x_t - sum_i w_i dx_i.  In the z-phase they train z_i at fixed x and send
dz_i: the server solves (_fusion.py)
    Z_{t+1} = argmin_Z  sum_i ||z_i - v_i||^2 / (2 eta_i) + N lam sum ||z_i - z_j||,   V = Z_t - dZ
and sends everyone its own z_i.  Deployed: (x, z_i).  eta_i is the sum of the learning rates of client i's local steps,
each times 1 + m + m^2 + ... of momentum m so far: how far a gradient that stays the same moves z_i.  So lam weighs the
penalty against f_i for any number of local steps.  This is exact for one step, and an approximation for more, if the
gradient changes little within a round.  Adam normalizes gradients, so that lam weighs against normalized ones.
Departs from the paper: mode="local_epochs", as its released code ("weight"), trains for epochs where the paper takes
single gradients (mode="gradient"), with w_i = n_i / sum n (client_weights=uniform: the paper's 1/N, as always in
mode="gradient").
z_step="paper" has V = Z_t - dZ / N and lam in the place of N lam, which slows z down N times; the default is that step
with the rates N eta_i.  z_step="single" is the default with one eta for all, the rate of a single local step: lam then
counts as lam / (local steps).  If K clients take part, the others have dz_i = 0, and the penalty still moves their
z_i.  lam is then scaled by K / N, because a client's gradient arrives in this fraction of the rounds.
Departs from the released code, which writes Z over Z_t inside ADMM, keeps an edge of its tables only if the lower of
two clients lists the other, and has lam 72, 1 and 5.
Only trained columns of z are fused and sent.  Running statistics in z stay with the client; those in x are averaged.
Reduces to: FedRep with the phases swapped at lam = 0, FedAvg where z is empty, network lasso where x is empty (no
x-phase).
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
from fedbench.core.options import Count, Natural, NonNegative, require
from fedbench.core.rows import memory

SHOWN = 1001  # of the values of SDWD in matrices.npz
EVERYBODY = "all"  # of `personal`: every column


class PFedNet(Algorithm):
    """Options: conf/algorithm/pfednet.yaml; lam, mode, z_step: above.

    State: x [d1]; Z [N, d2], the server's; adjacency [N, N]; sketch_of [N, q], the clients' sketches (without edges);
    iterations [1], of the last ADMM; holds [N], who was sent the newest x and z_i; x_sent [d1], what these saw.  Of the
    clients: z [N, |z|], running statistics included.
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
        edges: Sequence[Sequence[Natural]] = (),
    ):
        self.lam, self.personal, self.mode = lam, personal, mode
        self.norm: Norm = norm
        self.x_steps, self.z_steps = x_steps, z_steps
        self.z_step = z_step or ("full" if mode == "local_epochs" else "paper")
        self.k, self.samples = k, samples
        self.edges = [list(edge) for edge in edges]
        self.sketch: Sketch | None = sketch
        self.requires = () if personal == EVERYBODY else (personal,)
        self._network: Network | None = None

    # -- what it runs on -----------------------------------------------------------------------------------
    def check_settings(self, num_clients: int | None, groups: Any, optimizer: Optimizer) -> None:
        """Options that belong together; edges between clients that there are; plain SGD for mode="gradient"."""
        super().check_settings(num_clients, groups, optimizer)
        for name, steps in (("x_steps", self.x_steps), ("z_steps", self.z_steps)):
            require(
                self.mode == "gradient" or steps is None,
                f"algorithm.{name}={steps} is of algorithm.mode=gradient, not of {self.mode}",
            )
        require(
            self.mode == "local_epochs" or getattr(optimizer, "plain", False),
            "algorithm.mode=gradient sends a gradient, by which the server steps: it needs plain SGD (optimizer=sgd "
            "with momentum=0, weight_decay=0, clip=null)",
        )
        for edge in self.edges:
            inside = num_clients is None or max(edge, default=0) < num_clients
            require(
                len(edge) == 2 and edge[0] != edge[1] and inside,
                f"algorithm.edges has {edge}: an edge is a pair of different clients"
                + (f" from 0 to {num_clients - 1}" if num_clients else ""),
            )

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Class labels where they are compared; memory for the Z-step."""
        super().check(federation, model, optimizer)
        require(
            self.sketch != "label_hist" or federation.task.single_label,
            f"algorithm.sketch=label_hist compares how many samples of each class clients have: task="
            f"{federation.task.kind} has no classes; feature_mean and others compare inputs",
        )
        n, d, have = federation.num_clients, self._columns(model)[1].size, memory(federation.device)
        M = len(self.edges) or min(self.k * n, n * (n - 1) // 2)
        width = min(d, n) if self.norm == "l2" else d  # of what ADMM iterates
        need = 4 * n * d * 4 + 8 * (6 * n * n + 6 * M * width)
        require(
            need <= have,
            f"algorithm=pfednet holds z of all clients at the server: {n:,} times {d:,} numbers and {M:,} edges take "
            f"{need / 2**30:,.1f} GiB and {federation.device} has {have / 2**30:,.1f} GiB; lower "
            "partition.num_clients, algorithm.k, or the columns of algorithm.personal",
        )

    def _columns(self, model: FlatModel) -> tuple[Columns, Columns]:
        """The personal columns, and those of them that are fused."""
        personal = model.all if self.personal == EVERYBODY else model.columns[self.personal]
        return personal, personal & model.trained

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        n, w = federation.num_clients, model.init_row()
        self.columns, self.fused = self._columns(model)
        self.shared = self.columns.rest(model.size)
        self.x, self.Z = self.shared.take(w).clone(), self.fused.take(w).repeat(n, 1)  # [d1], [N, d2]
        self.z = rows("z", default=self.columns.take(w))  # lazy [N, |z|]
        self.holds, self.x_sent = torch.zeros(n, dtype=torch.bool, device=w.device), self.x
        classes = self.sketch in (None, "label_hist") and federation.task.single_label
        self.compared: Sketch = self.sketch or ("label_hist" if classes else "feature_mean")
        self.distance: Metric = "l2" if self.compared == "label_hist" else "l1"  # as the released code
        # without edges nobody is linked until clients have sent their sketches
        self.adjacency, self.sketch_of = similarity.of_edges(n, self.edges).to(w.device), None
        self.iterations = torch.zeros(1, device=w.device)
        self._network = None

    # -- a round -------------------------------------------------------------------------------------------
    def round(self, cohort: Cohort) -> None:
        """Both phases; before the first one clients are told apart."""
        if not self.edges and self.sketch_of is None and self.fused.size:
            self.sketch_of = self.ask(cohort.all_clients())
            self.adjacency = similarity.knn(self.sketch_of, self.k, self.distance)
            self._network = None
        theta = self.begin(cohort)  # (x_t, z_i)  [K, P]
        x = self.shared.take(theta)  # x_t as the client has it: in theta, forward passes move running statistics
        theta = self.z_phase(cohort, self.x_phase(cohort, theta, x))
        self.z[cohort.ids] = self.columns.take(theta)
        self.holds = torch.zeros_like(self.holds).index_fill(0, cohort.index, True)

    def ask(self, clients: Cohort) -> Tensor:
        """Their sketches as the server sees them.  # [K, q]"""
        sketch = similarity.sketches(clients, self.compared, self.samples)
        return clients.upload(sketch=sketch, replaces={"sketch": None}, uncompressed=["sketch"]).sketch

    def begin(self, cohort: Cohort) -> Tensor:
        """Everyone at (x_t, z_i): whoever took part in the last round has them, and the others are sent them (in the
        first round x_t alone).  # [K, P]"""
        holds = self.holds[cohort.index]  # [K]
        late, lacks = cohort.subset(~holds.cpu().numpy()), ~holds
        theta = self.join(self.x_sent, self.z[cohort.ids])
        if len(late):
            theta[lacks] = self.shared.put(theta[lacks], late.broadcast(x_t=self.x).x_t)
        if len(late) and self.holds.any():
            theta[lacks] = self.fused.put(theta[lacks], late.download(z_t=self.Z[late.index]).z_t)
        return theta

    def join(self, x: Tensor, z: Tensor) -> Tensor:
        """Rows of x [d1] or [K, d1] and z [K, |z|].  # [K, P]"""
        rows = z.new_empty(len(z), self.shared.size + self.columns.size)
        return self.columns.put(self.shared.put(rows, x), z)

    def x_phase(self, cohort: Cohort, theta: Tensor, x: Tensor) -> Tensor:
        """x_{t+1} = x_t - sum_i w_i dx_i; with gradients, where dx_i = lr g_i and w_i = 1/K, I times.  # [K, P]"""
        if not self.shared.size:
            return theta
        weights = "samples" if self.mode == "local_epochs" else "uniform"
        for i in range(self.x_steps or 1):
            out = cohort.train(theta, columns=self.shared, how=self.how("local", i, self.shared))
            dx = x - self.shared.take(out.theta)  # [K, d1]
            up = cohort.upload(dx=dx, relative_to={"dx": None})
            self.x = self.x - cohort.mean(up.dx, weights=weights)
            x = self.x_sent = cohort.broadcast(x=self.x).x
            theta = self.shared.put(out.theta, x)
        return theta

    def z_phase(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Z_{t+1} of the header; with gradients J times.  # [K, P]"""
        if not self.fused.size:
            return theta
        for j in range(self.z_steps or 1):
            how = self.how("head", j, self.fused)
            out = cohort.train(theta, columns=self.fused, how=how)
            dz = self.fused.take(theta) - self.fused.take(out.theta)  # [K, d2]
            dz = cohort.upload(dz=dz, relative_to={"dz": None}).dz
            dZ, lr = torch.zeros_like(self.Z).index_copy(0, cohort.index, dz), float(torch.as_tensor(out.lr).mean())
            self.move(dZ, self.rates(cohort, how, lr))
            theta = self.fused.put(out.theta, cohort.download(z=self.Z[cohort.index]).z)
        return theta

    def how(self, key: str, step: int, columns: Columns) -> LocalTraining:
        """Epochs, or one step, on batches of their own: those of FedRep's phases of this name."""
        steps = None if self.mode == "local_epochs" else 1
        buffers = "z" if columns is self.fused else "x"
        key = f"{key}/{step}" if step else key
        return LocalTraining(steps=steps, key=key, buffers=buffers, uploaded=columns)

    def rates(self, cohort: Cohort, how: LocalTraining, lr: float) -> np.ndarray:
        """Return eta_i K / N of all clients, or the rate of a single step.  # [N]"""
        n = len(self.Z)
        if self.z_step == "single":
            return np.full(n, lr)
        return cohort.all_clients().rate_sums(how) * (len(cohort) / n)

    def move(self, dZ: Tensor, rates: np.ndarray) -> None:
        """Take the Z-step.  dZ [N, d2] is 0 for clients that took no part.

        Its objective times the largest rate: c_i is that rate over the client's, and 1 for a client without a step.
        """
        n, most = len(self.Z), float(rates.max())
        part, eta = (1.0, n * most) if self.z_step in ("full", "single") else (1 / n, most)
        weights = np.divide(most, rates, out=np.ones(n), where=rates > 0)
        fused = fuse(self.Z - part * dZ, self.network(weights), eta * self.lam, self.norm, keep_dual=False)
        self.Z, self.iterations = fused.Z, torch.full_like(self.iterations, fused.iterations)

    def network(self, weights: np.ndarray) -> Network:
        """Return the factored network of `adjacency` with the weights c_i [N] of the clients."""
        c = torch.from_numpy(weights).to(self.adjacency.device)
        if self._network is None or not torch.equal(self._network.weights, c):
            self._network = Network(self.adjacency, c)
        return self._network

    # -- what clients deploy, and who comes later ------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """(x, z_i)."""
        rows = self.join(cohort.broadcast(x=self.x).x, self.z[cohort.ids])
        return self.fused.put(rows, cohort.download(z=self.Z[cohort.index]).z)

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        """(x, the mean of all z_i): for somebody of whose data nothing is known.  # [P]"""
        return self.newcomer(self.Z.mean(0))

    def newcomer_rows(self, newcomers: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """(x, the mean of the neighbours' z): the k clients with the nearest sketches, with edges everybody.

        # [M, P], or [P] for all
        """
        if self.sketch_of is None:
            return self.newcomer_row(cohorts)
        near = similarity.nearest(self.ask(newcomers), self.sketch_of, self.k, self.distance)  # [M, k]
        return self.newcomer(self.Z[near].mean(1))

    def newcomer(self, z: Tensor) -> Tensor:
        """x with z [..., d2], and running statistics of z as they are at first.  # [..., P]"""
        row = self.join(self.x, self.z.default[None])[0]
        return self.fused.put(row, z)

    # -- what figures show -------------------------------------------------------------------------------------
    def matrices(self) -> dict[str, Tensor]:
        """network [N, N]; iterations [1] of the last Z-step; sdwd and sdwd_pairwise: how far the z_i are apart in each
        coordinate, in ascending order, of more than 1,001 as many at even distances.  # [min(d2, 1001)]"""
        if not self.fused.size:
            return {}
        apart = {
            "sdwd": similarity.sdwd(self.Z),
            "sdwd_pairwise": similarity.sdwd_pairwise(self.Z, self.adjacency),
        }
        spread = {name: ordered(values, SHOWN) for name, values in apart.items()}
        return {"network": self.adjacency, "iterations": self.iterations, **spread}


def ordered(values: Tensor, most: int) -> Tensor:
    """values [n] in ascending order; of more than `most` as many, from the least to the largest.  # [min(n, most)]"""
    values = values.sort().values
    if len(values) <= most:
        return values
    return values[torch.linspace(0, len(values) - 1, most, dtype=torch.float64).round().long().to(values.device)]
