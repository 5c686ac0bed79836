"""Diabetes (Efron et al., Least Angle Regression, 2004), bundled with scikit-learn: 442 patients, 10 features, and how
far the disease has got one year later, 25 to 346: a regression.

Source: ``sklearn.datasets.load_diabetes(scaled=False)``.
Licence: none is stated.
Layout: two files of scikit-learn's package; no network is needed.  There is no published split.
"""

import numpy as np

from fedbench.data._bundled import bundled_csv
from fedbench.data.base import Arrays
from fedbench.data.tables._table import ScaleFit, TableFit


class Diabetes442:
    """inputs [442, 10] (age, sex as 1 or 2, body mass index, blood pressure, six blood values); targets [442] float32.

    scale_fit: whose samples features are standardized by: train (training parts of all clients together), all, or
    client (each client's own training part).
    """

    def __init__(self, scale_fit: ScaleFit = "train"):
        self.scale_fit: ScaleFit = scale_fit

    def load(self) -> Arrays:
        """Read scikit-learn's two files."""
        raw = bundled_csv("diabetes_data_raw.csv.gz", (442, 10), delimiter=None)  # [n, 10]
        return Arrays(
            inputs=raw,
            targets=bundled_csv("diabetes_target.csv.gz", (442,)).astype(np.float32),
            split=np.zeros(len(raw), np.int8),
            num_classes=1,
            task="regression",
            fit=TableFit((0,) * raw.shape[1], scale_fit=self.scale_fit),
        ).check()
