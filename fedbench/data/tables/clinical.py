"""Generated tables of two unequal classes, of the sizes of clinical sets that are private.

They stand in for the sets of pFedNet's Tables V to VII (conf/dataset/synthetic_chd.yaml and its like): same numbers of
patients, features and, as the tables' sample counts imply, positives.  Scores on them say nothing of scores on those.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbench.core.options import AtLeast2, Count, Seed, require
from fedbench.data.base import Arrays
from fedbench.data.tables._table import Scale, ScaleFit, TableFit

INFORMATIVE = 12  # features that tell the classes apart, in two clusters a class; the others are noise
SEPARATION = 0.8  # half the side of the cube at whose corners the clusters are
MISSING = 0.02  # share of cells without a value


class Clinical:
    """inputs [n, features], one with the constant more; targets 0 or 1, of which there are exactly `positive`.

    scale_fit, scale, fill, constant: see data/tables/_table.py.  seed: of the generator.
    """

    def __init__(
        self,
        n: Count = 716,
        features: AtLeast2 = 58,
        positive: Count = 51,
        scale_fit: ScaleFit = "train",
        scale: Scale = "max_abs",
        fill: Literal["mean", "zero"] = "zero",
        constant: bool = False,
        seed: Seed = 0,
    ):
        require(positive < n, f"dataset.positive={positive} must be less than dataset.n={n}")
        require(features >= INFORMATIVE, f"dataset.features={features} must be at least {INFORMATIVE}")
        self.n, self.features, self.positive, self.seed = n, features, positive, seed
        self.fit = TableFit((0,) * features, False, scale_fit, scale, fill, constant)

    def load(self) -> Arrays:
        """Generate the table."""
        from sklearn.datasets import make_classification  # slow to import

        each = max(self.positive, self.n - self.positive)
        x, y = make_classification(
            n_samples=2 * each,
            n_features=self.features,
            n_informative=INFORMATIVE,
            n_redundant=0,
            class_sep=SEPARATION,
            flip_y=0,
            random_state=self.seed,
        )  # [2 each, features], [2 each]
        kept = np.concatenate(
            [np.flatnonzero(y == 0)[: self.n - self.positive], np.flatnonzero(y == 1)[: self.positive]]
        )
        kept.sort()  # as generated: shuffled
        rng = np.random.default_rng(self.seed)
        x = np.where(rng.random((self.n, self.features)) < MISSING, np.nan, x[kept])
        return Arrays(
            inputs=x,
            targets=y[kept].astype(np.int64),
            split=np.zeros(self.n, np.int8),
            num_classes=2,
            class_names=["negative", "positive"],
            fit=self.fit,
        ).check()
