"""What every task keeps: a loss for each sample, its gradient, and scores that can be streamed.

A task is shown targets of its kind for six clients, one of them without samples, and outputs drawn at random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.core.inputs import wrap_inputs
from fedbench.engine.federation import Inputs
from fedbench.testing import _probes as probes
from fedbench.testing._federation import all_clients, engine_on
from fedbench.testing._suite import Broken, Report, Skipped, Suite
from fedbench.testing._targets import Target, path_of
from fedbench.testing._task_cases import SIZES, B, K, TaskCase, case_for

SUITE: Suite[TaskCase] = Suite("task")


def check_task(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    targets: np.ndarray | None = None,
    num_classes: int | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a task: its class, its dotted path, or the name of an option of conf/task.

    options: of its constructor.  targets [60, ...], num_classes: what it is for, where its kind is none of fedbench's.
    only: the names of some checks.  ConfigError where it cannot be built, or takes no targets.
    """
    case = case_for(target, options, targets, num_classes)
    shape = "x".join(map(str, case.targets.shape[1:])) or "one number"
    return SUITE.run(path_of(target), f"on {case.kind} targets of {shape}, for 6 clients of 0 to 9 samples", case, only)


def _loss(case: TaskCase, logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    return case.task.loss(logits, y, mask).detach()


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


# -- the loss --------------------------------------------------------------------------------------------
@SUITE.check
def targets_have_labels(case: TaskCase) -> None:
    """Every sample has a label, a whole number, by which partitions divide."""
    labels = np.asarray(case.task.labels(case.targets, case.num_classes))
    if labels.shape != (len(case.targets),) or labels.dtype != np.int64 or labels.min() < 0:
        raise Broken(f"labels are {labels.dtype} {labels.shape}, not int64 ({len(case.targets)},) from 0 on")


@SUITE.check
def loss_is_per_sample(case: TaskCase) -> None:
    """The loss has one finite number for every sample, whatever the leading axes."""
    many, y = case.outputs(K, B), case.batch(K, B)
    loss = _loss(case, many, y)
    if loss.shape != (K, B):
        raise Broken(f"the loss of {K} x {B} samples has shape {tuple(loss.shape)}: return one of each, [..., B]")
    if not torch.isfinite(loss).all():
        raise Broken("the loss is not finite on random outputs")
    alone = torch.stack([_loss(case, many[i], y[i]) for i in range(K)])
    deep = _loss(case, many[None].expand(2, *many.shape), y[None].expand(2, *y.shape))
    if not _close(alone, loss) or not _close(deep, loss.expand(2, K, B)):
        raise Broken("the loss of a client is another alone, [B, ...], than among others, [k, B, ...]")


@SUITE.check
def samples_are_independent(case: TaskCase) -> None:
    """A sample's loss does not depend on the others of its batch."""
    logits, y = case.outputs(K, B), case.batch(K, B)
    other, targets = logits.clone(), y.clone()
    other[:, 2:], targets[:, 2:] = case.outputs(K, B, seed=9)[:, 2:], y.roll(1, 0)[:, 2:]
    before, after = _loss(case, logits, y)[:, :2], _loss(case, other, targets)[:, :2]
    if not _close(before, after):
        raise Broken(
            "a sample's loss changes with the other samples of its batch, padding among them: no mean, no maximum and "
            "no statistics over the batch"
        )


@SUITE.check
def gradient_is_autograds(case: TaskCase) -> None:
    """`loss_and_gradient` gives the loss, and autograd's gradient of weight * loss."""
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    for mask in (None, case.class_mask) if _has_classes(case) else (None,):
        y = y if mask is None else _within(case, y, mask)
        leaf = logits.clone().requires_grad_()
        loss = case.task.loss(leaf, y, mask)
        (expected,) = torch.autograd.grad((loss * weight).sum(), leaf)
        found, gradient = case.task.loss_and_gradient(logits, y, weight, mask)
        if not _close(found.detach(), loss.detach()):
            raise Broken("the loss of `loss_and_gradient` is not that of `loss`")
        if not _close(gradient, expected):
            away = float((gradient - expected).abs().max())
            raise Broken(
                f"the gradient of `loss_and_gradient` is up to {away:.2g} away from autograd's of weight * loss"
            )


def _weights() -> Tensor:
    """Each client's samples weigh 1 together; of the second and third one, the last two slots are padding.  # [K, B]"""
    real = torch.tensor([B, 3, 3])[:, None]
    return (torch.arange(B) < real) / real


@SUITE.check
def padding_is_ignored(case: TaskCase) -> None:
    """Samples of weight 0 have no gradient, and do not change the others'."""
    logits, y, weight = case.outputs(K, B), case.batch(K, B), _weights()
    _, gradient = case.task.loss_and_gradient(logits, y, weight, None)
    advice = "multiply each sample's gradient by its weight, which is 0 for padding"
    if bool(gradient[weight == 0].any()):
        raise Broken(f"samples of weight 0, which are padding, have a gradient: {advice}")
    other, targets = logits.clone(), y.clone()
    other[weight == 0], targets[weight == 0] = case.outputs(K, B, seed=9)[weight == 0], y.roll(1, 0)[weight == 0]
    _, again = case.task.loss_and_gradient(other, targets, weight, None)
    if not _close(again, gradient):
        raise Broken(f"the gradient of a client's samples changes with what stands in its padding: {advice}")


# -- classes ---------------------------------------------------------------------------------------------
def _has_classes(case: TaskCase) -> bool:
    """Whether targets are classes, or marks of them, with an output for each."""
    whole = case.targets.dtype == np.int64 or bool(np.isin(case.targets, (0, 1)).all())
    return whole and case.task.outputs(case.num_classes) == case.num_classes


def _within(case: TaskCase, y: Tensor, mask: Tensor) -> Tensor:
    """Targets with the classes that a client does not have replaced by one that it has."""
    if y.is_floating_point():
        return y * mask[:, None]
    absent = (~mask).float().argmax(1).view(K, *[1] * (y.dim() - 1))
    return torch.where(y == absent, (absent + 1) % case.num_classes, y)


@SUITE.check
def class_mask_confines(case: TaskCase) -> None:
    """Outputs for classes that a client does not have are in no loss."""
    if not _has_classes(case):
        raise Skipped("its targets are no classes with an output each")
    mask = case.class_mask
    logits, y = case.outputs(K, B), _within(case, case.batch(K, B), mask)
    absent = ~mask.view(K, 1, -1, *[1] * (logits.dim() - 3)).expand_as(logits)
    other = torch.where(absent, logits + 3, logits)
    if not _close(_loss(case, logits, y, mask), _loss(case, other, y, mask)):
        raise Broken(
            "outputs for classes that class_mask excludes change the loss: set them to -inf before the softmax"
        )
    if not torch.isfinite(_loss(case, logits, y, mask)).all():
        raise Broken("the loss is not finite where class_mask excludes a class")


# -- scores ----------------------------------------------------------------------------------------------
@SUITE.check
def scores_are_declared(case: TaskCase) -> None:
    """Scores have a direction, shares are within 0 and 1, primary is one of them."""
    logits, y, offsets = case.tested
    scores = case.task.scores(case.sample_statistics(logits, y), offsets)
    declared = case.task.higher_is_better
    if scores.keys() != declared.keys():
        names = ", ".join(sorted(scores.keys() ^ declared.keys()))
        raise Broken(f"higher_is_better and `scores` differ in {names}")
    if case.task.primary not in scores:
        raise Broken(f"primary={case.task.primary} is none of its scores, {', '.join(scores)}")
    for name in case.task.fractions & scores.keys():
        values = scores[name]
        if (values[~np.isnan(values)] < -1e-9).any() or (values[~np.isnan(values)] > 1 + 1e-9).any():
            raise Broken(f"{name} is among `fractions`, the shares of 1, and is {np.nanmin(values):.3g} to "
                         f"{np.nanmax(values):.3g}")  # fmt: skip


@SUITE.check
def scores_are_streamed(case: TaskCase) -> None:
    """Scores of tallies in small batches are those of all samples at once."""
    logits, y, offsets = case.tested
    whole = case.task.scores(case.sample_statistics(logits, y), offsets)
    parts = [case.sample_statistics(logits[a : a + 4], y[a : a + 4]) for a in range(0, len(y), 4)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    _require_equal(
        case.task.scores(joined, offsets),
        whole,
        "when samples are tallied four at a time: statistics are of each sample",
    )


@SUITE.check
def clients_are_scored_alone(case: TaskCase) -> None:
    """A client's scores do not depend on the other clients'."""
    logits, y, offsets = case.tested
    whole = case.task.scores(case.sample_statistics(logits, y), offsets)
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b > a:
            alone = case.task.scores(case.sample_statistics(logits[a:b], y[a:b]), np.array([0, b - a]))
            mine = {name: values[i : i + 1] for name, values in whole.items()}
            _require_equal(alone, mine, f"for client {i} alone: sum within offsets[i]:offsets[i+1]")


def _require_equal(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], words: str) -> None:
    for name in b:
        if not np.allclose(a[name], b[name], 1e-5, 1e-6, equal_nan=True):
            raise Broken(f"the score {name} is another {words}")


@SUITE.check
def nobody_without_samples_is_scored(case: TaskCase) -> None:
    """A client without samples has NaN for every score, never 0."""
    logits, y, offsets = case.tested
    scores = case.task.scores(case.sample_statistics(logits, y), offsets)
    for name, values in scores.items():
        if values.shape != (len(SIZES),):
            raise Broken(f"{name} has shape {values.shape}, not one number for each of {len(SIZES)} clients")
        if not np.isnan(values[SIZES == 0]).all():
            raise Broken(
                f"{name} of a client without samples is {values[SIZES == 0][0]:.3g}, not NaN (tasks.base.ratio)"
            )
        if np.isnan(values).all():
            raise Broken(f"{name} is NaN for every client")


@SUITE.check
def the_loss_is_a_score(case: TaskCase) -> None:
    """The score `loss` is the mean loss of a client's samples."""
    logits, y, offsets = case.tested
    scores, loss = case.task.scores(case.sample_statistics(logits, y), offsets), _loss(case, logits, y).numpy()
    means = [loss[a:b].mean() if b > a else np.nan for a, b in itertools.pairwise(offsets)]
    if "loss" not in scores or not np.allclose(scores["loss"], means, 1e-4, 1e-5, equal_nan=True):
        raise Broken("`scores` has no entry loss that is the mean of `loss` over a client's samples")


@SUITE.check
def descent_improves_the_primary_score(case: TaskCase) -> None:
    """Outputs that descend the loss lower it, and make the primary score no worse."""
    logits, y, offsets = case.tested
    before = case.task.scores(case.sample_statistics(logits, y), offsets)
    leaf = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        case.task.loss(leaf, y).sum().backward()
        optimizer.step()
    after = case.task.scores(case.sample_statistics(leaf.detach(), y), offsets)
    if not np.nanmean(after["loss"]) < np.nanmean(before["loss"]):
        raise Broken("gradient descent on the outputs does not lower the loss: its gradient is not that of the loss")
    primary = case.task.primary
    sign = 1 if case.task.higher_is_better[primary] else -1
    if sign * np.nanmean(after[primary]) < sign * np.nanmean(before[primary]) - 1e-9:
        better = "high" if sign > 0 else "low"
        raise Broken(f"while the loss falls, {primary} gets worse: it is declared as better {better}")


# -- one of several --------------------------------------------------------------------------------------
@SUITE.check
def it_has_a_key(case: TaskCase) -> None:
    """Tasks of equal options have equal keys, by which runs are told apart."""
    if case.make().key != case.make().key or hash(case.make().key) != hash(case.task.key):
        raise Broken("two tasks of equal options have other keys: hold options and what `setup` measured, nothing else")


@SUITE.check
def only_training_data_are_seen(case: TaskCase) -> None:
    """`setup` looks at what is trained on, not at what is tested on."""
    other = case.targets.copy()
    other[30:] = other[30:][::-1]
    other[30:40] = other[40:50]
    if case.make(other).key != case.task.key:
        raise Broken("`setup` measures test samples: read targets[splits['train'].indices] alone")


@SUITE.check
def nothing_is_drawn(case: TaskCase) -> None:
    """Loss and scores repeat, and no global generator moves."""
    logits, y, offsets = case.tested
    before = probes.global_generators()
    once = _loss(case, logits, y)
    case.task.scores(case.sample_statistics(logits, y), offsets)
    moved = probes.moved_generators(before)
    if moved or not torch.equal(once, _loss(case, logits, y)):
        raise Broken("the loss or a score draws at random: a task has no draws")


class _Net(nn.Module):
    """Inputs of any shape, or several by name -> outputs of any shape."""

    def __init__(self, inputs: Any, outputs: tuple[int, ...]):
        super().__init__()
        shapes = wrap_inputs(inputs).values()
        self.head, self.shape = nn.Linear(sum(map(math.prod, shapes)), math.prod(outputs)), outputs

    def forward(self, x: Inputs) -> Tensor:
        """One matrix product."""
        flat = torch.cat([part.reshape(len(part), -1).float() for part in wrap_inputs(x).values()], 1)
        return self.head(flat.tanh()).view(len(flat), *self.shape)


@SUITE.check
def training_agrees(case: TaskCase) -> None:
    """Clients of unequal sizes learn it, alike one after the other and all at once."""
    shape, rows = tuple(case.outputs(B).shape[1:]), {}
    for plan in ("loop", "vmap"):
        federation = case.federation(case.make())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = _Net(federation.input_shape, shape)
        federation.splits["train"] = federation.splits["test"]  # unequal sizes, one of them 0
        engine = engine_on(federation, module, plan=plan, batch_size=4)
        rows[plan] = all_clients(engine).train(engine.model.init_row()).theta
    if not _close(rows["loop"], rows["vmap"], 1e-4):
        raise Broken(
            "rows differ between one client after the other and all at once: the loss mixes clients or samples"
        )
