"""Pathological label skew: every client holds a few classes only, in random amounts.

Source: APPLE (Luo and Wu, IJCAI 2022), its authors' code: random permutations of the classes, end to end,
are dealt out ``classes_per_client`` at a time; each holder of a class draws u ~ U(0, 1) and gets the share
u / sum(u), the same in the train and the test pool.  With ``seed: 42`` the draws are those of that code.
A client whose classes straddle two permutations may be dealt the same class twice and then has one class
less; the code keeps this, ``distinct`` swaps in the next class it lacks.
Samples of classes that nobody was dealt (num_clients * classes_per_client < C), and the few that rounding
leaves over, stay out.
"""

import numpy as np

from fedbench.core.options import Count, require
from fedbench.core.split import Ragged
from fedbench.partition.base import deal_shares


class Pathological:
    """classes_per_client: at most C.  distinct: no client is dealt a class twice."""

    def __init__(self, classes_per_client: Count = 2, distinct: bool = False):
        self.classes_per_client, self.distinct = classes_per_client, distinct

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where there are fewer classes than a client should have."""
        num_classes = len(np.unique(labels))
        require(
            self.classes_per_client <= num_classes,
            f"partition.classes_per_client={self.classes_per_client} is more than the {num_classes} classes "
            "of the data set",
        )
        held = self._deal_classes(num_classes, num_clients, rng)  # [N, classes_per_client]
        shares = np.zeros((num_classes, num_clients))
        shares[held, np.arange(num_clients)[:, None]] = 1
        for row in shares:
            holders = np.flatnonzero(row)
            if len(holders):
                drawn = rng.random_sample(len(holders))
                row[holders] = drawn / drawn.sum()
        return deal_shares(labels, pools, shares, rng)

    def _deal_classes(self, num_classes: int, num_clients: int, rng: np.random.RandomState) -> np.ndarray:
        """Which classes each client holds, [N, classes_per_client]."""
        each = self.classes_per_client
        dealt: list[int] = []
        for _ in range(num_clients * each // num_classes + 1):
            order = rng.permutation(num_classes).tolist()
            begun = len(dealt) % each  # classes already dealt to a client who still lacks some
            if self.distinct and begun:
                has = set(dealt[-begun:])
                new = [c for c in order if c not in has][: each - begun]
                order = new + [c for c in order if c not in new]
            dealt += order
        return np.array(dealt[: num_clients * each]).reshape(num_clients, each)
