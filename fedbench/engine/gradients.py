"""Gradients of batch losses: what a step requests, and the direct way to compute it.

`DirectGradients` uses the model's manual backward pass if it has one, else autograd.  `GraphedGradients`
(cuda_graphs.py) replays the same operations as CUDA graphs.  The executor has one of them.

Running statistics (the float buffers of BatchNorm) are also columns of a row.  A forward pass in training mode updates
them in place, which autograd does not allow for columns of a differentiated row.  The pass therefore updates copies,
which are written into the row afterwards.

Letters: k clients still training, P length of a row, B batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbench.core.error_text import running_layer
from fedbench.core.inputs import wrap_inputs
from fedbench.core.options import require
from fedbench.core.private_torch import BatchNorm
from fedbench.engine.batch import Batch
from fedbench.engine.federation import Inputs
from fedbench.nn.batched_operators import BATCH_OF_ONE, ForwardContext
from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.tasks.base import Task


class DifferentiatedParameters(NamedTuple):
    """The parameters that need a gradient if some columns of rows need one.

    Attributes:
        mask: For each parameter, whether it needs a gradient.
        all_trained: Whether the columns are all trained columns.
        names: Names of the parameters that need a gradient.
        are_complete: Whether the columns consist of whole parameters.
    """

    mask: tuple[bool, ...]
    all_trained: bool
    names: tuple[str, ...]
    are_complete: bool

    @classmethod
    def of(cls, model: FlatModel, columns: Columns) -> DifferentiatedParameters:
        """Return the parameters that need a gradient: those with at least one of the given columns.

        Args:
            model: The model, with the columns of each parameter in a row.
            columns: The columns to differentiate: positions in the vector of all parameters (a row).
        """
        mask = tuple(columns.overlaps(*span) for span in model.spans.values())
        names = tuple(name for name, needs_grad in zip(model.spans, mask) if needs_grad)
        size = sum(stop - start for name, (start, stop) in model.spans.items() if name in names)
        return cls(
            mask=mask,
            all_trained=columns.slices == model.trained.slices,
            names=names,
            are_complete=bool(names) and size == columns.size,
        )


@dataclass
class GradientRequest:
    """A request for the gradient of each client's loss sum_b weight[b] loss[b].

    Attributes:
        model: The model.
        task: The task, with the loss.
        rows: The rows of the clients.  Their running statistics are updated in place.  # [k, P]
        batch: One batch of every client.
        columns: The parameters to differentiate, as columns of a row.
        parameters: The parameters that overlap with the columns.
        new_gradient: Returns a tensor to write the gradient into.  # [k, P]
        dropout_keys: Key of each client, or None if the model has no dropout.  # [k]
        index: Index of this request among those of the local step.
        named: Replaces `model.named`, for example by a cached version.
    """

    model: FlatModel
    task: Task
    rows: Tensor
    batch: Batch
    columns: Columns
    parameters: DifferentiatedParameters
    new_gradient: Callable[[], Tensor]
    dropout_keys: Tensor | None = None
    index: int = 0
    named: Callable[[Tensor], dict[str, Tensor]] | None = None

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return parameters and running statistics of rows [k, P] by name, as views of the rows.  # [k, ...] each"""
        return (self.named or self.model.named)(rows)


class DirectGradients:
    """Computes each gradient when it is requested."""

    def free_memory(self) -> None:
        """Delete cached tensors, called when memory is exhausted.  This class caches none; GraphedGradients does."""

    def to_static_rows(self, rows: Tensor) -> Tensor:
        """Return the rows [K, P] of a chunk, which the training then changes in place.

        This class returns the rows themselves; GraphedGradients copies them to a buffer that its graphs use.
        """
        return rows

    def __call__(self, request: GradientRequest) -> tuple[Tensor, Tensor]:
        """Compute a gradient.

        Args:
            request: What to differentiate.

        Returns:
            The gradient [k, P], zero outside of the requested columns, and the losses [k].  The gradient is valid
            until the next local step.
        """
        if request.model.manual_backward is not None and request.parameters.are_complete:
            return _by_manual_backward(request)
        return _by_autograd(request)


def _by_manual_backward(request: GradientRequest) -> tuple[Tensor, Tensor]:
    """Compute a requested gradient by the model's manual backward pass, without autograd.

    Args:
        request: What to differentiate.

    Returns:
        The gradient [k, P] and the weighted losses of the clients [k].
    """
    gradient, model, names = request.new_gradient(), request.model, request.parameters.names
    # The pass does not write other columns: those that need no gradient, and those that a method added (extended).
    if len(names) < len(model.shapes) or model.extended:
        gradient.zero_()
    params, gradients = request.views(request.rows), request.views(gradient)
    out = {name: gradients[name] for name in names}
    return gradient, manual_gradient(model, request.task, params, request.batch, out)


def manual_gradient(
    model: FlatModel, task: Task, named: dict[str, Tensor], batch: Batch, out: dict[str, Tensor]
) -> Tensor:
    """Compute the gradient of each client's weighted batch loss by the manual backward pass.

    Args:
        model: A model with a manual backward pass.
        task: The task, with the loss.
        named: The parameters by name.  # [k, ...] each
        batch: One batch of every client.
        out: Tensors that receive the gradients, by name.  # [k, ...] each

    Returns:
        The losses.  # [k]
    """
    network, x, params = model.manual_backward, batch.x, named
    assert network is not None and isinstance(x, Tensor)
    batched = len(batch.weight) > 1  # unbatched kernels are faster for one client
    if not batched:
        params = {name: p[0] for name, p in named.items()}
        out = {name: gradient[0] for name, gradient in out.items()}
        x = x[0]
    params = model.forward_pass.with_frozen(params, batched)  # adds the frozen parameters
    logits, saved = network.forward(params, x, batched)  # saved: what the backward pass needs
    logits = logits if batched else logits[None]
    losses, logits_gradient = task.loss_and_gradient(logits, batch.y, batch.weight, batch.class_mask)
    network.backward(params, saved, logits_gradient if batched else logits_gradient[0], batched, out)
    return (losses.detach() * batch.weight).sum(1)


def differentiate(request: GradientRequest, losses_of: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
    """Compute a gradient by autograd.

    Args:
        request: What to differentiate.
        losses_of: Returns the losses of samples [k, B], which are weighted by the batch, or of clients [k].  Its
            argument are the flat parameters [k, n], in the order of `model.spans`.  Concatenated, they are the rows.

    Returns:
        The gradient [k, P] and the losses [k].
    """
    mask = request.parameters.mask  # whether each parameter is differentiated
    flat_parameters = request.rows.detach().split(request.model.sizes, dim=-1)
    leaves = [p.requires_grad_() if needs_grad else p for p, needs_grad in zip(flat_parameters, mask)]
    with torch.enable_grad():
        losses = losses_of(leaves)
        losses = (losses * request.batch.weight).sum(1) if losses.dim() == 2 else losses  # [k]
        differentiated = [p for p, needs_grad in zip(leaves, mask) if needs_grad]
        if losses.requires_grad:
            gradients = torch.autograd.grad(losses.sum(), differentiated, materialize_grads=True)
        else:
            gradients = tuple(torch.zeros_like(p) for p in differentiated)
    return _as_rows(request, gradients), losses.detach()


def _by_autograd(request: GradientRequest) -> tuple[Tensor, Tensor]:
    """Compute a requested gradient by autograd, and update the running statistics in its rows.

    Args:
        request: What to differentiate.

    Returns:
        The gradient [k, P] and the weighted losses of the clients [k].
    """
    leading_shape, model = request.rows.shape[:-1], request.model
    running_statistics: dict[str, Tensor] = {}

    def losses(leaves: list[Tensor]) -> Tensor:  # [k, B]
        params = {name: p.view(*leading_shape, *shape) for (name, shape), p in zip(model.shapes.items(), leaves)}
        logits, updated, extra_losses = training_pass(model, params, request.batch.x, request.dropout_keys)
        running_statistics.update(updated)
        task_losses = request.task.loss(logits, request.batch.y, request.batch.class_mask)
        return add_extra_losses(task_losses, extra_losses)

    gradient_and_losses = differentiate(request, losses)
    write_running_statistics(model, request.rows, running_statistics)
    return gradient_and_losses


def training_pass(
    model: FlatModel, params: dict[str, Tensor], x: Inputs, dropout_keys: Tensor | None, until: str | None = None
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Run a forward pass in training mode.

    Args:
        model: The model.
        params: The parameters and running statistics by name, which are not changed.  # [k, ...] each
        x: The inputs.  # [k, B, ...]
        dropout_keys: Key of each client, or None if the model has no dropout.  # [k]
        until: Name of a layer, such as "head".  Its input is returned instead of the logits.

    Returns:
        The logits [k, B, ...] or the input of the layer `until`, the updated running statistics by name [k, ...], and
        the additional losses of the module [k, B].

    Raises:
        ConfigError: A batch norm received a batch of one sample.
    """
    running_statistics = {name: params[name].detach().clone() for name in model.buffer_names}
    context = ForwardContext(train=True, keys=dropout_keys)
    try:
        logits = model.apply(params | running_statistics, x, batched=True, context=context, until=until)
    except ValueError as error:
        layer = running_layer(error)
        is_batch_norm = layer is not None and isinstance(layer[1], BatchNorm)
        require(not is_batch_norm or _batch_size(x) > 1, BATCH_OF_ONE)
        raise
    return logits, running_statistics, context.extra_losses


def _batch_size(x: Inputs) -> int:
    """Return B, the number of samples of each client in inputs [k, B, ...]."""
    return next(iter(wrap_inputs(x).values())).shape[1]


def add_extra_losses(losses: Tensor, extra_losses: Sequence[Tensor], weight: Tensor | None = None) -> Tensor:
    """Add the additional losses of a module.

    Args:
        losses: Losses of samples [k, B] or clients [k].
        extra_losses: The additional losses.  # [k, B] each
        weight: Weights of the samples, required for losses of clients.  # [k, B]

    Returns:
        The sum.  # [k, B] or [k]
    """
    for extra in extra_losses:
        losses = losses + (extra if losses.dim() == 2 or weight is None else (extra * weight).sum(1))
    return losses


def write_running_statistics(model: FlatModel, rows: Tensor, running_statistics: dict[str, Tensor]) -> None:
    """Write running statistics into their columns of rows, in place.

    Args:
        model: The model, which knows the columns.
        rows: The parameters of one model per client.  # [k, P]
        running_statistics: The new values by name.  # [k, ...] each
    """
    for name, value in running_statistics.items():
        start, stop = model.spans[name]
        rows.detach()[..., start:stop] = value.reshape(len(rows), -1)  # not recorded by autograd


def _as_rows(request: GradientRequest, gradients: Iterable[Tensor]) -> Tensor:
    """Return the gradient as rows.

    Args:
        request: The request, with the columns.
        gradients: Gradients of the parameters that need one, in the order of `model.spans`.  # [k, ...] each

    Returns:
        The rows, zero outside of the requested columns.  # [k, P]
    """
    out, model = request.new_gradient(), request.model
    if request.parameters.all_trained:  # the requested columns are all trained ones, which come first in a row
        num_trained = model.trained.size
        trained_out = out[:, :num_trained] if num_trained < out.shape[1] else out
        torch.cat([g.flatten(1) for g in gradients], dim=1, out=trained_out)
        out[:, num_trained:] = 0  # the buffer may contain other values
        return out
    out.zero_()
    remaining = iter(gradients)
    # first, end: the columns of a parameter, of which some may not be requested
    for (first, end), needs_grad in zip(model.spans.values(), request.parameters.mask):
        if needs_grad:
            gradient = next(remaining).flatten(1)  # [k, end - first]
            for start, stop in (request.columns & Columns([(first, end)])).slices:
                out[:, start:stop] = gradient[:, start - first : stop - first]
    return out
