"""FedCAC: each client keeps its critical parameters, and averages them with clients that have similar ones.

Wu et al., ICCV 2023, Algorithm 1.  Client i trains theta_i from its start b_i.  In each tensor of n parameters the
int(tau n) with the largest sensitivity |(theta_i - b_i) theta_i| are critical, m_i = 1.  In round t = 1, 2, ...

    w = sum p_i theta_i
    O_ij = 1 - |m_i - m_j|_1 / (2 |m_i|_1)                          overlap of two clients of the round
    threshold = mean O + t / beta (max O - mean O)                  over pairs i != j
    c_i = mean of theta_j over i and all j with O_ij >= threshold
    b_i <- m_i c_i + (1 - m_i) w

Deployed: b_i with the newest w.  From round beta + 1 on the threshold exceeds all O_ij, and c_i = theta_i.
Departs from the paper: the server computes m_i from the uploaded theta_i and sends b_i.  In the paper clients compute
m_i and receive w and c_i.  The result is equal if nothing is compressed and no noise is added.  If all O_ij are equal,
c_i = theta_i from round beta + 1 on, too.  Running statistics come from w.
If the int(tau n)-th largest sensitivity of a tensor is at most TINY, those above ZERO are critical.
Reduces to: FedAvg with tau = 0; Local with tau = 1 and beta < 1, if all sensitivities are positive.
"""

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore
from fedbench.core.linalg import products
from fedbench.core.options import Positive, Probability

TINY, ZERO = 1e-10, 1e-20  # a threshold up to TINY is replaced by the smallest sensitivity above ZERO


class FedCAC(Algorithm):
    """FedCAC.  m_i [P]: which parameters of client i are critical; c_i: mean over clients with similar m_i.

    Args:
        tau: Fraction of critical parameters in each tensor, in [0, 1].
        beta: Number of rounds in which clients share critical parameters, > 0.

    State:
        w: Server model, [P].
        c: Means over similar clients, [N, P].  m: Whether a parameter is critical, [N, P].
    """

    def __init__(self, tau: Probability = 0.5, beta: Positive = 100.0):
        self.tau, self.beta = tau, beta

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the clients' means c_i [N, P] to the initial model.

        The masks m_i [N, P], which mark the critical parameters of client i, become False.  `rows` stores c_i and m_i.
        """
        self.w = model.init_row()  # [P]
        self.c = rows("c", default=self.w)  # [N, P]; a row equals the default until it is set
        self.m = rows("m", default=torch.zeros_like(self.w, dtype=torch.bool))  # [N, P], at first the default
        # columns (start, stop) of each tensor, without running statistics
        self.spans = [span for name, span in model.spans.items() if name not in model.buffer_names]

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedCAC: clients train from b_i; the server averages w, and c_i over similar clients.

        m_i are the client's critical parameters, those whose training matters most.  b_i has c_i there, and w
        elsewhere.
        """
        b = self.start(cohort)  # [K, P]
        out = cohort.train(cohort.download(b=b).b)  # download: each client gets its own b_i
        theta = cohort.upload(theta=out.theta, relative_to={"theta": "b"}).theta  # [K, P]; theta - b is sent
        # sensitivity of each parameter: its change times its value
        m = self.critical((theta - b) * theta)  # [K, P]
        self.w = cohort.mean(theta)  # weighted by n_i
        # t counts rounds from 1; `groups`: a mean for each client over the clients similar to it
        self.c[cohort.ids] = cohort.mean(theta, weights="uniform", groups=self.similar(m, cohort.round + 1))
        self.m[cohort.ids] = m

    def start(self, cohort: Cohort) -> Tensor:
        """Return the model b_i from which client i trains: its mean c_i in critical parameters, else w.  # [K, P]"""
        return torch.where(self.m[cohort.ids], self.c[cohort.ids], self.w)

    def critical(self, sensitivity: Tensor) -> Tensor:
        """Return which parameters of each client are critical.

        In each parameter tensor of n numbers these are the int(tau n) whose sensitivities have the largest magnitude.

        Args:
            sensitivity: Sensitivities (theta_i - b_i) theta_i of K clients.  # [K, P]

        Returns:
            True for critical parameters.  Those without any sensitivity (at most 1e-20) never are.  # [K, P] bool
        """
        m = torch.zeros_like(sensitivity, dtype=torch.bool)
        for start, stop in self.spans:  # columns of each parameter tensor
            s = sensitivity[:, start:stop].abs()
            if count := int(self.tau * (stop - start)):
                threshold = s.topk(count, sorted=False).values.amin(1, keepdim=True)  # smallest of the largest  [K, 1]
                # a threshold of about 0 would select parameters without any sensitivity, too, so it is replaced by
                # the smallest sensitivity that is not 0
                positive = torch.where(s > ZERO, s, torch.inf).amin(1, keepdim=True)  # [K, 1]
                # TINY: 1e-10, ZERO: 1e-20
                m[:, start:stop] = s >= torch.where(threshold <= TINY, positive, threshold)
        return m

    def similar(self, m: Tensor, t: int) -> Tensor:
        """Return whether client j enters the mean c_i in round t (1 is the first).

        Args:
            m: Which parameters are critical.  # [K, P] bool
            t: Number of the round.

        Returns:
            True for j = i, and for each j whose overlap with i reaches the threshold.  # [K, K] bool
        """
        m = m.float()
        size = m.sum(1)  # number of critical parameters  [K]
        # products(m, m)[i, j]: parameters that are critical for both  [K, K]
        differing = size[:, None] + size - 2 * products(m, m)  # |m_i - m_j|_1
        overlap = 1 - differing / (2 * size[:, None]).clamp_min(1)  # O_ij = 1 - |m_i - m_j|_1 / (2 |m_i|_1)  [K, K]
        itself = torch.eye(len(m), dtype=torch.bool, device=m.device)
        if len(m) == 1:
            return itself
        pairs = overlap[~itself]  # O_ij of all i and j != i
        # it rises from the mean overlap to the largest, which it reaches in round beta
        threshold = pairs.mean() + t / self.beta * (pairs.max() - pairs.mean())
        return (overlap >= threshold) & (t <= self.beta) | itself  # after round beta, only the client itself

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, b_i with the newest server model w.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return cohort.download(b=self.start(cohort)).b

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
