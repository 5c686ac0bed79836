"""The small federation that checks run on, and engines that train on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.inputs import unwrap_inputs, wrap_inputs
from fedbench.core.round_context import Mode
from fedbench.core.rows import RowStore
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD, Optimizer
from fedbench.nn.flat import FlatModel

CPU = torch.device("cpu")
PLANS = {
    "loop": Plan("loop", chunk=1, workers=1, intra=1),
    "threads": Plan("threads", chunk=1, workers=2, intra=1),
    "vmap": Plan("vmap", chunk=0, workers=1, intra=1),  # 0: all clients
    "pairs": Plan("vmap", chunk=2, workers=1, intra=1),
    "threaded pairs": Plan("threads", chunk=2, workers=2, intra=1),
}
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a sample, or of each named input
VOCAB = 32  # tokens of an input named text
SIZES = (7, 21, 12, 4, 18, 9)  # unsorted; some below the batch size, some not a multiple of it


def split_of(sizes: Sequence[int], test: Sequence[int] | None = None, val: Sequence[int] | None = None) -> Split:
    """Return a split of consecutive samples: training, then test, then validation samples of all clients.

    Args:
        sizes: The number of training samples of each client.
        test: The number of test samples of each client; None for the numbers of training samples.
        val: The number of validation samples of each client; None for no validation samples.
    """
    parts, start = [], 0
    for counts in (sizes, sizes if test is None else test, [0] * len(sizes) if val is None else val):
        parts.append(Ragged.from_sizes(np.arange(start, start + sum(counts)), np.array(counts)))
        start += sum(counts)
    return Split(train=parts[0], val=parts[2], test=parts[1])


def arrays_of(x: Any, y: np.ndarray, num_classes: int, **options: Any) -> Arrays:
    """Return a data set without a published split into training and test samples.

    Args:
        x: The inputs [n, ...].
        y: The targets [n, ...].
        num_classes: The number of classes.
        **options: Other fields of Arrays, such as class_names.
    """
    no_split = np.zeros(len(y), np.int8)  # 0 for each sample
    return Arrays(x, y, no_split, num_classes, **options)


def ragged(
    sizes: Sequence[int] = SIZES,
    shape: Shape = (1, 4, 4),
    classes: int = 3,
    seed: int = 0,
    test: Sequence[int] | None = None,
    val: Sequence[int] | None = None,
) -> tuple[Arrays, Split]:
    """Return a classification problem, with clients of different sizes.

    Inputs are normally distributed.  The label is the largest component of a noisy linear function of the inputs, or of
    the first one if there are several.

    Args:
        sizes: The number of training samples of each client.
        shape: The shape of a sample, or of each named input.  An input named text contains tokens, padded by 0.
            One named mask, after it, is 1 for tokens and 0 for padding.
        classes: The number of classes.
        seed: The seed of the samples.
        test: The number of test samples of each client; None for the numbers of training samples.
        val: The number of validation samples of each client; None for no validation samples.

    Returns:
        The data set and the split.
    """
    rng = np.random.default_rng(seed)
    split = split_of(sizes, test, val)
    n = sum(len(part.indices) for part in (split.train, split.test, split.val))
    inputs = {}
    for name, sample_shape in wrap_inputs(shape).items():  # wrap_inputs: a single input becomes a dict of one
        if name == "text":
            inputs[name] = _tokens(rng, n, *sample_shape)
        elif name == "mask":
            inputs[name] = (inputs["text"] > 0).astype(np.int64)
        else:
            inputs[name] = rng.normal(size=(n, *sample_shape)).astype(np.float32)
    x = next(iter(inputs.values()))
    weight = rng.normal(size=(x[0].size, classes))
    y = (x.reshape(n, -1) @ weight + 0.5 * rng.normal(size=(n, classes))).argmax(1)
    return arrays_of(unwrap_inputs(inputs, shape), y.astype(np.int64), classes), split


def _tokens(rng: np.random.Generator, n: int, length: int) -> np.ndarray:
    """Return n sequences of random tokens 1 to VOCAB - 1, of random lengths and padded by 0.  # [n, length] int64"""
    ends = rng.integers(1, length + 1, size=(n, 1))
    return np.where(np.arange(length) < ends, rng.integers(1, VOCAB, size=(n, length)), 0)


def engine_on(
    federation: Federation,
    module: nn.Module | FlatModel,
    optimizer: Optimizer | None = None,
    *,
    plan: str | Plan = "vmap",
    columns: dict | None = None,
    limits: int = 1 << 30,
    cohort_size: int | None = None,
    **options: Any,
) -> Engine:
    """Return an engine on the device of the federation.

    Args:
        federation: The samples of all clients; its cohort size is set in place.
        module: A module, or a FlatModel, whose parameters are one vector.
        optimizer: The optimizer of clients; None for SGD with learning rate 0.1.
        plan: How clients are computed, or its name in PLANS, such as "vmap" (all at once) or "loop" (one by one).
        columns: The column groups of the model, patterns of parameter names by group; not used for a flat model.
        limits: The largest number of bytes of client states in memory.  If there are more, they are stored in files.
        cohort_size: The number of clients per round; default: all.
        **options: Other fields of Engine, such as seed, rounds, epochs and batch_size.
    """
    federation.cohort_size = cohort_size or federation.num_clients
    device = federation.device
    model = module if isinstance(module, FlatModel) else FlatModel(module, columns, device=device)
    return Engine(
        federation=federation,
        model=model,
        optimizer=optimizer or SGD(lr=0.1),
        executor=Executor(PLANS[plan] if isinstance(plan, str) else plan, device),
        rows=RowStore(federation.num_clients, device, device_limit=limits, host_limit=limits),
        **{"batch_size": 5, "rounds": 4, **options},  # options replace these
    )


def all_clients(e: Engine, round: int = 0, mode: Mode = "round") -> Cohort:
    """Return the cohort of all clients of an engine.

    Args:
        e: The engine, which has the clients, their samples and the model.
        round: Index of the round, from 0.
        mode: What the cohort is used for: "round", which may change states of clients, or "evaluation".
    """
    return Cohort(e, np.arange(e.federation.num_clients), round, mode)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return make(), called while torch's global CPU generator has this seed; then restore the generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def deployed(e: Engine, algorithm: Any, round: int = 0, final: bool = True) -> Any:
    """Return the parameters that each client deploys after a round [N, P], or the dict that a method returns instead.

    A method returns a dict, such as {"theta": rows, ...}, if a prediction needs more than the parameters.

    Args:
        e: The engine, which has the clients, their samples and the model.
        algorithm: The method, which has trained.
        round: The round (from 0).
        final: Whether it is the last one, after which some methods fine-tune.
    """
    with torch.no_grad():
        rows = algorithm.personalized(all_clients(e, round, "evaluation"), final)
    if isinstance(rows, Tensor) and rows.dim() == 1:
        rows = rows.expand(e.federation.num_clients, -1)
    return rows
