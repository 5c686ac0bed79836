"""What a model must be before it is trained: checked on a handful of training samples, once, before round 1.

A copy of the module computes them, in evaluation and in training mode, so that neither its buffers nor the state of
any generator nor a number of the run changes.

Letters: B samples, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.error_text import describe_error
from fedbench.core.nested import map_inputs
from fedbench.core.options import ConfigError, require
from fedbench.engine.federation import Federation, Inputs
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import Batched


def check_parameters(module: Any, name: str) -> None:
    """Refuse what is no module, has nothing to train, or numbers that a row cannot hold.  name: for the sentence."""
    require(
        isinstance(module, nn.Module),
        f"{name} builds an object of type {type(module).__name__}, expected a torch.nn.Module",
    )
    parameters = dict(module.named_parameters())
    lazy = next((n for n, p in parameters.items() if nn.parameter.is_lazy(p)), None)
    require(lazy is None, f"{name}: the shape of {lazy} is not known yet (a Lazy module): give the layer its sizes")
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    frozen = f": all {len(parameters)} have requires_grad=False" if parameters else ""
    require(any(p.numel() for p in trained.values()), f"{name} has no parameter to train{frozen}")
    persistent = module.state_dict()
    buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in persistent}
    for n, t in {**trained, **buffers}.items():
        require(
            t.dtype == torch.float32,
            f"{name}: {n} is {_word(t.dtype)}, and what clients train and exchange is "
            "float32: build the module in float32, or end its constructor with self.float()",
        )


def check_outputs(model: FlatModel, federation: Federation, name: str) -> None:
    """Refuse a model whose outputs are not one finite float32 number for each class (and pixel) of a sample."""
    index = _few_samples(federation)
    x, y = federation.gather(index)
    largest = federation.largest_tokens()
    expected = federation.task.output_shape(y, federation.task.outputs(federation.num_classes))
    devices = [federation.device] if federation.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for train in (False, True):
            out = _outputs(
                model,
                x,
                train,
                f"{name} cannot compute {len(y)} training samples of shape {_shape(x)}"
                f"{' in training mode' if train else ''}",
                lambda module: _watch_tables(module, x, largest, name),
            )
            out = _logits(out, name)
            _check_form(out, expected, name)
            _check_values(out, model, name)
            require(
                not train or out.requires_grad,
                f"{name}: the outputs do not depend on any parameter that is "
                "trained, as behind torch.no_grad() or .detach()",
            )


def _few_samples(federation: Federation) -> Tensor:
    """A few training samples, repeated if there are fewer, of another number than classes.  # [B]"""
    count = 5 if federation.num_classes != 5 else 6
    index = np.resize(federation.splits["train"].indices[:count], count)
    return torch.from_numpy(index).to(federation.device)


def _outputs(model: FlatModel, x: Inputs, train: bool, failing: str, watch: Callable[[nn.Module], None]) -> Any:
    """Return the outputs of the forward pass.  failing: start of the error message; watch: called with the copy."""
    module: Any = model.module
    try:
        with torch.set_grad_enabled(train):
            if isinstance(module, Batched):
                return model.forward(model.init_row().requires_grad_(train), x, ForwardContext(train))
            frozen = {id(p): p for p in module.parameters() if not p.requires_grad}
            module = copy.deepcopy(module, memo=frozen)  # what is in the memo counts as copied: large towers are shared
            watch(module)
            return module.train(train)(x)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{failing}: {describe_error(error, module)}") from error


def _watch_tables(module: nn.Module, x: Inputs, largest: dict[str, int], name: str) -> None:
    """Watch the module and refuse an embedding table that is too short for the largest token of the data.

    A short table would fail in a later batch, on a GPU without a clear message.  largest: largest token of each input.
    """
    inputs = x if isinstance(x, dict) else {"inputs": x}

    def check(where: str, table: nn.Embedding, tokens: Any) -> None:
        for key, most in largest.items():
            require(
                tokens is not inputs.get(key) or most < table.num_embeddings,
                f"{name} has a table of {table.num_embeddings:,} tokens ({where}), and the data set's {key} has tokens "
                f"up to {most:,}: at least {most + 1:,} are needed (model.vocab in models that have it)",
            )

    def watch(where: str, table: nn.Embedding) -> None:
        table.register_forward_pre_hook(lambda _, given: check(where, table, given[0] if given else None))

    for where, table in module.named_modules():
        if isinstance(table, nn.Embedding):
            watch(where, table)


def _logits(out: Any, name: str) -> Any:
    """What is returned, without the extra loss [B] that may come second; refused unless that is one."""
    if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) for t in out)):
        return out
    logits, extra = out
    require(
        extra.shape == logits.shape[:1] and extra.dtype == torch.float32,
        f"{name} returns logits {list(logits.shape)} and an extra loss {list(extra.shape)} of {_word(extra.dtype)}: "
        f"that must be one float32 number for each sample, {list(logits.shape[:1])}",
    )
    require(bool(extra.isfinite().all()), f"{name} returns an extra loss that is NaN or infinite before any training")
    return logits


def _check_form(out: Any, expected: tuple[int, ...], name: str) -> None:
    """expected: [B, C, ...]."""
    require(
        isinstance(out, Tensor),
        f"{name} returns {_article(out)}: its forward pass must return the logits {list(expected)}, alone or "
        f"with an extra loss [{expected[0]}] behind them",
    )
    shape = tuple(out.shape)
    returned = f"{name} returns {list(shape) if shape else 'a single number'}"
    rule = f"expected {list(expected)} for {expected[0]} samples of {expected[1]} classes"
    require(shape[:1] == expected[:1], f"{returned}, {rule}: the first dimension must be the samples")
    if len(shape) == len(expected) and shape[1] != expected[1]:
        raise ConfigError(
            f"{name} has {shape[1]} outputs for {expected[1]} classes, too {_many(shape[1], expected[1])}: "
            "make its last layer as wide as num_classes, which a constructor that takes it is given"
        )
    require(shape == expected, f"{returned}, {rule}")
    require(
        out.dtype == torch.float32,
        f"{name} returns {_word(out.dtype)} numbers where a loss needs float32: end "
        "its forward pass with .float() where these are logits",
    )


def _article(out: Any) -> str:
    inside = (
        f" ({', '.join(map(str, out))})"
        if isinstance(out, dict)
        else f" of {len(out)}"
        if isinstance(out, tuple | list)
        else ""
    )
    return "None" if out is None else f"a {type(out).__name__}{inside}"


def _many(outputs: int, classes: int) -> str:
    return "many" if outputs > classes else "few"


def _check_values(out: Tensor, model: FlatModel, name: str) -> None:
    finite = out.isfinite().flatten(1).all(1)  # [B]
    if finite.all():
        return
    bad = [n for n, t in model.module.named_parameters() if not t.isfinite().all()]
    why = (
        f"its parameter {bad[0]} holds some"
        if bad
        else "its parameters are all finite, so what it computes of them is not"
    )
    raise ConfigError(
        f"{name} returns NaN or infinite numbers for {int((~finite).sum())} of {len(out)} training "
        f"samples before any training: {why}"
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Inputs) -> str:
    return str(map_inputs(lambda t: tuple(t.shape[1:]), x))
