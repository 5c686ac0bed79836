"""A module's forward pass on many parameter sets at once, written natively where that is known to pay.

`Program` is a module traced by torch.fx into a list of operations.  Each operation has two forms: for one
parameter set, the plain torch call; for k parameter sets, the batched one (a linear layer is one baddbmm, a
convolution one grouped convolution or, by choice, one copy and one bmm).  A module that uses anything outside the
table below is not traced: `FlatModel` then maps it with torch.vmap, slower but as general.  Both forms are pure
functions of their arguments, so that threads can share a Program.

Letters: k parameter sets (clients), B batch.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbench.core.options import ConfigError
from fedbench.core.private_torch import has_hooks
from fedbench.core.rng import RowRandom, key

Convolution = Literal["grouped", "unfold"]
CONVOLUTIONS: tuple[Convolution, ...] = get_args(Convolution)
LOW = torch.bfloat16  # what autocast computes in
ONEDNN_BLOCK = 16  # channels that oneDNN handles at once, at most
WINDOWS_BYTES = 256 << 20  # unfolded at a time, where no gradient needs them afterwards


@dataclass
class ForwardContext:
    """What an operation may need besides its input: train mode, the clients' keys for dropout, and how to convolve
    for many clients."""

    train: bool = False
    keys: Tensor | None = None  # [k] int64
    convolution: Convolution = "grouped"


Params = dict[str, Tensor]
Rule = Callable[[nn.Module, str, Params, Tensor, bool, ForwardContext], Tensor]


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
    flat = x if x.dim() == 3 else x.flatten(1, -2)  # [k, M, in]
    y = torch.bmm(flat, weight.transpose(1, 2)) if bias is None else _ManyLinear.apply(*as_autocast(flat, weight, bias))
    return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1])


def _conv2d(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    if not many:
        if x.device.type == "cpu":
            x = x.contiguous(memory_format=layout(weight, m.stride))
        return F.conv2d(x, weight, bias, m.stride, m.padding, m.dilation, m.groups)
    if context.convolution == "unfold" and unfolds(m):
        return _unfolded(m, x, weight, bias)
    k = len(x)
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


def layout(weight: Tensor, stride: Any) -> torch.memory_format:
    """The order of memory in which a convolution on a CPU should find its arguments.

    Channels last is 1.25 times as fast, and wrong for a pointwise convolution with a stride and few channels: oneDNN's
    gradient of its weight [out, C, 1, 1] then writes past its workspace (its issue 6035), which ends the process.
    """
    strided_pointwise = weight.shape[2:] == (1, 1) and max(stride) > 1
    few = weight.shape[1] < ONEDNN_BLOCK
    return torch.contiguous_format if strided_pointwise and few else torch.channels_last


def unfolds(m: nn.Conv2d) -> bool:
    """Whether convolution="unfold" covers this layer; the others stay grouped."""
    return m.groups == 1 and m.dilation == (1, 1)


def cut_windows(x: Tensor, m: nn.Conv2d) -> Tensor:
    """Every window of x [k, B, C, H, W] that a kernel of m meets, in one strided copy.  # [k, B, H', W', kh, kw, C]

    Channels come last, in memory also in what `convolve` makes of them: the runs copied are the longest (1.8 times as
    fast as pixels last, 5x5 on 32 channels, one CPU thread), and pooling is over ten times as fast.  F.unfold would
    be a launch for every image on CUDA.
    """
    (height, width), (down, right) = m.padding, m.stride  # type: ignore[misc]
    pixels = x.permute(0, 1, 3, 4, 2)  # [k, B, H, W, C]
    if height or width:
        pixels = F.pad(pixels, (0, 0, width, width, height, height))  # type: ignore[arg-type]
    windows = pixels.contiguous().unfold(2, m.kernel_size[0], down).unfold(3, m.kernel_size[1], right)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).contiguous()


def convolve(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """windows of `cut_windows`, weight [k, O, C, kh, kw], bias [k, O] -> [k, B, O, H', W']."""
    kernels = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # [k, kh * kw * C, O]
    flat = windows.flatten(4).flatten(1, 3)  # [k, B * H' * W', kh * kw * C]
    y = torch.bmm(flat, kernels) if bias is None else torch.baddbmm(bias[:, None], flat, kernels)
    return y.unflatten(1, windows.shape[1:4]).permute(0, 1, 4, 2, 3)


def _unfolded(m: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight, bias = as_autocast(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return convolve(cut_windows(x, m), weight, bias)
    image = x[:, 0].numel() * weight[0, 0, 0].numel() * x.element_size()  # its windows at stride 1
    some = max(1, WINDOWS_BYTES // max(1, image))
    parts = [convolve(cut_windows(part, m), weight, bias) for part in x.split(some, 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
    batch_statistics = context.train or mean is None
    if not many:
        return F.batch_norm(x, mean, var, weight, bias, batch_statistics, m.momentum or 0.0, m.eps)
    k, channels = len(x), x.shape[2]
    flat = [None if t is None else t.reshape(-1) for t in (mean, var, weight, bias)]  # of k * C channels
    y = F.batch_norm(
        x.transpose(0, 1).flatten(1, 2), flat[0], flat[1], flat[2], flat[3], batch_statistics, m.momentum or 0.0, m.eps
    )
    for statistic, updated in ((mean, flat[0]), (var, flat[1])):
        if context.train and statistic is not None and updated is not None:
            _write_back(updated, statistic)
    return y.unflatten(1, (k, channels)).transpose(0, 1)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple) -> Tensor:
    if weight is None:
        return y
    y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _group_norm(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if not many:
        return F.group_norm(x, m.num_groups, weight, bias, m.eps)
    y = F.group_norm(x.flatten(0, 1), m.num_groups, None, None, m.eps).view_as(x)
    return _affine(y, weight, bias, (len(x), 1, -1) + (1,) * (x.dim() - 3))


def _layer_norm(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if not many:
        return F.layer_norm(x, m.normalized_shape, weight, bias, m.eps)
    y = F.layer_norm(x, m.normalized_shape, None, None, m.eps)
    middle = (1,) * (x.dim() - 1 - len(m.normalized_shape))
    return _affine(y, weight, bias, (len(x), *middle, *m.normalized_shape))


def _per_image(m: nn.Module, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return m(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if many else m(x)


def _elementwise(m: nn.Module, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return m(x)


def _flatten(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    return x.flatten(2) if many else x.flatten(1)


def _dropout(m: Any, name: str, p: Params, x: Tensor, many: bool, context: ForwardContext) -> Tensor:
    if not context.train or m.p == 0:
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


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Flatten: _flatten,
    nn.Dropout: _dropout,
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), _per_image),
    **dict.fromkeys(
        (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity), _elementwise
    ),
}
POINTWISE = {
    operator.add,
    operator.sub,
    operator.mul,
    torch.add,
    torch.sub,
    torch.mul,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.relu,
    F.gelu,
    F.silu,
    F.tanh,
    F.sigmoid,
    F.leaky_relu,
    F.elu,
    F.softplus,
}
POINTWISE_METHODS = {"relu", "tanh", "sigmoid", "add", "mul", "sub"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or (
            super().is_leaf_module(m, module_qualified_name) and not isinstance(m, nn.Sequential)
        )


class Program:
    """The traced operations of a module.  `run` evaluates them for one or for many parameter sets."""

    def __init__(self, module: nn.Module, graph: fx.Graph):
        self.modules = dict(module.named_modules())
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.output = next(node for node in graph.nodes if node.op == "output").args[0]
        last = {read: node for node in self.nodes for read in node.all_input_nodes if read is not self.output}
        self.used_up = {node: [read for read, reader in last.items() if reader is node] for node in self.nodes}

    def run(
        self, params: Params, inputs: tuple[Tensor, ...], many: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """inputs [k, B, ...] and params [k, ...] each if many, else without k; until: stop before that module."""
        env: dict[fx.Node, Tensor] = dict(zip(self.inputs, inputs))
        for node in self.nodes:
            if node.op == "call_module" and node.target == until:
                return env[node.args[0]]  # type: ignore[index]
            env[node] = self._compute(node, env, params, many, context)
            for read in self.used_up[node]:  # an evaluation of masks would hold every layer's images at once
                del env[read]
        if until is not None:
            raise ConfigError(never_called(until))
        return env[self.output]  # type: ignore[index]

    def _compute(
        self, node: fx.Node, env: dict[fx.Node, Tensor], params: Params, many: bool, context: ForwardContext
    ) -> Tensor:
        """What a node makes of the results so far."""
        if node.op == "call_module":
            name = str(node.target)
            module = self.modules[name]
            return RULES[type(module)](module, name, params, env[node.args[0]], many, context)  # type: ignore[index]
        return self._function(node, [env[a] if isinstance(a, fx.Node) else a for a in node.args], many)

    @staticmethod
    def _function(node: fx.Node, args: list, many: bool) -> Tensor:
        if node.target in (torch.flatten, "flatten"):
            return args[0].flatten(2) if many else args[0].flatten(1)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **node.kwargs)
        return node.target(*args, **node.kwargs)  # type: ignore[operator]


def never_called(name: str) -> str:
    """The sentence for a model that has no layer of that name in its forward pass."""
    return (
        f"the model never calls a layer named {name!r}: methods that work on features need the last linear layer "
        "under that name"
    )


def trace(module: nn.Module) -> Program | None:
    """The module as a Program, or None when it does anything the table does not know."""
    if len(list(module.named_parameters())) < len(list(module.named_parameters(remove_duplicate=False))):
        return None  # tied parameters have one name in the row, two in the layers
    if has_hooks(module):
        return None  # code around a layer, spectral normalization for one, is in no graph
    try:
        twin = copy.deepcopy(module, {id(p): p for p in module.parameters()})  # tracing may write into buffers
        in_training, graph = _Tracer().trace(twin.train()), _Tracer().trace(twin.eval())
    except Exception:  # fx raises many kinds of error on data-dependent code; vmap is the answer to all
        return None
    if str(in_training) != str(graph):
        return None  # it asks whether it is in training, which a graph cannot
    program = Program(module, graph)
    return (
        program
        if all(_known(node, program) for node in program.nodes) and isinstance(program.output, fx.Node)
        else None
    )


def _known(node: fx.Node, program: Program) -> bool:
    if node.op == "call_module":
        module = program.modules[str(node.target)]
        plain = not isinstance(module, nn.Flatten) or (module.start_dim, module.end_dim) == (1, -1)
        images = not isinstance(module, nn.Conv2d) or (
            module.padding_mode == "zeros" and not isinstance(module.padding, str)
        )
        running = not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) or module.momentum is not None
        return type(module) in RULES and plain and images and running and len(node.args) == 1
    tensors_only = not any(isinstance(a, fx.Node) for a in node.kwargs.values())
    if node.target in (torch.flatten, "flatten"):
        return tuple(node.args[1:]) == (1,) and not node.kwargs
    if node.op == "call_function":
        return node.target in POINTWISE and tensors_only
    return node.op == "call_method" and node.target in POINTWISE_METHODS and tensors_only
