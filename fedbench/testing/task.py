"""Checks of tasks on random outputs for batches of B = 5 samples of each of K = 3 clients: loss, gradient and scores.

The loss is one value per sample, and scores can be computed in small batches.  Targets are random, too.  There are six
clients, one of which has no test samples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.inputs import wrap_inputs
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged
from fedbench.engine.federation import Federation, Inputs
from fedbench.simulation.instantiate import make
from fedbench.tasks.base import Task
from fedbench.testing import _probes as probes
from fedbench.testing._federation import all_clients, engine_on
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

SAMPLES = 60  # the first half for training, 5 per client; the others for testing
TEST_SIZES = np.array([5, 9, 0, 3, 8, 5])
OFFSETS = np.concatenate(([0], TEST_SIZES.cumsum()))  # the test samples of client i are OFFSETS[i]:OFFSETS[i + 1]
K, B, CLASSES = 3, 5, 4  # clients computed at once, samples of a batch, classes
SIDE = 6  # pixels of images and masks


def random_targets() -> dict[str, tuple[np.ndarray, int]]:
    """Return random targets for each kind of task.

    Returns:
        From kind, such as "segmentation", to (targets [SAMPLES, ...], number of classes, or of numbers to predict).
    """
    rng = np.random.default_rng(0)
    masks = rng.integers(0, CLASSES, (SAMPLES, SIDE, SIDE))
    masks[rng.random(masks.shape) < 0.1] = 255  # pixels without a class
    return {
        "classification": (np.arange(SAMPLES) * 7 % CLASSES, CLASSES),  # not in order, as 7 skips classes
        "multilabel": ((rng.random((SAMPLES, CLASSES)) < 0.4).astype(np.float32), CLASSES),
        "segmentation": (masks, CLASSES),
        "regression": (rng.normal(2, 3, (SAMPLES, 1)).astype(np.float32), 1),
    }


@dataclass
class TaskCase:
    """A task to check, and targets for 60 samples of six clients.

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
        """Return a new object of the task's class after `setup`.

        Args:
            targets: The targets of the data set [SAMPLES, ...]; None for those of the case.
        """
        task = make(self.values).for_targets(self.kind)
        task.setup(self.federation(task, targets))
        return task

    def federation(self, task: Task, targets: np.ndarray | None = None) -> Federation:
        """Return a federation of six clients with random inputs.

        Args:
            task: The task; if it samples its own inputs, it gets images.
            targets: The targets [SAMPLES, ...]; None for those of the case.
        """
        y = torch.from_numpy(self.targets if targets is None else targets)
        generator = torch.Generator().manual_seed(5)
        images = torch.randint(256, (len(y), 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        x = images if task.has_stochastic_inputs else torch.randn(len(y), 16, generator=generator)
        train = Ragged.from_sizes(np.arange(30), np.full(6, 5))  # samples 0 to 29, 5 for each client
        test = Ragged.from_sizes(np.arange(30, SAMPLES), TEST_SIZES)
        val = Ragged.from_sizes(np.empty(0, np.int64), np.zeros(6, np.int64))  # no samples
        return Federation(x, y, {"train": train, "val": val, "test": test}, task, self.num_classes)

    @functools.cached_property
    def task(self) -> Task:
        """The task, after a call of its method `setup` with a federation that has the targets of this case."""
        return self.make()

    def outputs(self, *shape: int, seed: int = 0) -> Tensor:
        """Return random numbers with the shape of a model's outputs for batches of samples.

        Args:
            *shape: The axes of the samples, such as K, B.
            seed: The seed of the numbers.

        Returns:
            Outputs [*shape, ...], such as [K, B, C] for classes.
        """
        y = self.batch(shape[-1])  # targets of as many samples as are in a batch
        num_outputs = self.task.outputs(self.num_classes)  # of the model for each sample or pixel
        output_shape = self.task.output_shape(y, num_outputs)  # (B, ...)
        return torch.randn(*shape[:-1], *output_shape, generator=torch.Generator().manual_seed(seed))

    def batch(self, *shape: int) -> Tensor:
        """Return the targets of the first samples, arranged in a shape such as (K, B).  # [*shape, ...]"""
        targets = self.targets_of(0, int(np.prod(shape)))
        return targets.view(*shape, *targets.shape[1:])

    def targets_of(self, start: int, stop: int) -> Tensor:
        """Return the targets [stop - start, ...] of the samples start to stop - 1.

        A task with stochastic inputs, such as noise to predict, generates the targets.
        """
        if not self.task.has_stochastic_inputs:
            return torch.from_numpy(self.targets[start:stop])
        return self.federation(self.task).gather(torch.arange(start, stop))[1]

    @property
    def class_mask(self) -> Tensor:
        """The classes of each client, [K, C] bool: False for class k (modulo C) of client k, else True."""
        mask = torch.ones(K, self.num_classes, dtype=torch.bool)
        mask[torch.arange(K), torch.arange(K) % self.num_classes] = False
        return mask

    def sample_statistics(self, start: int = 0, stop: int = 30) -> dict[str, Tensor]:
        """Return what the metrics of the test samples start to stop - 1 are computed from (`Task.sample_statistics`).

        Returns:
            From name, such as "loss", to one value or vector per sample, for the random `test_outputs`.
        """
        logits, y = self.test_outputs[None, start:stop], self.test_targets[None, start:stop]
        return {name: value[0] for name, value in self.task.sample_statistics(logits, y).items()}

    @functools.cached_property
    def test_outputs(self) -> Tensor:
        """Random outputs of a model for the 30 test samples of the six clients, client by client.  # [30, ...]"""
        return self.outputs(30, seed=3)

    @functools.cached_property
    def test_targets(self) -> Tensor:
        """The targets of the 30 test samples of the six clients, client by client.  # [30, ...]"""
        return self.targets_of(30, SAMPLES)

    @functools.cached_property
    def scores(self) -> dict[str, np.ndarray]:
        """The scores of six clients, from name such as "accuracy" to array [6]; the third client has no sample."""
        return self.task.scores(self.sample_statistics(), OFFSETS)


SUITE: Suite[TaskCase] = Suite("task")


def check_task(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    targets: np.ndarray | None = None,
    num_classes: int | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a task.

    Args:
        target: Its class, its dotted path, or an option of conf/task.
        options: Arguments of its constructor.
        targets: Targets [60, ...], needed if the kind of targets is a new one.
        num_classes: The number of classes of these targets.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The task cannot be built, or accepts no targets.
    """
    case = case_for(target, options, targets, num_classes)
    shape = "x".join(map(str, case.targets.shape[1:])) or "one value"
    # setting: targets and clients, for the heading of the report
    setting = f"on {case.kind} targets of {shape}, for 6 clients of 0 to 9 samples"
    return SUITE.run(path_of(target), setting, case, only)


def case_for(
    target: Target,
    options: Mapping[str, Any] | None = None,
    targets: np.ndarray | None = None,
    num_classes: int | None = None,
) -> TaskCase:
    """Return the task with the first targets that it accepts.

    Args:
        target: Its class, its dotted path, or an option of conf/task.
        options: Arguments of its constructor.
        targets: Targets [60, ...]; None for random ones of a known kind.
        num_classes: The number of classes of these targets.

    Raises:
        ConfigError: The task cannot be built, or accepts no targets.
    """
    values = described("task", target, options)
    built = make(values)
    message = f"{path_of(target)} is not a task: derive it from fedbench.tasks.base.Task, or name a class that is"
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
    raise ConfigError(
        f"{path_of(target)} accepts none of the example targets ({reason}): pass "
        "examples of its targets, as in check_task(MyTask, targets=y, num_classes=10)"
    )


def _loss(case: TaskCase, logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the task's loss of each sample, without gradient.

    Args:
        case: The task to check, with targets.
        logits: Outputs of the model, [..., B, R].
        y: Targets, [..., B].
        mask: The classes of each client, [k, C] bool.  None: all.

    Returns:
        Losses, [..., B].
    """
    return case.task.loss(logits, y, mask).detach()


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Return whether two tensors have the same shape, and values that differ at most by the tolerance.

    The tolerance is absolute and relative; NaN equals NaN.
    """
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


# -- loss ------------------------------------------------------------------------------------------------
@SUITE.check
def targets_have_labels(case: TaskCase) -> None:
    """Every sample has an integer label, which partitions use.

    Remedy: `labels` must return int64 values >= 0, one per sample.
    """
    labels, n = np.asarray(case.task.labels(case.targets, case.num_classes)), len(case.targets)
    are_labels = labels.shape == (n,) and labels.dtype == np.int64 and labels.min() >= 0
    assert are_labels, f"`labels` of {n} samples returns {labels.dtype} {labels.shape} from {labels.min()}"


@SUITE.check
def loss_is_per_sample(case: TaskCase) -> None:
    """The loss is one finite value per sample, for any leading axes.

    Remedy: return one value of each sample, [..., B], and compute samples independently.
    """
    logits, y = case.outputs(K, B), case.batch(K, B)
    loss = _loss(case, logits, y)
    assert loss.shape == (K, B), f"the loss of {K} x {B} samples has shape {tuple(loss.shape)}"
    assert torch.isfinite(loss).all(), "the loss of random outputs is not finite"
    separate = torch.stack([_loss(case, logits[i], y[i]) for i in range(K)])
    nested = _loss(case, logits[None].expand(2, *logits.shape), y[None].expand(2, *y.shape))
    are_equal = _close(separate, loss) and _close(nested, loss.expand(2, K, B))
    assert are_equal, "the loss of a client [B, ...] differs from its loss in a batch of clients [k, B, ...]"


@SUITE.check
def samples_are_independent(case: TaskCase) -> None:
    """The loss of a sample does not depend on other samples of its batch.

    Remedy: other samples may be padding: use no mean, maximum or other statistic of the batch.
    """
    logits, y = case.outputs(K, B), case.batch(K, B)
    other_logits, other_y = logits.clone(), y.clone()  # equal in the first two samples of each batch only
    other_logits[:, 2:], other_y[:, 2:] = case.outputs(K, B, seed=9)[:, 2:], y.roll(1, 0)[:, 2:]
    before, after = _loss(case, logits, y)[:, :2], _loss(case, other_logits, other_y)[:, :2]
    assert _close(before, after), "the loss of a sample changes with the other samples of its batch"


@SUITE.check
def gradient_is_autograds(case: TaskCase) -> None:
    """`loss_and_gradient` returns the loss, and the gradient of weight * loss that autograd computes.

    Remedy: correct `loss_and_gradient`, or remove it, so that autograd computes the gradient of `loss`.
    """
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    for mask in (None, case.class_mask) if _has_classes(case) else (None,):
        y = y if mask is None else _without_excluded_classes(case, y, mask)
        leaf = logits.clone().requires_grad_()
        loss = case.task.loss(leaf, y, mask)
        (expected,) = torch.autograd.grad((loss * weight).sum(), leaf)
        found, gradient = case.task.loss_and_gradient(logits, y, weight, mask)
        assert _close(found.detach(), loss.detach()), "the loss of `loss_and_gradient` differs from that of `loss`"
        assert _close(gradient, expected), "the gradient of `loss_and_gradient` is not that of weight * loss"


def _weights() -> Tensor:
    """Return sample weights, 1 / n for the n samples of a client and 0 for padding.  # [K, B]

    The last two samples of the second and third client are padding.
    """
    sizes = torch.tensor([B, 3, 3])[:, None]
    return (torch.arange(B) < sizes) / sizes


@SUITE.check
def padding_is_ignored(case: TaskCase) -> None:
    """Samples of weight 0 have no gradient, and do not change the gradients of other samples.

    Remedy: multiply the gradient of each sample by its weight, which is 0 for padding.
    """
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    padding = weight == 0
    _, gradient = case.task.loss_and_gradient(logits, y, weight, class_mask=None)
    assert not gradient[padding].any(), "samples of weight 0 have a gradient"
    other_logits, other_y = logits.clone(), y.clone()
    other_logits[padding], other_y[padding] = case.outputs(K, B, seed=9)[padding], y.roll(1, 0)[padding]
    _, again = case.task.loss_and_gradient(other_logits, other_y, weight, class_mask=None)
    assert _close(again, gradient), "the gradient of a client changes with the content of its padding"


# -- classes ---------------------------------------------------------------------------------------------
def _has_classes(case: TaskCase) -> bool:
    """Return whether the targets of a case are class indices or 0 and 1, and a model has one output per class."""
    is_class = case.targets.dtype == np.int64 or bool(np.isin(case.targets, (0, 1)).all())
    return is_class and case.task.outputs(case.num_classes) == case.num_classes


def _without_excluded_classes(case: TaskCase, y: Tensor, mask: Tensor) -> Tensor:
    """Return targets [K, B, ...] without the classes that the mask [K, C] excludes.

    Class indices are replaced by the next class, and positive labels of multi-label targets become negative.
    """
    if y.is_floating_point():
        return y * mask[:, None]
    # the first class that the client lacks, or 0 if it has all, whose samples may have any other class as well
    excluded = (~mask).float().argmax(1).view(K, *[1] * (y.dim() - 1))
    return torch.where(y == excluded, (excluded + 1) % case.num_classes, y)


@SUITE.check
def class_mask_confines(case: TaskCase) -> None:
    """Outputs of classes that class_mask excludes do not change the loss.

    Remedy: set outputs of excluded classes to -inf before the softmax.
    """
    if not _has_classes(case):
        raise SkipTest("its targets are not classes with one output each")
    mask = case.class_mask
    logits, y = case.outputs(K, B), _without_excluded_classes(case, case.batch(K, B), mask)
    class_axis = 2 + logits.shape[2:].index(case.num_classes)
    shape = [K if axis == 0 else case.num_classes if axis == class_axis else 1 for axis in range(logits.dim())]
    excluded = ~mask.view(shape).expand_as(logits)
    loss, other = _loss(case, logits, y, mask), _loss(case, torch.where(excluded, logits + 3, logits), y, mask)
    assert _close(loss, other), "outputs of classes that class_mask excludes change the loss"
    assert torch.isfinite(loss).all(), "the loss is not finite if class_mask excludes a class"


# -- scores ----------------------------------------------------------------------------------------------
@SUITE.check
def scores_are_declared(case: TaskCase) -> None:
    """Every score is declared in `higher_is_better`, `primary` is a score, and `fractions` are between 0 and 1.

    Remedy: list all results of `scores` in `higher_is_better`, and in `fractions` only those from 0 to 1.
    """
    scores, declared = case.scores, case.task.higher_is_better
    different = ", ".join(sorted(scores.keys() ^ declared.keys()))
    assert not different, f"`higher_is_better` and `scores` differ in {different}: declare every score"
    assert case.task.primary in scores, f"primary={case.task.primary} is not a score: choose from {', '.join(scores)}"
    for name in case.task.fractions & scores.keys():
        values = scores[name][~np.isnan(scores[name])]
        are_fractions = bool(((values >= -1e-9) & (values <= 1 + 1e-9)).all())
        assert are_fractions, f"{name} of `fractions` is {values.min():.3g} to {values.max():.3g}, not 0 to 1"


@SUITE.check
def scores_are_streamed(case: TaskCase) -> None:
    """Scores are the same if the statistics of samples are computed in small batches.

    Remedy: `sample_statistics` must compute each sample independently.
    """
    batches = [case.sample_statistics(a, a + 4) for a in range(0, 30, 4)]  # samples a to a + 3 of the 30 test samples
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    # OFFSETS[i]:OFFSETS[i + 1] are the test samples of client i
    _assert_equal(case.task.scores(joined, OFFSETS), case.scores, "if `sample_statistics` gets four samples at a time")


@SUITE.check
def clients_are_scored_alone(case: TaskCase) -> None:
    """The scores of a client do not depend on other clients.

    Remedy: sum over offsets[i]:offsets[i + 1] for client i.
    """
    for i, (a, b) in enumerate(itertools.pairwise(OFFSETS)):  # a:b are the test samples of client i
        if b > a:
            of_client = case.task.scores(case.sample_statistics(a, b), np.array([0, b - a]))
            together = {name: values[i : i + 1] for name, values in case.scores.items()}
            _assert_equal(of_client, together, f"for client {i} alone")


def _assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], condition: str) -> None:
    """Assert that scores equal the expected ones up to rounding.

    Args:
        found: Scores by name.
        expected: The expected scores by name.
        condition: End of the message, such as "for client 0 alone".
    """
    for name, values in expected.items():
        is_equal = np.allclose(found[name], values, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert is_equal, f"the score {name} differs {condition}"


@SUITE.check
def nobody_without_samples_is_scored(case: TaskCase) -> None:
    """All scores of a client without samples are NaN.

    Remedy: divide by fedbench.tasks.base.ratio, which returns NaN for 0 samples.
    """
    for name, values in case.scores.items():
        n = len(TEST_SIZES)
        assert values.shape == (n,), f"{name} has shape {values.shape}: return one value for each of {n} clients"
        empty = values[TEST_SIZES == 0]
        assert np.isnan(empty).all(), f"{name} of a client without samples is {empty[0]:.3g}, not NaN"
        assert not np.isnan(values).all(), f"{name} is NaN for every client"


@SUITE.check
def the_loss_is_a_score(case: TaskCase) -> None:
    """The score `loss` is the mean loss over the samples of a client.

    Remedy: `scores` must return an entry loss, the mean of `loss` over the samples of a client.
    """
    loss = _loss(case, case.test_outputs, case.test_targets).numpy()
    # a:b are the test samples of a client
    means = [loss[a:b].mean() if b > a else np.nan for a, b in itertools.pairwise(OFFSETS)]
    assert "loss" in case.scores, "there is no score loss"
    is_mean = np.allclose(case.scores["loss"], means, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert is_mean, "the score loss is not the mean loss"


@SUITE.check
def descent_improves_the_primary_score(case: TaskCase) -> None:
    """Gradient descent on the outputs lowers the loss, and does not make the primary score worse.

    Remedy: correct the gradient of the loss, or the direction in `higher_is_better`.
    """
    leaf = case.test_outputs.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        case.task.loss(leaf, case.test_targets).sum().backward()
        optimizer.step()
    statistics = case.task.sample_statistics(leaf.detach()[None], case.test_targets[None])
    # OFFSETS[i]:OFFSETS[i + 1] are the test samples of client i
    before, after = case.scores, case.task.scores({name: value[0] for name, value in statistics.items()}, OFFSETS)
    is_lower = np.nanmean(after["loss"]) < np.nanmean(before["loss"])
    assert is_lower, "gradient descent on the outputs does not lower the loss"
    primary = case.task.primary
    increase = np.nanmean(after[primary]) - np.nanmean(before[primary])
    improvement = increase if case.task.higher_is_better[primary] else -increase
    assert improvement >= -1e-9, f"{primary} gets worse while the loss falls"


# -- several tasks ---------------------------------------------------------------------------------------
@SUITE.check
def it_has_a_key(case: TaskCase) -> None:
    """Tasks of equal options have equal keys.

    Remedy: the attributes of a task must be options and results of `setup` only.
    """
    first, second = case.make().key, case.make().key
    assert first == second and hash(first) == hash(second), "two tasks of equal options have different keys"


@SUITE.check
def only_training_data_are_seen(case: TaskCase) -> None:
    """`setup` uses the training samples only.

    Remedy: read targets[splits['train'].indices] only.
    """
    other = case.targets.copy()  # samples 0 to 29 are training samples, and the others test samples
    other[30:] = other[30:][::-1]
    other[30:40] = other[40:50]
    # key: the class of the task and the values of all its attributes, which setup may have set
    assert case.make(other).key == case.task.key, "`setup` depends on test samples"


@SUITE.check
def nothing_is_drawn(case: TaskCase) -> None:
    """Loss and scores are deterministic, and use no global random generator.

    Remedy: compute them without random numbers.
    """
    states = probes.global_random_states()
    loss = _loss(case, case.test_outputs, case.test_targets)
    case.task.scores(case.sample_statistics(), OFFSETS)  # OFFSETS: where the samples of each client begin
    used = probes.generators_used_since(states)
    again = _loss(case, case.test_outputs, case.test_targets)
    assert not used and torch.equal(loss, again), "the loss or a score is random"


class _Net(nn.Module):
    """A linear layer applied to the tanh of the flattened inputs, with outputs of any shape.

    Args:
        inputs: The shape of a sample, or of each named input.
        outputs: The shape of the outputs for a sample.
    """

    def __init__(self, inputs: Any, outputs: tuple[int, ...]):
        super().__init__()
        shapes = wrap_inputs(inputs).values()
        self.head, self.shape = nn.Linear(sum(map(math.prod, shapes)), math.prod(outputs)), outputs

    def forward(self, x: Inputs) -> Tensor:
        """Return the outputs [B, *outputs] for the inputs x, [B, ...] each, which are flattened and joined."""
        flat = torch.cat([value.reshape(len(value), -1).float() for value in wrap_inputs(x).values()], 1)
        return self.head(flat.tanh()).view(len(flat), *self.shape)


@SUITE.check
def training_agrees(case: TaskCase) -> None:
    """Training gives the same rows for one client at a time and for all clients at once.

    Remedy: compute the loss of each sample independently.
    """
    shape, rows = tuple(case.outputs(B).shape[1:]), []  # rows: the parameters of the clients, [K, P] for each plan
    for plan in ("loop", "vmap"):  # one client at a time, all at once
        federation = case.federation(case.make())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = _Net(federation.input_shape, shape)
        federation.splits["train"] = federation.splits["test"]  # of different sizes, one of them 0
        engine = engine_on(federation, module, plan=plan, batch_size=4)
        rows.append(all_clients(engine).train(engine.model.init_row()).theta)
    assert _close(rows[0], rows[1], 1e-4), "the rows differ, so the loss mixes clients or samples"
