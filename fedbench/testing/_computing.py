"""The part of a method's contract that is about computing: rows do not depend on executor, chunk, padding or memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.nn.columns import Columns
from fedbench.simulation import evaluate
from fedbench.testing import _probes as probes
from fedbench.testing._cases import COHORTS, EVERYBODY, Case, difference, everything, rounds
from fedbench.testing._suite import Broken, Skipped, Suite

SUITE: Suite[Case] = Suite("algorithm")
PLANS = {
    "loop": "one client after the other",
    "threads": "clients in two threads",
    "pairs": "two clients at a time",
}


def require_same(a: dict[str, Tensor], b: dict[str, Tensor], sentence: str, tolerance: float = 0.0) -> None:
    """Broken, with where two states differ put into the sentence, unless they are equal."""
    where = difference(a, b, tolerance)
    if where is not None:
        raise Broken(sentence.format(where))


@SUITE.check
def no_closure_over_the_cohort(case: Case) -> None:
    """No step reads a tensor [K, ...] that did not come through cohort.train."""
    held: dict[int, set[str]] = {4: set(), 3: set()}  # by the size of the cohort
    raised = None
    try:
        state = _watched(case, 4, held[4])
        if not held[4] or difference(state, case.played[2], 1e-4) is None:
            return
        _watched(case, 3, held[3])  # what grows and shrinks with the cohort
    except Exception as error:  # most likely of shapes that do not fit
        raised = error
    suspects = held[4] & held[3] if raised is None else held[4]
    if suspects:
        first, what = min(suspects), " and ".join(sorted(suspects))
        name = first.rpartition(".")[2]
        raise Broken(
            f"a function that is handed to cohort.train reads {what}, with a row for each client of the cohort; inside "
            f"a step the clients are others, and in another order: pass it as cohort.train({name}={first}) and read "
            f"s.{name}"
        )
    if raised is not None:
        raise raised


def _watched(case: Case, size: int, names: set[str]) -> dict[str, Tensor]:
    """Everything after two rounds of cohorts of this size, one client after the other; names: collects those under
    which functions that are handed to cohort.train hold as many rows."""

    def train(real: Any, cohort: Cohort, start: Tensor, given: dict[str, Any]) -> SimpleNamespace:
        for key in ("step", "extra_grad", "loss"):
            names.update(probes.held_by(given.get(key), len(cohort)))
        return real(start, **given)

    with probes.trained_by(train):
        return everything(rounds(case.simulation("loop"), 2, [cohort[:size] for cohort in COHORTS]))


def _executor_check(plan: str) -> Callable[[Case], None]:
    def compare(case: Case) -> None:
        state = everything(rounds(case.simulation(plan), 3))
        require_same(
            state,
            case.played[3],
            f"{{}} between {PLANS[plan]} and all clients at once: what a step reads of a client must come to it "
            "through cohort.train(name=tensor), as s.state.name",
            1e-4,
        )

    return compare


for _plan, _words in PLANS.items():
    SUITE.add(f"executor_{_plan}", f"Rows are the same, {_words}", _executor_check(_plan))


@SUITE.check
def executor_batch_statistics(case: Case) -> None:
    """The same on a model with BatchNorm, whose buffers travel in the row."""
    norm = case.on(["model=resnet", "model.widths=[4]", "model.norm=batch", *case.optimizer])
    values: dict[str, Any] = {"local.batch_size": 8}
    try:
        vmap, loop = (rounds(norm.simulation(plan, **values), 2) for plan in ("vmap", "loop"))
    except ConfigError as refused:
        raise Skipped(f"a model with batch norm is refused: {refused}") from None
    sentence = (
        "{} between one client after the other and all at once, on a model with BatchNorm: what a step reads of a "
        "client must come to it through cohort.train(name=tensor), and running statistics travel in the row"
    )
    require_same(everything(vmap), everything(loop), sentence, 1e-3)
    losses = [evaluate.personal(s.algorithm, s.engine, EVERYBODY, 1, False)["loss"] for s in (vmap, loop)]
    if not np.allclose(*losses, rtol=1e-3):
        raise Broken("deployed models with BatchNorm predict otherwise, computed alone and together: see `predict`")


@SUITE.check
def padding_is_ignored(case: Case) -> None:
    """What stands in a batch beyond a client's samples has no influence."""
    with probes.other_padding():
        state = everything(rounds(case.simulation(), 2), deploy=False)
    reference = {name: value for name, value in case.played[2].items() if name in state}
    require_same(
        state,
        reference,
        "{} when other samples stand in the padding: a loss is per sample, [k, B], and weighted by the engine, or is "
        "weighted by batch.weight (0 for padding) itself; nothing else may be summed or averaged over a batch",
        1e-5,
    )


@SUITE.check
def only_trained_columns_move(case: Case) -> None:
    """Training of some columns leaves the others as they were."""
    with probes.trained_by(_refuse_outside):
        rounds(case.simulation(), 2)


def _refuse_outside(real: Any, cohort: Cohort, start: Tensor, given: dict[str, Any]) -> SimpleNamespace:
    """Train, and raise Broken where a column moved that was not to be trained (buffers move by themselves)."""
    model, begin = cohort.model, start.clone()
    out = real(start, **given)
    trained = model.trained if given.get("columns") is None else given["columns"] & model.trained
    buffers = Columns(model.spans[name] for name in model.buffer_names)
    moved = ((out.theta != begin) & ~out.theta.isnan()).any(0)  # [P]
    outside = (trained | buffers).rest(model.size)
    names = [n for n, span in model.spans.items() if _any(moved, outside & Columns([span]))]
    if names:
        raise Broken(
            f"cohort.train was given {trained.size} of {model.size} columns to train, and {', '.join(names)}, outside "
            "of them, moved: a step moves rows by s.descend(gradient), or adds to s.theta in s.columns alone"
        )
    return out


def _any(moved: Tensor, columns: Columns) -> bool:
    return any(bool(moved[a:b].any()) for a, b in columns.slices)


@SUITE.check
def state_on_disk(case: Case) -> None:
    """State that does not fit in memory, and lies in files, is the same."""
    state = everything(rounds(case.simulation(limits=0), 2))
    require_same(state, case.played[2], "{} where rows lie in files: write them by rows[ids] = values, never in place")


@SUITE.check
def no_step_waits_for_the_device(case: Case) -> None:
    """No local step asks the device for a number, which empties a GPU's queue."""
    waits = case.simulation().algorithm.syncs_with_device
    if waits is not None:
        raise Skipped(f"the method says that it waits: {waits}")
    seen: list[Any] = []
    try:
        with probes.no_step_waits(seen):
            rounds(case.simulation(), 2)
    except probes.Waits as waiting:
        advice = "keep numbers on the device (torch.where, not if; no .item())"
        raise Broken(f"in a local step {waiting}: {advice}") from None
    if not seen:
        raise Skipped("the method trains nothing")
