"""Several runs in one process that meet at the gradient: seeds, or the values of a sweep, as more rows of one step.

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
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fedbench.core import signals
from fedbench.core.options import require

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.engine.gradients import Ask, Direct

log = logging.getLogger(__name__)
T = TypeVar("T")
KEPT = 4                # data sets, federations, ... that are shared at once, of each kind
_now: Meeting | None = None


def current() -> Meeting | None:
    """The meeting that this process's runs take part in, if there is one."""
    return _now


def share(key: tuple, make: Callable[[], T]) -> T:
    """make(), once for all runs of a meeting that ask by an equal key."""
    return make() if _now is None else _now.share(key, make)


class Run:
    """A coroutine of a meeting, and what the process keeps globally that is this run's own: log handlers, and whether
    gradients are recorded."""

    def __init__(self, number: int, job: Callable[[], Any]):
        from greenlet import greenlet

        self.number, self.result = number, None
        self.error: BaseException | None = None
        self.asked: tuple[Any, Direct, Ask] | None = None         # the kind of the ask, how it would be computed alone
        self.handlers, self.recording = logging.root.handlers[:], True
        self.thread = greenlet(lambda answer: self._work(job))

    def _work(self, job: Callable[[], Any]) -> None:
        try:
            self.result = job()
        except BaseException as error:                            # the meeting's to raise, when all have ended
            self.error = error

    def go(self, answer: Any = None) -> None:
        """Until it asks again, or ends."""
        import torch

        outside = logging.root.handlers[:]
        logging.root.handlers[:] = self.handlers
        torch.set_grad_enabled(self.recording)
        self.thread.switch(answer)
        self.handlers, self.recording = logging.root.handlers[:], torch.is_grad_enabled()
        logging.root.handlers[:] = outside
        torch.set_grad_enabled(True)

    @property
    def over(self) -> bool:
        return self.thread.dead


class Meeting:
    """Runs jobs, up to at_once of them at a time.  joint: how many gradients were computed, and for how many asks."""

    def __init__(self, at_once: int):
        require(at_once >= 1, f"hydra.launcher.at_once must be a whole number >= 1, got {at_once}")
        require(importlib.util.find_spec("greenlet") is not None, "hydra/launcher=together needs greenlet, which is "
                "not installed: pip install greenlet")
        self.at_once = at_once
        self.stop = self.now = False                      # asked to stop: after the round, immediately
        self.live: list[Run] = []
        self.shared: dict[tuple, Any] = {}
        self.joint = [0, 0]
        self.speaking: Run | None = None

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the jobs return, in order.  The first exception of a job is raised when all have ended.

        Ctrl-C and its like (signals.py) ask all runs to stop after their round; a second one stops them at once.
        """
        global _now
        waiting = deque(Run(i, job) for i, job in enumerate(jobs))
        runs, _now = list(waiting), self
        try:
            with self._signals():
                self._all(waiting)
        finally:
            _now = None
        error = next((r.error for r in runs if r.error is not None), None)
        if error is not None:
            raise error
        if self.stop:
            raise KeyboardInterrupt
        return [r.result for r in runs]

    def _all(self, waiting: deque[Run]) -> None:
        try:
            while self.live or waiting:
                while waiting and len(self.live) < self.at_once and not self.stop:
                    self._go(waiting.popleft())
                if self.stop:
                    waiting.clear()
                for run, answer in self._answers():
                    self._go(run, answer)
        except KeyboardInterrupt:                                 # the second signal, outside of all runs
            self._end(KeyboardInterrupt())
            raise

    def _go(self, run: Run, answer: Any = None) -> None:
        if run not in self.live:
            self.live.append(run)
        run.asked, self.speaking = None, run
        run.go(answer)
        self.speaking = None
        if run.over:
            self.live.remove(run)
            if isinstance(run.error, KeyboardInterrupt) and (self.now or not self.stop):
                self._end(run.error)

    def _end(self, error: BaseException) -> None:
        """Stop the runs that wait, where they wait."""
        self.stop = True
        for run in self.live[:]:
            self.live.remove(run)
            run.go(error)

    @contextmanager
    def _signals(self):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signals.answered(self._ask_to_stop):
            yield

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        if self.stop:
            self.now = True
            raise KeyboardInterrupt
        self.stop = True
        log.warning("stopping all runs after the round they are in; once more to stop at once")

    def share(self, key: tuple, make: Callable[[], T]) -> T:
        """make(), once while it is among the last KEPT of its kind, key[0]: who has it keeps it, memory is for more."""
        if key not in self.shared:
            alike = [k for k in self.shared if k[0] == key[0]]
            for old in alike[:max(0, len(alike) - KEPT + 1)]:
                del self.shared[old]
            self.shared[key] = make()
        return self.shared[key]

    # -- the gradient ------------------------------------------------------------------------------------------
    def member(self, alone: Direct, kin: Any) -> Direct:
        """What computes a run's gradients: together with those of runs whose models are alike (kin equal)."""
        return _member(self, alone, kin)

    def ask(self, kind: Any, alone: Direct, ask: Ask) -> tuple[Tensor, Tensor]:
        """Called within a run: wait for the others, then give its part of what was computed together."""
        run = self.speaking
        assert run is not None
        run.asked = (kind, alone, ask)
        answer = run.thread.parent.switch()
        if isinstance(answer, BaseException):
            raise answer
        return answer if answer is not None else alone(ask)

    def _answers(self) -> list[tuple[Run, Any]]:
        """All have asked: the answers, kind by kind; None where a run is to compute its own."""
        kinds: dict[Any, list[Run]] = {}
        for run in self.live:
            assert run.asked is not None
            kinds.setdefault(run.asked[0], []).append(run)
        return [pair for runs in kinds.values() for pair in self._answer(runs)]

    def _answer(self, runs: list[Run]) -> list[tuple[Run, Any]]:
        import torch

        if len(runs) == 1:
            return [(runs[0], None)]
        asks = [r.asked[2] for r in runs if r.asked]
        try:
            with torch.no_grad():
                alone = runs[0].asked[1]                                                  # type: ignore[index]
                grad, losses = alone(joined(asks))
                if alone.overwrites:                              # at its next ask, which may come before the others'
                    grad, losses = grad.clone(), losses.clone()
        except torch.OutOfMemoryError:
            return [(r, None) for r in runs]                      # alone, each can cut its cohort smaller
        except Exception as error:                                # it is every one's: a batch of one, say
            return [(r, error) for r in runs]
        self.joint[0] += 1
        self.joint[1] += len(runs)
        sizes = [len(a.rows) for a in asks]
        return list(zip(runs, zip(grad.split(sizes), losses.split(sizes))))


def joined(asks: list[Ask]) -> Ask:
    """One ask for the rows of all, on the model of the first."""
    import numpy as np
    import torch

    def cat(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {n: cat([p[n] for p in parts]) for n in parts[0]}
        return None if parts[0] is None else torch.cat(parts)
    batches = [a.batch for a in asks]
    whole = dataclasses.replace(
        batches[0], counts=np.concatenate([b.counts for b in batches]), index=None,
        **{n: cat([getattr(b, n) for b in batches]) for n in ("x", "y", "weight", "class_mask")})
    rows = cat([a.rows for a in asks])
    return dataclasses.replace(asks[0], rows=rows, batch=whole, keys=cat([a.keys for a in asks]),
                               space=lambda: torch.empty_like(rows), named=None)


def _member(meeting: Meeting, alone: Direct, kin: Any) -> Direct:
    from fedbench.engine.gradients import Direct as Base

    class Member(Base):
        """Waits for the others where it may."""

        def home(self, rows: Tensor) -> Tensor:
            return rows

        def forget(self) -> None:
            alone.forget()

        def __call__(self, ask: Ask) -> tuple[Tensor, Tensor]:
            if ask.model.batch_statistics or meeting.speaking is None:
                return alone(ask)
            x = ask.batch.x if isinstance(ask.batch.x, dict) else {"": ask.batch.x}
            shapes = tuple((n, v.shape[1:], v.dtype) for n, v in sorted(x.items()))
            masked, keyed = ask.batch.class_mask is not None, ask.keys is not None
            kind = (kin, ask.task.name, ask.wanted, tuple(ask.columns.slices), shapes, masked, keyed,
                    ask.rows.shape[1:])
            return meeting.ask(kind, alone, ask)
    return Member()
