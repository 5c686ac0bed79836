"""Checks of compressors on random rows, vectors that K = 5 clients send.  A Message is what both sides know beforehand.

The longest rows have SIZE = 300 values, which include matrices of 10 x 20 and 6 x 3 x 5.  Other rows are shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._scaled import contractive
from fedbench.compression.base import FLOAT, Compressor, Message, Span
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore
from fedbench.simulation.instantiate import make
from fedbench.testing import _probes as probes
from fedbench.testing._federation import CPU
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

K, SIZE = 5, 300  # clients, values of the longest rows
SIZES = (1, 2, 37, SIZE)  # values of rows
SPANS: dict[str, Span] = {"weight": (0, 200, (10, 20)), "bias": (200, 210, (10,)), "conv": (210, SIZE, (6, 3, 5))}
SEEDS, ROUNDS = 4000, 600  # samples of a mean over random seeds, and over rounds with error feedback


@dataclass
class CompressionCase:
    """A compressor to check, by its class and options."""

    values: dict[str, Any]

    def make(self) -> Compressor:
        """Return a new object of the compressor's class."""
        return make(self.values, key="compression")

    def ready(self, message: Message) -> Compressor:
        """Return a new compressor after its setup for the clients and the number of values of a message."""
        compressor = self.make()
        compressor.setup(store(len(message.ids)), message.of(0, 0))  # a message without clients describes the values
        return compressor

    def send(self, x: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        """Compress and decompress rows by a new compressor that is set up for the message.

        Args:
            x: The rows.  # [k, n]
            message: The description of the message.

        Returns:
            The rows that the receiver gets [k, n], and the number of sent bits of each [k].
        """
        return self.ready(message)(x, RowRandom(keys_of(message)), message)

    def streams(self, x: Tensor, message: Message) -> list[bytes]:
        """Return the bytes of each row of x [k, n], encoded alone by a new compressor.

        Args:
            x: The rows.  # [k, n]
            message: The description of the message; message.of(i, i + 1) is its part for client i.
        """
        messages = [message.of(i, i + 1) for i in range(len(x))]  # of one client each
        return [self.ready(message).encode(row, RowRandom(keys_of(one)), one) for row, one in zip(x, messages)]


SUITE: Suite[CompressionCase] = Suite("compression")


def check_compression(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check a compressor.

    Args:
        target: Its class, its dotted path, or the name of an option of conf/compression.
        options: Arguments of its constructor.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The compressor cannot be built.
    """
    # setting: the rows, for the heading of the report
    setting = f"on rows of at most {SIZE} values, for {K} clients"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> CompressionCase:
    """Return the case that the checks receive: the compressor, by its class and options.

    Args:
        target: Its class, its dotted path, or the name of an option of conf/compression.
        options: Arguments of its constructor.

    Raises:
        ConfigError: It cannot be built, or is not a Compressor.
    """
    values = described("compression", target, options, Compressor)  # `_target_` and the options
    return CompressionCase(values)


def store(num_clients: int) -> RowStore:
    """Return an empty store for the state vectors of `num_clients` clients, in CPU memory."""
    return RowStore(num_clients, CPU, 1 << 30, 1 << 30)


def message_of(size: int, clients: int = K) -> Message:
    """Return the description of a message: the name and number of its values, and the ids of its clients.

    Args:
        size: The number of values of each client.  If it is SIZE, they are the matrices of `SPANS`.
        clients: The number of clients, which are 0, 1, ...
    """
    return Message("theta", size, np.arange(clients), SPANS if size == SIZE else {})


def keys_of(message: Message, seed: int = 0) -> Tensor:
    """Return keys of random numbers for the k clients of a message, other ones for each seed.  # [k] int64"""
    return torch.from_numpy(message.ids * 7919 + 104729 * (seed + 1))  # two primes


def rows_of(size: int, clients: int = K) -> Tensor:
    """Return random rows whose magnitude grows tenfold from client to client, with some zeros and some equal values.

    Args:
        size: The number of values of a row.
        clients: The number of rows.

    Returns:
        The rows, the same in each call.  # [clients, size]
    """
    random = RowRandom(torch.arange(clients) + 31)
    x = random.normal(size) * 10.0 ** torch.arange(-2, clients - 2)[:, None]
    is_zero, is_first_value = random.uniform(size) < 0.1, random.uniform(size) < 0.1
    return torch.where(is_zero, 0, torch.where(is_first_value, x[:, :1], x))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values; -0.0 differs from 0.0, and NaN equals NaN."""
    if a.shape != b.shape:
        return False
    is_equal = (a == b) & (a.signbit() == b.signbit())
    return bool((is_equal | (a.isnan() & b.isnan())).all())


# -- rows ------------------------------------------------------------------------------------------------
@SUITE.check
def rows_and_bits_have_a_shape(case: CompressionCase) -> None:
    """Received rows are float32 of the shape of the input, and bits are one int64 per client.

    Remedy: `decompress` must return float32 of the shape of the input, and `count` must return one value per row.
    """
    for size in SIZES:
        x = rows_of(size)
        received, bits = case.send(x, message_of(size))
        is_row = received.shape == x.shape and received.dtype == torch.float32
        assert is_row, f"rows float32 {tuple(x.shape)} are received as {received.dtype} {tuple(received.shape)}"
        are_bits = bits.shape == (K,) and bits.dtype == torch.int64
        assert are_bits, f"bits are {bits.dtype} {tuple(bits.shape)}, not int64 ({K},)"


@SUITE.check
def rows_are_independent(case: CompressionCase) -> None:
    """A client's row is received equally alone and together with others, bit for bit.

    Remedy: compute each row independently, and use fedbench.compression._sums.total for sums.
    """
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        received, bits = case.send(x, message)
        for i in range(K):
            one = message.of(i, i + 1)  # the message of client i only
            separate, separate_bits = case.ready(message)(x[i : i + 1], RowRandom(keys_of(one)), one)
            are_equal = _equal(separate, received[i : i + 1]) and separate_bits[0] == bits[i]
            assert are_equal, f"a row of {size} values is received differently alone than together with {K - 1} others"


@SUITE.check
def inputs_are_unchanged(case: CompressionCase) -> None:
    """The input rows are not changed.

    Remedy: copy them before writing.
    """
    x = rows_of(SIZE)
    case.send(x, message_of(SIZE))
    unchanged = rows_of(SIZE)  # every call returns the same numbers
    assert _equal(x, unchanged), "the input rows are changed in place"


@SUITE.check
def draws_are_keyed(case: CompressionCase) -> None:
    """Equal keys give equal rows, and no global random generator is used.

    Remedy: take random numbers from `draws`, as in draws.uniform(message.size).
    """
    x, message = rows_of(SIZE), message_of(SIZE)
    states = probes.global_random_states()
    first, _ = case.send(x, message)
    used = probes.generators_used_since(states)
    with probes.other_global_seed(9):
        second, _ = case.send(x, message)
    names = " and ".join(used) or "torch, NumPy or Python"
    assert not used and _equal(first, second), f"the global generator of {names} is used"


@SUITE.check
def nothing_waits_for_the_device(case: CompressionCase) -> None:
    """No operation reads a value back from the device, which synchronizes with a GPU.

    Remedy: use only tensors of a fixed shape in `compress`, `decompress`, `count` and `update_state`.
    """
    message = message_of(SIZE)
    compressor, x, draws = case.ready(message), rows_of(SIZE), RowRandom(keys_of(message))
    try:
        with probes.RefuseSynchronization():
            compressor(x, draws, message)
    except probes.Synchronizes as error:
        raise AssertionError(str(error)) from None


# -- streams ---------------------------------------------------------------------------------------------
@SUITE.check
def decoding_restores_received_rows(case: CompressionCase) -> None:
    """`decode` restores the received row from the stream of `encode`, bit for bit.

    Remedy: `write` and `read` must transmit all codes that `decompress` uses.
    """
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        received, _ = case.send(x, message)
        for i, stream in enumerate(case.streams(x, message)):
            decoded = case.ready(message).decode(stream, message.of(i, i + 1))
            assert _equal(decoded, received[i]), f"a row of {size} values is decoded to other values than were received"


@SUITE.check
def bits_are_those_of_the_stream(case: CompressionCase) -> None:
    """The stated bits are those of the stream, without the padding of the last byte.

    Remedy: `count` must count what `write` writes.
    """
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        _, bits = case.send(x, message)
        for stated, stream in zip(bits.tolist(), case.streams(x, message)):
            found = f"`count` returns {stated} bits for {size} values, but the stream has {len(stream)} bytes"
            assert 0 <= 8 * len(stream) - stated < 8, found


@SUITE.check
def exact_is_exact(case: CompressionCase) -> None:
    """Rows of an exact compressor are received unchanged; others take at most 33 bits per value.

    Remedy: set `exact` only for compressors that change nothing, and send rows uncompressed if that is shorter.
    """
    x = rows_of(SIZE)
    received, bits = case.send(x, message_of(SIZE))
    if case.make().exact:
        is_exact = _equal(received, x) and bool((bits == FLOAT * SIZE).all())  # FLOAT: 32 bits
        assert is_exact, f"`exact` is set, but rows are received changed or do not take {FLOAT} bits per value"
    most = int(bits.max())
    # 33 bits for each of the values, and four numbers of 32 bits for the whole row
    assert most <= (FLOAT + 1) * SIZE + 4 * FLOAT, f"{most} bits are more than {FLOAT * SIZE} of uncompressed values"


# -- received rows ---------------------------------------------------------------------------------------
@SUITE.check
def odd_rows_are_finite(case: CompressionCase) -> None:
    """Zeros are received as zeros, and rows with one nonzero value or extreme ratios as finite values.

    Remedy: do not divide by a norm of 0.
    """
    for size in SIZES:
        x = torch.zeros(K, size)  # rows: zeros; one nonzero value; tiny values; a huge and tiny ones; huge values
        x[1, -1], x[2], x[3, 0], x[4] = 3.0, 1e-42, 1e30, -1e30
        x[3, 1:] = 1e-30
        received, _ = case.send(x, message_of(size))
        largest = float(received[0].abs().max())
        assert largest == 0, f"{size} zeros are received as {largest:.2g}"
        assert torch.isfinite(received).all(), f"finite rows of {size} values are received as inf or nan"


@SUITE.check
def diverged_rows_are_nan(case: CompressionCase) -> None:
    """A row with a value that is not finite is received as NaN from an empty stream, without effect on other rows.

    Remedy: do not override `__call__`, and compute each row independently.
    """
    x, message = rows_of(SIZE), message_of(SIZE)
    expected, _ = case.send(x, message)
    x[1, 7], x[3, 0] = torch.nan, -torch.inf
    diverged = [1, 3]
    received, bits = case.send(x, message)
    if case.make().exact:  # rows are received as they were sent
        expected[diverged] = x[diverged]
    else:
        expected[diverged] = torch.nan
        is_nan = bool(torch.isnan(received[diverged]).all()) and not bits[diverged].any()
        assert is_nan, "a diverged row is not received as NaN"
    assert _equal(received, expected), "a diverged row changes other received rows"


@SUITE.check
def unbiased_rows_average_to_the_input(case: CompressionCase) -> None:
    """For an unbiased compressor, the mean over random seeds is the row, within six standard errors.

    Remedy: do not set `unbiased` if it is not.
    """
    if not case.make().unbiased:
        raise SkipTest("its attribute `unbiased` is false")
    size = 40
    # one row, sent by as many clients as there are seeds, because each client has other random numbers
    x, message = rows_of(size)[2], message_of(size, clients=SEEDS)
    received, _ = case.send(x.expand(SEEDS, size).contiguous(), message)
    mean, error = received.mean(0), received.std(0) / SEEDS**0.5
    excess = (mean - x).abs() - 6 * error - 1e-5 * x.abs().max()
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"`unbiased` is set, but the mean of {SEEDS:,} received values of {float(x[worst]):.3g} is "
        f"{float(mean[worst]):.3g}, with a standard error of {float(error[worst]):.2g}"
    )


@SUITE.check
def contractive_rows_are_not_farther_than_zero(case: CompressionCase) -> None:
    """A received row of a contractive or scaled compressor is never farther from the row than 0 is.

    Remedy: do not set `contractive`, and fedbench scales the compressor.
    """
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        compressor = contractive(case.ready(message))  # itself if it is contractive, else scaled so that it is
        received, _ = compressor(x, RowRandom(keys_of(message)), message)
        distance, norm = (x - received).double().norm(dim=1), x.double().norm(dim=1)
        worst = int((distance / norm.clamp_min(1e-30)).argmax())
        found = f"a row of norm {float(norm[worst]):.3g} is received at a distance of {float(distance[worst]):.3g}"
        assert (distance <= norm * (1 + 1e-5)).all(), f"`contractive` is set, but {found}"


@SUITE.check
def error_feedback_transmits_residuals(case: CompressionCase) -> None:
    """With error feedback, the residual of a row is transmitted in later rounds.

    Remedy: transmit every value in some round, or do not set `error_feedback`.
    """
    if not case.make().error_feedback:
        raise SkipTest("its attribute `error_feedback` is false")
    spans = {"weight": (0, 60, (6, 10))}  # first column, end and shape of the only parameter
    message = Message("theta", size=60, ids=np.arange(2), spans=spans)
    compressor, x = contractive(case.ready(message)), rows_of(60, clients=2)
    residual, total = torch.zeros_like(x), torch.zeros_like(x)  # [k, n]
    for r in range(ROUNDS):
        received, _ = compressor(x + residual, RowRandom(keys_of(message, r)), message)
        residual, total = x + residual - received, total + received
    distance = float(((total / ROUNDS - x).norm(dim=1) / x.norm(dim=1)).max())
    found = f"the mean of {ROUNDS} received rows has a relative distance of {distance:.2g} from the row"
    assert distance < 0.25, f"{found}: some values are never transmitted"


@SUITE.check
def state_is_saved(case: CompressionCase) -> None:
    """A restored compressor continues like one without interruption, bit for bit.

    Remedy: keep state in tensors on self or in matrices that setup creates by rows(...), and change it only in
    `update_state` and `observe`.
    """
    message = message_of(SIZE)
    rows, compressor = store(K), case.make()
    compressor.setup(rows, message.of(0, 0))  # of(0, 0): the message without rows, for its layout
    for r in (0, 1):
        _run_round(compressor, message, r)
    saved_rows = {name: {k: t.clone() for k, t in state.items()} for name, state in rows.state_dict().items()}
    saved = {name: t.clone() for name, t in compressor.state_dict().items()}
    received = [_run_round(compressor, message, r) for r in (2, 3)]
    rows, compressor = store(K), case.make()
    compressor.setup(rows, message.of(0, 0))
    rows.load_state_dict(saved_rows)
    compressor.load_state_dict(saved)
    are_equal = all(_equal(_run_round(compressor, message, r), received[r - 2]) for r in (2, 3))
    assert are_equal, "a restored compressor continues differently"


def _run_round(compressor: Compressor, message: Message, r: int) -> Tensor:
    """Compress rows in one round and report the clients' losses; rows change and losses fall over the rounds.

    Args:
        compressor: The compressor; its state is updated.
        message: The description of the message: its clients and values.
        r: The round (from 0).

    Returns:
        The received rows [K, n].
    """
    received, _ = compressor(rows_of(SIZE).roll(r, 1), RowRandom(keys_of(message, r)), message)
    compressor.observe(torch.full((K,), 2.0 / (r + 1)))
    return received
