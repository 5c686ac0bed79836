"""Class-disjoint label skew: each class belongs to one client, few-shot if asked.

Source: the prompt-learning papers (pFedMoAP, FedOTP) on CLIP's small data sets: the classes, shuffled by
Python's ``random.Random(2023)``, are dealt out round(C / N) at a time (half to even), the last client taking
the remainder; its test samples are all those of its classes.  ``shots`` keeps that many train samples of each
class: a prefix of one permutation per class, so 4 shots are among the 8.  The papers take fewer where there are
fewer, which none of their sets is in need of at 16 shots: it is refused unless ``short_classes`` allows it.
"""

import random
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, NonNegativeInt, require
from fedbench.core.split import Ragged
from fedbench.partition.base import by_class


class ClassDisjoint:
    """class_seed: orders the classes, apart from partition.seed, which picks the shots.

    shots: train samples per class, None for all; needs train and test kept apart.
    short_classes: a class with fewer train samples than shots is refused, or keeps (keep) those it has.
    """

    def __init__(
        self,
        class_seed: NonNegativeInt = 2023,
        shots: Count | None = None,
        short_classes: Literal["refuse", "keep"] = "refuse",
    ):
        self.class_seed, self.shots = class_seed, shots
        self.short_classes: Literal["refuse", "keep"] = short_classes

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
        if self.shots is not None and self.short_classes == "refuse":
            _require_shots(labels, pools[0], self.shots)
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


def _require_shots(labels: np.ndarray, pool: np.ndarray, shots: int) -> None:
    """Every class has as many samples in the pool."""
    sizes = [len(members) for members in by_class(labels, pool)]  # [C]
    short = [(c, size) for c, size in zip(np.unique(labels), sizes) if size < shots]
    if short:
        raise ConfigError(
            f"partition.shots={shots} is more than the train samples of {len(short):,} of {len(sizes):,} classes (the "
            f"first is class {short[0][0]}, with {short[0][1]}): lower it, or let such classes give what they have by "
            "partition.short_classes=keep"
        )
