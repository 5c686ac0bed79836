"""Runs of a method for its checks: a small federation, 4 of 6 clients per round, and the smallest suitable model.

If the method allows momentum, the clients' optimizer has momentum and keeps its buffers between rounds.
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
TRAIN_SIZES, VAL_SIZES = (7, 21, 12, 4, 16, 9), (3,) * 6
ARRAYS, SPLIT = ragged(TRAIN_SIZES, val=VAL_SIZES)
ALL_IDS = np.arange(6)
OPTIMIZERS = (["optimizer.momentum=0.9", "optimizer.reset=never"], ["optimizer.momentum=0"])
RANDOM_CLIP = ["model.backbone=tiny-clip", "model.pretrained=null", "model.context=4"]  # without stored weights
TINY = {  # options of conf/model that make a model small
    "mlp": ["model.hidden=[8]"],
    "resnet": ["model.widths=[4]"],
    "unet": ["model.width=2"],
    "dnet": ["model.growth=2", "model.layers=2"],
    "vit_tiny": ["model.patch=2", "model.width=8", "model.heads=2", "model.depth=1"],
    "clip_prompt": RANDOM_CLIP,
    "clip_prompt_tiny": RANDOM_CLIP,
}
SMALL = ("mlp", "resnet", "vit_tiny", "dnet")  # tried first: other models take seconds to import or to build
CLIP = "clip_prompt_tiny"
ADAPTED = ["model=vit_tiny", *TINY["vit_tiny"], "adapter=houlsby", "adapter.width=3"]
PAIRED = [*ADAPTED, "adapter.twin=true"]
BASE = ("rounds=4", "clients_per_round=4", "local.epochs=1", "local.batch_size=5", "optimizer.lr=0.1")
CLIENT_RATES = re.compile(r"(^|_)lr$|^eta")  # options of methods that are learning rates, except SERVER_RATES
SERVER_RATES = ("server_lr",)


@functools.cache
def _composer() -> Composer:
    """Return the object that composes configurations from overrides by Hydra, the same in each call."""
    return Composer()


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """Return the configuration of a small run with these overrides, such as "model=mlp".

    It is composed only once for the same overrides: copy it before you change it.
    """
    full = _composer().compose([*BASE, *overrides])  # BASE: overrides that make it small
    return with_choices(full, full.hydra)  # adds the names of the selected options, which Hydra keeps apart


@dataclass
class Case:
    """A method to check, with the small model and the optimizer that it trains.

    Args:
        name: The option of conf/algorithm.
        overrides: The overrides of model and optimizer.
        optimizer: The overrides of the optimizer only.
        reason: Why the method cannot run on any model; None if it can.
        target: The options of the method, with `_target_` if its class is not an option of conf/algorithm.
    """

    name: str
    overrides: list[str]
    optimizer: list[str] = field(default_factory=list)
    reason: str | None = None
    target: Mapping[str, Any] | None = None

    def config(self, **values: Any) -> DictConfig:
        """Return a new configuration of a small run of the method.

        Args:
            **values: Values that replace those of the configuration, by dotted key, such as "local.batch_size".
        """
        cfg = composed(f"algorithm={self.name}", *self.overrides).copy()
        # `target` has either the class and all options of the method, or changes of the options in conf/algorithm
        if self.target is not None and "_target_" in self.target:
            cfg.algorithm = OmegaConf.create(dict(self.target))
        else:
            # values of the call, on the right, have priority
            values = {f"algorithm.{option}": value for option, value in (self.target or {}).items()} | values
        for key, value in values.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return cfg

    def on(self, overrides: list[str]) -> Case:
        """Return a case with the same method and other overrides, such as ["model=resnet", "optimizer.momentum=0"]."""
        return replace(self, overrides=overrides, reason=None)

    def simulation(
        self,
        plan: str | Plan = "vmap",
        split: Split = SPLIT,
        arrays: Any = ARRAYS,
        limits: int = 1 << 30,
        change: Callable[[DictConfig], None] | None = None,
        device: torch.device = CPU,
        **values: Any,
    ) -> Simulation:
        """Return a new run before its first round.

        Args:
            plan: How clients are computed, or its name in PLANS, such as "vmap" (all at once) or "loop".
            split: The partition over the clients.
            arrays: The data set.
            limits: The number of bytes of client states in memory; more are stored in files.
            change: A function that changes the configuration.
            device: The device of data, models and client states.
            **values: Values of the configuration by dotted key.
        """
        cfg = self.config(**values)
        if change is not None:
            change(cfg)
        federation = build.federation(cfg, arrays, split, device)
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
            cohort_size=min(cohort_size(cfg, 6), federation.num_clients),  # of the 6 clients of the small federation
        )
        rule = build.aggregator(cfg, federation)
        # further parts of an engine that the configuration may choose
        engine = replace(
            engine,
            aggregator=rule,
            attackers=build.attackers(cfg, federation.num_clients, engine.rows, rule),
            compression=build.compression(cfg, engine.rows, engine.model),
            client_ranks=build.client_ranks(cfg, engine.model),
            lora_sync=build.lora_sync(cfg, engine.model, engine.rows),
        )
        return Simulation(cfg, Path(), engine, build.algorithm(cfg), split)

    @property
    def setting(self) -> str:
        """The setting as text for reports: "on model=mlp; 6 clients of 4 to 21 samples, 4 a round"."""
        return f"on {' '.join(self.overrides)}; 6 clients of 4 to 21 samples, 4 a round"

    @functools.cached_property
    def states(self) -> list[dict[str, Tensor]]:
        """All tensors of one run, after 0, 1, 2, 3 and 4 rounds: dicts from path, such as "/rows/c_i", to tensor."""
        sim = set_up(self.simulation())
        states = [state_of(sim)]
        for num_done in range(1, ROUNDS + 1):
            states.append(state_of(continue_rounds(sim, stop=num_done, evaluated=True)))
        return states

    @functools.cached_property
    def after_two_rounds(self) -> Simulation:
        """A run of the method after two rounds.  All checks share it, so they must not change it."""
        return run_rounds(self.simulation(), 2)


def case_of(name: str, target: Mapping[str, Any] | None = None, model: str | None = None) -> Case:
    """Return the method as a case, with the first model and optimizer that it accepts.

    Args:
        name: The option of conf/algorithm.
        target: Options of the method, and `_target_` if its class is not an option of conf/algorithm.
        model: The option of conf/model; None to try models of conf/model, small ones first.

    Returns:
        The case.  If the method accepts no model, its `reason` is that of the last refusal.
    """
    case = Case(name, [], reason="there is no model", target=target)  # if conf/model has no options
    for overrides in _models() if model is None else [_small(model)]:
        for optimizer in OPTIMIZERS:
            case = Case(name, [*overrides, *optimizer], optimizer, target=target)
            try:
                set_up(case.simulation())
                return case
            except (ConfigError, ImportError) as refused:
                case.reason = str(refused)
    return case


def _models() -> Iterator[list[str]]:
    """Yield lists of overrides that choose a model, in the order in which `case_of` tries them.

    They are small models, a model with one and with two adapters per layer, a prompt of CLIP, and then the other models
    of conf/model by size.
    """
    yield from map(_small, SMALL)
    yield from (ADAPTED, PAIRED, _small(CLIP))
    yield from map(_small, _other_models())


def _small(model: str) -> list[str]:
    """Return ["model=MODEL"], followed by overrides of its sizes, such as "model.hidden=[8]", if `TINY` has any."""
    return [f"model={model}", *TINY.get(model, [])]


@functools.cache
def _other_models() -> list[str]:
    """Return the options of conf/model besides `SMALL` and `CLIP` that fit the small federation, smallest models first.

    Models that need a library that is not installed are left out, too.
    """
    federation, sizes = Federation.build(ARRAYS, SPLIT, CPU), {}
    for model in group_options("model"):
        if model in (*SMALL, CLIP):
            continue
        try:
            sizes[model] = build_model(composed("algorithm=fedavg", *_small(model)), federation).size
        except (ConfigError, ImportError):
            continue
    return sorted(sizes, key=sizes.__getitem__)


def target_of(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `_target_` and options of a method, including the default learning rates of its constructor.

    The learning rates are included so that `without_learning` can change them.

    Args:
        path: The dotted path of the class.
        options: Arguments of its constructor.

    Raises:
        ConfigError: There is no such class, or it is not a method.
    """
    cls = find_target(path, key="check")  # key: how messages name the target
    is_method = isinstance(cls, type) and issubclass(cls, Algorithm)
    require(
        is_method,
        f"{path} is not a method: name a subclass of fedbench.algorithms.base.Algorithm, or derive this class from it",
    )
    parameters = inspect.signature(cls).parameters.values()
    rates = {
        parameter.name: parameter.default
        for parameter in parameters
        # CLIENT_RATES: a pattern of names of learning rates, such as lr or eta_1
        if CLIENT_RATES.search(parameter.name) and isinstance(parameter.default, float)
    }
    return {"_target_": path, **rates, **options}


# -- running ---------------------------------------------------------------------------------------------
def set_up(sim: Simulation) -> Simulation:
    """Let the method check federation, model and optimizer and initialize its state, and return the run.

    Raises:
        ConfigError: The method refuses them.
    """
    engine = sim.engine
    sim.algorithm.check(engine.federation, engine.model, engine.optimizer)
    sim.algorithm.setup(engine.federation, engine.model, engine.rows)
    return sim


def run_rounds(sim: Simulation, stop: int, cohorts: Any = COHORTS, evaluated: bool = False) -> Simulation:
    """Run a method, which is set up first if no round is done yet, and return the run.

    Args:
        sim: The run; changed in place.
        stop: The number of rounds that are done at the end.
        cohorts: The client indices of each round, from the first round of the run on.
        evaluated: Whether to evaluate after every round.
    """
    return continue_rounds(set_up(sim) if sim.done == 0 else sim, stop, cohorts, evaluated)


def continue_rounds(sim: Simulation, stop: int, cohorts: Any = COHORTS, evaluated: bool = False) -> Simulation:
    """Run a method that is set up, and return the run.

    Args:
        sim: The run; changed in place.
        stop: The number of rounds that are done at the end.
        cohorts: The client indices of each round, from the first round of the run on.
        evaluated: Whether to evaluate after every round.
    """
    while sim.done < stop:
        sim.algorithm.round(Cohort(sim.engine, np.array(cohorts[sim.done]), sim.done))
        sim.done += 1
        if evaluated:
            evaluate.personal(sim.algorithm, sim.engine, ALL_IDS, round=sim.done - 1, final=sim.done == ROUNDS)
    return sim


def without_learning(cfg: DictConfig) -> None:
    """Set all learning rates of clients in a configuration to 1e-30, in place; 0 would be refused.

    They are those of the optimizer and those options of the method whose names are of learning rates, such as lr or
    eta_1 (CLIENT_RATES), but not those of the server.
    """
    cfg.optimizer.lr = 1e-30
    for key, value in cfg.algorithm.items():
        if CLIENT_RATES.search(str(key)) and isinstance(value, float) and key not in SERVER_RATES:
            cfg.algorithm[key] = 1e-30


# -- comparing -------------------------------------------------------------------------------------------
def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors, arrays and numbers in nested dicts and lists as one dict, from path to tensor.

    None becomes NaN.  Values of other types are left out.

    Args:
        value: A dict, list, tuple, array, tensor or number.
        name: The path of the value, before the keys inside of it, which are separated by slashes.
    """
    if isinstance(value, dict):
        return {path: t for key, v in value.items() for path, t in tensors(v, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return tensors(dict(enumerate(value)), name)
    if isinstance(value, np.ndarray):
        return {name: torch.from_numpy(value)}
    if value is None or isinstance(value, int | float):
        return {name: torch.tensor(float("nan" if value is None else value))}
    return {name: value} if isinstance(value, Tensor) else {}


def state_of(sim: Simulation, deploy: bool = True) -> dict[str, Tensor]:
    """Return all tensors of a run by path.

    Args:
        sim: The run.
        deploy: Whether to include what clients deploy, and the global model.

    Returns:
        The state of the server ("/algorithm/..."), the states of the clients with their optimizer buffers
        ("/rows/...", [N, ...] each), and, if asked, "/deployed" and "/global".  States of server optimizers are
        omitted, because they have one row and are created in the first round.
    """
    state: dict[str, Any] = {
        "algorithm": sim.algorithm.state_dict(),
        "rows": {name: rows.whole() for name, rows in sim.engine.rows.all.items() if not name.startswith("server/")},
    }
    if deploy:
        state["deployed"] = deployed(sim.engine, sim.algorithm, round=sim.done - 1, final=sim.done == ROUNDS)
        row = sim.algorithm.global_row()
        if row is not None:
            state["global"] = row
    return tensors(state)


def difference(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> str | None:
    """Return a description of the first difference between two states, such as "the global model differs by up to 3".

    Args:
        a: The tensors of one state by path, from `state_of`.
        b: Those of the other state.
        tolerance: The absolute and relative tolerance of floating-point values; other values must be equal.

    Returns:
        The description; None if the states are equal.
    """
    if a.keys() != b.keys():
        return f"{label_of(min(a.keys() ^ b.keys()))} exists in only one of them"  # the first name in one state only
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{label_of(name)} is {x.dtype} {tuple(x.shape)} in one and {y.dtype} {tuple(y.shape)} in the other"
        bound = tolerance if x.is_floating_point() else 0.0
        if not torch.allclose(x, y, rtol=bound, atol=bound, equal_nan=True):
            largest = (x.double() - y.double()).abs().nan_to_num(torch.inf).max()
            return f"{label_of(name)} differs by up to {float(largest):.2g}"
    return None


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0, message: str = "{}") -> None:
    """Assert that two states are equal.

    Args:
        a: The tensors of one state by path, from `state_of`.
        b: Those of the other state.
        tolerance: The absolute and relative tolerance of floating-point values.
        message: The error message, in which {} stands for the difference.
    """
    found = difference(a, b, tolerance)
    assert found is None, message.format(found)


def assert_close(a: Tensor, b: Tensor, tolerance: float, names: str) -> None:
    """Assert that two tensors are equal up to a fraction of the largest absolute value of b.

    Args:
        a: A tensor.
        b: A tensor of the same shape.
        tolerance: The largest allowed difference, as this fraction.
        names: The names of both tensors, such as "the logits alone and together", for the message.
    """
    distance = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
    assert distance <= tolerance, f"{names} differ by {distance:.2g} of the largest value"


def label_of(path: str) -> str:
    """Return words for a tensor of a run, such as "the clients' state 'c_i'", for its path "/rows/c_i"."""
    _, kind, *rest = path.split("/")
    inner = "/".join(rest)
    if kind == "rows":
        return f"the clients' state {inner!r}"
    if kind == "algorithm":
        return f"the server's state self.{inner}"
    return "what clients deploy" if kind == "deployed" else "the global model"


def require_finite(state: dict[str, Tensor]) -> None:
    """Assert that tensors are finite, except for tensors without axes, such as a mean of nothing, which may be NaN.

    Args:
        state: From path, such as "/rows/c_i", to tensor, as returned by `state_of`.
    """
    for name, value in state.items():
        assert value.dim() == 0 or bool(torch.isfinite(value).all()), (
            f"{label_of(name)} contains values that are not finite after two rounds"
        )
