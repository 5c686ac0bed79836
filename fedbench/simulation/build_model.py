"""The model of a checked config: its module for these data, drawn by the seed, as a model of rows."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from fedbench.core import rng
from fedbench.core.inputs import wrap_inputs
from fedbench.core.options import ConfigError, require
from fedbench.data.base import Arrays
from fedbench.data.spec import DataSpec
from fedbench.engine.federation import Federation
from fedbench.models.frozen_encoder import FrozenEncoder
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import Batched
from fedbench.nn.program import layers_of
from fedbench.simulation.instantiate import make, part, target_of
from fedbench.simulation.output_checks import check_parameters

RESERVED = ("columns", "freeze")  # keys of the group that are not the constructor's


def model(cfg: DictConfig, federation: Federation) -> FlatModel:
    """The model on this federation's shapes, adapted, its initialization keyed by the seed.

    The parameters that an adapter adds are the column group "adapter", and of those of its model's groups that their
    names are in.
    """
    adapter = part(cfg, "adapter")

    def draw(*number: str | int) -> tuple[torch.nn.Module, list[str]]:
        module = build_module(cfg, federation, *number)
        with keyed(cfg, "adapter", *number):
            return module, adapter.insert(module)

    module, new = draw()
    require(
        not new or not isinstance(module, Batched) or layers_of(module) is not None,
        f"adapter={cfg.choices.adapter}: model={cfg.choices.model} computes all clients at once by itself, past the "
        "layers that an adapter is put into; use adapter=none, or let it call them by fedbench.nn.program.Layers",
    )
    check_parameters(module, f"model._target_={cfg.model._target_}")
    columns: Any = OmegaConf.to_container(cfg.model.columns, resolve=True) if cfg.model.get("columns") else {}
    columns |= {"adapter": new} if new else {}
    freeze = list(cfg.model.get("freeze") or ())
    return FlatModel(module, columns, federation.device, lambda *number: draw(*number)[0], int(cfg.seed), freeze)


def build_module(cfg: DictConfig, data: Arrays | Federation, *number: str | int) -> Any:
    """The module for these data, its initialization keyed by the seed: the number-th draw.

    Of the DataSpec, the constructor is given what it names.  Which ones a constructor with **kwargs passes on can be
    told only by calling it.
    """
    spec = DataSpec(
        data.input_shape,
        data.num_classes if isinstance(data, Arrays) else data.task.outputs(data.num_classes),
        data.class_names,
        data.template,
        tuple(getattr(target_of(cfg, "algorithm"), "reads", ())),
        None if isinstance(data, Arrays) else data.num_clients,
    )
    arguments = {**vars(spec), "spec": spec}
    named, takes_any = _parameters(target_of(cfg, "model"))
    given = {name: value for name, value in arguments.items() if name in named}
    tried = [n for n in ("input_shape", "num_classes") if n not in named] if takes_any else []
    while True:
        try:
            return _draw_module(cfg, given | {name: arguments[name] for name in tried}, *number)
        except ConfigError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in tried:
                if isinstance(data, Federation) and data.task.draws:
                    made = ", ".join(wrap_inputs(data.input_shape))
                    words = f"task={data.task.kind} gives a model what it draws ({made}): choose one that reads that"
                    raise ConfigError(f"{error}; {words}") from error
                raise
            tried.remove(unknown[1])


def _draw_module(cfg: DictConfig, given: dict[str, Any], *number: str | int) -> Any:
    with keyed(cfg, "init", *number):
        return make(cfg.model, RESERVED, key="model", **given)


@contextlib.contextmanager
def keyed(cfg: DictConfig, *purpose: str | int) -> Iterator[None]:
    """torch's global generator seeded by the run's seed and a purpose, and afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(int(cfg.seed), *purpose) >> 1)
        yield


def _parameters(target: Any) -> tuple[set[str], bool]:
    """The names that a class or function takes, those that it passes on to its bases included; whether it takes and
    passes on any other."""
    named: set[str] = set()
    for constructor in _constructors(target):
        parameters = inspect.signature(constructor).parameters.values()
        named.update(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return named, False
    return named, True


def _constructors(target: Any) -> list[Any]:
    """What runs when a target is called: itself, or the __init__ of a class and of its bases."""
    if not inspect.isclass(target):
        return [target]
    return [vars(c)["__init__"] for c in target.__mro__ if "__init__" in vars(c) and c not in (object, torch.nn.Module)]


def reads_inputs(cfg: DictConfig) -> bool:
    """Whether the model has a frozen part that reads the inputs (an image tower)."""
    target = target_of(cfg, "model")
    return inspect.isclass(target) and issubclass(target, FrozenEncoder)
