"""Formats of models with an adapter that need no fedbench: merged into the bare model (without it), or for peft.

The documentation of peft describes the files ("PEFT checkpoint format").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fedbench.adapters.base import Adapter, Mergeable
from fedbench.core.options import ConfigError, require

PREFIX = "base_model.model."  # of all names in peft's files: the model in a LoraModel in a PeftModel


@runtime_checkable
class HasLibraryModule(Protocol):
    """A model around a network of a library, to which exported adapters belong.

    Attributes:
        library_module: The attribute with the network.
        peft_task: The kind of the network in the library peft, such as "CAUSAL_LM".
    """

    library_module: str
    peft_task: str


def adapted_layers(adapted: nn.Module, bare: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the adapted model that replace modules of the bare model, by name.

    A module replaces another one if both have the same name and different classes.  Modules inside of such a module are
    not returned again.

    Args:
        adapted: The adapted model.
        bare: The model without the adapter.
    """
    bare_modules = dict(bare.named_modules())
    layers: dict[str, nn.Module] = {}
    for name, module in adapted.named_modules():
        is_replaced = name in bare_modules and type(module) is not type(bare_modules[name])
        if is_replaced and not _is_within(name, layers):
            layers[name] = module
    return layers


def merge(adapted: nn.Module, bare: nn.Module, key: str) -> None:
    """Load the weights of the adapted model into the bare model, which then computes the same.

    Args:
        adapted: The adapted model; changed in place, its adapted layers become layers without an adapter.
        bare: The model without the adapter, which gets the weights.
        key: The adapter, for messages, such as "adapter=lora".

    Raises:
        ConfigError: An adapted layer is not `Mergeable`.
    """
    for name, module in adapted_layers(adapted, bare).items():
        layer = module.merged() if isinstance(module, Mergeable) else None
        require(
            layer is not None,
            f"{key} cannot be merged into the model: no plain layer computes what {type(module).__name__} computes "
            f"at {name}. Export the adapted model, without --merged",
        )
        adapted.set_submodule(name, layer)  # type: ignore[arg-type]
    state = adapted.state_dict()
    shapes, expected = _shapes(state), _shapes(bare.state_dict())
    for name in sorted({*shapes, *expected}):
        shape, expected_shape = shapes.get(name, "missing"), expected.get(name, "missing")
        require(
            shape == expected_shape,
            f"{key} cannot be merged into the model: after merging, the shape of {name} is {shape}, "
            f"but {expected_shape} in the model without the adapter. Export the adapted model, without --merged",
        )
    bare.load_state_dict(state)


def peft_files(
    adapted: nn.Module, bare: nn.Module, adapter: Adapter, key: str, trained: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the contents of adapter_config.json (a dict) and adapter_model.safetensors (tensors by name) for peft.

    Args:
        adapted: The adapted model.
        bare: The model without the adapter.  If it `HasLibraryModule`, the files are those of its network.
        adapter: The adapter.
        key: The adapter, for messages, such as "adapter=lora".
        trained: The names of the parameters and buffers of the adapted model that are trained, so that a client's row
            contains them.

    Raises:
        ConfigError: peft has no such adapter, or cannot store trained parameters outside of it.
    """
    task_type = None
    if isinstance(bare, HasLibraryModule):  # a wrapper around a network of another library
        task_type, inner = bare.peft_task, bare.library_module
        adapted, bare = adapted.get_submodule(inner), bare.get_submodule(inner)
        trained = [name.removeprefix(f"{inner}.") for name in trained]
    layers = adapted_layers(adapted, bare)
    method = adapter.peft_config(layers)
    if method is None:
        raise ConfigError(f"{key} is not an adapter of peft: omit --peft, or export a run of adapter=lora")
    state = adapted.state_dict()
    frozen = [f"{name}.base_layer" for name in layers]  # where peft's layers keep the original layer
    of_adapter = [name for name in state if _is_within(name, layers) and not _is_within(name, frozen)]
    # further trained modules, which peft stores completely
    saved = _modules_to_save(layers, [name for name in trained if name not in of_adapter], adapter)
    config = {
        **method,
        "task_type": task_type,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": [_unique_suffix(name, bare) for name in saved],
    }
    names = [*of_adapter, *(name for name in state if _is_within(name, saved))]
    # PREFIX: of all names in peft's files
    return config, {PREFIX + name: state[name].detach().cpu().clone().contiguous() for name in names}


def with_frozen_weights(bare: nn.Module, adapted: nn.Module) -> None:
    """Load the frozen weights of adapted layers, which a run may have changed, into the model without the adapter.

    Args:
        bare: The model without the adapter; changed in place.
        adapted: The adapted model, whose layers contain the original ones as `base_layer`.
    """
    layers, state = adapted_layers(adapted, bare), adapted.state_dict()
    frozen = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if _is_within(name, layers)}
    bare.load_state_dict({name: t for name, t in frozen.items() if name in bare.state_dict()}, strict=False)


def _modules_to_save(layers: Collection[str], trained: Iterable[str], adapter: Adapter) -> list[str]:
    """Return the names of the modules of trained parameters outside of the adapter, for peft's modules_to_save.

    peft stores only complete modules.

    Args:
        layers: The names of the adapted layers.
        trained: The names of the trained parameters and buffers that are not in the adapter.
        adapter: The adapter, for its option ``train`` in messages.

    Raises:
        ConfigError: A trained parameter is in no module of its own, or its module contains or is in an adapted layer.
    """
    modules: dict[str, str] = {}  # module: one of its parameters
    for name in trained:
        modules.setdefault(name.rpartition(".")[0], name)
    for module, name in modules.items():
        is_separate = not _is_within(module, layers) and not any(_is_within(layer, [module]) for layer in layers)
        require(
            bool(module) and is_separate,
            f"adapter.train={adapter.train}: {name} is trained, but peft cannot store it, only complete modules that "
            "neither contain nor are adapted layers: export with --merged instead of --peft",
        )
    # without modules inside of others, which are stored with these
    return [module for module in modules if not _is_within(module, [other for other in modules if other != module])]


def _unique_suffix(name: str, bare: nn.Module) -> str:
    """Return a name of a module with which peft finds only this one.

    peft takes all modules whose names end with the name.  If there are several, the full name in peft's model is used.

    Args:
        name: The full name of the module in the bare model.
        bare: The model without the adapter.
    """
    matches = [other for other, _ in bare.named_modules() if other.endswith(name)]
    return name if len(matches) == 1 else PREFIX + name


def _is_within(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module or parameter is one of some modules, or is inside of one.

    Args:
        name: The dotted name of the module or parameter.
        modules: The dotted names of the modules.
    """
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return a dict from name to shape (a list) of the tensors of a state_dict."""
    return {name: list(tensor.shape) for name, tensor in state.items()}
