"""APPLE: each client's personal model is a learned linear combination of all clients' core models.

Luo and Wu, IJCAI 2022, Algorithm 1.  Client i's personal model is w_i = sum_j d_ij c_j.  It trains its core c_i and its
directed relationship vector d_i to minimize f_i(w_i) + lambda(r) (mu/2) ||d_i - q||^2 with q = n / sum n.
Each batch, with G = grad f_i(w_i) and all right-hand sides evaluated before it:
c_i <- c_i - lr d_ii G;   d_ij <- d_ij - eta2 (<G, c_j> + lambda(r) mu (d_ij - q_j)) for all j.
Clients deploy w_i as trained, so the other clients' cores in it are one round old.
Limited bandwidth: a client downloads all cores in its first round and M cores in each later one, and keeps the old
versions of the others.  Cores that it never chose come first, then large |d_ij|, as the released code intends.
selection="uniform" selects at random, as that code effectively does.
Departs from the paper, as the released code does: the penalty is lambda mu ||d_i - q||^2, without the 1/2, and the
cores are initialized independently.  The optimizer (momentum, schedule) updates both c and d; eta2 is scheduled by
rounds, even with schedule.per=step.  BatchNorm buffers are personal and are not mixed.
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
from fedbench.core.memory import size_text
from fedbench.core.options import Count, NonNegative, Probability, require
from fedbench.core.rows import free_memory
from fedbench.engine.per_client import per_client


class APPLE(Algorithm):
    """APPLE.  c_j: core of client j; d_i [N]: its weights in the model sum_j d_ij c_j of client i.

    Args:
        mu: Weight of the penalty ||d_i - q||^2, >= 0.  A list sets one value per client.
        eta2: Learning rate of d, >= 0.  A list sets one value per client.
        scheduler: How lambda(r) falls from 1: "exponential" or "cosine".
        fraction: Fraction of the rounds after which lambda(r) is 0.
        bandwidth: Number M of cores that a client downloads in a round; None downloads all N - 1.
        selection: Which cores a client downloads with a bandwidth: "intended" or "uniform".

    State:
        core: Core models c_i as last trained, [N, P].
        d: Directed relationship vectors, [N, N].
        theta: Deployed personal models w_i, [N, P].
        exchange: Uploaded cores and their versions (_core_exchange.py).
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
            self.bypasses_upload = (
                "with algorithm.bandwidth, the server sees which cores a client selects by its relationship vector; "
                "algorithm.selection=uniform selects independently of it"
            )

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the core models of all clients fit into the free memory of the device.

        With the option bandwidth, each client may hold old versions of the other clients' core models, which count too.
        """
        super().check(federation, model, optimizer)
        n, have = federation.num_clients, free_memory(federation.device)
        # with a bandwidth, each core has its newest version and up to one older version per client
        versions = n if self.bandwidth is None else n * (n + 1)
        need = 4 * (versions * model.size + n * n)  # bytes of float32: the cores and d
        require(
            need <= have,
            f"algorithm=apple stores the core models of all clients: {versions:,} of {model.size:,} numbers for "
            f"{n:,} clients take {size_text(need)}, but {federation.device} has {size_text(have)} free. "
            "It is for few clients: lower partition.num_clients"
            + ("" if self.bandwidth is None else ", or set algorithm.bandwidth=null"),
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: independent initial cores c_i, which all clients have, and relationship vectors d_i = q.

        q are the clients' shares of all training samples.
        """
        n, w = federation.num_clients, model.init_row()
        self.columns = model.trained  # columns that are mixed; BatchNorm's running statistics are not
        self.q = torch.from_numpy(federation.num_samples / federation.num_samples.sum()).to(w)  # [N]
        cores = model.init_rows(n)  # [N, P]
        # which versions of the cores each client has, with or without a limit on downloads
        self.exchange = (
            CoreExchange(cores)
            if self.bandwidth is None
            else LimitedCoreExchange(cores, self.bandwidth, self.selection)
        )
        # c_i as client i last trained it, [N, P]; a row equals the default until it is set
        self.core = rows("core", default=w)
        self.d = rows("d", default=self.q)  # [N, N]; a row equals the default until it is set
        # sum_j q_j c_j, with the initial running statistics  [P]
        first_mixture = model.trained.put(w, model.trained.take(self.q @ cores))
        # w_i, which client i deploys, [N, P]; a row equals the default until it is set
        self.theta = rows("theta", default=first_mixture)

    def round(self, cohort: Cohort) -> None:
        """Run one round of APPLE (Algorithm 1): clients download cores, train c_i and d_i, and upload c_i.

        Client i's model is the mixture w_i = sum_j d_ij c_j of all clients' core models c_j.  The server keeps several
        versions of each core, because with limited bandwidth clients have old ones.
        """
        i, d = cohort.index[:, None], self.d[cohort.ids]  # client indices [K, 1], relationship vectors d_i [K, N]
        # which row of `cores` is client i's c_j [K, N], and all stored versions of cores [V, P]
        versions, cores = self.exchange.download(cohort, d), self.exchange.cores
        on_server = cores[self.exchange.newest[cohort.index]]  # c_i as the server has it  [K, P]
        # a client that has trained uses its local core, without the noise and compression of its upload
        core = torch.where(self.core.has(cohort.ids)[:, None], self.core[cohort.ids], on_server)
        personal = self.mix(core.clone(), core, d, cores, versions, i)  # the mixtures w_i, in a copy of the cores
        # learning rate of d in this round; the schedule is a factor
        eta2 = self.eta2 * cohort.engine.optimizer.schedule(cohort.round, cohort.rounds)
        # factor of (d_i - q): the gradient of lambda(r) mu ||d_i - q||^2 is 2 lambda(r) mu (d_i - q)
        pull = self.mu * (2 * self.strength(cohort.round, cohort.rounds))

        def step(s: Step, batch: Batch) -> None:
            """Take one local step of c_i (s.theta) and of d_i (s.state.d), and mix w_i (s.state.personal) again.

            eta2: learning rate of d; pull: weight of its penalty; s.value gives those of the step's clients, if they
            differ.  s.state.i: client indices [k, 1].
            """
            g = s.grad(batch, rows=s.state.personal)  # G, the gradient at w_i  [k, P]
            # cores [V, P]: all stored versions of cores; versions [k, N]: which one is the c_j of client i
            grad_d = (g @ cores.T).gather(1, s.state.versions)  # <G, c_j>  [k, N]
            grad_d.scatter_(1, s.state.i, dot(g, s.theta)[:, None])  # <G, c_i> with the current c_i
            grad_d.add_(s.value(pull) * (s.state.d - self.q))  # penalty: d_i is pulled to q, the shares of samples
            d_ii = s.state.d.gather(1, s.state.i)  # [k, 1], before it moves
            s.descend(grad_d, name="d", lr=s.value(eta2), uploaded=False)  # d stays with the client
            s.descend(g.mul_(d_ii))
            self.mix(s.state.personal, s.theta, s.state.d, cores, s.state.versions, s.state.i)

        how = LocalTraining(buffers={"theta": "core", "d": "d"})  # names under which the optimizer states are stored
        out = cohort.train(core, step=step, how=how, personal=personal, d=d, versions=versions, i=i)
        self.d[cohort.ids], self.theta[cohort.ids] = out.d, out.personal
        core = self.columns.put(out.personal, self.columns.take(out.theta))  # with w_i's BatchNorm buffers
        self.core[cohort.ids] = core
        up = cohort.upload(core=core, previous={"core": on_server})  # the change of the server's c_i is sent
        self.exchange.publish(cohort, versions, up.core)  # the server stores the new versions

    def mix(self, into: Tensor, core: Tensor, d: Tensor, cores: Tensor, versions: Tensor, i: Tensor) -> Tensor:
        """Mix each client's personal model from its own current core and the downloaded ones of the others.

        w_i = d_ii c_i + sum over j != i of d_ij c_j.

        Args:
            into: Rows whose trained columns are overwritten.  # [k, P]
            core: The clients' cores c_i.  # [k, P]
            d: Relationship vectors.  # [k, N]
            cores: All versions of all uploaded cores.  # [V, P]
            versions: Index into `cores` of each client's version of c_j.  # [k, N]
            i: Client indices.  # [k, 1]

        Returns:
            `into`.  # [k, P]
        """
        take = self.columns.take
        # d_ij at the version that the client has, 0 for j = i
        weights = d.new_zeros(len(d), len(cores)).scatter_(1, versions, d.scatter(1, i, 0))  # [k, V]
        # d_ii c_i + the others
        self.columns.view(into).copy_((take(core) * d.gather(1, i)).addmm_(weights, take(cores)))
        return into

    def strength(self, round: int, rounds: int) -> float:
        """Return the weight lambda(r) of the penalty in round r = `round`, which falls from 1 in round 0 to 0.

        It falls exponentially to 1e-3, or as a cosine (option scheduler), and is 0 after a fraction of the rounds.

        Args:
            round: Number of the round, from 0.
            rounds: Number of rounds of the run.
        """
        L = int(self.fraction * rounds + 1e-9)  # 1e-9 repairs rounding; as in the paper, lambda is 0 from round L on
        if round >= L:
            return 0.0
        return 1e-3 ** (round / L) if self.scheduler == "exponential" else (1 + math.cos(math.pi * round / L)) / 2

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the mixtures w_i at the end of their last training.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def matrices(self) -> dict[str, Tensor]:
        """Return {"d": [N, N]}: d[i, j] is the weight of client j's core model in client i's personal model."""
        return {"d": self.d.whole()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's tensors for a checkpoint, by attribute name: those of this object and of `exchange`.

        `exchange` has the uploaded core models, and which of them is the newest of each client.
        """
        return super().state_dict() | self.exchange.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the tensors of this object and of `exchange` to those of a dict that `state_dict` returned."""
        of_exchange = self.exchange.state_dict().keys()
        super().load_state_dict({name: value for name, value in state.items() if name not in of_exchange})
        self.exchange.load_state_dict(state)
