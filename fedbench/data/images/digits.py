"""The 8x8 handwritten digits bundled with scikit-learn: 1,797 images, 10 classes, no published split.

Source: UCI Optical Recognition of Handwritten Digits (test part), as in ``sklearn.datasets.load_digits``.
Licence: CC BY 4.0.
Layout: a file of scikit-learn's package; no network is needed.
"""

import numpy as np

from fedbench.data._bundled import bundled_csv
from fedbench.data.base import Arrays


class Digits:
    """The digits: inputs [1797, 1, 8, 8] float32 in [0, 1] (pixels / 16), targets [1797] in 0..9."""

    def load(self) -> Arrays:
        """Return the 1,797 images with labels 0 to 9, read from a file in the package scikit-learn."""
        table = bundled_csv("digits.csv.gz", (1797, 65))  # [n, 65], pixels then label
        images = (table[:, :-1] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
        return Arrays(
            inputs=images,
            targets=table[:, -1].astype(np.int64),
            split=np.zeros(len(images), np.int8),  # 0, training: there is no published split
            num_classes=10,
            class_names=[str(c) for c in range(10)],
        ).check()
