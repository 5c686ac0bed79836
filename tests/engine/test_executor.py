"""Executors: results do not depend on chunks, threads or memory, and `auto` selects the fastest plan."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from modules import MODELS, make, work
from tiny import CPU, PLANS, all_clients, close, equal

from fedbench.core.options import RunError
from fedbench.engine import executor as executor_module
from fedbench.engine.cohort import Cohort
from fedbench.engine.executor import Cancelled, Executor, Plan, candidate_plans, cores
from fedbench.nn.forward import ForwardPass
from fedbench.simulation import autotune, build


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 100])
@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_depend_on_chunks_and_threads(chunk: int, workers: int) -> None:
    close(work(make(plan=Plan("any", chunk, workers, 1))), work(make()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_all_plans_agree_for_each_kind_of_model(model: str, plan: str) -> None:
    close(work(make(model, plan)), work(make(model)), 5e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_has_the_same_bits_in_each_run(plan: str) -> None:
    equal(work(make(plan=plan)), work(make(plan=plan)))


# -- out of memory ---------------------------------------------------------------------------------------
def limited(monkeypatch: pytest.MonkeyPatch, most: int, kind: type[Exception] = torch.OutOfMemoryError) -> list[int]:
    """Let each forward pass of more than `most` clients raise an out-of-memory error."""
    real, failed, calls = ForwardPass.apply, [], [0]

    def apply(self, params, inputs, many, call, until=None):
        k = len(next(iter(params.values()))) if many else 1
        calls[0] += 1
        if k > most and calls[0] % 2 == 0:  # not at the first step: work is half done by then
            failed.append(k)
            raise kind("CUDA out of memory")
        return real(self, params, inputs, many, call, until)

    monkeypatch.setattr(ForwardPass, "apply", apply)
    return failed


@pytest.mark.parametrize("plan", ["vmap", "threaded pairs"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_divides_the_chunk(
    plan: str, kind: type[Exception], caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = work(make())
    failed = limited(monkeypatch, 1, kind)
    e = make(plan=plan)
    close(work(e), expected)
    assert failed and e.executor.chunk == 1
    assert "the run goes on with 1 at a time" in caplog.text
    assert Plan.from_state(e.executor.state()).chunk == 1  # a resumed run starts there


@pytest.mark.parametrize("what", ["gradient", "loss", "forward"])
def test_out_of_memory_in_the_middle_of_a_split(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of 8 samples, before the error, does not count twice."""

    def compute() -> torch.Tensor:
        e = make()
        rows = e.model.init_row() + 0.1 * torch.arange(6.0)[:, None]
        found = getattr(all_clients(e), what)(rows, **({"split": "train"} if what == "forward" else {}))
        return torch.cat(found) if what == "forward" else found[0] if what == "gradient" else found

    expected, failed = compute(), limited(monkeypatch, 3)
    close(compute(), expected)
    assert failed


def test_later_rounds_use_the_smaller_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = limited(monkeypatch, 3)
    e = make()
    all_clients(e).train(e.model.init_row())
    assert failed[0] > 3 and e.executor.chunk == 3
    once = len(failed)
    all_clients(e, 1).train(e.model.init_row())
    assert len(failed) == once


def test_a_single_client_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0)
    e = make()
    with pytest.raises(RunError, match=r"one client is computed at a time: lower local.batch_size"):
        work(e)


def test_other_errors_are_raised() -> None:
    for plan in PLANS:
        with pytest.raises(ZeroDivisionError):
            e = make(plan=plan)
            all_clients(e).train(e.model.init_row(), step=lambda s, b: 1 / 0)


# -- plans -----------------------------------------------------------------------------------------------
def test_jobs_cover_each_client_once() -> None:
    for plan in [*PLANS.values(), Plan("x", 4, 2, 1), Plan("x", 100, 3, 1)]:
        executor, seen = Executor(plan, CPU), []
        executor.run(lambda a, b, seen=seen: seen.append((a, b)), 9)
        assert sorted(i for a, b in seen for i in range(a, b)) == list(range(9))
        assert max(b - a for a, b in seen) <= (plan.chunk or 9)
        seen.clear()
        executor.run(lambda a, b, seen=seen: seen.append((a, b)), 3, single=True)
        assert sorted(seen) == [(0, 1), (1, 2), (2, 3)]
        executor.run(lambda a, b: 1 / 0, 0)
        executor.close()


def test_threads_run_at_the_same_time() -> None:
    executor, barrier = Executor(Plan("threads", 1, 2, 1), CPU), threading.Barrier(2, timeout=10)
    executor.run(lambda a, b: barrier.wait() and None, 2)  # would time out one after the other
    executor.close()


def test_candidates() -> None:
    cpu, cuda, n = CPU, torch.device("cuda"), cores()
    assert candidate_plans("loop", None, None, cpu, 5) == [Plan("loop", 1, 1, 1)]
    assert candidate_plans("loop", None, 4, cpu, 5) == [Plan("loop", 1, 1, 4)]
    assert candidate_plans("threads", 2, 3, cpu, 5) == [Plan("threads", 2, 3, 1)]
    assert candidate_plans("vmap", 7, None, cpu, 5) == [Plan("vmap", 7, 1, 1)]
    assert [p.name for p in candidate_plans("auto", None, None, cuda, 5, graphs=False)] == ["vmap", "loop"]
    assert [(p.name, p.graphs) for p in candidate_plans("auto", None, None, cuda, 5)] == [
        ("vmap", True),
        ("vmap", False),
        ("loop", True),
        ("loop", False),
    ]
    assert candidate_plans("vmap", None, None, cuda, 5, graphs=True) == [Plan("vmap", 0, 1, 1, True)]
    assert not any(p.graphs for p in candidate_plans("threads", None, 3, cuda, 5))  # one set of places
    assert candidate_plans("vmap", None, None, cpu, 5, graphs=True) == [Plan("vmap", 0, 1, 1)]  # refused before
    many = candidate_plans("auto", None, 2, cpu, 5)
    assert [p.name for p in many] == ["vmap", "threads"] and all(p.intra == 1 for p in many)
    assert Plan("loop", 1, 1, n + 1) in candidate_plans("auto", None, n + 1, cpu, n)
    assert str(Plan("vmap", 0, 1, 1)) == "vmap: all clients a chunk, 1 at a time, 1 intra-op thread(s)"


def test_the_plan_of_a_checkpoint_of_an_earlier_release() -> None:
    """Unknown keys are ignored, and missing ones have their default."""
    stored = {"name": "vmap", "chunk": 3, "workers": 1, "intra": 1, "convolution": "unfold"}
    assert Plan.from_state(stored) == Plan("vmap", 3, 1, 1)


class Clock:
    """Time that passes in local training alone: a call takes so many seconds by a function of what calls there were,
    each (plan, clients, steps), the last one its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[list], float]):
        self.now, self.calls, real = 0.0, [], Cohort.train

        def train(cohort, *args, how, **state):
            self.calls.append((cohort.engine.executor.plan.name, len(cohort), how.steps))
            self.now += seconds(self.calls)
            return real(cohort, *args, how=how, **state)

        monkeypatch.setattr(autotune, "now", lambda: self.now)
        monkeypatch.setattr(Cohort, "train", train)

    @classmethod
    def steady(cls, monkeypatch: pytest.MonkeyPatch, step: float) -> "Clock":
        """A step of one client always takes as long; threads take half."""

        def seconds(calls: list) -> float:
            name, clients, steps = calls[-1]
            return step * clients * steps / (2 if name == "threads" else 1)

        return cls(monkeypatch, seconds)


def test_auto_selects_and_logs_the_fastest_plan(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is stored, and results do not depend on it."""
    Clock.steady(monkeypatch, 0.001)
    caplog.set_level("INFO", "fedbench")
    e = make()
    e = build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 6))
    assert e.executor.plan.name == "threads" and "executors timed: " in caplog.text and "ms a step" in caplog.text
    assert Plan.from_state(e.executor.state()) == e.executor.plan
    monkeypatch.undo()
    equal(work(e), work(make(plan=Plan("threads", 1, 2, 1))))


def test_auto_times_each_plan_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process delays the first trial of the faster plan."""

    def seconds(calls: list) -> float:
        names = [name for name, *_ in calls]
        held_up = names[-1] == "threads" and names.count("threads") == 1
        return 0.3 if held_up else 0.2 if names[-1] == "vmap" else 0.01

    clock, e = Clock(monkeypatch, seconds), make(rounds=1000)
    e = build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 6))
    assert e.executor.plan.name == "threads"
    assert [name for name, *_ in clock.calls[2:]] == ["vmap", "vmap", "threads", "vmap", "vmap", "threads", "threads"]


@pytest.mark.parametrize("step", [0.001, 0.05, 0.3, 1.0, 2.0, 30.0])
def test_timing_has_a_time_limit(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is ten seconds and two steps of one client.  The faster plan is still found."""
    clock, e = Clock.steady(monkeypatch, step), make(rounds=100_000)
    e = build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 6))
    assert e.executor.plan.name == "threads"
    assert clock.now <= autotune.SECONDS + 2 * step
    assert all(clients * step <= autotune.SECONDS / 4 for name, clients, _ in clock.calls if name != "loop")
    assert ("vmap" in {name for name, *_ in clock.calls}) == (step < 2)  # else there is nothing to time
    if step == 0.001:  # all of it, as often as wanted
        assert clock.calls == [
            ("loop", 1, 1),
            *[(n, 6, s) for _ in range(2) for n in ("vmap", "threads") for s in (1, 3)],
        ]


def test_timing_of_a_short_run_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of the time of the 4 x 17 steps of the run."""
    clock, e = Clock.steady(monkeypatch, 0.3), make(rounds=4)
    e = build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 6))
    assert e.executor.plan.name == "threads" and clock.now <= 0.1 * 4 * 17 * 0.3 + 2 * 0.3


def test_skipped_timing_is_logged(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO", "fedbench")
    Clock.steady(monkeypatch, 30.0)
    e = make()
    e = build.choose_executor(e, candidate_plans("auto", None, 2, CPU, 6))
    assert (
        e.executor.plan.name == "threads"
        and "executors are not timed, because a local step of one client takes 30 s" in caplog.text
    )


def test_an_executor_sets_the_threads_before_it_runs_anything():
    """The server computes first in a resumed run, and its sums depend on the number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Executor(Plan("vmap", 0, 1, 1), torch.device("cpu"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# -- threads ---------------------------------------------------------------------------------------------
def in_steps(executor: Executor, steps: list[int], begun: threading.Event) -> None:
    """Run steps for ten minutes, unless the executor stops the job."""
    for t in range(60_000):
        executor.raise_if_stopped()
        steps.append(t)
        begun.set()
        time.sleep(0.01)


def test_threads_begin_with_the_first_chunk() -> None:
    executor, order = Executor(Plan("threads", 2, 2, 1), CPU), []
    executor.run(lambda a, b: order.append(a), 9)
    assert sorted(order) == [0, 2, 4, 6, 8] and order[0] in (0, 2)
    executor.close()


def test_a_failure_stops_the_other_threads_after_their_step() -> None:
    executor, begun, steps = Executor(Plan("threads", 1, 2, 1), CPU), threading.Event(), []

    def job(a: int, b: int) -> None:
        if a == 0:
            in_steps(executor, steps, begun)
        elif a == 1:
            assert begun.wait(60)
            raise ZeroDivisionError
        else:
            raise AssertionError("no chunk begins after a failure")

    with pytest.raises(ZeroDivisionError):
        executor.run(job, 4)
    assert 0 < len(steps) < 60_000
    for count in (1, 4):  # the next cohort is not stopped
        executor.run(lambda a, b: executor.raise_if_stopped(), count)
    executor.close()


def test_the_earliest_failure_is_raised() -> None:
    executor = Executor(Plan("threads", 1, 2, 1), CPU)

    def job(a: int, b: int) -> None:
        if a == 1:
            raise ZeroDivisionError
        try:
            while True:
                executor.raise_if_stopped()
        except Cancelled:
            raise ValueError from None

    with pytest.raises(ZeroDivisionError):
        executor.run(job, 2)
    executor.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_an_interrupt_stops_all_threads(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, begun, steps = Executor(Plan("threads", 1, 2, 1), CPU), threading.Event(), []
    real = executor_module.wait

    def interrupted(futures: list) -> None:
        monkeypatch.setattr(executor_module, "wait", real)
        assert begun.wait(60)
        raise error

    monkeypatch.setattr(executor_module, "wait", interrupted)
    with pytest.raises(type(error)):
        executor.run(lambda a, b: in_steps(executor, steps, begun), 3)
    assert 0 < (count := len(steps)) < 60_000
    time.sleep(0.1)
    assert len(steps) == count
    executor.close()


@pytest.mark.parametrize("plan", ["loop", "threads"])
def test_jobs_record_no_gradients(plan: str) -> None:
    executor = Executor(PLANS[plan], CPU)
    recorded: list[bool] = []
    executor.run(lambda a, b: recorded.append(torch.is_grad_enabled()), 3)
    assert recorded == [False] * 3 and torch.is_grad_enabled()
    executor.close()
