"""A task, shown targets of its kind for six clients, one of them without samples, and outputs drawn at random."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged
from fedbench.engine.federation import Federation
from fedbench.simulation.instantiate import make
from fedbench.tasks.base import Task
from fedbench.testing._targets import Target, described, path_of

SIZES = np.array([5, 9, 0, 3, 8, 5])
K, B, CLASSES = 3, 5, 4
SIDE = 6  # of masks


def examples() -> dict[str, tuple[np.ndarray, int]]:
    """By kind: targets of 60 samples, half of which are trained on, and the number of classes."""
    rng, n = np.random.default_rng(0), 60
    masks = rng.integers(0, CLASSES, (n, SIDE, SIDE))
    masks[rng.random(masks.shape) < 0.1] = 255  # belongs to no class
    several = (rng.random((n, CLASSES)) < 0.4).astype(np.float32)
    return {
        "classification": (np.arange(n) * 7 % CLASSES, CLASSES),
        "multilabel": (several, CLASSES),
        "segmentation": (masks, CLASSES),
        "regression": (rng.normal(2, 3, (n, 1)).astype(np.float32), 1),
    }


@dataclass
class TaskCase:
    """A task, and the targets that it is shown: values make it; targets [n, ...], of num_classes classes."""

    values: dict[str, Any]
    kind: str
    targets: np.ndarray
    num_classes: int

    def make(self, targets: np.ndarray | None = None) -> Task:
        """A new one that has seen the training data."""
        task = make(self.values).for_targets(self.kind)
        task.setup(self.federation(task, targets))
        return task

    def federation(self, task: Task, targets: np.ndarray | None = None) -> Federation:
        """Six clients: the first 30 samples for training, five each, the others for testing."""
        y = torch.from_numpy(self.targets if targets is None else targets)
        generator = torch.Generator().manual_seed(5)
        pictures = torch.randint(256, (len(y), 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        x = pictures if task.has_stochastic_inputs else torch.randn(len(y), 16, generator=generator)
        train = Ragged.from_sizes(np.arange(30), np.full(6, 5))
        test = Ragged.from_sizes(np.arange(30, 60), SIZES)
        none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(6, np.int64))
        return Federation(x, y, {"train": train, "val": none, "test": test}, task, self.num_classes)

    @functools.cached_property
    def task(self) -> Task:
        """The task, set up."""
        return self.make()

    def outputs(self, *lead: int, seed: int = 0) -> Tensor:
        """Random outputs of a model for batches with these leading axes, the last of which are samples."""
        y = self.batch(lead[-1])
        shape = self.task.output_shape(y, self.task.outputs(self.num_classes))
        return torch.randn(*lead[:-1], *shape, generator=torch.Generator().manual_seed(seed))

    def batch(self, *lead: int) -> Tensor:
        """Targets with these leading axes, as outputs are compared with them."""
        count = int(np.prod(lead))
        return self.compared(0, count).view(*lead, *self.compared(0, 1).shape[1:])

    def compared(self, a: int, b: int) -> Tensor:
        """Targets of samples a to b - 1, or what a task draws instead of them."""
        if not self.task.has_stochastic_inputs:
            return torch.from_numpy(self.targets[a:b])
        return self.federation(self.task).gather(torch.arange(a, b))[1]

    @property
    def class_mask(self) -> Tensor:
        """Each client's classes: all but one.  # [K, C] bool"""
        mask = torch.ones(K, self.num_classes, dtype=torch.bool)
        mask[torch.arange(K), torch.arange(K) % self.num_classes] = False
        return mask

    def sample_statistics(self, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What is kept of samples [n], in one batch of one client."""
        return {name: value[0] for name, value in self.task.sample_statistics(logits[None], y[None]).items()}

    @functools.cached_property
    def tested(self) -> tuple[Tensor, Tensor, np.ndarray]:
        """Outputs and targets of the six clients' 30 test samples, and where each client's begin."""
        return self.outputs(30, seed=3), self.compared(30, 60), np.concatenate(([0], SIZES.cumsum()))


def case_for(
    target: Target,
    options: Mapping[str, Any] | None = None,
    targets: np.ndarray | None = None,
    num_classes: int | None = None,
) -> TaskCase:
    """The task with the first targets that it takes; ConfigError where there are none."""
    values = described("task", target, options)
    built = make(values)
    require(hasattr(built, "for_targets"), f"{path_of(target)} is no task (a subclass of fedbench.tasks.base.Task)")
    own, kind = targets, getattr(built, "kind", "")
    if own is None and isinstance(built, Task):
        own, num_classes = built.example_targets(np.random.default_rng(0), 60, CLASSES), CLASSES
    given = examples() if own is None else {kind: (own, num_classes or 1)}
    reason = ""
    for kind, (y, classes) in given.items():
        try:
            built.for_targets(kind).check(y, classes)
            return TaskCase(values, kind, y, classes)
        except ConfigError as refused:
            reason = str(refused)
    raise ConfigError(f"{path_of(target)} takes none of the targets that it was shown: {reason}; say targets=")
