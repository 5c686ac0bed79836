"""What every way to compress messages keeps: rows on their own, keyed draws, and a stream as long as it says.

An operator is shown rows of 300 numbers, with the matrices 10 x 20 and 6 x 3 x 5 among them, and small ones without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._damped import contracting
from fedbench.compression.base import FLOAT, Message, Operator, Span
from fedbench.core.options import require
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore
from fedbench.simulation.instantiate import make
from fedbench.testing import _probes as probes
from fedbench.testing._federation import CPU
from fedbench.testing._suite import Broken, Report, Skipped, Suite
from fedbench.testing._targets import Target, described, path_of

K, SIZE = 5, 300
SIZES = (1, 2, 37, SIZE)
SPANS: dict[str, Span] = {"weight": (0, 200, (10, 20)), "bias": (200, 210, (10,)), "conv": (210, SIZE, (6, 3, 5))}
DRAWS, ROUNDS = 4000, 600


@dataclass
class CompressionCase:
    """An operator."""

    values: dict[str, Any]

    def make(self) -> Operator:
        """A new one."""
        return make(self.values, key="compression")

    def ready(self, message: Message) -> Operator:
        """A new one whose clients have their states for such messages."""
        operator = self.make()
        operator.setup(store(len(message.ids)), message.of(0, 0))
        return operator

    def send(self, x: Tensor, message: Message, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What a new one makes of rows, and the bits."""
        draws = RowRandom(keys_of(message) if keys is None else keys)
        return self.ready(message)(x, draws, message)


SUITE: Suite[CompressionCase] = Suite("compression")


def check_compression(
    target: Target, options: Mapping[str, Any] | None = None, *, only: Iterable[str] | None = None
) -> Report:
    """Check an operator: its class, its dotted path, or the name of an option of conf/compression.

    options: of its constructor.  only: the names of some checks.  ConfigError where it cannot be built.
    """
    setting = f"on rows of {SIZE} numbers and fewer, for {K} clients"
    return SUITE.run(path_of(target), setting, case_for(target, options), only)


def case_for(target: Target, options: Mapping[str, Any] | None = None) -> CompressionCase:
    """The operator; ConfigError where it cannot be built, or is none."""
    case = CompressionCase(described("compression", target, options))
    words = f"{path_of(target)} is no operator (a subclass of fedbench.compression.base.Operator)"
    require(isinstance(case.make(), Operator), words)
    return case


def store(num_clients: int) -> RowStore:
    """Where states of so many clients are."""
    return RowStore(num_clients, CPU, 1 << 30, 1 << 30)


def message_of(size: int, clients: int = K) -> Message:
    """A message of so many numbers, of the first clients."""
    return Message("theta", size, np.arange(clients), SPANS if size == SIZE else {})


def keys_of(message: Message, seed: int = 0) -> Tensor:
    """A key for each client.  # [k]"""
    return torch.from_numpy(message.ids * 7919 + 104729 * (seed + 1))


def rows_of(size: int, clients: int = K) -> Tensor:
    """Rows of unequal sizes, with zeros and equal numbers among them.  # [clients, size]"""
    draws = RowRandom(torch.arange(clients) + 31)
    x = draws.normal(size) * 10.0 ** torch.arange(-2, clients - 2)[:, None]
    return torch.where(draws.uniform(size) < 0.1, 0, torch.where(draws.uniform(size) < 0.1, x[:, :1], x))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Number by number, the sign of zeros included; NaN is like NaN."""
    if a.shape != b.shape:
        return False
    alike = (a == b) & (a.signbit() == b.signbit())
    return bool((alike | (a.isnan() & b.isnan())).all())


# -- rows ------------------------------------------------------------------------------------------------
@SUITE.check
def rows_and_bits_have_a_shape(case: CompressionCase) -> None:
    """What is seen are rows as they were sent, and whole bits, one number a client."""
    for size in SIZES:
        x = rows_of(size)
        seen, bits = case.send(x, message_of(size))
        if seen.shape != x.shape or seen.dtype != torch.float32:
            raise Broken(f"of rows float32 {tuple(x.shape)} {str(seen.dtype)[6:]} {tuple(seen.shape)} is seen")
        if bits.shape != (K,) or bits.dtype != torch.int64:
            raise Broken(
                f"bits are {str(bits.dtype)[6:]} {tuple(bits.shape)}, not int64 ({K},): `count` is of each row"
            )


@SUITE.check
def rows_are_independent(case: CompressionCase) -> None:
    """A client's row is seen alike alone and among others, bit for bit."""
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        seen, bits = case.send(x, message)
        for i in range(K):
            operator, one = case.ready(message), message.of(i, i + 1)
            alone, its_bits = operator(x[i : i + 1], RowRandom(keys_of(one)), one)
            if not _equal(alone, seen[i : i + 1]) or its_bits[0] != bits[i]:
                raise Broken(
                    f"a row of {size} numbers is seen otherwise, or in other bits, alone than among {K}: compute each "
                    "row from itself, and sum by fedbench.compression._sums.total, which takes no other row"
                )


@SUITE.check
def inputs_stay(case: CompressionCase) -> None:
    """The rows that are given are not written to."""
    x = rows_of(SIZE)
    before = x.clone()
    case.send(x, message_of(SIZE))
    if not _equal(x, before):
        raise Broken("the rows that are given change in place: they are the client's")


@SUITE.check
def draws_are_keyed(case: CompressionCase) -> None:
    """Equal keys give equal rows, and no global generator is moved or read."""
    x, message = rows_of(SIZE), message_of(SIZE)
    before = probes.global_generators()
    once, _ = case.send(x, message)
    moved = probes.moved_generators(before)
    with probes.other_generators(9):
        again, _ = case.send(x, message)
    if moved or not _equal(once, again):
        raise Broken(
            f"the global generator of {' and '.join(moved) or 'torch, NumPy or Python'} is used: draw from draws, as "
            "in draws.uniform(message.size)"
        )


@SUITE.check
def nothing_waits_for_the_device(case: CompressionCase) -> None:
    """No operation asks the device for a number, which empties a GPU's queue."""
    message = message_of(SIZE)
    operator, x, draws = case.ready(message), rows_of(SIZE), RowRandom(keys_of(message))
    try:
        with probes.NoWaiting():
            operator(x, draws, message)
    except probes.Waits as waits:
        raise Broken(f"{waits}: keep to tensors of a fixed shape, in `pack`, `unpack`, `count` and `keep`") from None


# -- the stream ------------------------------------------------------------------------------------------
@SUITE.check
def decoding_gives_what_is_seen(case: CompressionCase) -> None:
    """What `decode` makes of `encode`'s stream is what was seen, bit for bit."""
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        seen, _ = case.send(x, message)
        for i, stream in enumerate(_streams(case, x, message)):
            if not _equal(case.ready(message).decode(stream, message.of(i, i + 1)), seen[i]):
                raise Broken(
                    f"the stream of a row of {size} numbers is decoded to other numbers than were seen: `write` and "
                    "`read` must keep all codes that `unpack` uses"
                )


def _streams(case: CompressionCase, x: Tensor, message: Message) -> list[bytes]:
    """Each row's stream."""
    ones = [message.of(i, i + 1) for i in range(len(x))]
    return [case.ready(message).encode(row, RowRandom(keys_of(one)), one) for row, one in zip(x, ones)]


@SUITE.check
def bits_are_those_of_the_stream(case: CompressionCase) -> None:
    """The bits that it states are those of the stream, but for what fills up the last byte."""
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        _, bits = case.send(x, message)
        for stated, stream in zip(bits.tolist(), _streams(case, x, message)):
            if not 0 <= 8 * len(stream) - stated < 8:
                raise Broken(
                    f"a row of {size} numbers is said to take {stated} bits, and its stream has {len(stream)} bytes: "
                    "`count` must count what `write` writes"
                )


@SUITE.check
def exact_is_exact(case: CompressionCase) -> None:
    """Where it says that rows arrive as they are, they do; else it takes no more than 33 bits a number."""
    x = rows_of(SIZE)
    seen, bits = case.send(x, message_of(SIZE))
    if case.make().exact and not (_equal(seen, x) and (bits == FLOAT * SIZE).all()):
        raise Broken(f"`exact` is set, and rows are seen otherwise or in other than {FLOAT} bits a number")
    if (bits > (FLOAT + 1) * SIZE + 4 * FLOAT).any():
        raise Broken(f"{SIZE} numbers take {int(bits.max())} bits, more than they do as they are, {FLOAT * SIZE}")


# -- what is seen ----------------------------------------------------------------------------------------
@SUITE.check
def odd_rows_are_finite(case: CompressionCase) -> None:
    """Zeros are seen as zeros, and rows with a single number, or of huge ratios, as finite ones."""
    for size in SIZES:
        x = torch.zeros(K, size)
        x[1, -1], x[2], x[3, 0], x[4] = 3.0, 1e-42, 1e30, -1e30
        x[3, 1:] = 1e-30
        seen, _ = case.send(x, message_of(size))
        if bool(seen[0].any()):
            raise Broken(f"{size} zeros are seen as {float(seen[0].abs().max()):.2g}: divide by no norm that is 0")
        if not torch.isfinite(seen).all():
            raise Broken(f"finite rows of {size} numbers are not seen as finite: divide by no norm that is 0")


@SUITE.check
def diverged_rows_are_nan(case: CompressionCase) -> None:
    """A row with a number that is not finite is seen as NaN, from no stream, and the others as ever."""
    x, message = rows_of(SIZE), message_of(SIZE)
    seen, _ = case.send(x, message)
    x[1, 7], x[3, 0] = torch.nan, -torch.inf
    wrong = [1, 3]
    again, bits = case.send(x, message)
    if case.make().exact:
        seen[wrong] = x[wrong]
    elif not torch.isnan(again[wrong]).all() or bits[wrong].any():
        raise Broken("a diverged row is seen as something other than NaN: leave `__call__` to the base class")
    else:
        seen[wrong] = torch.nan
    if not _equal(again, seen):
        raise Broken("a row that has diverged changes what is seen of the others")


@SUITE.check
def right_on_average(case: CompressionCase) -> None:
    """Where it says that it is unbiased, the mean over draws is the row, to six standard errors."""
    if not case.make().unbiased:
        raise Skipped("it does not say that it is unbiased")
    size = 40
    x, message = rows_of(size)[2], message_of(size, DRAWS)
    seen, _ = case.send(x.expand(DRAWS, size).contiguous(), message)
    error = seen.std(0) / DRAWS**0.5
    away = (seen.mean(0) - x).abs() - 6 * error - 1e-5 * x.abs().max()
    if bool((away > 0).any()):
        worst = int(away.argmax())
        raise Broken(
            f"`unbiased` is set, and the number {float(x[worst]):.3g} is seen as {float(seen[:, worst].mean()):.3g} on "
            f"the average of {DRAWS:,} draws, with a standard error of {float(error[worst]):.2g}"
        )


@SUITE.check
def what_contracts_is_never_farther_than_nothing(case: CompressionCase) -> None:
    """What is seen of a row is no farther from it than 0 is: of an operator that says so, or that is damped."""
    for size in SIZES:
        x, message = rows_of(size), message_of(size)
        seen, _ = contracting(case.ready(message))(x, RowRandom(keys_of(message)), message)
        away, length = (x - seen).double().norm(dim=1), x.double().norm(dim=1)
        if bool((away > length * (1 + 1e-5)).any()):
            worst = int((away / length.clamp_min(1e-30)).argmax())
            raise Broken(
                f"`contracts` is set, and what is seen of a row of norm {float(length[worst]):.3g} is "
                f"{float(away[worst]):.3g} away from it: leave `contracts` out, and it is damped"
            )


@SUITE.check
def memory_gives_the_rest_back(case: CompressionCase) -> None:
    """With memory, what was not sent of a row is sent in later rounds."""
    if not case.make().error_feedback:
        raise Skipped("its memory is false")
    message = Message("theta", 60, np.arange(2), {"weight": (0, 60, (6, 10))})
    operator, x = contracting(case.ready(message)), rows_of(60, 2)
    lacked, total = torch.zeros_like(x), torch.zeros_like(x)  # [k, n]
    for r in range(ROUNDS):
        seen, _ = operator(x + lacked, RowRandom(keys_of(message, r)), message)
        lacked, total = x + lacked - seen, total + seen
    away = float(((total / ROUNDS - x).norm(dim=1) / x.norm(dim=1)).max())
    if not away < 0.25:
        raise Broken(
            f"with memory the mean of what is seen in {ROUNDS} rounds is {away:.2g} of the row's norm away from it: "
            "some of a row is never sent, however often it is due"
        )


@SUITE.check
def state_is_saved(case: CompressionCase) -> None:
    """After a checkpoint it goes on as without, bit for bit."""
    message, seen = message_of(SIZE), []
    rows, operator = store(K), case.make()
    operator.setup(rows, message.of(0, 0))
    for r in range(4):
        if r == 2:
            saved = {n: {k: t.clone() for k, t in s.items()} for n, s in rows.state_dict().items()}
            its = {name: t.clone() for name, t in operator.state_dict().items()}
        seen.append(_play(operator, message, r))
    rows, operator = store(K), case.make()
    operator.setup(rows, message.of(0, 0))
    rows.load_state_dict(saved)
    operator.load_state_dict(its)
    if not all(_equal(_play(operator, message, r), seen[r]) for r in (2, 3)):
        raise Broken(
            "an operator that is set up and loaded goes on otherwise: state is tensors on self (see state_dict) or "
            "rows made in `setup`, and `keep` and `observe` alone write it"
        )


def _play(operator: Operator, message: Message, r: int) -> Tensor:
    """One round: rows that change from round to round, then losses that fall."""
    seen, _ = operator(rows_of(SIZE).roll(r, 1), RowRandom(keys_of(message, r)), message)
    operator.observe(torch.full((K,), 2.0 / (r + 1)))
    return seen
