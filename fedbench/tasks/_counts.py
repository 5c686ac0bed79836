"""Arithmetic of scores, for the samples of many clients at once, in client order.

``offsets`` [N+1] says that client i owns samples offsets[i]:offsets[i+1].  Loops are over classes, never over clients:
10,000 clients cost what their samples cost.  What is not defined for a client (the area under the ROC curve where it
has one class) is NaN, never 0, and is skipped in every mean.  Definitions follow scikit-learn (the tests compare).
"""

from __future__ import annotations

import numpy as np

from fedbench.tasks.base import ratio


def clients_of(offsets: np.ndarray) -> np.ndarray:
    """The client that each sample belongs to.  # [n]"""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def count_by_class(label: np.ndarray, client: np.ndarray, num_clients: int, num_classes: int) -> np.ndarray:
    """How often each client [n] has each label [n].  # [N, C]"""
    cell = client * num_classes + label
    return np.bincount(cell, minlength=num_clients * num_classes).reshape(num_clients, num_classes)


def sum_by_client(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sums of values [n, R] over each client's samples.  # [N, R]"""
    client, num = clients_of(offsets), len(offsets) - 1
    return np.stack([np.bincount(client, values[:, r], num) for r in range(values.shape[1])], axis=1)


def mean_of_defined(values: np.ndarray) -> np.ndarray:
    """Mean of [N, C] over the columns that are not NaN.  # [N]"""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0).sum(1), defined.sum(1))


def f1_flat(tp: np.ndarray, p: np.ndarray, true: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """F1 of yes and of no to each of so many cells, weighted by how often each is true, of a client's counts [N]: tp,
    yes that is right; p, yes at all; true.  An undefined one of the two counts 0.  # [N]"""
    of_yes = ratio(2 * tp, p + true)
    of_no = ratio(2 * (cells - p - true + tp), 2 * cells - p - true)
    return ratio(true * np.nan_to_num(of_yes) + (cells - true) * np.nan_to_num(of_no), cells)


def area_under_roc(odds: np.ndarray, positive: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Area under the ROC curve per client and column of odds and positive [n, C]: ties count half, NaN without both
    classes.  # [N, C]"""
    client, num = clients_of(offsets), len(offsets) - 1
    start = offsets[:-1][client]  # [n]
    area = np.empty((num, odds.shape[1]))  # [N, C]
    group = client.astype(np.uint64) << np.uint64(33)
    for c in range(odds.shape[1]):
        # One sort of 64-bit keys (client, score, label) replaces an argsort by two columns: 4 times faster.
        bits = _ordered_bits(odds[:, c]).astype(np.uint64) << np.uint64(1)
        key = np.sort(group | bits | positive[:, c].astype(np.uint64))  # [n], clients stay where they were
        label, tie = (key & np.uint64(1)).astype(np.float64), key >> np.uint64(1)  # [n]
        first = np.flatnonzero(np.append(True, tie[1:] != tie[:-1])[: len(tie)])  # [ties]
        length = np.diff(np.append(first, len(tie)))
        rank = np.repeat(first + (length - 1) / 2, length) - start  # [n], from 0 within the client
        ones = np.bincount(client, label, num)  # [N]
        zeros = np.diff(offsets) - ones
        area[:, c] = ratio(np.bincount(client, label * rank, num) - ones * (ones - 1) / 2, ones * zeros)
    return area


def _ordered_bits(x: np.ndarray) -> np.ndarray:
    """uint32 [n] in the order of the float32 x [n]; +0.0 makes the two zeros one."""
    bits = (x.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def log_odds(logits: np.ndarray, top: np.ndarray) -> np.ndarray:
    """log p_c / (1 - p_c) of the softmax of logits [n, C], top [n] the largest: ranks as the probability does, without
    its ties at 0 and 1.  # [n, C]"""
    rows = np.arange(len(logits))
    shifted = logits - logits[rows, top][:, None]  # [n, C], 0 at the largest
    e = np.exp(shifted)
    e[rows, top] = 0
    rest = e.sum(1, keepdims=True)  # [n, 1]
    others = 1 + rest - e  # >= 1: no cancellation
    others[rows, top] = rest[:, 0]
    with np.errstate(divide="ignore"):
        return shifted - np.log(others)
