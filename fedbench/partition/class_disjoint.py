"""Class-disjoint label skew: each class belongs to one client, optionally few-shot.

Source: the prompt-learning papers (pFedMoAP, FedOTP) on CLIP's small data sets.  Classes are shuffled by Python's
``random.Random(2023)``, and each client gets round(C / N) of them (half to even), the last client the remaining ones.
Its test samples are all those of its classes.  ``shots`` limits the training samples of each class to a prefix of one
permutation, so that 4 shots are a subset of 8.  The papers use fewer shots for smaller classes, which do not occur with
at most 16 shots; here ``short_classes`` must allow it.
"""

import random
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, NonNegativeInt, require
from fedbench.core.split import Ragged
from fedbench.partition.base import group_by_class


class ClassDisjoint:
    """Each class belongs to one client.  ``shots`` limits the training samples per class; None: all.

    Args:
        class_seed: Seed of the order of the classes.  The shots depend on partition.seed.
        shots: Training samples of each class.  None: all.  Needs dataset.split=published or stratified.
        short_classes: What to do about classes with fewer training samples than shots: "refuse" the partition, or
            "keep" all training samples of these classes.
    """

    def __init__(
        self,
        class_seed: NonNegativeInt = 2023,
        shots: Count | None = None,
        short_classes: Literal["refuse", "keep"] = "refuse",
    ):
        self.class_seed = class_seed
        self.shots = shots
        self.short_classes: Literal["refuse", "keep"] = short_classes

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign each class to one client, which gets its samples in every pool (set of samples).

        With the option shots, only that many training samples of each class are assigned.  For a class with fewer, the
        option short_classes says what to do: "refuse" the partition, or "keep" all samples of the class.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        client_of_class = self._assign_classes(len(np.unique(labels)), num_clients)  # [C]
        require(
            self.shots is None or len(pools) > 1,
            f"partition.shots={self.shots} limits training samples, which dataset.split=merged separates only later: "
            "set dataset.split=published or stratified",
        )
        if self.shots is not None and self.short_classes == "refuse":
            _require_shots(labels, pools[0], self.shots)
        assigned = []
        for i, pool in enumerate(pools):
            classes = [rng.permutation(members) for members in group_by_class(labels, pool)]
            if i == 0 and self.shots is not None:  # the first pool has the training samples
                classes = [members[: self.shots] for members in classes]
            clients = np.repeat(client_of_class, [len(members) for members in classes])  # [total]
            assigned.append(Ragged.from_owners(np.concatenate(classes), clients, num_clients))
        return assigned

    def _assign_classes(self, num_classes: int, num_clients: int) -> np.ndarray:
        """Return the client of each class: round(C / N) classes each in random order, the last client the remaining.

        The order depends on the option class_seed only, by Python's generator as in the papers' code.

        Args:
            num_classes: C.
            num_clients: N.

        Returns:
            Clients, [C] int64.

        Raises:
            ConfigError: A client would have no classes.
        """
        per_client = round(num_classes / num_clients)
        require(
            per_client >= 1 and (num_clients - 1) * per_client < num_classes,
            f"partition.num_clients={num_clients:,} is not possible with {num_classes} classes: with "
            f"round(classes / clients) = {per_client} each, a client would have none; use a divisor of {num_classes}",
        )
        order = list(range(num_classes))
        random.Random(self.class_seed).shuffle(order)
        client_of_class = np.empty(num_classes, np.int64)
        client_of_class[order] = np.minimum(np.arange(num_classes) // per_client, num_clients - 1)
        return client_of_class


def _require_shots(labels: np.ndarray, pool: np.ndarray, shots: int) -> None:
    """Check that each class has enough training samples.

    Args:
        labels: Label of each sample of the data set, [n].
        pool: Indices of the training samples.
        shots: The number of training samples that each class must have.

    Raises:
        ConfigError: A class has fewer.
    """
    sizes = [len(members) for members in group_by_class(labels, pool)]  # [C]
    short = [(c, size) for c, size in zip(np.unique(labels), sizes) if size < shots]
    if short:
        raise ConfigError(
            f"partition.shots={shots} is more than the training samples of {len(short):,} of {len(sizes):,} classes "
            f"(the first is class {short[0][0]}, with {short[0][1]}): lower partition.shots, or set "
            "partition.short_classes=keep to use all samples of such classes"
        )
