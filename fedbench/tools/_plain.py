"""An adapted model for those who have no fedbench: as the bare model, or in the files of peft.

peft's folders are described in its documentation ("PEFT checkpoint format"), and were tried with peft 0.21.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from fedbench.adapters.base import Adapter, Mergeable
from fedbench.core.options import ConfigError, require

PREFIX = "base_model.model."  # of every name in peft's files: the model within a LoraModel within a PeftModel


def inserted(adapted: nn.Module, bare: nn.Module) -> dict[str, nn.Module]:
    """The modules that stand in the place of the bare model's, by name; none within another one."""
    plain, found = dict(bare.named_modules()), {}
    for name, module in adapted.named_modules():
        is_other = name in plain and type(module) is not type(plain[name])
        if is_other and not _is_within(name, found):
            found[name] = module
    return found


def merge(adapted: nn.Module, bare: nn.Module, key: str) -> None:
    """Give the bare model the adapted one's numbers, so that it computes the same; changes both.

    key: the adapter, for the sentence.  ConfigError where a layer's adapter is not `Mergeable`.
    """
    for name, module in inserted(adapted, bare).items():
        layer = module.merged() if isinstance(module, Mergeable) else None
        require(
            layer is not None,
            f"{key} cannot be merged into the model: no layer of the bare model computes what {type(module).__name__} "
            f"does at {name}; export the adapted model, without --merged",
        )
        adapted.set_submodule(name, layer)  # type: ignore[arg-type]
    state = adapted.state_dict()
    given, needed = _shapes(state), _shapes(bare.state_dict())
    for name in sorted({*given, *needed}):
        shape, fits = given.get(name, "missing"), given.get(name) == needed.get(name)
        require(
            fits,
            f"{key} cannot be merged into the model: its `merged` leaves {name} {shape}, which is "
            f"{needed.get(name, 'missing')} in the bare model; export the adapted model, without --merged",
        )
    bare.load_state_dict(state)


def peft_files(
    adapted: nn.Module, bare: nn.Module, adapter: Adapter, key: str, learned: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What adapter_config.json says, and the tensors of adapter_model.safetensors, for peft.PeftModel on that model.

    learned: names of the adapted model's numbers that a row holds.  ConfigError where peft has no such adapter, or no
    way to store what learned beside it.
    """
    layers = inserted(adapted, bare)
    method = adapter.peft_config(layers)
    if method is None:
        raise ConfigError(f"{key} is no adapter that peft's files are written for: --peft FOLDER is for adapter=lora")
    state = adapted.state_dict()
    new = [n for n in state if _is_within(n, layers) and not _is_within(n, [f"{name}.base_layer" for name in layers])]
    saved = _saved_modules(layers, [name for name in learned if name not in new], adapter)
    config = {
        **method,
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": [_unmistakable(name, bare) for name in saved],
    }
    names = [*new, *(n for n in state if _is_within(n, saved))]
    return config, {PREFIX + name: state[name].detach().cpu().clone().contiguous() for name in names}


def _saved_modules(layers: Collection[str], learned: Iterable[str], adapter: Adapter) -> list[str]:
    """The modules that hold what learned beside the adapter: peft stores whole ones, and none that it also adapts."""
    owners: dict[str, str] = {}  # module: one of its names
    for name in learned:
        owners.setdefault(name.rpartition(".")[0], name)
    for owner, name in owners.items():
        require(
            bool(owner) and not _is_within(owner, layers) and not any(_is_within(layer, [owner]) for layer in layers),
            f"adapter.train={adapter.train}: {name} has learned, and peft stores whole modules beside its adapters, "
            "none that hold or are adapted layers; export with --merged instead of --peft",
        )
    return [owner for owner in owners if not _is_within(owner, [other for other in owners if other != owner])]


def _unmistakable(name: str, bare: nn.Module) -> str:
    """A module's name as peft finds it, which takes every module whose name ends so."""
    ends_so = [other for other, _ in bare.named_modules() if other.endswith(name)]
    return name if len(ends_so) == 1 else PREFIX + name


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}
