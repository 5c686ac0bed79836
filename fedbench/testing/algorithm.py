"""What every method keeps: rows that do not depend on how they are computed, keyed draws, exact resumes.

A method runs on a ragged federation of 6 clients, 4 of them a round, on the smallest model that has what it requires,
with momentum that is kept from round to round where the method allows momentum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
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
from fedbench.testing._cases import (
    ARRAYS,
    COHORTS,
    EVERYBODY,
    ROUNDS,
    SPLIT,
    Case,
    case_of,
    difference,
    everything,
    go_on,
    in_words,
    no_learning,
    ready,
    rounds,
    tensors,
    with_rates,
)
from fedbench.testing._computing import SUITE, require_same
from fedbench.testing._federation import all_clients, arrays_of, deployed, ragged
from fedbench.testing._suite import Broken, Report, Skipped
from fedbench.testing._targets import path_of

PERMUTED = np.array([3, 0, 5, 1, 4, 2])  # client j of the second federation is PERMUTED[j] of the first


def check_algorithm(
    target: str | type,
    options: Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a method: a class, its dotted path, or the name of an option of conf/algorithm.

    options: of its constructor.  model: of conf/model; default: the smallest that the method accepts.  only: the names
    of some checks.  ConfigError where the class cannot be imported, or runs on no model.
    """
    case = case_for(target, options, model)
    if case.reason is not None:
        raise ConfigError(f"{path_of(target)} runs on no model of conf/model here: {case.reason}")
    return SUITE.run(path_of(target), case.setting, case, only)


def case_for(target: str | type, options: Mapping[str, Any] | None = None, model: str | None = None) -> Case:
    """The method, and what it is tried on; Case.reason says why there is nothing, if so."""
    name = path_of(target)
    if name in group_options("algorithm"):
        return case_of(name, dict(options or {}), model)
    described_by = with_rates(name, options or {})
    make(described_by, key="algorithm")  # a mistake in its options is one on every model
    return case_of("local", described_by, model)


# -- seeds -----------------------------------------------------------------------------------------------
@SUITE.check
def a_seed_repeats(case: Case) -> None:
    """The same seed gives the same run bit for bit, another seed another one."""
    again, other = (everything(rounds(case.simulation(seed=seed), 2)) for seed in (0, 1))
    require_same(again, case.played[2], "{} when a run is repeated with its seed: something is drawn without a key")
    shown = [n for n in ("/deployed", "/deployed/theta") if n in again and again[n].numel() > 6]
    if not shown or any(torch.allclose(again[n], other[n]) for n in shown):
        raise Broken("another seed deploys the same rows: seeds must be keyed by the run's (cohort.engine.seed)")


@SUITE.check
def no_global_generator(case: Case) -> None:
    """The global generators of torch, NumPy and Python are not moved nor read."""
    advice = "draw by cohort.random(purpose), cohort.generator(purpose) or s.rng, which are keyed"
    expected = case.played[2]  # with the generators as they are now
    with probes.other_generators(12345):
        sim = ready(case.simulation())
        before = probes.global_generators()
        go_on(sim, 2, evaluated=True)
        moved = probes.moved_generators(before)
        if moved:
            raise Broken(f"a round draws from the global generator of {' and '.join(moved)}: {advice}")
        require_same(
            everything(sim),
            expected,
            "{} when the global generators of torch, NumPy and Python are in another state, so that one of them is "
            f"read: {advice}",
        )


# -- resume ----------------------------------------------------------------------------------------------
@SUITE.check
def resume(case: Case) -> None:
    """A run that is resumed from a checkpoint is the uninterrupted one, bit for bit."""
    first = rounds(case.simulation(), 2)
    second = ready(case.simulation())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), first.state())
        try:
            second.load(checkpoint.load(Path(folder)))
        except ConfigError as refused:
            raise Broken(f"a checkpoint cannot be read back: {refused}") from None
        if second.done != 2:
            raise Broken(f"a checkpoint of 2 rounds is read as one of {second.done}")
        lost = _lost(first, second)
        advice = (
            f"self.{', self.'.join(lost)} changed and came back otherwise: " if lost else ""
        ) + "state is tensors on self (see state_dict) or rows made in setup"
        restored, saved = everything(second, deploy=False), everything(first, deploy=False)
        require_same(restored, saved, f"{{}} right after a resume; {advice}")
        require_same(
            everything(go_on(second, ROUNDS)),
            case.played[ROUNDS],
            f"{{}} between a resumed run and one without interruption; {advice}",
        )


def _lost(first: Simulation, second: Simulation) -> list[str]:
    """Attributes of a method that are otherwise after a resume."""
    a, b = vars(first.algorithm), vars(second.algorithm)
    plain = {n for n, v in a.items() if isinstance(v, int | float | str | list | dict | tuple | Tensor | np.ndarray)}
    return sorted(n for n in plain if n not in b or difference(tensors(a[n], f"/{n}"), tensors(b[n], f"/{n}")))


# -- who changes when ------------------------------------------------------------------------------------
@SUITE.check
def only_the_cohort_changes(case: Case) -> None:
    """Rows of clients outside the cohort stay as they are, bit for bit."""
    for r in range(1, ROUNDS):
        before, after = case.played[r : r + 2]
        outside = np.setdiff1d(EVERYBODY, COHORTS[r])
        for name in (n for n in before if n.startswith("/rows/")):
            wrong = [int(i) for i in outside if not torch.equal(after[name][i], before[name][i])]
            if wrong:
                raise Broken(
                    f"{in_words(name)} of client {wrong[0]} changed in a round in which it took no part: write rows at "
                    "cohort.ids only"
                )


@SUITE.check
def evaluation_changes_nothing(case: Case) -> None:
    """What clients deploy can be asked for again, and leaves the state as it is."""
    sim = case.after_two_rounds
    before = everything(sim, deploy=False)
    once, twice = (tensors(deployed(sim.engine, sim.algorithm, 1, True)) for _ in range(2))
    for name in once:
        if not torch.equal(once[name].nan_to_num(), twice[name].nan_to_num()):
            raise Broken("`personalized` gives other rows the second time: it must not change the method's state")
    require_same(everything(sim, deploy=False), before, "{} after an evaluation: `personalized` changes the state")
    some = np.array([1, 4])
    with torch.no_grad():
        part = sim.algorithm.personalized(Cohort(sim.engine, some, 1, "evaluation"), True)
    if isinstance(part, Tensor) and part.dim() == 2 and not torch.allclose(part, once[""][some], 1e-5, 1e-5):
        raise Broken("`personalized` of two clients gives other rows than of all: rows are in the order of cohort.ids")


@SUITE.check
def last_round_deploys_the_same(case: Case) -> None:
    """Clients deploy equal rows before and after the end of the last round, unless fine_tunes_after_training is set."""
    sim = case.after_two_rounds
    rows = {final: deployed(sim.engine, sim.algorithm, 1, final) for final in (False, True)}
    before, last = (tensors(rows[final], "/deployed") for final in (False, True))
    found, tuned = difference(before, last), sim.algorithm.fine_tunes_after_training
    if found is not None and not tuned:
        raise Broken(
            f"`personalized` gives other rows after the last round ({found}), so that the last value cannot be "
            "compared with those before it: set fine_tunes_after_training = True"
        )
    if found is None and tuned:
        raise Broken(
            "fine_tunes_after_training is set, but clients deploy equal rows before and after the end of the last round"
        )


@SUITE.check
def global_is_the_servers_row(case: Case) -> None:
    """Scores called global are those of the server's row; personal ones are the same where clients deploy it."""
    sim = case.after_two_rounds
    engine, algorithm = sim.engine, sim.algorithm
    row = algorithm.global_row()
    if row is None:
        return
    if row.shape != (engine.model.size,):
        raise Broken(f"`global_row` gives {[*row.shape]}: it is one row [{engine.model.size}] of the model, or None")
    scores, same = evaluate.personal_and_global(algorithm, engine, EVERYBODY, 1, False)
    rows = deployed(engine, algorithm, 1, False)
    if same and difference({"/global": rows}, {"/global": row.expand(len(EVERYBODY), -1)}):
        raise Broken("personal scores are taken for global ones, and clients deploy other rows than the server's")
    everybody, predict = all_clients(engine, 1, "evaluation"), algorithm.predict if same else None
    expected = evaluate.score(everybody, row.expand(len(EVERYBODY), -1), predict, "test")
    wrong = [n for n, v in expected.items() if not np.allclose(scores["global"][n], v, 1e-4, 1e-5, equal_nan=True)]
    if wrong:
        raise Broken(f"global/{wrong[0]} is not that of the row that `global_row` gives")


@SUITE.check
def nothing_moves_without_learning(case: Case) -> None:
    """At learning rates as good as 0 clients deploy what they began with."""

    def rows_of(deployed_rows: Any) -> Tensor:
        return deployed_rows["theta"] if isinstance(deployed_rows, dict) else deployed_rows

    sim = ready(case.simulation(change=no_learning))
    before = rows_of(deployed(sim.engine, sim.algorithm, 0, False))
    after = rows_of(deployed(go_on(sim, 2).engine, sim.algorithm, 1, False))
    if not torch.allclose(after, before, 2e-6, 2e-6):  # an average of equal rows differs from them by rounding
        raise Broken(
            f"what clients deploy moves by up to {float((after - before).abs().max()):.2g} although nobody learns: "
            "weights of an average must sum to 1, and a step must scale with s.lr"
        )


@SUITE.check
def training_moves_rows(case: Case) -> None:
    """After two rounds clients deploy other rows, and every number is finite."""
    before, after = case.played[0], case.played[2]
    endless = [name for name, value in after.items() if value.dim() and not torch.isfinite(value).all()]
    if endless:
        raise Broken(f"{in_words(endless[0])} holds numbers that are not finite after two rounds")
    shown = [n for n in before if n.startswith("/deployed")]
    if all(torch.allclose(before[n], after[n], atol=1e-4) for n in shown):
        if not _trains(case):
            raise Skipped("the method trains nothing")
        raise Broken("clients train and deploy what they began with: store what cohort.train returns")


def _trains(case: Case) -> bool:
    """Whether any local step is taken in a round."""
    sim = ready(case.simulation())
    cohort = Cohort(sim.engine, np.array(COHORTS[0]), 0)
    sim.algorithm.round(cohort)
    return cohort.cost.steps > 0


@SUITE.check
def renumbering_clients(case: Case) -> None:
    """Clients under other numbers have the same rows, and the server too."""
    numbered = case.simulation().algorithm.depends_on_client_order
    if numbered is not None:
        raise Skipped(numbered)
    expected = case.played[3]
    split = Split(*(getattr(SPLIT, part).select(PERMUTED) for part in ("train", "val", "test")))
    sim = case.simulation(split=split)
    place = np.argsort(PERMUTED)
    with probes.draws_follow(PERMUTED, sim.engine):
        state = everything(rounds(sim, 3, [np.sort(place[c]) for c in COHORTS]))
    shown = [n for n in state if n.startswith("/deployed") or n == "/global"]
    order = torch.from_numpy(PERMUTED)
    wanted = {n: expected[n][order] if n != "/global" and len(expected[n]) == 6 else expected[n] for n in shown}
    require_same(
        {n: state[n] for n in shown},
        wanted,
        "{} when the clients are numbered otherwise: something depends on a client's number or on its place in the "
        "cohort, but for keyed draws",
        1e-4,
    )


# -- what is sent ----------------------------------------------------------------------------------------
@SUITE.check
def bytes_are_counted(case: Case) -> None:
    """Where a client's data reach others, bytes are counted up and down."""
    states, sent = [], []
    for arrays in (ARRAYS, other_data()):
        sim = ready(case.simulation(arrays=arrays))
        for r in range(2):
            cohort = Cohort(sim.engine, EVERYBODY, r)
            sim.algorithm.round(cohort)
            sim.done += 1
            sent.append((cohort.cost.bytes_up, cohort.cost.bytes_down))
        state = everything(sim)
        shown = {n: t[1:] if n != "/global" and len(t) == 6 else t for n, t in state.items() if n[1] in "dg"}
        states.append(shown)
    where = difference(*states)
    up, down = (sum(each) for each in zip(*sent))
    if where is not None and not (up and down):
        raise Broken(
            f"{where} when client 0 has other data, and {up:,} bytes up and {down:,} bytes down are counted: send by "
            "cohort.broadcast, download, fetch and upload"
        )


@SUITE.check
def nothing_passes_by_upload(case: Case) -> None:
    """A client's data reach others through cohort.upload only, where privacy acts."""
    leaks = case.simulation().algorithm.bypasses_upload
    if leaks is not None:
        raise Skipped(f"the method says so, and is refused with privacy: {leaks}")
    if leaking(case):
        raise Broken(
            "what is sent in a round depends on client 0's data although uploads were replaced by some that do not: "
            "compute with what cohort.upload returned, or say in `bypasses_upload` what passes it by"
        )


def leaking(case: Case, **values: Any) -> bool:
    """Whether anything that is sent to anybody, or asked for, depends on client 0's data when its uploads do not."""
    a, b = (_told(case, arrays, **values) for arrays in (ARRAYS, other_data()))
    return len(a) != len(b) or any(s.shape != t.shape or not torch.equal(s, t) for s, t in zip(a, b))


def _told(case: Case, arrays: Any, **values: Any) -> list[Tensor]:
    """All that anybody is sent, or asks for, in four rounds and at a newcomer's start."""
    sent: list[Tensor] = []
    with probes.uploads_of_nothing(sent):
        sim = rounds(case.simulation(arrays=arrays, **values), ROUNDS)
        with torch.no_grad():
            row = sim.algorithm.initial_row_for_new_clients([all_clients(sim.engine, 3, "evaluation")])
    return [*sent, row]


def other_data() -> Any:
    """The federation with other inputs and labels at client 0, as many as before."""
    arrays, _ = ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6)
    client = np.concatenate([part[0] for part in (SPLIT.train, SPLIT.val, SPLIT.test)])
    arrays.inputs[client] = arrays.inputs[client][::-1] * -2 + 0.5  # type: ignore[index]
    arrays.targets[client] = (arrays.targets[client] + 1) % 3
    return arrays


@SUITE.check
def references_are_what_was_sent(case: Case) -> None:
    """An upload is relative to what its clients were sent in this round."""
    sim = case.simulation()
    compression = Compression(TopK(0.5, direction="both"), sim.engine.rows, sim.engine.model, 0)
    sim.engine = replace(sim.engine, compression=compression)
    try:
        with patch.object(channel, "TINY", 2):
            rounds(sim, 1)
    except UnknownReference as refused:
        raise Broken(str(refused)) from None
    except RunError as refused:
        raise Skipped(f"compression refuses the method here: {refused}") from None


# -- corners ---------------------------------------------------------------------------------------------
def _ends_well(sim: Simulation, cohorts: Any = None) -> None:
    """Two rounds with everybody (or these cohorts) end in finite numbers, or the method's own check says why not."""
    try:
        ready(sim)
    except ConfigError as refused:
        raise Skipped(f"the method's own check refuses it: {refused}") from None
    everybody = np.arange(sim.engine.federation.num_clients)
    go_on(sim, 2, [everybody] * 2 if cohorts is None else cohorts)
    endless = [name for name, value in everything(sim).items() if value.dim() and not torch.isfinite(value).all()]
    if endless:
        raise Broken(f"{in_words(endless[0])} holds numbers that are not finite after two rounds")


@SUITE.check
def cohorts_of_one(case: Case) -> None:
    """A round with a single client ends in finite numbers."""
    _ends_well(case.simulation(clients_per_round=1), [[2], [5]])


@SUITE.check
def a_single_client(case: Case) -> None:
    """A federation of a single client ends in finite numbers."""
    alone = Split(*(getattr(SPLIT, part).select([1]) for part in ("train", "val", "test")))
    _ends_well(case.simulation(clients_per_round=1, split=alone))


@SUITE.check
def clients_of_two_samples(case: Case) -> None:
    """Clients with fewer samples than a batch end in finite numbers."""
    x = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype(np.float32)
    train = Ragged.from_sizes(np.arange(10), np.array([2, 2, 6]))
    val, test = (Ragged.from_sizes(np.arange(a, a + 3), np.array([1, 1, 1])) for a in (10, 13))
    split = Split(train, val, test)
    _ends_well(case.simulation(split=split, arrays=arrays_of(x, np.arange(20) % 3, 3)))
