"""Breast cancer Wisconsin (diagnostic), bundled with scikit-learn: 569 patients, 30 features, 2 classes.

Source: UCI Breast Cancer Wisconsin (Diagnostic), as in ``sklearn.datasets.load_breast_cancer``.
Licence: CC BY 4.0.
Layout: a file of scikit-learn's package; no network is needed.

There is no published split.  Each feature is standardized over all 569 patients.
"""

import numpy as np

from fedbench.data._bundled import bundled_csv
from fedbench.data.base import Arrays


class BreastCancer:
    """The breast cancer data: inputs [569, 30] float32, standardized; targets 0 (malignant) or 1 (benign)."""

    def load(self) -> Arrays:
        """Return 569 patients with 30 standardized features, read from a file in the package scikit-learn."""
        table = bundled_csv("breast_cancer.csv", (569, 31), skip=1)  # [n, 31], features then label
        raw = table[:, :-1]
        features = (raw - raw.mean(0)) / raw.std(0)  # [n, 30]
        return Arrays(
            inputs=features.astype(np.float32),
            targets=table[:, -1].astype(np.int64),
            split=np.zeros(len(features), np.int8),  # 0: no published split, so dataset.test_fraction applies
            num_classes=2,
            class_names=["malignant", "benign"],
        ).check()
