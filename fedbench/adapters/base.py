"""What an adapter is: a rule for the layers of a model at named places, all else of which is frozen.

The layers that it adds are real ones, in the place of those that they adapt: whatever computes a model, as a program of
its own layers for many clients at once or mapped over them, computes them too.  A row then holds what they and the head
have, and the frozen weights are held once, for all clients.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from fedbench.core.options import listed, require


class Adapter:
    """places: patterns of names of layers (fnmatch).  train: patterns of parameters that learn beside what is added.

    neutral: a model that was just adapted computes what it did before.
    """

    neutral = True

    def __init__(self, places: Sequence[str], train: Sequence[str]):
        self.places, self.train = list(places), list(train)

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """What stands in the place of a layer, and holds it; None where it is none that can be adapted."""
        raise NotImplementedError

    def peft_config(self, layers: Mapping[str, nn.Module]) -> dict[str, Any] | None:
        """What peft's adapter_config.json says of these adapted layers, by name; None where peft has no such adapter.

        Where it has one, parameters are named as in peft (base_layer, lora_A): its files are then the module's numbers.
        """
        return None

    def insert(self, model: nn.Module) -> list[str]:
        """Freeze a model but for what `train` names, and adapt it, in place; the names of the parameters that learn by
        the adapter.  ConfigError where there are none."""
        beside = list(model.expose()) if isinstance(model, HoldsLayers) else []
        model.requires_grad_(False)
        for name, p in model.named_parameters():
            if any(fnmatch.fnmatch(name, pattern) for pattern in [*self.train, *beside]):
                p.requires_grad_()
        return self.add(model)

    def add(self, model: nn.Module) -> list[str]:
        """What `insert` does after freezing: adapt the layers at the places; the names of parameters that are new."""
        before = {id(p) for p in model.parameters()}
        layers = [name for name, m in model.named_modules() if name and list(m.parameters(recurse=False))]
        require(
            bool(self._adapt_all(model)),
            f"adapter.places={self.places}: the model has no layers there that this adapter can adapt; its layers are "
            f"{listed(layers)}",
        )
        return [name for name, p in model.named_parameters() if id(p) not in before]

    def _adapt_all(self, model: nn.Module) -> list[str]:
        """Adapt every layer at the places, but none within another one and none that `train` names; their names."""
        done: list[str] = []
        for name, layer in list(model.named_modules()):
            inside = any(name.startswith(f"{outer}.") for outer in done)
            learns = any(fnmatch.fnmatch(f"{name}.weight", pattern) for pattern in self.train)
            if not name or inside or learns or not any(fnmatch.fnmatch(name, pattern) for pattern in self.places):
                continue
            adapted = self.adapt(layer, name)
            if adapted is not None:
                model.set_submodule(name, adapted)
                done.append(name)
        return done


def inputs_of(layer: nn.Module) -> int:
    """How many inputs a layer must be given: two where it is told what is masked."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@runtime_checkable
class Mergeable(Protocol):
    """A module in the place of a layer, whose outputs another layer of that kind can give."""

    def merged(self) -> nn.Module | None:
        """That layer, a new one with the names and shapes of the one that was adapted; None where these options have
        none."""
        ...


@runtime_checkable
class HoldsLayers(Protocol):
    """A model that keeps layers outside itself (a frozen tower that all runs of a process share)."""

    def expose(self) -> Sequence[str]:
        """Hold them as submodules from now on, so that an adapter finds them; the names of the parameters that learn
        beside it, whatever it trains (the model's own)."""
        ...
