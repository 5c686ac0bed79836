"""What is sent between the server and the clients of a round: made private, compressed, and counted in bytes.

Every tensor that a method sends passes here, and the other side sees what these calls return.  An upload is first
released by privacy and then compressed, so that compression sees only what may be told.

Letters: K clients of the cohort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
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

    privacy, compression: what is done to them, or None.
    """

    def __init__(self, privacy: Privacy | None, compression: Compression | None):
        self.privacy, self.compression, self.ledger = privacy, compression, Ledger()
        self._broadcasts: Counter[str] = Counter()  # how often each name was sent to all
        self._calls: dict[tuple[str, str], list[np.ndarray]] = {}  # which clients sent, or were sent, each name

    def broadcast(self, cohort: Cohort, tensors: dict[str, Tensor]) -> SimpleNamespace:
        """The same tensors for every client."""
        seen = dict(tensors)
        for name, value in tensors.items():
            dense = size = len(cohort) * num_bytes(value)
            if self.compression is not None:
                seen[name], size = self.compression.broadcast(cohort, name, value, self._broadcasts[name])
                self._broadcasts[name] += 1
            self._count_down(size, dense)
        return SimpleNamespace(**seen)

    def download(self, cohort: Cohort, tensors: dict[str, Tensor]) -> SimpleNamespace:
        """Each client's own row of tensors [K, ...]."""
        _check_rows("download", cohort, tensors)
        seen = dict(tensors)
        for name, value in tensors.items():
            size = num_bytes(value)
            if self.compression is not None:
                seen[name], size = self.compression.download(cohort, name, value, self._call("down", cohort, name))
            self._count_down(size, num_bytes(value))
        return SimpleNamespace(**seen)

    def fetch(self, cohort: Cohort, which: Tensor, rows: dict[str, Tensor]) -> SimpleNamespace:
        """One row of each tensor [n, ...] for every True in which [K, ...], as it is."""
        _check_rows("fetch", cohort, {"which": which})
        size = int(which.sum()) * sum(num_bytes(t[0]) for t in rows.values())
        self._count_down(size, size)
        return SimpleNamespace(**rows)

    def upload(
        self,
        cohort: Cohort,
        tensors: dict[str, Tensor],
        reference: Mapping[str, Tensor | None],
        replaces: Collection[str],
    ) -> SimpleNamespace:
        """Each client's row of tensors [K, ...], as the server sees it."""
        _check_rows("upload", cohort, tensors)
        _check_references(tensors, reference, replaces)
        seen = dict(tensors)
        for name, value in tensors.items():
            size, call, expected = num_bytes(value), self._call("up", cohort, name), reference.get(name)
            if self.privacy is not None:
                seen[name] = self.privacy.release(cohort, name, value, expected, call)
            if self.compression is not None and cohort.purpose == "round":
                accumulates = name not in replaces
                seen[name], size = self.compression.upload(cohort, name, seen[name], expected, call, accumulates)
            self.ledger.bytes_up += size
            self.ledger.dense_up += num_bytes(value)
        return SimpleNamespace(**seen)

    def _count_down(self, size: int, dense: int) -> None:
        self.ledger.bytes_down += size
        self.ledger.dense_down += dense

    def _call(self, direction: str, cohort: Cohort, name: str) -> int:
        """How often these clients sent, or were sent, a name in this round before; this time is counted."""
        calls = self._calls.setdefault((direction, name), [])
        before = np.zeros(len(cohort), np.int64)
        for ids in calls:
            before += np.isin(cohort.ids, ids)
        calls.append(cohort.ids)
        return int(before.max(initial=0))


def _check_rows(call: str, cohort: Cohort, tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if len(t) != len(cohort):
            raise ValueError(f"{call}({name}=...): {len(t)} rows for {len(cohort)} clients")


def _check_references(
    tensors: dict[str, Tensor], reference: Mapping[str, Tensor | None], replaces: Collection[str]
) -> None:
    for name, t in tensors.items():
        if t.is_floating_point() and name not in reference:
            raise ValueError(
                f"upload({name}=...): say what the server expects of it before it comes, as reference="
                f'{{"{name}": w}} for a row that was trained from w, or {{"{name}": None}} for a difference or '
                "anything new to it"
            )
    if unknown := (reference.keys() | set(replaces)) - tensors.keys():
        raise ValueError(f"upload({', '.join(tensors)}): there is no {' or '.join(sorted(unknown))} among what is sent")
