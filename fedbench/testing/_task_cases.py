"""A task with random targets and outputs for six clients, one of which has no test samples."""

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

SAMPLES = 60  # the first half for training, 5 per client; the others for testing
TEST_SIZES = np.array([5, 9, 0, 3, 8, 5])
OFFSETS = np.concatenate(([0], TEST_SIZES.cumsum()))  # the test samples of client i are OFFSETS[i]:OFFSETS[i + 1]
K, B, CLASSES = 3, 5, 4
SIDE = 6  # pixels of images and masks


def random_targets() -> dict[str, tuple[np.ndarray, int]]:
    """Return targets [SAMPLES, ...] and the number of classes, by kind of task."""
    rng = np.random.default_rng(0)
    masks = rng.integers(0, CLASSES, (SAMPLES, SIDE, SIDE))
    masks[rng.random(masks.shape) < 0.1] = 255  # no class
    return {
        "classification": (np.arange(SAMPLES) * 7 % CLASSES, CLASSES),
        "multilabel": ((rng.random((SAMPLES, CLASSES)) < 0.4).astype(np.float32), CLASSES),
        "segmentation": (masks, CLASSES),
        "regression": (rng.normal(2, 3, (SAMPLES, 1)).astype(np.float32), 1),
    }


@dataclass
class TaskCase:
    """A task and its targets.

    Args:
        values: `_target_` and options of the task.
        kind: The kind of targets.
        targets: The targets [SAMPLES, ...].
        num_classes: The number of classes.
    """

    values: dict[str, Any]
    kind: str
    targets: np.ndarray
    num_classes: int

    def make(self, targets: np.ndarray | None = None) -> Task:
        """Return a new task that is set up on these targets."""
        task = make(self.values).for_targets(self.kind)
        task.setup(self.federation(task, targets))
        return task

    def federation(self, task: Task, targets: np.ndarray | None = None) -> Federation:
        """Return a federation of six clients with random inputs."""
        y = torch.from_numpy(self.targets if targets is None else targets)
        generator = torch.Generator().manual_seed(5)
        images = torch.randint(256, (len(y), 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        x = images if task.has_stochastic_inputs else torch.randn(len(y), 16, generator=generator)
        train = Ragged.from_sizes(np.arange(30), np.full(6, 5))
        test = Ragged.from_sizes(np.arange(30, SAMPLES), TEST_SIZES)
        none = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(6, np.int64))
        return Federation(x, y, {"train": train, "val": none, "test": test}, task, self.num_classes)

    @functools.cached_property
    def task(self) -> Task:
        """Return the task, set up."""
        return self.make()

    def outputs(self, *shape: int, seed: int = 0) -> Tensor:
        """Return random outputs of a model for batches of this shape, such as (K, B)."""
        y = self.batch(shape[-1])
        output_shape = self.task.output_shape(y, self.task.outputs(self.num_classes))
        return torch.randn(*shape[:-1], *output_shape, generator=torch.Generator().manual_seed(seed))

    def batch(self, *shape: int) -> Tensor:
        """Return the targets of batches of this shape."""
        targets = self.targets_of(0, int(np.prod(shape)))
        return targets.view(*shape, *targets.shape[1:])

    def targets_of(self, start: int, stop: int) -> Tensor:
        """Return the targets of the samples start to stop - 1, or the random targets that the task samples."""
        if not self.task.has_stochastic_inputs:
            return torch.from_numpy(self.targets[start:stop])
        return self.federation(self.task).gather(torch.arange(start, stop))[1]

    @property
    def class_mask(self) -> Tensor:
        """Return a mask that excludes one class of each client.  # [K, C] bool"""
        mask = torch.ones(K, self.num_classes, dtype=torch.bool)
        mask[torch.arange(K), torch.arange(K) % self.num_classes] = False
        return mask

    def sample_statistics(self, start: int = 0, stop: int = 30) -> dict[str, Tensor]:
        """Return the statistics of the test samples start to stop - 1, computed in one batch."""
        logits, y = self.test_outputs[None, start:stop], self.test_targets[None, start:stop]
        return {name: value[0] for name, value in self.task.sample_statistics(logits, y).items()}

    @functools.cached_property
    def test_outputs(self) -> Tensor:
        """Return random outputs for the test samples of all clients.  # [30, ...]"""
        return self.outputs(30, seed=3)

    @functools.cached_property
    def test_targets(self) -> Tensor:
        """Return the targets of the test samples of all clients.  # [30, ...]"""
        return self.targets_of(30, SAMPLES)

    @functools.cached_property
    def scores(self) -> dict[str, np.ndarray]:
        """Return the test scores of all clients."""
        return self.task.scores(self.sample_statistics(), OFFSETS)


def case_for(
    target: Target,
    options: Mapping[str, Any] | None = None,
    targets: np.ndarray | None = None,
    num_classes: int | None = None,
) -> TaskCase:
    """Return the task with the first targets that it accepts.

    Raises:
        ConfigError: The task cannot be built, or accepts no targets.
    """
    values = described("task", target, options)
    built = make(values)
    message = f"{path_of(target)} is not a task (a subclass of fedbench.tasks.base.Task)"
    require(hasattr(built, "for_targets"), message)
    if targets is None and isinstance(built, Task):
        targets, num_classes = built.example_targets(np.random.default_rng(0), SAMPLES, CLASSES), CLASSES
    examples = random_targets() if targets is None else {getattr(built, "kind", ""): (targets, num_classes or 1)}
    reason = ""
    for kind, (y, classes) in examples.items():
        try:
            built.for_targets(kind).check(y, classes)
            return TaskCase(values, kind, y, classes)
        except ConfigError as refused:
            reason = str(refused)
    raise ConfigError(f"{path_of(target)} accepts none of the example targets: {reason}; pass targets=")
