"""SiloBN: the running statistics of batch norm are personal, all parameters are averaged.

Andreux et al., DART 2020.
Departs from the paper: nowhere.   Reduces to: FedAvg for a model without batch norm.
"""

from fedbench.algorithms.base import Columns, FlatModel
from fedbench.algorithms.fedbn import FedBN


class SiloBN(FedBN):
    """SiloBN.  Options and state are those of FedBN."""

    def personal_columns(self, model: FlatModel) -> Columns:
        """Return the positions, in a parameter vector, of the running statistics of normalization layers.

        The option norms selects "batch" normalization or "all" kinds.
        """
        return super().personal_columns(model) & model.trained.rest(model.size)
