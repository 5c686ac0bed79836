"""Checks that executors, padding and the place of client states change no results; case.states[r]: after r rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import numpy as np
from omegaconf import DictConfig
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.nn.columns import Columns
from fedbench.simulation import evaluate
from fedbench.testing import _probes as probes
from fedbench.testing._cases import ALL_IDS, COHORTS, Case, assert_same, difference, run_rounds, state_of
from fedbench.testing._suite import Suite

SUITE: Suite[Case] = Suite("algorithm")


@SUITE.check
def no_closure_over_the_cohort(case: Case) -> None:
    """A local step uses per-client tensors [K, ...] only if they were passed to cohort.train."""
    error = None
    read_by_4: set[str] = set()  # names of tensors with 4 rows that steps read in rounds of 4 clients
    read_by_3: set[str] = set()  # the same for 3
    try:
        state = _run_and_collect(case, 4, read_by_4)
        # No such tensor, or none that has an effect: the state equals case.states[2], the state after two rounds in
        # which all clients are computed at once.
        if not read_by_4 or difference(state, case.states[2], tolerance=1e-4) is None:
            return
        # A tensor with 4 rows may be another one, such as a weight.  One that has 3 rows in rounds of 3 clients has a
        # row for each client.
        _run_and_collect(case, 3, read_by_3)
    except Exception as raised:  # probably shapes that do not match
        error = raised
    names = sorted(read_by_4 & read_by_3 if error is None else read_by_4)
    if names:
        name = names[0].rpartition(".")[2]
        raise AssertionError(
            f"a function passed to cohort.train reads {' and '.join(names)}, with one row per client of the cohort; a "
            f"step has other clients in another order: pass it as cohort.train({name}={names[0]}) and read "
            f"s.state.{name}"
        )
    if error is not None:
        raise error


def _run_and_collect(case: Case, size: int, names: set[str]) -> dict[str, Tensor]:
    """Run two rounds in which the clients of each cohort (the sampled clients) are computed one at a time.

    Args:
        case: The method to check, with a small model and federation.
        size: The number of clients of a cohort.
        names: A set, to which the names of tensors with `size` rows are added that steps read without receiving them.

    Returns:
        All tensors of the run at the end, by path, such as "/rows/c_i".
    """

    def collect_and_train(train: Any, cohort: Cohort, start: Tensor, arguments: dict[str, Any]) -> SimpleNamespace:
        for key in ("step", "extra_grad", "loss"):  # the functions that a method can pass to cohort.train
            names.update(probes.cohort_tensors(arguments.get(key), len(cohort)))
        return train(start, **arguments)

    with probes.trained_by(collect_and_train):  # in place of cohort.train
        cohorts = [cohort[:size] for cohort in COHORTS]  # COHORTS: the clients of each round
        return state_of(run_rounds(case.simulation("loop"), stop=2, cohorts=cohorts))


@SUITE.check
def executor_loop(case: Case) -> None:
    """Computing one client at a time gives the same rows as all clients at once.

    Remedy: pass tensors of clients as cohort.train(name=tensor), and read them as s.state.name.
    """
    _compare_with_vmap(case, "loop", "one client at a time")


@SUITE.check
def executor_threads(case: Case) -> None:
    """Computing clients in two threads gives the same rows as all clients at once.

    Remedy: pass tensors of clients as cohort.train(name=tensor), and read them as s.state.name.
    """
    _compare_with_vmap(case, "threads", "clients in two threads")


@SUITE.check
def executor_pairs(case: Case) -> None:
    """Computing two clients at a time gives the same rows as all clients at once.

    Remedy: pass tensors of clients as cohort.train(name=tensor), and read them as s.state.name.
    """
    _compare_with_vmap(case, "pairs", "two clients at a time")


def _compare_with_vmap(case: Case, plan: str, description: str) -> None:
    """Assert that three rounds give the same tensors as when all clients are computed at once (the plan "vmap").

    Args:
        case: The method to check, with a small model and federation.
        plan: How clients are computed, a name in `PLANS`, such as "loop" (one by one).
        description: The plan in words, for the message.
    """
    state = state_of(run_rounds(case.simulation(plan), 3))
    # {{}} becomes {}, where assert_same puts the difference
    assert_same(state, case.states[3], tolerance=1e-4, message=f"{{}} between {description} and all clients at once")


@SUITE.check
def executor_batch_statistics(case: Case) -> None:
    """On a model with BatchNorm, computing one client at a time gives the same rows as all clients at once.

    Remedy: pass tensors of clients as cohort.train(name=tensor), and read them as s.state.name.
    """
    # the same method on another model
    case = case.on(["model=resnet", "model.widths=[4]", "model.norm=batch", *case.optimizer])
    try:
        # with batches of 5, a client would have a last batch of one sample, which BatchNorm refuses
        vmap, loop = (run_rounds(case.simulation(plan, change=_with_batches_of_8), 2) for plan in ("vmap", "loop"))
    except ConfigError as refused:
        raise SkipTest(f"the method refuses a model with BatchNorm: {refused}") from None
    message = "{} between one client at a time and all clients at once, on a model with BatchNorm"
    assert_same(state_of(vmap), state_of(loop), tolerance=1e-3, message=message)
    losses = [
        evaluate.personal(sim.algorithm, sim.engine, ALL_IDS, round=1, final=False)["loss"] for sim in (vmap, loop)
    ]
    assert np.allclose(*losses, rtol=1e-3), "`predict` with BatchNorm mixes clients that are computed at once"


def _with_batches_of_8(cfg: DictConfig) -> None:
    """Set local.batch_size of a configuration to 8, in place."""
    cfg.local.batch_size = 8


@SUITE.check
def padding_is_ignored(case: Case) -> None:
    """The padding of batches does not influence training.

    Remedy: return the loss per sample, [k, B], or multiply by batch.weight, which is 0 for padding, before you sum over
    a batch.
    """
    with probes.other_padding():
        state = state_of(run_rounds(case.simulation(), 2), deploy=False)  # without what clients deploy
    expected = {name: case.states[2][name] for name in state if name in case.states[2]}  # after two usual rounds
    assert_same(state, expected, tolerance=1e-5, message="{} when the padding of batches contains other samples")


@SUITE.check
def only_trained_columns_move(case: Case) -> None:
    """Training of a column group does not change other columns.

    Remedy: update rows by s.descend(gradient), or change s.theta in s.columns only.
    """
    # A column group is a part of the model, as positions (columns) in the vector of a client's parameters.
    # cohort.train is replaced by a function that trains and then asserts that other columns are the same.
    with probes.trained_by(_train_and_compare_columns):
        run_rounds(case.simulation(), 2)


def _train_and_compare_columns(train: Any, cohort: Cohort, start: Tensor, arguments: dict[str, Any]) -> SimpleNamespace:
    """Train as cohort.train does, and assert that only the trained columns and the buffers have changed.

    Columns are positions in a client's row, the vector of all its parameters and buffers.

    Args:
        train: The original cohort.train.
        cohort: The cohort.
        start: The initial rows of the clients [K, P].
        arguments: The other arguments of cohort.train, whose "columns" are the trained ones; without, all are trained.

    Returns:
        What cohort.train returns.
    """
    model, before = cohort.model, start.clone()
    out = train(start, **arguments)
    trained = model.trained if arguments.get("columns") is None else arguments["columns"] & model.trained
    buffers = Columns(model.spans[name] for name in model.buffer_names)
    others = (trained | buffers).rest(model.size)
    changed = ((out.theta != before) & ~out.theta.isnan()).any(0)  # [P]; rows of NaN are diverged
    names = [  # of the tensors with a changed column; spans: from name to (start, stop)
        name
        for name, span in model.spans.items()
        if any(bool(changed[start:stop].any()) for start, stop in (others & Columns([span])).slices)
    ]
    assert not names, f"cohort.train trains {trained.size} of {model.size} columns, but {', '.join(names)} changed"
    return out


@SUITE.check
def state_on_disk(case: Case) -> None:
    """Client states that are stored in files give the same results as in memory.

    Remedy: write rows by rows[ids] = values.
    """
    state = state_of(run_rounds(case.simulation(limits=0), stop=2))  # limits: bytes of client states in memory
    assert_same(state, case.states[2], message="{} if client states are stored in files")


@SUITE.check
def no_step_waits_for_the_device(case: Case) -> None:
    """Local steps read no values back from a GPU, because each such read waits for all earlier computations.

    Remedy: keep values on the device: torch.where instead of if, and no .item().
    """
    reason = case.simulation().algorithm.syncs_with_device
    if reason is not None:
        raise SkipTest(f"the method declares `syncs_with_device`: {reason}")
    try:
        with probes.steps_without_synchronization() as chunks:
            run_rounds(case.simulation(), 2)
    except probes.Synchronizes as error:
        raise AssertionError(f"in a local step {error}") from None
    if not chunks:
        raise SkipTest("the method trains nothing")
