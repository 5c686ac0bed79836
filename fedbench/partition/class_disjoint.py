"""Class-disjoint label skew: each class belongs to one client, few-shot if asked.

Source: the prompt-learning papers (pFedMoAP, FedOTP) on CLIP's small data sets: the classes, shuffled by
Python's ``random.Random(2023)``, are dealt out round(C / N) at a time (half to even), the last client taking
the remainder; its test samples are all those of its classes.  ``shots`` keeps that many train samples of each
class (fewer where there are fewer): a prefix of one permutation per class, so 4 shots are among the 8.
"""

import random

import numpy as np

from fedbench.options import Count, Natural, require
from fedbench.partition.base import Ragged, by_class


class ClassDisjoint:
    """class_seed: orders the classes, apart from partition.seed, which picks the shots.

    shots: train samples per class, None for all; needs train and test kept apart.
    """

    def __init__(self, class_seed: Natural = 2023, shots: Count | None = None):
        self.class_seed, self.shots = class_seed, shots

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where a client would be left without a class."""
        owner = self._owners(len(np.unique(labels)), num_clients)  # [C]
        require(
            self.shots is None or len(pools) > 1,
            f"partition.shots={self.shots} limits train samples only: it needs dataset.split=published or stratified",
        )
        dealt = []
        for i, pool in enumerate(pools):
            classes = [rng.permutation(members) for members in by_class(labels, pool)]
            if i == 0 and self.shots is not None:
                classes = [members[: self.shots] for members in classes]
            owners = np.repeat(owner, [len(members) for members in classes])  # [total]
            dealt.append(Ragged.from_owners(np.concatenate(classes), owners, num_clients))
        return dealt

    def _owners(self, num_classes: int, num_clients: int) -> np.ndarray:
        """The client of each class [C]."""
        each = round(num_classes / num_clients)
        require(
            each >= 1 and (num_clients - 1) * each < num_classes,
            f"partition.num_clients={num_clients:,} cannot share {num_classes} classes: "
            f"round(classes / clients) = {each} each would leave a client without any",
        )
        order = list(range(num_classes))
        random.Random(self.class_seed).shuffle(order)
        owner = np.empty(num_classes, np.int64)
        owner[order] = np.minimum(np.arange(num_classes) // each, num_clients - 1)
        return owner
