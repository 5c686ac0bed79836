"""FedFomo: each client mixes the models of those that help it, by their loss on samples it holds out.

Zhang et al., ICLR 2021.  For the models theta_j that client i downloads, with L the loss on its held-out samples,
omega_j = max(L(ref_i) - L(theta_j), 0) / (||theta_j - ref_i|| + 1e-5), then divided by their sum; where that is
positive theta_i <- sum_j omega_j theta_j, the paper's theta_i + sum_j omega_j (theta_j - theta_i).  Clients upload
omega; the server keeps Pref <- Pref + omega, from I, and sends client i the first M by Pref[i] among last round's
uploads.
Departs from the paper, as the code behind the PFL benchmarks does: ref_i is what i mixed the last time it was
sampled, before its training (reference="trained": the paper's theta_i); no exploration (epsilon).  Ties of Pref are
broken by lot; the held-out samples are a random share.
Reduces to: Local on the kept samples at models = 0.
"""

from typing import Any, Literal

import torch

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import Natural, Probability, Share


class FedFomo(Algorithm):
    """models: M; held_out: share of the training samples that only L sees; epsilon: chance that a download is drawn
    from all the others rather than by Pref.

    State: theta [N, P], what client i last trained; ref [N, P] (reference="aggregated"); pref [N, N], Pref - I;
    of the last cohort last [K', P], prev [K'].
    """

    def __init__(self, models: Natural = 8, held_out: Share = 0.2,
                 reference: Literal["aggregated", "trained"] = "aggregated", epsilon: Probability = 0.0):
        self.models, self.held_out, self.reference, self.epsilon = models, held_out, reference, epsilon
        self.last: Any = None                                                         # nothing uploaded yet

    def setup(self, federation, model, rows):
        w = model.init_row()
        self.theta = rows("theta", default=w)                                         # lazy [N, P]
        self.ref = rows("ref", default=w) if self.reference == "aggregated" else self.theta
        self.pref = rows("pref", default=torch.zeros(federation.num_clients).to(w))   # lazy [N, N]
        federation.hold_out(self.held_out)                                            # splits "kept" and "held"

    def round(self, cohort):
        theta = self.theta[cohort.ids]                                                # [K, P]
        if self.last is not None and self.models:
            theta = self.mixed(cohort, theta, self.ref[cohort.ids])
        out = cohort.train(theta, split="kept")
        self.ref[cohort.ids] = theta                  # reference="trained": the same rows as theta, written next
        self.theta[cohort.ids] = out.theta
        known = self.theta.default                                                    # where everybody began  [P]
        self.last, self.prev = cohort.upload(theta=out.theta, around={"theta": known}).theta, cohort.index

    def mixed(self, cohort, theta, ref):
        chosen = self.choose(cohort)                                                  # [K, M]
        sent = cohort.download(theta=self.last[chosen]).theta                         # [K, M, P]
        gain = cohort.loss(ref, "held")[:, None] - cohort.loss(sent, "held")          # [K, M]
        own = cohort.model.trained.take(ref)
        away = torch.stack([(cohort.model.trained.take(m) - own).norm(dim=1) for m in sent.unbind(1)], 1)
        omega = gain.clamp_min(0) / (away + 1e-5)                                     # [K, M]
        total = omega.sum(1, keepdim=True)                                            # [K, 1]
        omega = torch.where(total > 0, omega / total, 0)
        told = cohort.upload(omega=omega, around={"omega": None}).omega
        self.pref[cohort.ids] = self.pref[cohort.ids].scatter_add(1, self.prev[chosen], told)
        return torch.where(total > 0, (omega[:, None] @ sent)[:, 0], theta)

    def choose(self, cohort):
        """For each client the positions, in the last cohort, of the models it downloads.  # [K, M]"""
        many, draws = min(self.models, len(self.prev)), cohort.random("fedfomo")
        pref = self.pref[cohort.ids][:, self.prev] + (cohort.index[:, None] == self.prev)            # [K, K']
        lot = draws.uniform(len(self.prev)).argsort(1)
        order = lot.gather(1, pref.gather(1, lot).argsort(dim=1, descending=True, stable=True))
        greedy = (draws.uniform(many) >= self.epsilon).sum(1, keepdim=True)           # [K, 1], of the M
        rank = torch.arange(len(self.prev), device=pref.device)
        rank = torch.where(rank < greedy, rank, len(self.prev) + draws.uniform(len(self.prev)))
        return order.gather(1, rank.argsort(1))[:, :many]

    def personalized(self, cohort, final):
        return self.theta[cohort.ids]
