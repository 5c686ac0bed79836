"""Diabetes (Efron et al., Least Angle Regression, 2004): a regression on 442 patients with 10 features.

The target is the progression of the disease after one year, from 25 to 346.

Source: ``sklearn.datasets.load_diabetes(scaled=False)``.
Licence: none is stated.
Layout: two files of scikit-learn's package; no network is needed.  There is no published split.
"""

from dataclasses import dataclass

import numpy as np

from fedbench.data._bundled import bundled_csv
from fedbench.data.base import Arrays
from fedbench.data.tables._table import ScaleFit, TableFit


@dataclass
class Diabetes442:
    """The diabetes data: targets [442] float32, inputs [442, 10].

    Features are age, sex (1 or 2), body mass index, blood pressure and six blood values.

    Args:
        scale_fit: The samples whose statistics standardize the features: train (training parts of all clients), all, or
            client (each client's own training part).
    """

    scale_fit: ScaleFit = "train"

    def load(self) -> Arrays:
        """Return 442 patients from files in the package scikit-learn, not standardized.

        The attribute ``fit`` of the result standardizes them, once the samples are divided over clients.
        """
        raw = bundled_csv("diabetes_data_raw.csv.gz", (442, 10), delimiter=None)  # [n, 10]
        return Arrays(
            inputs=raw,
            targets=bundled_csv("diabetes_target.csv.gz", (442,)).astype(np.float32),
            split=np.zeros(len(raw), np.int8),  # 0, training: there is no published split
            num_classes=1,
            task="regression",
            fit=TableFit(categories=(0,) * raw.shape[1], scale_fit=self.scale_fit),  # all columns are numeric
        ).check()
