"""Looking into a run while a method is played: what it trains, draws, sends, and reads.

Every probe is a context manager that replaces one function of the engine for as long as it is open.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.core import rng
from fedbench.core.inputs import map_inputs
from fedbench.core.private_torch import TorchDispatchMode
from fedbench.engine import federation as federation_module
from fedbench.engine.batch import Batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.step import default_step

# -- what is trained -------------------------------------------------------------------------------------
Training = Callable[..., SimpleNamespace]


@contextlib.contextmanager
def trained_by(wrapper: Callable[[Training, Cohort, Tensor, dict[str, Any]], SimpleNamespace]) -> Iterator[None]:
    """Every cohort.train(start, **given) becomes wrapper(train, cohort, start, given)."""
    real = Cohort.train

    def train(self: Cohort, start: Tensor, **given: Any) -> SimpleNamespace:
        return wrapper(functools.partial(real, self), self, start, given)

    with patch.object(Cohort, "train", train):
        yield


@contextlib.contextmanager
def other_padding() -> Iterator[None]:
    """Batches whose padding, the slots of weight 0, holds other samples."""

    def train(real: Training, cohort: Cohort, start: Tensor, given: dict[str, Any]) -> SimpleNamespace:
        step = given.pop("step", None) or default_step(given.pop("extra_grad", None))
        given.pop("extra_grad", None)
        return real(start, step=lambda s, batch: step(s, _refilled(batch)), **given)

    with trained_by(train):
        yield


def _refilled(batch: Batch) -> Batch:
    """The batch with its padding replaced by the samples, changed, that are in front in other slots."""
    padding = ~batch.real  # [k, B]

    def mixed(values: Tensor) -> Tensor:
        other = values.roll(1, 1)
        if values.is_floating_point():
            other = 1 - 2 * other
        return torch.where(padding.view(*padding.shape, *[1] * (values.dim() - 2)), other, values)

    return replace(batch, x=map_inputs(mixed, batch.x), y=mixed(batch.y))


# -- what a step function holds --------------------------------------------------------------------------
def held_by(function: Any, size: int) -> set[str]:
    """The names under which a function that is handed to `train` holds a tensor or array with `size` rows: variables
    around it, defaults, arguments of a partial, and what it reads of namespaces and of its method."""
    if isinstance(function, functools.partial):
        given = {**function.keywords, **{f"argument {i + 1}": v for i, v in enumerate(function.args)}}
        return _rows(given, (), size) | held_by(function.func, size)
    if isinstance(function, MethodType):
        return held_by(function.__func__, size) | _rows({"self": function.__self__}, function.__code__.co_names, size)
    if not isinstance(function, FunctionType):
        return set()
    code, cells = function.__code__, function.__closure__ or ()
    held = {name: _content(cell) for name, cell in zip(code.co_freevars, cells)}
    optional = code.co_varnames[: code.co_argcount][-len(function.__defaults__ or ()) or code.co_argcount :]
    held |= dict(zip(optional, function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    inner = [value for value in held.values() if isinstance(value, FunctionType | MethodType | functools.partial)]
    return _rows(held, code.co_names, size).union(*(held_by(f, size) for f in inner if f is not function))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None


def _rows(held: dict[str, Any], read: tuple[str, ...], size: int) -> set[str]:
    """Of these values, and of what is `read` of namespaces and methods among them, those with `size` rows."""
    names = set()
    for name, value in held.items():
        if isinstance(value, SimpleNamespace | Algorithm):
            inner = {f"{name}.{n}": v for n, v in vars(value).items() if n in read}
            names |= _rows(inner, (), size)
        elif isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == size:
            names.add(name)
    return names


# -- what is sent ----------------------------------------------------------------------------------------
@contextlib.contextmanager
def uploads_of_nothing(sent: list[Tensor]) -> Iterator[None]:
    """What the server gets of every client is random and has nothing to do with its data; all that anybody is sent, or
    asks for, is added to the list."""

    def upload(
        self: Cohort, *, relative_to: Any = None, replaces: Any = None, uncompressed: Any = (), **tensors: Tensor
    ) -> SimpleNamespace:
        def draw(name: str, t: Tensor) -> Tensor:
            keys = torch.from_numpy(rng.client_keys(rng.key(name, self.round), self.ids))
            return rng.RowRandom(keys).uniform(*t.shape[1:])

        return SimpleNamespace(**{n: draw(n, t) for n, t in tensors.items()})

    def spy(name: str) -> Any:
        real = getattr(Cohort, name)

        def send(self: Cohort, *args: Tensor, **tensors: Any) -> SimpleNamespace:
            sent.extend(t.clone() for t in (*args, *tensors.values()) if isinstance(t, Tensor))
            return real(self, *args, **tensors)

        return send

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(Cohort, "upload", upload))
        for name in ("broadcast", "download", "fetch"):
            stack.enter_context(patch.object(Cohort, name, spy(name)))
        yield


# -- what is drawn ---------------------------------------------------------------------------------------
def global_generators() -> dict[str, Any]:
    """The states of the generators that all of a process share, which nothing may touch."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return {"torch": torch.random.get_rng_state(), "numpy": numpy[1:], "random": random.getstate()}


def moved_generators(before: dict[str, Any]) -> list[str]:
    """Which of them have moved since."""
    now = global_generators()
    return [name for name, state in before.items() if repr(_listed(state)) != repr(_listed(now[name]))]


def _listed(state: Any) -> Any:
    """A state whose repr says everything."""
    if isinstance(state, Tensor | np.ndarray):
        return state.tolist()
    return [_listed(part) for part in state] if isinstance(state, tuple) else state


@contextlib.contextmanager
def other_generators(seed: int) -> Iterator[None]:
    """The global generators in another state, and back to what they were."""
    torch_state, numpy_state, python_state = (
        torch.random.get_rng_state(),
        np.random.get_state(),  # noqa: NPY002
        random.getstate(),
    )
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        yield
    finally:
        torch.random.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextlib.contextmanager
def draws_follow(permuted: np.ndarray, engine: Engine) -> Iterator[None]:
    """Client j draws what client permuted[j] would."""
    bits, generator, model = rng.bits, federation_module.generator, engine.model
    init_rows, everybody = model.init_rows, len(permuted)

    def permuted_bits(base: int, *counters: np.ndarray) -> np.ndarray:
        return bits(base, permuted[np.asarray(counters[0])], *counters[1:])

    def permuted_rows(numbers: int | np.ndarray, *purpose: str | int) -> Tensor:
        """By number, or without a purpose, they are the clients', otherwise the server's."""
        if not isinstance(numbers, int):
            return init_rows(permuted[numbers], *purpose)
        return init_rows(numbers, *purpose) if purpose else init_rows(everybody)[permuted[:numbers]]

    with (
        patch.object(rng, "bits", permuted_bits),
        patch.object(federation_module, "generator", lambda *key: generator(*key[:-1], int(permuted[key[-1]]))),
        patch.object(model, "init_rows", permuted_rows),
    ):
        yield


# -- what waits for a GPU --------------------------------------------------------------------------------
WAITING = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.is_nonzero",
    "aten.unique_dim",
    "aten._unique2",
    "aten.repeat_interleave.Tensor",
    "aten.equal",
}
INDEXING = ("aten.index", "aten.index_put_", "aten._index_put_impl_")


class Waits(RuntimeError):
    """An operation whose result the host must know before it can go on."""


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host must know before it can go on: on a GPU each stops the queue."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = str(func.overloadpacket)
        masked = name in INDEXING and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name in WAITING or str(func) in WAITING or masked:
            raise Waits(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_step_waits(seen: list[int]) -> Iterator[None]:
    """Local steps in which nothing may wait for the device; the first position of every chunk is added."""

    def train(real: Training, cohort: Cohort, start: Tensor, given: dict[str, Any]) -> SimpleNamespace:
        run = cohort.engine.executor.run

        def watched(job: Callable[[int, int], None], *args: Any, **how: Any) -> None:
            def chunk(a: int, b: int) -> None:
                seen.append(a)
                with NoWaiting():
                    job(a, b)

            run(chunk, *args, **how)

        with patch.object(cohort.engine.executor, "run", watched):
            return real(start, **given)

    with trained_by(train):
        yield
