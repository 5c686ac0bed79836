"""What is sent between the server and the clients of a round: counted in bytes, and released by privacy.

Every tensor that a method sends passes here, and the other side sees what these calls return.

Letters: K clients of the cohort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.engine.privacy import Privacy

if TYPE_CHECKING:
    from fedbench.engine.cohort import Cohort


@dataclass
class Ledger:
    """What a round cost by the method's own account; loss: of the last training, averaged over its clients."""

    steps: int = 0
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    loss: float = float("nan")


class Download(NamedTuple):
    """What some clients ids [k] were sent under a name: values [k, ...]."""

    name: str
    ids: np.ndarray
    values: Tensor


class Messages:
    """The messages of one round, of a cohort and of all cohorts made from it.

    privacy: what is done to uploads, or None.  It measures an upload from what the clients were sent before, so that
    downloads are remembered where there is privacy.
    """

    def __init__(self, privacy: Privacy | None):
        self.privacy, self.ledger = privacy, Ledger()
        self._downloads: list[Download] = []
        self._uploads: Counter[str] = Counter()  # how often each name was uploaded

    def broadcast(self, cohort: Cohort, tensors: dict[str, Tensor]) -> SimpleNamespace:
        """The same tensors for every client."""
        self.ledger.bytes_down += len(cohort) * sum(_bytes(t) for t in tensors.values())
        if self.privacy is not None:
            self._remember(cohort, {name: t.expand(len(cohort), *t.shape) for name, t in tensors.items()})
        return SimpleNamespace(**tensors)

    def download(self, cohort: Cohort, tensors: dict[str, Tensor]) -> SimpleNamespace:
        """Each client's own row of tensors [K, ...]."""
        _check_rows("download", cohort, tensors)
        self.ledger.bytes_down += sum(_bytes(t) for t in tensors.values())
        if self.privacy is not None:
            self._remember(cohort, tensors)
        return SimpleNamespace(**tensors)

    def fetch(self, cohort: Cohort, which: Tensor, rows: dict[str, Tensor]) -> SimpleNamespace:
        """One row of each tensor [n, ...] for every True in which [K, ...]."""
        _check_rows("fetch", cohort, {"which": which})
        self.ledger.bytes_down += int(which.sum()) * sum(_bytes(t[0]) for t in rows.values())
        return SimpleNamespace(**rows)

    def upload(
        self, cohort: Cohort, tensors: dict[str, Tensor], reference: Mapping[str, Tensor | None]
    ) -> SimpleNamespace:
        """Each client's row of tensors [K, ...], as the server sees it."""
        _check_rows("upload", cohort, tensors)
        self.ledger.bytes_up += sum(_bytes(t) for t in tensors.values())
        if self.privacy is not None:
            tensors = {name: self._released(cohort, name, t, reference) for name, t in tensors.items()}
        return SimpleNamespace(**tensors)

    def _remember(self, cohort: Cohort, tensors: dict[str, Tensor]) -> None:
        self._downloads += [Download(name, cohort.ids, t) for name, t in tensors.items()]

    def _released(self, cohort: Cohort, name: str, value: Tensor, reference: Mapping[str, Tensor | None]) -> Tensor:
        assert self.privacy is not None
        earlier = self._uploads[name]
        self._uploads[name] += 1
        expected = reference[name] if name in reference else self._downloaded(cohort, name, value.shape[1:])
        return self.privacy.release(cohort, name, value, expected, earlier)

    def _downloaded(self, cohort: Cohort, name: str, shape: torch.Size) -> Tensor | None:
        """What these clients were sent in this shape: under this name if there is such, else first.  # [K, ...]"""
        alike = [d for d in self._downloads if d.values.shape[1:] == shape and np.isin(cohort.ids, d.ids).all()]
        if not alike:
            return None
        _, ids, values = next((d for d in alike if d.name == name), alike[0])
        if np.array_equal(ids, cohort.ids):
            return values
        order = np.argsort(ids)  # the positions of these clients among those that it was sent to
        where = order[np.searchsorted(ids[order], cohort.ids)]
        return values[torch.from_numpy(where).to(values.device)]


def _check_rows(call: str, cohort: Cohort, tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if len(t) != len(cohort):
            raise ValueError(f"{call}({name}=...): {len(t)} rows for {len(cohort)} clients")


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()
