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
    """FedBN.  w: shared parameters; b_i: normalization layers of client i, which are personal.

    Args:
        norms: Which layers are personal: "batch", or "all" normalization layers (batch, layer, group, instance).

    State:
        w: Averaged columns without the personal ones, [|w|].
        b: Personal columns as last trained, [N, |b|].
    """

    def __init__(self, norms: Literal["batch", "all"] = "batch"):
        self.norms = norms

    def personal_columns(self, model: FlatModel) -> Columns:
        """Return the positions, in a parameter vector, of the normalization layers' parameters and running statistics.

        The option norms selects "batch" normalization or "all" kinds.
        """
        return model.add_group("personal_norms", PATTERNS[self.norms])

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Split the initial model into the server's shared part w [|w|] and the clients' normalization layers b_i.

        `rows` stores b_i [N, |b|].
        """
        self.personal = self.personal_columns(model)  # columns of the personal layers in a row
        self.shared = self.personal.rest(model.size)  # all other columns
        if not self.personal.size:
            log.warning(
                "the model has no layers with the normalization algorithm.norms=%s, so algorithm=%s computes the same "
                "as fedavg: choose a model with such layers",
                self.norms,
                self._name,
            )
        w = model.init_row()
        self.w = self.shared.take(w).clone()  # [|w|]
        self.b = rows("b", default=self.personal.take(w))  # [N, |b|]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedBN (Algorithm 1): clients train all parameters; norm layers are not averaged."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [|w|]
        # with_norms: rows of w and b_i; uploaded: the columns that leave the client, whose gradients privacy clips
        out = cohort.train(self.with_norms(cohort, w), how=LocalTraining(uploaded=self.shared))  # [K, P]
        up = cohort.upload(w=self.shared.take(out.theta), relative_to={"w": "w"})  # [K, |w|]; the change of w is sent
        self.w = cohort.mean(up.w, updates="w")  # the new w: the mean, or the step of the option server towards it
        self.b[cohort.ids] = self.personal.take(out.theta)

    def with_norms(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Return the sampled clients' whole models: the shared part w [|w|] and each client's own norm layers b_i.

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = w.new_empty(len(cohort), self.shared.size + self.personal.size)
        return self.personal.put(self.shared.put(rows, w), self.b[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: shared columns w with each client's normalization.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.with_norms(cohort, cohort.broadcast(w=self.w).w)
