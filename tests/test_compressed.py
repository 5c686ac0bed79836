"""What every method keeps under every operator: its numbers at full precision, every bit that is sent, its noise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARRAYS, METHODS, everything, ready, rounds, same, tensors
from compressed import TWO, all_pairs, sampled, simulated, without_compression
from torch import Tensor

from fedbench.compression.base import FLOAT, Message, Operator
from fedbench.core import rng
from fedbench.engine import compression as channel
from fedbench.engine import privacy
from fedbench.engine.compression import Compression, Received
from fedbench.engine.privacy import Privacy
from fedbench.simulation import checkpoint
from fedbench.simulation.run_state import Simulation
from fedbench.testing.algorithm import other_data

EXACT = ["topk share=1", "randk share=1", "qsgd levels=null", "lowrank rank=1000"]
ROUNDS = 3
EXACTLY = sampled([(method, operator) for method in METHODS for operator in EXACT])
PAIRS = sampled(all_pairs())


@pytest.fixture(autouse=True)
def all_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TINY", TWO)


@functools.cache
def uncompressed(method: str) -> dict[str, Tensor]:
    return everything(rounds(simulated(method, ""), ROUNDS))


@pytest.mark.parametrize("method, operator", EXACTLY)
def test_at_full_precision_nothing_changes(method: str, operator: str) -> None:
    """Not a bit where the operator is exact; else what adding to a reference and subtracting it rounds."""
    found = without_compression(everything(rounds(simulated(method, operator), ROUNDS)))
    same(found, uncompressed(method), 1e-5 if operator.startswith("lowrank") else None)


# -- the stream, and the memory --------------------------------------------------------------------------
@pytest.mark.parametrize("method, operator", PAIRS)
def test_what_is_seen_is_what_a_decoder_makes_of_the_stream(
    method: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and the bits that are counted are the stream's but for the end of its last byte."""
    sim, messages, real = simulated(method, operator), [], Compression._send

    def send(
        self: Compression, operator: Operator, due: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        streams = []
        for i, row in enumerate(due[:, : message.size]):
            one = message.of(i, i + 1)
            streams.append(operator.encode(row.contiguous(), rng.RowRandom(keys[i : i + 1]), one))
            decoded = operator.decode(streams[-1], one)
            messages.append((message.name, decoded))
        seen, bits = real(self, operator, due, message, keys, keep)
        rest = FLOAT * (due.shape[1] - message.size)
        for i, stream in enumerate(streams):
            assert torch.equal(seen[i, : message.size], messages[len(messages) - len(streams) + i][1]), message.name
            assert 0 <= 8 * len(stream) - (int(bits[i]) - rest) < 8, message.name
        return seen, bits

    monkeypatch.setattr(Compression, "_send", send)
    rounds(sim, 2)
    assert messages or (sim.engine.compression is not None and not sim.engine.compression.acted)


@pytest.mark.parametrize("method, operator", PAIRS)
def test_what_is_sent_and_what_is_remembered_is_what_was_due(
    method: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, of every upload that accumulates."""
    sim, real = simulated(method, operator), Compression.upload
    due, sent = {}, {}  # by name and call, of all clients  # [N, n] each

    def upload(
        self: Compression, cohort: Any, name: str, value: Tensor, reference: Any, call: int, accumulates: bool
    ) -> Received:
        received = real(self, cohort, name, value, reference, call, accumulates)
        memory = self.rows.all.get(f"compression/{channel._path('up', name, call)}/memory")
        assert (memory is not None) == (accumulates and self.operator.memory and not self._passes(value))
        if memory is not None:
            before = torch.zeros_like(value) if reference is None else reference
            for sums, x in ((due, value), (sent, received.seen)):
                total = sums.setdefault((name, call), torch.zeros(6, value[0].numel(), dtype=torch.float64))
                total[cohort.ids] += (x.double() - before.double()).flatten(1)
            ids = cohort.ids
            left = due[name, call][ids] - sent[name, call][ids] - memory[ids]
            scale = 1 + due[name, call][ids].abs().max()
            assert float(left.abs().max() / scale) < 1e-6, name
        return received

    monkeypatch.setattr(Compression, "upload", upload)
    rounds(sim, 4)


# -- resuming ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, operator", PAIRS)
def test_a_checkpoint_holds_all_of_it(method: str, operator: str, tmp_path: Path) -> None:
    whole = rounds(simulated(method, operator), 4)
    first, second = rounds(simulated(method, operator), 2), ready(simulated(method, operator))
    checkpoint.save(tmp_path, first.state())
    second.load(checkpoint.load(tmp_path))
    rounds(second, 4)
    same(without_compression(everything(second)), without_compression(everything(whole)))
    same(tensors(second.state()["rows"]), tensors(whole.state()["rows"]))


# -- privacy ------------------------------------------------------------------------------------------------
def private(sim: Simulation) -> Simulation:
    sim.engine.privacy = Privacy(sim.engine.rows, 25, 0.05, 1.0, calibration="analytic")
    try:
        privacy.check(sim.engine, sim.algorithm)
    except Exception as refused:
        pytest.skip(str(refused))
    return sim


@pytest.mark.parametrize("method, operator", PAIRS)
def test_the_same_noise_is_drawn_and_the_same_epsilon_spent(
    method: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(words: str) -> tuple[list[Any], Any]:
        draws, real = [], privacy.noisy

        def noisy(value: Tensor, sigma: Tensor, keys: Tensor) -> Tensor:
            draws.append((tuple(value.shape), sigma.tolist(), keys.tolist()))
            return real(value, sigma, keys)

        with monkeypatch.context() as patch:
            patch.setattr(privacy, "noisy", noisy)
            sim = rounds(private(simulated(method, words)), ROUNDS)
        assert sim.engine.privacy is not None
        return draws, sim.engine.privacy.spent()

    assert drawn(operator) == drawn("")


@pytest.mark.parametrize("method, operator", PAIRS)
def test_what_is_sent_depends_on_what_privacy_released_alone(
    method: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other data at client 0 and releases that do not look at them, everybody is sent the same."""
    sent: list[Tensor] = []
    real = {name: getattr(Compression, name) for name in ("broadcast", "download")}

    def release(self: Privacy, cohort: Any, name: str, value: Tensor, expected: Any, again: int) -> Tensor:
        keys = torch.from_numpy(rng.client_keys(rng.key(name, cohort.round, again), cohort.ids))
        return rng.RowRandom(keys).uniform(*value.shape[1:]).to(value)

    def spy(name: str) -> Any:
        def send(self: Compression, *args: Any) -> Received:
            received = real[name](self, *args)
            sent.append(received.seen.clone())
            return received

        return send

    monkeypatch.setattr(Privacy, "release", release)
    for name in real:
        monkeypatch.setattr(Compression, name, spy(name))
    told = []
    for arrays in (ARRAYS, other_data()):
        sent.clear()
        rounds(private(simulated(method, operator, arrays=arrays)), ROUNDS)
        told.append(list(sent))
    assert len(told[0]) == len(told[1])
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))
