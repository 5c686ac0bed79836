"""A manual forward and backward pass for plain sequences of layers.

Most federated models are sequences of linear, convolution, ReLU, pooling and flatten layers.  Their gradient needs only
a few known products.  This avoids the overhead of autograd, which dominates small steps, and writes gradients
directly into rows.

`ManualBackward.of(graph)` returns None for all other models (branches, norms, dropout, shared layers).  They need
autograd.

Letters: k clients, B batch size, C channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbench.nn.batched_operators import AUTOCAST_DTYPE, Params, conv_memory_format
from fedbench.nn.traced_graph import TracedGraph

Gradients = dict[str, Tensor]  # by parameter name, where to write gradients; the others are not computed
aten = torch.ops.aten

# For weights and batches of these sizes, w x^T is faster than x w^T on a CPU; both are the same linear layer.
LARGE_WEIGHT = 600_000  # elements
MIN_WEIGHT_SIDE = 64
FEW_SAMPLES = range(8, 33)


def weight_goes_first(w: Tensor, x: Tensor) -> bool:
    """Return whether a linear layer is faster as w x^T, transposed, than as x w^T: for a large weight on a CPU.

    Args:
        w: The weight.  # [out, in]
        x: The input.  # [B, in]
    """
    # measured: from these sizes of weights on, and for these numbers of samples, in float32
    is_large = w.numel() >= LARGE_WEIGHT and min(w.shape) >= MIN_WEIGHT_SIDE
    return is_large and len(x) in FEW_SAMPLES and x.dtype != AUTOCAST_DTYPE and x.device.type == "cpu"


class Layer:
    """A layer with a manual forward and backward pass.  If batched, tensors have a leading axis k of clients.

    Attributes:
        weight: Name of its weight, or None.
        bias: Name of its bias, or None.
    """

    weight: Any = None
    bias: Any = None

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Compute the output.  Subclasses must implement it.

        Args:
            params: Parameters of all layers by name.
            x: The input.  # [B, ...] or [k, B, ...]
            batched: Whether there is an axis k.

        Returns:
            The output, and the values that `backward` needs.
        """
        raise NotImplementedError

    def backward(
        self, params: Params, saved: Any, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Compute gradients.  Subclasses must write those of their parameters that are named in `out`.

        Args:
            params: Parameters of all layers by name.
            saved: The values that `forward` returned.
            grad: Gradient of the loss with respect to the output.
            batched: Whether there is an axis k.
            out: Tensors that receive the gradients of parameters.
            needs_input_grad: Whether to compute the gradient of the input.

        Returns:
            The gradient of the input, or None if it is not needed.
        """
        raise NotImplementedError


class Linear(Layer):
    """x W^T + b, with x [B, in] or [k, B, in].  `weight` and `bias` (or None) are the names of W and b in params."""

    def __init__(self, name: str, module: nn.Linear):
        self.weight = f"{name}.weight"
        self.bias = f"{name}.bias" if module.bias is not None else None

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Compute x W^T + b.

        Args:
            params: Parameters of all layers by name.  # [k, ...] each if batched
            x: The input.  # [B, in], or [k, B, in] if batched
            batched: Whether there is an axis k of clients.

        Returns:
            The output [B, out] or [k, B, out], and x, which `backward` needs.
        """
        w = params[self.weight]
        if not batched and weight_goes_first(w, x):  # w x^T is faster than x w^T for these shapes
            y = torch.addmm(params[self.bias][:, None], w, x.T) if self.bias else w @ x.T  # [out, B]
            return y.T.contiguous(), x
        if not batched:
            return F.linear(x, w, params[self.bias] if self.bias else None), x
        transposed = w.transpose(1, 2)  # [k, in, out]
        if self.bias:
            return torch.baddbmm(params[self.bias].unsqueeze(1), x, transposed), x
        return torch.bmm(x, transposed), x

    def backward(
        self, params: Params, x: Tensor, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Write the gradients of weight and bias to `out`, and return that of the input.

        Args:
            params: Parameters of all layers by name.
            x: The input of the layer, the second result of `forward`.  # [B, in] or [k, B, in]
            grad: Gradient of the loss with respect to the output.
            batched: Whether there is an axis k of clients.
            out: Tensors that receive the gradients of parameters, by name.  Parameters without one are skipped.
            needs_input_grad: Whether to compute the gradient of the input.

        Returns:
            The gradient of the input, or None if it is not needed.
        """
        if self.weight in out:
            torch.matmul(grad.transpose(-2, -1), x, out=out[self.weight])
        if self.bias in out:
            torch.sum(grad, -2, out=out[self.bias])
        return torch.matmul(grad, params[self.weight]) if needs_input_grad else None


class Conv2d(Layer):
    """A convolution of x [B, C, H, W] or [k, B, C, H, W].  `weight` and `bias` (or None) are names in params.

    Several clients are groups of one convolution.
    """

    def __init__(self, name: str, module: nn.Conv2d):
        self.weight = f"{name}.weight"
        self.bias = f"{name}.bias" if module.bias is not None else None
        # stride, padding and dilation, in this order
        self.options = [list(module.stride), list(module.padding), list(module.dilation)]  # type: ignore
        self.groups = module.groups

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Compute the convolution.

        Args:
            params: Parameters of all layers by name.  # [k, ...] each if batched
            x: The input.  # [B, C, H, W], or [k, B, C, H, W] if batched
            batched: Whether there is an axis k of clients.

        Returns:
            The output [B, out, H', W'] or [k, B, out, H', W'], and (x, weight, k), which `backward` needs.
        """
        w, b = params[self.weight], params[self.bias] if self.bias else None
        k = len(x) if batched else 1
        if batched:  # clients become groups: x [B, k * C, H, W], w [k * out, C, kh, kw]
            x, w, b = x.transpose(0, 1).flatten(1, 2), w.flatten(0, 1), None if b is None else b.flatten()
        elif x.device.type == "cpu":  # converted once for the forward and the backward pass
            x, w = (t.contiguous(memory_format=conv_memory_format(w, self.options[0])) for t in (x, w))
        # options: stride, padding, dilation
        y = F.conv2d(x, w, b, *self.options, self.groups * k)  # type: ignore[arg-type]
        return (y.unflatten(1, (k, -1)).transpose(0, 1) if batched else y), (x, w, k)

    def backward(
        self, params: Params, saved: Any, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Write the gradients of weight and bias to `out`, and return that of the input.

        Args:
            params: Parameters of all layers by name.
            saved: Input, weight and k, as `forward` returned them.
            grad: Gradient of the loss with respect to the output.
            batched: Whether there is an axis k of clients.
            out: Tensors that receive the gradients of parameters, by name.  Parameters without one are skipped.
            needs_input_grad: Whether to compute the gradient of the input.

        Returns:
            The gradient of the input, or None if it is not needed.
        """
        x, w, k = saved
        if batched:
            grad = grad.transpose(0, 1).flatten(1, 2)
        output_mask = [needs_input_grad, self.weight in out, self.bias in out]  # which gradients are computed
        # [len(w)]: shape of the bias; options: stride, padding, dilation; False, [0, 0]: not a transposed convolution,
        # without padding of the output
        grad_x, grad_w, grad_b = aten.convolution_backward(
            grad, x, w, [len(w)], *self.options, False, [0, 0], self.groups * k, output_mask
        )
        for name, value in ((self.weight, grad_w), (self.bias, grad_b)):
            if name in out:
                out[name].copy_(value.view(out[name].shape) if batched else value)
        return grad_x.unflatten(1, (k, -1)).transpose(0, 1) if batched and needs_input_grad else grad_x


class ReLU(Layer):
    """max(x, 0)."""

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Return (y, y) with y = max(x, 0) for x of any shape: the output, and what `backward` needs."""
        y = x.relu()
        return y, y

    def backward(
        self, params: Params, y: Tensor, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Return the gradient of the input, grad where the output y is positive, else 0; None if it is not needed.

        Args:
            params: Not used, as `batched` and `out`: there are no parameters.
            y: The output of the layer, the second result of `forward`.
            grad: Gradient of the loss with respect to the output.
            batched: Not used.
            out: Not used.
            needs_input_grad: Whether to compute the gradient of the input.
        """
        return aten.threshold_backward(grad, y, 0) if needs_input_grad else None


class Flatten(Layer):
    """Flattens all axes after those of clients and samples."""

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Flatten a tensor.

        Args:
            params: Not used.
            x: The input.  # [B, ...], or [k, B, ...] if batched
            batched: Whether there is an axis k of clients.

        Returns:
            The output [B, values] or [k, B, values], and the shape of x, which `backward` needs.
        """
        return x.flatten(2 if batched else 1), x.shape

    def backward(
        self, params: Params, shape: Any, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Return the gradient of the input, grad in the shape of the input; None if it is not needed.

        Args:
            params: Not used, as `batched` and `out`: there are no parameters.
            shape: The shape of the input, the second result of `forward`.
            grad: Gradient of the loss with respect to the output.
            batched: Not used.
            out: Not used.
            needs_input_grad: Whether to compute the gradient of the input.
        """
        return grad.reshape(shape) if needs_input_grad else None


class MaxPool2d(Layer):
    """The maximum of each window."""

    def __init__(self, name: str, module: nn.MaxPool2d):
        def pair(value: Any) -> list[int]:
            return list(value) if isinstance(value, tuple) else [value, value]

        self.options = (
            pair(module.kernel_size),
            pair(module.stride),
            pair(module.padding),
            pair(module.dilation),
            module.ceil_mode,
        )

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, Any]:
        """Compute the maximum of each window.

        Args:
            params: Not used: there are no parameters.
            x: The input.  # [B, C, H, W], or [k, B, C, H, W] if batched
            batched: Whether there is an axis k of clients.

        Returns:
            The output [B, C, H', W'] or [k, B, C, H', W'], and (x, indices of the maxima), which `backward` needs.
            In these two, k and B are one axis.
        """
        flat = x.flatten(0, 1) if batched else x
        y, indices = aten.max_pool2d_with_indices(flat, *self.options)
        return (y.unflatten(0, x.shape[:2]) if batched else y), (flat, indices)

    def backward(
        self, params: Params, saved: Any, grad: Tensor, batched: bool, out: Gradients, needs_input_grad: bool
    ) -> Tensor | None:
        """Return the gradient of the input, grad at the position of the maximum of each window; None if not needed.

        Args:
            params: Not used, as `out`: there are no parameters.
            saved: The second result of `forward`: the input with k and B as one axis, and the indices of the maxima.
            grad: Gradient of the loss with respect to the output.
            batched: Whether there is an axis k of clients.
            out: Not used.
            needs_input_grad: Whether to compute the gradient of the input.
        """
        if not needs_input_grad:
            return None
        flat, indices = saved
        leading_shape = grad.shape[:2]  # (k, B) if batched
        grad = grad.flatten(0, 1) if batched else grad
        if flat.is_contiguous(memory_format=torch.channels_last):  # the kernel is slow for mixed memory formats
            grad = grad.contiguous(memory_format=torch.channels_last)
        # options: window, stride, padding, dilation, ceil_mode
        grad_x = aten.max_pool2d_with_indices_backward(grad, flat, *self.options, indices)
        return grad_x.unflatten(0, leading_shape) if batched else grad_x


LAYERS: dict[type[nn.Module], Any] = {  # (name, module) -> Layer
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.MaxPool2d: MaxPool2d,
    nn.ReLU: lambda name, module: ReLU(),
    nn.Flatten: lambda name, module: Flatten(),
}


def pool_before_relu(layers: list[Layer]) -> list[Layer]:
    """Exchange each ReLU with a MaxPool2d after it, so that the ReLU has fewer values to compute.

    ReLU is monotone, so that values and gradients stay the same bit for bit.
    """
    layers = list(layers)
    for i, (first, second) in enumerate(pairwise(layers)):
        if isinstance(first, ReLU) and isinstance(second, MaxPool2d):
            layers[i : i + 2] = second, first
    return layers


def _is_supported(layers: list[Layer]) -> bool:
    """Return whether `ManualBackward` can compute a sequence of layers.

    It can if some weight exists, every weight is used once, and linear layers have inputs [B, in].  Inputs have this
    shape after a Flatten, or if all layers are linear or ReLU.
    """
    weights = [layer.weight for layer in layers if layer.weight is not None]
    if len(set(weights)) < len(weights):
        return False  # the gradient of a shared weight would be a sum
    flatten = next((i for i, layer in enumerate(layers) if isinstance(layer, Flatten)), None)
    if flatten is None:
        return bool(weights) and all(isinstance(layer, Linear | ReLU) for layer in layers)
    return not any(isinstance(layer, Linear) for layer in layers[:flatten])


class ManualBackward:
    """The forward and backward pass of a sequence of layers, for one client or for several at once.

    Args:
        layers: The layers, in order.
    """

    def __init__(self, layers: list[Layer]):
        self.layers = layers

    @classmethod
    def of(cls, graph: TracedGraph | None) -> ManualBackward | None:
        """Return the manual pass of a traced module, or None if it must be computed by autograd.

        Args:
            graph: The traced module.  It must be a plain sequence of layers in `LAYERS`.  None: it was not traced.
        """
        if graph is None or len(graph.inputs) != 1:
            return None
        layers, previous = [], graph.inputs[0]
        for node in graph.nodes:
            module = graph.modules.get(str(node.target)) if node.op == "call_module" else None
            if module is None or type(module) not in LAYERS or node.args != (previous,):
                return None
            layers.append(LAYERS[type(module)](str(node.target), module))
            previous = node
        # the graph returns the output of its last node, and nothing else
        ends_in_logits = isinstance(previous, fx.Node) and graph.output is previous
        return cls(pool_before_relu(layers)) if ends_in_logits and _is_supported(layers) else None

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, list[Any]]:
        """Compute the logits.

        Args:
            params: Parameters of all layers by name.  # [k, ...] each if batched
            x: The input.  # [B, ...] or [k, B, ...]
            batched: Whether there is an axis k.

        Returns:
            The logits, and the values that `backward` needs.
        """
        saved = []
        for layer in self.layers:
            x, saved_by_layer = layer.forward(params, x, batched)
            saved.append(saved_by_layer)
        return x, saved

    def predict(self, params: Params, x: Tensor, batched: bool) -> Tensor:
        """Return only the logits, with less memory than `forward`.

        Args:
            params: Parameters of all layers by name.  # [k, ...] each if batched
            x: The input.  # [B, ...] or [k, B, ...]
            batched: Whether there is an axis k of clients.
        """
        for layer in self.layers:
            x = layer.forward(params, x, batched)[0]
        return x

    def backward(self, params: Params, saved: list[Any], grad: Tensor, batched: bool, out: Gradients) -> None:
        """Compute the gradients of parameters.

        Args:
            params: Parameters of all layers by name.
            saved: The values that `forward` returned.
            grad: Gradient of the logits.
            batched: Whether there is an axis k.
            out: Tensors that receive the gradients, by parameter name.  Other gradients are not computed.
        """
        first = len(self.layers)  # the first layer with a gradient: earlier ones are skipped
        for i, layer in enumerate(self.layers):
            if layer.weight in out or layer.bias in out:
                first = i
                break
        for i in range(len(self.layers) - 1, first - 1, -1):
            grad = self.layers[i].backward(params, saved[i], grad, batched, out, needs_input_grad=i > first)  # type: ignore


class BFloat16ManualBackward(ManualBackward):
    """A `ManualBackward` in bfloat16.  Parameters and input are rounded once; logits and gradients are float32."""

    def forward(self, params: Params, x: Tensor, batched: bool) -> tuple[Tensor, list[Any]]:
        """Compute the logits in bfloat16.

        Args:
            params: Parameters of all layers by name, in float32.  # [k, ...] each if batched
            x: The input.  # [B, ...] or [k, B, ...]
            batched: Whether there is an axis k of clients.

        Returns:
            The logits in float32, and the values that `backward` needs: first the rounded parameters.
        """
        rounded = self._rounded(params)
        logits, saved = super().forward(rounded, x.to(AUTOCAST_DTYPE), batched)
        return logits.float(), [rounded, *saved]

    def predict(self, params: Params, x: Tensor, batched: bool) -> Tensor:
        """Return the logits as `forward` does, computed in bfloat16 and returned in float32, without values to save."""
        return super().predict(self._rounded(params), x.to(AUTOCAST_DTYPE), batched).float()

    def _rounded(self, params: Params) -> Params:
        """Return copies in bfloat16 of the layers' weights and biases by name; other tensors in params are left out."""
        names = {name for layer in self.layers for name in (layer.weight, layer.bias)}
        return {name: t.to(AUTOCAST_DTYPE) for name, t in params.items() if name in names}

    def backward(self, params: Params, saved: list[Any], grad: Tensor, batched: bool, out: Gradients) -> None:
        """Compute the gradients of parameters in bfloat16, and write them in float32.

        Args:
            params: Not used: the rounded parameters are in saved.
            saved: The values that `forward` returned.
            grad: Gradient of the logits.
            batched: Whether there is an axis k of clients.
            out: Tensors that receive the gradients, by parameter name.  Other gradients are not computed.
        """
        rounded, *saved = saved
        rounded_out = {name: torch.empty_like(rounded[name]) for name in out if name in rounded}
        super().backward(rounded, saved, grad.to(AUTOCAST_DTYPE), batched, rounded_out)
        for name, value in rounded_out.items():
            out[name].copy_(value)
