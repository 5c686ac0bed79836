"""Context managers that observe or change training, messages and random numbers while a method runs."""

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

# -- training --------------------------------------------------------------------------------------------
Training = Callable[..., SimpleNamespace]


@contextlib.contextmanager
def trained_by(wrapper: Callable[[Training, Cohort, Tensor, dict[str, Any]], SimpleNamespace]) -> Iterator[None]:
    """Replace cohort.train(start, **arguments) by wrapper(train, cohort, start, arguments).

    Args:
        wrapper: A function that gets the original cohort.train, the cohort, the initial rows and the other arguments,
            and returns what cohort.train returns.
    """
    train = Cohort.train

    def wrapped(self: Cohort, start: Tensor, **arguments: Any) -> SimpleNamespace:
        return wrapper(functools.partial(train, self), self, start, arguments)

    with patch.object(Cohort, "train", wrapped):
        yield


@contextlib.contextmanager
def other_padding() -> Iterator[None]:
    """Return a context in which training gets other padding, the samples of weight 0 that fill up short batches."""

    def wrapper(train: Training, cohort: Cohort, start: Tensor, arguments: dict[str, Any]) -> SimpleNamespace:
        extra_grad = arguments.pop("extra_grad", None)  # an argument of the default step only
        step = arguments.pop("step", None) or default_step(extra_grad)
        return train(start, step=lambda s, batch: step(s, _with_other_padding(batch)), **arguments)

    with trained_by(wrapper):  # in place of cohort.train
        yield


def _with_other_padding(batch: Batch) -> Batch:
    """Return a batch in which other values replace the samples of padding, those where ``batch.real`` is False."""
    padding = ~batch.real  # [k, B]

    def fill(values: Tensor) -> Tensor:
        """Return inputs or targets [k, B, ...] of a batch with other values for the samples of padding."""
        other = values.roll(1, 1)  # along the samples of a batch
        if values.is_floating_point():
            other = 1 - 2 * other  # any values that differ from those of real samples
        return torch.where(padding.view(*padding.shape, *[1] * (values.dim() - 2)), other, values)

    return replace(batch, x=map_inputs(fill, batch.x), y=fill(batch.y))


def cohort_tensors(function: Any, size: int) -> set[str]:
    """Return the names of tensors and arrays with `size` rows that a function reads without receiving them.

    Args:
        function: A function that a method passes to `cohort.train`, also a partial or a bound method.
        size: The number of clients of the cohort.

    Returns:
        Names of variables of the enclosing function, default arguments, arguments of a partial, and attributes of
        these, such as "self.weights".
    """
    if isinstance(function, functools.partial):
        arguments = {**function.keywords, **{f"argument {i + 1}": v for i, v in enumerate(function.args)}}
        return _with_rows(arguments, (), size) | cohort_tensors(function.func, size)
    if isinstance(function, MethodType):
        names = function.__code__.co_names
        return _with_rows({"self": function.__self__}, names, size) | cohort_tensors(function.__func__, size)
    if not isinstance(function, FunctionType):
        return set()
    code = function.__code__
    values = {name: _content(cell) for name, cell in zip(code.co_freevars, function.__closure__ or ())}
    defaults = function.__defaults__ or ()  # of the last positional arguments
    arguments = code.co_varnames[: code.co_argcount]
    values |= dict(zip(arguments[len(arguments) - len(defaults) :], defaults)) | (function.__kwdefaults__ or {})
    found = _with_rows(values, code.co_names, size)  # co_names: global names and attributes that the code reads
    for value in values.values():
        if isinstance(value, FunctionType | MethodType | functools.partial) and value is not function:
            found |= cohort_tensors(value, size)
    return found


def _content(cell: CellType) -> Any:
    """Return the value of a variable that a closure reads; None if the variable is not assigned yet.

    Args:
        cell: An element of ``function.__closure__``.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _with_rows(values: dict[str, Any], attributes: tuple[str, ...], size: int) -> set[str]:
    """Return the names of the tensors and arrays whose first axis has length `size`, among values and attributes.

    Args:
        values: The values by name.
        attributes: The names of the attributes that are looked up in values that are namespaces or methods.
        size: The length of the first axis, such as the number of clients.
    """
    names = set()
    for name, value in values.items():
        if isinstance(value, SimpleNamespace | Algorithm):
            inner = {f"{name}.{n}": v for n, v in vars(value).items() if n in attributes}
            names |= _with_rows(inner, (), size)
        elif isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == size:
            names.add(name)
    return names


# -- messages --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def random_uploads(messages: list[Tensor]) -> Iterator[None]:
    """Replace uploads by random values, so that no data of a client reach the server by an upload.

    Args:
        messages: A list, to which all tensors that clients receive (broadcast, download) or request (fetch) are
            appended.
    """

    def upload(
        self: Cohort,
        *,
        relative_to: Any = None,
        previous: Any = None,
        uncompressed: Any = (),
        num_values: Any = None,
        **tensors: Tensor,
    ) -> SimpleNamespace:
        """Return random tensors with the names and shapes of the uploaded ones, instead of uploading these.

        Args:
            self: The cohort.
            relative_to: Not used, as all arguments of `Cohort.upload` but the tensors.
            previous: Not used.
            uncompressed: Not used.
            num_values: Not used.
            **tensors: The uploaded tensors by name.  # [K, ...] each
        """

        def sample(name: str, t: Tensor) -> Tensor:
            # a key for each client of the cohort, which depends on the tensor's name and the round
            keys = torch.from_numpy(rng.client_keys(rng.key(name, self.round), self.ids))
            return rng.RowRandom(keys).uniform(*t.shape[1:])

        return SimpleNamespace(**{name: sample(name, t) for name, t in tensors.items()})

    def recorded(name: str) -> Any:
        """Return a function in place of a method of Cohort: it calls the method and appends copies to `messages`.

        Args:
            name: The method, such as "broadcast".  All tensors in its arguments are copied.
        """
        function = getattr(Cohort, name)

        def send(self: Cohort, *args: Tensor, **tensors: Any) -> SimpleNamespace:
            messages.extend(t.clone() for t in (*args, *tensors.values()) if isinstance(t, Tensor))
            return function(self, *args, **tensors)

        return send

    replaced = {name: recorded(name) for name in ("broadcast", "download", "fetch")}
    with patch.multiple(Cohort, upload=upload, **replaced):
        yield


# -- random numbers --------------------------------------------------------------------------------------
def global_random_states() -> dict[str, Any]:
    """Return the states of the global random generators, a dict with the keys "torch", "NumPy" and "Python".

    Two states are equal by == if the generator was not used or seeded in between.
    """
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.random.get_rng_state().tolist(),
        "NumPy": (numpy_state[1].tolist(), *numpy_state[2:]),
        "Python": random.getstate(),
    }


def generators_used_since(states: dict[str, Any]) -> list[str]:
    """Return which of "torch", "NumPy" and "Python" have another state of their global generator now.

    Args:
        states: The earlier states, a result of `global_random_states`.
    """
    now = global_random_states()
    return [name for name, state in states.items() if state != now[name]]


@contextlib.contextmanager
def other_global_seed(seed: int) -> Iterator[None]:
    """Return a context in which the global random generators of torch, NumPy and Python have this seed.

    At its end, their states are restored.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextlib.contextmanager
def permuted_random_numbers(order: np.ndarray, engine: Engine) -> Iterator[None]:
    """Give client j the random numbers of client order[j], in batches, dropout, cohorts and initial rows.

    Args:
        order: A permutation of the clients [N].
        engine: The engine, whose model initializes rows.
    """
    # the original functions: random bits by key and client, a generator by key with the client at its end, initial rows
    bits, generator, model = rng.bits, federation_module.generator, engine.model
    init_rows, num_clients = model.init_rows, len(order)

    def permuted_bits(base: int, *counters: np.ndarray) -> np.ndarray:  # counters[0]: the clients
        return bits(base, order[np.asarray(counters[0])], *counters[1:])

    def permuted_rows(clients: int | np.ndarray, *purpose: str | int) -> Tensor:
        """Return the initial rows of permuted clients, instead of `FlatModel.init_rows`.

        Args:
            clients: A number of rows, or the clients whose rows are returned.  Client i gets the row of order[i].
            *purpose: The use of the rows.  Rows that are requested by a number and with a purpose belong to the server,
                and are not permuted.
        """
        if not isinstance(clients, int):
            return init_rows(order[clients], *purpose)
        return init_rows(clients, *purpose) if purpose else init_rows(num_clients)[order[:clients]]

    with (
        patch.object(rng, "bits", permuted_bits),
        # key[-1]: the client
        patch.object(federation_module, "generator", lambda *key: generator(*key[:-1], int(order[key[-1]]))),
        patch.object(model, "init_rows", permuted_rows),
    ):
        yield


# -- synchronization with the device ---------------------------------------------------------------------
# Operations of torch whose result, or its shape, the CPU reads from the device.  Indexing does so for masks only.
SYNCHRONIZING = {
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


class Synchronizes(RuntimeError):
    """An operation reads a value back from the device."""


class RefuseSynchronization(TorchDispatchMode):
    """Raise Synchronizes for operations that read a value back from the device, for which a GPU must finish first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = str(func.overloadpacket)
        has_mask = name in INDEXING and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name in SYNCHRONIZING or str(func) in SYNCHRONIZING or has_mask:
            raise Synchronizes(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def steps_without_synchronization() -> Iterator[list[int]]:
    """Refuse synchronization with the device in local steps.

    Yields:
        A list, to which the position of the first client of each trained chunk is appended.  A chunk is the clients
        that are computed at once.
    """
    chunks: list[int] = []

    def wrapper(train: Training, cohort: Cohort, start: Tensor, arguments: dict[str, Any]) -> SimpleNamespace:
        """Train as cohort.train does, but raise `Synchronizes` if a chunk reads values back from the device.

        Args:
            train: The original cohort.train.
            cohort: The cohort.
            start: The initial rows.
            arguments: The other arguments of cohort.train.
        """
        run = cohort.engine.executor.run

        def watched_run(job: Callable[[int, int], None], *args: Any, **options: Any) -> None:
            """Run a job for each chunk as Executor.run does; raise Synchronizes if it waits for the device.

            Its arguments are the positions of the chunk's first client and after its last.  `chunks` records the first.
            """

            def chunk(first: int, stop: int) -> None:
                chunks.append(first)
                with RefuseSynchronization():
                    job(first, stop)

            run(chunk, *args, **options)

        with patch.object(cohort.engine.executor, "run", watched_run):
            return train(start, **arguments)

    with trained_by(wrapper):
        yield chunks
