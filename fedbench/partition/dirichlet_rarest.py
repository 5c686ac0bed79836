"""Dirichlet label skew of multi-label data, by the rarest label of each sample.

FedPIA's Tasks 3 and 4 divide multi-label samples by Dir(0.5) without further details; this rule is ours.
partition=dirichlet uses the first label of a sample.  Rare labels late in the list would then hardly be a class.
"""

import numpy as np

from fedbench.data.base import TEST, Arrays
from fedbench.partition.dirichlet import Dirichlet


class DirichletRarest(Dirichlet):
    """Dirichlet label skew by the rarest label; options as in Dirichlet.  Data with one label are divided by it."""

    max_tries = 1000

    def labels(self, arrays: Arrays) -> np.ndarray:
        """Return the rarest label of each sample: of its labels, the one that the fewest training samples have.

        Args:
            arrays: The data set, with multi-hot targets [n, C] if it is multi-label.

        Returns:
            Labels, [n] int64: the first of equally rare ones, and C for a sample without labels.  Data that are not
            multi-label keep their labels.
        """
        if arrays.task != "multilabel":
            return arrays.labels()
        positive = arrays.targets > 0  # [n, C]
        frequency = positive[arrays.split != TEST].sum(0)  # [C], samples with each label
        rarest = np.where(positive, frequency, len(positive) + 1).argmin(1)  # n + 1: never the minimum
        return np.where(positive.any(1), rarest, arrays.num_classes).astype(np.int64)
