"""Fall of empires (FOE) with a line search: Allouah et al., AISTATS 2023.

    d_i <- m + eta (-m) = (1 - eta) m, with the mean m of honest changes

It is IPM of Xie, Koyejo and Gupta (UAI 2019) with epsilon = eta - 1.  IPM has a fixed factor.  FOE chooses the factor
anew for each upload: a line search maximizes the distance of the run's aggregation rule from m.
Departs from the paper: eta is at most `largest`, because the distance of a rule such as the mean has no maximum.
The attackers know all honest uploads, the rule and the clients' weights.
"""

from collections.abc import Callable

from torch import Tensor

from fedbench.attacks.base import Attack, Observed, repeat
from fedbench.core.options import Count, NonNegativeInt, Positive, UnitInterval

SHRINKING = 0.8  # factor of the step of the search, after its first failure


class FOE(Attack):
    """The mean of honest changes times 1 - eta, with the most harmful eta.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        evaluations: Number of evaluations of the aggregation rule in a line search.
        largest: Largest eta.
    """

    needs_honest = True

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        evaluations: Count = 16,
        largest: Positive = 10.0,
    ):
        super().__init__(fraction, clients)
        self.evaluations, self.largest = evaluations, largest

    def corrupt(self, o: Observed) -> Tensor:
        """Return (1 - eta) m for each attacker: m is the mean of honest uploads, and a line search finds eta.

        # [f, p]
        """
        mean = o.honest.mean(0)  # m  [p]

        # how far the server's result moves; repeat: the same upload for each attacker
        def distance(eta: float) -> float:
            return float((o.aggregate(repeat((1 - eta) * mean, o)) - mean).norm())

        eta = line_search(distance, evaluations=self.evaluations, largest=self.largest)
        return repeat((1 - eta) * mean, o)


def line_search(function: Callable[[float], float], evaluations: int, largest: float, step: float = 1.0) -> float:
    """Return the argument in [0, largest] with the largest value that a line search finds.

    It moves up from 0 by steps that double, until a value is not larger.  Then it tries ever smaller steps up.

    Args:
        function: The function to maximize.
        evaluations: Number of its evaluations, at least 1.
        largest: Upper limit of the argument.
        step: The first step.
    """
    best, highest, is_growing = 0.0, function(0.0), True
    for _ in range(evaluations - 1):
        candidate = min(best + step, largest)
        value = highest if candidate == best else function(candidate)
        is_growing = is_growing and value > highest
        if value > highest:
            best, highest = candidate, value
        step *= 2 if is_growing else SHRINKING  # SHRINKING is 0.8
    return best
