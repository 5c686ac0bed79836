"""Turn tables into inputs of a model: fill missing values, scale numbers, encode categories one-hot.

`TableFit` is the ``fit`` of the Arrays of a table.  It fits scikit-learn's ColumnTransformer once the samples are
divided over the clients.

Letters: n samples, F features.
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
Fill = Literal["mean", "zero"]
FEW_ROWS = 20  # up to this number of rows, a column of distinct integers is not suspected to be an index
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableFit:
    """Turn raw columns [n, columns] float64 (NaN: missing) into features [n, F] float32.

    Missing numbers become the mean, and missing categories the most frequent one (the first of equally frequent ones).
    In a column without values they become 0 and the first category.  Numeric columns are then scaled; one-hot columns
    and indicators are not.  A category that is absent from all training parts becomes zeros.  Features are in the order
    numbers, one-hot columns, indicators, constant.

    Args:
        categories: The number of categories of each column, 0 for a numeric one.  Cells contain the category's index; a
            larger value is not a listed category.
        indicator: Whether each column with missing values gets an indicator feature, 1 where the value is missing.
        scale_fit: The samples that fill values and scales are fitted on: the training parts of all clients (train), all
            samples (all), or each client's training part for its own samples (client).  For columns of which a client
            has no value, the statistics of train are used.
        scale: standard (mean 0, deviation 1) or max_abs (largest absolute value 1, clipped to [-1, 1]).
        fill: The value of missing numbers: mean or zero.
        constant: Whether to append a feature that is 1 everywhere.

    References:
        pFedNet's code uses max_abs, zero and the constant.
    """

    categories: tuple[int, ...]
    indicator: bool = False
    scale_fit: ScaleFit = "train"
    scale: Scale = "standard"
    fill: Fill = "mean"
    constant: bool = False

    def __call__(self, arrays: Arrays, split: Split, normalize: bool) -> Arrays:
        """Return the arrays with features [n, F] instead of raw columns.

        Args:
            arrays: The arrays of the raw columns.
            split: The samples of each client.
            normalize: Whether to scale numeric columns.

        Returns:
            The same arrays except for the inputs.
        """
        raw = np.asarray(arrays.inputs)  # [n, columns]
        parts = (split.train, split.val, split.test)
        indices = split.train.indices if self.scale_fit != "all" else np.concatenate([p.indices for p in parts])
        flagged = np.flatnonzero(np.isnan(raw).any(0)) if self.indicator else np.empty(0, np.int64)  # get an indicator
        pooled = self._transformer(normalize, flagged).fit(self._listed(raw[indices]))
        features = np.asarray(pooled.transform(raw))  # [n, F]
        if self.scale_fit == "client":
            for i in range(split.num_clients):
                samples = np.concatenate([p[i] for p in parts])
                features[samples] = self._of_client(raw, split.train[i], samples, pooled, normalize, flagged)
        in_training = [np.isin(np.arange(self.categories[c]), raw[split.train.indices, c]) for c in self._categorical]
        if in_training:
            mask = np.concatenate(in_training)  # whether the category of each one-hot column is in a training part
            first = len(self._numeric)
            features[:, first : first + len(mask)] *= mask
        if self.constant:
            features = np.column_stack([features, np.ones(len(raw))])
        return replace(arrays, inputs=features.astype(np.float32))

    @property
    def _numeric(self) -> np.ndarray:
        """The indices of the numeric columns, ascending, an int64 array: those whose number in ``categories`` is 0."""
        return np.flatnonzero(np.array(self.categories, np.int64) == 0)

    @property
    def _categorical(self) -> np.ndarray:
        """The indices of the categorical columns, ascending, an int64 array: those not 0 in ``categories``."""
        return np.flatnonzero(np.array(self.categories, np.int64))

    def _transformer(self, normalize: bool, flagged: np.ndarray) -> ColumnTransformer:
        """Return an unfitted transformer from raw columns to features, without the feature that is 1 everywhere.

        The features are the numeric columns, the one-hot categories, and the indicators of missing values.
        ``categories`` has the number of categories of each column, 0 for a numeric one.

        Args:
            normalize: Whether to scale numeric columns.
            flagged: Indices of the columns whose missing values get an indicator feature.
        """
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
        indices: Any = [np.arange(self.categories[c], dtype=np.float64) for c in self._categorical]
        categories = [
            ("fill", SimpleImputer(strategy="most_frequent", keep_empty_features=True)),
            ("code", OneHotEncoder(categories=indices, handle_unknown="ignore", sparse_output=False)),
        ]
        return ColumnTransformer(
            [
                ("numbers", Pipeline(numbers), self._numeric),
                ("categories", Pipeline(categories), self._categorical),
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
        """Return the features of one client's samples, fitted on its training part (``scale_fit="client"``).

        Args:
            raw: Raw columns of the data set, [n, columns].
            train: Indices of the client's training samples.
            samples: Indices of all samples of the client.
            pooled: The transformer fitted on the training parts of all clients, used for columns without local values.
            normalize: Whether to scale numeric columns.
            flagged: Indices of the columns whose missing values get an indicator feature.

        Returns:
            Features, [samples, F], without the feature that is 1 everywhere.
        """
        fills = np.empty(len(self.categories))  # the value that fills each column where it is missing, from all clients
        for name, columns in (("numbers", self._numeric), ("categories", self._categorical)):
            if len(columns):
                fills[columns] = pooled.named_transformers_[name]["fill"].statistics_
        # NaN also for categories that the option ``categories`` does not list
        listed = self._listed(raw[train])  # [client's training samples, columns]
        # Columns without values in this client's training part are fitted on the pooled fill value.
        local = self._transformer(normalize, flagged).fit(np.where(np.isnan(listed).all(0), fills, listed))
        if normalize and self.scale == "max_abs" and len(self._numeric):
            # scikit-learn does not scale columns whose largest value is about 0 (below 10 EPS): use the pooled scale.
            scaler, fallback = (t.named_transformers_["numbers"]["scale"] for t in (local, pooled))
            scaler.scale_ = np.where(scaler.max_abs_ < 10 * EPS, fallback.scale_, scaler.scale_)
        return np.asarray(local.transform(raw[samples]))

    def _listed(self, raw: np.ndarray) -> np.ndarray:
        """Return raw columns [n, columns] with NaN for categories that are not listed.

        A category is listed if its index is below the column's number of categories.  The others thus do not
        count as the most frequent category, which fills missing values.
        """
        limits = np.where(self.categories, self.categories, np.inf)  # numeric columns have no limit
        return np.where(raw < limits, raw, np.nan)


def warn_of_row_numbers(values: np.ndarray, where: str, remedy: str) -> None:
    """Warn of a feature that may be an index: row numbers, or a different integer in each row.

    With FEW_ROWS (20) or fewer rows, integers often differ by chance, so that there is no warning.

    Args:
        values: The feature [n].
        where: File and column, for the message.
        remedy: How to exclude the feature.
    """
    if len(values) <= FEW_ROWS or np.isnan(values).any() or (values != np.floor(values)).any():
        return
    steps = np.diff(np.sort(values))
    if steps.min() > 0:
        what = "numbers the rows" if steps.max() == 1 else "has a different integer in each row"
        log.warning("%s %s, like an index or a patient identifier, and is used as a feature: %s", where, what, remedy)
