"""The gradient of a step's batch losses: what is requested, and the direct way to compute it.

`DirectGradients` computes a request at once: by a plain chain's own backward pass where there is one, else by autograd.
`GraphedGradients` (cuda_graphs.py) replays the same operations as CUDA graphs.  Both give the same rows; the executor
has one of them.

Running statistics (the float buffers of BatchNorm) are columns of a row too.  A pass in training mode updates them, but
autograd does not allow that in place: it updates copies, which are then written into the row.

Letters: k clients still training, K of the chunk, P numbers of a row, B batch.
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
    """Which of a model's parameters need a gradient so that some columns of the rows have theirs.

    mask: for each parameter, whether it does; names: of those that do.  all_trained: the columns are all that learn.
    complete: the columns are these parameters and nothing less, none is cut in two.
    """

    mask: tuple[bool, ...]
    all_trained: bool
    names: tuple[str, ...]
    complete: bool

    @classmethod
    def of(cls, model: FlatModel, columns: Columns) -> DifferentiatedParameters:
        """The parameters that have numbers in these (trained) columns."""
        mask = tuple(columns.overlaps(*span) for span in model.spans.values())
        names = tuple(name for name, wanted in zip(model.spans, mask) if wanted)
        size = sum(b - a for name, (a, b) in model.spans.items() if name in names)
        return cls(mask, columns.slices == model.trained.slices, names, bool(names) and size == columns.size)


@dataclass
class GradientRequest:
    """The gradient of sum_b weight[b] loss[b] of every client at its row, in some columns.

    rows [k, P]: their running statistics are updated in place.  parameters: those that have numbers in `columns`.
    new_gradient() gives [k, P] to write into.  dropout_keys [k]: seeds, or None.  number: how many gradients this step
    asked for before.  named: model.named, or something that remembers what it gave.
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
        """Views of rows [k, P] by parameter name."""
        return (self.named or self.model.named)(rows)


class DirectGradients:
    """Every gradient when it is requested, by the model's chain or by autograd."""

    def free_memory(self) -> None:
        """Give back what is held for later requests."""

    def to_static_rows(self, rows: Tensor) -> Tensor:
        """Return a chunk's rows [K, P] where they are to lie while it trains."""
        return rows

    def __call__(self, request: GradientRequest) -> tuple[Tensor, Tensor]:
        """The gradient [k, P], zero outside the columns, valid until the next step; the losses [k]."""
        if request.model.manual_backward is not None and request.parameters.complete:
            return _by_chain(request)
        return _by_autograd(request)


def _by_chain(request: GradientRequest) -> tuple[Tensor, Tensor]:
    gradient, model, names = request.new_gradient(), request.model, request.parameters.names
    if len(names) < len(model.shapes) or model.extended:  # extras are no part of the chain
        gradient.zero_()
    params, grads = request.views(request.rows), request.views(gradient)
    out = {name: grads[name] for name in names}
    return gradient, manual_gradient(model, request.task, params, request.batch, out)


def manual_gradient(
    model: FlatModel, task: Task, named: dict[str, Tensor], batch: Batch, out: dict[str, Tensor]
) -> Tensor:
    """Fill out with the gradient of each client's weighted batch loss; returns the losses.  # [k]

    named, out: parameters and their gradients by name, [k, ...] each.  One client takes the plain, unbatched kernels.
    """
    batched = len(batch.weight) > 1
    x, params = batch.x, named
    if not batched:
        params, x, out = {n: p[0] for n, p in named.items()}, x[0], {n: o[0] for n, o in out.items()}  # type: ignore
    assert model.manual_backward is not None and isinstance(x, Tensor)
    params = model.forward_pass.with_frozen(params, batched)
    logits, tape = model.manual_backward.forward(params, x, batched)
    logits = logits if batched else logits[None]
    losses, grad = task.loss_and_gradient(logits, batch.y, batch.weight, batch.class_mask)
    model.manual_backward.backward(params, tape, grad if batched else grad[0], batched, out)
    return (losses.detach() * batch.weight).sum(1)


def differentiate(request: GradientRequest, losses_of: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient [k, P] and value [k] of losses_of(leaves), per sample [k, B] or per client [k].

    leaves: the rows, parameter by parameter [k, n], of which those of the request are differentiated.
    """
    mask = request.parameters.mask
    parts = request.rows.detach().split(request.model.sizes, dim=-1)
    leaves = [p.requires_grad_() if wanted else p for p, wanted in zip(parts, mask)]
    with torch.enable_grad():
        losses = losses_of(leaves)
        losses = (losses * request.batch.weight).sum(1) if losses.dim() == 2 else losses  # [k]
        learning = [p for p, wanted in zip(leaves, mask) if wanted]
        grads = (
            torch.autograd.grad(losses.sum(), learning, materialize_grads=True)
            if losses.requires_grad
            else tuple(torch.zeros_like(p) for p in learning)
        )
    return _as_rows(request, grads), losses.detach()


def _by_autograd(request: GradientRequest) -> tuple[Tensor, Tensor]:
    lead, model = request.rows.shape[:-1], request.model
    statistics: dict[str, Tensor] = {}

    def losses(leaves: list[Tensor]) -> Tensor:  # [k, B]
        params = {name: p.view(*lead, *shape) for (name, shape), p in zip(model.shapes.items(), leaves)}
        logits, updated, extra = training_pass(model, params, request.batch.x, request.dropout_keys)
        statistics.update(updated)
        return add_extra_losses(request.task.loss(logits, request.batch.y, request.batch.class_mask), extra)

    gradient_and_losses = differentiate(request, losses)
    write_running_statistics(model, request.rows, statistics)
    return gradient_and_losses


def training_pass(
    model: FlatModel, params: dict[str, Tensor], x: Inputs, dropout_keys: Tensor | None, until: str | None = None
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Logits (until="head": features) in training mode, the running statistics as the pass has updated them, and the
    extra losses [k, B] of a module that has some.

    The statistics are copies of those in params, by name.
    """
    statistics = {name: params[name].detach().clone() for name in model.buffer_names}
    context = ForwardContext(True, dropout_keys)
    try:
        logits = model.apply(params | statistics, x, True, context, until)
    except ValueError as error:
        layer = running_layer(error)
        is_norm = layer is not None and isinstance(layer[1], BatchNorm)
        require(not is_norm or _batch_size(x) > 1, BATCH_OF_ONE)
        raise
    return logits, statistics, context.extra_losses


def _batch_size(x: Inputs) -> int:
    return next(iter(wrap_inputs(x).values())).shape[1]


def add_extra_losses(losses: Tensor, extra: Sequence[Tensor], weight: Tensor | None = None) -> Tensor:
    """Losses with the extra ones [k, B] of the module added: per sample [k, B], or per client [k], of samples of these
    weights [k, B]."""
    for e in extra:
        losses = losses + (e if losses.dim() == 2 or weight is None else (e * weight).sum(1))
    return losses


def write_running_statistics(model: FlatModel, rows: Tensor, statistics: dict[str, Tensor]) -> None:
    """Write running statistics [k, ...], by name, into their columns of the rows [k, P]."""
    for name, value in statistics.items():
        a, b = model.spans[name]
        rows.detach()[..., a:b] = value.reshape(len(rows), -1)


def _as_rows(request: GradientRequest, grads: Iterable[Tensor]) -> Tensor:
    """The gradients of the request's parameters as one tensor, zero outside its columns.  # [k, P]"""
    out, model = request.new_gradient(), request.model
    if request.parameters.all_trained:
        learns = model.trained.size
        torch.cat([g.flatten(1) for g in grads], dim=1, out=out[:, :learns] if learns < out.shape[1] else out)
        out[:, learns:] = 0  # a method may have written there
        return out
    out.zero_()
    of_wanted = iter(grads)
    for (a, b), wanted in zip(model.spans.values(), request.parameters.mask):
        if wanted:
            g = next(of_wanted).flatten(1)
            for c, d in (request.columns & Columns([(a, b)])).slices:
                out[:, c:d] = g[:, c - a : d - a]
    return out
