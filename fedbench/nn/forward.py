"""The forward pass of a module on named parameters, for one client or for many at once.

A module computes many clients by its traced graph (program.py), by a forward pass that it writes itself (`Batched`), or
else by torch.vmap (vmapped.py).

Letters: k clients, B batch, C classes, F features.
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
from fedbench.nn.batched_operators import LOW, ForwardContext, Tap
from fedbench.nn.chain import Chain, LowChain
from fedbench.nn.program import layers_of, trace
from fedbench.nn.vmapped import VmappedModule

Inputs = Tensor | dict[str, Tensor]


@runtime_checkable
class Batched(Protocol):
    """A module that writes its forward pass for many parameter sets at once: a prompt with a frozen tower, say."""

    def run(
        self, params: dict[str, Tensor], inputs: tuple, many: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Compute the logits.  `program.Layers` computes single layers.

        Args:
            params: The parameters by name, [k, ...] each if many; frozen ones (context.frozen) without the axis k.
                Names that the module does not know are ignored.
            inputs: The inputs.
            many: Whether there are many parameter sets.
            context: See there.
            until: Name of a layer.  Its input is returned instead of the logits.

        Returns:
            Logits.  # [k, B, C] if many, else [B, C]
        """
        ...


class ForwardPass:
    """Computes a module with other parameters than its own.

    Args:
        module: The module, in evaluation mode.
        eval_layers: Names of layers that always stay in evaluation mode.
        device: The device that computes.

    Attributes:
        autocast: Whether to compute in bfloat16.  Logits, features and gradients stay float32.
        frozen: Parameters and constants that are in no row, by name.
        program: The module's traced graph, or None.
        mapped: Whether torch.vmap computes many clients.
    """

    def __init__(self, module: nn.Module, eval_layers: Collection[str], device: torch.device):
        self.module, self._eval_layers, self._device = module, eval_layers, device
        self._batched = isinstance(module, Batched)  # the check is slow
        self.program = None if self._batched else trace(module)
        if layers := layers_of(module):
            layers.trace_all()
        self._vmapped = VmappedModule(module, eval_layers)
        self._chain, self._low_chain = Chain.of(self.program), LowChain.of(self.program)
        self._taps: dict[str, Tap] = {}
        self.frozen: dict[str, Tensor] = {}
        self.autocast = False
        self.mapped = self.program is None and not self._batched

    @property
    def chain(self) -> Chain | None:
        """The model's written-out gradient, or None if there is none."""
        if self._taps:
            return None
        return self._low_chain if self.autocast else self._chain

    @property
    def tapped(self) -> bool:
        """Whether the output of any layer is changed."""
        return bool(self._taps)

    def tap(self, name: str, change: Tap) -> None:
        """Change the output of the layer `name` from now on."""
        self.layers_at(name)
        self._taps[name] = change

    def layers_at(self, *patterns: str) -> list[str]:
        """Return the names of the layers that match the patterns, each of which must match one."""
        names = [name for name, _ in self.module.named_modules() if name]
        for pattern in patterns:
            require(
                bool(fnmatch.filter(names, pattern)),
                f"the model has no layer named {pattern!r}; its layers are {listed(names)}",
            )
        return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]

    def capture(
        self, params: dict[str, Tensor], inputs: Inputs, many: bool, patterns: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, and the outputs of the layers that match the patterns, by name."""
        context = ForwardContext(wanted=self.layers_at(*patterns))
        logits = self.apply(params, inputs, many, context)
        missing = sorted(set(context.wanted) - context.captured.keys())
        require(not missing, f"the model never calls a layer named {(missing or [''])[0]!r}, which is to be captured")
        return logits, context.captured

    def precision(self) -> AbstractContextManager:
        """Return the context in which matrix products are computed."""
        # no cache of casts: it would keep tensors of one CUDA graph for the next
        return torch.autocast(self._device.type, LOW, cache_enabled=False) if self.autocast else nullcontext()

    def apply(
        self,
        params: dict[str, Tensor],
        inputs: Inputs,
        many: bool,
        context: ForwardContext,
        until: str | None = None,
    ) -> Tensor:
        """Compute the logits, or the input of the layer `until`.

        Float buffers among the parameters are updated in place if context.train.  Captured outputs and extra losses of
        the module are left in the context.
        """
        if self.frozen or self._taps:
            context = replace(context, frozen=self.frozen, resting=self._eval_layers, taps=self._taps)
        with self.precision():
            out = self._apply(params, inputs, many, context, until)
        if isinstance(out, tuple):
            out, extra = out
            context.extra_losses.append(extra.float() if self.autocast else extra)
        return out.float() if self.autocast else out

    def _apply(
        self, params: dict[str, Tensor], inputs: Inputs, many: bool, context: ForwardContext, until: str | None
    ) -> Any:
        if many and len(next(iter(params.values()))) == 1:  # one client: the plain kernels
            single = {n: p.squeeze(0) for n, p in params.items()}  # p[0] would copy gradients into zeros
            out = self._apply(single, map_inputs(lambda x: x[0], inputs), False, context, until)
            context.captured.update({n: t[None] for n, t in context.captured.items()})
            return tuple(t[None] for t in out) if isinstance(out, tuple) else out[None]
        if self._batched:
            module: Any = self.module
            return module.run(params | self.frozen, (inputs,), many, context, until)
        shown = self.program is not None and self.program.named >= {*context.taps, *context.wanted}
        if self.program is not None and shown:
            return self.program.run(params | self.frozen, (inputs,), many, context, until)
        return self._vmapped.run(params, inputs, many, context, until)

    def predict(self, params: dict[str, Tensor], inputs: Inputs, many: bool) -> Tensor:
        """Compute the logits in evaluation mode, by the chain if there is one."""
        if self.chain is None or torch.is_grad_enabled() or not isinstance(inputs, Tensor):
            return self.apply(params, inputs, many, ForwardContext())
        if many and len(inputs) == 1:  # one client: the plain kernels
            single = {n: p[0] for n, p in params.items()}
            return self.chain.predict(self.complete(single, False), inputs[0], False).unsqueeze(0)
        return self.chain.predict(self.complete(params, many), inputs, many)

    def complete(self, params: dict[str, Tensor], many: bool) -> dict[str, Tensor]:
        """Return params, [k, ...] each if many, together with the frozen ones."""
        if not many or not self.frozen:
            return params | self.frozen
        k = len(next(iter(params.values())))
        return params | {n: p.expand(k, *p.shape) for n, p in self.frozen.items()}
