"""Sign flipping: attackers upload their change in the opposite direction.

    d_i <- -scale d_i

Source: Li, Xu, Chen, Giannakis and Ling, RSA, AAAI 2019, whose attackers multiply their messages by a negative number.
"""

from torch import Tensor

from fedbench.attacks.base import Attack, Observed
from fedbench.core.options import NonNegative, NonNegativeInt, UnitInterval


class SignFlip(Attack):
    """The attackers' own changes with the opposite sign.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        scale: Factor of the change.
    """

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        scale: NonNegative = 4.0,
    ):
        super().__init__(fraction, clients)
        self.scale = scale

    def corrupt(self, o: Observed) -> Tensor:
        """Return what the attackers would upload if honest, times -scale, the negative option scale.  # [f, p]"""
        return -self.scale * o.truthful
