"""FedDyn: a linear and a quadratic term, kept per client, align the local optima with the global one.

Acar et al., ICLR 2021, Algorithm 1:  theta_i <- argmin f_i(theta) - <g_i, theta> + (alpha/2) ||theta - w||^2.
Departs from the paper: SGD epochs for the argmin, as all codes (the authors' weight decay and clipping are the
optimizer's options; the added terms pass through momentum like the gradient).  BatchNorm buffers are averaged only.
Reduces to: FedProx(mu = alpha) within a client, in its first participation.
"""

import torch

from fedbench.algorithms.base import Algorithm
from fedbench.options import Positive


class FedDyn(Algorithm):
    """alpha: weight of the quadratic term.  State: w [P], h [P]; g [N, P], the gradient at each
    client's last local optimum."""

    personal_is_global = True

    def __init__(self, alpha: Positive = 0.1):
        self.alpha = alpha

    def setup(self, federation, model, rows):
        self.w = model.init_row()                                                     # [P]
        self.h = torch.zeros_like(self.w)                                             # [P]
        self.g = rows("g", default=self.h)                                            # lazy [N, P]
        self.learned = model.trained

    def round(self, cohort):
        g = self.g[cohort.ids]                                                        # [K, P]
        w = cohort.broadcast(w=self.w).w                                              # [P]
        out = cohort.train(w, g=g, extra_grad=lambda s: self.alpha * (s.theta - w) - s.g)
        self.g[cohort.ids] = g - self.alpha * (out.theta - w)
        up = cohort.upload(theta=out.theta)                                           # [K, P]
        self.h = self.h - self.alpha * (up.theta - w).sum(0) / cohort.num_clients     # over all N
        mean = up.theta.mean(0)
        self.w = self.learned.put(mean, self.learned.take(mean - self.h / self.alpha))

    def personalized(self, cohort, final):
        return self.w

    def global_row(self):
        return self.w
