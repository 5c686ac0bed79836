"""A method ready to be played on the tiny federation, 4 of 6 clients a round, with the smallest model that suits it.

Momentum is kept from round to round where the method allows momentum.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.app.compose import Composer
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import group_options
from fedbench.config.find_target import find_target
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Split
from fedbench.engine.cohort import Cohort
from fedbench.engine.executor import Plan
from fedbench.engine.federation import Federation
from fedbench.simulation import build, evaluate
from fedbench.simulation.build_model import model as build_model
from fedbench.simulation.instantiate import make
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.sampling import cohort_size
from fedbench.testing._federation import CPU, deployed, engine_on, ragged

COHORTS = ([0, 1, 3, 5], [1, 2, 3, 4], [0, 2, 4, 5], [0, 1, 2, 5])
ROUNDS = len(COHORTS)
ARRAYS, SPLIT = ragged(sizes=(7, 21, 12, 4, 16, 9), val=(3,) * 6)
EVERYBODY = np.arange(6)
OPTIMIZERS = (["optimizer.momentum=0.9", "optimizer.reset=never"], ["optimizer.momentum=0"])
RANDOM_CLIP = ["model.backbone=tiny-clip", "model.pretrained=null", "model.context=4"]  # nothing is loaded
TINY = {  # options of conf/model that make a model small
    "mlp": ["model.hidden=[8]"],
    "resnet": ["model.widths=[4]"],
    "unet": ["model.width=2"],
    "dnet": ["model.growth=2", "model.layers=2"],
    "vit_tiny": ["model.patch=2", "model.width=8", "model.heads=2", "model.depth=1"],
    "clip_prompt": RANDOM_CLIP,
    "clip_prompt_tiny": RANDOM_CLIP,
}
SMALL = ("mlp", "resnet", "vit_tiny", "dnet")  # tried first: the others take seconds to import or to build
CLIP = "clip_prompt_tiny"
ADAPTED = ["model=vit_tiny", *TINY["vit_tiny"], "adapter=houlsby", "adapter.width=3"]  # for whom no bare model suits
TWINS = [*ADAPTED, "adapter.twin=true"]
BASE = ("rounds=4", "clients_per_round=4", "local.epochs=1", "local.batch_size=5", "optimizer.lr=0.1")
RATES = re.compile(r"(^|_)lr$|^eta")  # options of a method that are learning rates of its clients ...
SERVERS = ("server_lr",)  # ... but for these


@functools.cache
def _composer() -> Composer:
    return Composer()


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """Hydra's configuration of a small run (a fifth of a second: once for the same overrides)."""
    full = _composer().compose([*BASE, *overrides])
    return with_choices(full, full.hydra)


@dataclass
class Case:
    """A method, and the model and the optimizer that it runs on.

    name: of an option of conf/algorithm.  overrides: those of model and optimizer.  target: the method itself where it
    is none of conf, as ``{"_target_": ..., option: value}``.  reason: why it cannot run at all.
    """

    name: str
    overrides: list[str]
    optimizer: list[str] = field(default_factory=list)
    reason: str | None = None
    target: Mapping[str, Any] | None = None

    def config(self, **values: Any) -> DictConfig:
        """The configuration, with further values by dotted key."""
        cfg = composed(f"algorithm={self.name}", *self.overrides).copy()
        if self.target is not None and "_target_" in self.target:
            cfg.algorithm = OmegaConf.create(dict(self.target))
        else:
            values = {f"algorithm.{option}": value for option, value in (self.target or {}).items()} | values
        for key, value in values.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return cfg

    def on(self, overrides: list[str]) -> Case:
        """The same method on another model."""
        return Case(self.name, overrides, self.optimizer, None, self.target)

    def simulation(
        self,
        plan: str | Plan = "vmap",
        split: Split = SPLIT,
        arrays: Any = ARRAYS,
        limits: int = 1 << 30,
        change: Callable[[DictConfig], None] | None = None,
        **values: Any,
    ) -> Simulation:
        """A new run, before its first round.  change: of its configuration; values: likewise, by dotted key."""
        cfg = self.config(**values)
        if change is not None:
            change(cfg)
        federation = build.federation(cfg, arrays, split, CPU)
        engine = engine_on(
            federation,
            build_model(cfg, federation),
            make(cfg.optimizer),
            plan=plan,
            limits=limits,
            seed=int(cfg.seed),
            rounds=cfg.rounds,
            epochs=cfg.local.epochs,
            batch_size=cfg.local.batch_size,
            eval_batch=8,
            cohort_size=min(cohort_size(cfg, 6), federation.num_clients),
        )
        engine = replace(engine, compression=build.compression(cfg, engine.rows, engine.model))
        return Simulation(cfg, Path(), engine, build.algorithm(cfg), split)

    @property
    def setting(self) -> str:
        """In words, on what it is tried."""
        return f"on {' '.join(self.overrides)}; 6 clients of 4 to 21 samples, 4 a round"

    @functools.cached_property
    def played(self) -> list[dict[str, Tensor]]:
        """One run, all clients at once, evaluated after every round: everything after 0, 1, 2, 3 and 4 rounds."""
        sim = ready(self.simulation())
        states = [everything(sim)]
        for r in range(ROUNDS):
            states.append(everything(go_on(sim, r + 1, evaluated=True)))
        return states

    @functools.cached_property
    def after_two_rounds(self) -> Simulation:
        """Return a run after two rounds, for checks that only read it."""
        return rounds(self.simulation(), 2)


def case_of(name: str, target: Mapping[str, Any] | None = None, model: str | None = None) -> Case:
    """Return the method with the first model and optimizer that its check accepts."""
    tried = Case(name, [], reason="no model", target=target)
    for option in models() if model is None else [_small(model)]:
        for optimizer in OPTIMIZERS:
            tried = Case(name, [*option, *optimizer], optimizer, target=target)
            try:
                ready(tried.simulation())
                return tried
            except (ConfigError, ImportError) as refused:
                tried.reason = str(refused)
    return tried


def models() -> Iterator[list[str]]:
    """Yield the overrides of small models, of one with adapters, of a prompt, and of the others by size."""
    yield from map(_small, SMALL)
    yield from (ADAPTED, TWINS, _small(CLIP))
    yield from map(_small, _others())


def _small(model: str) -> list[str]:
    return [f"model={model}", *TINY.get(model, [])]


@functools.cache
def _others() -> list[str]:
    """Return the models of conf/model but SMALL and CLIP that can be built here, by their number of parameters."""
    federation, sizes = Federation.build(ARRAYS, SPLIT, CPU), {}
    for model in group_options("model"):
        if model in (*SMALL, CLIP):
            continue
        try:
            cfg = composed("algorithm=fedavg", *_small(model))
            sizes[model] = build_model(cfg, federation).size
        except (ConfigError, ImportError):
            continue
    return sorted(sizes, key=sizes.__getitem__)


def with_rates(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A method's target: its options, and its constructor's defaults that are learning rates, so that the checks can
    set them.  ConfigError where there is no such class, or it is no method."""
    cls = find_target(path, "check")
    kind = "a method (a subclass of fedbench.algorithms.base.Algorithm)"
    require(isinstance(cls, type) and issubclass(cls, Algorithm), f"{path} is not {kind}")
    taken = inspect.signature(cls).parameters.values()
    rates = {p.name: p.default for p in taken if RATES.search(p.name) and isinstance(p.default, float)}
    return {"_target_": path, **rates, **options}


# -- playing ---------------------------------------------------------------------------------------------
def ready(sim: Simulation) -> Simulation:
    """Let the method check what it runs on, and make its state."""
    e = sim.engine
    sim.algorithm.check(e.federation, e.model, e.optimizer)
    sim.algorithm.setup(e.federation, e.model, e.rows)
    return sim


def rounds(sim: Simulation, stop: int, cohorts: Any = COHORTS, evaluated: bool = False) -> Simulation:
    """Go on up to round `stop`, setting the method up first if nothing was played or loaded yet."""
    return go_on(ready(sim) if sim.done == 0 else sim, stop, cohorts, evaluated)


def go_on(sim: Simulation, stop: int, cohorts: Any = COHORTS, evaluated: bool = False) -> Simulation:
    """Play a method that is set up on to round `stop`.  evaluated: after every round."""
    while sim.done < stop:
        sim.algorithm.round(Cohort(sim.engine, np.array(cohorts[sim.done]), sim.done))
        sim.done += 1
        if evaluated:
            evaluate.personal(sim.algorithm, sim.engine, EVERYBODY, sim.done - 1, sim.done == ROUNDS)
    return sim


def no_learning(cfg: DictConfig) -> None:
    """Set every learning rate that the method's YAML has, and the optimizer's, as good as to 0."""
    cfg.optimizer.lr = 1e-30
    for key, value in cfg.algorithm.items():
        if RATES.search(str(key)) and isinstance(value, float) and key not in SERVERS:
            cfg.algorithm[key] = 1e-30


# -- comparing -------------------------------------------------------------------------------------------
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


def everything(sim: Simulation, deploy: bool = True) -> dict[str, Tensor]:
    """State of server and of all clients, optimizer buffers included, and what everybody would deploy.

    The states of server rules are left out, because they have one row and are created in the first round.
    """
    state: dict[str, Any] = {
        "algorithm": sim.algorithm.state_dict(),
        "rows": {name: rows.whole() for name, rows in sim.engine.rows.all.items() if not name.startswith("server/")},
    }
    if deploy:
        state |= {"deployed": deployed(sim.engine, sim.algorithm, sim.done - 1, sim.done == ROUNDS)}
        row = sim.algorithm.global_row()
        state |= {} if row is None else {"global": row}
    return tensors(state)


def difference(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> str | None:
    """In words, where two states differ by more than the tolerance, absolutely and relatively; None: nowhere."""
    if a.keys() != b.keys():
        return f"{in_words(min(a.keys() ^ b.keys()))} is there in one of them only"
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{in_words(name)} is {x.dtype} {tuple(x.shape)} in one and {y.dtype} {tuple(y.shape)} in the other"
        if not _close(x, y, tolerance):
            return f"{in_words(name)} differs{_how_much(x, y)}"
    return None


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if not x.dtype.is_floating_point:
        return torch.equal(x, y)
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


def _how_much(x: Tensor, y: Tensor) -> str:
    apart = (x.double() - y.double()).abs()
    return f" by up to {float(apart.nan_to_num(float('inf')).max()):.2g}"


def in_words(name: str) -> str:
    """A path of `everything` as a user knows it: /rows/c_i is the store c_i."""
    _, kind, *rest = name.split("/")
    inner = "/".join(rest)
    if kind == "rows":
        return f"the clients' state {inner!r}"
    if kind == "algorithm":
        return f"the server's state self.{inner}"
    return "what clients deploy" if kind == "deployed" else "the server's row"


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float | None = None) -> None:
    """AssertionError unless two states are equal, up to the tolerance or (None) bit for bit."""
    found = difference(a, b, tolerance or 0.0)
    if found is not None:
        raise AssertionError(found)
