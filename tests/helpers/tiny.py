"""Small federations and problems for tests: clients of different sizes, least squares and affine losses."""

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
    """Return a copy of the configuration for these overrides, composed only once because that is slow."""
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
    """Return an engine on the CPU.  Options are fields of Engine, such as seed, rounds, epochs and batch_size."""
    federation = Federation.build(arrays, split, CPU, True, augment)
    return engine_on(
        federation, module, optimizer, plan=plan, columns=columns, limits=limits, cohort_size=cohort_size, **options
    )


def mlp(inputs: int = 16, hidden: int = 8, classes: int = 3, seed: int = 0) -> nn.Module:
    """Return a network of two layers, `body` and `head`, on flattened inputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
            self.head = nn.Linear(hidden, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return seeded(Net, seed)


HEAD = {"base": ["body.*"], "head": ["head.*"]}


# -- problems with known solutions -----------------------------------------------------------------------
class Squares(Task):
    """Loss 0.5 ||output - y||^2 of a sample.

    With a constant input 1 and a linear layer without bias, whose d weights are the row theta,
    f_i(theta) = 0.5 mean ||theta - y||^2 has the gradient theta - mean(y) and the Hessian I.
    """

    kind = "squares"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        return 0.5 * (logits - y).square().sum(-1)


class Affine(Task):
    """Loss <output, y> of a sample, so that f_i(theta) = theta . mean(y) is affine in theta."""

    kind = "affine"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        return (logits * y).sum(-1)


def targets_federation(
    targets: Sequence[np.ndarray], task: Any = None, inputs: Sequence[np.ndarray] | None = None
) -> Federation:
    """Return a federation whose client i has targets[i] [n_i, d] and inputs 1, or inputs[i] [n_i].

    Training and test samples are the same.
    """
    y = torch.from_numpy(np.concatenate(targets).astype(np.float32))
    values = np.ones(len(y)) if inputs is None else np.concatenate(inputs)
    x = torch.from_numpy(values.astype(np.float32))[:, None]
    samples = Ragged.from_sizes(np.arange(len(y)), np.array([len(t) for t in targets]))
    none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(len(targets), np.int64))
    return Federation(x, y, {"train": samples, "test": samples, "val": none}, task or Squares(), y.shape[1])


class Point(nn.Module):
    """x [B, 1] -> x theta [B, d], with initial values `start` [d] of theta."""

    def __init__(self, start: Sequence[float]):
        super().__init__()
        self.theta = nn.Linear(1, len(start), bias=False)
        self.theta.weight.data = torch.tensor(start, dtype=torch.float32)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.theta(x)


def play(
    e: Engine, algorithm: Algorithm, rounds: int = 1, cohorts: Sequence[Sequence[int]] | None = None, begin: int = 0
) -> Algorithm:
    """Set up a method, unless begin > 0, and run rounds with these cohorts (default: all clients)."""
    if begin == 0:
        algorithm.check(e.federation, e.model, e.optimizer)
        algorithm.setup(e.federation, e.model, e.rows)
    for r in range(begin, begin + rounds):
        ids = np.arange(e.federation.num_clients) if cohorts is None else np.array(cohorts[r - begin])
        algorithm.round(Cohort(e, ids, r))
    return algorithm


def calls(work: Callable[[], object]) -> int:
    """Return the number of function calls of some work, a measure of time that does not depend on the machine."""
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
    """Return the states of the global random generators, which fedbench must not change."""
    return torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002


def untouched(before: tuple[Tensor, np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(before, global_state()))


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Assert that tensors, or dicts of tensors, are equal up to an absolute and relative tolerance."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            close(a[name], b[name], tolerance)
    else:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def equal(a: Any, b: Any) -> None:
    """Assert that tensors, or dicts of tensors, are equal bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            equal(a[name], b[name])
    else:
        assert torch.equal(a, b), f"differ by {float((a - b).abs().max())}"


@contextlib.contextmanager
def on_disk_first(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Assert that each file is synchronized to disk before os.replace gives it its name.  Yield the names."""
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
    """Return parameters of a test, and mark every second one as slow, because the others test the same code."""
    return [pytest.param(value, marks=pytest.mark.slow if i % 2 else ()) for i, value in enumerate(values)]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` fills once, in the first process of pytest that needs it."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
