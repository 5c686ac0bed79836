"""Compression of messages: references, residuals, versions of broadcasts, and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import HEAD, close, compose, engine, equal, mlp, ragged
from torch import Tensor, nn

from fedbench.channel import compression as channel
from fedbench.channel.channel import UnknownReference
from fedbench.channel.compression import Compression
from fedbench.compression.base import Compressor, Encoded
from fedbench.compression.dadaquant import DAdaQuant
from fedbench.compression.lowrank import LowRank
from fedbench.compression.none import NoCompression
from fedbench.compression.qsgd import QSGD
from fedbench.compression.topk import TopK
from fedbench.core.options import ConfigError, RunError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.simulation import build

N = 8
IDS = np.array([0, 2, 5])
ROW = torch.tensor([8.0, -7.0, 6.0, -5.0, 4.0, -3.0, 2.0, -1.0])
TOP2 = 32 * 2 + 1 + 4  # bits: two numbers; positions 0 and 1 by their gaps, 0 and 0, of floor(gap / 2) + 2 bits
WHOLE = 32 * N


@pytest.fixture(autouse=True)
def small_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TINY", 4)


def net(compressor: Compressor | None, module: nn.Module | None = None) -> Engine:
    e = engine(*ragged(), module or mlp(), columns=None if module else HEAD, cohort_size=3)
    return e if compressor is None else replace(e, compression=Compression(compressor, e.rows, e.model, e.seed))


def top2(error_feedback: bool = True, direction: Any = "up") -> TopK:
    return TopK(0.25, error_feedback, direction)


def in_bytes(*bits: int) -> int:
    return sum(-(-b // 8) for b in bits)


def rows(*scales: float) -> Tensor:
    return torch.tensor(scales)[:, None] * ROW


# -- uploads ---------------------------------------------------------------------------------------------
def test_an_upload_is_the_reference_and_what_the_operator_leaves_of_the_rest() -> None:
    e = net(top2())
    cohort = Cohort(e, IDS, 0)
    w = cohort.broadcast(w=torch.full((N,), 10.0)).w
    up = cohort.upload(theta=w + rows(1, 2, 3), relative_to={"theta": "w"}).theta
    kept = torch.tensor([8.0, -7.0, 0, 0, 0, 0, 0, 0])
    equal(up, w + torch.stack([kept, 2 * kept, 3 * kept]))
    assert cohort.cost.bytes_up == 3 * in_bytes(TOP2) and cohort.cost.dense_up == 3 * 4 * N
    other = Cohort(net(top2()), IDS, 0)
    each = other.download(each=rows(1, 1, 1)).each
    close(other.upload(theta=each + rows(1, 2, 3), relative_to={"theta": "each"}).theta, each + up - w)
    some = other.subset(np.array([True, False, True]))  # whose rows are found among those of all
    mine = some.upload(theta=each[[0, 2]] + rows(1, 3), relative_to={"theta": "each"}).theta
    close(mine, (each + up - w)[[0, 2]])


def test_what_an_upload_lacks_is_added_to_the_next_one() -> None:
    e, due, sent = net(top2()), torch.zeros(3, N), torch.zeros(3, N)
    for r in range(12):
        x = rows(1, 2, 3).roll(r, 1)
        seen = Cohort(e, IDS, r).upload(d=x, relative_to={"d": None}).d
        due, sent = due + x, sent + seen
        close(sent + e.rows.all["compression/up/d/memory"][IDS], due, 1e-6)
        assert ((seen != 0).sum(1) == 2).all()
    untouched = Cohort(e, np.array([1]), 12).upload(d=rows(1), relative_to={"d": None}).d
    equal(untouched[0], torch.tensor([8.0, -7.0, 0, 0, 0, 0, 0, 0]))  # client 1 had sent nothing


@pytest.mark.parametrize("compressor", [top2(error_feedback=False), top2()], ids=["error_feedback=false", "previous"])
def test_nothing_is_remembered_where_nothing_accumulates(compressor: TopK) -> None:
    e = net(compressor)
    kind = "previous" if compressor.error_feedback else "relative_to"
    for r in range(2):
        seen = Cohort(e, IDS, r).upload(d=rows(1, 1, 1), **{kind: {"d": None}}).d
        equal(seen[0], torch.tensor([8.0, -7.0, 0, 0, 0, 0, 0, 0]))
    assert not [name for name in e.rows.all if name.startswith("compression")]


def test_a_second_upload_of_a_name_in_a_round_has_a_memory_of_its_own() -> None:
    e = net(top2())
    for r in range(2):
        cohort = Cohort(e, IDS, r)
        halves = [cohort.subset(np.array(which)) for which in ([True, False, True], [False, True, False])]
        for half in halves:  # every client once
            half.upload(d=rows(1, 1, 1)[: len(half)], relative_to={"d": None})
        cohort.upload(d=rows(1, 1, 1), relative_to={"d": None})
    assert {n for n in e.rows.all if "memory" in n} == {"compression/up/d/memory", "compression/up/d/1/memory"}
    assert e.rows.all["compression/up/d/memory"].used == e.rows.all["compression/up/d/1/memory"].used == 3


def test_votes_integers_and_other_precisions_pass_as_they_are() -> None:
    e = net(top2(direction="both"))
    cohort = Cohort(e, IDS, 0)
    few, whole, double = torch.randn(3, 3), torch.arange(24).view(3, N), torch.randn(3, N, dtype=torch.float64)
    up = cohort.upload(few=few, whole=whole, double=double, relative_to={"few": None, "double": None})
    for _ in range(2):  # a first message is whole anyway
        down = cohort.download(few=few, whole=whole)
        told = cohort.broadcast(few=few[0], whole=whole[0])
    for got, sent in ((up.few, few), (up.whole, whole), (up.double, double), (down.few, few), (down.whole, whole)):
        equal(got, sent)
    equal(told.few, few[0])
    assert cohort.cost.bytes_up == cohort.cost.dense_up == 3 * (3 * 4 + N * 8 + N * 8)
    assert cohort.cost.bytes_down == cohort.cost.dense_down == 4 * 3 * (3 * 4 + N * 8)
    assert e.compression is not None and not e.compression.acted


def test_a_message_that_changes_its_size_is_refused() -> None:
    e = net(top2(direction="both"))
    first, second = Cohort(e, IDS, 0), Cohort(e, IDS, 1)
    first.upload(d=rows(1, 2, 3), relative_to={"d": None})
    first.broadcast(w=ROW)
    for send in (
        lambda: second.upload(d=torch.ones(3, 9), relative_to={"d": None}),
        lambda: second.broadcast(w=ROW[1:]),
    ):
        with pytest.raises(RunError, match=r"message '[dw]' has \d values, but earlier ones of this name had 8"):
            send()
    second.upload(d=torch.ones(3, 9), previous={"d": None})


def test_tensors_of_any_shape_are_rows() -> None:
    e = net(top2())
    cohort = Cohort(e, IDS, 0)
    up = cohort.upload(d=rows(1, 2, 3).view(3, 2, 4), previous={"d": torch.zeros(2, 4)}).d
    assert up.shape == (3, 2, 4) and ((up != 0).flatten(1).sum(1) == 2).all()


def test_an_upload_that_says_no_reference_is_refused() -> None:
    cohort = Cohort(net(None), IDS, 0)
    with pytest.raises(ValueError, match=r'upload\(theta=\.\.\.\) needs a reference, .*relative_to=\{"theta": "w"\}'):
        cohort.upload(theta=rows(1, 2, 3))
    with pytest.raises(ValueError, match=r"upload\(theta=\.\.\.\): both relative_to and previous name 'theta'"):
        cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": None}, previous={"theta": None})
    with pytest.raises(ValueError, match=r"upload\(reference=\.\.\.\): expected a tensor .* got a dict"):
        cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": None}, reference={"theta": ROW})
    with pytest.raises(ValueError, match="passes no tensor x"):
        cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": None, "x": None})
    with pytest.raises(ValueError, match="passes no tensor y"):
        cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": None}, previous={"y": None})


# -- to all ----------------------------------------------------------------------------------------------
def test_what_clients_pay_who_missed_broadcasts() -> None:
    """By hand: a first message is whole; later each client pays for what it missed, or for the whole row if less."""
    e = net(top2(direction="both"))

    def say(r: int, value: Tensor, ids: list[int]) -> tuple[Tensor, int]:
        cohort = Cohort(e, np.array(ids), r)
        return cohort.broadcast(w=value).w, cohort.cost.bytes_down

    w = torch.zeros(N)
    seen, size = say(0, w, [0, 1, 2])
    equal(seen, w)
    assert size == 3 * in_bytes(WHOLE)
    w1 = w + ROW
    seen, size = say(1, w1, [0])  # the two largest numbers of the growth
    known = torch.tensor([8.0, -7.0, 0, 0, 0, 0, 0, 0])
    equal(seen, known)
    assert size == in_bytes(TOP2)
    seen, size = say(2, w1, [0, 1, 3])  # 1 missed a message, 3 all of them; the next two numbers are sent
    known = known + torch.tensor([0, 0, 6.0, -5, 0, 0, 0, 0])
    equal(seen, known)
    assert size == in_bytes(70, 69 + 70, WHOLE)  # a first gap of 2, 4 and 6 takes 1, 2 and 3 bits more than one of 0
    seen, size = say(3, w1, [0])
    seen, size = say(4, w1, [0])
    equal(seen, w1)  # nothing is lost for good
    seen, size = say(5, w1, [2])  # 5 messages since its only one: the whole row is shorter
    assert WHOLE < 69 + 70 + 71 + 72 + 69 and size == in_bytes(WHOLE)
    seen, size = say(6, w1, [1])  # 4 since round 2
    assert WHOLE < 71 + 72 + 69 + 69 and size == in_bytes(WHOLE)
    seen, size = say(7, w1, [1, 2])
    assert size == in_bytes(69, 69 + 69)


def test_a_part_of_the_cohort_moves_its_own_counters_only() -> None:
    e = net(top2(direction="both"))
    Cohort(e, IDS, 0).broadcast(w=ROW)
    cohort = Cohort(e, IDS, 1)
    cohort.subset(np.array([True, False, False])).broadcast(w=2 * ROW)
    last = Cohort(e, IDS, 2)
    last.broadcast(w=2 * ROW)
    assert last.cost.bytes_down == in_bytes(TOP2, 2 * TOP2, 2 * TOP2)


def test_two_messages_of_one_name_in_a_round_have_a_reference_each() -> None:
    e = net(top2(direction="both"))
    for r in range(5):
        cohort = Cohort(e, IDS, r)
        first, second = cohort.broadcast(w=ROW).w, cohort.broadcast(w=-ROW).w
        equal(first, ROW)
        equal(second, -ROW)


def test_a_download_is_what_came_to_the_clients_own_row() -> None:
    e = net(top2(direction="both"))
    first = Cohort(e, IDS, 0)
    equal(first.download(u=rows(1, 2, 3)).u, rows(1, 2, 3))
    assert first.cost.bytes_down == 3 * in_bytes(WHOLE)
    later = Cohort(e, np.array([2, 4]), 3)
    seen = later.download(u=rows(5, 7)).u
    equal(seen[0], 2 * ROW + torch.tensor([24.0, -21, 0, 0, 0, 0, 0, 0]))
    equal(seen[1], 7 * ROW)
    assert later.cost.bytes_down == in_bytes(TOP2, WHOLE) and later.cost.dense_down == 2 * 4 * N


def test_an_evaluation_sees_what_clients_would_and_leaves_no_trace() -> None:
    e = net(top2(direction="both"))
    Cohort(e, IDS, 0).broadcast(w=0 * ROW)
    Cohort(e, IDS, 0).download(u=rows(0, 0, 0))
    before = {name: {k: t.clone() for k, t in s.items()} for name, s in e.rows.state_dict().items()}
    there = Cohort(e, np.arange(6), 0, "evaluation")
    kept = torch.tensor([8.0, -7.0, 0, 0, 0, 0, 0, 0])
    equal(there.broadcast(w=ROW).w, kept)
    seen = there.download(u=rows(1, 2, 3, 4, 5, 6)).u
    equal(seen[[0, 2]], torch.stack([kept, 3 * kept]))
    equal(seen[1], 2 * ROW)  # it was sent nothing yet
    equal(there.upload(d=rows(1, 2, 3, 4, 5, 6), relative_to={"d": None}).d, rows(1, 2, 3, 4, 5, 6))
    after = e.rows.state_dict()
    assert all(torch.equal(t, after[name][k]) for name, s in before.items() for k, t in s.items())
    assert after["compression/down/w/heard"]["ids"].tolist() == IDS.tolist()
    equal(Cohort(e, IDS, 1).broadcast(w=ROW).w, kept)


def test_fetched_rows_and_uploads_alone_are_left_as_they_are() -> None:
    e = net(top2())
    for r in range(3):
        cohort = Cohort(e, IDS, r)
        w = (r + 1) * ROW
        assert cohort.broadcast(w=w).w is w
        equal(cohort.download(u=rows(1, r, 3)).u, rows(1, r, 3))
        cohort.fetch(torch.ones(3, 2, dtype=torch.bool), cores=rows(1, 2))
        assert cohort.cost.bytes_down == cohort.cost.dense_down == 3 * 4 * N + 3 * 4 * N + 6 * 4 * N


def test_what_is_made_up_for_later_is_scaled() -> None:
    """Downloads, rows that a client keeps, and what a memory keeps: the rest shrinks; other uploads stay unbiased."""

    def half(error_feedback: bool = False) -> Engine:
        return net(QSGD(1, "l2", error_feedback=error_feedback, direction="both"))

    e, w = half(), 100 * torch.randn(N)
    known = torch.zeros(3, N)
    for r in range(60):
        cohort = Cohort(e, IDS, r)
        told = cohort.broadcast(w=torch.zeros(N) if r == 0 else w).w
        mine = cohort.download(u=torch.zeros(3, N) if r == 0 else w.expand(3, -1)).u
        known = cohort.upload(c=w.expand(3, -1), previous={"c": known}).c
    for seen in (told, mine, known):
        close(seen, w.expand(seen.shape), 1e-3)
    plain = Cohort(half(), IDS, 0).upload(d=w.expand(3, -1), relative_to={"d": None}).d
    equal((plain != 0) * (plain.abs() - w.norm()).abs() < 1e-3, torch.ones(3, N, dtype=torch.bool))  # norms, not shares
    cohort = Cohort(half(), IDS, 0)
    cohort.broadcast(w=torch.zeros(N))
    moved = cohort.upload(theta=w.expand(3, -1), relative_to={"theta": "w"}).theta  # no later upload repairs it
    equal((moved != 0) * (moved.abs() - w.norm()).abs() < 1e-3, torch.ones(3, N, dtype=torch.bool))
    replaced = Cohort(half(), IDS, 0).upload(d=w.expand(3, -1), previous={"d": None}).d
    equal(replaced != 0, plain != 0)  # nothing is to be made up for
    e, sent = half(error_feedback=True), torch.zeros(3, N)
    for r in range(200):
        sent += Cohort(e, IDS, r).upload(d=w.expand(3, -1), relative_to={"d": None}).d
    close(sent / 200, w.expand(3, -1), 10)


# -- a server that lags behind itself --------------------------------------------------------------------
def test_what_was_trained_from_a_lagging_row_is_moved_onto_the_servers_own() -> None:
    """By hand: clients see 8, -7 and zeros of what the server has, add a step of 1, and the server sees its own + 1."""
    for send, value in (("broadcast", ROW), ("download", rows(1, 1, 1))):
        e = net(top2(error_feedback=False, direction="both"))
        getattr(Cohort(e, IDS, 0), send)(w=torch.zeros_like(value))
        cohort = Cohort(e, IDS, 1)
        w = getattr(cohort, send)(w=value).w
        equal(w.expand(3, -1)[0], torch.tensor([8.0, -7, 0, 0, 0, 0, 0, 0]))
        step = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])  # which top2 sends whole
        theta = (w + step).expand(3, -1)
        kept = cohort.upload(theta=theta, previous={"theta": w}).theta
        equal(kept, theta)  # a row as its client has it
        equal(cohort.upload(theta=theta, relative_to={"theta": "w"}).theta, (ROW + step).expand(3, -1))
        equal(cohort.upload(d=step.expand(3, -1), relative_to={"d": None}).d, step.expand(3, -1))


@pytest.mark.parametrize("send", ["broadcast", "download"])
@pytest.mark.parametrize("compressor", [None, top2(direction="both")], ids=["uncompressed", "compressed"])
def test_what_clients_were_not_sent_in_this_round_is_no_reference(send: str, compressor: TopK | None) -> None:
    """A copy, another tensor, another name, a name of the round before, or of other clients."""
    e, value = net(compressor), ROW if send == "broadcast" else rows(1, 1, 1)
    getattr(Cohort(e, IDS, 0), send)(before=value)
    cohort = Cohort(e, IDS, 1)
    some = cohort.subset(np.array([True, False, True]))
    w = getattr(cohort, send)(w=value).w
    getattr(some, send)(theirs=value if send == "broadcast" else value[:2])
    words = r"upload\(theta=\.\.\., .*: relative_to is {}, not a name of the tensors that these clients received"
    for handle, given in ((w, "a Tensor"), (w.clone(), "a Tensor"), ("x", "'x'"), ("before", "'before'")):
        with pytest.raises(UnknownReference, match=words.format(given) + " in this round, which are 'w', 'theirs'"):
            cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": handle})
    with pytest.raises(UnknownReference, match=words.format("'theirs'")):
        cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": "theirs"})
    some.upload(theta=rows(1, 2), relative_to={"theta": "theirs"})
    cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": "w"})
    with pytest.raises(UnknownReference, match="which are none"):
        Cohort(e, IDS, 2).upload(theta=rows(1, 2, 3), relative_to={"theta": "w"})


def test_plain_messages_pass_as_they_are() -> None:
    e = net(top2(direction="both"))
    for r in range(2):
        cohort = Cohort(e, IDS, r)
        equal(cohort.broadcast(c=(r + 1) * ROW, uncompressed=["c"]).c, (r + 1) * ROW)
        equal(cohort.download(c=rows(1, 2, 3), uncompressed=["c"]).c, rows(1, 2, 3))
        up = cohort.upload(a=rows(1, 2, 3), d=rows(1, 2, 3), relative_to={"a": None, "d": None}, uncompressed=["a"])
        equal(up.a, rows(1, 2, 3))
        assert (up.d != 0).sum() == 6
        assert cohort.cost.bytes_down == cohort.cost.dense_down == 2 * 3 * 4 * N
    for call in (cohort.broadcast, cohort.download, cohort.upload):
        with pytest.raises(ValueError, match="passes no tensor x"):
            call(uncompressed=["x"])


def test_what_would_be_sent_in_full_is_counted_beside_it() -> None:
    e = net(top2(direction="both"))
    for r in range(3):
        cohort = Cohort(e, IDS, r)
        cohort.broadcast(w=(r + 1) * ROW)
        cohort.download(u=rows(1, 2, 3))
        cohort.upload(d=rows(1, 2, 3), relative_to={"d": None})
        assert cohort.cost.dense_down == 2 * 3 * 4 * N and cohort.cost.dense_up == 3 * 4 * N
    assert cohort.cost.bytes_down == in_bytes(*[TOP2] * 3) + in_bytes(*[69] * 3)  # of zeros the first two positions


def test_who_sent_a_name_before_decides_which_of_its_messages_it_is() -> None:
    """Client 0 sends d twice, the second time with the others: theirs is a second message, too, in another memory."""
    e = net(top2())
    cohort = Cohort(e, IDS, 0)
    cohort.subset(np.array([True, False, False])).upload(d=rows(1), relative_to={"d": None})
    cohort.upload(d=rows(1, 2, 3), relative_to={"d": None})
    first, second = (e.rows.all[f"compression/up/d{end}/memory"] for end in ("", "/1"))
    assert first.touched().tolist() == [0] and second.touched().tolist() == IDS.tolist()


def test_an_evaluation_leaves_what_an_operator_remembers() -> None:
    e = net(LowRank(1, warm_start=True, direction="both"))
    size = e.model.size
    for r in range(2):
        Cohort(e, IDS, r).download(w=torch.randn(3, size))
    kept = {name: rows.whole() for name, rows in e.rows.all.items()}
    assert any(bool(t.any()) for name, t in kept.items() if not name.endswith(("reference", "bits", "heard")))
    Cohort(e, np.arange(6), 1, "evaluation").download(w=torch.randn(6, size))
    for name, rows in e.rows.all.items():
        equal(rows.whole(), kept[name])


# -- exact, and none -------------------------------------------------------------------------------------
def test_an_exact_operator_changes_no_bit_and_keeps_nothing() -> None:
    e = net(TopK(1, True, "both"))
    for r in range(3):
        cohort = Cohort(e, IDS, r)
        x = torch.randn(3, N) / 3
        equal(cohort.broadcast(w=x[0]).w, x[0])
        equal(cohort.download(u=x).u, x)
        equal(cohort.upload(d=x, previous={"d": x[0] / 7}).d, x)
        assert cohort.cost.bytes_up == cohort.cost.dense_up == 3 * 4 * N
    assert not e.rows.all and e.compression is not None and e.compression.acted


def test_compression_is_built_from_the_configuration() -> None:
    def built(*overrides: str) -> Compression | None:
        e = net(None)
        return build.compression(compose(list(overrides)), e.rows, e.model)

    assert built() is None and built("compression=none", "compression.direction=both") is None
    found = built("compression=topk", "compression.share=0.25", "compression.direction=both")
    assert found is not None and isinstance(found.compressor, TopK) and found.compresses_downloads
    exact = built("compression=topk", "compression.share=1", "compression.direction=both")
    assert exact is not None and not exact.compresses_downloads


class Listener(NoCompression):
    """Reads losses, and compresses nothing."""

    def observe(self, losses: Tensor) -> None:
        self.heard = losses


def test_an_operator_that_reads_losses_is_told_them_for_their_bytes() -> None:
    e = net(Listener())
    assert e.compression is not None
    assert e.compression.observe(torch.ones(3)) == 12
    equal(e.compression.compressor.state_dict()["heard"], torch.ones(3))  # and remembers them after a resume
    other = net(top2())
    assert other.compression is not None and other.compression.observe(torch.ones(3)) == 0


def test_losses_are_not_told_under_privacy() -> None:
    cfg = compose(["privacy.epsilon=1"])
    cfg.compression._target_ = f"{__name__}.Listener"
    e = net(None)
    with pytest.raises(ConfigError, match=r"reads the clients' training losses, which privacy\.epsilon=1"):
        build.compression(cfg, e.rows, e.model)


# -- running statistics ----------------------------------------------------------------------------------
def normed() -> nn.Module:
    """4 inputs, 2 classes: 10 + 4 parameters, and 4 running statistics."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2))


class Doubled(Compressor):
    """Sends twice what it is given: whatever passes it shows."""

    contractive = True  # it does not, and shall not be damped

    def compress(self, x: Tensor, draws: Any, message: Any) -> Encoded:
        return Encoded(2 * x)

    def decompress(self, sent: Encoded, message: Any) -> Tensor:
        return sent.values

    def num_values(self, message: Any) -> int:
        return message.size

    def count(self, sent: Encoded, message: Any) -> Tensor:
        return torch.zeros(len(sent.values), dtype=torch.int64)


def test_running_statistics_pass_uncompressed() -> None:
    e = net(Doubled(False, "both"), normed())
    size, buffers = e.model.size, 4
    assert size == 18
    w, x = torch.randn(size), torch.randn(3, size)
    cohort = Cohort(e, IDS, 0)
    cohort.broadcast(w=w)
    up = cohort.upload(theta=x, relative_to={"theta": "w"}).theta
    close(up[:, :-buffers], (w + 2 * (x - w))[:, :-buffers], 1e-6)
    equal(up[:, -buffers:], x[:, -buffers:])
    assert cohort.cost.bytes_up == 3 * 4 * size
    cohort.broadcast(w=w)
    seen = cohort.broadcast(w=w).w  # another one of this round: whole
    equal(seen, w)
    Cohort(e, IDS, 0).download(u=x)
    seen = Cohort(e, IDS, 1).download(u=3 * x).u
    close(seen[:, :-buffers], (x + 2 * (2 * x))[:, :-buffers], 1e-5)
    equal(seen[:, -buffers:], 3 * x[:, -buffers:])
    seen = Cohort(e, IDS, 1).broadcast(w=3 * w).w
    close(seen[:-buffers], (w + 2 * (2 * w))[:-buffers], 1e-5)
    equal(seen[-buffers:], 3 * w[-buffers:])


def test_running_statistics_that_may_be_anywhere_are_refused() -> None:
    e = net(top2(), normed())
    with pytest.raises(RunError, match=r"message 'd' of 17 values is neither a whole model .* running statistics"):
        Cohort(e, IDS, 0).upload(d=torch.randn(3, 17), relative_to={"d": None})
    Cohort(net(top2()), IDS, 0).upload(d=torch.randn(3, 17), relative_to={"d": None})  # none: nothing to refuse


# -- what the compressor is shown ---------------------------------------------------------------------------
class Spy(NoCompression):
    """Notes the messages that it is shown."""

    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def __call__(self, x: Tensor, draws: Any, message: Any, keep: bool = True) -> tuple[Tensor, Tensor]:
        self.shown.append((message, draws.keys.clone()))
        return x, torch.zeros(len(x), dtype=torch.int64)


def test_the_operator_is_shown_the_parameters_of_rows_and_of_groups() -> None:
    spy = Spy()
    e = net(spy)
    cohort, size, head = Cohort(e, IDS, 3), e.model.size, e.model.columns["head"]
    for name, columns in (("theta", e.model.all), ("head", head), ("base", head.rest(size))):
        cohort.upload(**{name: torch.randn(3, columns.size)}, relative_to={name: None})
    whole, part, rest = (message.spans for message, _ in spy.shown)
    assert list(whole) == list(e.model.spans)
    assert {**rest, **part}.keys() == whole.keys() and not rest.keys() & part.keys()
    for name, (a, b, shape) in part.items():
        assert shape == tuple(e.model.shapes[name]) and b - a == np.prod(shape)
    assert min(a for a, _, _ in part.values()) == 0 and max(b for _, b, _ in part.values()) == head.size
    assert len({message.name for message, _ in spy.shown}) == 3


def test_draws_differ_by_message_round_and_client() -> None:
    spy = Spy()
    e = net(spy)
    for r in range(2):
        cohort = Cohort(e, IDS, r)
        for name in ("a", "b", "b"):
            cohort.upload(**{name: rows(1, 2, 3)}, relative_to={name: None})
    keys = [int(key) for _, each in spy.shown for key in each]
    assert len(keys) == len(set(keys)) == 2 * 3 * 3
    again = Spy()
    Cohort(net(again), IDS[1:], 0).upload(a=rows(1, 2), relative_to={"a": None})
    equal(again.shown[0][1], spy.shown[0][1][1:])  # of a client whoever else takes part
    other, e = Spy(), net(None)
    e = replace(e, compression=Compression(other, e.rows, e.model, e.seed + 1))
    Cohort(e, IDS, 0).upload(a=rows(1, 2, 3), relative_to={"a": None})
    assert not (other.shown[0][1] == spy.shown[0][1]).any()


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_operators_are_given_each_clients_part_in_the_servers_mean(weights: Any) -> None:
    """DAdaQuant's levels keep the variance of that mean: with client_weights=uniform all clients have q_t."""
    e = replace(net(compressor := DAdaQuant(8, 64)), client_weights=weights)
    cohort, given = Cohort(e, IDS, 0), []
    compressor.levels_of = lambda message, rows: given.append(message) or DAdaQuant.levels_of(compressor, message, rows)
    cohort.upload(theta=rows(1, 2, 3), relative_to={"theta": None})
    equal(given[0].weights, cohort.weights)
    q = DAdaQuant(8, 64).levels_of(given[0], rows(1, 2, 3))[:, 0].double()
    w = cohort.weights.double()
    close((w**2 / q**2).sum(), (w**2).sum() / 64, 2e-2)  # up to rounding of levels
    assert (q == 8).all() == (weights == "uniform")
