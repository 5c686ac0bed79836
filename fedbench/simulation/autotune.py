"""Choose the executor plan of a run: find the plans that the model supports, and time them.

A model without batched operators is first tried on two clients with two samples each.  Timing has a budget of seconds.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core import rng
from fedbench.core.error_text import is_raised_outside_layers, running_layer
from fedbench.core.options import ConfigError, RunError
from fedbench.core.split import Ragged
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.ranks import Ranks
from fedbench.engine.training import LocalTraining
from fedbench.nn.client_random import ClientRandom

log = logging.getLogger(__name__)
SECONDS = 10.0  # the largest budget for timing
SHARE = 0.1  # the budget as a fraction of the expected time of all local steps ...
LEAST = 1.0  # ... but at least this many seconds
MAX_ERROR_LENGTH = 160  # largest number of characters of a quoted error
AGREE = 0.05  # largest relative difference between batched and single gradients that counts as rounding error
TIMED_ON_GPU = 30  # local steps to time on a GPU

now: Callable[[], float] = time.perf_counter


def use(engine: Engine, plan: Plan, ranks: Ranks | None = None) -> Engine:
    """Return a copy of an engine that trains clients by another executor plan.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        plan: The executor plan: how many clients are computed at once, by how many threads.
        ranks: The processes that share the run.  None: only this one.
    """
    return replace(engine, executor=Executor(plan, engine.device, ranks))


# -- supported plans -------------------------------------------------------------------------------------------
class Fault(NamedTuple):
    """The reason why a model cannot be trained by a plan.

    Attributes:
        layer: The layer that failed, as in "the model's layer body (LSTM)".
        reason: The error message.
    """

    layer: str
    reason: str


def usable_plans(engine: Engine, plans: Sequence[Plan]) -> list[Plan]:
    """Return the executor plans that support the model, and log which ones do not.

    Args:
        engine: The engine, whose model is tried on two clients.
        plans: The executor plans: how many clients are computed at once, by how many threads.

    Raises:
        ConfigError: No plan supports the model.
    """
    if not engine.model.uses_vmap:  # its operations are known to support several clients at once
        return list(plans)
    fault, gradient = try_training(engine, many=False)  # one client after the other; gradients [2, P]
    if fault is not None:
        raise ConfigError(
            f"{fault.layer} cannot be trained: {fault.reason}; correct the model, or choose another one by model=..."
        )
    one_by_one = [plan for plan in plans if plan.chunk == 1]  # chunk: the number of clients computed at once
    if len(one_by_one) == len(plans):
        return one_by_one
    fault, batched_gradient = try_training(engine, many=True)  # both clients at once
    # AGREE: the largest relative difference that counts as rounding error
    if fault is None and (gradient - batched_gradient).norm() > AGREE * gradient.norm():
        fault = Fault("the model", "its gradients then differ from those of single clients")
    if fault is None:
        return list(plans)
    if not one_by_one:
        name = plans[0].name + (f" hardware.chunk={plans[0].chunk}" if plans[0].chunk else "")
        raise ConfigError(
            f"hardware.executor={name}: {fault.layer} cannot be computed for several clients at once "
            f"({fault.reason}): use hardware.executor=auto, or hardware.chunk=1"
        )
    names = ", ".join(dict.fromkeys(plan.name for plan in plans if plan.chunk != 1))
    # fault: the layer and the reason
    log.info("executor %s is not used: %s cannot be computed for several clients at once (%s)", names, *fault)
    return one_by_one


def try_training(engine: Engine, many: bool) -> tuple[Fault | None, Tensor]:
    """Try a training step, a gradient and a forward pass on two clients.

    The model also fails if it draws from torch's global random generators, whose states have changed then.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        many: Whether to compute both clients at once.

    Returns:
        The reason of a failure (None: none), and the gradients of both clients [2, P].
    """
    small, before = _small(engine, chunk=2 if many else 1), _generators(engine.device)
    cohort = Cohort(small, np.arange(small.federation.num_clients), round=0, mode="trial")
    rows = engine.model.init_row().repeat(len(cohort), 1)
    gradient = torch.zeros_like(rows)
    try:
        with contextlib.suppress(RunError):  # a loss that is not finite is reported elsewhere
            cohort.train(rows, how=LocalTraining(steps=1, batch_size=2))
        gradient = cohort.gradient(rows)[0]  # [2, P]; [1] are the losses
        cohort.forward(rows, split="train")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind, because the model is the user's code
        if is_raised_outside_layers(error):
            raise
        layer = running_layer(error)
        return Fault(_describe(*layer) if layer else "the model", _first_line(error)), gradient
    if all(map(torch.equal, before, _generators(engine.device))):
        return None, gradient
    return Fault(
        _drawing_layer(engine.model.module, small),
        "it draws from torch's global generator, so that runs could not be repeated: use dropout, bernoulli_, "
        "uniform_, normal_, rand or randn",
    ), gradient


def _small(engine: Engine, chunk: int) -> Engine:
    """Return an engine with the two largest clients only, with at most two samples of each split.

    If this process stores the samples of some clients only, these are two of them, or one client twice.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        chunk: The number of clients that are computed at once.
    """
    federation = engine.federation
    by_size = np.argsort(-federation.num_samples, kind="stable")
    if federation.shard is not None:
        by_size = np.resize(by_size[federation.shard.owned[by_size]], 2)
    ids = np.sort(by_size[:2])
    few = federation.select_clients(ids)
    splits = {name: Ragged.from_lists([part[i][:2] for i in range(len(ids))]) for name, part in few.splits.items()}
    return replace(
        engine,
        federation=replace(few, splits=splits),
        with_new_clients=None,  # this and the next one have no effect on whether a model can be computed
        privacy=None,
        executor=Executor(Plan("trial", chunk, workers=1, intra=1), engine.device),  # intra: threads of the worker
    )


def _generators(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global random generators: that of the CPU, and that of the device if it is a GPU."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _describe(name: str, layer: nn.Module) -> str:
    """Return a layer's name and class as text, as in "the model's layer body (LSTM)".

    Args:
        name: The name of the layer in the model (`named_modules`), such as "body.0"; "" for the model itself.
        layer: The layer.
    """
    return f"the model's layer {name} ({type(layer).__name__})" if name else f"the model ({type(layer).__name__})"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to MAX_ERROR_LENGTH characters.

    The type of the error precedes it, unless it is a ConfigError or a RuntimeError.
    """
    text = next(iter(str(error).strip().splitlines()), "")
    text = text if isinstance(error, ConfigError | RuntimeError) and text else f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + " ..."


def _drawing_layer(module: nn.Module, small: Engine) -> str:
    """Describe the first layer that draws from a global random generator in a forward pass in training mode.

    Args:
        module: The model.
        small: An engine with few samples, whose training samples are the inputs.

    Returns:
        The layer, as in "the model's layer body (LSTM)", or "the model" if none is found.
    """
    module, drawing, device = copy.deepcopy(module).train(), [], small.device
    names = {id(layer): name for name, layer in module.named_modules()}
    state = _generators(device)

    def note_if_drawn(layer: nn.Module, inputs: Any, output: Any) -> None:
        """Add the layer to `drawing` if a global generator's state changed since the previous call of this hook.

        Layers inside of a layer call it first.  The tensors `inputs` and `output` are not used.
        """
        nonlocal state
        before, state = state, _generators(device)
        if not all(map(torch.equal, before, state)):
            drawing.append(_describe(names[id(layer)], layer))

    for layer in module.modules():
        layer.register_forward_hook(note_if_drawn)
    index = torch.from_numpy(small.federation.splits["train"].indices).to(device)
    # ClientRandom replaces torch's known random functions, such as dropout, which therefore do not count as drawing
    with torch.no_grad(), torch.random.fork_rng(), ClientRandom(client_key=None, vmapped=False):
        module(small.federation.gather(index)[0])
    return drawing[0] if drawing else "the model"


# -- the fastest plan ------------------------------------------------------------------------------------------
def fastest(engine: Engine, ids: np.ndarray, plans: Sequence[Plan], steps: int) -> Plan:
    """Return the plan with the shortest time for a local step.

    A plan whose warm-up takes four times the best time is not timed further.  On a CPU, plans are timed twice, because
    other processes may interfere, unless they take ten times the best time.  The number of clients and steps is reduced
    to fit the budget.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        ids: The clients to train.
        plans: The executor plans: how many clients are computed at once, by how many threads.
        steps: The number of local steps to time.

    Raises:
        ConfigError: No plan supports the model.
    """
    plans = usable_plans(engine, plans)
    if len(plans) == 1:
        return plans[0]
    trial = Trial(engine, ids, plans, steps)
    if trial.is_affordable:
        trial.run()
    trial.log_seconds()
    return trial.chosen


class Trial:
    """Time executor plans within a budget; `seconds` has the time of a local step by each plan, inf if not timed.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        ids: The clients to train.
        plans: The plans.
        steps: The number of local steps to time.

    Attributes:
        step_seconds: The time of a local step of one client.
        ids: The clients to train, as many as the budget allows.
        budget: The remaining seconds.
        seconds: The time of a local step of all these clients by plan; inf if it was not timed.
    """

    def __init__(self, engine: Engine, ids: np.ndarray, plans: Sequence[Plan], steps: int):
        self.engine, self.ids, self.plans, self.steps = engine, ids[:1], plans, steps
        self.is_cuda = engine.device.type == "cuda"
        self.seconds = dict.fromkeys(plans, float("inf"))
        self.step_seconds = self._time_one_client()
        self.budget = min(SECONDS, max(LEAST, SHARE * self.step_seconds * _local_steps(engine)))
        max_clients = int(self.budget / (2 * len(plans) * self.step_seconds))  # the warm-up takes half of the budget
        self.ids = ids if self.is_cuda else ids[: max(max_clients, 2)]
        self.is_affordable = self.is_cuda or max_clients >= 2

    def _time_one_client(self) -> float:
        """Return the seconds of a local step of one client.

        If the first step is slow, it may have included the warm-up.  Then it is repeated, and the shorter time counts.
        """
        self.engine = use(self.engine, Plan("loop", chunk=1, workers=1, intra=1))
        first = self._time_steps(1)
        # LEAST is the smallest budget in seconds; a step of a hundredth of it cannot have included a warm-up
        return first if first < LEAST / 100 else min(first, self._time_steps(1))

    def _time_steps(self, count: int) -> float:
        """Train the clients `self.ids` for ``count`` local steps each, by the executor that the engine now has.

        Returns:
            The seconds that this took, divided by ``count``: the time in which all these clients take one step.
        """
        engine, began = self.engine, now()
        with contextlib.suppress(RunError):  # a diverging loss is reported in round 1
            cohort = Cohort(engine, self.ids, round=0, mode="trial")  # a mode with random numbers of its own
            cohort.train(engine.model.init_row(), how=LocalTraining(steps=count, batch_size=_timed_batch_size(engine)))
        if self.is_cuda:
            torch.cuda.synchronize(engine.device)
        return (now() - began) / count

    def run(self) -> None:
        """Train by each executor plan, and store the time of a local step in `self.seconds`.

        Plans are timed once on a GPU and twice on a CPU.  The second time is left out for plans that took ten times the
        best time, and if the seconds left in `self.budget` do not suffice.
        """
        tries = list(self.plans) if self.is_cuda else [*self.plans, *self.plans]
        for i, plan in enumerate(tries):  # self.seconds: infinite for a plan that was not timed
            best, earlier, is_second = min(self.seconds.values()), self.seconds[plan], i >= len(self.plans)
            is_hopeless = best < earlier / 10 < float("inf")  # it took more than ten times the best time
            if is_hopeless or (is_second and self.budget < 2 * earlier):  # a warm-up and a step no longer fit
                continue
            self.engine = use(self.engine, plan)
            began = now()
            self._time(plan, best, self.budget / (len(tries) - i))
            self.engine.executor.close()
            self.budget -= now() - began

    def _time(self, plan: Plan, best: float, max_seconds: float) -> None:
        """Record the time of a local step by the executor plan that the engine now has.

        Args:
            plan: The plan: clients in a chunk, threads, and whether to use CUDA graphs.
            best: The shortest time of a plan so far, in seconds; inf if none was timed.
            max_seconds: The seconds that timing this plan may take, approximately.
        """
        seconds = self._time_warm(1)  # of one step, after a warm-up
        # TIMED_ON_GPU: number of steps to time on a GPU; one step was timed already, so it is 1 less
        count = min(TIMED_ON_GPU if self.is_cuda else self.steps, int(max_seconds / seconds) - 1)
        # Several steps, so that the overhead of a training call counts less; not for a plan that is far behind.
        if seconds < 4 * best and count > 0:
            seconds = self._time_warm(count)
        # a plan with CUDA graphs counts as not timed if recording them failed, so that gradients are computed without
        cannot_record = plan.graphs and getattr(self.engine.executor.gradients, "disabled", False)
        self.seconds[plan] = float("inf") if cannot_record else min(self.seconds[plan], seconds)

    def _time_warm(self, count: int) -> float:
        """Return the mean seconds of ``count`` local steps without warm-up.

        On CUDA, this is the shorter of two times, because the first call loads kernels and records graphs.
        """
        return min(self._time_steps(count), self._time_steps(count)) if self.is_cuda else self._time_steps(count)

    @property
    def chosen(self) -> Plan:
        """The executor plan with the shortest time in `seconds`; if none was timed, the one with the most workers.

        Workers compute chunks of clients at the same time.
        """
        timed = min(self.seconds, key=self.seconds.__getitem__)
        return timed if self.seconds[timed] < float("inf") else max(self.plans, key=lambda plan: plan.workers)

    def log_seconds(self) -> None:
        """Log the time of a local step by each executor plan, or that steps are too slow to compare plans."""
        if not self.is_affordable:
            log.info("executors are not timed, because a local step of one client takes %.2g s", self.step_seconds)
            return
        log.info(
            "executors timed: %s",
            ", ".join(f"{p.short_name}: {s * 1e3:.2f} ms a step" for p, s in self.seconds.items()),
        )


def _timed_batch_size(engine: Engine) -> int:
    """Return the batch size with which executor plans are timed, at most 32.

    It is the option local.batch_size: the number for all clients, or the largest in a list with one for each client.
    """
    return min(int(np.max(engine.batch_size)), 32)


def _local_steps(engine: Engine) -> float:
    """Return the expected number of local steps in the whole run, summed over rounds and sampled clients.

    Batches have the size with which executor plans are timed, at most 32.
    """
    sizes = engine.federation.num_samples
    steps, _ = rng.lengths(  # numbers of steps and samples of each client
        sizes,
        _timed_batch_size(engine),
        epochs=None if engine.steps else engine.epochs,
        steps=engine.steps,
        drop_last=engine.drop_last,
    )
    return float(steps.mean()) * engine.federation.cohort_size * engine.rounds
