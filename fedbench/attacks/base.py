"""Base class of attacks.

Some training clients, the attackers, work together against the run.  An attack replaces what they upload (`corrupt`),
or the samples that they train on (`poison`).  The other clients are honest.

Letters: N clients of the federation, n of an upload; f of these are attackers and h honest; p values of an upload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from fedbench.core.options import NonNegativeInt, UnitInterval, require
from fedbench.core.rng import RowRandom, generator
from fedbench.core.rows import RowStore
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays

Knows = Literal["all", "own"]
SHARED = np.zeros(1, np.int64)  # the only row of what all attackers remember


class AttackState:
    """Tensors that the attackers remember from earlier rounds, for one upload of a method.  Checkpoints contain them.

    Args:
        rows: Creates the row stores, which have one row each.
        path: Beginning of their names, such as "attack/theta".
    """

    def __init__(self, rows: RowStore, path: str):
        self.rows, self.path = rows, path

    def get(self, name: str, initial: Tensor) -> Tensor:
        """Return a tensor of an earlier round, or the initial value if there is none.  # [...]

        Args:
            name: Name of the tensor.
            initial: Its initial value, with its shape and type.  # [...]
        """
        path = f"{self.path}/{name}"
        # a store with a single row, which all attackers share; SHARED is the index of this row
        store = self.rows.all[path] if path in self.rows.all else self.rows(path, initial, count=1)
        return store[SHARED][0]

    def set(self, name: str, value: Tensor) -> None:
        """Store a tensor for later rounds, as the new value of what `get` returns.

        Args:
            name: Name of the tensor; `get` must have been called with it before.
            value: The tensor.  # [...]
        """
        # rows.all: all stores by name; SHARED: index of the single row, which all attackers share
        self.rows.all[f"{self.path}/{name}"][SHARED] = value[None]


@dataclass(frozen=True)
class Observed:
    """One uploaded tensor in a round, as changes: uploads minus what the server already has; and what attackers know.

    Attributes:
        honest: Uploads of the honest clients, each minus its reference, the value from which the change is sent.
            # [h, p]
        truthful: What the attackers would upload if they were honest.  # [f, p]
        honest_ids: The honest clients.  # [h]
        ids: The attackers.  # [f]
        random: Random numbers with one row per attacker, new in each upload.
        aggregate: Returns the server's aggregate of the honest uploads and given uploads of the attackers.
            # [f, p] to [p]
        state: What the attackers remember.
    """

    honest: Tensor
    truthful: Tensor
    honest_ids: np.ndarray
    ids: np.ndarray
    random: RowRandom
    aggregate: Callable[[Tensor], Tensor]
    state: AttackState

    def uploads_known_by(self, knows: Knows) -> Tensor:
        """Return the uploads that the attackers know.

        Args:
            knows: "all", those of the h honest clients; "own", those that the f attackers would upload if honest.

        Returns:
            The uploads.  # [h, p] or [f, p]
        """
        return self.honest if knows == "all" else self.truthful


@dataclass(frozen=True)
class Poisoned:
    """The data of a federation after an attack.

    Attributes:
        arrays: The data set, with further samples at its end.
        split: The samples of each client.
        triggered: Test samples of honest clients with the trigger of a backdoor, labelled as the attackers want.  None:
            the attack has no trigger.
    """

    arrays: Arrays
    split: Split
    triggered: Ragged | None = None

    @property
    def used(self) -> Split:
        """The samples of each client; if `triggered` is not None, its samples are appended to the test samples."""
        if self.triggered is None:
            return self.split
        test = self.split.test
        lists = [np.concatenate([test[i], self.triggered[i]]) for i in range(len(test))]
        return replace(self.split, test=Ragged.from_lists(lists))


class Attack:
    """Base class of attacks: some clients upload other tensors (`corrupt`), or train on other samples (`poison`).

    Args:
        fraction: Fraction of the training clients that attack.  Their number is rounded to the nearest integer.
        clients: The attackers by client index, instead of a random fraction.

    Attributes:
        changes_uploads: Whether the attack replaces uploads, by `corrupt`.
        needs_honest: Whether `corrupt` reads the uploads of honest clients.  In a round without any, the attackers then
            upload what they would if they were honest.
    """

    changes_uploads = True
    needs_honest = False

    def __init__(self, fraction: UnitInterval = 0.2, clients: list[NonNegativeInt] | None = None):
        self.fraction, self.clients = fraction, clients

    def choose(self, seed: int, num_clients: int) -> np.ndarray:
        """Return the attackers, the same in all rounds and for all methods.

        Args:
            seed: The run's seed.
            num_clients: N, the number of training clients.

        Returns:
            Client indices, ascending.  # [f] int64

        Raises:
            ConfigError: A client does not exist, the fraction rounds to no client, or no client is honest.
        """
        count = int(num_clients * self.fraction + 0.5 + 1e-9)  # the nearest integer, halves up despite rounding errors
        if self.clients is not None:
            require(
                len(set(self.clients)) == len(self.clients) and max(self.clients, default=0) < num_clients,
                f"attack.clients={list(self.clients)} must be different training clients, from 0 to "
                f"{num_clients - 1}: change the list",
            )
            count = len(self.clients)
        require(
            count > 0 or self.fraction == 0 or self.clients is not None,
            f"attack.fraction={self.fraction:g} of {num_clients} clients rounds to no client: use 0, or at least "
            f"{0.5 / num_clients:.2g}",
        )
        require(
            count < num_clients,
            f"the attack has {count} attackers, but must leave one of the {num_clients} training clients honest: lower "
            "attack.fraction, or shorten attack.clients",
        )
        if self.clients is not None:
            return np.sort(np.array(self.clients, np.int64))
        return np.sort(generator(seed, "attackers").choice(num_clients, count, replace=False))

    def check(self, attackers: np.ndarray, num_clients: int) -> None:
        """Check the options against the attackers.  The default accepts all.

        Args:
            attackers: The attackers.  # [f]
            num_clients: N, the number of training clients.

        Raises:
            ConfigError: An option does not fit them.
        """

    def corrupt(self, o: Observed) -> Tensor:
        """Return the changes that the attackers upload.  The default is what they would upload if they were honest.

        Args:
            o: The changes of all clients from their references, such as the server's model, and what attackers use.

        Returns:
            One row per attacker.  # [f, p]
        """
        return o.truthful

    def poison(self, arrays: Arrays, split: Split, attackers: np.ndarray, seed: int) -> Poisoned:
        """Return the data with other training samples of the attackers.  The default changes nothing.

        Args:
            arrays: The data set.
            split: The samples of each client, new clients included.
            attackers: The attackers.  # [f]
            seed: The run's seed.

        Raises:
            ConfigError: The attack cannot change data of this kind.
        """
        return Poisoned(arrays, split)


def repeat(row: Tensor, o: Observed) -> Tensor:
    """Return f copies of one upload `row` [p], where f is the number of attackers in `o`.  # [f, p]"""
    return row.expand(len(o.truthful), -1)
