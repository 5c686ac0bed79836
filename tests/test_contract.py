"""What every method keeps, found by listing conf/algorithm: a new file there is tested by what is here.

Each method runs on a ragged federation of 6 clients, 4 of them a round, on the smallest model that has what it
requires, with momentum that is kept from round to round where the method allows momentum.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tiny import CPU, arrays_of, close, compose, deployed, engine_on, equal, everyone, global_state, ragged, untouched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedbench.algorithms.base import Algorithm
from fedbench.cli.conf_tree import group_options
from fedbench.core import rng
from fedbench.core.options import ConfigError
from fedbench.engine import cohort as cohort_module
from fedbench.engine import federation
from fedbench.engine.cohort import Cohort
from fedbench.engine.executor import Plan
from fedbench.engine.federation import Federation
from fedbench.engine.threads import Steps
from fedbench.partition.base import Ragged, Split
from fedbench.simulation import build, checkpoint, evaluate
from fedbench.simulation.simulator import Simulation

METHODS = group_options("algorithm")
COHORTS = ([0, 1, 3, 5], [1, 2, 3, 4], [0, 2, 4, 5], [0, 1, 2, 5])
ARRAYS, SPLIT = ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6)
OPTIMIZERS = (["optimizer.momentum=0.9", "optimizer.reset=never"], ["optimizer.momentum=0"])
RANDOM_CLIP = ["model.backbone=tiny-clip", "model.pretrained=null", "model.context=4"]       # nothing is loaded
TINY = {"mlp": ["model.hidden=[8]"], "resnet": ["model.widths=[4]"], "clip_prompt": RANDOM_CLIP,
        "clip_prompt_tiny": RANDOM_CLIP}


@functools.cache
def composed(*overrides: str) -> DictConfig:
    return compose(["rounds=4", "clients_per_round=4", "local.epochs=1", "local.batch_size=5", "optimizer.lr=0.1",
                    *overrides])


def config(name: str, *overrides: str, **values: Any) -> DictConfig:
    """The method's config with further values by dotted key (composing is slow: once per method and model)."""
    cfg = composed(f"algorithm={name}", *overrides).copy()
    for key, value in values.items():
        OmegaConf.update(cfg, key, value)
    return cfg


@dataclasses.dataclass
class Case:
    """A method with the model and the optimizer it runs on here; reason: why it cannot run at all."""

    name: str
    overrides: list[str]
    optimizer: list[str] = dataclasses.field(default_factory=list)
    reason: str | None = None

    def simulation(self, plan: str | Plan = "vmap", split: Split = SPLIT, arrays: Any = ARRAYS, limits: int = 1 << 30,
                   change: Callable[[DictConfig], None] | None = None, **values: Any) -> Simulation:
        cfg = config(self.name, *self.overrides, **values)
        if change is not None:
            change(cfg)
        f = build.federation(cfg, arrays, split, CPU)
        e = engine_on(f, build.model(cfg, f), build.make(cfg.optimizer), plan=plan, limits=limits, seed=int(cfg.seed),
                      rounds=cfg.rounds, epochs=cfg.local.epochs, batch_size=cfg.local.batch_size, eval_batch=8,
                      cohort_size=min(build.cohort_size(cfg, 6), f.num_clients))
        algorithm = build.algorithm(cfg)
        return Simulation(cfg, Path(), e, algorithm, split)


@functools.cache
def case(name: str) -> Case:
    """The first model, smallest first, and optimizer that the method's own check accepts."""
    found = Case(name, [], reason="no model")
    for model in models():
        for optimizer in OPTIMIZERS:
            found = Case(name, [f"model={model}", *TINY.get(model, []), *optimizer], optimizer)
            try:
                ready(found.simulation())
                return found
            except ConfigError as refused:
                found.reason = str(refused)
    return found


def models() -> Iterator[str]:
    """mlp, then, for those whom it does not suit, the other models of conf/model by their size."""
    yield "mlp"
    yield from others()


@functools.cache
def others() -> list[str]:
    """The models of conf/model but mlp that can be built here, by their number of parameters."""
    f, sizes = Federation.build(ARRAYS, SPLIT, CPU), {}
    for model in group_options("model"):
        try:
            sizes[model] = build.model(config("fedavg", f"model={model}", *TINY.get(model, [])), f).size
        except (ConfigError, ImportError):
            continue
    return sorted(sizes.keys() - {"mlp"}, key=sizes.__getitem__)


def ready(sim: Simulation) -> Simulation:
    e = sim.engine
    sim.algorithm.check(e.federation, e.model, e.optimizer)
    sim.algorithm.setup(e.federation, e.model, e.rows)
    return sim


def rounds(sim: Simulation, stop: int, cohorts: Any = COHORTS, evaluated: bool = False) -> Simulation:
    """Play up to round `stop`, setting the method up first if nothing was played or loaded yet."""
    if not sim.engine.rows.all and sim.done == 0:
        ready(sim)
    while sim.done < stop:
        sim.algorithm.round(Cohort(sim.engine, np.array(cohorts[sim.done]), sim.done))
        sim.done += 1
        if evaluated:
            evaluate.personal(sim.algorithm, sim.engine, np.arange(6), sim.done - 1, sim.done == 4)
    return sim


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Nested dicts, lists and arrays as tensors by path."""
    if isinstance(value, dict):
        return {k: t for key, v in value.items() for k, t in tensors(v, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return tensors(dict(enumerate(value)), name)
    if isinstance(value, np.ndarray):
        return {name: torch.from_numpy(value)}
    if value is None or isinstance(value, int | float):
        return {name: torch.tensor(float("nan" if value is None else value))}
    return {name: value} if isinstance(value, Tensor) else {}


@functools.cache
def reference(name: str) -> list[dict[str, Tensor]]:
    """The method's run under one plan, evaluated after every round: everything after 0, 1, 2, 3 and 4 rounds."""
    sim = ready(case(name).simulation())
    found = [everything(sim)]
    for r in range(4):
        found.append(everything(rounds(sim, r + 1, evaluated=True)))
    return found


def everything(sim: Simulation, deploy: bool = True) -> dict[str, Tensor]:
    """State of server and of all clients, optimizer buffers included, and what everybody would deploy."""
    n = np.arange(sim.engine.federation.num_clients)
    found: dict[str, Any] = {"algorithm": sim.algorithm.state_dict(),
                             "rows": {name: rows[n] for name, rows in sim.engine.rows.all.items()}}
    if deploy:
        found |= {"deployed": deployed(sim.engine, sim.algorithm, sim.done - 1, sim.done == 4)}
        row = sim.algorithm.global_row()
        found |= {} if row is None else {"global": row}
    return tensors(found)


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float | None = None) -> None:
    """tolerance None: bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        try:
            torch.testing.assert_close(a[name], b[name], rtol=tolerance or 0, atol=tolerance or 0, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Case:
    found = case(request.param)
    if found.reason is not None:
        pytest.skip(found.reason)
    return found


# -- results do not depend on how they are computed ------------------------------------------------------
@pytest.mark.parametrize("plan", ["loop", "threads", "pairs"])
def test_every_plan_gives_the_same_rows(method: Case, plan: str) -> None:
    same(everything(rounds(method.simulation(plan), 3)), reference(method.name)[3], 1e-4)


def test_every_plan_gives_the_same_rows_of_a_model_with_batch_statistics(method: Case) -> None:
    """Buffers travel with the row, batches are of exact size, deployed models predict alike."""
    norm = Case(method.name, ["model=resnet", "model.widths=[4]", "model.norm=batch", *method.optimizer])
    try:
        vmap, loop = (rounds(norm.simulation(plan, **{"local.batch_size": 8}), 2) for plan in ("vmap", "loop"))
    except ConfigError as refused:
        pytest.skip(str(refused))
    same(everything(vmap), everything(loop), 1e-3)
    scores = [evaluate.personal(s.algorithm, s.engine, np.arange(6), 1, False)["loss"] for s in (vmap, loop)]
    np.testing.assert_allclose(*scores, rtol=1e-3)


def test_state_on_disk_is_state_in_memory(method: Case) -> None:
    same(everything(rounds(method.simulation(limits=0), 2)), reference(method.name)[2])


# -- seeds -----------------------------------------------------------------------------------------------
def test_a_seed_repeats_and_another_differs(method: Case) -> None:
    again, other = (everything(rounds(method.simulation(seed=seed), 2)) for seed in (0, 1))
    same(again, reference(method.name)[2])
    shown = [n for n in ("/deployed", "/deployed/theta") if n in again and again[n].numel() > 6]
    assert shown and all(not torch.allclose(again[n], other[n]) for n in shown)


def test_global_generators_are_left_alone(method: Case) -> None:
    sim = ready(method.simulation())
    before = global_state()
    rounds(sim, 2, evaluated=True)
    assert untouched(before)


# -- resume ----------------------------------------------------------------------------------------------
def test_a_resumed_run_is_the_uninterrupted_one(method: Case, tmp_path: Path) -> None:
    """2 rounds, a checkpoint on disk, a new process's objects, 2 more: bit for bit, every store of rows, kept
    momentum and server state included.  Only the uninterrupted run was evaluated on the way."""
    first = rounds(method.simulation(), 2)
    checkpoint.save(tmp_path, first.state())
    second = ready(method.simulation())
    second.load(checkpoint.load(tmp_path))
    assert second.done == 2
    same(everything(second, deploy=False), everything(first, deploy=False))
    same(everything(rounds(second, 4)), reference(method.name)[4])


# -- who changes when ------------------------------------------------------------------------------------
def test_rows_outside_the_cohort_stay_put(method: Case) -> None:
    for r in (1, 2, 3):
        before, after = reference(method.name)[r:r + 2]
        outside = np.setdiff1d(np.arange(6), COHORTS[r])
        for name in before:
            if name.startswith("/rows/"):
                equal(after[name][outside], before[name][outside])


def test_evaluation_changes_nothing_and_repeats(method: Case) -> None:
    sim = rounds(method.simulation(), 2)
    before = everything(sim, deploy=False)
    once, twice = (tensors(deployed(sim.engine, sim.algorithm, 1, True)) for _ in range(2))
    same(once, twice)
    same(everything(sim, deploy=False), before)
    some = np.array([1, 4])
    with torch.no_grad():
        part = sim.algorithm.personalized(Cohort(sim.engine, some, 1, "evaluation"), True)
    if isinstance(part, Tensor) and part.dim() == 2:
        close(part, once[""][some], 1e-5)


def no_learning(cfg: DictConfig) -> None:
    """Every learning rate that the method's YAML has, and the optimizer's, as good as 0."""
    cfg.optimizer.lr = 1e-30
    for key, value in cfg.algorithm.items():
        if re.search(r"(^|_)lr$|^eta", str(key)) and isinstance(value, float) and key != "server_lr":
            cfg.algorithm[key] = 1e-30


def test_without_learning_nobody_moves(method: Case) -> None:
    """The rows deployed after two rounds are those deployed before the first (an average of equal rows differs
    from them by rounding).  Clients that deploy the same row at first still do.  What a dict holds beside its rows is
    not learned: others' models, that arrive all the same."""
    def rows_of(found: Any) -> Tensor:
        return found["theta"] if isinstance(found, dict) else found
    sim = ready(method.simulation(change=no_learning))
    before = rows_of(deployed(sim.engine, sim.algorithm, 0, False))
    close(rows_of(deployed(rounds(sim, 2).engine, sim.algorithm, 1, False)), before, 2e-6)


def test_training_moves_what_is_deployed(method: Case) -> None:
    before, after = reference(method.name)[0], reference(method.name)[2]
    shown = [n for n in before if n.startswith("/deployed")]
    assert method.name == "zero_shot" or any(not torch.allclose(before[n], after[n], atol=1e-4) for n in shown)
    assert all(torch.isfinite(t).all() for t in after.values() if t.dim())


# -- renumbering -----------------------------------------------------------------------------------------
PERMUTED = np.array([3, 0, 5, 1, 4, 2])             # client j of the second federation is PERMUTED[j] of the first


def test_renumbering_the_clients_renumbers_their_rows(method: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clients under other numbers, and the same draws for each (keys follow the client): personal rows are
    permuted, the server's row is the same."""
    expected = reference(method.name)[3]
    split = Split(*(getattr(SPLIT, part).select(PERMUTED) for part in ("train", "val", "test")))
    sim = method.simulation(split=split)
    real_bits, real_generator, real_draw = rng.bits, federation.generator, sim.engine.model._draw

    def bits(base: int, *counters: np.ndarray) -> np.ndarray:
        return real_bits(base, PERMUTED[np.asarray(counters[0])], *counters[1:])
    monkeypatch.setattr(rng, "bits", bits)
    monkeypatch.setattr(federation, "generator", lambda *key: real_generator(*key[:-1], int(PERMUTED[key[-1]])))
    monkeypatch.setattr(sim.engine.model, "_draw", lambda j: real_draw(int(PERMUTED[j])))
    place = np.argsort(PERMUTED)
    found = everything(rounds(sim, 3, [np.sort(place[c]) for c in COHORTS]))
    for name in (n for n in found if n.startswith("/deployed")):
        wanted = expected[name]
        close(found[name], wanted[torch.from_numpy(PERMUTED)] if len(wanted) == 6 else wanted, 1e-4)
    if "/global" in expected:
        close(found["/global"], expected["/global"], 1e-4)


# -- corners ---------------------------------------------------------------------------------------------
def plays(sim: Simulation, cohorts: Any = None) -> None:
    """Two rounds with everybody (or these cohorts) end in finite numbers, or the method's own check says why not."""
    try:
        ready(sim)
    except ConfigError as refused:
        pytest.skip(str(refused))
    for r in range(2):
        sim.algorithm.round(everyone(sim.engine, r) if cohorts is None else Cohort(sim.engine, np.array(cohorts[r]), r))
        sim.done += 1
    assert all(torch.isfinite(t).all() for t in everything(sim).values() if t.dim())


def test_cohorts_of_one(method: Case) -> None:
    plays(method.simulation(clients_per_round=1), [[2], [5]])


def test_one_client_at_all(method: Case) -> None:
    alone = Split(*(getattr(SPLIT, part).select([1]) for part in ("train", "val", "test")))
    plays(method.simulation(clients_per_round=1, split=alone))


def test_clients_of_two_samples(method: Case) -> None:
    """Fewer samples than a batch, and than two batches."""
    x = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype(np.float32)
    split = Split(*(Ragged.from_sizes(np.arange(a, b), np.array(n)) for a, b, n in
                    [(0, 10, [2, 2, 6]), (10, 13, [1, 1, 1]), (13, 16, [1, 1, 1])]))
    plays(method.simulation(split=split, arrays=arrays_of(x, np.arange(20) % 3, 3)))


def test_every_method_has_a_case() -> None:
    run = [m for m in METHODS if case(m).reason is None]
    assert len(run) > len(METHODS) // 2
    assert all(isinstance(case(m).simulation().algorithm, Algorithm) for m in run)


# -- no step waits for a GPU -------------------------------------------------------------------------------
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::unique_dim",
           "aten::_unique2", "aten::repeat_interleave.Tensor", "aten::equal"}
EARLY_STOP = {"fedotp"}             # Sinkhorn's iterations end when all have converged: one look every ten


class NoSync(TorchDispatchMode):
    """Refuses operations whose result the host must know before it can go on: on a GPU each stops the queue."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        masked = name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name in WAITING or f"{name}.{func._schema.overload_name}" in WAITING or masked:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_no_local_step_waits_for_the_device(method: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if method.name in EARLY_STOP:
        pytest.skip("its iterations end early, which the host decides")
    chunk, seen = cohort_module.train_chunk, []

    def watched(*args: Any) -> Steps:
        with NoSync():
            yield from chunk(*args)
        seen.append(args)
    monkeypatch.setattr(cohort_module, "train_chunk", watched)
    rounds(method.simulation(), 2)
    assert seen or method.name == "zero_shot"
