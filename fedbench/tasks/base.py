"""What a data set asks of a model: the loss that it learns by, and the scores that its outputs get.

A task is one file here and one in conf/task.  It is built once a run (`setup` shows it the training data), and nothing
outside this folder asks for its name: what differs between tasks is a method or an attribute of `Task`.

Letters: n samples, N clients, k of them at once, B batch, C classes, R outputs of the model.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import ConfigError, require
from fedbench.core.renamed import refuse_old_names
from fedbench.core.rng import RowRandom
from fedbench.tasks.scores import Direction, declare

Shape = Any  # of one sample: a tuple, or a dict of such by input
SampleStatistics = dict[str, Tensor]  # by name: what is kept of each sample, [n, ...]
NO_KIND = {"base", "scores", "auto"}  # modules of this folder that are no task


class Training(Protocol):
    """What `Task.setup` reads of a federation: inputs as they are stored and targets [n, ...] of all samples, which of
    them are trained on."""

    inputs: Any
    targets: Tensor
    splits: dict[str, Any]
    num_classes: int

    @property
    def device(self) -> torch.device:
        """Where targets lie, and where the loss is computed."""
        ...

    def normalized(self, x: Tensor) -> Tensor:
        """Stored inputs as models are given them."""
        ...


OLD_NAMES = {"tally": "sample_statistics"}


class Task:
    """Base class of tasks.  Targets and outputs have any leading axes: [B, ...] for one client, [k, B, ...] for many.

    Attributes:
        kind: The kind of targets, as in `Arrays.task` ("": any).
        primary: Score that selects the best round and is shown in the progress bar and in tables.
        higher_is_better: For every score, whether larger values are better.
        fractions: Scores that are fractions of 1, shown in per cent.
        single_label: Whether a target is the number of one class, [n].
        predicts: What num_classes counts, in the plural.
        draws: Whether `drawn` computes the inputs and targets from a batch.
    """

    kind: ClassVar[str] = ""
    primary: str = "loss"
    higher_is_better: dict[str, bool] = {"loss": False}
    fractions: frozenset[str] = frozenset()
    single_label: bool = False
    predicts: ClassVar[str] = "classes"
    draws: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        refuse_old_names(cls, OLD_NAMES)
        declare({name: Direction(up, name in cls.fractions) for name, up in cls.higher_is_better.items()})

    def for_targets(self, kind: str) -> Task:
        """The task for targets of this kind: itself, or ConfigError where it is for others."""
        require(
            self.kind in ("", kind),
            f"task={type(self).__name__} is for {self.kind} targets, and the data set's are {kind}: "
            f"choose task={kind} or task=auto",
        )
        return self

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse targets [n, ...] that it cannot learn from, with one sentence."""

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """One label per sample, what partitions look at.  # [n] int64"""
        return np.zeros(len(targets), np.int64)

    def example(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray | None:
        """Targets [n, ...] as such a task has them, for trying it out; None: `fedbench check` has some of its kind."""
        return None

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor | None:
        """How many samples, or parts of samples, of each class are among the targets y [n, ...]; None where a task's
        targets are no such classes.  # [n, C] int64"""
        return F.one_hot(y, num_classes) if self.single_label else None

    def class_totals(self, y: Tensor, num_classes: int) -> Tensor | None:
        """Return the number of targets y [n, ...] of each class; None if targets have no single class.  # [C]"""
        return torch.bincount(y, minlength=num_classes) if self.single_label else None

    def setup(self, federation: Training) -> None:
        """Look at the training data, once, before the first round."""

    @cached_property
    def key(self) -> Hashable:
        """What tells two tasks of one process apart: the class, and every option and number that it holds."""
        return (type(self), *((name, _frozen(value)) for name, value in sorted(vars(self).items()) if name != "key"))

    def input_shape(self, shape: Shape, num_classes: int) -> Shape:
        """Shape of one sample (of each input) as a model is given it, of its shape as it is stored."""
        return shape

    def drawn(self, x: Any, y: Tensor, random: RowRandom, num_classes: int) -> tuple[Any, Tensor]:
        """What a model is given, and what its outputs are compared with, of normalized inputs [k, B, ...] and targets
        [k, B, ...].

        random: keyed by client and step in training; by sample in evaluations, k = n, B = 1, so that a sample is the
        same one at all times.  What it returns has the axes [k, B, ...], too.
        """
        return x, y

    def outputs(self, num_classes: int) -> int:
        """R, the width of the model's last layer."""
        return num_classes

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Shape of the outputs for targets y [B, ...]."""
        return len(y), outputs

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Per-sample loss, before any weight.  logits [..., B, R]; class_mask [k, C]: clients' classes.  # [..., B]"""
        raise NotImplementedError

    def loss_and_gradient(
        self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Per-sample loss [k, B], and the gradient of sum(weight * loss) with respect to the logits."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self.loss(leaf, y, class_mask)
            (grad,) = torch.autograd.grad((loss * weight).sum(), leaf)
        return loss.detach(), grad

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """What the scores need of a batch, as little as possible: evaluation keeps it of every sample.

        logits [k, b, R, ...], y [k, b, ...], class_mask [k, C]; each result [k, b, ...].
        """
        return {"loss": self.loss(logits, y, class_mask)}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the scores of each client from the statistics [n, ...] of samples in client order.

        offsets [N+1]: client i has samples offsets[i]:offsets[i+1]; class_mask bool [N, C].  NaN where a client has no
        samples, or a score is not defined.  # each float64 [N]
        """
        return {"loss": mean_loss(statistics["loss"], offsets)}

    def directions(self) -> dict[str, Direction]:
        """What each score's numbers mean, for reports."""
        return {name: Direction(up, name in self.fractions) for name, up in self.higher_is_better.items()}


def _frozen(value: Any) -> Hashable:
    """A value that can be compared and hashed; a tensor as its numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, np.ndarray):
        return value.shape, tuple(value.flatten().tolist())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((str(name), _frozen(item)) for name, item in value.items()))
    return value if isinstance(value, Hashable) else repr(value)


def mean_loss(loss: Tensor, offsets: np.ndarray) -> np.ndarray:
    """Mean of the per-sample loss [n] over each client's samples.  # [N]"""
    sizes = np.diff(offsets)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return ratio(np.bincount(client, loss.cpu().numpy(), len(sizes)), sizes)


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom, NaN where bottom is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom > 0, np.divide(top, bottom), np.nan)


def check_primary(primary: str, task: Task) -> str:
    """Refuse a primary score that a task does not have."""
    require(
        primary in task.higher_is_better,
        f"task.primary={primary} is no score of {type(task).__name__}, which has {', '.join(task.higher_is_better)}",
    )
    return primary


@cache
def kinds() -> tuple[str, ...]:
    """The kinds of targets that there is a task for: the files of this folder."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(name for name in found if name not in NO_KIND and not name.startswith("_")))


def task_for(kind: str) -> type[Task]:
    """The class for targets of this kind; ConfigError for one that there is no task for."""
    if kind not in kinds():
        raise ConfigError(f"the data set's task is {kind!r}; fedbench knows {', '.join(kinds())}")
    module = importlib.import_module(f"fedbench.tasks.{kind}")
    return next(c for c in vars(module).values() if isinstance(c, type) and vars(c).get("kind") == kind)
