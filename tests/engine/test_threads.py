"""Items laid on threads: all of each, once, in order, in the least time; whoever does them, the same comes out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import all_clients, engine, equal, mlp, ragged

from fedbench.engine import threads
from fedbench.engine.batch import Batch
from fedbench.engine.executor import Plan
from fedbench.engine.step import Step, plain_step
from fedbench.engine.threads import Piece, queue_length, run_items, run_steps, shortest_length, wrap_around

CASES = [
    ([1260, 1030, 900, 130, 130, 80], 2),
    ([7], 3),
    ([0, 0], 2),
    ([5, 5, 5], 3),
    ([9, 1, 1], 2),
    ([4, 4, 4], 2),
    *((sorted(np.random.default_rng(i).integers(0, 40, 3 + i).tolist())[::-1], 2 + i % 7) for i in range(40)),
]


@pytest.mark.parametrize("lengths, workers", CASES)
def test_pieces_fill_the_least_time(lengths: list[int], workers: int) -> None:
    """Laid on a clock: no worker is late, no item runs twice or at two places at once, and its steps are in order."""
    lists, most = wrap_around(lengths, workers), shortest_length(lengths, workers)
    assert len(lists) <= workers and most == max(-(-sum(lengths) // workers), *lengths)
    when: dict[int, list[tuple[int, int, int]]] = {}  # item -> (first step, began, ended)
    for pieces in lists:
        clock = 0
        for item, start, stop in pieces:
            steps = (lengths[item] if stop is None else stop) - start
            when.setdefault(item, []).append((start, clock, clock := clock + steps))
        assert clock <= most
    assert when.keys() == set(range(len(lengths)))
    for item, runs in when.items():
        assert sum(ended - began for _, began, ended in runs) == lengths[item]
        runs.sort()
        assert runs[0][0] == 0
        assert all(a[2] <= b[1] and b[0] == a[2] - a[1] for a, b in pairwise(runs))


def test_a_queue_does_where_cutting_gains_nothing() -> None:
    assert queue_length([1260, 1030, 900, 130, 130, 80], 2) == 1930  # 1765 at best
    assert queue_length([5, 4, 3, 3, 3], 2) == 10 and queue_length([1] * 9, 4) == 3 and queue_length([], 2) == 0


class Log:
    """Items that write down who did which of their steps, and that are never done by two at once."""

    def __init__(self, lengths: list[int], pause: float = 0.0, fail: tuple[int, int] | None = None):
        self.lengths, self.pause, self.fail = lengths, pause, fail
        self.steps: dict[int, list[int]] = {i: [] for i in range(len(lengths))}
        self.threads: dict[int, set[int]] = {i: set() for i in range(len(lengths))}

    def __call__(self, item: int):
        for t in range(self.lengths[item]):
            assert not torch.is_grad_enabled()
            if (item, t) == self.fail:
                raise ZeroDivisionError
            time.sleep(self.pause)
            self.steps[item].append(t)
            self.threads[item].add(threading.get_ident())
            yield

    def run(self, workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            run_items(pool, workers, self, self.lengths)


@pytest.mark.parametrize("lengths, workers", CASES)
def test_every_step_is_done_once_and_in_order(lengths: list[int], workers: int) -> None:
    log = Log(lengths)
    log.run(workers)
    assert log.steps == {i: list(range(n)) for i, n in enumerate(lengths)}


def waiting(done: threading.Event) -> None:
    assert done.wait(300)


def test_an_item_goes_on_in_another_thread() -> None:
    """Three equal items on two threads: the last one does not begin before the second one has ended, so that the thread
    that began the second cannot have ended it."""
    log, over = Log([20, 20, 20]), threading.Event()

    def begin(item: int):
        if item == 2:
            waiting(over)
        yield from log(item)
        if item == 1:
            over.set()

    with ThreadPoolExecutor(2) as pool:
        run_items(pool, 2, begin, log.lengths)
    assert [len(log.threads[i]) for i in range(3)] == [1, 2, 1]


def test_a_client_goes_on_in_another_thread() -> None:
    """Training, gradients, losses and outputs of three equal clients on two threads have the bits of a loop."""

    def computed(plan: str | Plan, wait: bool) -> list[torch.Tensor]:
        e = engine(*ragged([40, 40, 40]), mlp(), plan=plan, epochs=2, eval_batch=5)
        cohort, over = all_clients(e), threading.Event()
        who: dict[int, set[int]] = {i: set() for i in range(3)}

        def step(s: Step, batch: Batch) -> None:
            client = int(s._chunk.ids[0])
            if wait and client == 2 and s.t == 0:
                waiting(over)
            who[client].add(threading.get_ident())
            plain_step(None)(s, batch)
            if client == 1 and s.t == 15:
                over.set()

        out = cohort.train(e.model.init_row(), step=step)
        assert [len(who[i]) for i in range(3)] == [1, 1 + wait, 1]
        return [out.theta, out.loss, *cohort.gradient(out.theta), cohort.loss(out.theta), *cohort.forward(out.theta)]

    for found, expected in zip(computed(Plan("threads", 1, 2, 1), True), computed("loop", False), strict=True):
        equal(found, expected)


@pytest.mark.parametrize("item", range(6))
@pytest.mark.parametrize("step", [0, 25])
def test_an_exception_ends_all(item: int, step: int) -> None:
    log = Log([60, 50, 45, 30, 30, 30], pause=0.0005, fail=(item, step))
    with pytest.raises(ZeroDivisionError):
        log.run(3)


class Known(threading.Event):
    """What run_items waits for; waited: somebody has begun to.  made: all there are."""

    made: list[Known] = []

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()
        self.made.append(self)

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.set()
        return super().wait(timeout)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    """The events of the items to come: one for each item that is cut in two."""
    monkeypatch.setattr(threads, "Event", Known)
    monkeypatch.setattr(Known, "made", [])
    return Known.made


def test_who_waits_for_the_other_half_learns_of_its_failure(known: list[Known]) -> None:
    log, over = Log([20, 20, 20]), threading.Event()

    def begin(item: int):
        if item == 1:
            waiting(over)
            waiting(known[0].waited)  # the other thread waits for the first half
            raise ZeroDivisionError
        yield from log(item)
        over.set()

    with pytest.raises(ZeroDivisionError), ThreadPoolExecutor(2) as pool:
        run_items(pool, 2, begin, log.lengths)
    assert log.steps == {0: list(range(20)), 1: [], 2: []}


def test_a_failure_ends_the_others_at_their_step() -> None:
    """Item 1 fails while item 0 has ten minutes of steps to go."""
    begun, steps = threading.Event(), []

    def begin(item: int):
        if item == 1:
            waiting(begun)
            raise ZeroDivisionError
        for t in range(60_000):
            steps.append(t)
            begun.set()
            time.sleep(0.01)
            yield

    with pytest.raises(ZeroDivisionError), ThreadPoolExecutor(2) as pool:
        run_items(pool, 2, begin, [60_000, 60_000])
    assert len(steps) < 60_000


def test_the_first_failure_in_time_is_raised(known: list[Known]) -> None:
    """Item 0, which goes first, fails in the step that it was at when item 1, half of it, had failed."""
    begun = threading.Event()

    def begin(item: int):
        if item == 1:
            waiting(begun)
            raise ZeroDivisionError
        begun.set()
        waiting(known[0])  # its second half need not be waited for
        raise ValueError
        yield

    with pytest.raises(ZeroDivisionError), ThreadPoolExecutor(2) as pool:
        run_items(pool, 2, begin, [20, 20, 20])


@pytest.mark.parametrize("interrupt", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_who_cannot_go_on_leaves_nobody_waiting(interrupt: BaseException) -> None:
    """The second thread does not begin what the first one waits for the end of; without the mending this test hangs
    rather than fails, so that it goes about it in a thread that is left behind."""

    class Broken(ThreadPoolExecutor):
        def submit(self, fn, *args):
            if args == (1,):
                raise interrupt
            return super().submit(fn, *args)

    pool, log, raised = Broken(2), Log([20, 20, 20]), []

    def go() -> None:
        try:
            run_items(pool, 2, log, log.lengths)
        except BaseException as error:
            raised.append(error)
        pool.shutdown(wait=True)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and raised == [interrupt]


def test_an_interrupt_stops_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    log, started = Log([300, 300, 300], pause=0.01), threading.Event()

    def begin(item: int):
        started.set()
        yield from log(item)

    def interrupted(futures) -> None:
        waiting(started)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(2) as pool:  # which waits for its threads
        run_items(pool, 2, begin, log.lengths)
    assert sum(map(len, log.steps.values())) < 100


def test_so_many_steps_and_the_rest() -> None:
    log = Log([5])
    steps = log(0)
    run_steps(steps, 2)
    assert log.steps[0] == [0, 1] and torch.is_grad_enabled()
    run_steps(steps)
    assert log.steps[0] == [0, 1, 2, 3, 4]
    assert wrap_around([3, 3, 3], 2) == [[Piece(0, 0, None), Piece(1, 1, None)], [Piece(1, 0, 1), Piece(2, 0, None)]]
