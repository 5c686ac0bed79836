"""FedBN: the batch norm of every client is personal, all other parameters are averaged.

Li et al., ICLR 2021, Algorithm 1.
Departs from the paper: averages are weighted by samples; the released code weights clients equally
(client_weights=uniform).  Batch norm is found by layer type.  Released codes look for "bn" in names, which misses the
shortcuts of ResNets.
Reduces to: FedAvg for a model without batch norm.
"""

import logging
from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Columns, Federation, FlatModel, LocalTraining, RowStore

log = logging.getLogger(__name__)
PATTERNS = {"batch": ["type:*BatchNorm*"], "all": ["type:*Norm*"]}


class FedBN(Algorithm):
    """FedBN.

    Args:
        norms: Which layers are personal: "batch", or "all" normalization layers (batch, layer, group, instance).

    State:
        w: Averaged columns without the personal ones, [|w|].
        b: Personal columns as last trained, [N, |b|].
    """

    def __init__(self, norms: Literal["batch", "all"] = "batch"):
        self.norms = norms

    def personal_columns(self, model: FlatModel) -> Columns:
        """Return the parameters and running statistics of the personal layers."""
        return model.add_group("personal_norms", PATTERNS[self.norms])

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Start all clients from one initial model."""
        self.personal = self.personal_columns(model)
        self.shared = self.personal.rest(model.size)
        if not self.personal.size:
            log.warning("the model has no such normalization layers, so algorithm=%s is FedAvg here", self._name)
        w = model.init_row()
        self.w = self.shared.take(w).clone()  # [|w|]
        self.b = rows("b", default=self.personal.take(w))  # lazy [N, |b|]

    def round(self, cohort: Cohort) -> None:
        """Run one round of Algorithm 1."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(self.with_norms(cohort, w), how=LocalTraining(uploaded=self.shared))  # [K, P]
        up = cohort.upload(w=self.shared.take(out.theta), relative_to={"w": "w"})  # [K, |w|]; the change of w is sent
        self.w = cohort.mean(up.w, updates="w")  # the new w, by the run's server rule
        self.b[cohort.ids] = self.personal.take(out.theta)

    def with_norms(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Return the shared columns joined with each client's own.  # [K, P]"""
        rows = w.new_empty(len(cohort), self.shared.size + self.personal.size)
        return self.personal.put(self.shared.put(rows, w), self.b[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the averaged columns with each client's normalization layers."""
        return self.with_norms(cohort, cohort.broadcast(w=self.w).w)
