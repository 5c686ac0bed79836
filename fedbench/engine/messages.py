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
from typing import TYPE_CHECKING, NamedTuple

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
    clients; losses [K]: of each.  takes_means: whether the server averaged clients by the run's `weights`.
    """

    steps: int = 0
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    dense_down: int = 0
    dense_up: int = 0
    loss: float = float("nan")
    losses: Tensor | None = None
    takes_means: bool = False


class Sent(NamedTuple):
    """What clients were sent under a name.

    Attributes:
        ids: The clients.  # [k]
        seen: What they saw: one tensor for all, or a row each.  None in a run that leaves uploads as they are.
        value: The server's version of it, the same tensor where they saw that.
        by_client: Whether seen and value have a row for each client.
    """

    ids: np.ndarray
    seen: Tensor | None
    value: Tensor | None
    by_client: bool

    @property
    def lag(self) -> Tensor | None:
        """What the server's version adds to what clients saw; None: nothing."""
        return None if self.seen is None or self.value is None or self.seen is self.value else self.value - self.seen

    def of(self, ids: np.ndarray) -> Sent:
        """Return what some of these clients were sent."""
        if self.seen is None or self.value is None or not self.by_client or np.array_equal(ids, self.ids):
            return self
        rows = torch.from_numpy(np.searchsorted(self.ids, ids)).to(self.seen.device)
        seen = self.seen[rows]
        return Sent(ids, seen, seen if self.seen is self.value else self.value[rows], True)


class Messages:
    """The messages of one round, of a cohort and of all cohorts made from it.

    privacy, compression: what is done to them, or None.  drawn: clients of the round for each of the cohort, more than
    1 where some were lost after their download.  plain, in all calls: names that are never compressed.
    """

    def __init__(self, privacy: Privacy | None, compression: Compression | None, drawn: float = 1.0):
        self.privacy, self.compression, self.drawn, self.ledger = privacy, compression, drawn, Ledger()
        self._broadcasts: Counter[str] = Counter()  # how often each name was sent to all
        self._calls: dict[tuple[str, str], list[np.ndarray]] = {}  # which clients sent, or were sent, each name
        self._sent: dict[str, list[Sent]] = {}  # what clients were sent in this round, by name

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
            self._note_sent(name, Sent(cohort.ids, seen[name], value, by_client=False))
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
            self._note_sent(name, Sent(cohort.ids, seen[name], value, by_client=True))
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
        relative_to: Mapping[str, str | None],
        replaces: Mapping[str, Tensor | None],
        plain: Collection[str],
    ) -> SimpleNamespace:
        """Each client's row of tensors [K, ...], as the server sees it."""
        _check_rows("upload", cohort, tensors)
        _check_names("upload", tensors, {*relative_to, *replaces, *plain})
        _check_references(tensors, relative_to, replaces)
        seen = dict(tensors)
        for name, value in tensors.items():
            sent = self._sent_as(relative_to.get(name), cohort, name)
            expected = replaces.get(name) if sent is None else sent.seen
            size, call = num_bytes(value), self._call("up", cohort, name)
            if self.privacy is not None:
                seen[name] = self.privacy.release(cohort, name, value, expected, call)
            if self.compression is not None and cohort.purpose == "round" and name not in plain:
                accumulates = name not in replaces
                seen[name], size = self.compression.upload(cohort, name, seen[name], expected, call, accumulates)
                if sent is not None and (lag := sent.lag) is not None:
                    seen[name] = seen[name] + lag
            self.ledger.bytes_up += size
            self.ledger.dense_up += num_bytes(value)
        return SimpleNamespace(**seen)

    def _note_sent(self, name: str, sent: Sent) -> None:
        changes_uploads = self.privacy is not None or self.compression is not None
        sent = sent if changes_uploads else sent._replace(seen=None, value=None)  # nobody holds its rows any longer
        self._sent.setdefault(name, []).append(sent)

    def _sent_as(self, handle: str | None, cohort: Cohort, name: str) -> Sent | None:
        """Return what these clients were last sent as `handle`; None of None.  name: of the upload relative to it."""
        if handle is None:
            return None
        if isinstance(handle, str):
            for sent in reversed(self._sent.get(handle, [])):
                if np.isin(cohort.ids, sent.ids).all():
                    return sent.of(cohort.ids)
        given = repr(handle) if isinstance(handle, str) else f"a {type(handle).__name__}"
        raise UnknownReference(
            f"upload({name}=..., relative_to=...): {given} is not the name of a tensor that these clients were sent in "
            f"this round ({', '.join(map(repr, self._sent)) or 'they were sent none'}); give the name that "
            "cohort.broadcast or cohort.download sent it by, or None for a difference"
        )

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
    """An upload is relative to what its clients were not sent in this round."""


def _check_rows(call: str, cohort: Cohort, tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ValueError(f"{call}({name}=...): a tensor [K, ...] can be sent, not a {type(t).__name__}")
        if len(t) != len(cohort):
            raise ValueError(f"{call}({name}=...): {len(t)} rows for {len(cohort)} clients")


def _check_names(call: str, tensors: dict[str, Tensor], named: Collection[str]) -> None:
    if unknown := set(named) - tensors.keys():
        raise ValueError(f"{call}({', '.join(tensors)}): there is no {' or '.join(sorted(unknown))} among what is sent")


def _check_references(
    tensors: dict[str, Tensor], relative_to: Mapping[str, str | None], replaces: Mapping[str, Tensor | None]
) -> None:
    """Refuse tensors of which the server does not know, or knows twice, what they add to."""
    for name, t in tensors.items():
        if name in relative_to and name in replaces:
            raise ValueError(f"upload({name}=...): it stands in relative_to and in replaces; name it in one of them")
        if t.is_floating_point() and name not in relative_to and name not in replaces:
            raise ValueError(
                f'upload({name}=...): say what it adds to: relative_to={{"{name}": "w"}} for a row that was trained '
                f'from w, {{"{name}": None}} for a difference, or replaces={{"{name}": ...}} for a new version'
            )
