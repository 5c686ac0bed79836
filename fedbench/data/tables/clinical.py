"""Generated tables of two unbalanced classes, with the sizes of private clinical data sets.

They replace the data of pFedNet's Tables V to VII (`conf/dataset/synthetic_chd.yaml`, `synthetic_diabetes.yaml`,
`synthetic_covid.yaml`), with the same numbers of patients, features and positives.  Their scores do not predict scores
on the private data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedbench.core.options import AtLeast2, Count, Seed, require
from fedbench.data.base import Arrays
from fedbench.data.tables._table import Fill, Scale, ScaleFit, TableFit

INFORMATIVE = 12  # features that separate the classes; the others are noise
SEPARATION = 0.8  # half the side of the hypercube whose corners are the cluster centers
MISSING = 0.02  # fraction of cells without a value


@dataclass
class Clinical:
    """A generated table: inputs [n, features], targets [n] in {0, 1}.

    Args:
        n: Number of patients.
        features: Number of features, without the constant.
        positive: Number of patients of class 1.
        scale_fit, scale, fill, constant: How cells become features; see `TableFit` in `data/tables/_table.py`.
        seed: Seed of the generator.
    """

    n: Count = 716
    features: AtLeast2 = 58
    positive: Count = 51
    scale_fit: ScaleFit = "train"
    scale: Scale = "max_abs"
    fill: Fill = "zero"
    constant: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        require(
            self.positive < self.n, f"dataset.positive={self.positive} must be less than dataset.n={self.n}: lower it"
        )
        require(
            self.features >= INFORMATIVE,
            f"dataset.features={self.features} must be at least {INFORMATIVE}, the number of informative features: "
            "raise it",
        )

    def load(self) -> Arrays:
        """Return the generated table, with 2% of its cells NaN.

        The attribute ``fit`` of the result fills and scales it, once the samples are divided over clients.
        """
        from sklearn.datasets import make_classification  # slow to import

        negative = self.n - self.positive  # numbers of patients of class 0 and class 1
        per_class = max(self.positive, negative)  # both classes are generated in this size, and then cut
        x, y = make_classification(
            n_samples=2 * per_class,
            n_features=self.features,
            n_informative=INFORMATIVE,
            n_redundant=0,
            class_sep=SEPARATION,
            flip_y=0,
            random_state=self.seed,
        )  # [2 per_class, features], [2 per_class]
        selected = [np.flatnonzero(y == 0)[:negative], np.flatnonzero(y == 1)[: self.positive]]
        samples = np.sort(np.concatenate(selected))  # make_classification has shuffled them
        rng = np.random.default_rng(self.seed)
        return Arrays(
            inputs=np.where(rng.random((self.n, self.features)) < MISSING, np.nan, x[samples]),
            targets=y[samples].astype(np.int64),
            split=np.zeros(self.n, np.int8),  # 0, training: there is no published split
            num_classes=2,
            class_names=["negative", "positive"],
            fit=TableFit(
                categories=(0,) * self.features,  # all columns are numeric
                scale_fit=self.scale_fit,
                scale=self.scale,
                fill=self.fill,
                constant=self.constant,
            ),
        ).check()
