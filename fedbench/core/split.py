"""The samples of each client: ragged lists of indices, for training, validation and test.

Letters: N clients, K of them.
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
    """N lists of sample indices, end to end: list i is ``indices[offsets[i]:offsets[i + 1]]``.

    indices: int64 [total]; offsets: int64 [N + 1], from 0 to total, never falling.
    """

    indices: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, lists: Sequence[np.ndarray]) -> Ragged:
        """Join N index arrays (some may be empty)."""
        flat = np.concatenate([np.empty(0, np.int64), *lists])
        return cls.from_sizes(flat, np.array([len(x) for x in lists], np.int64))

    @classmethod
    def from_sizes(cls, indices: np.ndarray, sizes: np.ndarray) -> Ragged:
        """indices [total] already in client order, sizes [N] how many belong to each."""
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)  # [N + 1]
        return cls(indices.astype(np.int64, copy=False), offsets)

    @classmethod
    def from_owners(cls, indices: np.ndarray, owners: np.ndarray, num_clients: int) -> Ragged:
        """indices [total] and the client [total] that holds each; within a client the order is kept."""
        order = np.argsort(owners, kind="stable")
        return cls.from_sizes(indices[order], np.bincount(owners, minlength=num_clients))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64, how many samples each client has."""
        return np.diff(self.offsets)

    def sizes_of(self, ids: np.ndarray) -> np.ndarray:
        """[K] int64, how many samples clients ids [K] have; takes no time for the others."""
        return self.offsets[ids + 1] - self.offsets[ids]

    def owners(self) -> np.ndarray:
        """[total] int64, the client of each entry of ``indices``."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ranks(self) -> np.ndarray:
        """[total] int64, the position of each entry within its client's list."""
        return np.arange(len(self.indices)) - np.repeat(self.offsets[:-1], self.sizes)

    def select(self, ids: Sequence[int] | np.ndarray) -> Ragged:
        """The lists of clients ids [K], in that order (a client may be named twice)."""
        ids = np.asarray(ids, np.int64)
        sizes = self.sizes_of(ids)  # [K]
        picked = Ragged.from_sizes(np.empty(int(sizes.sum()), np.int64), sizes)
        where = picked.ranks() + np.repeat(self.offsets[:-1][ids], sizes)  # [total of ids]
        return Ragged(self.indices[where], picked.offsets)


@dataclass(frozen=True)
class Split:
    """The training, validation and test samples of each client; val may be empty lists.

    Attributes:
        names: Names of the N clients in the source of the data.  None: the clients have numbers only.
    """

    train: Ragged
    val: Ragged
    test: Ragged
    names: tuple[str, ...] | None = None

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.train)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over the little-endian int64 bytes of all indices and offsets."""
        digest = hashlib.sha256()
        for array in self._arrays().values():
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {f"{k}_{f}": getattr(r, f) for k, r in parts.items() for f in ("indices", "offsets")}

    def save(self, path: str | Path) -> None:
        """Write an uncompressed npz, whole or not at all."""
        path = Path(path)
        require(path.is_file() or not path.exists(), f"{path} is no file: a partition is written beside it and renamed")
        with replacing(path) as partial, open(partial, "wb") as file:
            names = {} if self.names is None else {"names": np.array(self.names)}
            np.savez(file, **self._arrays(), **names)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Split:
        """Read what ``save`` wrote; ConfigError where the file is not that. Executes nothing."""
        try:
            with np.load(path, allow_pickle=False) as f:
                parts = [Ragged(f[f"{k}_indices"], f[f"{k}_offsets"]) for k in ("train", "val", "test")]
                names = tuple(f["names"].tolist()) if "names" in f.files else None
        except DAMAGE as error:
            raise ConfigError(f"{path} is not a partition saved by fedbench ({error})") from error
        return cls(parts[0], parts[1], parts[2], names)
