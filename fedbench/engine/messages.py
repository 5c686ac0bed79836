"""What is sent between the server and the clients of a round: made private, compressed, and counted in bytes.

Every tensor that a method sends passes here, and the other side sees what these calls return.  An upload is first
released by privacy and then compressed, so that compression sees only what may be told.

Where the server compresses, clients train from what they saw of its row, which lags behind it.  What they add to that
is what counts: the server sees a row that was trained from a lagging one moved onto its own, so that what a download
lacked stays due.  A mean of rows as they are would lose it.

Letters: K clients of the cohort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbench.engine.compression import Compression, num_bytes
from fedbench.engine.privacy import Privacy

if TYPE_CHECKING:
    from fedbench.engine.cohort import Cohort


@dataclass
class Ledger:
    """What a round cost by the method's own account.

    bytes_*: of what was sent; dense_*: of the same without compression.  loss: of the last training, averaged over its
    clients; losses [K]: of each.
    """

    steps: int = 0
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    dense_down: int = 0
    dense_up: int = 0
    loss: float = float("nan")
    losses: Tensor | None = None


class Messages:
    """The messages of one round, of a cohort and of all cohorts made from it.

    privacy, compression: what is done to them, or None.  drawn: clients of the round for each of the cohort, more than
    1 where some were lost after their download.  plain, in all calls: names that are never compressed.
    """

    def __init__(self, privacy: Privacy | None, compression: Compression | None, drawn: float = 1.0):
        self.privacy, self.compression, self.drawn, self.ledger = privacy, compression, drawn, Ledger()
        self._broadcasts: Counter[str] = Counter()  # how often each name was sent to all
        self._calls: dict[tuple[str, str], list[np.ndarray]] = {}  # which clients sent, or were sent, each name
        self._sent: list[tuple[Tensor, Tensor]] = []  # what clients saw, and what the server has itself

    @property
    def is_lossless(self) -> bool:
        """Whether every upload is seen as it was sent."""
        private = self.privacy is not None and not self.privacy.is_lossless
        return not private and (self.compression is None or self.compression.operator.exact)

    def broadcast(self, cohort: Cohort, tensors: dict[str, Tensor], plain: Collection[str]) -> SimpleNamespace:
        """The same tensors for every client."""
        _check_names("broadcast", tensors, plain)
        seen = dict(tensors)
        for name, value in tensors.items():
            dense = size = len(cohort) * num_bytes(value)
            if self.compression is not None and name not in plain:
                seen[name], size = self.compression.broadcast(cohort, name, value, self._broadcasts[name])
                self._broadcasts[name] += 1
                self._remember(value, seen[name])
            self._count_download(cohort, size, dense)
        return SimpleNamespace(**seen)

    def download(self, cohort: Cohort, tensors: dict[str, Tensor], plain: Collection[str]) -> SimpleNamespace:
        """Each client's own row of tensors [K, ...]."""
        _check_rows("download", cohort, tensors)
        _check_names("download", tensors, plain)
        seen = dict(tensors)
        for name, value in tensors.items():
            size = num_bytes(value)
            if self.compression is not None and name not in plain:
                seen[name], size = self.compression.download(cohort, name, value, self._call("down", cohort, name))
                self._remember(value, seen[name])
            self._count_download(cohort, size, num_bytes(value))
        return SimpleNamespace(**seen)

    def fetch(self, cohort: Cohort, which: Tensor, rows: dict[str, Tensor]) -> SimpleNamespace:
        """One row of each tensor [n, ...] for every True in which [K, ...], as it is."""
        _check_rows("fetch", cohort, {"which": which})
        size = int(which.sum()) * sum(num_bytes(t[0]) for t in rows.values())
        self._count_download(cohort, size, size)
        return SimpleNamespace(**rows)

    def upload(
        self,
        cohort: Cohort,
        tensors: dict[str, Tensor],
        reference: Mapping[str, Tensor | None],
        replaces: Collection[str],
        plain: Collection[str],
    ) -> SimpleNamespace:
        """Each client's row of tensors [K, ...], as the server sees it."""
        _check_rows("upload", cohort, tensors)
        _check_names("upload", tensors, {*reference, *replaces, *plain})
        _check_references(tensors, reference)
        seen = dict(tensors)
        for name, value in tensors.items():
            size, call, expected = num_bytes(value), self._call("up", cohort, name), reference.get(name)
            if self.privacy is not None:
                seen[name] = self.privacy.release(cohort, name, value, expected, call)
            if self.compression is not None and cohort.purpose == "round" and name not in plain:
                accumulates = name not in replaces
                seen[name], size = self.compression.upload(cohort, name, seen[name], expected, call, accumulates)
                if accumulates and (lag := self._lag_of(name, expected)) is not None:
                    seen[name] = seen[name] + lag
            self.ledger.bytes_up += size
            self.ledger.dense_up += num_bytes(value)
        return SimpleNamespace(**seen)

    def _remember(self, value: Tensor, seen: Tensor) -> None:
        if seen is not value:
            self._sent.append((seen, value))

    def _lag_of(self, name: str, reference: Tensor | None) -> Tensor | None:
        """What the server's own adds to a reference that clients were sent in this round; None: nothing."""
        if reference is None:
            return None
        for seen, value in self._sent:
            if seen is reference:
                return value - seen
        # A reference of zeros has no residual.
        if reference.any() and any(_is_copy(reference, t) for pair in self._sent for t in pair):
            raise UnknownReference(
                f"upload({name}=...): its reference has the values of a tensor that clients were sent, but is another "
                "one. Give the very tensor that cohort.broadcast or cohort.download returned, no copy of it and not "
                "the server's own: by it what a compressed download lacked is found"
            )
        return None

    def _count_download(self, cohort: Cohort, size: int, dense: int) -> None:
        """What these clients were sent, and what the lost were: as much as they on average, unless all are asked."""
        drawn = 1.0 if len(cohort) == cohort.num_clients else self.drawn
        self.ledger.bytes_down += round(drawn * size)
        self.ledger.dense_down += round(drawn * dense)

    def _call(self, direction: str, cohort: Cohort, name: str) -> int:
        """How often these clients sent, or were sent, a name in this round before; this time is counted."""
        calls = self._calls.setdefault((direction, name), [])
        before = np.zeros(len(cohort), np.int64)
        for ids in calls:
            before += np.isin(cohort.ids, ids)
        calls.append(cohort.ids)
        return int(before.max(initial=0))


class UnknownReference(ValueError):
    """The reference is not a tensor of the round, but a copy of one."""


def _is_copy(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, after broadcasting over clients if only one has a row for each."""
    fit = b.shape in (a.shape, a.shape[1:]) or a.shape == b.shape[1:]
    return fit and torch.equal(*torch.broadcast_tensors(a, b))


def _check_rows(call: str, cohort: Cohort, tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if len(t) != len(cohort):
            raise ValueError(f"{call}({name}=...): {len(t)} rows for {len(cohort)} clients")


def _check_names(call: str, tensors: dict[str, Tensor], named: Collection[str]) -> None:
    if unknown := set(named) - tensors.keys():
        raise ValueError(f"{call}({', '.join(tensors)}): there is no {' or '.join(sorted(unknown))} among what is sent")


def _check_references(tensors: dict[str, Tensor], reference: Mapping[str, Tensor | None]) -> None:
    for name, t in tensors.items():
        if t.is_floating_point() and name not in reference:
            raise ValueError(
                f"upload({name}=...): say what the server expects of it before it comes, as reference="
                f'{{"{name}": w}} for a row that was trained from w, or {{"{name}": None}} for a difference or '
                "anything new to it"
            )
