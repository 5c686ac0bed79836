"""All methods under all compressors: results at full precision, transmitted bits, and noise."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import ARRAYS, METHODS, assert_same, run_rounds, set_up, state_of, tensors, without_learning
from compressed import TWO, all_pairs, compressed, sampled, simulated, without_compression
from torch import Tensor

from fedbench.channel import compression as channel
from fedbench.channel import privacy
from fedbench.channel.compression import Compression, Received
from fedbench.channel.privacy import Privacy
from fedbench.compression.base import FLOAT, Compressor, Message
from fedbench.compression.topk import TopK
from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.simulation import build, checkpoint, evaluate
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.simulator import run_round
from fedbench.testing.algorithm import other_data

EXACT = ["topk share=1", "randk share=1", "qsgd levels=null", "lowrank rank=1000"]
ROUNDS = 3
EXACTLY = sampled([(method, compressor) for method in METHODS for compressor in EXACT])
PAIRS = sampled(all_pairs())


@pytest.fixture(autouse=True)
def all_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TINY", TWO)


@functools.cache
def uncompressed(method: str) -> dict[str, Tensor]:
    return state_of(run_rounds(simulated(method, ""), ROUNDS))


@pytest.mark.parametrize("method, compressor", EXACTLY)
def test_at_full_precision_nothing_changes(method: str, compressor: str) -> None:
    """Not a bit where the compressor is exact; else what adding to a reference and subtracting it rounds."""
    found = without_compression(state_of(run_rounds(simulated(method, compressor), ROUNDS)))
    assert_same(found, uncompressed(method), 1e-5 if compressor.startswith("lowrank") else 0.0)


# -- the stream, and the memory --------------------------------------------------------------------------
@pytest.mark.parametrize("method, compressor", PAIRS)
def test_what_is_seen_is_what_a_decoder_makes_of_the_stream(
    method: str, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and the bits that are counted are the stream's but for the end of its last byte."""
    sim, messages, real = simulated(method, compressor), [], Compression._compress_and_decompress

    def send(
        self: Compression, compressor: Compressor, due: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        streams = []
        for i, row in enumerate(due[:, : message.size]):
            one = message.of(i, i + 1)
            streams.append(compressor.encode(row.contiguous(), rng.RowRandom(keys[i : i + 1]), one))
            decoded = compressor.decode(streams[-1], one)
            messages.append((message.name, decoded))
        seen, bits = real(self, compressor, due, message, keys, keep)
        rest = FLOAT * (due.shape[1] - message.size)
        for i, stream in enumerate(streams):
            assert torch.equal(seen[i, : message.size], messages[len(messages) - len(streams) + i][1]), message.name
            assert 0 <= 8 * len(stream) - (int(bits[i]) - rest) < 8, message.name
        return seen, bits

    monkeypatch.setattr(Compression, "_compress_and_decompress", send)
    run_rounds(sim, 2)
    assert messages or (sim.engine.compression is not None and not sim.engine.compression.acted)


@pytest.mark.parametrize("method, compressor", PAIRS)
def test_what_is_sent_and_what_is_remembered_is_what_was_due(
    method: str, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, of every upload that accumulates."""
    sim, real = simulated(method, compressor), Compression.upload
    due, sent = {}, {}  # by name and call, of all clients  # [N, n] each

    def upload(
        self: Compression, cohort: Any, name: str, value: Tensor, reference: Any, call: int, accumulates: bool
    ) -> Received:
        received = real(self, cohort, name, value, reference, call, accumulates)
        memory = self.rows.all.get(f"compression/{channel._state_path('up', name, call)}/memory")
        assert (memory is not None) == (
            accumulates and self.compressor.error_feedback and not self._is_uncompressed(value)
        )
        if memory is not None:
            before = torch.zeros_like(value) if reference is None else reference
            for sums, x in ((due, value), (sent, received.value)):
                total = sums.setdefault((name, call), torch.zeros(6, value[0].numel(), dtype=torch.float64))
                total[cohort.ids] += (x.double() - before.double()).flatten(1)
            ids = cohort.ids
            left = due[name, call][ids] - sent[name, call][ids] - memory[ids]
            scale = 1 + due[name, call][ids].abs().max()
            assert float(left.abs().max() / scale) < 1e-6, name
        return received

    monkeypatch.setattr(Compression, "upload", upload)
    run_rounds(sim, 4)


# -- resuming ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, compressor", PAIRS)
def test_a_checkpoint_holds_all_of_it(method: str, compressor: str, tmp_path: Path) -> None:
    whole = run_rounds(simulated(method, compressor), 4)
    first, second = run_rounds(simulated(method, compressor), 2), set_up(simulated(method, compressor))
    checkpoint.save(tmp_path, first.state())
    second.load(checkpoint.load(tmp_path))
    run_rounds(second, 4)
    assert_same(without_compression(state_of(second)), without_compression(state_of(whole)))
    assert_same(tensors(second.state()["rows"]), tensors(whole.state()["rows"]))


# -- privacy ------------------------------------------------------------------------------------------------
def private(sim: Simulation) -> Simulation:
    sim.engine = replace(sim.engine, privacy=Privacy(sim.engine.rows, 25, 0.05, 1.0, calibration="analytic"))
    try:
        build.check_method(sim.engine, sim.algorithm)
    except Exception as refused:
        pytest.skip(str(refused))
    return sim


@pytest.mark.parametrize("method, compressor", PAIRS)
def test_the_same_noise_is_drawn_and_the_same_epsilon_spent(
    method: str, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(words: str) -> tuple[list[Any], Any]:
        draws, real = [], privacy.noisy

        def noisy(value: Tensor, sigma: Tensor, keys: Tensor) -> Tensor:
            draws.append((tuple(value.shape), sigma.tolist(), keys.tolist()))
            return real(value, sigma, keys)

        with monkeypatch.context() as patch:
            patch.setattr(privacy, "noisy", noisy)
            sim = run_rounds(private(simulated(method, words)), ROUNDS)
        assert sim.engine.privacy is not None
        return draws, sim.engine.privacy.spent()

    assert drawn(compressor) == drawn("")


@pytest.mark.parametrize("method, compressor", PAIRS)
def test_what_is_sent_depends_on_what_privacy_released_alone(
    method: str, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other data at client 0 and releases that do not look at them, everybody is sent the same."""
    sent: list[Tensor] = []
    real = {name: getattr(Compression, name) for name in ("broadcast", "download")}

    def release(self: Privacy, context: RoundContext, name: str, value: Tensor, _: Any, call: int, rate: Any) -> Tensor:
        keys = torch.from_numpy(rng.client_keys(rng.key(name, context.round, call), context.ids))
        return rng.RowRandom(keys).uniform(*value.shape[1:]).to(value)

    def spy(name: str) -> Any:
        def send(self: Compression, *args: Any) -> Received:
            received = real[name](self, *args)
            sent.append(received.value.clone())
            return received

        return send

    monkeypatch.setattr(Privacy, "release", release)
    for name in real:
        monkeypatch.setattr(Compression, name, spy(name))
    told = []
    for arrays in (ARRAYS, other_data()):
        sent.clear()
        run_rounds(private(simulated(method, compressor, arrays=arrays)), ROUNDS)
        told.append(list(sent))
    assert len(told[0]) == len(told[1])
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


# -- what the server makes of it ---------------------------------------------------------------------------
LOSSY, WHOLE = "topk error_feedback=false", "topk share=1"
SERVERS = ("w", "u", "h", "x")  # rows that a server has one of, by the papers' letters


@pytest.mark.parametrize(
    "method",  # fedala and fedas do not train from all of the server's model, and fedkd truncates what it sends
    [
        pytest.param(m, marks=pytest.mark.slow if i % 4 else ())
        for i, m in enumerate(METHODS)
        if m not in ("fedala", "fedas", "fedkd")
    ],
)
def test_what_a_broadcast_lacked_stays_due(method: str) -> None:
    """Clients that learn nothing leave the server's row where it is, however far what they saw of it lags behind."""
    state, servers = run_rounds(simulated(method, LOSSY), 3).state(), []
    for words in (LOSSY, WHOLE):
        sim = set_up(compressed(method, words).simulation(change=without_learning))
        sim.load(state)
        kept = run_rounds(sim, 4).algorithm.state_dict()
        servers.append({name: kept[name] for name in SERVERS if name in kept})
    assert_same(*servers, 1e-6)


SENT = {  # as topk in both directions knows it: name -> its reference, and whether it accumulates
    "apfl": {"w": ("broadcast", True)},
    "apple": {"core": ("rows", False)},
    "ditto": {"theta": ("broadcast", True)},
    "fedamp": {"w": ("rows", False)},
    "fedavg": {"theta": ("broadcast", True)},
    "fedbabu": {"u": ("broadcast", True)},
    "feddyn": {"theta": ("broadcast", True)},
    "fedfomo": {"theta": ("rows", False)},
    "fedotp": {"p_g": ("broadcast", True)},
    "fedper": {"u": ("broadcast", True)},
    "fedprox": {"theta": ("broadcast", True)},
    "fedrep": {"u": ("broadcast", True)},
    "fedrod": {"w": ("broadcast", True)},
    "fedsld": {"theta": ("broadcast", True)},
    "heurfedamp": {"w": ("download", True)},
    "lg_fedavg": {"h": ("broadcast", True)},
    "per_fedavg_hf": {"theta": ("broadcast", True)},
    "pfedme": {"w": ("broadcast", True)},
    "pfedmoap": {"prompt": ("broadcast", True)},
    "pfedprompt": {"theta": ("broadcast", True)},
    "pgfed": {"theta": ("broadcast", True), "g": ("0", False)},
    "pgfed_ce": {"theta": ("broadcast", True), "g": ("0", False)},
    "pgfed_exact": {"theta": ("broadcast", True)},
    "scaffold": {"dx": ("0", True), "dc": ("0", True)},
}


@pytest.mark.parametrize("method", SENT)
def test_every_method_says_what_its_messages_add_to(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim, found, told = simulated(method, LOSSY), {}, {"broadcast": [], "download": []}
    real = {name: getattr(Compression, name) for name in ("broadcast", "download", "upload")}

    def tell(name: str) -> Any:
        def send(self: Compression, *args: Any) -> Received:
            received = real[name](self, *args)
            told[name].append(received.value)
            return received

        return send

    def upload(
        self: Compression, cohort: Any, name: str, value: Tensor, reference: Any, call: int, accumulates: bool
    ) -> Received:
        kinds = [kind for kind, rows in told.items() if any(reference is row for row in rows)]
        kind = "0" if reference is None else kinds[0] if kinds else "rows"
        if not self._is_uncompressed(value):
            found[name] = (kind, accumulates)
        return real["upload"](self, cohort, name, value, reference, call, accumulates)

    for name in told:
        monkeypatch.setattr(Compression, name, tell(name))
    monkeypatch.setattr(Compression, "upload", upload)
    run_rounds(sim, 3)
    assert found == SENT[method]


def test_a_global_model_is_evaluated_as_clients_see_it() -> None:
    sim = run_rounds(simulated("fedavg", LOSSY), 3)
    assert not one_model(sim)
    deployed = state_of(sim)["/deployed"]
    w, known = sim.algorithm.w, sim.engine.rows.all["compression/down/w/reference"].whole()[0]
    assert 0 < (deployed[0] - w).norm() < (known - w).norm()
    assert one_model(run_rounds(simulated("fedavg", WHOLE), 1))


def one_model(sim: Simulation) -> bool:
    """Whether every client deploys the server's row."""
    return evaluate.personal_and_global(sim.algorithm, sim.engine, np.arange(6), sim.done - 1, False)[1]


# -- a compressor's own numbers -----------------------------------------------------------------------------
class Counting(TopK):
    """Sends less the more losses it was told."""

    def __init__(self) -> None:
        super().__init__(0.5, True, "both")
        self.told = torch.zeros(1)

    def num_values(self, message: Message) -> int:
        return max(1, message.size // (2 + int(self.told)))

    def observe(self, losses: Tensor) -> None:
        self.told = self.told + losses.sum()


def test_what_an_operator_learned_is_there_after_a_resume(tmp_path: Path) -> None:
    def new() -> Simulation:
        sim = simulated("fedavg", LOSSY)
        e = sim.engine
        sim.engine = replace(e, compression=Compression(Counting(), e.rows, e.model, e.seed))
        return set_up(sim)

    def play(sim: Simulation, stop: int) -> Simulation:
        while sim.done < stop:
            run_round(sim, [])
        return sim

    whole, first, second = play(new(), 4), play(new(), 2), new()
    checkpoint.save(tmp_path, first.state())
    second.load(checkpoint.load(tmp_path))
    play(second, 4)
    compressor = second.engine.compression.compressor  # type: ignore[union-attr]
    assert float(compressor.told) > 3 and compressor.num_values(Message("w", 100, np.arange(1))) < 20  # type: ignore[union-attr]
    assert_same(state_of(second), state_of(whole))
    assert second.cost["bytes_up"] == whole.cost["bytes_up"]


def test_losses_that_are_told_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_up() -> float:
        sim = set_up(simulated("fedavg", LOSSY))
        run_round(sim, [])
        return sim.cost["bytes_up"]

    silent = bytes_up()
    monkeypatch.setattr(TopK, "observe", lambda self, losses: None)
    assert bytes_up() - silent == 4 * 4  # of four clients
