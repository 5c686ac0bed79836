"""Zero-shot CLIP: class names in a sentence; nothing is trained and nothing is sent.

Radford et al., ICML 2021.  logits = s <g(x), text("a photo of a {class}.")>.  personal/* and global/* are the same and
depend on the partition only by which client has which test samples.
"""

from typing import Any

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Inputs, RowStore


class ZeroShot(Algorithm):
    """template: the sentence, {} being the name; null: "a photo of a {}."; dataset: the data set's own.

    State: w [P], the model's initial row, which takes no part; text [C, D].
    """

    requires, alone = ("prompt",), True

    def __init__(self, template: str | None = None):
        self.template = template

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Text features of all classes, once."""
        clip: Any = model.module
        template = clip.template if self.template == "dataset" else self.template or "a photo of a {}."
        self.w, self.text = model.init_row(), clip.templated(template)

    def round(self, cohort: Cohort) -> None:
        """Nothing."""
        pass

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w, which takes no part."""
        return self.w

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """logits = s <g(x), text>.  # [k, b, C]"""
        clip: Any = model.module
        return clip.scale * clip.image(inputs) @ self.text.T

    def global_row(self) -> Tensor:
        """w, which takes no part."""
        return self.w
