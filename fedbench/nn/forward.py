"""The forward pass of a module with named parameters, for one client or for several at once.

Several clients are computed by the module's traced graph (traced_graph.py), by a batched forward pass that the module
itself defines (`BatchedModule`), or else by torch.vmap (vmapped.py).

Letters: k clients, B batch size, C classes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedbench.core.inputs import map_inputs
from fedbench.core.options import listed, require
from fedbench.nn.batched_layers import find_batched_layers
from fedbench.nn.batched_operators import AUTOCAST_DTYPE, ForwardContext, OutputHook
from fedbench.nn.manual_backward import BFloat16ManualBackward, ManualBackward
from fedbench.nn.traced_graph import trace
from fedbench.nn.vmapped import VmappedModule

Inputs = Tensor | dict[str, Tensor]


@runtime_checkable
class BatchedModule(Protocol):
    """A module that defines its own forward pass for several clients, such as prompts of a frozen encoder."""

    def run(
        self, params: dict[str, Tensor], inputs: tuple, batched: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Compute the logits.  Use `batched_layers.BatchedLayers` to compute single layers.

        Args:
            params: The parameters by name.  If batched, [k, ...] each, except for frozen ones (context.frozen).
                Unknown names must be ignored.
            inputs: The inputs of the module.  If batched, [k, B, ...] each, else [B, ...].
            batched: Whether to compute k clients at once.
            context: Options of the pass, and its other results.
            until: Name of a layer.  Its input is returned instead of the logits.

        Returns:
            The logits.  # [k, B, C] if batched, else [B, C]
        """
        ...


class ForwardPass:
    """Computes a module with given parameters instead of its own, for one client or for several at once.

    Args:
        module: The module, in evaluation mode.
        eval_layers: Names of layers that always stay in evaluation mode.
        device: The compute device.

    Attributes:
        module: The module.
        autocast: Whether to compute in bfloat16.  Logits, features and gradients stay float32.
        frozen: Parameters and constants that are not in rows, by name.
        traced_graph: The module's traced graph, or None.
        uses_vmap: Whether several clients are computed by torch.vmap.
    """

    def __init__(self, module: nn.Module, eval_layers: Collection[str], device: torch.device):
        self.module, self._eval_layers, self._device = module, eval_layers, device
        self._is_batched_module = isinstance(module, BatchedModule)  # stored because this check is slow
        self.traced_graph = None if self._is_batched_module else trace(module)
        if layers := find_batched_layers(module):
            layers.trace_all()
        self._vmapped = VmappedModule(module, eval_layers)
        self._manual_backward = ManualBackward.of(self.traced_graph)
        self._bfloat16_manual_backward = BFloat16ManualBackward.of(self.traced_graph)
        self._hooks: dict[str, OutputHook] = {}
        self.frozen: dict[str, Tensor] = {}
        self.autocast = False
        self.uses_vmap = self.traced_graph is None and not self._is_batched_module

    @property
    def manual_backward(self) -> ManualBackward | None:
        """A forward and backward pass of the module without autograd; in bfloat16 if `autocast` is set.

        None if the module is not a sequence of linear, convolution, ReLU, pooling and flatten layers, or has hooks.
        """
        if self._hooks:
            return None
        return self._bfloat16_manual_backward if self.autocast else self._manual_backward

    @property
    def has_hooks(self) -> bool:
        """Whether `add_hook` has added a hook, which changes the output of a layer."""
        return bool(self._hooks)

    def add_hook(self, name: str, hook: OutputHook) -> None:
        """Replace the output of the layer `name` by hook(output, parameters) in all later passes.

        Args:
            name: Name of the layer.
            hook: hook(output, params) returns the new output; params are the client's parameters by name.

        Raises:
            ConfigError: The model has no such layer.
        """
        self.match_layers(name)  # for its error
        self._hooks[name] = hook

    def match_layers(self, *patterns: str) -> list[str]:
        """Return the names of the layers that match any of the patterns (fnmatch).

        Args:
            *patterns: The patterns.

        Raises:
            ConfigError: A pattern matches no layer.
        """
        names = [name for name, _ in self.module.named_modules() if name]
        for pattern in patterns:
            require(
                bool(fnmatch.filter(names, pattern)),
                f"the model has no layer named {pattern!r} and none that matches it as a pattern: name one of its "
                f"layers, {listed(names)}",
            )
        return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]

    def capture(
        self, params: dict[str, Tensor], inputs: Inputs, batched: bool, patterns: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, and the outputs of layers in evaluation mode.

        Args:
            params: The parameters by name.  # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
            patterns: Patterns of layer names (fnmatch).

        Returns:
            The logits [B, C], and the outputs of the layers by name [B, ...], with a first axis k if batched.

        Raises:
            ConfigError: A pattern matches no layer, or the forward pass does not call a matching layer.
        """
        context = ForwardContext(recorded_layers=self.match_layers(*patterns))
        logits = self.apply(params, inputs, batched, context)
        missing = sorted(set(context.recorded_layers) - context.activations.keys())
        require(
            not missing,
            f"the model never calls the layer {(missing or [''])[0]!r}, so its output cannot be captured: name a layer "
            "that the forward pass calls, or call this one in it",
        )
        return logits, context.activations

    def precision(self) -> AbstractContextManager:
        """Return the context manager in which matrix products are computed.

        It is torch.autocast to bfloat16 if `autocast` is set, and else has no effect.
        """
        # a cache of casts would share tensors between CUDA graphs
        return (
            torch.autocast(self._device.type, AUTOCAST_DTYPE, cache_enabled=False) if self.autocast else nullcontext()
        )

    def apply(
        self,
        params: dict[str, Tensor],
        inputs: Inputs,
        batched: bool,
        context: ForwardContext,
        until: str | None = None,
    ) -> Tensor:
        """Compute the logits, or the input of a layer.

        Args:
            params: The parameters and running statistics by name.  In training mode, statistics are updated in place.
                # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
            context: Options of the pass.  It receives recorded activations and additional losses.
            until: Name of a layer.  Its input is returned instead of the logits.

        Returns:
            The logits, or the input of the layer, as float32.
        """
        if self.frozen or self._hooks:  # eval_layers is empty without frozen parameters
            context = replace(context, frozen=self.frozen, eval_layers=self._eval_layers, hooks=self._hooks)
        with self.precision():
            out = self._apply(params, inputs, batched, context, until)
        if isinstance(out, tuple):
            out, extra_loss = out
            context.extra_losses.append(extra_loss.float() if self.autocast else extra_loss)
        return out.float() if self.autocast else out

    def _apply(
        self, params: dict[str, Tensor], inputs: Inputs, batched: bool, context: ForwardContext, until: str | None
    ) -> Any:
        """Compute the output by the fastest way that the module supports.

        Args:
            params: The parameters and running statistics by name.  # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
            context: Options of the pass, with the names of frozen parameters and the hooks.
            until: Name of a layer, whose input is returned; None for the output of the module.

        Returns:
            The logits, (logits, additional losses) if the module returns both, or the input of the layer `until`.
        """
        if batched and len(next(iter(params.values()))) == 1:  # one client: unbatched kernels are faster
            # squeeze(0), because the gradient of p[0] is copied into a tensor of zeros
            single = {n: p.squeeze(0) for n, p in params.items()}
            one_batch = map_inputs(lambda x: x[0], inputs)
            out = self._apply(single, one_batch, batched=False, context=context, until=until)
            context.activations.update({n: t[None] for n, t in context.activations.items()})
            return tuple(t[None] for t in out) if isinstance(out, tuple) else out[None]
        if self._is_batched_module:
            module: Any = self.module
            return module.run(params | self.frozen, (inputs,), batched, context, until)
        graph, observed_layers = self.traced_graph, {*context.hooks, *context.recorded_layers}
        # tracing may merge layers into one operation: usable if the graph still has the output of each observed layer
        if graph is not None and graph.named_outputs >= observed_layers:
            return graph.run(params | self.frozen, (inputs,), batched, context, until)
        return self._vmapped.run(params, inputs, batched, context, until)

    def predict(self, params: dict[str, Tensor], inputs: Inputs, batched: bool) -> Tensor:
        """Return the logits in evaluation mode.

        Without gradients, a module with a manual backward pass is computed by its layers, which has less overhead.

        Args:
            params: The parameters and running statistics by name.  # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
        """
        network = self.manual_backward
        if network is None or torch.is_grad_enabled() or not isinstance(inputs, Tensor):
            return self.apply(params, inputs, batched, ForwardContext())
        if batched and len(inputs) == 1:  # one client: unbatched kernels are faster
            single = {n: p[0] for n, p in params.items()}
            params = self.with_frozen(single, batched=False)
            return network.predict(params, inputs[0], batched=False).unsqueeze(0)
        return network.predict(self.with_frozen(params, batched), inputs, batched)

    def with_frozen(self, params: dict[str, Tensor], batched: bool) -> dict[str, Tensor]:
        """Return the parameters together with the frozen ones.

        Args:
            params: The parameters by name.  # [k, ...] each if batched
            batched: Whether parameters have an axis k.  Frozen ones are then expanded.

        Returns:
            All parameters by name.  # [k, ...] each if batched
        """
        if not batched or not self.frozen:
            return params | self.frozen
        k = len(next(iter(params.values())))
        return params | {n: p.expand(k, *p.shape) for n, p in self.frozen.items()}
