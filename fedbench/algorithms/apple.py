"""APPLE: every client uploads a core model, and learns with which weights to sum everybody's cores.

Luo and Wu, IJCAI 2022, Algorithm 1.  Client i's personal model is w_i = sum_j d_ij c_j: of the cores it trains its own
c_i alone, of its directed relationship vector d_i all entries, to minimize f_i(w_i) + lambda(r) (mu/2) ||d_i - q||^2
with q = n / sum n.  A batch, with G = grad f_i(w_i) and both at the values before it:
c_i <- c_i - lr d_ii G;   d_ij <- d_ij - eta2 (<G, c_j> + lambda(r) mu (d_ij - q_j)) for all j.
Departs from the paper, as the released code does: the penalty is lambda mu ||d_i - q||^2, without the 1/2 (prox_half),
and the cores start from independent draws (init="common": from one).  The optimizer (momentum, schedule) moves both c
and d.  Deployed: w_i as trained, so the others' cores are one round old.  BatchNorm buffers are the client's own and
are not mixed.
Limited bandwidth: in its first round a client downloads all cores, then M a round, keeping the old versions of the
others; first those it never chose, then by |d_ij|, as the released code intends (selection="uniform": as it runs).
Reduces to: Local at d = I with eta2 = 0.
"""

import math
from typing import Literal

import torch

from fedbench.algorithms.base import Algorithm
from fedbench.core.linalg import dot
from fedbench.core.options import Count, NonNegative, Probability, require
from fedbench.engine.per_client import per_client
from fedbench.engine.rows import memory


class APPLE(Algorithm):
    """mu, eta2: above, or lists, one number for each client; scheduler: lambda falls from 1, over this fraction of the
    rounds, and is 0 afterwards; bandwidth: M (null: all N - 1); lamb: growth of the preference for cores of large
    |d_ij|; scale_lr="inverse_dii": c_i moves by lr G, as if client i's rate were lr / d_ii.

    State: cores [V, P], all versions in use; newest [N], the version of c_j in cores; core [N, P], c_i as client i last
    trained it; d [N, N]; theta [N, P], the deployed w_i; with a bandwidth also held [N, N], the versions that client i
    last downloaded (-1: none yet), and seen [N, N], whether it ever chose them.
    """

    def __init__(self, mu: NonNegative | list[NonNegative] = 0.1, eta2: NonNegative | list[NonNegative] = 0.001,
                 scheduler: Literal["exponential", "cosine"] = "exponential", fraction: Probability = 0.1,
                 prox_half: bool = False, bandwidth: Count | None = None,
                 selection: Literal["intended", "uniform"] = "intended", lamb: NonNegative = 1.0,
                 init: Literal["independent", "common"] = "independent",
                 scale_lr: Literal["none", "inverse_dii"] = "none"):
        self.mu, self.eta2 = per_client(mu), per_client(eta2)
        self.scheduler, self.fraction, self.prox_half = scheduler, fraction, prox_half
        self.bandwidth, self.selection, self.lamb, self.init, self.scale_lr = bandwidth, selection, lamb, init, scale_lr
        self.held = self.seen = None
        if bandwidth is not None and selection == "intended":
            self.leaks = "with algorithm.bandwidth, a client's choice of cores tells the server of its relationship " \
                         "vector; algorithm.selection=uniform does not look at it"

    def check(self, federation, model, optimizer):
        super().check(federation, model, optimizer)
        n, have = federation.num_clients, memory(federation.device)
        versions = n if self.bandwidth is None else n * max(n - 1, 1)
        need = 4 * (versions * model.size + n * n)
        require(need <= have,
                f"algorithm=apple needs every client's core at hand: {versions:,} cores of {model.size:,} numbers for "
                f"{n:,} clients take {need / 2**30:,.1f} GiB and {federation.device} has {have / 2**30:,.1f} GiB; "
                "it is a cross-silo method: lower partition.num_clients"
                + ("" if self.bandwidth is None else ", or set algorithm.bandwidth=null"))

    def setup(self, federation, model, rows):
        n, w = federation.num_clients, model.init_row()
        self.columns = model.trained
        self.q = torch.from_numpy(federation.num_samples / federation.num_samples.sum()).to(w)       # [N]
        self.cores = model.init_rows(n) if self.init == "independent" else w.repeat(n, 1)            # [N, P]
        self.newest = torch.arange(n, device=w.device)
        if self.bandwidth is not None:
            self.held = torch.full((n, n), -1, device=w.device)
            self.seen = torch.zeros(n, n, dtype=torch.bool, device=w.device)
        self.core = rows("core", default=w)                                           # lazy [N, P]
        self.d = rows("d", default=self.q)                                            # lazy [N, N]
        first = model.trained.put(w, model.trained.take(self.q @ self.cores))
        self.theta = rows("theta", default=first)                                     # lazy [N, P]

    def round(self, cohort):
        me, held = cohort.index[:, None], self.receive(cohort)                        # [K, 1], [K, N]
        d, known = self.d[cohort.ids], self.cores[self.newest[cohort.index]]          # [K, N], [K, P]
        core = torch.where(self.core.has(cohort.ids)[:, None], self.core[cohort.ids], known)
        personal = self.mix(core.clone(), core, d, held, me)
        eta2 = self.eta2 * cohort.engine.optimizer.schedule(cohort.round, cohort.rounds)
        pull = self.mu * self.strength(cohort.round, cohort.rounds) * (1 if self.prox_half else 2)

        def step(s, batch):
            g = s.grad(batch, s.personal)                                             # [k, P]
            grad_d = (g @ self.cores.T).gather(1, s.held)                             # [k, N]
            grad_d.scatter_(1, s.me, dot(g, s.theta)[:, None]).add_(s.own(pull) * (s.d - self.q))
            own = s.d.gather(1, s.me)                                                 # [k, 1], before it moves
            s.descend(grad_d, "d", lr=s.own(eta2), uploaded=False)
            s.descend(g.mul_(own) if self.scale_lr == "none" else g)
            self.mix(s.personal, s.theta, s.d, s.held, s.me)

        out = cohort.train(core, step=step, personal=personal, d=d, held=held, me=me,
                           buffers={"theta": "core", "d": "d"})
        self.d[cohort.ids], self.theta[cohort.ids] = out.d, out.personal
        core = self.columns.put(out.personal, self.columns.take(out.theta))           # its buffers as trained
        self.core[cohort.ids] = core
        self.publish(cohort, held, cohort.upload(core=core, around={"core": known}).core)

    def mix(self, into, core, d, held, me):
        """Write d_ii c_i + sum over j != i of d_ij c_j, as i holds c_j, into the trained columns.  # [k, P]"""
        take = self.columns.take
        weights = d.new_zeros(len(d), len(self.cores)).scatter_(1, held, d.scatter(1, me, 0))        # [k, V]
        take(into).copy_((take(core) * d.gather(1, me)).addmm_(weights, take(self.cores)))
        return into

    def strength(self, round, rounds):
        """lambda(r), in [0, 1]."""
        last = int(self.fraction * rounds + 1e-9)
        if round >= last:
            return 0.0
        return 1e-3 ** (round / last) if self.scheduler == "exponential" else (1 + math.cos(math.pi * round / last)) / 2

    def receive(self, cohort):
        """Download others' cores; returns the version of every core that each client now holds.  # [K, N]"""
        own = cohort.index[:, None] == torch.arange(cohort.num_clients, device=cohort.device)        # [K, N]
        which = ~own if self.held is None else self.choose(cohort, own)
        cohort.fetch(which, cores=self.cores)
        if self.held is None:
            return self.newest.repeat(len(cohort), 1)
        return torch.where(which | own, self.newest, self.held[cohort.index])

    def choose(self, cohort, own):
        """Which cores a client downloads: all in its first round; then M, those never chosen before first, the others
        without replacement with probability proportional to base^|d_ij|.  # [K, N] bool"""
        seen, many = self.seen[cohort.index], min(self.bandwidth or 0, cohort.num_clients - 1)
        base = max(1.5, self.lamb * cohort.round * many / cohort.num_clients)
        score = -(-cohort.random("apple").uniform(cohort.num_clients).log()).log()    # Gumbel: top M is such a draw
        late = 2 * own.int()                                                          # the own core comes last
        if self.selection == "intended":
            score, late = score + seen * self.d[cohort.ids].abs() * math.log(base), late + seen.int()
        order = score.argsort(1, descending=True)
        order = order.gather(1, late.gather(1, order).argsort(dim=1, stable=True))[:, :many]
        chosen = torch.zeros_like(own).scatter_(1, order, True)
        new = self.held[cohort.index, :1] < 0                                         # [K, 1]
        self.seen = self.seen.index_copy(0, cohort.index, seen | chosen & ~new)
        return torch.where(new, ~own, chosen)

    def publish(self, cohort, held, core):
        """Replace the cohort's cores; with a bandwidth, beside the versions that someone still holds."""
        if self.held is None:
            self.cores = self.cores.index_copy(0, cohort.index, core)
            return
        held = self.held.index_copy(0, cohort.index, held)
        added = torch.arange(len(cohort), device=core.device) + len(self.cores)
        newest = self.newest.index_copy(0, cohort.index, added)
        used = torch.cat([held[held >= 0], newest]).unique()                          # ascending
        self.cores = torch.cat([self.cores, core])[used]
        self.newest = torch.searchsorted(used, newest)
        self.held = torch.where(held >= 0, torch.searchsorted(used, held), held)

    def personalized(self, cohort, final):
        return self.theta[cohort.ids]

    def matrices(self):
        return {"d": self.d.whole()}
