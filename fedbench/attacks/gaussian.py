"""Gaussian attack: attackers upload noise in place of their change.

    d_i <- N(0, std^2 I)

Source: Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017, whose attackers send Gaussian vectors.
"""

from torch import Tensor

from fedbench.attacks.base import Attack, Observed
from fedbench.core.options import NonNegative, NonNegativeInt, UnitInterval


class Gaussian(Attack):
    """Normal noise.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        std: Standard deviation of each value.
    """

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        std: NonNegative = 1.0,
    ):
        super().__init__(fraction, clients)
        self.std = std

    def corrupt(self, o: Observed) -> Tensor:
        """Return normal noise of standard deviation `std` (an option), independent for attackers, uploads and rounds.

        # [f, p]
        """
        return self.std * o.random.normal(o.truthful.shape[1]).to(o.truthful)
