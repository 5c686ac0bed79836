"""Options of the tasks, against PyTorch, scikit-learn and numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics
from tiny import compose
from torch import Tensor

from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, to_dict
from fedbench.tasks.auto import Auto
from fedbench.tasks.base import Task, task_for, task_kinds
from fedbench.tasks.classification import Classification
from fedbench.tasks.multilabel import MultiLabel
from fedbench.tasks.regression import Regression
from fedbench.tasks.scores import DIRECTIONS, Direction, direction, register_directions
from fedbench.tasks.segmentation import Segmentation

OFFSETS = np.array([0, 4, 4, 9])  # three clients, one without samples


def training(targets: Tensor, num_classes: int, trained: list[int] | None = None) -> Any:
    """A federation, as far as a task looks at it."""
    indices = np.arange(len(targets)) if trained is None else np.array(trained)
    splits = {"train": SimpleNamespace(indices=indices)}
    return SimpleNamespace(targets=targets, splits=splits, num_classes=num_classes, device=torch.device("cpu"))


def scored(task: Task, logits: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """Scores of one batch [n, ...] that belongs to the clients of OFFSETS."""
    return task.scores({name: t[0] for name, t in task.sample_statistics(logits[None], y[None]).items()}, OFFSETS)


# -- classification --------------------------------------------------------------------------------------------
def test_class_weights_are_factors_of_the_loss() -> None:
    z, y = torch.randn(7, 3), torch.tensor([0, 0, 1, 2, 2, 2, 1])
    task = Classification(class_weights=[1.0, 2.0, 0.5])
    task.setup(training(y, 3))
    expected = F.cross_entropy(z, y, torch.tensor([1.0, 2.0, 0.5]), reduction="none")
    torch.testing.assert_close(task.loss(z, y), expected)


def test_balanced_weights_count_what_is_trained_on() -> None:
    """4 of class 0 and 1 of class 1 are trained on, 5 samples of 2 classes: 5 / (2 * 4) and 5 / (2 * 1)."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    task = Classification(class_weights="balanced")
    task.setup(training(y, 2, [0, 1, 2, 3, 4]))
    assert task.weights is not None and task.weights.tolist() == [0.625, 2.5]


def test_a_class_that_nobody_trains_on_has_weight_one() -> None:
    task = Classification(class_weights="balanced")
    task.setup(training(torch.tensor([0, 0, 1]), 3))
    assert task.weights is not None and task.weights[2] == 1


@pytest.mark.parametrize("rows", [7, 400])  # the narrow kernel begins at 192
def test_label_smoothing_is_pytorchs(rows: int) -> None:
    z, y = torch.randn(rows, 5), torch.randint(0, 5, (rows,))
    found = Classification(label_smoothing=0.2).loss(z, y)
    torch.testing.assert_close(found, F.cross_entropy(z, y, label_smoothing=0.2, reduction="none"))


def test_smoothing_stays_among_a_clients_classes() -> None:
    z, y, mask = torch.randn(1, 6, 4), torch.tensor([[0, 2, 2, 0, 2, 0]]), torch.tensor([[True, False, True, False]])
    found = Classification(label_smoothing=0.3).loss(z, y, mask)
    expected = F.cross_entropy(z[0][:, [0, 2]], y[0] // 2, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"class_weights": [0.5, 2.0, 1.0]}])
def test_the_gradient_is_that_of_the_loss(options: dict[str, Any]) -> None:
    task = Classification(**options)
    z, y, weight = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5)), torch.rand(2, 5)
    task.setup(training(y.flatten(), 3))
    leaf = z.clone().requires_grad_()
    (task.loss(leaf, y) * weight).sum().backward()
    loss, grad = task.loss_and_gradient(z, y, weight, None)
    torch.testing.assert_close(loss, task.loss(z, y))
    torch.testing.assert_close(grad, leaf.grad)


# -- multi-label -----------------------------------------------------------------------------------------------
def test_micro_f1_is_scikit_learns() -> None:
    z, y = torch.randn(9, 4), (torch.rand(9, 4) > 0.6).float()
    found = scored(MultiLabel(micro_f1=True), z, y)["micro_f1"]
    truth, said = y.numpy().astype(int), (z > 0).numpy().astype(int)
    assert found[[0, 2]] == pytest.approx(
        [metrics.f1_score(truth[a:b], said[a:b], average="micro") for a, b in ((0, 4), (4, 9))]
    )
    assert np.isnan(found[1]) and "micro_f1" not in scored(MultiLabel(), z, y)


def test_a_run_from_before_summed_labels_has_the_same_hash() -> None:
    cfg = compose(["algorithm=fedavg", "task=multilabel"])
    stored = to_dict(cfg)
    assert stored["task"].pop("loss") == "bce_mean"
    assert config_hash(stored) == config_hash(cfg)
    assert config_hash(stored) != config_hash(compose(["algorithm=fedavg", "task=multilabel", "task.loss=bce_sum"]))


# -- segmentation ----------------------------------------------------------------------------------------------
def certain(labels: Tensor, num_classes: int) -> Tensor:
    """Logits [n, C, H, W] that are sure of labels [n, H, W]."""
    return 50.0 * F.one_hot(labels, num_classes).movedim(-1, 1).float()


def test_dice_loss_by_hand() -> None:
    """Truth 0 0 0 1, prediction 0 0 1 1: of class 0 (2 * 2 + 1) / (2 + 3 + 1), of class 1 (2 * 1 + 1) / (2 + 1 + 1)."""
    y, said = torch.tensor([[[0, 0], [0, 1]]]), torch.tensor([[[0, 0], [1, 1]]])
    loss = Segmentation(loss="dice").loss(certain(said, 2), y)
    torch.testing.assert_close(loss, torch.tensor([1 - (5 / 6 + 3 / 4) / 2]))


def test_dice_loss_by_hand_without_the_ignored_class() -> None:
    """Truth 0 0 2 1, prediction 0 2 0 1, class 2 ignored: its pixel counts nowhere, and the mean is over two classes.

    Of the pixels 0, 1 and 3: class 0 (2 * 1 + 1) / (1 + 2 + 1), class 1 (2 * 1 + 1) / (1 + 1 + 1).
    """
    y, said = torch.tensor([[[0, 0], [2, 1]]]), torch.tensor([[[0, 2], [0, 1]]])
    task, z = Segmentation(loss="dice", ignore=2), certain(said, 3)
    torch.testing.assert_close(task.loss(z, y), torch.tensor([1 - (3 / 4 + 1) / 2]))
    # A client without class 1, to which pixel 3 is half class 0: (2 * 1 + 1) / (1.5 + 2 + 1).
    alone = task.loss(z[None], y[None], torch.tensor([[True, False, True]]))
    torch.testing.assert_close(alone, torch.tensor([[1 - 3 / 4.5]]))


def test_the_sum_of_both_losses() -> None:
    z, y = torch.randn(3, 4, 5, 5), torch.randint(0, 4, (3, 5, 5))
    ce, dice, both = (Segmentation(loss=name).loss(z, y) for name in ("ce", "dice", "dice_ce"))
    torch.testing.assert_close(both, ce + dice)
    torch.testing.assert_close(ce, F.cross_entropy(z, y, reduction="none").mean((1, 2)))


@pytest.mark.parametrize("loss", ["ce", "dice", "dice_ce"])
@pytest.mark.parametrize("void", [255, -1, 2])
def test_ignored_pixels_change_nothing(loss: Any, void: int) -> None:
    """Neither what is predicted there, nor how they are marked: by a number outside the classes, or as class 2."""
    task = Segmentation(loss=loss, ignore=2)
    y = torch.randint(0, 2, (9, 4, 4))
    y[:, 0] = void
    z = torch.randn(9, 3, 4, 4)
    other = z.clone()
    other[:, :, 0] = torch.randn(9, 3, 4)
    task.setup(training(y, 3))
    torch.testing.assert_close(task.loss(z, y), task.loss(other, y))
    one, two = scored(task, z, y), scored(task, other, y)
    for name in ("accuracy", "iou", "dice"):
        np.testing.assert_array_equal(one[name], two[name])


def test_setup_knows_whether_anything_is_ignored() -> None:
    z, y = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    task, wary = Segmentation(), Segmentation()
    task.setup(training(y, 3))
    assert not task.has_ignored_pixels and wary.has_ignored_pixels
    torch.testing.assert_close(task.loss(z, y), wary.loss(z, y))


@pytest.mark.parametrize("empty, expected", [("skip", 1.0), ("one", 1.0), ("zero", 2 / 3)])
def test_a_class_without_a_pixel(empty: Any, expected: float) -> None:
    """Classes 0 and 1 are found perfectly, class 2 occurs nowhere."""
    y = torch.tensor([[[0, 1], [1, 0]]]).repeat(9, 1, 1)
    found = scored(Segmentation(empty=empty, per_class=True), certain(y, 3), y)
    assert found["dice"][0] == pytest.approx(expected) and found["iou"][0] == pytest.approx(expected)
    assert all(np.isnan(values[1]) for values in found.values())  # nobody's samples are no empty mask


def test_scores_of_each_class() -> None:
    """Truth 0 0 0 1, prediction 0 0 1 1: intersections 2 and 1, unions 3 and 2."""
    y = torch.tensor([[[0, 0], [0, 1]]]).repeat(9, 1, 1)
    said = torch.tensor([[[0, 0], [1, 1]]]).repeat(9, 1, 1)
    task = Segmentation(per_class=True)
    task.setup(training(y, 2))
    found = scored(task, certain(said, 2), y)
    assert [found[f"iou_class{c}"][0] for c in (0, 1)] == pytest.approx([2 / 3, 1 / 2])
    assert [found[f"dice_class{c}"][0] for c in (0, 1)] == pytest.approx([4 / 5, 2 / 3])
    assert found["dice"][0] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert task.directions()["dice_class1"] == Direction(True, True)


# -- regression ------------------------------------------------------------------------------------------------
def test_scores_of_a_regression_are_scikit_learns() -> None:
    y, error = 7 + 3 * torch.randn(9), torch.randn(9)
    task = Regression(standardize=False)
    task.setup(training(y, 1))
    found = scored(task, (y + error)[:, None], y)
    for i, (a, b) in ((0, (0, 4)), (2, (4, 9))):
        truth, said = y[a:b].numpy(), (y + error)[a:b].numpy()
        assert found["rmse"][i] == pytest.approx(metrics.root_mean_squared_error(truth, said), rel=1e-5)
        assert found["mae"][i] == pytest.approx(metrics.mean_absolute_error(truth, said), rel=1e-5)
        assert found["r2"][i] == pytest.approx(metrics.r2_score(truth, said), rel=1e-5)
    assert all(np.isnan(values[1]) for values in found.values())


def test_a_model_learns_standardized_targets_and_is_scored_in_their_units() -> None:
    """Of the training samples 10 and 30: mean 20, std 10.  An output of 1 means 30."""
    y = torch.tensor([10.0, 30.0, 1000.0, 0, 0, 0, 0, 0, 0])
    task = Regression()
    task.setup(training(y, 1, [0, 1]))
    ones = torch.ones(9, 1)
    assert task.loss(ones, y)[:2].tolist() == [4.0, 0.0]
    assert task.sample_statistics(ones[None], y[None])["error"][0, :3, 0].tolist() == [20.0, 0.0, -970.0]


def test_a_constant_target_is_divided_by_1() -> None:
    y = torch.full((9, 2), 0.1)
    y[:, 1] = torch.arange(9)
    task = Regression()
    task.setup(training(y, 2, list(range(7))))
    torch.testing.assert_close(task.std, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("loss, expected", [("mse", [0.25, 9.0]), ("mae", [0.5, 3.0]), ("huber", [0.125, 2.5])])
def test_losses_of_a_regression(loss: Any, expected: list[float]) -> None:
    task = Regression(loss=loss, standardize=False)
    assert task.loss(torch.tensor([[0.5], [3.0]]), torch.zeros(2)).tolist() == expected


def test_several_targets() -> None:
    y = torch.randn(9, 2)
    task = Regression()
    task.check(y.numpy(), 2)
    task.setup(training(y, 2))
    found = scored(task, torch.zeros(9, 2), y)
    assert found["r2"][2] < 1e-6 and task.labels(y.numpy(), 2).max() == 9


def test_partitions_of_a_regression_see_quantiles() -> None:
    labels = Regression().labels(np.arange(100, dtype=np.float32), 1)
    assert np.bincount(labels).tolist() == [10] * 10


# -- which task, and what its scores mean ----------------------------------------------------------------------
def test_the_kinds_are_the_files() -> None:
    assert task_kinds() == (
        "classification",
        "denoising",
        "mixed",
        "multilabel",
        "next_token",
        "regression",
        "segmentation",
        "vqa",
    )
    assert [task_for(kind).kind for kind in task_kinds()] == list(task_kinds())


def test_auto_is_what_the_targets_ask_for() -> None:
    task = Auto(loss="dice").for_targets("segmentation")
    assert isinstance(task, Segmentation) and task.loss_name == "dice"
    with pytest.raises(ConfigError, match=r"task\.loss: the targets of the data set select task=classification"):
        Auto(loss="dice").for_targets("classification")


def test_a_task_for_other_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"targets of the kind regression, .* multilabel: set task=multilabel"):
        Regression().for_targets("multilabel")


def test_keys_tell_losses_apart() -> None:
    y = torch.tensor([0, 0, 1])
    tasks = [Classification(), Classification(label_smoothing=0.1), Classification(class_weights="balanced")]
    for task in tasks:
        task.setup(training(y, 2))
    assert len({task.key for task in tasks}) == 3 and Classification().key == tasks[0].key


def test_a_score_has_one_meaning() -> None:
    register_directions({"accuracy": Direction(True, True)})
    with pytest.raises(ConfigError, match=r"the metric accuracy .* \(higher is better, .* and \(lower is better"):
        register_directions({"accuracy": Direction(False, True)})


def test_a_task_of_ones_own_declares_its_scores() -> None:
    name = "surprise_of_this_test"
    type("Mine", (Classification,), {"higher_is_better": {**Classification.higher_is_better, name: False}})
    try:
        assert direction(f"personal/{name}_worst") == Direction(False, False)
    finally:
        del DIRECTIONS[name]


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: Classification(label_smoothing=1.0), "label_smoothing must be at least 0 and below 1, got 1.0"),
        (
            lambda: Classification(class_weights="some"),
            "class_weights=some is not allowed: set none, balanced or a list",
        ),  # type: ignore
        (lambda: Classification(class_weights=[1.0, -1.0]), "class_weights must be numbers > 0"),
        (
            lambda: Classification(primary="rmse"),
            "task.primary=rmse is not a metric of Classification: choose",
        ),
        (
            lambda: Classification(class_weights=[1.0]).check(np.array([0, 1]), 2),
            "has 1 values, but the data set has 2",
        ),
        (lambda: Segmentation(loss="focal"), "task.loss=focal is not a loss of segmentation: set ce, dice or dice_ce"),  # type: ignore
        (lambda: Segmentation(empty="nan"), "task.empty=nan is not allowed: set skip, one or zero"),  # type: ignore
        (
            lambda: Segmentation(ignore=4).check(np.zeros((2, 3, 3), int), 4),
            "task.ignore=4 is not .* class from 0 to 3",
        ),
        (lambda: Segmentation().check(np.full((2, 3, 3), 7), 4), "labels span 7 to 7, expected 0 to 3"),
        (lambda: Regression(loss="l3"), "task.loss=l3 is not a loss of regression: set mse, mae or huber"),  # type: ignore
        (lambda: Regression().check(np.zeros(3), 1), "targets of task=regression have dtype float64"),
        (lambda: Regression().check(np.array([np.nan], np.float32), 1), "targets must be finite"),
    ],
)
def test_what_is_refused(build: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


def test_a_loss_of_ones_own_is_what_is_descended() -> None:
    """The closed form is that of cross-entropy: a subclass with another loss gets the gradient of its own."""

    class Doubled(Classification):
        def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
            return 2 * super().loss(logits, y, class_mask)

    z, y, weight = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5)), torch.rand(2, 5)
    twice, once = (task.loss_and_gradient(z, y, weight, None)[1] for task in (Doubled(), Classification()))
    torch.testing.assert_close(twice, 2 * once)
