"""Batched operators: the forward pass of a kind of layer for the parameters of several clients at once.

An operator has two cases.  For the parameters of one client, it calls the usual torch function.  For those of k
clients, it calls a batched one: a linear layer is one `baddbmm`, a convolution is one grouped convolution.  The
parameters of a frozen layer are shared by all clients, whose samples then form one large batch.

Operators are pure functions, except that batch norms in training mode update running statistics in place.  Threads can
share them.

Letters: k clients, B batch size, C channels.
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

AUTOCAST_DTYPE = torch.bfloat16
ONEDNN_BLOCK = 16  # the largest number of channels that oneDNN, PyTorch's library for CPUs, processes at once

Params = dict[str, Tensor]
OutputHook = Callable[[Tensor, Params], Tensor]  # (output of a layer [B, ...], parameters) -> new output [B, ...]


@dataclass
class ForwardContext:
    """Options of a forward pass, and its results other than the logits.

    Attributes:
        train: Whether layers are in training mode, except for `eval_layers`.
        keys: Key of each client for dropout.  # [k] int64
        frozen: Names of the parameters and statistics that all clients share, without an axis k.
        eval_layers: Names of the layers that always stay in evaluation mode.
        hooks: Functions that change the output of a layer, by its name.
        recorded_layers: Names of the layers whose outputs are stored in `activations`.
        activations: Outputs of the recorded layers, by name.  # [B, ...] or [k, B, ...] each
        extra_losses: Additional losses of a module that returns (logits, loss).  # [B] or [k, B] each
    """

    train: bool = False
    keys: Tensor | None = None
    frozen: Collection[str] = ()
    eval_layers: Collection[str] = ()
    hooks: Mapping[str, OutputHook] = field(default_factory=dict)
    recorded_layers: Collection[str] = ()
    activations: dict[str, Tensor] = field(default_factory=dict)
    extra_losses: list[Tensor] = field(default_factory=list)

    @property
    def observes_layers(self) -> bool:
        """Whether layers need `process_output`: there are hooks, or outputs to record in `activations`."""
        return bool(self.hooks or self.recorded_layers)

    def process_output(self, name: str, y: Tensor, params: Params, batched: bool) -> Tensor:
        """Apply the hook of a layer, and record the result.

        Args:
            name: Name of the layer.
            y: Output of the layer.  # [B, ...], or [k, B, ...] if batched
            params: All parameters by name.
            batched: Whether tensors have an axis k of clients.

        Returns:
            The output for the next layer.
        """
        if name in self.hooks:
            # without frozen parameters, which all clients share: torch.vmap needs an axis k
            client_params = {n: p for n, p in params.items() if n not in self.frozen}
            hook = self.hooks[name]
            y = torch.vmap(hook)(y, client_params) if batched else hook(y, client_params)
        if name in self.recorded_layers:
            self.activations[name] = y
        return y


BATCH_OF_ONE = (
    "a batch of local training has one sample, from which a batch norm cannot compute statistics: set "
    "local.drop_last=true to drop a last batch of one sample, raise local.batch_size, or choose a model without batch "
    "norm"
)

# (layer, its name, parameters of all layers by name, input x, batched, context) -> output.  If batched, the input, the
# output and the parameters that are not frozen have a leading axis k of clients.  The operators below have no Args,
# because all have these.
Operator = Callable[[nn.Module, str, Params, Tensor, bool, ForwardContext], Tensor]


class _BatchedLinear(torch.autograd.Function):
    """A linear layer of several clients: x [k, M, in], weight [k, out, in], bias [k, out] -> [k, M, out].

    Its gradient of the weight has the memory layout of the weight.  Autograd's gradient of `baddbmm` would have the
    transposed layout and needs a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the loss with respect to x, weight and bias.

        Args:
            ctx: Context of torch.autograd, with x and weight.
            *grads: One tensor: the gradient with respect to the output.  # [k, M, out]

        Returns:
            (x [k, M, in], weight [k, out, in], bias [k, out]), each None if it is not needed.
        """
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if needs_x else None,
            torch.bmm(grad.transpose(1, 2), x) if needs_weight else None,
            grad.sum(1) if needs_bias else None,
        )


def _linear(layer: nn.Module, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.Linear: x [k, B, ..., in] -> [k, B, ..., out], without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.  layer itself is unused.
    """
    weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
    if not batched:
        return F.linear(x, weight, bias)
    if f"{name}.weight" in context.frozen:  # one matrix product for all clients
        shared_bias, client_bias = _split_bias(bias, f"{name}.bias", context)
        return _add_client_bias(F.linear(x, weight, shared_bias), client_bias, spatial_axes=0)
    bias = _expand_frozen(bias, f"{name}.bias", len(x), context)
    flat = x if x.dim() == 3 else x.flatten(1, -2)  # [k, M, in], M: all axes between k and in
    y = (
        torch.bmm(flat, weight.transpose(1, 2))
        if bias is None
        else _BatchedLinear.apply(*cast_for_autocast(flat, weight, bias))
    )
    return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1])


def _conv2d(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.Conv2d: x [k, B, C, H, W] -> [k, B, out, H', W'], without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.
    """
    weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
    if not batched:
        if x.device.type == "cpu":
            x = x.contiguous(memory_format=conv_memory_format(weight, layer.stride))  # the fastest safe one
        return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    k = len(x)
    if f"{name}.weight" in context.frozen:  # one batch of all clients' samples
        shared_bias, client_bias = _split_bias(bias, f"{name}.bias", context)
        shared = {f"{name}.weight": weight}
        if shared_bias is not None:
            shared[f"{name}.bias"] = shared_bias
        y = _conv2d(layer, name, shared, x.flatten(0, 1), batched=False, context=context).unflatten(0, (k, -1))
        return _add_client_bias(y, client_bias, spatial_axes=2)
    bias = _expand_frozen(bias, f"{name}.bias", k, context)
    # one convolution in groups: the channels of a client are convolved with its weight only
    clients_as_channels = x.transpose(0, 1).flatten(1, 2)  # [B, k * C, H, W]
    y = F.conv2d(
        clients_as_channels,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        k * layer.groups,
    )
    return y.unflatten(1, (k, -1)).transpose(0, 1)  # [k, B, out, H', W']


def _conv_transpose2d(
    layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext
) -> Tensor:
    """Compute nn.ConvTranspose2d: x [k, B, C, H, W] -> [k, B, out, H', W'], without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.
    """
    weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")  # [in, out / groups, kh, kw]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        return F.conv_transpose2d(
            x, weight, bias, layer.stride, layer.padding, layer.output_padding, groups, layer.dilation
        )

    if not batched:
        return convolve(x, weight, bias, layer.groups)
    k = len(x)
    if f"{name}.weight" in context.frozen:
        shared_bias, client_bias = _split_bias(bias, f"{name}.bias", context)
        y = convolve(x.flatten(0, 1), weight, shared_bias, layer.groups).unflatten(0, (k, -1))
        return _add_client_bias(y, client_bias, spatial_axes=2)
    bias = _expand_frozen(bias, f"{name}.bias", k, context)
    # one convolution in groups: the channels of a client are convolved with its weight only
    clients_as_channels = x.transpose(0, 1).flatten(1, 2)  # [B, k * C, H, W]
    y = convolve(clients_as_channels, weight.flatten(0, 1), None if bias is None else bias.flatten(), k * layer.groups)
    return y.unflatten(1, (k, -1)).transpose(0, 1)


def _split_bias(bias: Tensor | None, name: str, context: ForwardContext) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias of a layer with a frozen weight as (shared bias [C], bias of each client [k, C]).

    One of them is None: the second if the bias is frozen, else the first.  Both are None for a layer without a bias.
    """
    return (bias, None) if name in context.frozen else (None, bias)


def _add_client_bias(y: Tensor, bias: Tensor | None, spatial_axes: int) -> Tensor:
    """Add each client's bias to the output of a layer.

    Args:
        y: The output.  # [k, B, ..., C, *spatial axes]
        bias: The bias, or None.  # [k, C]
        spatial_axes: Number of axes after the channels: 2 for images, 0 for a linear layer.
    """
    if bias is None:
        return y
    return y + bias.view(len(y), *(1,) * (y.dim() - 2 - spatial_axes), -1, *(1,) * spatial_axes)


def _expand_frozen(t: Tensor | None, name: str, k: int, context: ForwardContext) -> Tensor | None:
    """Return a parameter with an axis k.

    Args:
        t: The parameter [k, ...], or [...] if it is frozen and so shared by all clients.  None is returned as None.
        name: Its name.
        k: Number of clients.
        context: Its names of frozen parameters are used.
    """
    return t.expand(k, *t.shape) if t is not None and name in context.frozen else t


def conv_memory_format(weight: Tensor, stride: Any) -> torch.memory_format:
    """Return the memory format of the arguments of a convolution on a CPU.

    Channels last is faster.  It is unsafe for a pointwise convolution with a stride and few channels: oneDNN's gradient
    of such a weight [out, C, 1, 1] writes outside of its memory (oneDNN issue 6035).

    Args:
        weight: The weight.  # [out, C, kh, kw]
        stride: The strides of both axes.

    Returns:
        channels_last, or contiguous_format where it is unsafe.
    """
    is_strided_pointwise = weight.shape[2:] == (1, 1) and max(stride) > 1
    has_few_channels = weight.shape[1] < ONEDNN_BLOCK  # 16
    return torch.contiguous_format if is_strided_pointwise and has_few_channels else torch.channels_last


def cast_for_autocast(*tensors: Any) -> Any:
    """Cast tensors (or None) to bfloat16 if autocast is on for their device, for custom autograd functions.

    Autocast itself does not cast their arguments.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [t if t is None else t.to(AUTOCAST_DTYPE) for t in tensors]


def _write_back(reshaped: Tensor, statistic: Tensor) -> None:
    """Copy updated running statistics back to the tensor from which they were reshaped.

    Nothing is copied if both share memory, because `reshape` then returned a view.

    Args:
        reshaped: The updated statistics.  # [k * C]
        statistic: The tensor from which they were reshaped, which is changed.  # [k, C]
    """
    if reshaped.data_ptr() != statistic.data_ptr():
        statistic.copy_(reshaped.view_as(statistic))


def _batch_norm(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.BatchNorm1d or 2d of x [k, B, C, ...], without k if not batched.

    params has the parameters and running statistics of all layers by name: [k, ...] each, or [...] if not batched, or
    if the name is in context.frozen, because all clients share it.  In training mode, the running statistics are
    updated in place.
    """
    mean, var = params.get(f"{name}.running_mean"), params.get(f"{name}.running_var")
    weight, bias = params.get(f"{name}.weight"), params.get(f"{name}.bias")
    is_frozen = f"{name}.running_mean" in context.frozen  # a frozen norm is in evaluation mode
    batch_statistics = (context.train and not is_frozen) or mean is None  # None: the norm has no running statistics
    channel_axis = 2 if batched else 1
    values_per_channel = x.shape[channel_axis - 1] * x.shape[channel_axis + 1 :].numel()  # of one client
    require(values_per_channel != 1 or not batch_statistics, BATCH_OF_ONE)  # one value has no variance
    # momentum: of the running statistics; FlatModel refuses norms in which it is None
    if not batched:
        return F.batch_norm(x, mean, var, weight, bias, batch_statistics, layer.momentum or 0.0, layer.eps)
    k, channels = len(x), x.shape[2]
    if is_frozen:
        y = F.batch_norm(x.flatten(0, 1), mean, var, weight, bias, training=False, momentum=0.0, eps=layer.eps)
        return y.unflatten(0, (k, -1))
    weight, bias = (_expand_frozen(t, f"{name}.{n}", k, context) for n, t in (("weight", weight), ("bias", bias)))
    flat_mean, flat_var, flat_weight, flat_bias = (
        None if t is None else t.reshape(-1)
        for t in (mean, var, weight, bias)  # [k * C] each
    )
    clients_as_channels = x.transpose(0, 1).flatten(1, 2)  # [B, k * C, ...]
    y = F.batch_norm(
        clients_as_channels,
        flat_mean,
        flat_var,
        flat_weight,
        flat_bias,
        batch_statistics,
        layer.momentum or 0.0,
        layer.eps,
    )
    for statistic, updated in ((mean, flat_mean), (var, flat_var)):
        if context.train and statistic is not None and updated is not None:
            _write_back(updated, statistic)  # if reshape(-1) above has made a copy
    return y.unflatten(1, (k, channels)).transpose(0, 1)


def _affine(
    y: Tensor, name: str, weight: Tensor | None, bias: Tensor | None, shape: tuple, context: ForwardContext
) -> Tensor:
    """Return y times weight plus bias.

    Args:
        y: The normalized values.  # [k, B, ...]
        name: Name of the layer.
        weight: The weight, or None: [k, C], or [C] if it is frozen.
        bias: The bias, in the same form.
        shape: Shape to which the parameters of one client are reshaped, so that they are broadcast against y[i].
        context: Its names of frozen parameters are used.

    Returns:
        The values.  # [k, B, ...]
    """
    for t, kind in ((weight, "weight"), (bias, "bias")):
        if t is not None:
            t = t.view(1 if f"{name}.{kind}" in context.frozen else len(y), *shape)
            y = y * t if kind == "weight" else y + t
    return y


def _group_norm(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.GroupNorm: x [k, B, C, ...] -> normalized values of the same shape, without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.
    """
    weight, bias = params.get(f"{name}.weight"), params.get(f"{name}.bias")
    if not batched:
        return F.group_norm(x, layer.num_groups, weight, bias, layer.eps)
    y = F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps).view_as(x)  # weight and bias come after
    return _affine(y, name, weight, bias, (1, -1) + (1,) * (x.dim() - 3), context)


def _layer_norm(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.LayerNorm: x [k, B, ..., *normalized_shape] -> the same shape, without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.
    """
    weight, bias = params.get(f"{name}.weight"), params.get(f"{name}.bias")
    if not batched:
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    if f"{name}.weight" in context.frozen and (bias is None or f"{name}.bias" in context.frozen):
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)  # weight and bias of each client come after
    other_axes = (1,) * (x.dim() - 1 - len(layer.normalized_shape))
    return _affine(y, name, weight, bias, (*other_axes, *layer.normalized_shape), context)


def _embedding(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.Embedding: int64 tokens x [k, B, ...] -> vectors [k, B, ..., E], without k if not batched.

    params has the parameters of all layers by name: [k, ...] each, or [...] if not batched, or if the name is in
    context.frozen, because all clients share it.  layer itself is unused: layers with padding_idx, max_norm or other
    special options (`has_default_options`) are not computed by this operator.
    """
    weight = params[f"{name}.weight"]
    if not batched or f"{name}.weight" in context.frozen:
        return F.embedding(x, weight)
    k, num_embeddings = weight.shape[:2]
    # One lookup in a table of all clients' embeddings, [k * num_embeddings, E], of client i from offsets[i] on.
    offsets = num_embeddings * torch.arange(k, device=x.device)  # [k]
    return F.embedding(x + offsets.view(k, *(1,) * (x.dim() - 1)), weight.flatten(0, 1))


def has_default_options(layer: nn.Embedding) -> bool:
    """Return whether an embedding has PyTorch's default options: no padding_idx, max_norm or special gradients."""
    return layer.padding_idx is None and layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def _per_image(
    layer: nn.Module, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext
) -> Tensor:
    """Compute a layer without parameters, such as nn.MaxPool2d, for images x [k, B, C, H, W], without k if not batched.

    Such a layer accepts only one batch axis, so the images of all clients are passed as one batch.  As the layer has no
    parameters, name, params and context are not used.
    """
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if batched else layer(x)


def _elementwise(
    layer: nn.Module, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext
) -> Tensor:
    """Compute a layer without parameters that treats each value by itself, such as nn.ReLU, for x of any shape.

    Name, params, batched and context are not used.
    """
    return layer(x)


def _flatten(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.Flatten: x [k, B, ...] -> [k, B, values per sample], without k if not batched.

    Name, params and context are not used.
    """
    return x.flatten(2) if batched else x.flatten(1)


def _dropout(layer: Any, name: str, params: Params, x: Tensor, batched: bool, context: ForwardContext) -> Tensor:
    """Compute nn.Dropout: x [k, B, ...] -> the same shape, without k if not batched; x itself in evaluation mode.

    The mask of each client depends only on its key (context.keys) and the name of the layer.  Without keys, all clients
    have the key 0.  params is unused, because the layer has no parameters.
    """
    if not context.train or layer.p == 0 or name in context.eval_layers:
        return x
    keys = context.keys if context.keys is not None else torch.zeros(1, dtype=torch.int64, device=x.device)
    # Keys are int64, so the unsigned 64-bit key of the layer is shifted by one bit.
    uniform = RowRandom(keys ^ (key("dropout", name) >> 1)).uniform(*(x.shape[1:] if batched else x.shape))
    is_kept = (uniform if batched else uniform[0]) >= layer.p  # without k, the numbers are [1, B, ...]
    return x * is_kept / (1 - layer.p)


class ClientDropout(nn.Module):
    """Dropout with random numbers of one client.  It replaces nn.Dropout in modules that torch.vmap computes.

    Args:
        p: Probability that a value becomes 0.
        name: Name of the layer, which is part of the key.

    Attributes:
        key: Key of the client, set before each forward pass.  # [] int64
    """

    def __init__(self, p: float, name: str):
        super().__init__()
        self.p, self.name = p, name
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, ...] with about a fraction p of its values set to 0, and the others divided by 1 - p.

        The zeros depend on the client's key and the name of the layer; without a key, on the name.  In evaluation mode
        return x itself.
        """
        keys = None if self.key is None else self.key[None]  # [1]
        return _dropout(self, self.name, params={}, x=x, batched=False, context=ForwardContext(self.training, keys))


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
