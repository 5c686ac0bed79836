"""The partition of a data set: sample indices of each client for training, validation and test.

Letters: N clients, K some of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedbench.core.files import DAMAGE, replacing
from fedbench.core.options import ConfigError, require


@dataclass(frozen=True)
class Ragged:
    """N concatenated lists of sample indices.  List i is ``indices[offsets[i]:offsets[i + 1]]``.

    Attributes:
        indices: All lists, one after the other.  # [total] int64
        offsets: Where each list begins, and the total.  # [N + 1] int64, non-decreasing from 0
    """

    indices: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, lists: Sequence[np.ndarray]) -> Ragged:
        """Build from one array of sample indices per client.  Arrays may be empty."""
        flat = np.concatenate([np.empty(0, np.int64), *lists])
        return cls.from_sizes(flat, np.array([len(x) for x in lists], np.int64))

    @classmethod
    def from_sizes(cls, indices: np.ndarray, sizes: np.ndarray) -> Ragged:
        """Build from the concatenated lists of all clients and their lengths.

        Args:
            indices: The lists of sample indices, one client after the other [total].
            sizes: The length of each list [N].
        """
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)  # [N + 1]
        return cls(indices.astype(np.int64, copy=False), offsets)

    @classmethod
    def from_owners(cls, indices: np.ndarray, owners: np.ndarray, num_clients: int) -> Ragged:
        """Build from sample indices in any order, and the client of each.  A client's list keeps this order.

        Args:
            indices: Sample indices [total].
            owners: The client of each sample [total].
            num_clients: N.
        """
        order = np.argsort(owners, kind="stable")
        return cls.from_sizes(indices[order], np.bincount(owners, minlength=num_clients))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        if not -len(self) <= client < len(self):
            raise IndexError(f"there is no client {client}: there are {len(self)} clients, numbered from 0")
        client %= len(self)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client.  # [N] int64"""
        return np.diff(self.offsets)

    def sizes_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of samples of the clients ids [K].  # [K] int64"""
        return self.offsets[ids + 1] - self.offsets[ids]

    def owners(self) -> np.ndarray:
        """Return the client (number of the list, from 0) of each entry of ``indices``.  # [total] int64"""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ranks(self) -> np.ndarray:
        """Return the position of each entry of ``indices`` in its client's list.  # [total] int64"""
        return np.arange(len(self.indices)) - np.repeat(self.offsets[:-1], self.sizes)

    def select(self, ids: Sequence[int] | np.ndarray) -> Ragged:
        """Return a Ragged with the lists of the clients ids [K], in this order.  A client may occur twice."""
        ids = np.asarray(ids, np.int64)
        sizes = self.sizes_of(ids)  # [K]
        selected = Ragged.from_sizes(np.empty(int(sizes.sum()), np.int64), sizes)  # its indices are set below
        begins = np.repeat(self.offsets[:-1][ids], sizes)  # where the list of each entry begins in self.indices
        return Ragged(self.indices[begins + selected.ranks()], selected.offsets)  # ranks: positions in the lists


@dataclass(frozen=True)
class Split:
    """The training, validation and test samples of each client.

    Attributes:
        train: Training samples.
        val: Validation samples; the lists may be empty.
        test: Test samples.
        names: The names of the N clients in the data set.  None: clients have no names.
    """

    train: Ragged
    val: Ragged
    test: Ragged
    names: tuple[str, ...] | None = None

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return len(self.train)

    @cached_property
    def hash(self) -> str:
        """The sha256 (hex) of the little-endian int64 bytes of all indices and offsets."""
        digest = hashlib.sha256()
        for array in self._arrays().values():
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return six int64 arrays by name: "train_indices", "train_offsets", and the same of "val" and "test"."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {f"{part}_{field}": getattr(parts[part], field) for part in parts for field in ("indices", "offsets")}

    def save(self, path: str | Path) -> None:
        """Write the split into an uncompressed npz file, atomically.

        Raises:
            ConfigError: The path is not a file.
        """
        path = Path(path)
        require(
            path.is_file() or not path.exists(),
            f"{path} must be a file, because it is replaced, but is a folder, a device or a pipe: name a new file",
        )
        with replacing(path) as partial, open(partial, "wb") as file:
            names = {} if self.names is None else {"names": np.array(self.names)}
            np.savez(file, **self._arrays(), **names)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Split:
        """Read a file that ``save`` wrote, without running code from it.

        Args:
            path: The file.

        Raises:
            ConfigError: The file was not written by ``save``, or is damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as npz:
                parts = [Ragged(npz[f"{part}_indices"], npz[f"{part}_offsets"]) for part in ("train", "val", "test")]
                names = tuple(npz["names"].tolist()) if "names" in npz.files else None
        except DAMAGE as error:
            raise ConfigError(
                f"{path} is damaged or not a partition that fedbench saved ({error}): use the partition.npz of a run"
            ) from error
        return cls(parts[0], parts[1], parts[2], names)
