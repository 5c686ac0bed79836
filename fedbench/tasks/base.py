"""The base class of tasks, a loss and metrics.  Letters: k clients with B samples each; n samples of all N clients.

A task is one file here and one in conf/task.  It is built once for each run, and `setup` reads the training data.
Tasks differ only in methods and attributes of `Task`; other packages never ask for a task by name.

Further letters: C classes, R outputs of the model for a sample.
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
from fedbench.tasks.scores import Direction, register_directions

Shape = Any  # of one sample: a tuple, or a dict of tuples by input name
SampleStatistics = dict[str, Tensor]  # by name: a statistic of each sample, [n, ...]
NOT_TASKS = {"base", "scores", "auto"}  # modules of this package without a task


class TrainingData(Protocol):
    """The part of a federation that `Task.setup` reads.

    Attributes:
        inputs: Stored inputs of all samples, [n, ...].
        targets: Targets of all samples, [n, ...].
        splits: The samples of each client, by split, such as "train".
        num_classes: C.
    """

    inputs: Any
    targets: Tensor
    splits: dict[str, Any]
    num_classes: int

    @property
    def device(self) -> torch.device:
        """The compute device, which stores the targets and computes outputs and losses."""
        ...

    def normalized(self, x: Tensor) -> Tensor:
        """Return stored inputs as the model receives them.

        Args:
            x: Inputs of any samples.  # [..., channels, H, W] for images

        Returns:
            uint8 images as float32, scaled to [0, 1] or by dataset.normalize standardized; other inputs unchanged.
        """
        ...


OLD_NAMES = {
    "tally": "sample_statistics",
    "draws": "has_stochastic_inputs",
    "drawn": "stochastic_inputs",
    "example": "example_targets",
}


class Task:
    """Base class of tasks, each for one kind of targets.  Letters: C classes, R outputs of the model for a sample.

    Targets and outputs have any leading axes: [B, ...] for one client, [k, B, ...] for k clients.  A task of your own
    must implement `loss`.  Every other method has a default that you may override.

    Attributes:
        kind: The kind of targets, as in `Arrays.task`.  "": any kind.
        primary: Metric that selects the best round, and that progress bar and tables show.
        higher_is_better: For each metric, whether larger values are better.
        fractions: Metrics that are fractions of 1.  Reports show them in per cent.
        single_label: Whether each target is the index of one class, [n].
        predicts: What num_classes counts, in the plural.
        has_stochastic_inputs: Whether `stochastic_inputs` computes inputs and targets from each batch.
    """

    kind: ClassVar[str] = ""
    primary: str = "loss"
    higher_is_better: dict[str, bool] = {"loss": False}
    fractions: frozenset[str] = frozenset()
    single_label: bool = False
    predicts: ClassVar[str] = "classes"
    has_stochastic_inputs: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        refuse_old_names(cls, OLD_NAMES)
        register_directions({name: Direction(up, name in cls.fractions) for name, up in cls.higher_is_better.items()})

    def for_targets(self, kind: str) -> Task:
        """Return the task for a kind of targets: this object, or in `Auto` the task that it chooses.

        Args:
            kind: The kind of targets, such as "classification" (``Arrays.task``).

        Raises:
            ConfigError: The task is for other targets.
        """
        require(
            self.kind in ("", kind),
            f"the task {type(self).__name__} needs targets of the kind {self.kind}, but those of the data set are of "
            f"the kind {kind}: set task={kind} or task=auto",
        )
        return self

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError if the task cannot use the targets of a data set.  The default accepts all.

        Args:
            targets: The targets, [n, ...].
            num_classes: C.

        Raises:
            ConfigError: The task cannot use these targets.
        """

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return one label for each sample, by which partitions divide the samples.  The default is 0 for all.

        Args:
            targets: The targets, [n, ...].
            num_classes: C.

        Returns:
            Labels, [n] int64.
        """
        return np.zeros(len(targets), np.int64)

    def example_targets(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray | None:
        """Return random targets for the command ``fedbench check``, which tests classes on random data.

        Args:
            rng: Random numbers.
            n: The number of samples.
            num_classes: C.

        Returns:
            Targets [n, ...].  None, the default: the check makes its own targets of this ``kind``.
        """
        return None

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor | None:
        """Count the samples, or the pixels of each sample, by class.

        Args:
            y: Targets, [n, ...].
            num_classes: C.

        Returns:
            Counts, [n, C] int64.  None: targets are not classes.
        """
        # single_label: each target is the index of one class, y [n]
        return F.one_hot(y, num_classes) if self.single_label else None

    def class_totals(self, y: Tensor, num_classes: int) -> Tensor | None:
        """Return how many samples, or pixels of samples, have each class; the sum of `class_counts`.

        Args:
            y: Targets, [n, ...].
            num_classes: C.

        Returns:
            Counts, [C] int64.  None: a target of this task is not a single class (``single_label``).
        """
        return torch.bincount(y, minlength=num_classes) if self.single_label else None

    def setup(self, federation: TrainingData) -> None:
        """Read what the task needs of the training data, once, before the first round.  The default reads nothing.

        Args:
            federation: The samples of all clients.
        """

    @cached_property
    def key(self) -> Hashable:
        """The type of the task and the values of all its attributes, as a hashable tuple for caches of compiled losses.

        Tasks with equal keys compute equal losses.
        """
        return (type(self), *((name, _hashable(value)) for name, value in sorted(vars(self).items()) if name != "key"))

    def input_shape(self, shape: Shape, num_classes: int) -> Shape:
        """Return the shape of a model's input for one sample.

        Args:
            shape: The shape of a stored sample; a dict by input name if there are several inputs.
            num_classes: C.

        Returns:
            The shape, or a dict of shapes by input name.  The default is that of the stored sample.
        """
        return shape

    def stochastic_inputs(self, x: Any, y: Tensor, random: RowRandom, num_classes: int) -> tuple[Any, Tensor]:
        """Return the inputs of the model and the targets of its outputs, computed from a batch and random numbers.

        Args:
            x: Normalized inputs, [k, B, ...], or a dict of them by name.
            y: Targets, [k, B, ...].
            random: A generator for each of k.  In training, they are keyed by client and step.  In evaluations, by
                sample (k = n, B = 1), so that a sample always has the same random numbers.
            num_classes: C.

        Returns:
            Inputs and targets with the axes [k, B, ...].  The default returns the given ones.
        """
        return x, y

    def outputs(self, num_classes: int) -> int:
        """Return R, the number of outputs of the model for a sample.  The default is num_classes, one per class."""
        return num_classes

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of the model's outputs for a batch, for example [B, R].

        Args:
            y: Targets, [B, ...].
            outputs: R.
        """
        return len(y), outputs

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the loss of each sample.  Every task must implement this method.

        Args:
            logits: Outputs of the model, [..., B, R], with any leading axes.
            y: Targets, [..., B].
            class_mask: The classes of each client, [k, C] bool.  None: all.

        Returns:
            Losses, [..., B].
        """
        raise NotImplementedError

    def loss_and_gradient(
        self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample, and the gradient of the weighted sum of losses.

        Args:
            logits: Outputs of the model, [k, B, R, ...].
            y: Targets, [k, B, ...].
            weight: Weight of each sample, [k, B].
            class_mask: The classes of each client, [k, C] bool.  None: all.

        Returns:
            Losses [k, B], and the gradient of sum(weight * loss) with respect to the logits.
        """
        with torch.enable_grad():  # the caller may have disabled it
            leaf = logits.detach().requires_grad_()
            loss = self.loss(leaf, y, class_mask)
            (grad,) = torch.autograd.grad((loss * weight).sum(), leaf)
        return loss.detach(), grad

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return the statistics of each sample from which `scores` computes the metrics.

        Evaluation stores them for all samples of a client, so they should be small.

        Args:
            logits: Outputs of the model, [k, B, R, ...].
            y: Targets, [k, B, ...].
            class_mask: The classes of each client, [k, C] bool.  None: all.

        Returns:
            Tensors [k, B, ...] by name.  The default has only "loss".
        """
        return {"loss": self.loss(logits, y, class_mask)}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client.

        Args:
            statistics: Statistics of all samples in client order, [n, ...] by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The classes of each client, [N, C] bool.  None: all.

        Returns:
            Metrics by name, [N] float64.  NaN: the client has no samples, or the metric is not defined.
        """
        return {"loss": mean_loss(statistics["loss"], offsets)}

    def directions(self) -> dict[str, Direction]:
        """Return {name of a metric: its Direction (higher_is_better, fraction)} for all metrics of the task."""
        return {name: Direction(up, name in self.fractions) for name, up in self.higher_is_better.items()}


def _hashable(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal values, to compare the attributes of two tasks.

    Tensors and arrays become their shapes and numbers, lists and dicts become tuples, and other objects that cannot be
    hashed become their ``repr``.
    """
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple(sorted((str(name), _hashable(item)) for name, item in value.items()))
    return value if isinstance(value, Hashable) else repr(value)


def mean_loss(loss: Tensor, offsets: np.ndarray) -> np.ndarray:
    """Return the mean loss of each client.

    Args:
        loss: Losses of all samples in client order, [n].
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        Means, [N] float64.  NaN: the client has no samples.
    """
    sizes = np.diff(offsets)  # [N]
    client = np.repeat(np.arange(len(sizes)), sizes)  # [n]
    return ratio(np.bincount(client, loss.cpu().numpy(), len(sizes)), sizes)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return numerator / denominator, element by element, and NaN where the denominator is 0 or negative."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, np.divide(numerator, denominator), np.nan)


def check_primary(primary: str, task: Task) -> str:
    """Check that a task has a metric, and return the metric's name unchanged.

    Args:
        primary: The name of the metric, the value of the option ``task.primary``.
        task: The task, whose `higher_is_better` lists its metrics.

    Raises:
        ConfigError: The task does not have the metric.
    """
    require(
        primary in task.higher_is_better,
        f"task.primary={primary} is not a metric of {type(task).__name__}: "
        f"choose one of {', '.join(task.higher_is_better)}",
    )
    return primary


@cache
def task_kinds() -> tuple[str, ...]:
    """Return the kinds of targets that have a task, such as "classification", sorted.

    Each kind is the name of a module of this package, so that ``task=<kind>`` selects its task.  Modules without a task
    are those in NOT_TASKS and those with an underscore.
    """
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(name for name in names if name not in NOT_TASKS and not name.startswith("_")))


def task_for(kind: str) -> type[Task]:
    """Return the class of the task for a kind of targets.

    Args:
        kind: The kind of targets, ``Arrays.task``.

    Raises:
        ConfigError: There is no such task.
    """
    if kind not in task_kinds():
        raise ConfigError(
            f"the data set's task is {kind!r}, but must be one of {', '.join(task_kinds())}: change the argument task "
            "with which the data set's class creates its Arrays"
        )
    module = importlib.import_module(f"fedbench.tasks.{kind}")
    # the class of the module that sets kind itself; imported and inherited ones do not count
    return next(c for c in vars(module).values() if isinstance(c, type) and vars(c).get("kind") == kind)
