"""The gradient of a plain feed-forward chain, written out: no autograd graph, and results go straight into the rows.

Most federated models are chains of linear, convolution, ReLU, pooling and flatten operations.  For these the
backward pass is a handful of known products, and autograd's bookkeeping (and a copy of every gradient into its
row) is what small steps pay for.  Measured on one thread, images/s of whole rounds against autograd on the same
Program, 64-64-10 network: 1.9 times with 20 ragged clients, 1.5 times with 100 clients of 20 samples.  Pooling before
ReLU, its gradient in its input's order of memory: 1.04 times for FedAvgCNN in batches of 10, 1.06 in batches of 64.
Large weights times the samples, not the samples times them, and a convolution's weights turned once: 1.02 and 1.00 to
1.02 times.

Linear layers and ReLU alone are a chain too, which flat inputs need not be flattened for.  `Chain.of(program)` is None
for anything else (branches, norms, dropout, a layer used twice): autograd then.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbench.nn.batched_operators import LOW, Params, layout
from fedbench.nn.program import Program

Out = dict[str, Tensor]  # by parameter name, the views that gradients are written into; others are not computed
aten = torch.ops.aten
LARGE, NARROW, FEW = 600_000, 64, range(8, 33)  # see `weight_goes_first`


def weight_goes_first(w: Tensor, x: Tensor) -> bool:
    """Whether w [out, in] times x^T beats x [B, in] times w^T: on a CPU 1.0 to 2.4 times, measured for in and out from
    64 to 9,216 and on no GPU; with fewer numbers, in bfloat16, or with more samples it may take twice the time."""
    shape = w.numel() >= LARGE and min(w.shape) >= NARROW
    return shape and len(x) in FEW and x.dtype != LOW and x.device.type == "cpu"


class Linear:
    """x W^T + b: of x [B, in], or of [k, B, in] with k parameter sets."""

    def __init__(self, name: str, module: nn.Linear):
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if module.bias is not None else None

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        w = p[self.weight]
        if not many and weight_goes_first(w, x):
            y = torch.addmm(p[self.bias][:, None], w, x.T) if self.bias else w @ x.T  # [out, B]
            return y.T.contiguous(), x
        if not many:
            return F.linear(x, w, p[self.bias] if self.bias else None), x
        transposed = w.transpose(1, 2)  # [k, in, out]
        if self.bias:
            return torch.baddbmm(p[self.bias].unsqueeze(1), x, transposed), x
        return torch.bmm(x, transposed), x

    def backward(self, p: Params, x: Tensor, grad: Tensor, many: bool, out: Out, onward: bool) -> Tensor | None:
        """The gradient of the input (None unless onward); those of the parameters go into out."""
        if self.weight in out:
            torch.matmul(grad.transpose(-2, -1), x, out=out[self.weight])
        if self.bias in out:
            torch.sum(grad, -2, out=out[self.bias])
        return torch.matmul(grad, p[self.weight]) if onward else None


class Conv2d:
    """A convolution of x [B, C, H, W], or of [k, B, C, H, W] with k parameter sets as groups of one."""

    def __init__(self, name: str, module: nn.Conv2d):
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if module.bias is not None else None
        self.how = [list(module.stride), list(module.padding), list(module.dilation)]  # type: ignore
        self.groups = module.groups

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        w, b = p[self.weight], p[self.bias] if self.bias else None
        k = len(x) if many else 1
        if many:
            x, w, b = x.transpose(0, 1).flatten(1, 2), w.flatten(0, 1), None if b is None else b.flatten()
        elif x.device.type == "cpu":  # both here, or each convolution below would turn w again
            x, w = (t.contiguous(memory_format=layout(w, self.how[0])) for t in (x, w))
        y = F.conv2d(x, w, b, *self.how, self.groups * k)  # type: ignore[arg-type]
        return (y.unflatten(1, (k, -1)).transpose(0, 1) if many else y), (x, w, k)

    def backward(self, p: Params, saved: Any, grad: Tensor, many: bool, out: Out, onward: bool) -> Tensor | None:
        """The gradient of the input (None unless onward); those of the parameters go into out."""
        x, w, k = saved
        if many:
            grad = grad.transpose(0, 1).flatten(1, 2)
        wanted = [onward, self.weight in out, self.bias in out]
        gx, gw, gb = aten.convolution_backward(grad, x, w, [len(w)], *self.how, False, [0, 0], self.groups * k, wanted)
        for name, value in ((self.weight, gw), (self.bias, gb)):
            if name in out:
                out[name].copy_(value.view(out[name].shape) if many else value)
        return gx.unflatten(1, (k, -1)).transpose(0, 1) if many and onward else gx


class ReLU:
    """max(x, 0)."""

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        y = x.relu()
        return y, y

    def backward(self, p: Params, y: Tensor, grad: Tensor, many: bool, out: Out, onward: bool) -> Tensor | None:
        """The gradient of the input (None unless onward); those of the parameters go into out."""
        return aten.threshold_backward(grad, y, 0) if onward else None


class Flatten:
    """All axes but those of clients and samples as one."""

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        return x.flatten(2 if many else 1), x.shape

    def backward(self, p: Params, shape: Any, grad: Tensor, many: bool, out: Out, onward: bool) -> Tensor | None:
        """The gradient of the input (None unless onward); those of the parameters go into out."""
        return grad.reshape(shape) if onward else None


class MaxPool2d:
    """The largest number of each window."""

    def __init__(self, name: str, module: nn.MaxPool2d):
        def pair(v: Any) -> list[int]:
            return list(v) if isinstance(v, tuple) else [v, v]

        self.how = (
            pair(module.kernel_size),
            pair(module.stride),
            pair(module.padding),
            pair(module.dilation),
            module.ceil_mode,
        )

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        flat = x.flatten(0, 1) if many else x
        y, where = aten.max_pool2d_with_indices(flat, *self.how)
        return (y.unflatten(0, x.shape[:2]) if many else y), (flat, where)

    def backward(self, p: Params, saved: Any, grad: Tensor, many: bool, out: Out, onward: bool) -> Tensor | None:
        """The gradient of the input (None unless onward); those of the parameters go into out."""
        if not onward:
            return None
        flat, where = saved
        lead, grad = grad.shape[:2], grad.flatten(0, 1) if many else grad
        if flat.is_contiguous(memory_format=torch.channels_last):  # in another order the kernel is 3 times slower
            grad = grad.contiguous(memory_format=torch.channels_last)
        g = aten.max_pool2d_with_indices_backward(grad, flat, *self.how, where)
        return g.unflatten(0, lead) if many else g


LINKS: dict[type[nn.Module], Any] = {
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.MaxPool2d: MaxPool2d,
    nn.ReLU: lambda name, module: ReLU(),
    nn.Flatten: lambda name, module: Flatten(),
}


def pooled_first(links: list[Any]) -> list[Any]:
    """Every ReLU before a MaxPool2d put after it: the same values and gradients bit for bit, of fewer numbers."""
    links = list(links)
    for i, (a, b) in enumerate(pairwise(links)):
        if isinstance(a, ReLU) and isinstance(b, MaxPool2d):
            links[i : i + 2] = b, a
    return links


def _is_plain(links: list[Any]) -> bool:
    """Whether every weight is used once (else its gradient is a sum of two) and linear layers see vectors."""
    weights = [link.weight for link in links if hasattr(link, "weight")]
    if len(set(weights)) < len(weights):
        return False
    flatten = next((i for i, link in enumerate(links) if isinstance(link, Flatten)), None)
    if flatten is None:
        return bool(weights) and all(isinstance(link, Linear | ReLU) for link in links)
    return not any(isinstance(link, Linear) for link in links[:flatten])


class Chain:
    """links in order: logits, and d(sum of losses)/d(parameters), for one or many parameter sets."""

    def __init__(self, links: list[Any]):
        self.links = links

    @classmethod
    def of(cls, program: Program | None) -> Chain | None:
        """The program as a chain, or None: every operation in LINKS, each fed by the one before."""
        if program is None or len(program.inputs) != 1:
            return None
        links, before = [], program.inputs[0]
        for node in program.nodes:
            module = program.modules.get(str(node.target)) if node.op == "call_module" else None
            if module is None or type(module) not in LINKS or node.args != (before,):
                return None
            links.append(LINKS[type(module)](str(node.target), module))
            before = node
        ends_in_logits = isinstance(before, fx.Node) and program.output is before
        return cls(pooled_first(links)) if ends_in_logits and _is_plain(links) else None

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, list[Any]]:
        """Logits, and what the backward pass needs."""
        tape = []
        for link in self.links:
            x, saved = link.forward(p, x, many)
            tape.append(saved)
        return x, tape

    def predict(self, p: Params, x: Tensor, many: bool) -> Tensor:
        """Logits alone: what a backward pass needs (inputs, indices) is given back layer by layer."""
        for link in self.links:
            x = link.forward(p, x, many)[0]
        return x

    def backward(self, p: Params, tape: list[Any], grad: Tensor, many: bool, out: Out) -> None:
        """grad: of the logits.  Fills the tensors of out that belong to a link."""
        first = next(
            (
                i
                for i, link in enumerate(self.links)
                if getattr(link, "weight", None) in out or getattr(link, "bias", None) in out
            ),
            len(self.links),
        )
        for i in range(len(self.links) - 1, first - 1, -1):
            grad = self.links[i].backward(p, tape[i], grad, many, out, i > first)


class LowChain(Chain):
    """The same in bfloat16: parameters and input are rounded to it, logits and gradients come out as they were asked
    for.  Each is cast once, where autocast under autograd casts for every operation."""

    def forward(self, p: Params, x: Tensor, many: bool) -> tuple[Tensor, list[Any]]:
        """Logits in float32, and what `backward` needs."""
        low = self._rounded(p)
        logits, tape = super().forward(low, x.to(LOW), many)
        return logits.float(), [low, *tape]

    def predict(self, p: Params, x: Tensor, many: bool) -> Tensor:
        """Logits in float32."""
        return super().predict(self._rounded(p), x.to(LOW), many).float()

    def _rounded(self, p: Params) -> Params:
        names = {getattr(link, part, None) for link in self.links for part in ("weight", "bias")}
        return {n: t.to(LOW) for n, t in p.items() if n in names}

    def backward(self, p: Params, tape: list[Any], grad: Tensor, many: bool, out: Out) -> None:
        """Write the gradients of the parameters into out, in float32."""
        low, *tape = tape
        rounded = {n: torch.empty_like(low[n]) for n in out if n in low}
        super().backward(low, tape, grad.to(LOW), many, rounded)
        for name, value in rounded.items():
            out[name].copy_(value)
