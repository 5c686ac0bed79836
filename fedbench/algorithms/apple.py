"""APPLE: every client uploads a core model, and learns with which weights to sum everybody's cores.

Luo and Wu, IJCAI 2022, Algorithm 1.  Client i's personal model is w_i = sum_j d_ij c_j: of the cores it trains its own
c_i alone, of its directed relationship vector d_i all entries, to minimize f_i(w_i) + lambda(r) (mu/2) ||d_i - q||^2
with q = n / sum n.  A batch, with G = grad f_i(w_i) and both at the values before it:
c_i <- c_i - lr d_ii G;   d_ij <- d_ij - eta2 (<G, c_j> + lambda(r) mu (d_ij - q_j)) for all j.
Departs from the paper, as the released code does: the penalty is lambda mu ||d_i - q||^2, without the 1/2, and the
cores start from independent draws.  The optimizer (momentum, schedule) moves both c and d; eta2 is scheduled by rounds,
even where schedule.per=step.  Deployed: w_i as trained, so the others' cores are one round old.  BatchNorm buffers are
the client's own and are not mixed.
Limited bandwidth: in its first round a client downloads all cores, then M a round, keeping the old versions of the
others; first those it never chose, then by |d_ij|, as the released code intends (selection="uniform": as it runs).
Reduces to: Local at d = I with eta2 = 0.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms._core_exchange import CoreExchange, LimitedCoreExchange
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.linalg import dot
from fedbench.core.options import Count, NonNegative, Probability, require
from fedbench.core.rows import memory
from fedbench.engine.per_client import per_client


class APPLE(Algorithm):
    """mu, eta2: above, or lists, one number for each client; scheduler: lambda falls from 1, over this fraction of the
    rounds, and is 0 afterwards; bandwidth: M (null: all N - 1); selection: which cores are downloaded then.

    State: core [N, P], c_i as client i last trained it; d [N, N]; theta [N, P], the deployed w_i; and what the exchange
    of cores keeps (_core_exchange.py).
    """

    def __init__(
        self,
        mu: NonNegative | list[NonNegative] = 0.1,
        eta2: NonNegative | list[NonNegative] = 0.001,
        scheduler: Literal["exponential", "cosine"] = "exponential",
        fraction: Probability = 0.1,
        bandwidth: Count | None = None,
        selection: Literal["intended", "uniform"] = "intended",
    ):
        self.mu, self.eta2 = per_client(mu), per_client(eta2)
        self.scheduler, self.fraction, self.bandwidth, self.selection = scheduler, fraction, bandwidth, selection
        if bandwidth is not None and selection == "intended":
            self.leaks = (
                "with algorithm.bandwidth, a client's choice of cores tells the server of its relationship "
                "vector; algorithm.selection=uniform does not look at it"
            )

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """The cores must fit into memory, in all the versions that there may be."""
        super().check(federation, model, optimizer)
        n, have = federation.num_clients, memory(federation.device)
        # with a bandwidth, of each core: the newest version, and an older one with every client, its own included
        versions = n if self.bandwidth is None else n * (n + 1)
        need = 4 * (versions * model.size + n * n)
        require(
            need <= have,
            f"algorithm=apple needs every client's core at hand: {versions:,} cores of {model.size:,} numbers for "
            f"{n:,} clients take {need / 2**30:,.1f} GiB and {federation.device} has {have / 2**30:,.1f} GiB; "
            "it is a cross-silo method: lower partition.num_clients"
            + ("" if self.bandwidth is None else ", or set algorithm.bandwidth=null"),
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All know all initial cores; d_i = q."""
        n, w = federation.num_clients, model.init_row()
        self.columns = model.trained
        self.q = torch.from_numpy(federation.num_samples / federation.num_samples.sum()).to(w)  # [N]
        cores = model.init_rows(n)  # [N, P]
        self.exchange = (
            CoreExchange(cores)
            if self.bandwidth is None
            else LimitedCoreExchange(cores, self.bandwidth, self.selection)
        )
        self.core = rows("core", default=w)  # lazy [N, P]
        self.d = rows("d", default=self.q)  # lazy [N, N]
        first = model.trained.put(w, model.trained.take(self.q @ cores))
        self.theta = rows("theta", default=first)  # lazy [N, P]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: download, train core and relationship vector, upload the core."""
        i, d = cohort.index[:, None], self.d[cohort.ids]  # [K, 1], [K, N]
        versions, cores = self.exchange.download(cohort, d), self.exchange.cores  # [K, N], [V, P]
        known = cores[self.exchange.newest[cohort.index]]  # c_i as the server has it  [K, P]
        # before its first round a client's core is the exchange's; afterwards its own, to which no noise was added
        core = torch.where(self.core.has(cohort.ids)[:, None], self.core[cohort.ids], known)
        personal = self.mix(core.clone(), core, d, cores, versions, i)
        eta2 = self.eta2 * cohort.engine.optimizer.schedule(cohort.round, cohort.rounds)
        pull = self.mu * (2 * self.strength(cohort.round, cohort.rounds))

        def step(s: Step, batch: Batch) -> None:
            g = s.grad(batch, s.state.personal)  # G [k, P]
            grad_d = (g @ cores.T).gather(1, s.state.versions)  # <G, c_j>  [k, N]
            grad_d.scatter_(1, s.state.i, dot(g, s.theta)[:, None])  # of c_i, as it is now
            grad_d.add_(s.value(pull) * (s.state.d - self.q))
            d_ii = s.state.d.gather(1, s.state.i)  # [k, 1], before it moves
            s.descend(grad_d, "d", lr=s.value(eta2), uploaded=False)
            s.descend(g.mul_(d_ii))
            self.mix(s.state.personal, s.theta, s.state.d, cores, s.state.versions, s.state.i)

        how = LocalTraining(buffers={"theta": "core", "d": "d"})
        out = cohort.train(core, step=step, how=how, personal=personal, d=d, versions=versions, i=i)
        self.d[cohort.ids], self.theta[cohort.ids] = out.d, out.personal
        core = self.columns.put(out.personal, self.columns.take(out.theta))  # BatchNorm's buffers are w_i's
        self.core[cohort.ids] = core
        up = cohort.upload(core=core, replaces={"core": known})
        self.exchange.publish(cohort, versions, up.core)

    def mix(self, into: Tensor, core: Tensor, d: Tensor, cores: Tensor, versions: Tensor, i: Tensor) -> Tensor:
        """Write w_i = d_ii c_i + sum over j != i of d_ij c_j into the trained columns of `into`.  # [k, P]

        core [k, P]: the c_i; d [k, N]; versions [k, N] in cores [V, P]: the c_j; i [k, 1].
        """
        take = self.columns.take
        weights = d.new_zeros(len(d), len(cores)).scatter_(1, versions, d.scatter(1, i, 0))  # [k, V]
        self.columns.view(into).copy_((take(core) * d.gather(1, i)).addmm_(weights, take(cores)))
        return into

    def strength(self, round: int, rounds: int) -> float:
        """lambda(r), in [0, 1]."""
        L = int(self.fraction * rounds + 1e-9)  # the paper's: lambda is 0 from round L on
        if round >= L:
            return 0.0
        return 1e-3 ** (round / L) if self.scheduler == "exponential" else (1 + math.cos(math.pi * round / L)) / 2

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w_i as trained."""
        return self.theta[cohort.ids]

    def matrices(self) -> dict[str, Tensor]:
        """d: the directed relationship vectors, one a row."""
        return {"d": self.d.whole()}

    def state_dict(self) -> dict[str, Tensor]:
        """With the cores, their versions, and who holds which."""
        return super().state_dict() | self.exchange.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What `state_dict` gave."""
        of_exchange = self.exchange.state_dict().keys()
        super().load_state_dict({name: value for name, value in state.items() if name not in of_exchange})
        self.exchange.load_state_dict(state)
