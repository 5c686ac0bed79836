"""The channel between the server and the clients in one round.

All tensors that a method sends pass through it.  It applies privacy, then the attack, then compression, and counts the
bytes.  Each call returns the tensors that the receiver gets.

Letters: K clients of the round, N of the federation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.channel.attackers import Attackers
from fedbench.channel.compression import Compression, num_bytes
from fedbench.channel.cost import RoundCost
from fedbench.channel.privacy import FirstRate, Privacy
from fedbench.core.round_context import RoundContext
from fedbench.nn.client_ranks import ClientRanks


class Payload(NamedTuple):
    """A tensor that the server sent to clients: `value` is the server's version, and `received` that of the clients.

    Attributes:
        ids: The clients.  # [k]
        received: The tensor that they received, shared or with one row per client.  None if the run does not need it.
        value: The server's version of the tensor, which differs from `received` if it was compressed.
        by_client: Whether `received` and `value` have one row per client.
    """

    ids: np.ndarray
    received: Tensor | None
    value: Tensor | None
    by_client: bool

    @property
    def lag(self) -> Tensor | None:
        """The server's version minus the version that the clients received.

        None if both are the same, or if the run stores neither, without compression and privacy.
        """
        if self.received is None or self.value is None or self.received is self.value:
            return None
        return self.value - self.received

    def of(self, ids: np.ndarray) -> Payload:
        """Return the part of this payload that belongs to some of its clients; itself if all received one tensor.

        Args:
            ids: Ids of these clients, ascending.  All must be among `self.ids`.
        """
        if self.received is None or self.value is None or not self.by_client or np.array_equal(ids, self.ids):
            return self
        # both arrays of ids are ascending
        positions = torch.from_numpy(np.searchsorted(self.ids, ids)).to(self.received.device)
        received = self.received[positions]
        value = received if self.received is self.value else self.value[positions]
        return Payload(ids, received, value, by_client=True)


class Channel:
    """The messages of one round, in both directions, and their cost; `_payloads` lists what clients received, by name.

    Args:
        privacy: Clips uploads and adds noise, or None.
        compression: Compresses messages, or None.
        download_factor: The number of downloads per participant.  It exceeds 1 if clients drop out after their
            download.
        attackers: Clients that replace what they upload, or None.
        client_ranks: The columns that each client has if ranks differ.  The others are neither sent nor counted.
            None: all clients have all columns.
    """

    def __init__(
        self,
        privacy: Privacy | None,
        compression: Compression | None,
        download_factor: float = 1.0,
        attackers: Attackers | None = None,
        client_ranks: ClientRanks | None = None,
    ):
        self.privacy, self.compression, self.download_factor = privacy, compression, download_factor
        self.attackers = attackers if attackers is not None and attackers.attack.changes_uploads else None
        self.client_ranks = client_ranks
        self.cost = RoundCost()
        self._broadcasts: Counter[str] = Counter()  # number of broadcasts by name
        self._calls: dict[tuple[str, str], list[np.ndarray]] = {}  # the clients of each earlier message, by name
        self._payloads: dict[str, list[Payload]] = {}  # by name

    @property
    def is_lossless(self) -> bool:
        """Whether the server gets every upload unchanged: no compressor, noise, clipping or attack is active."""
        is_changed = self.attackers is not None or (self.privacy is not None and not self.privacy.is_lossless)
        return not is_changed and (self.compression is None or self.compression.compressor.exact)

    def broadcast(
        self,
        context: RoundContext,
        tensors: dict[str, Tensor],
        uncompressed: Collection[str],
        num_values: Mapping[str, Tensor],
    ) -> SimpleNamespace:
        """Send the same tensors to all clients.

        Args:
            context: The clients.
            tensors: The tensors [...] by name.
            uncompressed: Names of tensors that are not compressed.
            num_values: How many numbers a method uses to encode a tensor for each client, by name of the tensor.  They
                determine the counted bytes, unless the run compresses the tensor.  # [K]

        Returns:
            The tensors [...] that the clients receive, as attributes.
        """
        _check_names("broadcast", tensors, {*uncompressed, *num_values})
        received = dict(tensors)
        for name, value in tensors.items():
            dense = len(context) * num_bytes(value)  # bytes without compression
            # bytes that are sent; _num_values: numbers that each client has, fewer for a smaller rank of LoRA
            size = _encoded_bytes(value, num_values.get(name, self._num_values(context, value, dim=1)), dense)
            if self.compression is not None and name not in uncompressed:
                call = self._broadcasts[name]  # how many broadcasts of this name came before in the round
                received[name], size = self.compression.broadcast(context, name, value, call)
                self._broadcasts[name] += 1
            # for uploads that are relative to it
            self._remember(name, Payload(context.ids, received[name], value, by_client=False))
            self._count_download(context, size, dense)
        return SimpleNamespace(**received)

    def download(
        self, context: RoundContext, tensors: dict[str, Tensor], uncompressed: Collection[str]
    ) -> SimpleNamespace:
        """Send each client its row of tensors.

        Args:
            context: The clients.
            tensors: The tensors [K, ...] by name.
            uncompressed: Names of tensors that are not compressed.

        Returns:
            The tensors [K, ...] that the clients receive, as attributes.
        """
        _check_rows("download", context, tensors)
        _check_names("download", tensors, uncompressed)
        # where clients have different ranks of LoRA: 0 for the numbers that a client does not have
        tensors = {name: self._truncated(context, value) for name, value in tensors.items()}
        received = dict(tensors)
        for name, value in tensors.items():
            # _num_values: how many numbers each client has
            size = _encoded_bytes(value, self._num_values(context, value, dim=2), num_bytes(value))
            if self.compression is not None and len(context) and name not in uncompressed:
                # how many downloads of this name came before in the round
                call = self._count_call("down", context, name)
                received[name], size = self.compression.download(context, name, value, call)
            # for uploads that are relative to it
            self._remember(name, Payload(context.ids, received[name], value, by_client=True))
            self._count_download(context, size, num_bytes(value))
        return SimpleNamespace(**received)

    def fetch(self, context: RoundContext, which: Tensor, rows: dict[str, Tensor]) -> SimpleNamespace:
        """Let each client download some rows of tensors, uncompressed, and count their bytes.

        Args:
            context: The clients.
            which: Whether each client downloads each of M rows.  # [K, M] bool
            rows: The tensors [M, ...] by name.

        Returns:
            The same tensors [M, ...], as attributes.
        """
        _check_rows("fetch", context, {"which": which})
        size = int(which.sum()) * sum(num_bytes(t[0]) for t in rows.values())  # bytes of the downloaded rows
        self._count_download(context, size, size)
        return SimpleNamespace(**rows)

    def upload(
        self,
        context: RoundContext,
        tensors: dict[str, Tensor],
        relative_to: Mapping[str, str | None],
        previous: Mapping[str, Tensor | None],
        uncompressed: Collection[str],
        num_values: Mapping[str, Tensor],
        first_rate: FirstRate,
    ) -> SimpleNamespace:
        """Send each client's row of tensors to the server.

        If downloads are compressed, a client trains from a row that lags behind the server's version.  The server adds
        this lag to the trained row.  Otherwise the mean would lose what the download omitted.

        Args:
            context: The clients.
            tensors: The tensors [K, ...] by name.
            relative_to: For the name of a tensor, the name of the broadcast or download from which its rows were
                trained; None if the rows are differences already.
            previous: For the name of a tensor, the server's previous version, which this upload replaces.  None if the
                server has no version, as for gradients.  # [...] or [K, ...]
            uncompressed: Names of tensors that are not compressed.
            num_values: How many numbers a method uses to encode each row of a tensor, by name of the tensor.  They
                determine the counted bytes, unless the run compresses the tensor.  # [K]
            first_rate: Returns the learning rate of the first local step.

        Returns:
            The tensors [K, ...] that the server receives, as attributes.

        Raises:
            ValueError: A tensor has no reference, or two.
            UnknownReference: The clients did not receive the tensor in relative_to.
        """
        _check_rows("upload", context, tensors)
        _check_names("upload", tensors, {*relative_to, *previous, *uncompressed, *num_values})
        _check_references(tensors, relative_to, previous)
        self.cost.takes_uploads |= any(t.is_floating_point() for t in tensors.values())
        # where clients have different ranks of LoRA: 0 for the numbers that a client does not have
        tensors = {name: self._truncated(context, value) for name, value in tensors.items()}
        received = dict(tensors)
        for name, value in tensors.items():
            payload = self._payload(relative_to.get(name), context, name)  # what the clients trained from
            # what the upload is a difference from; None: 0
            reference = previous.get(name) if payload is None else payload.received
            reference = None if reference is None else self._truncated(context, reference)
            # numbers to count: those of the method's encoding, or those that each client has
            given = num_values.get(name, self._num_values(context, value, 2))
            size = _encoded_bytes(value, given, num_bytes(value))
            call = self._count_call("up", context, name)  # how many uploads of this name came before in the round
            if self.privacy is not None:
                received[name] = self.privacy.release(context, name, value, reference, call, first_rate)
            if self.attackers is not None:
                received[name] = self.attackers.upload(context, name, received[name], reference, call)
            received[name] = self._truncated(context, received[name])  # unsent columns have no noise
            if self.compression is not None and context.changes_state and len(context) and name not in uncompressed:
                accumulates = name not in previous  # else the next upload replaces this one
                received[name], size = self.compression.upload(
                    context, name, received[name], reference, call, accumulates
                )
                if payload is not None and (lag := payload.lag) is not None:
                    received[name] = received[name] + lag
            self.cost.bytes_up += size
            self.cost.dense_up += num_bytes(value)
        return SimpleNamespace(**received)

    def _remember(self, name: str, payload: Payload) -> None:
        """Store a sent tensor, so that later uploads can be relative to it.

        Args:
            name: Name by which it was sent.
            payload: The tensor.  Without privacy, compression and attackers, tensors that no upload needs are removed
                from it.
        """
        changes_uploads = any(part is not None for part in (self.privacy, self.compression, self.attackers))
        # received: the tensor as the clients have it; value: the server's version; by_client: one row per client
        if not changes_uploads:  # frees rows of clients; a server rule reads the value of a broadcast
            payload = payload._replace(received=None, value=None if payload.by_client else payload.value)
        self._payloads.setdefault(name, []).append(payload)

    def broadcast_value(self, name: str) -> Tensor:
        """Return the server's version of the last broadcast by this name.

        Raises:
            UnknownReference: The server did not broadcast such a tensor in this round.
        """
        for payload in reversed(self._payloads.get(name, [])):  # the last one first
            if payload.value is not None and not payload.by_client:
                return payload.value
        raise UnknownReference(
            f"cohort.mean(..., updates={name!r}): the server broadcast no tensor {name!r} in this round, only "
            f"{', '.join(map(repr, self._payloads)) or 'nothing'}: name a tensor that you pass to cohort.broadcast"
        )

    def published(self, handle: str | None) -> Tensor | None:
        """Return the server's version of the last broadcast by this name.

        Args:
            handle: The name; None for no tensor.

        Returns:
            The version [...]; None without a name, or if no tensor of this name was broadcast, only downloaded.
        """
        values = [p.value for p in self._payloads.get(handle or "", []) if not p.by_client]
        return values[-1] if values else None

    def _payload(self, handle: str | None, context: RoundContext, name: str) -> Payload | None:
        """Return the last tensor named `handle` that these clients received, to which their upload is relative.

        Args:
            handle: The name of a broadcast or download; None if the upload is relative to none.
            context: The clients.
            name: The name of the upload, for the message.

        Returns:
            The payload for these clients; None without a handle.

        Raises:
            UnknownReference: These clients received no such tensor in this round.
        """
        if handle is None:
            return None
        if isinstance(handle, str):
            for payload in reversed(self._payloads.get(handle, [])):  # the last one first
                if np.isin(context.ids, payload.ids).all():
                    return payload.of(context.ids)
        given = repr(handle) if isinstance(handle, str) else f"a {type(handle).__name__}"
        raise UnknownReference(
            f"cohort.upload({name}=..., relative_to=...): relative_to is {given}, not a name of the tensors that these "
            f"clients received in this round, which are {', '.join(map(repr, self._payloads)) or 'none'}. Use a name "
            f"of cohort.broadcast or cohort.download, or None if {name} already is a difference"
        )

    def _truncated(self, context: RoundContext, value: Tensor) -> Tensor:
        """Set what a client of a smaller LoRA rank does not have to 0, in a tensor [n] or [K, n] for the K clients.

        Columns are numbers of LoRA matrices; those of the rows or columns above the client's rank become 0.

        Args:
            context: The clients.
            value: The tensor.  Lists with one number for each client, [K], have no columns.

        Returns:
            A copy [K, n], or the tensor itself if it is such a list or all clients have the same rank.
        """
        is_list = value.dim() == 1 and len(value) == len(context)
        return value if self.client_ranks is None or is_list else self.client_ranks.truncated(context.ids, value)

    def _num_values(self, context: RoundContext, value: Tensor, dim: int) -> Tensor | None:
        """Return how many numbers of a message each client has [K]; None if it is sent as it is.

        Args:
            context: The clients.
            value: The message.
            dim: Number of dimensions of a message that consists of columns: 1 if all clients get it, else 2.
        """
        if self.client_ranks is None or value.dim() != dim:
            return None
        return self.client_ranks.num_values(context.ids, value.shape[-1])

    def _count_download(self, context: RoundContext, size: int, dense: int) -> None:
        """Add the bytes of a download to the round's cost, also for clients that dropped out after it.

        Args:
            context: The clients.
            size: Bytes that are sent to them.
            dense: Bytes that would be sent without compression.
        """
        # The factor is downloads per participant.  If all clients of the federation download, none dropped out.
        factor = 1.0 if len(context) == context.num_clients else self.download_factor
        self.cost.bytes_down += round(factor * size)
        self.cost.dense_down += round(factor * dense)

    def _count_call(self, direction: str, context: RoundContext, name: str) -> int:
        """Return the number of earlier messages of this name in the round, and count this one.

        Args:
            direction: "up" or "down".
            context: The clients.
            name: The name of the message.

        Returns:
            The largest number of any of these clients.
        """
        calls = self._calls.setdefault((direction, name), [])  # the clients of each earlier message
        num_before = np.zeros(len(context), np.int64)  # earlier messages of each client of this one
        for ids in calls:
            num_before += np.isin(context.ids, ids)
        calls.append(context.ids)  # counts this message
        return int(num_before.max(initial=0))


def _encoded_bytes(value: Tensor, num_values: Tensor | None, dense: int) -> int:
    """Return the bytes of the numbers that encode a tensor.

    Args:
        value: The tensor, for the bytes of a number.
        num_values: The number of numbers for each client.  None: the tensor itself is sent.  # [K]
        dense: The bytes of the tensor itself for all clients.
    """
    return dense if num_values is None else int(num_values.sum()) * value.element_size()


class UnknownReference(ValueError):
    """An upload is relative to a tensor that its clients did not receive in this round."""


def _check_rows(call: str, context: RoundContext, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless each argument of a call is a tensor with one row per client.

    Args:
        call: Name of the call for the message, such as "upload".
        context: The clients.
        tensors: The arguments by name.
    """
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ValueError(
                f"cohort.{call}({name}=...): expected a tensor [K, ...] with one row per client, got a "
                f"{type(t).__name__}"
            )
        if len(t) != len(context):
            raise ValueError(
                f"cohort.{call}({name}=...): the tensor has {len(t)} rows, and the cohort has {len(context)} clients; "
                "pass one row per client, in the order of cohort.ids"
            )


def _check_names(call: str, tensors: dict[str, Tensor], named: Collection[str]) -> None:
    """Raise ValueError if an option of a call names a tensor that the call does not send.

    Args:
        call: Name of the call for the message, such as "upload".
        tensors: The tensors that are sent, by name.
        named: Names of tensors in the options of the call, such as those in `uncompressed`.
    """
    if unknown := set(named) - tensors.keys():
        raise ValueError(
            f"cohort.{call}({', '.join(f'{name}=...' for name in tensors)}) passes no tensor "
            f"{' or '.join(sorted(unknown))}, but another argument, such as relative_to or uncompressed, names it: "
            "remove the name there, or pass a tensor of this name"
        )


def _check_references(
    tensors: dict[str, Tensor], relative_to: Mapping[str, str | None], previous: Mapping[str, Tensor | None]
) -> None:
    """Raise ValueError for a floating-point tensor with no reference, or with two.

    Args:
        tensors: The tensors of an upload, by name.
        relative_to: The argument `relative_to` of the upload.
        previous: The argument `previous` of the upload.
    """
    for name, t in tensors.items():
        if name in relative_to and name in previous:
            raise ValueError(
                f"cohort.upload({name}=...): both relative_to and previous name {name!r}, but only one of them may; "
                f"remove {name!r} from one of them"
            )
        if t.is_floating_point() and name not in relative_to and name not in previous:
            raise ValueError(
                f"cohort.upload({name}=...) needs a reference, from which the difference is sent. Pass "
                f'relative_to={{"{name}": "w"}} if clients trained {name} from the broadcast w, '
                f'relative_to={{"{name}": None}} if {name} is already a difference, or previous={{"{name}": tensor}} '
                f"with the last version that the server has (None if it has none)"
            )
