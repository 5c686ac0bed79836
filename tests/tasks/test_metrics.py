"""Metrics agree with scikit-learn client by client, on ragged data with ties and missing classes."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from tiny import calls

from fedbench.core.options import ConfigError
from fedbench.tasks.base import SampleStatistics, task_for
from fedbench.tasks.scores import defined_counts, direction, is_better, summarize_clients

CLASSIFICATION = ["loss", "accuracy", "balanced_accuracy", "f1", "auc"]


def statistics_of(
    kind: str, logits: np.ndarray, targets: np.ndarray, mask: np.ndarray | None = None
) -> SampleStatistics:
    """What the task of this kind keeps of samples [n, ...]; mask [n, C]: the classes of each one's client."""
    y = torch.as_tensor(targets).float() if kind == "multilabel" else torch.as_tensor(targets).long()
    z, allowed = torch.as_tensor(logits).float(), None if mask is None else torch.from_numpy(mask)
    return {name: t[:, 0] for name, t in task_for(kind)().sample_statistics(z[:, None], y[:, None], allowed).items()}


def per_client(
    kind: str, logits: np.ndarray, targets: np.ndarray, offsets: np.ndarray, class_mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Scores of each client; class_mask [N, C] or [C]."""
    mask = None if class_mask is None else np.broadcast_to(class_mask, (len(offsets) - 1, logits.shape[1])).copy()
    each = None if mask is None else np.repeat(mask, np.diff(offsets), axis=0)
    return task_for(kind)().scores(statistics_of(kind, logits, targets, each), offsets, mask)


def ragged(rng: np.random.RandomState, num_clients: int, num_classes: int) -> tuple[np.ndarray, ...]:
    """Clients of 0 to 30 samples with some of the classes; every third sample repeats another's logits."""
    sizes = rng.randint(0, 31, num_clients)
    sizes[:2] = 0, 1
    offsets = np.append(0, np.cumsum(sizes))
    targets = np.concatenate(
        [rng.choice(rng.permutation(num_classes)[: rng.randint(1, num_classes + 1)], n) for n in sizes]
    )
    logits = rng.randn(len(targets), num_classes).astype(np.float32)
    logits[np.arange(len(targets)), targets] += 1
    logits[::3] = logits[rng.randint(0, len(targets), len(logits[::3]))]
    loss = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets).long(), reduction="none")
    return logits, targets.astype(np.int64), offsets, loss.numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def reference_auc(positive: np.ndarray, scores: np.ndarray) -> float:
    """Mean of scikit-learn's AUC over the columns that have both classes."""
    both = [c for c in range(positive.shape[1]) if 0 < positive[:, c].sum() < len(positive)]
    return np.mean([sk.roc_auc_score(positive[:, c], scores[:, c]) for c in both]) if both else np.nan


@pytest.mark.parametrize("num_classes", [2, 5, 10])
def test_classification_is_scikit_learn_per_client(num_classes):
    logits, y, offsets, loss = ragged(np.random.RandomState(num_classes), 60, num_classes)
    ours = per_client("classification", logits, y, offsets)
    assert list(ours) == CLASSIFICATION
    for i, (a, b) in enumerate(pairwise(offsets)):
        mine = {name: value[i] for name, value in ours.items()}
        if a == b:
            assert all(np.isnan(list(mine.values())))
            continue
        truth, guess, probability = y[a:b], logits[a:b].argmax(1), softmax(logits[a:b])
        positive = truth[:, None] == np.arange(num_classes)
        first = 1 if num_classes == 2 else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = {
                "loss": loss[a:b].mean(),
                "accuracy": sk.accuracy_score(truth, guess),
                "balanced_accuracy": sk.balanced_accuracy_score(truth, guess),
                "f1": sk.f1_score(truth, guess, average="macro"),
                "auc": reference_auc(positive[:, first:], probability[:, first:]),
            }
        assert mine == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_multiclass_auc_is_scikit_learn_one_vs_rest():
    y, logits = np.arange(40) % 4, np.random.RandomState(1).randn(40, 4)
    ours = per_client("classification", logits, y, np.array([0, 40]))["auc"][0]
    assert ours == pytest.approx(sk.roc_auc_score(y, softmax(logits), multi_class="ovr", average="macro"))


def test_binary_auc_with_many_ties():
    rng = np.random.RandomState(3)
    score, y = rng.randint(-2, 3, 200), rng.randint(0, 2, 200)
    logits = np.stack([np.zeros(200), score], axis=1)
    offsets = np.array([0, 70, 70, 200])
    ours = per_client("classification", logits, y, offsets)["auc"]
    expected = [sk.roc_auc_score(y[:70], score[:70]), np.nan, sk.roc_auc_score(y[70:], score[70:])]
    assert ours == pytest.approx(expected, nan_ok=True)


def test_the_two_zeros_tie():
    logits, y = np.array([[0.0], [-0.0]], np.float32), np.array([[0], [1]])
    for order in ([0, 1], [1, 0]):
        assert per_client("multilabel", logits[order], y, np.array([0, 2]))["auc"] == [0.5]


def test_auc_of_a_client_with_one_class_is_nan_and_is_skipped():
    logits = np.array([[0, 1], [0, 2], [1, 0], [0, 1]], dtype=np.float32)
    found = per_client("classification", logits, np.array([1, 1, 0, 1]), np.array([0, 2, 4]))
    assert np.isnan(found["auc"][0])
    assert found["auc"][1] == 1
    assert summarize_clients(found, np.array([2, 2]))["auc"] == 1


def test_saturated_probabilities_are_not_ties():
    """Logits of 50 and 60 both give probability 1.0 in float32; the AUC must still tell them apart."""
    logits = np.array([[0, 50, 0], [0, 60, 0]], dtype=np.float32)
    found = per_client("classification", logits, np.array([0, 1]), np.array([0, 2]))
    assert found["auc"][0] == 1.0


def test_class_mask_confines_predictions_to_the_clients_classes():
    logits = np.array([[5, 1, 0, 9], [5, 1, 0, 9]], dtype=np.float32)
    mask = np.array([[True, True, False, False], [False, True, True, False]])
    found = per_client("classification", logits, np.array([0, 1]), np.array([0, 1, 2]), mask)
    assert found["accuracy"].tolist() == [1, 1]
    assert found["f1"].tolist() == [1, 1]


def test_multilabel_is_scikit_learn_per_client():
    rng = np.random.RandomState(5)
    sizes = np.array([12, 0, 1, 30, 7])
    offsets = np.append(0, np.cumsum(sizes))
    targets = (rng.rand(50, 6) < 0.3).astype(np.float32)
    targets[:, 5] = 0
    logits = np.round(rng.randn(50, 6) + targets, 1).astype(np.float32)  # rounded: ties
    logits[:, 5] = -1  # a label that is never true and never predicted
    found = per_client("multilabel", logits, targets, offsets)
    for i, (a, b) in enumerate(pairwise(offsets)):
        if a == b:
            assert np.isnan(found["f1"][i])
            continue
        truth, guess = targets[a:b] > 0, logits[a:b] > 0
        assert found["accuracy"][i] == pytest.approx((truth == guess).mean())
        expected = sk.f1_score(truth, guess, average=None, zero_division=np.nan)
        assert found["f1"][i] == pytest.approx(np.nanmean(expected))
        assert found["auc"][i] == pytest.approx(reference_auc(truth, logits[a:b]), nan_ok=True)


def test_multilabel_mask_leaves_out_labels():
    targets, logits = np.array([[1, 1.0], [0, 0]]), np.array([[3, -3.0], [-3, 3]])
    found = per_client("multilabel", logits, targets, np.array([0, 2]), np.array([True, False]))
    assert (found["accuracy"][0], found["f1"][0], found["auc"][0]) == (1, 1, 1)


def test_segmentation_scores_per_client():
    rng = np.random.RandomState(7)
    targets = rng.randint(0, 3, (9, 8, 8))
    logits = rng.randn(9, 3, 8, 8) + 2 * (targets[:, None] == np.arange(3)[:, None, None])
    offsets = np.array([0, 4, 4, 9])
    found = per_client("segmentation", logits, targets, offsets)
    batches = [statistics_of("segmentation", logits[a : a + 2], targets[a : a + 2]) for a in range(0, 9, 2)]
    streamed = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    again = task_for("segmentation")().scores(streamed, offsets)
    for name, value in found.items():
        assert value == pytest.approx(again[name], nan_ok=True)
        assert np.isnan(value[1])
    truth, guess = targets[:4].ravel(), logits[:4].argmax(1).ravel()
    accuracy = (truth == guess).mean()
    foreground = ((truth == guess) & (truth > 0)).sum()
    assert found["iou"][0] == pytest.approx(sk.jaccard_score(truth, guess, average="macro"))
    assert found["accuracy"][0] == pytest.approx(accuracy)
    assert found["dice_iou"][0] == pytest.approx(accuracy / (2 - accuracy))
    dice = 2 * foreground / ((truth > 0).sum() + (guess > 0).sum())
    assert found["label_iou"][0] == pytest.approx(dice / (2 - dice))


def test_label_iou_of_two_classes_is_the_jaccard_index():
    targets = np.array([[[1, 1, 1, 0]]])
    logits = np.stack([np.array([[[0, 0, 1, 1]]]), np.array([[[1, 1, 0, 0]]])], axis=1)
    found = per_client("segmentation", logits, targets, np.array([0, 1]))
    assert found["label_iou"][0] == pytest.approx(2 / 3)  # of class 1, the foreground
    assert found["label_iou_majority"][0] == pytest.approx(1 / 2)  # of class 0: here 1 is the majority


def test_ignored_pixels_do_not_count():
    counts = statistics_of("segmentation", np.ones((1, 2, 1, 3)), np.array([[[0, 255, -1]]]))
    assert counts["true"].tolist() == [[1, 0]]
    assert counts["p"].tolist() == [[1, 0]]


def test_over_clients_by_hand():
    """Accuracies .2 .6 1 NaN of 10 20 70 5 samples: weighted (2+12+70)/100, std sqrt(.32/3)."""
    found = summarize_clients({"accuracy": np.array([0.2, 0.6, 1.0, np.nan])}, np.array([10, 20, 70, 5]))
    expected = {
        "accuracy": 0.6,
        "accuracy_weighted": 0.84,
        "accuracy_std": np.sqrt(0.32 / 3),
        "accuracy_worst": 0.2,
        "accuracy_clients": 3,
    }
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)
    assert defined_counts(found) == {"accuracy": 3}


def test_a_mean_over_all_clients_has_no_count():
    found = summarize_clients({"accuracy": np.array([0.2, 0.6])}, np.array([10, 20]))
    assert list(found) == ["accuracy", "accuracy_weighted", "accuracy_std", "accuracy_worst"]
    assert all(type(value) is float for value in found.values()) and defined_counts(found) == {}


def test_an_infinite_loss_is_no_missing_one():
    """A client whose loss has blown up is in the mean, not left out of it."""
    with np.errstate(invalid="ignore"):  # of the deviation
        found = summarize_clients({"loss": np.array([1.0, np.inf])}, np.ones(2))
    assert found["loss"] == found["loss_weighted"] == found["loss_worst"] == np.inf


@pytest.mark.parametrize(("num", "worst"), [(5, 1), (20, 2), (29, 2), (30, 3)])
def test_worst_decile(num, worst):
    values = np.random.RandomState(0).permutation(num) / num
    found = summarize_clients({"accuracy": values, "loss": values}, np.ones(num))
    assert found["accuracy_worst"] == pytest.approx(np.sort(values)[:worst].mean())
    assert found["loss_worst"] == pytest.approx(np.sort(values)[-worst:].mean())


def test_every_metric_has_a_direction():
    """The name does not tell: a metric called lossless is refused until it is declared."""
    y, offsets = np.array([0, 1, 1, 0]), np.array([0, 2, 4])
    tasks = {
        "classification": (np.zeros((4, 2)), y),
        "multilabel": (np.zeros((4, 2)), np.eye(2)[y]),
        "segmentation": (np.zeros((4, 2, 3, 3)), np.zeros((4, 3, 3), int)),
    }
    for kind, (logits, targets) in tasks.items():
        assert list(per_client(kind, logits, targets, offsets)) == list(task_for(kind)().higher_is_better)
    assert not direction("personal/loss").higher_is_better and not direction("train/loss").fraction
    assert direction("val/label_iou_majority_worst") == direction("auc") == (True, True)
    assert direction("personal/accuracy_std") == (False, True)
    for name in ("personal/lossless", "loss_of_sleep"):
        with pytest.raises(ConfigError, match=f"the metric {name} is unknown"):
            direction(name)
        with pytest.raises(ConfigError, match=name):
            summarize_clients({name: np.ones(3)}, np.ones(3))


def test_is_better():
    nan = float("nan")
    assert is_better("accuracy", 0.2, 0.1) and not is_better("accuracy", 0.1, 0.1)
    assert is_better("loss", 0.1, 0.2) and not is_better("loss", 0.2, 0.1)
    assert is_better("loss", 0.1, nan) and not is_better("loss", nan, 0.1) and not is_better("loss", nan, nan)


def test_no_defined_client_gives_nan():
    found = summarize_clients({"auc": np.full(3, np.nan)}, np.ones(3))
    assert len(found) == 4
    assert np.isnan(list(found.values())).all()


@pytest.mark.parametrize(("num_clients", "size"), [(100, 150), (10_000, 15)])
def test_cost_does_not_grow_with_the_number_of_clients(num_clients, size):
    """As many calls for either, 1,052: nothing is done client by client."""
    rng = np.random.RandomState(0)
    n = num_clients * size
    logits, y = rng.randn(n, 10).astype(np.float32), rng.randint(0, 10, n)
    per_client("classification", logits[:size], y[:size], np.array([0, size]))  # imports count elsewhere
    assert calls(lambda: per_client("classification", logits, y, np.arange(0, n + 1, size))) < 2000
