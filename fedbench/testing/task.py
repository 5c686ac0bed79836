"""Checks of tasks: a loss per sample with its gradient, and scores that can be computed in small batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.inputs import wrap_inputs
from fedbench.engine.federation import Inputs
from fedbench.testing import _probes as probes
from fedbench.testing._federation import all_clients, engine_on
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, path_of
from fedbench.testing._task_cases import OFFSETS, TEST_SIZES, B, K, TaskCase, case_for

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
    setting = f"on {case.kind} targets of {shape}, for 6 clients of 0 to 9 samples"
    return SUITE.run(path_of(target), setting, case, only)


def _loss(case: TaskCase, logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    return case.task.loss(logits, y, mask).detach()


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


# -- loss ------------------------------------------------------------------------------------------------
@SUITE.check
def targets_have_labels(case: TaskCase) -> None:
    """Every sample has an integer label, which partitions use."""
    labels, n = np.asarray(case.task.labels(case.targets, case.num_classes)), len(case.targets)
    assert labels.shape == (n,) and labels.dtype == np.int64 and labels.min() >= 0, (
        f"`labels` returns {labels.dtype} {labels.shape}: return int64 ({n},) of values >= 0"
    )


@SUITE.check
def loss_is_per_sample(case: TaskCase) -> None:
    """The loss is one finite value per sample, for any leading axes."""
    logits, y = case.outputs(K, B), case.batch(K, B)
    loss = _loss(case, logits, y)
    assert loss.shape == (K, B), (
        f"the loss of {K} x {B} samples has shape {tuple(loss.shape)}: return one value of each"
    )
    assert torch.isfinite(loss).all(), "the loss of random outputs is not finite"
    separate = torch.stack([_loss(case, logits[i], y[i]) for i in range(K)])
    nested = _loss(case, logits[None].expand(2, *logits.shape), y[None].expand(2, *y.shape))
    assert _close(separate, loss) and _close(nested, loss.expand(2, K, B)), (
        "the loss of a client [B, ...] differs from its loss in a batch of clients [k, B, ...]: compute each sample "
        "independently"
    )


@SUITE.check
def samples_are_independent(case: TaskCase) -> None:
    """The loss of a sample does not depend on other samples of its batch."""
    logits, y = case.outputs(K, B), case.batch(K, B)
    other_logits, other_y = logits.clone(), y.clone()
    other_logits[:, 2:], other_y[:, 2:] = case.outputs(K, B, seed=9)[:, 2:], y.roll(1, 0)[:, 2:]
    assert _close(_loss(case, logits, y)[:, :2], _loss(case, other_logits, other_y)[:, :2]), (
        "the loss of a sample changes with the other samples of its batch, which may be padding: use no mean, maximum "
        "or other statistic of the batch"
    )


@SUITE.check
def gradient_is_autograds(case: TaskCase) -> None:
    """`loss_and_gradient` returns the loss, and the gradient of weight * loss that autograd computes."""
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    for mask in (None, case.class_mask) if _has_classes(case) else (None,):
        y = y if mask is None else _without_excluded_classes(case, y, mask)
        leaf = logits.clone().requires_grad_()
        loss = case.task.loss(leaf, y, mask)
        (expected,) = torch.autograd.grad((loss * weight).sum(), leaf)
        found, gradient = case.task.loss_and_gradient(logits, y, weight, mask)
        assert _close(found.detach(), loss.detach()), "the loss of `loss_and_gradient` differs from that of `loss`"
        assert _close(gradient, expected), (
            f"the gradient of `loss_and_gradient` differs by up to {float((gradient - expected).abs().max()):.2g} from "
            "the gradient of weight * loss"
        )


def _weights() -> Tensor:
    """Return sample weights; the last two samples of the second and third client are padding.  # [K, B]"""
    sizes = torch.tensor([B, 3, 3])[:, None]
    return (torch.arange(B) < sizes) / sizes


@SUITE.check
def padding_is_ignored(case: TaskCase) -> None:
    """Samples of weight 0 have no gradient, and do not change the gradients of other samples."""
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    padding = weight == 0
    _, gradient = case.task.loss_and_gradient(logits, y, weight, None)
    advice = "multiply the gradient of each sample by its weight, which is 0 for padding"
    assert not gradient[padding].any(), f"samples of weight 0 have a gradient: {advice}"
    other_logits, other_y = logits.clone(), y.clone()
    other_logits[padding], other_y[padding] = case.outputs(K, B, seed=9)[padding], y.roll(1, 0)[padding]
    _, again = case.task.loss_and_gradient(other_logits, other_y, weight, None)
    assert _close(again, gradient), f"the gradient of a client changes with the content of its padding: {advice}"


# -- classes ---------------------------------------------------------------------------------------------
def _has_classes(case: TaskCase) -> bool:
    """Return whether the model has one output per class of the targets."""
    is_class = case.targets.dtype == np.int64 or bool(np.isin(case.targets, (0, 1)).all())
    return is_class and case.task.outputs(case.num_classes) == case.num_classes


def _without_excluded_classes(case: TaskCase, y: Tensor, mask: Tensor) -> Tensor:
    """Replace the targets of classes that the mask excludes."""
    if y.is_floating_point():
        return y * mask[:, None]
    excluded = (~mask).float().argmax(1).view(K, *[1] * (y.dim() - 1))
    return torch.where(y == excluded, (excluded + 1) % case.num_classes, y)


@SUITE.check
def class_mask_confines(case: TaskCase) -> None:
    """Outputs of classes that class_mask excludes do not change the loss."""
    if not _has_classes(case):
        raise SkipTest("its targets are not classes with one output each")
    mask = case.class_mask
    logits, y = case.outputs(K, B), _without_excluded_classes(case, case.batch(K, B), mask)
    excluded = ~mask.view(K, 1, -1, *[1] * (logits.dim() - 3)).expand_as(logits)
    loss, other = _loss(case, logits, y, mask), _loss(case, torch.where(excluded, logits + 3, logits), y, mask)
    assert _close(loss, other), (
        "outputs of classes that class_mask excludes change the loss: set them to -inf before the softmax"
    )
    assert torch.isfinite(loss).all(), "the loss is not finite if class_mask excludes a class"


# -- scores ----------------------------------------------------------------------------------------------
@SUITE.check
def scores_are_declared(case: TaskCase) -> None:
    """Every score is declared in `higher_is_better`, `primary` is a score, and `fractions` are between 0 and 1."""
    scores, declared = case.scores, case.task.higher_is_better
    different = ", ".join(sorted(scores.keys() ^ declared.keys()))
    assert not different, f"`higher_is_better` and `scores` differ in {different}: declare every score"
    assert case.task.primary in scores, f"primary={case.task.primary} is not a score: choose from {', '.join(scores)}"
    for name in case.task.fractions & scores.keys():
        values = scores[name][~np.isnan(scores[name])]
        assert ((values >= -1e-9) & (values <= 1 + 1e-9)).all(), (
            f"{name} is declared in `fractions`, but is {values.min():.3g} to {values.max():.3g}, not between 0 and 1"
        )


@SUITE.check
def scores_are_streamed(case: TaskCase) -> None:
    """Scores are the same if the statistics of samples are computed in small batches."""
    batches = [case.sample_statistics(a, a + 4) for a in range(0, 30, 4)]
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    _assert_equal(
        case.task.scores(joined, OFFSETS),
        case.scores,
        "if `sample_statistics` gets four samples at a time: statistics are of each sample",
    )


@SUITE.check
def clients_are_scored_alone(case: TaskCase) -> None:
    """The scores of a client do not depend on other clients."""
    for i, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        if b > a:
            alone = case.task.scores(case.sample_statistics(a, b), np.array([0, b - a]))
            together = {name: values[i : i + 1] for name, values in case.scores.items()}
            _assert_equal(alone, together, f"for client {i} alone: sum over offsets[i]:offsets[i + 1]")


def _assert_equal(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], condition: str) -> None:
    for name in b:
        assert np.allclose(a[name], b[name], 1e-5, 1e-6, equal_nan=True), f"the score {name} differs {condition}"


@SUITE.check
def nobody_without_samples_is_scored(case: TaskCase) -> None:
    """All scores of a client without samples are NaN."""
    for name, values in case.scores.items():
        n = len(TEST_SIZES)
        assert values.shape == (n,), f"{name} has shape {values.shape}: return one value for each of {n} clients"
        empty = values[TEST_SIZES == 0]
        assert np.isnan(empty).all(), (
            f"{name} of a client without samples is {empty[0]:.3g}: return NaN (tasks.base.ratio)"
        )
        assert not np.isnan(values).all(), f"{name} is NaN for every client"


@SUITE.check
def the_loss_is_a_score(case: TaskCase) -> None:
    """The score `loss` is the mean loss over the samples of a client."""
    loss = _loss(case, case.test_outputs, case.test_targets).numpy()
    means = [loss[a:b].mean() if b > a else np.nan for a, b in itertools.pairwise(OFFSETS)]
    assert "loss" in case.scores and np.allclose(case.scores["loss"], means, 1e-4, 1e-5, equal_nan=True), (
        "`scores` must return an entry loss, the mean of `loss` over the samples of a client"
    )


@SUITE.check
def descent_improves_the_primary_score(case: TaskCase) -> None:
    """Gradient descent on the outputs lowers the loss, and does not make the primary score worse."""
    leaf = case.test_outputs.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        case.task.loss(leaf, case.test_targets).sum().backward()
        optimizer.step()
    statistics = case.task.sample_statistics(leaf.detach()[None], case.test_targets[None])
    before, after = case.scores, case.task.scores({name: value[0] for name, value in statistics.items()}, OFFSETS)
    assert np.nanmean(after["loss"]) < np.nanmean(before["loss"]), (
        "gradient descent on the outputs does not lower the loss: its gradient is wrong"
    )
    primary = case.task.primary
    increase = np.nanmean(after[primary]) - np.nanmean(before[primary])
    is_higher_better = case.task.higher_is_better[primary]
    assert (increase if is_higher_better else -increase) >= -1e-9, (
        f"{primary} gets worse while the loss falls, but higher_is_better declares {is_higher_better} for it"
    )


# -- several tasks ---------------------------------------------------------------------------------------
@SUITE.check
def it_has_a_key(case: TaskCase) -> None:
    """Tasks of equal options have equal keys."""
    assert case.make().key == case.make().key and hash(case.make().key) == hash(case.task.key), (
        "two tasks of equal options have different keys: the attributes must be options and results of `setup` only"
    )


@SUITE.check
def only_training_data_are_seen(case: TaskCase) -> None:
    """`setup` uses the training samples only."""
    other = case.targets.copy()
    other[30:] = other[30:][::-1]
    other[30:40] = other[40:50]
    assert case.make(other).key == case.task.key, (
        "`setup` depends on test samples: read targets[splits['train'].indices] only"
    )


@SUITE.check
def nothing_is_drawn(case: TaskCase) -> None:
    """Loss and scores are deterministic, and use no global random generator."""
    states = probes.global_random_states()
    loss = _loss(case, case.test_outputs, case.test_targets)
    case.task.scores(case.sample_statistics(), OFFSETS)
    used = probes.generators_used_since(states)
    assert not used and torch.equal(loss, _loss(case, case.test_outputs, case.test_targets)), (
        "the loss or a score is random: compute it without random numbers"
    )


class _Net(nn.Module):
    """A linear model of inputs of any shape, with outputs of any shape."""

    def __init__(self, inputs: Any, outputs: tuple[int, ...]):
        super().__init__()
        shapes = wrap_inputs(inputs).values()
        self.head, self.shape = nn.Linear(sum(map(math.prod, shapes)), math.prod(outputs)), outputs

    def forward(self, x: Inputs) -> Tensor:
        """Return the outputs [B, ...]."""
        flat = torch.cat([value.reshape(len(value), -1).float() for value in wrap_inputs(x).values()], 1)
        return self.head(flat.tanh()).view(len(flat), *self.shape)


@SUITE.check
def training_agrees(case: TaskCase) -> None:
    """Training gives the same rows for one client at a time and for all clients at once."""
    shape, rows = tuple(case.outputs(B).shape[1:]), []
    for plan in ("loop", "vmap"):
        federation = case.federation(case.make())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = _Net(federation.input_shape, shape)
        federation.splits["train"] = federation.splits["test"]  # of different sizes, one of them 0
        engine = engine_on(federation, module, plan=plan, batch_size=4)
        rows.append(all_clients(engine).train(engine.model.init_row()).theta)
    assert _close(rows[0], rows[1], 1e-4), (
        "training gives other rows for one client at a time than for all clients at once: the loss mixes clients or "
        "samples"
    )
