"""What is measured: first per client, then over clients.

Every function takes the samples of many clients at once, concatenated in client order, with CSR ``offsets``
[N+1] (client i owns samples offsets[i]:offsets[i+1]), and loops over classes but never over clients: 10,000
clients cost what their samples cost.  A client without samples, and a metric that is undefined for a client
(the AUC of a client with one class), is NaN, never 0, and is skipped in every mean.

Definitions follow scikit-learn where it has them (the tests compare); the segmentation scores ``dice_iou``
and ``label_iou`` are those of pFedNet's tables.
"""

from typing import NamedTuple

import numpy as np

from fedbench.core.options import require


class Direction(NamedTuple):
    """What a metric's numbers mean: which of two is better, and whether they are shares of 1, shown in per cent."""

    higher_is_better: bool
    fraction: bool


SCORE = Direction(higher_is_better=True, fraction=True)
DIRECTIONS = {
    "loss": Direction(higher_is_better=False, fraction=False),
    **{"accuracy": SCORE, "balanced_accuracy": SCORE, "f1": SCORE, "auc": SCORE},
    **{"iou": SCORE, "dice_iou": SCORE, "label_iou": SCORE, "label_iou_majority": SCORE},
}
ENDS = ("_weighted", "_std", "_worst")  # of what over_clients makes of a metric


class SegmentationCounts(NamedTuple):
    """Pixels per sample and class: all that the segmentation scores need, so that masks need not be kept.

    Each is int64 [n, C].  ``tp``: predicted c and truly c; ``p``: predicted c; ``l``: truly c.
    """

    tp: np.ndarray
    p: np.ndarray
    l: np.ndarray  # noqa: E741  (the letter of pFedNet's definition)


def per_client(
    task: str,
    logits: np.ndarray | SegmentationCounts,
    targets: np.ndarray | None,
    offsets: np.ndarray,
    loss: np.ndarray,
    class_mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Metrics of each client, each float64 [N].

    ``task`` classification: ``targets`` int [n], ``logits`` [n, C]; gives loss, accuracy, balanced_accuracy
    (over the classes among the client's targets), f1 (macro, over classes among its targets or predictions),
    auc (C = 2: of class 1; else macro one-vs-rest over classes that some but not all of its samples have).
    ``task`` multilabel: ``targets`` [n, C] of 0 and 1; a label is predicted where its logit is > 0; gives
    loss, accuracy (element-wise), f1 (macro, over labels true or predicted somewhere), auc (macro, as above).
    ``task`` segmentation: ``targets`` int [n, H, W], ``logits`` [n, C, H, W], or the SegmentationCounts of
    both; gives loss, accuracy (of pixels), iou, dice_iou, label_iou, label_iou_majority (``_segmentation``).

    ``loss`` [n] is averaged over samples.  ``class_mask`` bool [N, C] or [C]: classes a client may predict.
    """
    offsets = np.asarray(offsets, dtype=np.int64)  # [N+1]
    sizes = np.diff(offsets)  # [N]
    client = np.repeat(np.arange(len(sizes)), sizes)  # [n]
    found = {"loss": _ratio(np.bincount(client, np.asarray(loss), len(sizes)), sizes)}
    if task == "segmentation":
        counts = (
            logits
            if isinstance(logits, SegmentationCounts)
            else segmentation_counts(logits, np.asarray(targets))
        )
        return found | _segmentation(counts, client, len(sizes))
    logits, targets = np.asarray(logits, dtype=np.float32), np.asarray(targets)  # [n, C]
    mask = _mask(class_mask, len(sizes), logits.shape[1])  # [N, C]
    if task == "classification":
        return found | _classification(logits, targets, client, offsets, mask)
    if task == "multilabel":
        return found | _multilabel(logits, targets > 0.5, client, offsets, mask)
    raise ValueError(f"task is {task!r}; allowed are classification, multilabel, segmentation")


def direction(column: str) -> Direction:
    """That of a metric, also of a column such as personal/accuracy_worst; of a spread (_std) the smaller is better.

    ConfigError for one that DIRECTIONS does not tell: nothing is guessed from a name.
    """
    name = column.rpartition("/")[2]
    end = next((end for end in ENDS if name.endswith(end)), "")
    known = DIRECTIONS.get(name.removesuffix(end))
    require(known is not None, f"whether {column} is better high or low is not known; DIRECTIONS in "
            f"fedbench/tasks/scores.py tells it of {', '.join(DIRECTIONS)}")
    assert known is not None
    return known._replace(higher_is_better=False) if end == "_std" else known


def is_better(column: str, value: float, than: float) -> bool:
    """Whether a value of a metric is better than another one; a number is better than NaN."""
    if value != value or than != than:
        return value == value and than != than
    return value > than if direction(column).higher_is_better else value < than


def over_clients(values: dict[str, np.ndarray], num_test: np.ndarray) -> dict[str, float]:
    """For each metric m [N] of ``per_client``: ``m``, ``m_weighted``, ``m_std`` and ``m_worst``.

    They are the unweighted mean over clients, the mean weighted by ``num_test`` [N], the population standard
    deviation (ddof 0, the papers' habit), and the mean over the worst decile (a tenth of the clients, rounded
    down, at least one; the largest where lower is better).  NaN clients are left out; with none left the value is NaN.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        keep = ~np.isnan(value)  # [N]
        value, weight = np.asarray(value)[keep], np.asarray(num_test)[keep]  # [k]
        found |= {name + end: float("nan") for end in ("", "_weighted", "_std", "_worst")}
        if len(value):
            ascending = np.sort(value)
            few = max(1, len(value) // 10)
            worst = ascending[:few] if direction(name).higher_is_better else ascending[-few:]
            found[name] = float(value.mean())
            found[name + "_weighted"] = float(_ratio((weight * value).sum(), weight.sum()))
            found[name + "_std"] = float(value.std())
            found[name + "_worst"] = float(worst.mean())
    return found


def segmentation_counts(logits: np.ndarray, targets: np.ndarray) -> SegmentationCounts:
    """Count the pixels of a batch of masks, ``logits`` [n, C, H, W] and ``targets`` int [n, H, W].

    A target outside 0..C-1 (255, -1) is a pixel to ignore.  Concatenate the counts of batches.
    """
    n, num_classes = logits.shape[:2]
    truth = np.asarray(targets).reshape(n, -1)  # [n, H*W]
    predicted = np.asarray(logits).argmax(1).reshape(n, -1)  # [n, H*W]
    valid = (truth >= 0) & (truth < num_classes)
    row = np.repeat(np.arange(n), valid.sum(1)) * num_classes  # [pixels]
    truth, predicted = truth[valid], predicted[valid]  # [pixels]

    def count(cell: np.ndarray) -> np.ndarray:
        return np.bincount(cell, minlength=n * num_classes).reshape(n, num_classes)  # [n, C]

    hit = truth == predicted
    return SegmentationCounts(count((row + truth)[hit]), count(row + predicted), count(row + truth))


def _classification(
    logits: np.ndarray, targets: np.ndarray, client: np.ndarray, offsets: np.ndarray, mask: np.ndarray | None
) -> dict[str, np.ndarray]:
    if mask is not None:
        logits = np.where(mask[client], logits, -np.inf)  # [n, C]
    num, num_classes = len(offsets) - 1, logits.shape[1]
    predicted = logits.argmax(1)  # [n]
    hit = predicted == targets

    def count(label: np.ndarray, who: np.ndarray) -> np.ndarray:
        return np.bincount(who * num_classes + label, minlength=num * num_classes).reshape(
            num, num_classes
        )  # [N, C]

    tp, p, l = count(targets[hit], client[hit]), count(predicted, client), count(targets, client)  # noqa: E741
    scores = (
        logits[:, 1:] - logits[:, :1] if num_classes == 2 else _log_odds(logits, predicted)
    )  # [n, 1 or C]
    positive = targets[:, None] == np.arange(1 if num_classes == 2 else 0, num_classes)  # [n, 1 or C]
    return {
        "accuracy": _ratio(tp.sum(1), np.diff(offsets)),
        "balanced_accuracy": _mean(_ratio(tp, l)),
        "f1": _mean(_ratio(2 * tp, p + l)),
        "auc": _mean(_auc(scores, positive, client, offsets)),
    }


def _multilabel(
    logits: np.ndarray, targets: np.ndarray, client: np.ndarray, offsets: np.ndarray, mask: np.ndarray | None
) -> dict[str, np.ndarray]:
    valid = np.ones_like(targets) if mask is None else mask[client]  # [n, C]
    predicted = logits > 0  # [n, C]

    def count(cells: np.ndarray) -> np.ndarray:
        columns = [
            np.bincount(client, (cells & valid)[:, c], len(offsets) - 1) for c in range(cells.shape[1])
        ]
        return np.stack(columns, axis=1)  # [N, C]

    tp, p, l = count(predicted & targets), count(predicted), count(targets)  # noqa: E741
    auc = _auc(logits, targets, client, offsets)  # [N, C]
    return {
        "accuracy": _ratio(count(predicted == targets).sum(1), count(np.ones_like(targets)).sum(1)),
        "f1": _mean(_ratio(2 * tp, p + l)),
        "auc": _mean(auc if mask is None else np.where(mask, auc, np.nan)),
    }


def _segmentation(counts: SegmentationCounts, client: np.ndarray, num: int) -> dict[str, np.ndarray]:
    """Scores from a client's pixel counts per class, summed over its samples.

    iou: Jaccard index, mean over the classes that occur in targets or predictions.  dice_iou: pFedNet's
    "IoU", d/(2-d) for the Dice coefficient d of all classes pooled (d is the pixel accuracy where every pixel
    is labelled).  label_iou: the same sums without class 0, the background.  label_iou_majority: without the
    class that has most true pixels, which is what pFedNet's released code excludes.
    """
    num_classes = counts.tp.shape[1]
    tp, p, l = (  # noqa: E741
        np.stack([np.bincount(client, column[:, c], num) for c in range(num_classes)], axis=1)
        for column in counts
    )  # [N, C] each

    def pooled(keep: np.ndarray) -> np.ndarray:
        hits, union = (tp * keep).sum(1), ((p + l - tp) * keep).sum(1)  # [N]
        return _ratio(hits, union)  # d/(2-d) of d = 2 TP/(P+L), written out

    classes = np.arange(num_classes)
    return {
        "accuracy": _ratio(tp.sum(1), l.sum(1)),
        "iou": _mean(_ratio(tp, p + l - tp)),
        "dice_iou": pooled(np.ones((1, num_classes))),
        "label_iou": pooled(classes[None] != 0),
        "label_iou_majority": pooled(classes[None] != l.argmax(1)[:, None]),
    }


def _auc(scores: np.ndarray, positive: np.ndarray, client: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Area under the ROC curve per client and column, [N, C]: ties count half, NaN without both classes."""
    start, num = offsets[:-1][client], len(offsets) - 1  # [n], N
    area = np.empty((num, scores.shape[1]))  # [N, C]
    group = client.astype(np.uint64) << np.uint64(33)
    for c in range(scores.shape[1]):
        # One sort of 64-bit keys (client, score, label) replaces an argsort by two columns: 4 times faster.
        bits = _ordered_bits(scores[:, c]).astype(np.uint64) << np.uint64(1)
        key = np.sort(group | bits | positive[:, c].astype(np.uint64))  # [n], clients stay where they were
        label, tie = (key & np.uint64(1)).astype(np.float64), key >> np.uint64(1)  # [n]
        first = np.flatnonzero(np.append(True, tie[1:] != tie[:-1])[: len(tie)])  # [ties]
        length = np.diff(np.append(first, len(tie)))
        rank = np.repeat(first + (length - 1) / 2, length) - start  # [n], from 0 within the client
        ones = np.bincount(client, label, num)  # [N]
        zeros = np.diff(offsets) - ones
        area[:, c] = _ratio(np.bincount(client, label * rank, num) - ones * (ones - 1) / 2, ones * zeros)
    return area


def _ordered_bits(x: np.ndarray) -> np.ndarray:
    """uint32 [n] in the order of the float32 x [n]; +0.0 makes the two zeros one."""
    bits = (x.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _log_odds(logits: np.ndarray, top: np.ndarray) -> np.ndarray:
    """log p_c/(1-p_c) of the softmax, [n, C]: ranks as the probability does, without its ties at 0 and 1."""
    rows = np.arange(len(logits))
    shifted = logits - logits[rows, top][:, None]  # [n, C], 0 at the largest
    e = np.exp(shifted)
    e[rows, top] = 0
    rest = e.sum(1, keepdims=True)  # [n, 1]
    others = 1 + rest - e  # >= 1: no cancellation
    others[rows, top] = rest[:, 0]
    with np.errstate(divide="ignore"):
        return shifted - np.log(others)


def _mask(class_mask: np.ndarray | None, num: int, num_classes: int) -> np.ndarray | None:
    return (
        None if class_mask is None else np.broadcast_to(np.asarray(class_mask, bool), (num, num_classes))
    )  # [N, C]


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom, NaN where bottom is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom > 0, np.divide(top, bottom), np.nan)


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean of [N, C] over the columns that are not NaN, [N]."""
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0).sum(1), defined.sum(1))
