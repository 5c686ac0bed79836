"""Which plan computes a run: what each can do, and which is the fastest.

What a module can be put through is tried on two clients with two samples each, before anything is timed; only mapped
modules are, since every plan can do what is computed natively.  Timing has a budget of seconds.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.options import ConfigError, RunError
from fedbench.engine.cohort import Cohort, Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.ranks import Ranks
from fedbench.nn.keyed import Keyed
from fedbench.partition.base import Ragged

log = logging.getLogger(__name__)
SECONDS = 10.0          # that timing may take, ...
SHARE = 0.1             # ... of the time that all local steps are expected to take,
LEAST = 1.0             # but this much always
LONGEST = 160           # characters of an error that are quoted
AGREE = 0.05            # relative distance of several clients' gradients from each one's own that rounding may cause

now: Callable[[], float] = time.perf_counter


def use(engine: Engine, plan: Plan, ranks: Ranks | None = None) -> None:
    """Compute by this plan from now on."""
    engine.executor = Executor(plan, engine.device, ranks)
    engine.model.convolution = plan.convolution                                               # type: ignore


# -- what can be done ------------------------------------------------------------------------------------------
class Fault(NamedTuple):
    """Why a module cannot be trained by a plan: in which layer, and what was said there."""

    layer: str
    reason: str


def able(engine: Engine, plans: Sequence[Plan]) -> list[Plan]:
    """The plans that the model can be trained by; says once which ones are left out, raises ConfigError if all are."""
    if not engine.model.mapped:
        return list(plans)
    alone, gradient = tried(engine, many=False)
    if alone is not None:
        raise ConfigError(f"{alone.layer} cannot be trained: {alone.reason}")
    kept = [plan for plan in plans if plan.chunk == 1]
    if len(kept) == len(plans):
        return kept
    several, other = tried(engine, many=True)
    if several is None and (gradient - other).norm() > AGREE * gradient.norm():
        several = Fault("the model", "its gradients are others then")
    if several is None:
        return list(plans)
    if not kept:
        name = plans[0].name + (f" hardware.chunk={plans[0].chunk}" if plans[0].chunk else "")
        raise ConfigError(f"hardware.executor={name}: {several.layer} cannot be computed for several clients at once "
                          f"({several.reason}): use hardware.executor=auto, or chunks of one client")
    out = ", ".join(dict.fromkeys(plan.name for plan in plans if plan.chunk != 1))
    log.info("executor %s is left out: %s cannot be computed for several clients at once (%s)", out, *several)
    return kept


def tried(engine: Engine, many: bool) -> tuple[Fault | None, Tensor]:
    """What keeps the model from what methods ask of it, for several clients at once or one by one (None: nothing); and
    the clients' gradients.  # [2, P]"""
    small, before = _small(engine), _generators(engine.device)
    small.executor = Executor(Plan("trial", 2 if many else 1, 1, 1), engine.device)
    cohort = Cohort(small, np.arange(small.federation.num_clients), 0, "trial")
    rows = engine.model.init_row().repeat(len(cohort), 1)
    gradient = torch.zeros_like(rows)
    try:
        with contextlib.suppress(RunError):                        # a loss that is not finite is another check's
            cohort.train(rows, steps=1, batch_size=2)
        gradient = cohort.gradient(rows)[0]
        cohort.forward(rows, split="train")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:                                     # a module's own code raises what it likes
        return Fault(_layer(error), _first_line(error)), gradient
    if all(map(torch.equal, before, _generators(engine.device))):
        return None, gradient
    return Fault(_drawing(engine.model.module, small), "it draws from torch's global generator, so that no run could "
                 "be repeated: draw by dropout, bernoulli_, uniform_, normal_, rand or randn"), gradient


def _small(engine: Engine) -> Engine:
    """The engine of two clients, those with most samples, and two samples each."""
    federation = engine.federation
    ids = np.sort(np.argsort(-federation.num_samples, kind="stable")[:2])
    few = federation.among(ids)
    splits = {name: Ragged.from_lists([part[i][:2] for i in range(len(ids))]) for name, part in few.splits.items()}
    return replace(engine, federation=replace(few, splits=splits), privacy=None, everyone=None, memories={})


def _generators(device: torch.device) -> list[Tensor]:
    """States of the global generators that a module may draw from."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _layer(error: BaseException) -> str:
    """The innermost module whose code was running, in words."""
    running = [frame.f_locals["self"] for frame, _ in traceback.walk_tb(error.__traceback__)
               if isinstance(frame.f_locals.get("self"), nn.Module)]
    return _named(running[0], running[-1]) if running else "the model"


def _named(whole: nn.Module, part: nn.Module) -> str:
    name = next((n for n, m in whole.named_modules() if m is part), "")
    return f"the model's layer {name} ({type(part).__name__})" if name else f"the model ({type(part).__name__})"


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    text = text if isinstance(error, ConfigError | RuntimeError) and text else f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


def _drawing(module: nn.Module, small: Engine) -> str:
    """The first module to finish that has moved a global generator, in words."""
    module, found, device = copy.deepcopy(module).train(), [], small.device
    state = _generators(device)

    def compare(m: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal state
        before, state = state, _generators(device)
        if not all(map(torch.equal, before, state)):
            found.append(_named(module, m))
    for m in module.modules():
        m.register_forward_hook(compare)
    index = torch.from_numpy(small.federation.splits["train"].indices).to(device)
    with torch.no_grad(), torch.random.fork_rng(), Keyed(None, False):
        module(small.federation.gather(index)[0])
    return found[0] if found else "the model"


# -- what is fastest -------------------------------------------------------------------------------------------
def fastest(engine: Engine, ids: np.ndarray, plans: Sequence[Plan], steps: int) -> Plan:
    """The plan of the least time for a local step of these clients.

    A plan whose warm-up takes four times the best time so far is not timed further: batched convolutions on a CPU can
    be that slow.  A CPU times all twice, but what took ten times as long as the best: another process may have been in
    the way.  What does not fit into the budget is not timed, or with fewer clients and steps.
    """
    plans = able(engine, plans)
    if len(plans) == 1:
        return plans[0]
    trial = Trial(engine, ids, plans, steps)
    if trial.fits:
        trial.run()
    trial.say()
    return trial.chosen


class Trial:
    """Plans that are timed within a budget.  one: seconds of one client's step; ids: as many clients as fit; left:
    seconds of the budget; seconds: what a step of them all took by each plan, inf where that is not known."""

    def __init__(self, engine: Engine, ids: np.ndarray, plans: Sequence[Plan], steps: int):
        self.engine, self.ids, self.plans, self.steps = engine, ids[:1], plans, steps
        self.slow = engine.device.type == "cuda"              # the first call: kernels are loaded, graphs recorded
        self.seconds = dict.fromkeys(plans, float("inf"))
        self.one = self._one()
        self.left = min(SECONDS, max(LEAST, SHARE * self.one * _local_steps(engine)))
        most = int(self.left / (2 * len(plans) * self.one))   # a warm-up of each plan takes half of the budget
        self.ids = ids if self.slow else ids[:max(most, 2)]
        self.fits = self.slow or most >= 2

    def _one(self) -> float:
        """Of two tries the second only where the first took long: it touches memory, and sets kernels up."""
        use(self.engine, Plan("loop", 1, 1, 1))
        first = self._passes(1)
        return first if first < LEAST / 100 else min(first, self._passes(1))

    def _passes(self, count: int) -> float:
        """Seconds of a step, of so many."""
        e, began = self.engine, now()
        with contextlib.suppress(RunError):                   # a loss that diverges is round 1's to report
            Cohort(e, self.ids, 0, "trial").train(e.model.init_row(), steps=count, batch_size=min(e.batch_size, 32))
        if self.slow:
            torch.cuda.synchronize(e.device)
        return (now() - began) / count

    def run(self) -> None:
        """Time the plans until the budget is spent."""
        turns = list(self.plans) if self.slow else [*self.plans, *self.plans]
        for i, plan in enumerate(turns):
            best, took, again = min(self.seconds.values()), self.seconds[plan], i >= len(self.plans)
            if best < took / 10 < float("inf") or (again and self.left < 2 * took):        # not worth its time
                continue
            use(self.engine, plan)
            began = now()
            self._time(plan, best, self.left / (len(turns) - i))
            self.engine.executor.close()
            self.left -= now() - began

    def _time(self, plan: Plan, best: float, most: float) -> None:
        """Within about so many seconds."""
        found = min(self._passes(1), self._passes(1)) if self.slow else self._passes(1)
        count = min(30 if self.slow else self.steps, int(most / found) - 1)
        if found < 4 * best and count > 0:                    # what a training costs by itself must not decide
            found = min(self._passes(count), self._passes(count)) if self.slow else self._passes(count)
        off = plan.graphs and getattr(self.engine.executor.gradients, "off", False)
        self.seconds[plan] = float("inf") if off else min(self.seconds[plan], found)

    @property
    def chosen(self) -> Plan:
        """The fastest; where nothing was timed, what keeps all cores busy."""
        timed = min(self.seconds, key=self.seconds.__getitem__)
        return timed if self.seconds[timed] < float("inf") else max(self.plans, key=lambda plan: plan.workers)

    def say(self) -> None:
        if not self.fits:
            log.info("executor %s (not timed: a step of one client takes %.2g s)", self.chosen, self.one)
            return
        log.info("executor %s (%s)", self.chosen, ", ".join(f"{p.short}: {s * 1e3:.2f} ms a step"
                                                          for p, s in self.seconds.items()))


def _local_steps(engine: Engine) -> float:
    """Of all clients in all rounds, in batches as they are timed."""
    sizes = engine.federation.num_samples
    steps, _ = rng.lengths(sizes, min(engine.batch_size, 32), epochs=engine.epochs, drop_last=engine.drop_last)
    return float(steps.mean()) * engine.federation.cohort_size * engine.rounds
