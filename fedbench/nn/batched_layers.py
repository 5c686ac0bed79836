"""Layers of a module that writes its own batched forward pass."""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.core.options import require
from fedbench.nn.batched_operators import OPERATORS, ForwardContext, Params
from fedbench.nn.traced_graph import TracedGraph, trace


class BatchedLayers:
    """Computes single layers of a module that has its own forward pass for k clients (`BatchedModule`, forward.py).

    A layer is computed by its operator, or by its traced graph.  Adapters, hooks and recorded activations then work in
    the module.  Store it in a tuple as an attribute of the module, so that it is not a submodule.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._graphs: dict[str, TracedGraph | None] = {}

    def apply(self, name: str, x: Tensor, params: Params, batched: bool, context: ForwardContext) -> Tensor:
        """Return the output of a layer.

        Args:
            name: Name of the layer.
            x: Its input.  # [k, ...] if batched
            params: Parameters of all layers by name.  If batched, [k, ...] each, except for frozen ones.
            batched: Whether to compute k clients at once.
            context: Options of the pass, and its other results.

        Returns:
            The output.  # [k, ...] if batched

        Raises:
            ConfigError: The layer cannot be computed for several clients.
        """
        layer = self.module.get_submodule(name)
        if type(layer) in OPERATORS:  # batched forward passes by class of layer
            y = OPERATORS[type(layer)](layer, name, params, x, batched, context)
        else:
            if name not in self._graphs:  # traced graphs of layers by name
                self._trace(name)
            graph = self._graphs[name]
            require(
                graph is not None,
                f"the layer {name} ({type(layer).__name__}) cannot be computed for several clients at once: use "
                "another adapter, or a layer whose operations torch.fx can trace",
            )
            y = graph.run(params, (x,), batched, context)  # type: ignore[union-attr]
        # hooks may change the output, and the context may record it
        return context.process_output(name, y, params, batched) if context.observes_layers else y

    def trace_all(self) -> None:
        """Trace all layers that have no operator, before the threads of an executor start: torch.fx is not thread-safe.

        Without this call, `apply` traces a layer when it is first used.
        """
        for name, layer in self.module.named_modules():
            if name and type(layer) not in OPERATORS:
                self._trace(name)

    def _trace(self, name: str) -> None:
        """Trace the module's layer `name`, such as "encoder.fc1"; store its graph, or None if tracing fails."""
        self._graphs[name] = trace(self.module.get_submodule(name), f"{name}.")


def find_batched_layers(module: nn.Module) -> BatchedLayers | None:
    """Return the `BatchedLayers` object of a module, or None if it has none.

    It is searched in the attributes of the module, and in attributes that are tuples.
    """
    for value in vars(module).values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, BatchedLayers):
                return item
    return None
