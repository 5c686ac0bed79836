"""Tables as inputs of a model: missing values filled, numbers standardized, categories one-hot.

Which statistics that takes, and of which samples, is known only when the samples are divided over clients: `TableFit`
is the ``fit`` of such Arrays.  It follows scikit-learn's SimpleImputer, StandardScaler and
OneHotEncoder(handle_unknown="ignore").

Letters: n samples, Q numeric columns, F features that a model sees.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedbench.core.constant import EPS, deviation
from fedbench.data.base import Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split

ScaleFit = Literal["train", "all", "client"]
Scale = Literal["standard", "max_abs"]
FEW_ROWS = 20  # a column of distinct integers is suspicious from this many rows on
log = logging.getLogger(__name__)


class Statistics(NamedTuple):
    """What is learned of a table: fill of each column [columns]; of each numeric one, once filled, what is subtracted
    and what it is divided by [Q]: mean and std, or 0 and the largest absolute value."""

    fill: np.ndarray
    mean: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class TableFit:
    """Turns raw columns [n, columns] float64 (NaN: missing) into features [n, F] float32.

    categories: for each column, how many categories it has, 0 for a numeric one.  A category is its number; a number
    that is too large is a value that is not listed.
    indicator: whether each column with missing values gets another one, 1 where the value is missing.
    scale_fit: whose samples statistics are of: the training parts of all clients together (train), all samples of all
    clients (all), or each client's own training part for its samples (client; what it has no value of, it takes from
    train).

    scale: standard, or max_abs: numbers are divided by the largest absolute value instead (0 stays 0) and clipped to
    [-1, 1].  fill: mean, or zero for missing numbers.  constant: whether a last feature is 1 everywhere.  These three
    are for pFedNet, whose code scales by max_abs, fills with 0 and appends the constant.

    The rules.  A missing number becomes the mean, a missing category the most frequent one (the first of several); of
    a column without any value, 0 and the first.  Numeric columns are then standardized (a constant one is only
    centered); one-hot and indicator columns are not.  A category that no client's training part has is all zeros.
    The order of features: numeric columns, then one-hot columns, indicators, the constant.
    """

    categories: tuple[int, ...]
    indicator: bool = False
    scale_fit: ScaleFit = "train"
    scale: Scale = "standard"
    fill: Literal["mean", "zero"] = "mean"
    constant: bool = False

    def __call__(self, arrays: Arrays, split: Split, normalize: bool) -> Arrays:
        """The arrays with features in place of raw columns; normalize: whether numeric columns are standardized."""
        raw = np.asarray(arrays.inputs)  # [n, columns]
        parts = (split.train, split.val, split.test)
        indices = split.train.indices if self.scale_fit != "all" else np.concatenate([p.indices for p in parts])
        flagged = np.flatnonzero(np.isnan(raw).any(0)) if self.indicator else np.empty(0, np.int64)
        pooled = self._statistics(raw[indices], None)
        seen = [np.unique(raw[split.train.indices, c]) for c in self._categorical]
        features = self._encode(raw, pooled, seen, flagged, normalize)  # [n, F]
        if self.scale_fit == "client":
            for i in range(split.num_clients):
                samples = np.concatenate([p[i] for p in parts])
                statistics = self._statistics(raw[split.train[i]], pooled)
                features[samples] = self._encode(raw[samples], statistics, seen, flagged, normalize)
        return replace(arrays, inputs=features)

    @property
    def _numeric(self) -> np.ndarray:
        return np.flatnonzero(np.array(self.categories, np.int64) == 0)

    @property
    def _categorical(self) -> np.ndarray:
        return np.flatnonzero(np.array(self.categories, np.int64))

    def _statistics(self, raw: np.ndarray, fallback: Statistics | None) -> Statistics:
        """Of raw columns [m, columns]; fallback: where a column has no value (None: 0)."""
        fill = np.zeros(raw.shape[1]) if fallback is None else fallback.fill.copy()
        for c, count in enumerate(self.categories):
            values = raw[~np.isnan(raw[:, c]), c]
            if count:
                values = values[values < count]  # an unlisted value fills nothing
            if len(values):
                fill[c] = np.bincount(values.astype(np.int64)).argmax() if count else values.mean()
        if self.fill == "zero":
            fill[self._numeric] = 0
        numbers = _filled(raw, fill)[:, self._numeric]  # [m, Q]
        if self.scale == "max_abs":
            most = np.abs(numbers).max(0)
            most = most if fallback is None else np.where(most < 10 * EPS, fallback.std, most)
            return Statistics(fill, np.zeros(len(most)), np.where(most < 10 * EPS, 1.0, most))
        return Statistics(fill, numbers.mean(0), deviation(numbers))

    def _encode(
        self, raw: np.ndarray, statistics: Statistics, seen: list[np.ndarray], flagged: np.ndarray, normalize: bool
    ) -> np.ndarray:
        """Features of raw columns [m, columns]; seen: of each categorical column, what training parts have; flagged:
        the columns with an indicator.  # [m, F] float32"""
        filled = _filled(raw, statistics.fill)
        numbers = filled[:, self._numeric]  # [m, Q]
        if normalize:
            numbers = (numbers - statistics.mean) / statistics.std
            numbers = numbers.clip(-1, 1) if self.scale == "max_abs" else numbers
        blocks = [numbers]
        for c, known in zip(self._categorical, seen):
            category = np.arange(self.categories[c])
            blocks.append((filled[:, c, None] == category) & np.isin(category, known))
        blocks.append(np.isnan(raw[:, flagged]))
        if self.constant:
            blocks.append(np.ones((len(raw), 1)))
        return np.concatenate([b.astype(np.float32) for b in blocks], axis=1)


def _filled(raw: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Raw columns [m, columns] with fill [columns] in place of NaN."""
    return np.where(np.isnan(raw), fill, raw)


def warn_of_row_numbers(values: np.ndarray, where: str, remedy: str) -> None:
    """Warn of a feature [n] of row numbers or distinct integers, which may be an index."""
    if len(values) <= FEW_ROWS or np.isnan(values).any() or (values != np.floor(values)).any():
        return
    steps = np.diff(np.sort(values))
    if steps.min() > 0:
        what = "numbers the rows" if steps.max() == 1 else "has another whole number in every row"
        log.warning("%s %s, as an index or a patient's number does, and is used as a feature: %s", where, what, remedy)
