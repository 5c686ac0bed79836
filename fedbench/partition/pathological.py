"""Pathological label skew: every client has samples of a few classes only, in random amounts.

Source: the code of APPLE (Luo and Wu, IJCAI 2022).  Concatenated random permutations of the classes give each client
``classes_per_client`` classes.  Each client of a class draws u ~ U(0, 1) and gets the share u / sum(u) of the training
and of the test pool.  With ``seed: 42`` the random numbers are those of that code.  If a client's classes cross the end
of a permutation, it may get the same class twice and thus one class less, as in that code.  ``distinct`` replaces the
repeated class by the next other one.  Not assigned are the samples of classes without a client (num_clients *
classes_per_client < C), and the few samples that rounding leaves.
"""

import numpy as np

from fedbench.core.options import Count, require
from fedbench.core.split import Ragged
from fedbench.partition.base import assign_by_shares


class Pathological:
    """A few classes for each client.

    Args:
        classes_per_client: Classes of each client, at most C.
        distinct: Whether a client's classes are distinct.  If False, it may get a class twice, and thus fewer classes.
    """

    def __init__(self, classes_per_client: Count = 2, distinct: bool = False):
        self.classes_per_client = classes_per_client
        self.distinct = distinct

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign each client a few classes, and divide each class by random shares among its clients.

        The shares are the same in every pool (set of samples).  A class that no client has is not assigned.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        num_classes = len(np.unique(labels))
        require(
            self.classes_per_client <= num_classes,
            f"partition.classes_per_client={self.classes_per_client} must be at most {num_classes}, the number of "
            "classes of the data set: lower it",
        )
        client_classes = self._draw_classes(num_classes, num_clients, rng)  # [N, classes_per_client]
        shares = np.zeros((num_classes, num_clients))
        shares[client_classes, np.arange(num_clients)[:, None]] = 1  # mark the clients of each class
        for row in shares:  # of one class
            clients = np.flatnonzero(row)
            if len(clients):
                amounts = rng.random_sample(len(clients))
                row[clients] = amounts / amounts.sum()
        return assign_by_shares(labels, pools, shares, rng)

    def _draw_classes(self, num_classes: int, num_clients: int, rng: np.random.RandomState) -> np.ndarray:
        """Cut concatenated random permutations of the C classes into the classes of each client.

        A client whose classes cross the end of a permutation may get a class twice.  With the option distinct, the next
        permutation is reordered so that it gets other classes.

        Args:
            num_classes: C.
            num_clients: N.
            rng: The generator of the permutations.

        Returns:
            The classes of each client, [N, classes_per_client].
        """
        per_client = self.classes_per_client
        classes: list[int] = []
        for _ in range(num_clients * per_client // num_classes + 1):
            order = rng.permutation(num_classes).tolist()
            started = len(classes) % per_client  # classes of the client that crosses the end of the permutation
            if self.distinct and started:
                already = set(classes[-started:])
                new = [c for c in order if c not in already][: per_client - started]
                order = new + [c for c in order if c not in new]  # the classes that complete this client come first
            classes += order
        return np.array(classes[: num_clients * per_client]).reshape(num_clients, per_client)
