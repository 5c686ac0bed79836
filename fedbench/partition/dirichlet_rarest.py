"""Dirichlet label skew where a sample has several labels: it is dealt out by the rarest of them.

FedPIA's Tasks 3 and 4 divide such samples by Dir(0.5) and do not say how; this way is ours.  By the first label of a
sample, which partition=dirichlet takes, rare ones that stand late in the list would be no class of their own.
"""

import numpy as np

from fedbench.data.base import TEST, Arrays
from fedbench.partition.dirichlet import Dirichlet


class DirichletRarest(Dirichlet):
    """Options of Dirichlet.  Samples with one label are divided by that."""

    max_tries = 1000

    def labels(self, arrays: Arrays) -> np.ndarray:
        """Of each sample's labels the one that fewest training samples have (of several the first in the list), C for a
        sample without any.  # [n] int64"""
        if arrays.task != "multilabel":
            return arrays.labels()
        positive = arrays.targets > 0  # [n, C]
        common = positive[arrays.split != TEST].sum(0)  # [C]
        rarest = np.where(positive, common, len(positive) + 1).argmin(1)
        return np.where(positive.any(1), rarest, arrays.num_classes).astype(np.int64)
