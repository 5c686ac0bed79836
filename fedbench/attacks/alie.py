"""A little is enough (ALIE): Baruch, Baruch and Goldberg, NeurIPS 2019.

    d_i <- mean_j d_j - z std_j d_j, for each coordinate, over the honest clients j
    s = floor(n/2 + 1) - f,   z = quantile of the normal distribution at (n - f - s) / (n - f)

s is the number of honest clients whose values must be farther from the mean than the attackers', so that these seem to
be the majority.  n and f count the clients of the upload.
Departs from the paper: s is at least 1 and z at least 0, so that z is finite for every n and f.
In the paper, attackers know their own honest values only; this is knows="own".
"""

from statistics import NormalDist

from torch import Tensor

from fedbench.attacks.base import Attack, Knows, Observed, repeat
from fedbench.core.options import NonNegative, NonNegativeInt, UnitInterval


class ALIE(Attack):
    """The mean of honest changes, moved by some standard deviations.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        z: Number of standard deviations.  None: by the paper's formula.
        knows: Whose honest uploads the attackers know: "all", of all honest clients, or "own", their own.
    """

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        z: NonNegative | None = None,
        knows: Knows = "all",
    ):
        super().__init__(fraction, clients)
        self.z = z
        self.knows: Knows = knows
        self.needs_honest = knows == "all"

    def corrupt(self, o: Observed) -> Tensor:
        """Return for each attacker the mean minus z standard deviations of the changes that attackers know, unweighted.

        The option knows selects these changes.  With z=None, z is `largest_z`, the largest that stays unnoticed.
        # [f, p]
        """
        uploads, f = o.uploads_known_by(self.knows), len(o.truthful)
        z = largest_z(len(o.honest) + f, f) if self.z is None else self.z
        # correction=0: divided by the number of uploads
        return repeat(uploads.mean(0) - z * uploads.std(0, correction=0), o)


def largest_z(n: int, f: int) -> float:
    """Return how many standard deviations f attackers may move the mean of n uploads unnoticed (z_max); at least 0."""
    honest = n - f
    supporters = max(n // 2 + 1 - f, 1)  # s
    fraction = (honest - supporters) / max(honest, 1)
    return NormalDist().inv_cdf(fraction) if fraction > 0.5 else 0.0
