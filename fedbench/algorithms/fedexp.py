"""FedExP: the server extrapolates along the mean change of the clients.

Jhunjhunwala, Wang and Joshi, ICLR 2023, Algorithm 1.  With Delta_i = w - theta_i and their mean Delta:

    eta_g = max(1, sum_i |Delta_i|^2 / (2 K (|Delta|^2 + eps)))
    w <- w - eta_g Delta

The rule is in server/exp.py.  The mean of the last two w is deployed.
Departs from the paper: eps is constant; the released code decays it.
Reduces to: FedAvg if all uploads are equal, or with one client per round.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore
from fedbench.core.options import NonNegative
from fedbench.server.exp import Extrapolation


class FedExP(Algorithm):
    """FedExP.  w: server model; previous: the one before; rule: how the server extrapolates the mean change.

    Args:
        eps: Added to the squared norm of the mean change, >= 0.
        deploy: "mean_of_two" deploys the mean of the last two server models, as in the paper; "last" the last one.
        weights: How the server averages: "uniform", as in the paper, or "samples", as the released code.

    State:
        w, previous: The last two server models, [P].
    """

    def __init__(
        self,
        eps: NonNegative = 1e-3,
        deploy: Literal["mean_of_two", "last"] = "mean_of_two",
        weights: Literal["uniform", "samples"] = "uniform",
    ):
        self.rule, self.deploy = Extrapolation(eps), deploy
        self.weights: Literal["uniform", "samples"] = weights

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set w and `previous`, the server's current and previous model, to the initial model.  # [P] each"""
        self.w = self.previous = model.init_row()  # [P]

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedExP (Algorithm 1): the server extrapolates the mean change of the clients."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent
        self.previous = self.w
        self.w = cohort.mean(up.theta, self.weights, updates="w", rule=self.rule)  # the new w, by self.rule

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return what the cohort deploys, `global_row` for every client.  # [P]

        `final`, whether the last round is over, changes nothing.
        """
        return cohort.broadcast(w=self.global_row()).w

    def global_row(self) -> Tensor:
        """Return the mean of the server's last two models; with the option deploy="last", its last model.  # [P]"""
        return (self.w + self.previous) / 2 if self.deploy == "mean_of_two" else self.w
