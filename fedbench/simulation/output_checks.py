"""Check a model on a few training samples before round 1.

A copy of the module computes outputs in evaluation and in training mode.  So the checks change neither its buffers nor
the state of a random generator.

Letters: B samples, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.error_text import describe_error, is_raised_outside_layers
from fedbench.core.inputs import map_inputs, wrap_inputs
from fedbench.core.options import ConfigError, require
from fedbench.engine.federation import Federation, Inputs
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.nn.forward import BatchedModule


def check_parameters(module: Any, name: str) -> None:
    """Check that an object is a module with trainable float32 parameters.

    Args:
        module: The object to check.
        name: Its name for error messages, as in "model._target_=my.Net".

    Raises:
        ConfigError: It is not a module, has no trainable parameter, or has parameters or buffers of another type.
    """
    require(
        isinstance(module, nn.Module),
        f"{name} builds an object of type {type(module).__name__}, expected a torch.nn.Module: return a module",
    )
    parameters = dict(module.named_parameters())
    lazy = next((n for n, p in parameters.items() if nn.parameter.is_lazy(p)), None)
    require(lazy is None, f"{name}: {lazy} has no shape yet (a Lazy module): give the layer its sizes")
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    count = len(parameters)
    remedy = (
        f"all {count} have requires_grad=False; set it to True for some" if count else "add a layer with parameters"
    )
    require(any(p.numel() for p in trained.values()), f"{name} has no parameter to train: {remedy}")
    persistent = module.state_dict()  # buffers that are not saved are no part of a row, and may have any type
    buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in persistent}
    for n, t in {**trained, **buffers}.items():
        require(
            t.dtype == torch.float32,
            f"{name}: {n} is {_dtype_name(t.dtype)}, expected float32: build the module in float32, or end its "
            "constructor with self.float()",
        )


def check_outputs(model: FlatModel, federation: Federation, name: str) -> None:
    """Check that the outputs of a model fit the task.

    Args:
        model: The model.
        federation: The data and the task.
        name: The name of the model for error messages.

    Raises:
        ConfigError: The outputs are not finite float32 logits [B, C] (or [B, C, ...] for pixels), or do not depend on
            a trained parameter.
    """
    index = _few_samples(federation)
    x, y = federation.gather(index)
    largest = federation.largest_tokens()  # in the whole data set, by the name of the input
    outputs = federation.task.outputs(federation.num_classes)
    expected = federation.task.output_shape(y, outputs)
    devices = [federation.device] if federation.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for train in (False, True):
            out = _outputs(
                model,
                x,
                train,
                failing=f"{name} cannot compute {len(y)} training samples of shape {_shape(x)}"
                f"{' in training mode' if train else ''}",
                watch=lambda module: _watch_tables(module, x, largest, name),  # checks the sizes of embeddings
            )
            out = _logits(out, name)
            _check_shape(out, expected, outputs, name)
            _check_values(out, model, name)
            require(
                not train or out.requires_grad,
                f"{name}: the outputs do not depend on any trained parameter; remove torch.no_grad() or .detach() from "
                "the forward pass",
            )


def _few_samples(federation: Federation) -> Tensor:
    """Return the indices [B] of 5 training samples, or 6 if there are 5 classes, so that B and C differ.

    Samples are repeated if the data set has fewer.
    """
    count = 5 if federation.num_classes != 5 else 6  # B != C, so that swapped axes are noticed
    index = np.resize(federation.splits["train"].indices[:count], count)
    return torch.from_numpy(index).to(federation.device)


def _outputs(model: FlatModel, x: Inputs, train: bool, failing: str, watch: Callable[[nn.Module], None]) -> Any:
    """Return the outputs of the forward pass.

    Args:
        model: The model.
        x: The inputs [B, ...].
        train: Whether to compute in training mode.
        failing: The beginning of the error message.
        watch: Called with the copy of the module before its forward pass.

    Returns:
        The output of the module, which may be anything.

    Raises:
        ConfigError: The module raised an exception.
    """
    module: Any = model.module
    try:
        with torch.set_grad_enabled(train):
            if isinstance(module, BatchedModule):  # has a forward pass of its own for several clients
                return model.forward(model.init_row().requires_grad_(train), x, ForwardContext(train))
            frozen = {id(p): p for p in module.parameters() if not p.requires_grad}
            module = copy.deepcopy(module, memo=frozen)  # frozen parameters are shared, not copied
            watch(module)
            return module.train(train)(x)
    except ConfigError:
        raise
    except Exception as error:  # of any kind: the code of a module
        if is_raised_outside_layers(error):
            raise
        raise ConfigError(
            f"{failing}: {describe_error(error, module)}; correct the model's options or its forward pass"
        ) from error


def _watch_tables(module: nn.Module, x: Inputs, largest: dict[str, int], name: str) -> None:
    """Hook the embeddings of a module to check that their tables include the largest token of the data.

    A table that is too small would fail in a later batch, on a GPU without a clear message.

    Args:
        module: The module, called once after this.
        x: The inputs [B, ...].
        largest: The largest token of each input in the whole data set, by the name of the input.
        name: The name of the model for error messages.
    """
    inputs = wrap_inputs(x)

    def check(layer: str, table: nn.Embedding, tokens: Any) -> None:
        """Raise ConfigError if an embedding reads an input of the model, but has no entry for its largest token.

        `largest` has the largest token of each input in the data set, and `inputs` the inputs of this call, by name.

        Args:
            layer: The name of the embedding, for the message.
            table: The embedding.
            tokens: Its input.
        """
        for key, max_token in largest.items():
            require(
                tokens is not inputs.get(key) or max_token < table.num_embeddings,  # the table reads this input itself
                f"{name} has an embedding of {table.num_embeddings:,} tokens ({layer}), but the data set's {key} has "
                f"tokens up to {max_token:,}: use at least {max_token + 1:,} (model.vocab, if the model has that "
                "option)",
            )

    # a function, so that each hook keeps its own layer and table
    def watch(layer: str, table: nn.Embedding) -> None:
        table.register_forward_pre_hook(lambda _, args: check(layer, table, args[0] if args else None))

    for layer, table in module.named_modules():
        if isinstance(table, nn.Embedding):
            watch(layer, table)


def _logits(out: Any, name: str) -> Any:
    """Return the logits of an output.  If this is a pair (logits, extra loss [B]), check the extra loss.

    Args:
        out: The output of the model.  One that is not a pair of tensors is returned unchanged.
        name: The name of the model for error messages.
    """
    if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) for t in out)):
        return out
    logits, extra = out
    require(
        extra.shape == logits.shape[:1] and extra.dtype == torch.float32,
        f"{name} returns logits {list(logits.shape)} and an extra loss {list(extra.shape)} of "
        f"{_dtype_name(extra.dtype)}: the extra loss must be one float32 number per sample, {list(logits.shape[:1])}",
    )
    require(
        bool(extra.isfinite().all()),
        f"{name} returns an extra loss that is NaN or infinite before any training; correct its forward pass",
    )
    return logits


def _check_shape(out: Any, expected: tuple[int, ...], outputs: int, name: str) -> None:
    """Raise ConfigError unless an output is a float32 tensor of the expected shape.

    Args:
        out: The output of the model.
        expected: The expected shape, [B, C, ...], or [B, T, C] for the next token at each position.
        outputs: C.
        name: The name of the model for error messages.
    """
    require(
        isinstance(out, Tensor),
        f"{name} returns {_describe(out)}: its forward pass must return logits {list(expected)}, or a tuple of "
        f"logits and an extra loss [{expected[0]}]",
    )
    shape = tuple(out.shape)
    returned = f"{name} returns {list(shape) if shape else 'a single number'}"
    rule = f"expected {list(expected)} for {expected[0]} samples of {outputs} classes"
    axis = 1 if expected[1] == outputs else len(expected) - 1  # of the classes
    require(shape[:1] == expected[:1], f"{returned}, {rule}: the first dimension must be the samples")
    if len(shape) == len(expected) and shape[axis] != outputs:
        difference = "many" if shape[axis] > outputs else "few"
        raise ConfigError(
            f"{name} has too {difference} outputs, {shape[axis]} for {outputs} classes: give its last layer "
            "num_classes outputs (fedbench passes num_classes to a constructor that has this parameter)"
        )
    require(shape == expected, f"{returned}, {rule}: change its forward pass, or choose a model for this task")
    require(
        out.dtype == torch.float32,
        f"{name} returns {_dtype_name(out.dtype)}, expected float32 logits: end its forward pass with .float()",
    )


def _describe(out: Any) -> str:
    """Describe an object by its type: "a dict (logits, loss)" with the keys, "a tuple of 3", "a str", or "None"."""
    if out is None:
        return "None"
    inside = ""
    if isinstance(out, dict):
        inside = f" ({', '.join(map(str, out))})"
    elif isinstance(out, tuple | list):
        inside = f" of {len(out)}"
    return f"a {type(out).__name__}{inside}"


def _check_values(out: Tensor, model: FlatModel, name: str) -> None:
    """Raise ConfigError unless all outputs of a model are finite.  The message names a parameter that is not.

    Args:
        out: The outputs.  # [B, ...]
        model: The model.
        name: The name of the model for error messages.
    """
    is_finite = out.isfinite().flatten(1).all(1)  # [B]
    if is_finite.all():
        return
    bad = [n for n, t in model.module.named_parameters() if not t.isfinite().all()]
    why = (
        f"its parameter {bad[0]} is not finite; correct its initialization"
        if bad
        else "all its parameters are finite, so correct its forward pass"
    )
    raise ConfigError(
        f"{name} returns NaN or infinite outputs for {int((~is_finite).sum())} of {len(out)} training samples before "
        f"any training: {why}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a tensor type without "torch.", as in "float32"."""
    return str(dtype).removeprefix("torch.")


def _shape(x: Inputs) -> str:
    """Return the shape of one sample of a batch x [B, ...] as text, such as "(3, 32, 32)".

    For several inputs, this is the text of a dict from name to shape.
    """
    return str(map_inputs(lambda t: tuple(t.shape[1:]), x))
