"""The tiny ragged federation that checks run on, and the engines that compute it.

Six clients of 4 to 21 samples: some have fewer than a batch, some no multiple of it, and they are not sorted.
"""

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
    "loop": Plan("loop", 1, 1, 1),
    "threads": Plan("threads", 1, 2, 1),
    "vmap": Plan("vmap", 0, 1, 1),
    "pairs": Plan("vmap", 2, 1, 1),
    "threaded pairs": Plan("threads", 2, 2, 1),
}
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a sample, or of each input by name
VOCAB = 32  # tokens of an input that is named text
SIZES = (7, 21, 12, 4, 18, 9)  # ragged, unsorted, some below and some no multiple of the batch


def split_of(sizes: Sequence[int], test: Sequence[int] | None = None, val: Sequence[int] | None = None) -> Split:
    """Consecutive samples: all clients' train parts, then their test parts, then validation."""
    parts, start = [], 0
    for counts in (sizes, sizes if test is None else test, [0] * len(sizes) if val is None else val):
        parts.append(Ragged.from_sizes(np.arange(start, start + sum(counts)), np.array(counts)))
        start += sum(counts)
    return Split(parts[0], parts[2], parts[1])


def arrays_of(x: Any, y: np.ndarray, num_classes: int, **more: Any) -> Arrays:
    """A data set of inputs x [n, ...] and targets y [n, ...] without published parts."""
    return Arrays(x, y, np.zeros(len(y), np.int8), num_classes, **more)


def ragged(
    sizes: Sequence[int] = SIZES,
    shape: Shape = (1, 4, 4),
    classes: int = 3,
    seed: int = 0,
    test: Sequence[int] | None = None,
    val: Sequence[int] | None = None,
) -> tuple[Arrays, Split]:
    """Learnable classification: a noisy linear teacher of Gaussian inputs, or of the first of several by name, of which
    the one named text has tokens, 0 behind its end."""
    rng = np.random.default_rng(seed)
    split = split_of(sizes, test, val)
    n = sum(len(r.indices) for r in (split.train, split.test, split.val))
    parts = {
        name: _tokens(rng, n, *of) if name == "text" else _normal(rng, n, of) for name, of in wrap_inputs(shape).items()
    }
    x = next(iter(parts.values()))
    teacher = rng.normal(size=(x[0].size, classes))
    y = (x.reshape(n, -1) @ teacher + 0.5 * rng.normal(size=(n, classes))).argmax(1)
    return arrays_of(unwrap_inputs(parts, shape), y.astype(np.int64), classes), split


def _normal(rng: np.random.Generator, n: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=(n, *shape)).astype(np.float32)


def _tokens(rng: np.random.Generator, n: int, length: int) -> np.ndarray:
    """Texts of one token to all [n, length] int64, and 0 behind them."""
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
    """An engine on the CPU; limits: bytes of state in memory; options: seed, rounds, epochs, batch_size, ..."""
    federation.cohort_size = cohort_size or federation.num_clients
    model = module if isinstance(module, FlatModel) else FlatModel(module, columns)
    return Engine(
        federation=federation,
        model=model,
        optimizer=optimizer or SGD(lr=0.1),
        executor=Executor(PLANS[plan] if isinstance(plan, str) else plan, CPU),
        rows=RowStore(federation.num_clients, CPU, limits, limits),
        **{"batch_size": 5, "rounds": 4, **options},
    )


def all_clients(e: Engine, round: int = 0, mode: Mode = "round") -> Cohort:
    """The cohort of everybody."""
    return Cohort(e, np.arange(e.federation.num_clients), round, mode)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module whose initialization does not depend on what ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def deployed(e: Engine, algorithm: Any, round: int = 0, final: bool = True) -> Any:
    """What every client would deploy: [N, P] (or a dict of such)."""
    with torch.no_grad():
        rows = algorithm.personalized(all_clients(e, round, "evaluation"), final)
    if isinstance(rows, Tensor) and rows.dim() == 1:
        rows = rows.expand(e.federation.num_clients, -1)
    return rows
