"""What an adapter is: a rule for the layers of a model at named places, all else of which is frozen.

The layers that it adds are real ones, in the place of those that they adapt: whatever computes a model, as a program of
its own layers for many clients at once or mapped over them, computes them too.  A row then holds what they and the head
have, and the frozen weights are held once, for all clients.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from fedbench.core.options import listed, require

# default patterns of the words in `places`, unless the model has `sublayers`
SUBLAYERS: Mapping[str, Sequence[str]] = {"attention": ("*.attn",), "mlp": ("*.mlp",), "block": ("blocks.*",)}
OPTIONAL = "optional:"  # prefix of a pattern that need not match a layer


class Adapter:
    """Base class of adapters.

    Args:
        places: Patterns of layer names (fnmatch), or the words attention, mlp and block (`SUBLAYERS`).  Each must adapt
            a layer, unless it starts with "optional:".
        train: Patterns of parameters that are trained besides the added ones.  Each must match a parameter, except in a
            model that selects its trained parameters itself (`HoldsLayers`).

    Attributes:
        neutral: Whether a newly adapted model computes the same outputs as the bare model.
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
        names = [name for name, _ in model.named_parameters()]
        for pattern in [] if beside else self.train:
            require(
                any(fnmatch.fnmatch(name, pattern) for name in names),
                f"adapter.train={self.train}: the model has no parameter {pattern!r}; its parameters are "
                f"{listed(names)}",
            )
        for name, p in model.named_parameters():
            if any(fnmatch.fnmatch(name, pattern) for pattern in [*self.train, *beside]):
                p.requires_grad_()
        return self.add(model)

    def add(self, model: nn.Module) -> list[str]:
        """What `insert` does after freezing: adapt the layers at the places; the names of parameters that are new."""
        before = {id(p) for p in model.parameters()}
        layers = [name for name, m in model.named_modules() if name and list(m.parameters(recurse=False))]
        patterns = self._patterns(model)
        names = [name for name, _ in model.named_modules()]
        done = self._adapt_all(model, [p for of_place in patterns.values() for p in of_place])
        reached = [name for name in names if any(name == d or name.startswith(f"{d}.") for d in done)]
        for place, of_place in patterns.items():
            require(
                place.startswith(OPTIONAL) or any(_is_at(name, of_place) for name in reached),
                f"adapter.places={self.places}: the model has no layer {place!r} that this adapter can adapt; its "
                f"layers are {listed(layers)}. Write {OPTIONAL}{place} for a place that a model need not have",
            )
        require(
            bool(done), f"adapter.places={self.places}: the model has no layer there; its layers are {listed(layers)}"
        )
        return [name for name, p in model.named_parameters() if id(p) not in before]

    def _patterns(self, model: nn.Module) -> dict[str, list[str]]:
        """Return the patterns of layer names of each entry of `places`."""
        words = {**SUBLAYERS, **(model.sublayers() if isinstance(model, HasSublayers) else {})}
        bare = {place: place.removeprefix(OPTIONAL) for place in self.places}
        return {place: [name, *words.get(name, ())] for place, name in bare.items()}

    def _adapt_all(self, model: nn.Module, patterns: Sequence[str]) -> list[str]:
        """Adapt every matching layer and return the names.

        Layers within an adapted layer, and layers that `train` names, are skipped.
        """
        done: list[str] = []
        for name, layer in list(model.named_modules()):
            inside = any(name.startswith(f"{outer}.") for outer in done)
            if not name or inside or _is_at(f"{name}.weight", self.train) or not _is_at(name, patterns):
                continue
            adapted = self.adapt(layer, name)
            if adapted is not None:
                model.set_submodule(name, adapted)
                done.append(name)
        return done


def _is_at(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def inputs_of(layer: nn.Module) -> int:
    """Return the number of inputs that a layer requires: two if one of them is a mask."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def takes_more(layer: nn.Module) -> bool:
    """Return whether a layer accepts more than its rows: a mask, or keyword options."""
    return len(inspect.signature(layer.forward).parameters) > 1


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


@runtime_checkable
class HasSublayers(Protocol):
    """A model whose sublayers are not named as in `SUBLAYERS`."""

    def sublayers(self) -> Mapping[str, Sequence[str]]:
        """Return patterns of layer names for attention, mlp or block.

        A block is the layer that returns x + mlp(norm(x)).
        """
        ...
