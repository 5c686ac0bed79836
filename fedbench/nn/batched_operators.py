"""A layer's forward pass on many parameter sets at once: one operator for every kind of layer in a traced graph.

Each operator has two forms: for one parameter set, the plain torch call; for k parameter sets, the batched one (a
linear layer is one baddbmm, a convolution one grouped convolution).  A layer that is
frozen has one parameter set for all clients, who are then part of the batch: it is never multiplied by k.  All are pure
functions of their arguments, so that threads can share them.

Letters: k parameter sets (clients), B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import require
from fedbench.core.rng import RowRandom, key

LOW = torch.bfloat16  # what autocast computes in
ONEDNN_BLOCK = 16  # channels that oneDNN handles at once, at most

Params = dict[str, Tensor]
Tap = Callable[[Tensor, Params], Tensor]  # (a layer's output [B, ...], a client's row by name) -> what goes on [B, ...]


@dataclass
class ForwardContext:
    """What an operation may need besides its input, and what a pass leaves beside its logits.

    train: training mode, of all layers but the `resting` ones.  keys [k] int64: of the clients' dropout.  frozen:
    names of parameters and statistics that are one for all, without an axis k.  taps: by layer, what changes its
    output.  wanted: layers whose outputs are to be left in `captured` ([k, B, ...] if many).
    extra_losses: what a module that returns (logits, extra loss [B]) has left, [k, B] if many.
    """

    train: bool = False
    keys: Tensor | None = None
    frozen: Collection[str] = ()
    resting: Collection[str] = ()
    taps: Mapping[str, Tap] = field(default_factory=dict)
    wanted: Collection[str] = ()
    captured: dict[str, Tensor] = field(default_factory=dict)
    extra_losses: list[Tensor] = field(default_factory=list)

    @property
    def looks(self) -> bool:
        """Whether anything looks at the outputs of single layers."""
        return bool(self.taps or self.wanted)

    def passed(self, name: str, y: Tensor, params: Params, many: bool) -> Tensor:
        """The output of a layer as those behind it see it: tapped, and captured where it is wanted."""
        if name in self.taps:
            row = {n: p for n, p in params.items() if n not in self.frozen}
            y = torch.vmap(self.taps[name])(y, row) if many else self.taps[name](y, row)
        if name in self.wanted:
            self.captured[name] = y
        return y


BATCH_OF_ONE = (
    "a batch of one sample has no statistics for the model's batch norm: local.drop_last=true leaves out a last batch "
    "of one; if it is set, local.batch_size is 1 or a client has one sample: take a larger local.batch_size, clients "
    "with more samples, or another norm"
)
Operator = Callable[[nn.Module, str, Params, Tensor, bool, ForwardContext], Tensor]


class _ManyLinear(torch.autograd.Function):
    """x [k, M, in], weight [k, out, in], bias [k, out] -> [k, M, out].

    baddbmm whose gradient of the weight comes out in the weight's own layout: 1.2 (20 clients) to 1.5 times (100)
    as fast as autograd's, a step of the 64-64-10 network on a CPU, since nothing is copied across strides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight), needs = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), x) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
        )


def _linear(m: nn.Module, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    if not many:
        return F.linear(x, weight, bias)
    if f"{name}.weight" in context.frozen:  # one large product for all clients
        shared, own = _split_bias(bias, f"{name}.bias", context)
        return _plus(F.linear(x, weight, shared), own, 0)
    bias = _for_each(bias, f"{name}.bias", len(x), context)
    flat = x if x.dim() == 3 else x.flatten(1, -2)  # [k, M, in]
    y = torch.bmm(flat, weight.transpose(1, 2)) if bias is None else _ManyLinear.apply(*as_autocast(flat, weight, bias))
    return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1])


def _conv2d(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    if not many:
        if x.device.type == "cpu":
            x = x.contiguous(memory_format=layout(weight, m.stride))
        return F.conv2d(x, weight, bias, m.stride, m.padding, m.dilation, m.groups)
    k = len(x)
    if f"{name}.weight" in context.frozen:  # clients are part of the batch
        shared, own = _split_bias(bias, f"{name}.bias", context)
        parameters = (
            {f"{name}.weight": weight} if shared is None else {f"{name}.weight": weight, f"{name}.bias": shared}
        )
        return _plus(_conv2d(m, name, parameters, x.flatten(0, 1), False, context).unflatten(0, (k, -1)), own, 2)
    bias = _for_each(bias, f"{name}.bias", k, context)
    side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, k * C, H, W]
    y = F.conv2d(
        side_by_side,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        m.stride,
        m.padding,
        m.dilation,
        k * m.groups,
    )
    return y.unflatten(1, (k, -1)).transpose(0, 1)  # [k, B, out, H', W']


def _conv_transpose2d(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")  # [in, out / groups, kh, kw]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        return F.conv_transpose2d(x, weight, bias, m.stride, m.padding, m.output_padding, groups, m.dilation)

    if not many:
        return plain(x, weight, bias, m.groups)
    k = len(x)
    if f"{name}.weight" in context.frozen:
        shared, own = _split_bias(bias, f"{name}.bias", context)
        return _plus(plain(x.flatten(0, 1), weight, shared, m.groups).unflatten(0, (k, -1)), own, 2)
    bias = _for_each(bias, f"{name}.bias", k, context)
    side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, k * C, H, W]
    y = plain(side_by_side, weight.flatten(0, 1), None if bias is None else bias.flatten(), k * m.groups)
    return y.unflatten(1, (k, -1)).transpose(0, 1)


def _split_bias(bias: Tensor | None, name: str, context: ForwardContext) -> tuple[Tensor | None, Tensor | None]:
    """The bias of a layer whose weight is frozen, as one for all [C], or as each client's own [k, C]."""
    return (bias, None) if name in context.frozen else (None, bias)


def _plus(y: Tensor, bias: Tensor | None, after: int) -> Tensor:
    """y [k, B, ..., C, *after axes] with each client's bias [k, C] added to its channels."""
    return y if bias is None else y + bias.view(len(y), *(1,) * (y.dim() - 2 - after), -1, *(1,) * after)


def _for_each(t: Tensor | None, name: str, k: int, context: ForwardContext) -> Tensor | None:
    """A parameter of a layer that is not frozen as a whole, with an axis k whether it is frozen itself or not."""
    return t.expand(k, *t.shape) if t is not None and name in context.frozen else t


def layout(weight: Tensor, stride: Any) -> torch.memory_format:
    """The order of memory in which a convolution on a CPU should find its arguments.

    Channels last is 1.25 times as fast, and wrong for a pointwise convolution with a stride and few channels: oneDNN's
    gradient of its weight [out, C, 1, 1] then writes past its workspace (its issue 6035), which ends the process.
    """
    strided_pointwise = weight.shape[2:] == (1, 1) and max(stride) > 1
    few = weight.shape[1] < ONEDNN_BLOCK
    return torch.contiguous_format if strided_pointwise and few else torch.channels_last


def as_autocast(*tensors: Any) -> Any:
    """Tensors (or None) in the precision of torch.autocast, for operations that it does not know."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [t if t is None else t.to(LOW) for t in tensors]


def _write_back(flat: Tensor, statistic: Tensor) -> None:
    """Copy what was reshaped for a kernel to where it came from, unless it is a view of that."""
    if flat.data_ptr() != statistic.data_ptr():
        statistic.copy_(flat.view_as(statistic))


def _batch_norm(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    mean, var = p.get(f"{name}.running_mean"), p.get(f"{name}.running_var")
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    is_frozen = f"{name}.running_mean" in context.frozen  # then it is in evaluation mode, and the same for all
    batch_statistics = (context.train and not is_frozen) or mean is None
    axis = 2 if many else 1  # of channels
    values = x.shape[axis - 1] * x.shape[axis + 1 :].numel()  # per client and channel
    require(values != 1 or not batch_statistics, BATCH_OF_ONE)
    if not many:
        return F.batch_norm(x, mean, var, weight, bias, batch_statistics, m.momentum or 0.0, m.eps)
    k, channels = len(x), x.shape[2]
    if is_frozen:
        return F.batch_norm(x.flatten(0, 1), mean, var, weight, bias, False, 0.0, m.eps).unflatten(0, (k, -1))
    weight, bias = (_for_each(t, f"{name}.{n}", k, context) for n, t in (("weight", weight), ("bias", bias)))
    flat = [None if t is None else t.reshape(-1) for t in (mean, var, weight, bias)]  # of k * C channels
    y = F.batch_norm(
        x.transpose(0, 1).flatten(1, 2), flat[0], flat[1], flat[2], flat[3], batch_statistics, m.momentum or 0.0, m.eps
    )
    for statistic, updated in ((mean, flat[0]), (var, flat[1])):
        if context.train and statistic is not None and updated is not None:
            _write_back(updated, statistic)
    return y.unflatten(1, (k, channels)).transpose(0, 1)


def _affine(
    y: Tensor, name: str, weight: Tensor | None, bias: Tensor | None, shape: tuple, context: ForwardContext
) -> Tensor:
    """y times weight plus bias, each of shape (k, ...), or, frozen, (1, ...)."""
    for t, kind in ((weight, "weight"), (bias, "bias")):
        if t is not None:
            t = t.view(1 if f"{name}.{kind}" in context.frozen else len(y), *shape)
            y = y * t if kind == "weight" else y + t
    return y


def _group_norm(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if not many:
        return F.group_norm(x, m.num_groups, weight, bias, m.eps)
    y = F.group_norm(x.flatten(0, 1), m.num_groups, None, None, m.eps).view_as(x)
    return _affine(y, name, weight, bias, (1, -1) + (1,) * (x.dim() - 3), context)


def _layer_norm(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if not many:
        return F.layer_norm(x, m.normalized_shape, weight, bias, m.eps)
    if f"{name}.weight" in context.frozen and (bias is None or f"{name}.bias" in context.frozen):
        return F.layer_norm(x, m.normalized_shape, weight, bias, m.eps)
    y = F.layer_norm(x, m.normalized_shape, None, None, m.eps)
    middle = (1,) * (x.dim() - 1 - len(m.normalized_shape))
    return _affine(y, name, weight, bias, (*middle, *m.normalized_shape), context)


def _embedding(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight = p[f"{name}.weight"]
    if not many or f"{name}.weight" in context.frozen:
        return F.embedding(x, weight)
    k, entries = weight.shape[:2]  # one table of all clients' entries
    first = entries * torch.arange(k, device=x.device)
    return F.embedding(x + first.view(k, *(1,) * (x.dim() - 1)), weight.flatten(0, 1))


def is_plain_table(m: nn.Embedding) -> bool:
    """Whether an embedding does nothing but look up, and its gradient is that of all its entries."""
    return m.padding_idx is None and m.max_norm is None and not m.scale_grad_by_freq and not m.sparse


def _per_image(m: nn.Module, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return m(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if many else m(x)


def _elementwise(m: nn.Module, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return m(x)


def _flatten(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return x.flatten(2) if many else x.flatten(1)


def _dropout(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    if not context.train or m.p == 0 or name in context.resting:
        return x
    keys = context.keys if context.keys is not None else torch.zeros(1, dtype=torch.int64, device=x.device)
    draw = RowRandom(keys ^ (key("dropout", name) >> 1)).uniform(*(x.shape[1:] if many else x.shape))
    stays = (draw if many else draw[0]) >= m.p
    return x * stays / (1 - m.p)


class KeyedDropout(nn.Module):
    """What a mapped module has in place of nn.Dropout: `_dropout` with a key that is set before the forward pass."""

    def __init__(self, p: float, name: str):
        super().__init__()
        self.p, self.name = p, name
        self.key: Tensor | None = None  # int64, one client's

    def forward(self, x: Tensor) -> Tensor:
        """x with some numbers 0 and the others scaled, in training."""
        keys = None if self.key is None else self.key[None]
        return _dropout(self, self.name, {}, x, False, ForwardContext(self.training, keys))


OPERATORS: dict[type[nn.Module], Operator] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.ConvTranspose2d: _conv_transpose2d,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.Flatten: _flatten,
    nn.Dropout: _dropout,
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample), _per_image),
    **dict.fromkeys(
        (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity), _elementwise
    ),
}
