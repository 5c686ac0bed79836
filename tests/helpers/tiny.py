"""Small federations and problems: ragged classification, least squares and affine losses with known answers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fedbench.algorithms.base import Algorithm
from fedbench.app.compose import Composer
from fedbench.config.choices import with_choices
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Plan
from fedbench.engine.federation import Federation
from fedbench.engine.optim import Optimizer
from fedbench.tasks.base import Task
from fedbench.testing._federation import (
    CPU,
    PLANS,
    SIZES,
    all_clients,
    arrays_of,
    deployed,
    engine_on,
    ragged,
    seeded,
    split_of,
)

__all__ = ["CPU", "PLANS", "SIZES", "all_clients", "arrays_of", "deployed", "engine_on", "ragged", "seeded", "split_of"]


@functools.cache
def _composer() -> Composer:
    return Composer()


@functools.cache
def _composed(*overrides: str) -> DictConfig:
    return _composer().compose([*overrides])


def compose(overrides: Sequence[str]) -> DictConfig:
    """``compose``, which takes a fifth of a second, once for the same overrides; everybody has a copy."""
    full = _composed(*overrides)
    return with_choices(full, full.hydra)


def engine(
    arrays: Arrays,
    split: Split,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    plan: str | Plan = "vmap",
    columns: dict | None = None,
    augment: dict | None = None,
    limits: int = 1 << 30,
    cohort_size: int | None = None,
    **options: Any,
) -> Engine:
    """An engine on the CPU; options: seed, rounds, epochs, batch_size, drop_last, eval_batch."""
    federation = Federation.build(arrays, split, CPU, True, augment)
    return engine_on(
        federation, module, optimizer, plan=plan, columns=columns, limits=limits, cohort_size=cohort_size, **options
    )


def mlp(inputs: int = 16, hidden: int = 8, classes: int = 3, seed: int = 0) -> nn.Module:
    """Two layers, `body` and `head`, on flattened inputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
            self.head = nn.Linear(hidden, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return seeded(Net, seed)


HEAD = {"base": ["body.*"], "head": ["head.*"]}


# -- problems with known answers -------------------------------------------------------------------------
class Squares(Task):
    """0.5 ||output - y||^2 per sample: with one constant input 1 and a linear layer without bias, whose d weights
    are the row theta, f_i(theta) = 0.5 mean ||theta - y||^2, of gradient theta - mean(y) and Hessian I."""

    kind = "squares"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        return 0.5 * (logits - y).square().sum(-1)


class Affine(Task):
    """<output, y> per sample: f_i(theta) = theta . mean(y), affine in theta."""

    kind = "affine"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        return (logits * y).sum(-1)


def targets_federation(
    targets: Sequence[np.ndarray], task: Any = None, inputs: Sequence[np.ndarray] | None = None
) -> Federation:
    """Client i holds samples with targets[i] [n_i, d] and inputs 1 (or inputs[i] [n_i]), for training and testing."""
    y = torch.from_numpy(np.concatenate(targets).astype(np.float32))
    given = np.ones(len(y)) if inputs is None else np.concatenate(inputs)
    x = torch.from_numpy(given.astype(np.float32))[:, None]
    own = Ragged.from_sizes(np.arange(len(y)), np.array([len(t) for t in targets]))
    none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(len(targets), np.int64))
    return Federation(x, y, {"train": own, "test": own, "val": none}, task or Squares(), y.shape[1])


class Point(nn.Module):
    """x [B, 1] -> x theta [B, d]; theta starts at `start` [d].  The second half of theta is the group head."""

    def __init__(self, start: Sequence[float]):
        super().__init__()
        self.theta = nn.Linear(1, len(start), bias=False)
        self.theta.weight.data = torch.tensor(start, dtype=torch.float32)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.theta(x)


def play(
    e: Engine, algorithm: Algorithm, rounds: int = 1, cohorts: Sequence[Sequence[int]] | None = None, begin: int = 0
) -> Algorithm:
    """Set the method up (unless begin > 0) and run rounds with these cohorts (default: everybody)."""
    if begin == 0:
        algorithm.check(e.federation, e.model, e.optimizer)
        algorithm.setup(e.federation, e.model, e.rows)
    for r in range(begin, begin + rounds):
        ids = np.arange(e.federation.num_clients) if cohorts is None else np.array(cohorts[r - begin])
        algorithm.round(Cohort(e, ids, r))
    return algorithm


def calls(work: Callable[[], object]) -> int:
    """How many functions some work calls, in this thread: what it takes, whatever else the machine does."""
    count = 0

    def seen(frame: Any, event: str, function: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def global_state() -> tuple[Tensor, np.ndarray]:
    """Of the global generators, which nothing in fedbench may touch."""
    return torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002


def untouched(before: tuple[Tensor, np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(before, global_state()))


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Equal up to tolerance, absolutely and relatively; dicts entry by entry."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            close(a[name], b[name], tolerance)
    else:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def equal(a: Any, b: Any) -> None:
    """Bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            equal(a[name], b[name])
    else:
        assert torch.equal(a, b), f"differ by {float((a - b).abs().max())}"


@contextlib.contextmanager
def on_disk_first(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Watches os.replace, which gives a file its name, for files whose bytes were not all synchronized before; yields
    the names given."""
    names: list[str] = []
    synchronized: dict[int, int] = {}  # bytes by inode
    fsync, replace = os.fsync, os.replace

    def note(file: int) -> None:
        fsync(file)
        synchronized[os.fstat(file).st_ino] = os.fstat(file).st_size

    def check(source: Path, target: Path) -> None:
        found = os.stat(source)
        assert synchronized.get(found.st_ino) == found.st_size, f"{target} may be empty after a power cut"
        names.append(Path(target).name)
        replace(source, target)

    with patch.context() as patched:
        patched.setattr(os, "fsync", note)
        patched.setattr(os, "replace", check)
        yield names


def every_second(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, every second of which is slow: the others guard the same code."""
    return [pytest.param(value, marks=pytest.mark.slow if i % 2 else ()) for i, value in enumerate(values)]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that make has filled, whichever of pytest's processes asked first."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
