"""Base class of adapters, which freeze a model and insert trained layers.

An adapted layer is an ordinary module that replaces the original layer and contains it, so every executor computes it.
A client's row then has only the parameters of adapters and head.  The frozen weights are stored once for all clients.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from fedbench.channel.lora_sync import Sync
from fedbench.core.options import listed, require

# patterns of layer names for the words in `places`, unless the model has `sublayers`
SUBLAYERS: Mapping[str, Sequence[str]] = {"attention": ("*.attn",), "mlp": ("*.mlp",), "block": ("blocks.*",)}
OPTIONAL = "optional:"  # prefix of a pattern that need not match a layer


class Adapter:
    """Base class of adapters.  places: which layers are adapted; train: which other parameters are trained.

    Args:
        places: Patterns of layer names (fnmatch), or the words attention, mlp and block (`SUBLAYERS`).  Each must adapt
            a layer, unless it starts with "optional:".
        train: Patterns of parameters that are trained besides the added ones.  Each must match a parameter, except in a
            model that selects its trained parameters itself (`HasHiddenLayers`).

    Attributes:
        neutral: Whether a newly adapted model computes the same outputs as the original model.
        sync: How the server combines the clients' adapters; only LoRA has other rules than average.
        client_ranks: The rank of each client's products if it differs between clients; None if it does not.  # [N]
    """

    neutral = True
    sync: Sync = "average"
    client_ranks: Sequence[int] | None = None

    def __init__(self, places: Sequence[str], train: Sequence[str]):
        self.places, self.train = list(places), list(train)

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """Return a module that replaces a layer and contains it.

        Args:
            layer: The layer.
            name: Its name in the model.

        Returns:
            The adapted layer, or None if this kind of layer cannot be adapted.
        """
        raise NotImplementedError

    def check(self, num_clients: int) -> None:
        """Check the options that have one value for each client.  By default there are none, and nothing is checked.

        Args:
            num_clients: Number of training clients, N.

        Raises:
            ConfigError: A list has another length than N.
        """

    def peft_config(self, layers: Mapping[str, nn.Module]) -> dict[str, Any] | None:
        """Return the contents of adapter_config.json, by which the library peft reads the adapted layers.

        Parameters of an adapter that peft has must be named as in peft (base_layer, lora_A), because they are exported
        under their names.

        Args:
            layers: The adapted layers by name.

        Returns:
            The configuration, or None if peft has no such adapter, as by default.
        """
        return None

    def insert(self, model: nn.Module) -> list[str]:
        """Freeze a model except the parameters of `train`, and adapt it in place.

        `train` is an option, a list of patterns of parameter names.  A model with hidden layers (`HasHiddenLayers`)
        names its trained parameters itself; patterns of `train` then need not match.

        Args:
            model: The model, which is changed.

        Returns:
            Names of the parameters that the adapter adds and trains, without those of `train`.

        Raises:
            ConfigError: A pattern of `train` or `places` matches nothing.
        """
        # expose: registers the hidden layers as submodules, and returns the names of the parameters to train
        selected_by_model = list(model.expose()) if isinstance(model, HasHiddenLayers) else []
        model.requires_grad_(False)
        names = [name for name, _ in model.named_parameters()]
        for pattern in [] if selected_by_model else self.train:
            require(
                any(fnmatch.fnmatch(name, pattern) for name in names),
                f"adapter.train={self.train}: no parameter of the model matches {pattern!r}. Remove it, or write a "
                f"pattern that matches one of {listed(names)}",
            )
        for name, p in model.named_parameters():
            if any(fnmatch.fnmatch(name, pattern) for pattern in [*self.train, *selected_by_model]):
                p.requires_grad_()
        return self.add(model)

    def add(self, model: nn.Module) -> list[str]:
        """Adapt the layers that the option `places` names, after `insert` has frozen the model.

        Args:
            model: The model, which is changed.

        Returns:
            Names of the new parameters.

        Raises:
            ConfigError: An entry of `places` adapts no layer.
        """
        before = {id(p) for p in model.parameters()}
        # layers with parameters of their own, for messages
        layers = [name for name, m in model.named_modules() if name and list(m.parameters(recurse=False))]
        patterns = self._patterns(model)
        names = [name for name, _ in model.named_modules()]
        adapted = self._adapt_all(model, list(itertools.chain.from_iterable(patterns.values())))
        # An entry is also satisfied if its layer is part of a layer that another entry adapted.
        reached = [name for name in names if any(name == a or name.startswith(f"{a}.") for a in adapted)]
        for entry, entry_patterns in patterns.items():
            require(
                # entries with the prefix "optional:" need not match
                entry.startswith(OPTIONAL) or any(_matches(name, entry_patterns) for name in reached),
                f"adapter.places={self.places}: the model has no layer {entry!r} that this adapter can adapt; its "
                f"layers are {listed(layers)}. Replace {entry!r} by a pattern of these names, or write "
                f"{OPTIONAL}{entry} if the layer need not exist",
            )
        require(
            bool(adapted),
            f"adapter.places={self.places}: no layer of the model matches. List patterns that match some of "
            f"{listed(layers)}",
        )
        return [name for name, p in model.named_parameters() if id(p) not in before]

    def _patterns(self, model: nn.Module) -> dict[str, list[str]]:
        """Return the patterns of layer names that each entry of `places` stands for.

        Args:
            model: The model, which may define what attention, mlp and block stand for (`HasSublayers`).

        Returns:
            Lists of patterns (fnmatch) by entry, such as {"optional:mlp": ["mlp", "*.mlp"]}.
        """
        # SUBLAYERS: the default patterns of these words, for models that do not define them
        sublayers = {**SUBLAYERS, **(model.sublayers() if isinstance(model, HasSublayers) else {})}
        names = {entry: entry.removeprefix(OPTIONAL) for entry in self.places}
        return {entry: [name, *sublayers.get(name, ())] for entry, name in names.items()}

    def _adapt_all(self, model: nn.Module, patterns: Sequence[str]) -> list[str]:
        """Adapt every matching layer in place, unless it is part of an adapted layer or trained by itself (`train`).

        Args:
            model: The model.
            patterns: Patterns of layer names (fnmatch).

        Returns:
            Names of the adapted layers.
        """
        names: list[str] = []
        for name, layer in list(model.named_modules()):
            inside = any(name.startswith(f"{outer}.") for outer in names)
            if not name or inside or _matches(f"{name}.weight", self.train) or not _matches(name, patterns):
                continue
            adapted = self.adapt(layer, name)
            if adapted is not None:
                model.set_submodule(name, adapted)
                names.append(name)
        return names


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a layer's name matches one of the patterns, such as "blocks.*.mlp" (fnmatch, with * and ?)."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def inputs_of(layer: nn.Module) -> int:
    """Return the number of positional arguments of `layer.forward` without a default, such as 2 for x and a mask."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def takes_more(layer: nn.Module) -> bool:
    """Return whether `layer.forward` has more than one parameter, such as a mask or options after x."""
    return len(inspect.signature(layer.forward).parameters) > 1


@runtime_checkable
class Mergeable(Protocol):
    """An adapted layer that can be merged into a layer of the original kind with the same outputs."""

    def merged(self) -> nn.Module | None:
        """Return a layer with the names and shapes of the original one, and the outputs of the adapted one.

        None: the options of the adapter do not allow this.
        """
        ...


@runtime_checkable
class HasHiddenLayers(Protocol):
    """A model whose layers are not all submodules, such as a frozen tower that the runs of a process share."""

    def expose(self) -> Sequence[str]:
        """Register these layers as submodules, so that an adapter finds them.

        Returns:
            Names of the model's parameters that are trained with any adapter.
        """
        ...


@runtime_checkable
class HasSublayers(Protocol):
    """A model whose sublayers have other names than those in `SUBLAYERS`."""

    def sublayers(self) -> Mapping[str, Sequence[str]]:
        """Return patterns of layer names (fnmatch) for the words "attention", "mlp" and "block", or for some of them.

        A block is the layer that returns x + mlp(norm(x)).
        """
        ...
