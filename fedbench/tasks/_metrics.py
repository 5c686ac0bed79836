"""Metrics of many clients at once, computed from samples in client order.

Client i has the samples offsets[i]:offsets[i + 1].  Loops are over classes, never over clients.
A metric that is not defined for a client is NaN, for example the ROC AUC of a client with one class.
Definitions follow scikit-learn.
"""

from __future__ import annotations

import numpy as np

from fedbench.tasks.base import ratio


def client_of_sample(offsets: np.ndarray) -> np.ndarray:
    """Return the index of the client that has each sample.

    Args:
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        Indices from 0 to N - 1, [n] int64, ascending.
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def count_by_class(label: np.ndarray, client: np.ndarray, num_clients: int, num_classes: int) -> np.ndarray:
    """Count the samples of each client and class.

    Args:
        label: Class of each sample, [n].
        client: Client of each sample, [n].
        num_clients: N.
        num_classes: C.

    Returns:
        Counts, [N, C] int64.
    """
    pair = client * num_classes + label  # [n], one number for each pair of client and class
    return np.bincount(pair, minlength=num_clients * num_classes).reshape(num_clients, num_classes)


def sum_by_client(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum values over the samples of each client.

    Args:
        values: R values of each sample, [n, R].
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        Sums, [N, R] float64, 0 for a client without samples.
    """
    client = client_of_sample(offsets)
    num_clients = len(offsets) - 1
    return np.stack([np.bincount(client, values[:, r], num_clients) for r in range(values.shape[1])], axis=1)


def nan_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of each row of values [N, C], leaving out NaN; NaN if a row has only NaN.  # [N]"""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0).sum(1), defined.sum(1))


def answer_scores(
    correct: np.ndarray, closed: np.ndarray, in_list: np.ndarray, question: np.ndarray, offsets: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the fractions of each client's questions that are answered correctly, [N] each.

    Args:
        correct: Whether the model's answer is correct, [n].
        closed: Whether it is a closed question, such as one with the answers yes and no, [n].
        in_list: Whether the correct answer is in the client's list of possible answers, [n].
        question: Whether the sample is a question, [n].  If not, the other three must be False.
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        accuracy: of all questions; accuracy_open and accuracy_closed: of open and closed questions; ceiling: the
        fraction of questions whose answer is in the client's list, which accuracy cannot exceed.  NaN: the client has
        no such questions.
    """
    columns = np.stack([question, closed, correct, correct & closed, in_list], 1)
    total, total_closed, num_correct, correct_closed, answerable = sum_by_client(columns, offsets).T  # [N] each
    return {
        "accuracy": ratio(num_correct, total),
        "accuracy_open": ratio(num_correct - correct_closed, total - total_closed),
        "accuracy_closed": ratio(correct_closed, total_closed),
        "ceiling": ratio(answerable, total),
    }


def weighted_binary_f1(tp: np.ndarray, predicted: np.ndarray, actual: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the mean of the F1 of "yes" and the F1 of "no", weighted by how often each is true.

    A decision is a prediction, yes or no, whether a sample has one label (or a question one answer).

    Args:
        tp: The number of each client's "yes" decisions that are correct (true positives), [N].
        predicted: The number of "yes" decisions, [N].
        actual: The number of decisions where "yes" is true, [N].
        total: The number of all decisions, [N].

    Returns:
        Weighted F1, [N].  An undefined F1 of "yes" or "no" counts as 0.  NaN: the client has no decisions.
    """
    # Of "no", the true positives are total - predicted - actual + tp.
    f1_yes = ratio(2 * tp, predicted + actual)
    f1_no = ratio(2 * (total - predicted - actual + tp), 2 * total - predicted - actual)
    return ratio(actual * np.nan_to_num(f1_yes) + (total - actual) * np.nan_to_num(f1_no), total)


def roc_auc(scores: np.ndarray, positive: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve of each client and class, by the ranks of the scores (Mann-Whitney U).

    A pair of a positive and a negative with equal scores counts half.

    Args:
        scores: Score of each sample for each class; larger: more likely positive.  [n, C].
        positive: Whether the sample has the class, [n, C] bool.
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        Areas [N, C], NaN for a class of which a client has only positives or only negatives.
    """
    client = client_of_sample(offsets)
    num_clients = len(offsets) - 1
    start = offsets[:-1][client]  # [n], index of the first sample of each sample's client
    area = np.empty((num_clients, scores.shape[1]))  # [N, C]
    client_bits = client.astype(np.uint64) << np.uint64(33)
    for c in range(scores.shape[1]):
        # One sort of 64-bit keys is faster than an argsort by two columns.  From the highest bit, a key has 31 bits of
        # the client, 32 of the score (an unsigned integer in the order of float32) and 1 of the label.
        score_bits = _sortable_bits(scores[:, c]).astype(np.uint64) << np.uint64(1)
        keys = np.sort(client_bits | score_bits | positive[:, c].astype(np.uint64))  # [n], still in client order
        label = (keys & np.uint64(1)).astype(np.float64)  # [n]
        tie = keys >> np.uint64(1)  # [n], equal for the tied samples of a client
        first = np.flatnonzero(np.append(True, tie[1:] != tie[:-1])[: len(tie)])  # [ties], where each tie begins
        length = np.diff(np.append(first, len(tie)))  # [ties]
        rank = np.repeat(first + (length - 1) / 2, length) - start  # [n], mean of the tied ranks, from 0 per client
        positives = np.bincount(client, label, num_clients)  # [N]
        negatives = np.diff(offsets) - positives
        rank_sum = np.bincount(client, label * rank, num_clients)  # [N], of the positives
        area[:, c] = ratio(rank_sum - positives * (positives - 1) / 2, positives * negatives)  # U / (number of pairs)
    return area


def _sortable_bits(x: np.ndarray) -> np.ndarray:
    """Return uint32 integers [n] in the order of the numbers x [n], which may be negative, rounded to float32."""
    bits = (x.astype(np.float32) + np.float32(0)).view(np.uint32)  # + 0 turns -0.0 into 0.0
    # IEEE 754 orders positive floats as integers, and negative floats in reverse.
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def log_odds(logits: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)) for the softmax p of logits.

    It is computed without p itself, which rounding makes equal to 0 or 1 for many samples.

    Args:
        logits: Logits, [n, C].
        largest: The class of the largest logit of each sample, [n].

    Returns:
        Log odds, [n, C].
    """
    samples = np.arange(len(logits))
    shifted = logits - logits[samples, largest][:, None]  # [n, C], 0 for the largest logit
    exp = np.exp(shifted)
    exp[samples, largest] = 0
    sum_others = exp.sum(1, keepdims=True)  # [n, 1], over all classes but the largest, whose exp(shifted) is 1
    denominator = 1 + sum_others - exp  # [n, C], sum over all classes but this one; >= 1, so without cancellation
    denominator[samples, largest] = sum_others[:, 0]
    with np.errstate(divide="ignore"):
        return shifted - np.log(denominator)
