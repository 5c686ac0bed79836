"""Inner product manipulation (IPM): Xie, Koyejo and Gupta, UAI 2019.

    d_i <- -epsilon (1/h) sum_j d_j, over the honest clients j

If epsilon is small, the upload is near the honest ones, but the mean of all uploads may point away from theirs.
Departs from the paper: nowhere; it sums gradients, and here d is the change of an upload.  knows="own" is an addition.
"""

from torch import Tensor

from fedbench.attacks.base import Attack, Knows, Observed, repeat
from fedbench.core.options import NonNegative, NonNegativeInt, UnitInterval


class IPM(Attack):
    """The negative mean of honest changes.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        epsilon: Factor of the mean.
        knows: Whose honest uploads the attackers know: "all", of all honest clients, or "own", their own.
    """

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        epsilon: NonNegative = 0.5,
        knows: Knows = "all",
    ):
        super().__init__(fraction, clients)
        self.epsilon = epsilon
        self.knows: Knows = knows
        self.needs_honest = knows == "all"

    def corrupt(self, o: Observed) -> Tensor:
        """Return for each attacker -epsilon times the mean of the changes that attackers know, unweighted.  # [f, p]

        The option knows selects these changes."""
        return repeat(-self.epsilon * o.uploads_known_by(self.knows).mean(0), o)
