"""The forward pass of any module, for one client or for several at once by torch.vmap."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.options import ConfigError
from fedbench.nn.batched_operators import ClientDropout, ForwardContext, Params
from fedbench.nn.client_random import ClientRandom
from fedbench.nn.traced_graph import missing_layer_message


class VmappedModule:
    """Computes a module with given parameters, by torch.func.functional_call on a copy of the module for each thread.

    Args:
        module: The module.
        eval_layers: Names of layers that always stay in evaluation mode.
    """

    def __init__(self, module: nn.Module, eval_layers: Collection[str]):
        self._module, self._eval_layers = module, eval_layers
        self._names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        self._local = threading.local()  # attributes module, dropouts and eval_layers: see _thread_copy

    def run(
        self,
        params: Params,
        inputs: Tensor | dict[str, Tensor],
        batched: bool,
        context: ForwardContext,
        until: str | None,
    ) -> Any:
        """Compute the output of the module.

        Args:
            params: Trained parameters and running statistics by name, without frozen ones, which the module itself has.
                Names that the module does not have are passed to hooks only.  # [k, ...] each if batched
            inputs: The inputs.  # [k, B, ...] if batched, else [B, ...]
            batched: Whether to compute k clients at once.
            context: Options of the pass, and its other results.
            until: Name of a layer.  Its input is returned instead of the output of the module.

        Returns:
            The output of the module, or the input of the layer `until`.
        """
        module = self._thread_copy(context.train)

        def run_client(
            client_params: Params, x: Tensor | dict[str, Tensor], key: Tensor | None
        ) -> tuple[Any, dict[str, Tensor]]:
            """Compute the forward pass of one client with this thread's copy of the module.

            Args:
                client_params: Its parameters by name.
                x: Its inputs, [B, ...].
                key: Its key for dropout, [] int64.  None in evaluation mode.

            Returns:
                The output of the module (the input of the layer `until` if that is given), and the outputs of the
                layers that the context records, as a dict from name to output.
            """
            for dropout in self._local.dropouts:  # the dropout layers of this thread's copy of the module
                dropout.key = key
            # _names: of the module's own tensors; a method may have added others, which only hooks read
            module_params = {n: p for n, p in client_params.items() if n in self._names}
            client_context = replace(context, activations={})

            def call() -> Any:
                return torch.func.functional_call(module, module_params, (x,))

            with ClientRandom(key, batched), _observed_layers(module, client_context, client_params):
                out = call() if until is None else _input_of_layer(module, until, call)
            return out, client_context.activations

        keys = context.keys
        if batched:
            run_clients = torch.vmap(run_client, (0, 0, None if keys is None else 0), randomness="error")
            out, activations = run_clients(params, inputs, keys)
        else:
            out, activations = run_client(params, inputs, None if keys is None else keys[0])
        context.activations.update(activations)
        return out

    def _thread_copy(self, train: bool) -> nn.Module:
        """Return this thread's copy of the module, because functional_call temporarily changes a module's parameters.

        Frozen parameters are shared by all copies.  The attributes of `_local` are those of the current thread.
        """
        if not hasattr(self._local, "module"):
            frozen = {id(p): p for p in self._module.parameters() if not p.requires_grad}
            module = copy.deepcopy(self._module, frozen)
            dropouts = []
            for name, m in list(module.named_modules()):
                if getattr(m, "num_batches_tracked", None) is not None:
                    m.register_buffer("num_batches_tracked", None)  # integer counters are not in rows
                if type(m) is nn.Dropout:  # replaced by one whose random numbers are those of a client
                    dropouts.append(ClientDropout(m.p, name))
                    module.set_submodule(name, dropouts[-1])
            self._local.module, self._local.dropouts = module, dropouts
            self._local.eval_layers = [module.get_submodule(name) for name in self._eval_layers]
        self._local.module.train(train)
        for m in self._local.eval_layers:
            m.eval()
        return self._local.module


class _LayerReached(Exception):
    """Stops a forward pass at a layer.  Its argument is the input of the layer."""


def _input_of_layer(module: nn.Module, name: str, call: Callable[[], Any]) -> Tensor:
    """Return the input of a layer in a forward pass, which stops there.

    Args:
        module: The module.
        name: Name of the layer.
        call: Runs the forward pass of the module.

    Returns:
        The first argument of the layer in its first call.

    Raises:
        ConfigError: The module has no such layer, or does not call it.
    """

    def stop(m: nn.Module, args: tuple) -> None:
        raise _LayerReached(args[0])

    if name not in dict(module.named_modules()):
        raise ConfigError(missing_layer_message(name))
    handle = module.get_submodule(name).register_forward_pre_hook(stop)
    try:
        call()
    except _LayerReached as reached:
        return reached.args[0]
    finally:
        handle.remove()
    raise ConfigError(missing_layer_message(name))


@contextmanager
def _observed_layers(module: nn.Module, context: ForwardContext, params: Params) -> Iterator[None]:
    """Within the context manager, apply the context's hooks to layers of the module, and record activations.

    Args:
        module: The module.
        context: Its hooks and recorded layers, by name.  It receives the activations.
        params: Parameters of one client by name, which hooks receive.
    """

    def forward_hook(name: str) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
        return lambda m, args, y: context.process_output(name, y, params, batched=False)

    observed = {*context.hooks, *context.recorded_layers}
    handles = [module.get_submodule(name).register_forward_hook(forward_hook(name)) for name in observed]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
