"""Build the model of a checked configuration: the module for the data set, with its adapter, as a FlatModel."""

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
from fedbench.nn.batched_layers import find_batched_layers
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import BatchedModule
from fedbench.simulation.instantiate import component, make, target_of
from fedbench.simulation.output_checks import check_parameters

RESERVED = ("columns", "freeze")  # keys of the group that are not passed to the constructor


def model(cfg: DictConfig, federation: Federation) -> FlatModel:
    """Build the model for the data of a federation, with its adapter.  Its initialization depends on the seed.

    A column group is a named set of parameters.  Those that an adapter adds form the group "adapter".  They are also in
    the model's groups whose patterns match their names.

    Args:
        cfg: The checked configuration.
        federation: The training clients and their data.

    Returns:
        The model.

    Raises:
        ConfigError: The model cannot be built, or does not support the adapter.
    """
    adapter = component(cfg, "adapter")

    def draw(*number: str | int) -> tuple[torch.nn.Module, list[str]]:
        """Return a newly initialized module with its adapter, and the names of the adapter's parameters.

        Args:
            *number: Which initialization; none for that of the run, else for example ("superfed", 3) for client 3.
        """
        module = build_module(cfg, federation, *number)
        with seeded(cfg, "adapter", *number):
            return module, adapter.insert(module)

    module, added = draw()
    require(
        not added or not isinstance(module, BatchedModule) or find_batched_layers(module) is not None,
        f"adapter={cfg.choices.adapter}: model={cfg.choices.model} has its own batched forward pass, which does not "
        "call the layers with adapters; use adapter=none, or call the layers by "
        "fedbench.nn.batched_layers.BatchedLayers",
    )
    check_parameters(module, f"model._target_={cfg.model._target_}")
    # column groups: from a name to patterns of parameter names; freeze: patterns of parameters that are not trained
    columns: Any = OmegaConf.to_container(cfg.model.columns, resolve=True) if cfg.model.get("columns") else {}
    columns |= {"adapter": added} if added else {}
    freeze = list(cfg.model.get("freeze") or ())
    return FlatModel(module, columns, federation.device, lambda *number: draw(*number)[0], int(cfg.seed), freeze)


def build_module(cfg: DictConfig, data: Arrays | Federation, *number: str | int) -> Any:
    """Build the module of a model for a data set.

    The constructor gets those attributes of the DataSpec that it has parameters for.  A constructor with **kwargs is
    first called with input_shape and num_classes; those that it does not accept are then omitted.

    Args:
        cfg: The checked configuration.
        data: The data set, or the federation with its data.
        *number: Which initialization; none for that of the run, else for example ("superfed", 3) for client 3.

    Returns:
        The module.

    Raises:
        ConfigError: The module cannot be built.
    """
    spec = DataSpec(
        data.input_shape,
        num_classes=data.num_classes if isinstance(data, Arrays) else data.task.outputs(data.num_classes),
        class_names=data.class_names,
        template=data.template,
        reads=tuple(getattr(target_of(cfg, "algorithm"), "reads", ())),  # further inputs of the method, as "tokens"
        num_clients=None if isinstance(data, Arrays) else data.num_clients,
    )
    arguments = {**vars(spec), "spec": spec}
    parameters, takes_any = _parameters(target_of(cfg, "model"))  # their names, and whether there is **kwargs
    accepted = {name: value for name, value in arguments.items() if name in parameters}
    tried = [n for n in ("input_shape", "num_classes") if n not in parameters] if takes_any else []
    while True:
        try:
            return _draw_module(cfg, accepted | {name: arguments[name] for name in tried}, *number)
        except ConfigError as error:
            # a base class may refuse an argument that **kwargs passed on to it: call again without this argument
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in tried:
                if isinstance(data, Federation) and data.task.has_stochastic_inputs:
                    names = ", ".join(wrap_inputs(data.input_shape))
                    advice = f"choose a model for the random inputs ({names}) of task={data.task.kind}"
                    raise ConfigError(f"{error}; {advice}") from error
                raise
            tried.remove(unknown[1])


def _draw_module(cfg: DictConfig, arguments: dict[str, Any], *number: str | int) -> Any:
    """Call the constructor of the model, with random numbers that depend on the seed and the number.

    Args:
        cfg: The checked configuration, whose group model has the options.
        arguments: Further arguments of the constructor, which are not options.
        *number: Which initialization, part of the key of the random numbers; none for that of the run, else for example
            ("superfed", 3) for client 3.
    """
    with seeded(cfg, "init", *number):
        return make(cfg.model, RESERVED, key="model", **arguments)  # RESERVED: options that the constructor lacks


@contextlib.contextmanager
def seeded(cfg: DictConfig, *parts: str | int) -> Iterator[None]:
    """Seed torch's global generator on the CPU for the block, and restore its state afterwards.

    Args:
        cfg: The checked configuration, whose seed is used.
        *parts: What the seed also depends on, such as "init".
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(int(cfg.seed), *parts) >> 1)  # of 64 bits, to one below 2^63
        yield


def _parameters(target: Any) -> tuple[set[str], bool]:
    """Return the names of the parameters of a class or function, and whether it also accepts any other keyword.

    If a constructor has **kwargs, the parameters of the base class are included.

    Returns:
        The names, and True if the last of these constructors has **kwargs.
    """
    named: set[str] = set()
    for constructor in _constructors(target):
        parameters = inspect.signature(constructor).parameters.values()
        named.update(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return named, False
    return named, True


def _constructors(target: Any) -> list[Any]:
    """Return the functions that get the arguments of a call: a function itself, or __init__ of a class and its bases.

    The __init__ of torch.nn.Module and object are omitted, because they take no options.
    """
    if not inspect.isclass(target):
        return [target]
    return [vars(c)["__init__"] for c in target.__mro__ if "__init__" in vars(c) and c not in (object, torch.nn.Module)]


def reads_inputs(cfg: DictConfig) -> bool:
    """Return whether the model's class is a `FrozenEncoder`, which computes features of all inputs before round 1."""
    target = target_of(cfg, "model")
    return inspect.isclass(target) and issubclass(target, FrozenEncoder)
