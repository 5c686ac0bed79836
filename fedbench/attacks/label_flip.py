"""Label flipping: attackers train on wrong labels: Tolpegin, Truex, Gursoy and Liu, ESORICS 2020.

    y <- C - 1 - y, or y = a becomes b for pair=[a, b]

The inputs, and the validation and test samples, do not change.  Attackers are honest otherwise.
"""

from dataclasses import replace

import numpy as np

from fedbench.attacks._copies import append_copies, entries_of, require_classes, with_entries
from fedbench.attacks.base import Attack, Poisoned
from fedbench.core.options import NonNegativeInt, UnitInterval, require
from fedbench.core.split import Split
from fedbench.data.base import Arrays


class LabelFlip(Attack):
    """Wrong labels of the attackers' training samples.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        pair: Two classes: samples of the first get the label of the second.  None: y becomes C - 1 - y for all classes.
    """

    changes_uploads = False

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        pair: list[NonNegativeInt] | None = None,
    ):
        super().__init__(fraction, clients)
        self.pair = pair
        require(
            pair is None or (len(pair) == 2 and pair[0] != pair[1]),
            f"attack.pair={pair} must be two different classes, such as [3,5], or null for all classes",
        )

    def poison(self, arrays: Arrays, split: Split, attackers: np.ndarray, seed: int) -> Poisoned:
        """Return the data with wrong labels of the attackers' training samples.

        Class c becomes C - 1 - c.  With the option `pair`, only samples of class pair[0] change, to class pair[1].

        Args:
            arrays: The data set.
            split: The samples of each client.
            attackers: The attackers.  # [f]
            seed: The run's seed, which this attack does not need.

        Raises:
            ConfigError: Targets are not classes, or `pair` names a class that does not exist.
        """
        require_classes(arrays, "label_flip")
        positions = entries_of(split.train, attackers)  # [k]
        labels = arrays.targets[split.train.indices[positions]]  # [k]
        flipped = arrays.num_classes - 1 - labels
        if self.pair is not None:
            require(
                max(self.pair) < arrays.num_classes,
                f"attack.pair={list(self.pair)}: choose two of the classes 0 to {arrays.num_classes - 1}",
            )
            flipped = np.full_like(labels, self.pair[1])
            chosen = labels == self.pair[0]
            positions, flipped = positions[chosen], flipped[chosen]
        changed = append_copies(arrays, split.train.indices[positions], flipped)
        # the attackers train on the copies, whose indices come after all others
        copies = len(arrays) + np.arange(len(positions))
        return Poisoned(changed, replace(split, train=with_entries(split.train, positions, copies)))
