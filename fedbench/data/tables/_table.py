"""Tables as inputs of a model: missing values filled, numbers standardized, categories one-hot.

scikit-learn's ColumnTransformer does it.  It is fitted when the samples are divided over clients: `TableFit` is the
``fit`` of such Arrays.

Letters: n samples, Q numeric columns, F features that a model sees.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbench.core.constant import EPS
from fedbench.data.base import Arrays

if TYPE_CHECKING:
    from sklearn.compose import ColumnTransformer

    from fedbench.core.split import Split

ScaleFit = Literal["train", "all", "client"]
Scale = Literal["standard", "max_abs"]
FEW_ROWS = 20  # a column of distinct integers is suspicious from this many rows on
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableFit:
    """Turn raw columns [n, columns] float64 (NaN: missing) into features [n, F] float32.

    Missing numbers become the mean, and missing categories the most frequent one, the first of several.  Of a column
    without any value they become 0 and the first category.  Numeric columns are then scaled; one-hot columns and
    indicators are not.  A category that is in no client's training part is all zeros.  Features are in the order
    numbers, one-hot columns, indicators, constant.

    Args:
        categories: Number of categories of each column, 0 for a numeric one.  Cells hold the number of the category; a
            larger number is a value that is not listed.
        indicator: Whether each column with missing values gets another one, 1 where the value is missing.
        scale_fit: Samples that fillings and scales are fitted on: the training parts of all clients (train), all
            samples (all), or each client's training part for its samples (client).  A client takes the statistics of
            train for columns of which it has no value.
        scale: standard (mean 0, deviation 1) or max_abs (largest absolute value 1, clipped to [-1, 1]).
        fill: mean, or zero, for missing numbers.
        constant: Whether a last feature is 1 everywhere.

    References:
        max_abs, zero and the constant are those of pFedNet's code.
    """

    categories: tuple[int, ...]
    indicator: bool = False
    scale_fit: ScaleFit = "train"
    scale: Scale = "standard"
    fill: Literal["mean", "zero"] = "mean"
    constant: bool = False

    def __call__(self, arrays: Arrays, split: Split, normalize: bool) -> Arrays:
        """Return the arrays with features in place of raw columns; normalize: whether numeric columns are scaled."""
        raw = np.asarray(arrays.inputs)  # [n, columns]
        parts = (split.train, split.val, split.test)
        indices = split.train.indices if self.scale_fit != "all" else np.concatenate([p.indices for p in parts])
        flagged = np.flatnonzero(np.isnan(raw).any(0)) if self.indicator else np.empty(0, np.int64)
        pooled = self._transformer(normalize, flagged).fit(self._listed(raw[indices]))
        features = np.asarray(pooled.transform(raw))  # [n, F]
        if self.scale_fit == "client":
            for i in range(split.num_clients):
                samples = np.concatenate([p[i] for p in parts])
                features[samples] = self._of_client(raw, split.train[i], samples, pooled, normalize, flagged)
        seen = [np.isin(np.arange(self.categories[c]), raw[split.train.indices, c]) for c in self._categorical]
        if seen:
            first = len(self._numeric)
            features[:, first : first + sum(map(len, seen))] *= np.concatenate(seen)
        if self.constant:
            features = np.column_stack([features, np.ones(len(raw))])
        return replace(arrays, inputs=features.astype(np.float32))

    @property
    def _numeric(self) -> np.ndarray:
        return np.flatnonzero(np.array(self.categories, np.int64) == 0)

    @property
    def _categorical(self) -> np.ndarray:
        return np.flatnonzero(np.array(self.categories, np.int64))

    def _transformer(self, normalize: bool, flagged: np.ndarray) -> ColumnTransformer:
        """Return the unfitted transformer of raw columns; flagged: those with an indicator."""
        from sklearn.compose import ColumnTransformer  # slow to import
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, OneHotEncoder, StandardScaler

        strategy = "mean" if self.fill == "mean" else "constant"
        fill = SimpleImputer(strategy=strategy, fill_value=0, keep_empty_features=True)
        numbers: list[tuple[str, Any]] = [("fill", fill)]
        if normalize and self.scale == "standard":
            numbers.append(("scale", StandardScaler()))
        elif normalize:
            numbers.append(("scale", MaxAbsScaler()))
            numbers.append(("clip", FunctionTransformer(np.clip, kw_args={"a_min": -1, "a_max": 1})))
        listed: Any = [np.arange(self.categories[c], dtype=np.float64) for c in self._categorical]
        words = [
            ("fill", SimpleImputer(strategy="most_frequent", keep_empty_features=True)),
            ("code", OneHotEncoder(categories=listed, handle_unknown="ignore", sparse_output=False)),
        ]
        return ColumnTransformer(
            [
                ("numbers", Pipeline(numbers), self._numeric),
                ("words", Pipeline(words), self._categorical),
                ("flags", MissingIndicator(features="all"), flagged),
            ]
        )

    def _of_client(
        self,
        raw: np.ndarray,
        train: np.ndarray,
        samples: np.ndarray,
        pooled: ColumnTransformer,
        normalize: bool,
        flagged: np.ndarray,
    ) -> np.ndarray:
        """Return the features of a client's samples, fitted on its training part.  # [samples, F]"""
        fills = np.empty(len(self.categories))
        for name, columns in (("numbers", self._numeric), ("words", self._categorical)):
            if len(columns):
                fills[columns] = pooled.named_transformers_[name]["fill"].statistics_
        empty = np.isnan(self._listed(raw[train])).all(0)
        own = self._transformer(normalize, flagged).fit(np.where(empty, fills, self._listed(raw[train])))
        if normalize and self.scale == "max_abs" and len(self._numeric):
            scaler, fallback = (t.named_transformers_["numbers"]["scale"] for t in (own, pooled))
            scaler.scale_ = np.where(scaler.max_abs_ < 10 * EPS, fallback.scale_, scaler.scale_)
        return np.asarray(own.transform(raw[samples]))

    def _listed(self, raw: np.ndarray) -> np.ndarray:
        """Return raw columns with NaN for values that are not listed, which fill nothing."""
        return np.where(raw < np.where(self.categories, self.categories, np.inf), raw, np.nan)


def warn_of_row_numbers(values: np.ndarray, where: str, remedy: str) -> None:
    """Warn of a feature [n] of row numbers or distinct integers, which may be an index."""
    if len(values) <= FEW_ROWS or np.isnan(values).any() or (values != np.floor(values)).any():
        return
    steps = np.diff(np.sort(values))
    if steps.min() > 0:
        what = "numbers the rows" if steps.max() == 1 else "has another whole number in every row"
        log.warning("%s %s, as an index or a patient's number does, and is used as a feature: %s", where, what, remedy)
