"""Several runs in one process whose gradients are computed jointly: seeds, or the values of a sweep, as more rows of
one step.

    python -m fedbench -m seed=0,1,2 algorithm.mu=0.1,0.5 hydra/launcher=together

Each run is a coroutine with its own clients, server and files, as if it were alone.  Where its local step asks for a
gradient it waits; when all have asked, those that can be (one model on batches of one shape, the task's own loss) are
computed as the rows of one larger batched step, and each goes on with its own.  So results are those of separate runs
up to rounding, methods and hyperparameters may differ between the runs, and one that is evaluating keeps nobody
waiting for longer than that.  Models with batch statistics, losses of a method's own, and executors that cut cohorts
into single clients are computed by each run alone, as ever; data are loaded once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fedbench.core import signals, torch_settings
from fedbench.core.options import require

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.engine.gradients import DirectGradients, GradientRequest

log = logging.getLogger(__name__)
T = TypeVar("T")
KEPT = 4  # data sets, federations, ... that are held for further runs at once, of each kind
_current: JointRuns | None = None


def current() -> JointRuns | None:
    """The joint runs that this process computes, if there are any."""
    return _current


def load_once(key: tuple, make: Callable[[], T]) -> T:
    """make(), once for all joint runs that ask by an equal key."""
    return make() if _current is None else _current.load_once(key, make)


class Coroutine:
    """One of the joint runs, and what the process keeps globally that belongs to it: log handlers, and whether
    gradients are recorded.

    request: the kind of gradient that it waits for, how it would compute it alone, and what is requested.
    """

    def __init__(self, number: int, job: Callable[[], Any]):
        from greenlet import greenlet

        self.number, self.result = number, None
        self.error: BaseException | None = None
        self.request: tuple[Any, DirectGradients, GradientRequest] | None = None
        self.handlers, self.recording = logging.root.handlers[:], True
        self.thread = greenlet(lambda answer: self._work(job))

    def _work(self, job: Callable[[], Any]) -> None:
        try:
            self.result = job()
        except BaseException as error:  # raised when all have ended
            self.error = error

    def resume(self, answer: Any = None) -> None:
        """Go on with an answer until the run requests again, or ends."""
        import torch

        outside = logging.root.handlers[:]
        logging.root.handlers[:] = self.handlers
        torch.set_grad_enabled(self.recording)
        self.thread.switch(answer)
        self.handlers, self.recording = logging.root.handlers[:], torch.is_grad_enabled()
        logging.root.handlers[:] = outside
        torch.set_grad_enabled(True)

    @property
    def ended(self) -> bool:
        """Whether the run has returned or raised."""
        return self.thread.dead


class JointRuns:
    """Runs jobs in one process, up to at_once of them at a time.

    Attributes:
        joint: How many gradients were computed jointly, and for how many requests.
        stop: Whether to stop after the round.
        stop_now: Whether to stop immediately.
        is_last: Whether the next signal sets stop_now.
    """

    def __init__(self, at_once: int):
        require(at_once >= 1, f"hydra.launcher.at_once must be a whole number >= 1, got {at_once}")
        require(
            importlib.util.find_spec("greenlet") is not None,
            "hydra/launcher=together needs greenlet, which is not installed: pip install greenlet",
        )
        self.at_once = at_once
        self.stop = self.stop_now = self.is_last = False
        self.live: list[Coroutine] = []
        self.loaded: dict[tuple, Any] = {}
        self.joint = [0, 0]
        self.running: Coroutine | None = None

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the jobs return, in order.  The first exception of a job is raised when all have ended.

        Ctrl-C and its like (signals.py) ask all runs to stop after their round; a second one stops them at once.
        """
        global _current
        waiting = deque(Coroutine(i, job) for i, job in enumerate(jobs))
        runs, _current = list(waiting), self
        try:
            with torch_settings.kept(), self._signals():
                self._run_all(waiting)
                error = next((r.error for r in runs if r.error is not None), None)
                if error is not None:
                    raise error
                if self.stop:
                    raise KeyboardInterrupt
        finally:
            _current = None
        return [r.result for r in runs]

    def _run_all(self, waiting: deque[Coroutine]) -> None:
        """Let every run go on in turn, whenever all that are under way wait for a gradient."""
        try:
            while self.live or waiting:
                while waiting and len(self.live) < self.at_once and not self.stop:
                    self._resume(waiting.popleft())
                if self.stop:
                    waiting.clear()
                for run, answer in self._answers():
                    self._resume(run, answer)
        except KeyboardInterrupt:  # the second signal, outside of all runs
            self._end(KeyboardInterrupt())
            raise

    def _resume(self, run: Coroutine, answer: Any = None) -> None:
        if run not in self.live:
            self.live.append(run)
        run.request, self.running = None, run
        run.resume(answer)
        self.running = None
        if run.ended:
            self.live.remove(run)
            if isinstance(run.error, KeyboardInterrupt) and (self.stop_now or not self.stop):
                self._end(run.error)

    def _end(self, error: BaseException) -> None:
        """Stop the runs that wait, where they wait."""
        self.stop = True
        for run in self.live[:]:
            self.live.remove(run)
            run.resume(error)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signals.handled(self._ask_to_stop):
            yield

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        if self.is_last:
            self.stop_now = True
            raise KeyboardInterrupt
        self.stop, self.is_last = True, not signals.is_warning(number)
        log.warning("stopping all runs after the round they are in; once more to stop at once")

    def load_once(self, key: tuple, make: Callable[[], T]) -> T:
        """make(), once while its key is among the last KEPT of its kind, which is key[0]."""
        if key not in self.loaded:
            same_kind = [k for k in self.loaded if k[0] == key[0]]
            for oldest in same_kind[: max(0, len(same_kind) - KEPT + 1)]:
                del self.loaded[oldest]
            self.loaded[key] = make()
        return self.loaded[key]

    # -- the gradient ------------------------------------------------------------------------------------------
    def gradients(self, alone: DirectGradients, model_kind: Any) -> DirectGradients:
        """How a run computes its gradients: jointly with runs whose models are alike (of an equal kind), else alone."""
        return _joint_gradients(self, alone, model_kind)

    def compute(self, kind: Any, alone: DirectGradients, request: GradientRequest) -> tuple[Tensor, Tensor]:
        """Within a run: wait for the requests of the others; returns this run's part of what was computed jointly."""
        run = self.running
        assert run is not None
        run.request = (kind, alone, request)
        answer = run.thread.parent.switch()
        if isinstance(answer, BaseException):
            raise answer
        return answer if answer is not None else alone(request)

    def _answers(self) -> list[tuple[Coroutine, Any]]:
        """Answers to the requests of all runs, kind by kind; None where a run is to compute its gradient alone."""
        kinds: dict[Any, list[Coroutine]] = {}
        for run in self.live:
            assert run.request is not None
            kinds.setdefault(run.request[0], []).append(run)
        return [pair for runs in kinds.values() for pair in self._answer(runs)]

    def _answer(self, runs: list[Coroutine]) -> list[tuple[Coroutine, Any]]:
        """Answers to requests of one kind."""
        import torch

        if len(runs) == 1:
            return [(runs[0], None)]
        requests = [r.request[2] for r in runs if r.request]
        try:
            with torch.no_grad():
                compute = runs[0].request[1]  # type: ignore[index]
                grad, losses = compute(joined(requests))
                if compute.overwrites_results:  # at its next request, which may come before the others'
                    grad, losses = grad.clone(), losses.clone()
        except torch.OutOfMemoryError:
            return [(r, None) for r in runs]  # alone, each can cut its cohort smaller
        except Exception as error:  # a mistake that all have: a batch of one, say
            return [(r, error) for r in runs]
        self.joint[0] += 1
        self.joint[1] += len(runs)
        sizes = [len(r.rows) for r in requests]
        return list(zip(runs, zip(grad.split(sizes), losses.split(sizes))))


def joined(requests: list[GradientRequest]) -> GradientRequest:
    """One request for the rows of all, on the model of the first."""
    import numpy as np
    import torch

    def cat(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {n: cat([p[n] for p in parts]) for n in parts[0]}
        return None if parts[0] is None else torch.cat(parts)

    batches = [r.batch for r in requests]
    batch = dataclasses.replace(
        batches[0],
        counts=np.concatenate([b.counts for b in batches]),
        index=None,
        shared=False,
        **{n: cat([getattr(b, n) for b in batches]) for n in ("x", "y", "weight", "class_mask")},
    )
    rows = cat([r.rows for r in requests])
    return dataclasses.replace(
        requests[0],
        rows=rows,
        batch=batch,
        dropout_keys=cat([r.dropout_keys for r in requests]),
        new_gradient=lambda: torch.empty_like(rows),
        named=None,
    )


def _joint_gradients(runs: JointRuns, alone: DirectGradients, model_kind: Any) -> DirectGradients:
    from fedbench.engine.gradients import DirectGradients as Base  # imports torch

    class JointGradients(Base):
        """Requests wait for those of the other runs where they may."""

        def free_memory(self) -> None:
            alone.free_memory()

        def __call__(self, request: GradientRequest) -> tuple[Tensor, Tensor]:
            model = request.model
            if model.batch_statistics or model.tapped or runs.running is None:
                return alone(request)
            return runs.compute(_kind(model_kind, request), alone, request)

    return JointGradients()


def _kind(model_kind: Any, request: GradientRequest) -> tuple:
    """What requests must have in common so that they can be one."""
    batch = request.batch
    x = batch.x if isinstance(batch.x, dict) else {"": batch.x}
    return (
        model_kind,
        request.task.key,
        request.parameters,
        tuple(request.columns.slices),
        tuple((n, v.shape[1:], v.dtype) for n, v in sorted(x.items())),
        batch.class_mask is not None,
        request.dropout_keys is not None,
        request.rows.shape[1:],
    )
