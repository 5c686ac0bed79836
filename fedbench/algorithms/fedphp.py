"""FedPHP: each client keeps a moving average of its models (inherited private model), which teaches the next one.

Li et al., ECML-PKDD 2021.  With features z of theta and z_p of the client's average theta_p, in round t = 0, ..., T:

    loss = (1 - lam) CE + lam MMD(z, z_p)
    theta_p <- (1 - m) theta + m theta_p,   m = mu t / T

MMD is the squared maximum mean discrepancy of the features in a batch, with a sum of Gaussian kernels.  The server
averages theta as FedAvg.  Deployed: theta_p.
m depends on the round, not on how often the client took part: a client that is first sampled late keeps most of the
initial model in theta_p.  T is the last round.
Departs from the paper: z_p are computed in evaluation mode.  PFLlib evaluates theta, and never theta_p.
Reduces to: FedAvg with lam = 0 (training), FedAvg-local with lam = mu = 0.
"""

from torch import Tensor

from fedbench.algorithms._features import features_and_logits, frozen_features, mmd, require_features
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import Probability
from fedbench.engine.per_client import PerClient, per_client


class FedPHP(FedAvg):
    """FedPHP.  theta_p: running average of a client's models, which it deploys; lam: weight of the discrepancy to it.

    Args:
        mu: Weight of theta_p in the average of the last round, in [0, 1], or a list with one per client.
        lam: Weight of the discrepancy, in [0, 1], or a list with one per client.

    State:
        w: Server model, [P].
        theta_p: Averages of the clients' models, [N, P].
    """

    requires = ("head",)

    def __init__(self, mu: Probability | list[Probability] = 0.9, lam: Probability | list[Probability] = 0.1):
        super().__init__()
        self.mu: float | PerClient = per_client(mu)
        self.lam: float | PerClient = per_client(lam)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model has a linear head, whose input is the features."""
        super().check(federation, model, optimizer)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the clients' moving averages theta_p [N, P] to the initial model.

        `rows` stores theta_p.
        """
        super().setup(federation, model, rows)  # sets self.w
        self.theta_p = rows("theta_p", default=self.w)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedPHP: clients train, update their average theta_p, and the server averages as FedAvg.

        theta_p is the moving average of the client's models over the rounds, which it deploys.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        theta_p = self.theta_p[cohort.ids]  # [K, P]
        out = cohort.train(w, loss=self.loss, theta_p=theta_p) if self.lam else cohort.train(w)
        # weight of the average, which grows from 0 in the first round to the option mu in the last one; a number, or
        # [K, 1] if mu is a list
        m = cohort.value(self.mu) * (cohort.round / max(cohort.rounds - 1, 1))
        self.theta_p[cohort.ids] = (1 - m) * out.theta + m * theta_p
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def loss(self, s: Step, theta: Tensor, batch: Batch) -> Tensor:
        """Return (1 - lam) times the task's loss plus lam times the discrepancy to the average model theta_p.

        The discrepancy is the MMD of the batch's features under theta and theta_p.  Every sample gets that of its
        batch.

        # [k, B]
        """
        z, logits = features_and_logits(s, theta, batch)  # [k, B, F], [k, B, C]
        z_p = frozen_features(s, s.state.theta_p, batch)  # [k, B, F]
        # s.value: one number, or [k, 1] if lam is a list
        # flatten: features of pixels or tokens, if any, count as one vector of the sample
        lam, discrepancy = s.value(self.lam), mmd(z.flatten(2).float(), z_p.flatten(2).float(), batch.weight)  # [k]
        return (1 - lam) * s.task_loss(logits, batch) + lam * discrepancy[:, None]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the moving averages theta_p.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta_p[cohort.ids]
