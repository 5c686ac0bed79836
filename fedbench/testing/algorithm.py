"""Checks of methods.  case.states[r]: all tensors after r rounds.  A client deploys the model with which it predicts.

A method runs on a small federation of 6 clients with 4 to 21 samples, 4 of them per round, on the smallest suitable
model.  If it allows momentum, the optimizer has momentum and keeps its buffers between rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedbench.channel import compression as channel
from fedbench.channel.channel import UnknownReference
from fedbench.channel.compression import Compression
from fedbench.compression.topk import TopK
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError, RunError
from fedbench.core.split import Ragged, Split
from fedbench.engine.cohort import Cohort
from fedbench.simulation import checkpoint, evaluate
from fedbench.simulation.instantiate import make
from fedbench.simulation.run_state import Simulation
from fedbench.testing import _probes as probes
from fedbench.testing._algorithm_execution import SUITE
from fedbench.testing._cases import (
    ALL_IDS,
    ARRAYS,
    COHORTS,
    ROUNDS,
    SPLIT,
    TRAIN_SIZES,
    VAL_SIZES,
    Case,
    assert_same,
    case_of,
    continue_rounds,
    difference,
    label_of,
    require_finite,
    run_rounds,
    set_up,
    state_of,
    target_of,
    tensors,
    without_learning,
)
from fedbench.testing._federation import all_clients, arrays_of, deployed, ragged
from fedbench.testing._suite import Report
from fedbench.testing._targets import Target, path_of

PERMUTATION = np.array([3, 0, 5, 1, 4, 2])  # client j of the second federation is client PERMUTATION[j] of the first


def check_algorithm(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a method.

    Args:
        target: Its class, its dotted path, or an option of conf/algorithm.
        options: Arguments of its constructor.
        model: The option of conf/model; None for the smallest one that the method accepts.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The method cannot be built, or accepts no model.
    """
    case = case_for(target, options, model)
    if case.reason is not None:
        raise ConfigError(
            f"{path_of(target)} accepts no model of conf/model; the last one is refused as follows: {case.reason}. "
            "Name a model that it accepts by --model, or by the argument model of check_algorithm"
        )
    # setting: the small model, for the heading of the report
    return SUITE.run(path_of(target), case.setting, case, only)


def case_for(target: Target, options: Mapping[str, Any] | None = None, model: str | None = None) -> Case:
    """Return the case that the checks receive: the method, with a small model and federation.

    The attribute `reason` of the case says why the method accepts no model; None if it accepts one.

    Args:
        target: Its class, its dotted path, or an option of conf/algorithm.
        options: Arguments of its constructor.
        model: The option of conf/model; None for the smallest one that the method accepts.

    Raises:
        ConfigError: The method cannot be built.
    """
    name = path_of(target)
    if name in group_options("algorithm"):
        return case_of(name, dict(options or {}), model)
    values = target_of(name, options or {})
    make(values, key="algorithm")  # an invalid option should not be reported as a lack of models
    return case_of("local", values, model)  # the configuration of Local, whose algorithm is replaced by the class


# -- seeds -----------------------------------------------------------------------------------------------
@SUITE.check
def a_seed_repeats(case: Case) -> None:
    """Equal seeds give equal results, bit for bit, and different seeds give different results.

    Remedy: use keyed random numbers, derived from the seed of the run (cohort.engine.seed).
    """
    again, other = (state_of(run_rounds(case.simulation(seed=seed), 2)) for seed in (0, 1))
    assert_same(again, case.states[2], message="{} in a second run with the same seed")
    # the parameters that clients deploy, or their personal part; 6 or fewer numbers may be equal by chance
    names = [n for n in ("/deployed", "/deployed/theta") if n in again and again[n].numel() > 6]
    are_equal = not names or any(torch.allclose(again[n], other[n]) for n in names)
    assert not are_equal, "clients deploy the same rows with another seed"


@SUITE.check
def no_global_generator(case: Case) -> None:
    """The global random generators of torch, NumPy and Python are not used.

    Remedy: use cohort.random(purpose), cohort.generator(purpose) or s.rng, which are keyed.
    """
    expected = case.states[2]  # with the current states of the global generators
    with probes.other_global_seed(12345):
        sim = set_up(case.simulation())
        states = probes.global_random_states()
        continue_rounds(sim, 2, evaluated=True)
        used = probes.generators_used_since(states)
        assert not used, f"a round uses the global generator of {' and '.join(used)}"
        assert_same(state_of(sim), expected, message="{} with another seed of torch, NumPy and Python")


# -- resuming --------------------------------------------------------------------------------------------
@SUITE.check
def resume(case: Case) -> None:
    """A run that resumes from a checkpoint equals an uninterrupted run, bit for bit.

    Remedy: keep state in tensors on self or in matrices that setup creates by rows(...).
    """
    saved, resumed = run_rounds(case.simulation(), 2), set_up(case.simulation())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), saved.state())
        try:
            resumed.load(checkpoint.load(Path(folder)))
        except ConfigError as refused:
            raise AssertionError(f"the checkpoint cannot be loaded: {refused}") from None
        assert resumed.done == 2, f"a checkpoint of 2 rounds is loaded as one of {resumed.done} rounds"
        names = _attributes_not_restored(saved, resumed)
        unrestored = f"; self.{', self.'.join(names)} changed but is not restored" if names else ""
        message = f"{{}} directly after loading a checkpoint{unrestored}"  # {}: where assert_same puts the difference
        assert_same(state_of(resumed, deploy=False), state_of(saved, deploy=False), message=message)
        state = state_of(continue_rounds(resumed, ROUNDS))
        uninterrupted = case.states[ROUNDS]  # all tensors of such a run after the last round
        assert_same(state, uninterrupted, message=f"{{}} between a resumed and an uninterrupted run{unrestored}")


def _attributes_not_restored(saved: Simulation, resumed: Simulation) -> list[str]:
    """Return the names of the method's attributes that a checkpoint does not restore.

    Args:
        saved: The run that wrote the checkpoint.
        resumed: The run that loaded it.
    """
    before, after = vars(saved.algorithm), vars(resumed.algorithm)
    types = int | float | str | list | dict | tuple | Tensor | np.ndarray
    return sorted(
        name
        for name, value in before.items()
        if isinstance(value, types)
        and (name not in after or difference(tensors(value, f"/{name}"), tensors(after[name], f"/{name}")))
    )


# -- who changes when ------------------------------------------------------------------------------------
@SUITE.check
def only_the_cohort_changes(case: Case) -> None:
    """A round changes only the states of the clients of its cohort.

    Remedy: write rows at cohort.ids only.
    """
    for r in range(1, ROUNDS):
        before, after = case.states[r : r + 2]
        others = np.setdiff1d(ALL_IDS, COHORTS[r])
        for name in (n for n in before if n.startswith("/rows/")):  # the states of clients, [N, ...] each
            changed = [str(i) for i in others if not torch.equal(after[name][i], before[name][i])]
            found = f"{label_of(name)} of client {', '.join(changed)} changed in a round without this client"
            assert not changed, found


@SUITE.check
def evaluation_changes_nothing(case: Case) -> None:
    """Repeated calls of `personalized` return equal rows, and do not change the state.

    Remedy: `personalized` must not change the state of the method, and must return rows in the order of cohort.ids.
    """
    sim = case.after_two_rounds
    before = state_of(sim, deploy=False)
    first, second = (tensors(deployed(sim.engine, sim.algorithm, round=1, final=True)) for _ in range(2))
    assert difference(tensors(second, "/deployed"), tensors(first, "/deployed")) is None, (
        "`personalized` returns other rows in its second call"
    )
    assert_same(state_of(sim, deploy=False), before, message="{} after an evaluation")
    two = np.array([1, 4])  # any two clients, which are computed without the others
    with torch.no_grad():
        rows = sim.algorithm.personalized(Cohort(sim.engine, two, round=1, mode="evaluation"), final=True)
    if isinstance(rows, Tensor) and rows.dim() == 2:
        of_all = first[""]  # the rows of all clients, a tensor without a name  [N, P]
        are_equal = torch.allclose(rows, of_all[two], rtol=1e-5, atol=1e-5)
        assert are_equal, "`personalized` returns other rows for two clients than for all"


@SUITE.check
def last_round_deploys_the_same(case: Case) -> None:
    """`personalized` returns equal models for final=True and final=False, unless fine_tunes_after_training is set.

    Remedy: set fine_tunes_after_training = True if and only if `personalized` trains after the last round.  Its last
    score is then not compared with earlier ones.
    """
    sim = case.after_two_rounds
    before, last = (
        tensors(deployed(sim.engine, sim.algorithm, round=1, final=final), "/deployed") for final in (False, True)
    )
    found, fine_tunes = difference(before, last), sim.algorithm.fine_tunes_after_training
    assert found is None or fine_tunes, f"`personalized` returns other rows after the last round ({found})"
    assert found is not None or not fine_tunes, "fine_tunes_after_training is set, but the last round changes nothing"


@SUITE.check
def global_is_the_servers_row(case: Case) -> None:
    """Global scores are the scores of the model that `global_row` returns.

    Remedy: `global_row` must return the row of the server's model, or None if there is none.
    """
    sim = case.after_two_rounds
    engine, algorithm = sim.engine, sim.algorithm
    row = algorithm.global_row()
    if row is None:
        return
    size = engine.model.size
    assert row.shape == (size,), f"`global_row` returns shape {[*row.shape]}: return a row [{size}], or None"
    scores, all_deploy_it = evaluate.personal_and_global(algorithm, engine, ALL_IDS, round=1, final=False)
    global_rows = row.expand(len(ALL_IDS), -1)
    rows = deployed(engine, algorithm, round=1, final=False)
    if all_deploy_it:
        message = "the personal scores are used as global ones, but {}"
        assert_same({"/deployed": rows}, {"/deployed": global_rows}, message=message)
    # Rows that clients deploy are evaluated by the method's own `predict`, others by the model.
    predict = algorithm.predict if all_deploy_it else None
    cohort = all_clients(engine, round=1, mode="evaluation")
    expected = evaluate.score(cohort, global_rows, predict, split="test")
    different = [
        name
        for name, values in expected.items()
        if not np.allclose(scores["global"][name], values, rtol=1e-4, atol=1e-5, equal_nan=True)
    ]
    assert not different, f"global/{', global/'.join(different)} is not the score of the row that `global_row` returns"


@SUITE.check
def nothing_moves_without_learning(case: Case) -> None:
    """With learning rates of 1e-30, clients deploy their initial rows.

    Remedy: the weights of an average must sum to 1, and steps must be proportional to s.lr.
    """
    sim = set_up(case.simulation(change=without_learning))
    before = _deployed_rows(sim, round=0)
    after = _deployed_rows(continue_rounds(sim, 2), round=1)
    largest = float((after - before).abs().max())
    are_close = torch.allclose(after, before, rtol=2e-6, atol=2e-6)  # an average of equal rows differs by rounding
    assert are_close, f"what clients deploy changes by up to {largest:.2g} with a learning rate of 1e-30"


def _deployed_rows(sim: Simulation, round: int) -> Tensor:
    """Return the row of parameters that each client deploys after a round.  # [N, P]

    Args:
        sim: The run.
        round: Index of the round, from 0.  It is treated as not the last one, after which some methods fine-tune.
    """
    rows = deployed(sim.engine, sim.algorithm, round, final=False)
    return rows["theta"] if isinstance(rows, dict) else rows


@SUITE.check
def training_moves_rows(case: Case) -> None:
    """After two rounds, clients deploy other rows than at the start, and all values are finite.

    Remedy: store what cohort.train returns.
    """
    before, after = case.states[0], case.states[2]
    require_finite(after)
    if all(torch.allclose(before[n], after[n], atol=1e-4) for n in before if n.startswith("/deployed")):
        sim = set_up(case.simulation())
        cohort = Cohort(sim.engine, np.array(COHORTS[0]), round=0)
        sim.algorithm.round(cohort)
        if cohort.cost.steps == 0:
            raise SkipTest("the method trains nothing")
        raise AssertionError("clients deploy their initial rows after training")


@SUITE.check
def renumbering_clients(case: Case) -> None:
    """Results do not depend on the order of the clients.

    Remedy: use the index of a client, or its position in the cohort, only as a key of random numbers.
    """
    reason = case.simulation().algorithm.depends_on_client_order
    if reason is not None:
        raise SkipTest(reason)
    # client i of the permuted run has the samples and random numbers of client PERMUTATION[i] of the other run
    split = Split(*(getattr(SPLIT, part).select(PERMUTATION) for part in ("train", "val", "test")))
    sim = case.simulation(split=split)
    position = np.argsort(PERMUTATION)  # the new index of each client
    with probes.permuted_random_numbers(PERMUTATION, sim.engine):
        state = state_of(run_rounds(sim, 3, [np.sort(position[cohort]) for cohort in COHORTS]))
    found, expected = {}, {}
    for name in (n for n in state if n.startswith("/deployed") or n == "/global"):
        found[name], expected[name] = state[name], case.states[3][name]
        if name != "/global" and len(expected[name]) == len(ALL_IDS):  # a row per client, not one that all share
            expected[name] = expected[name][torch.from_numpy(PERMUTATION)]
    assert_same(found, expected, tolerance=1e-4, message="{} when the clients are in another order")


# -- communication ---------------------------------------------------------------------------------------
@SUITE.check
def bytes_are_counted(case: Case) -> None:
    """If the data of a client influence others, uploaded and downloaded bytes are counted.

    Remedy: use cohort.broadcast, download, fetch and upload.
    """
    states, costs = [], []  # for both data sets; bytes (up, down) of each round
    for arrays in (ARRAYS, other_data()):
        sim = set_up(case.simulation(arrays=arrays))
        for r in range(2):
            cohort = Cohort(sim.engine, ALL_IDS, r)
            sim.algorithm.round(cohort)
            sim.done += 1
            costs.append((cohort.cost.bytes_up, cohort.cost.bytes_down))
        others = {}  # the global model, and what clients other than 0 deploy
        for name, value in state_of(sim).items():
            if name.startswith(("/deployed", "/global")):
                others[name] = value[1:] if name != "/global" and len(value) == len(ALL_IDS) else value
        states.append(others)
    found = difference(*states)
    up, down = np.sum(costs, 0)
    message = f"{found} when client 0 has other data, but {up:,} bytes up and {down:,} bytes down are counted"
    assert found is None or (up and down), message


@SUITE.check
def nothing_bypasses_upload(case: Case) -> None:
    """Clients influence each other only by tensors that they pass to cohort.upload, where privacy is applied.

    Remedy: compute with what cohort.upload returns, or declare the reason in `bypasses_upload`.
    """
    reason = case.simulation().algorithm.bypasses_upload
    if reason is not None:
        raise SkipTest(f"the method declares `bypasses_upload`, and privacy refuses it: {reason}")
    assert not bypasses_upload(case), "messages depend on data of client 0 although its uploads are random"


def bypasses_upload(case: Case, **values: Any) -> bool:
    """Return whether messages to clients depend on the data of client 0 although its uploads are random values.

    Args:
        case: The method to check, with a small model and federation.
        **values: Values of the configuration by dotted key.
    """
    a, b = (_messages_with_random_uploads(case, arrays, **values) for arrays in (ARRAYS, other_data()))
    return len(a) != len(b) or not all(map(torch.equal, a, b))


def _messages_with_random_uploads(case: Case, arrays: Any, **values: Any) -> list[Tensor]:
    """Return the tensors that clients receive or request in all rounds, and last the initial row of a new client.

    Uploads are replaced by random values.

    Args:
        case: The method to check, with a small model and federation.
        arrays: The data set.
        **values: Values of the configuration by dotted key.
    """
    messages: list[Tensor] = []
    with probes.random_uploads(messages):
        sim = run_rounds(case.simulation(arrays=arrays, **values), ROUNDS)
        with torch.no_grad():
            cohort = all_clients(sim.engine, round=ROUNDS - 1, mode="evaluation")
            row = sim.algorithm.initial_row_for_new_clients([cohort])
    return [*messages, row]


def other_data() -> Any:
    """Return the data set of the checks, as Arrays, with other inputs and labels for all samples of client 0."""
    arrays, _ = ragged(TRAIN_SIZES, val=VAL_SIZES)
    samples = np.concatenate([part[0] for part in (SPLIT.train, SPLIT.val, SPLIT.test)])
    arrays.inputs[samples] = arrays.inputs[samples][::-1] * -2 + 0.5  # type: ignore[index]
    arrays.targets[samples] = (arrays.targets[samples] + 1) % 3
    return arrays


@SUITE.check
def references_are_what_was_sent(case: Case) -> None:
    """Uploads are differences to tensors that the clients received in the same round.

    Remedy: name in relative_to only tensors that cohort.broadcast or cohort.download sent in this round.
    """
    sim = case.simulation()
    compression = Compression(TopK(0.5, direction="both"), sim.engine.rows, sim.engine.model, seed=0)
    sim.engine = replace(sim.engine, compression=compression)
    try:
        with patch.object(channel, "TINY", 2):  # else, the small tensors of this model would not be compressed
            run_rounds(sim, 1)
    except UnknownReference as error:
        raise AssertionError(str(error)) from None
    except RunError as refused:
        raise SkipTest(f"compression refuses the method: {refused}") from None


# -- small federations -----------------------------------------------------------------------------------
@SUITE.check
def cohorts_of_one(case: Case) -> None:
    """Rounds with one client give finite values.

    Remedy: do not divide by a variance over clients, or by their number minus 1.
    """
    _run_and_require_finite(case.simulation(clients_per_round=1), [[2], [5]])


@SUITE.check
def a_single_client(case: Case) -> None:
    """A federation of one client gives finite values.

    Remedy: do not divide by the number of other clients.
    """
    # the federation with client 1 only, which gets the id 0 and is in both rounds
    split = Split(*(getattr(SPLIT, part).select([1]) for part in ("train", "val", "test")))
    _run_and_require_finite(case.simulation(clients_per_round=1, split=split), cohorts=[[0], [0]])


@SUITE.check
def clients_of_two_samples(case: Case) -> None:
    """Clients with fewer samples than a batch give finite values.

    Remedy: do not divide by the number of full batches of a client, which may be 0.
    """
    x = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype(np.float32)
    train = Ragged.from_sizes(np.arange(10), np.array([2, 2, 6]))
    val, test = (Ragged.from_sizes(np.arange(first, first + 3), np.array([1, 1, 1])) for first in (10, 13))
    sim = case.simulation(split=Split(train, val, test), arrays=arrays_of(x, np.arange(20) % 3, num_classes=3))
    _run_and_require_finite(sim, cohorts=[[0, 1, 2]] * 2)


def _run_and_require_finite(sim: Simulation, cohorts: Any) -> None:
    """Run two rounds, and assert that all values of the run's state are finite.

    Args:
        sim: A run before its first round.
        cohorts: The client indices of each round.

    Raises:
        SkipTest: The method refuses the federation.
    """
    try:
        set_up(sim)
    except ConfigError as refused:
        raise SkipTest(f"the method refuses this federation: {refused}") from None
    require_finite(state_of(continue_rounds(sim, 2, cohorts)))
