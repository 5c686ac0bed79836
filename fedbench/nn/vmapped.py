"""Any module, for one or for many parameter sets: by functional_call, mapped over clients by torch.vmap."""

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
from fedbench.nn.batched_operators import ForwardContext, KeyedDropout, Params
from fedbench.nn.client_random import ClientRandom
from fedbench.nn.program import never_called


class VmappedModule:
    """resting: names of layers that stay in evaluation mode."""

    def __init__(self, module: nn.Module, resting: Collection[str]):
        self._module, self._resting = module, resting
        self._names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        self._local = threading.local()

    def run(
        self, params: Params, inputs: Tensor | dict[str, Tensor], many: bool, context: ForwardContext, until: str | None
    ) -> Any:
        """What the module returns, or what enters its layer `until`; params may have others than its own, for taps."""
        module = self._copy_of_thread(context.train)

        def one(row: Params, x: Tensor | dict[str, Tensor], key: Tensor | None) -> tuple[Any, dict[str, Tensor]]:
            for dropout in self._local.dropouts:
                dropout.key = key
            own = {n: p for n, p in row.items() if n in self._names}
            seen = replace(context, captured={})
            with ClientRandom(key, many), _looking(module, seen, row):
                if until is None:
                    return torch.func.functional_call(module, own, (x,)), seen.captured
                return _until(module, until, lambda: torch.func.functional_call(module, own, (x,))), seen.captured

        keys = context.keys
        if many:
            mapped = torch.vmap(one, (0, 0, None if keys is None else 0), randomness="error")
            out, captured = mapped(params, inputs, keys)
        else:
            out, captured = one(params, inputs, None if keys is None else keys[0])
        context.captured.update(captured)
        return out

    def _copy_of_thread(self, train: bool) -> nn.Module:
        """This thread's copy: functional_call swaps parameters in the module, which threads cannot share.  Frozen
        parameters are not copied."""
        if not hasattr(self._local, "module"):
            frozen = {id(p): p for p in self._module.parameters() if not p.requires_grad}
            self._local.module, self._local.dropouts = copy.deepcopy(self._module, frozen), []
            for name, m in list(self._local.module.named_modules()):
                if getattr(m, "num_batches_tracked", None) is not None:
                    m.register_buffer("num_batches_tracked", None)  # an integer counter is not part of the row
                if type(m) is nn.Dropout:
                    self._local.dropouts.append(KeyedDropout(m.p, name))
                    self._local.module.set_submodule(name, self._local.dropouts[-1])
            self._local.resting = [self._local.module.get_submodule(name) for name in self._resting]
        self._local.module.train(train)
        for m in self._local.resting:
            m.eval()
        return self._local.module


class _Reached(Exception):
    """Carries the input of the module at which a forward pass was to stop."""


def _until(module: nn.Module, name: str, run: Callable[[], Any]) -> Tensor:
    def stop(m: nn.Module, args: tuple) -> None:
        raise _Reached(args[0])

    if name not in dict(module.named_modules()):
        raise ConfigError(never_called(name))
    handle = module.get_submodule(name).register_forward_pre_hook(stop)
    try:
        run()
    except _Reached as reached:
        return reached.args[0]
    finally:
        handle.remove()
    raise ConfigError(never_called(name))


@contextmanager
def _looking(module: nn.Module, context: ForwardContext, row: Params) -> Iterator[None]:
    """While it lasts, what is tapped or captured of a module's layers passes the context."""

    def passed(name: str) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
        return lambda m, args, y: context.passed(name, y, row, False)

    handles = [module.get_submodule(n).register_forward_hook(passed(n)) for n in {*context.taps, *context.wanted}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
