"""Zero-shot CLIP: classification by the text features of class names, without training or communication.

Radford et al., ICML 2021.  logits = s <g(x), text("a photo of a {class}.")>.  personal/* and global/* are equal.  The
partition affects them only through the clients' test samples.
"""

from typing import Any

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Inputs, RowStore


class ZeroShot(Algorithm):
    """Zero-shot CLIP.

    Args:
        template: Sentence with {} for the class name; "dataset" is that of the data set, None is "a photo of a {}.".

    State:
        w: The model's initial row, which does not affect the logits, [P].
        text: Text features of the classes, [C, D].
    """

    requires = ("prompt",)
    exclusive_columns = True

    def __init__(self, template: str | None = None):
        self.template = template

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Compute the text features of all classes from the option template, a sentence with {} for the class name.

        "dataset" is the sentence of the data set, and None is "a photo of a {}.".
        """
        clip: Any = model.module  # a CLIP model
        template = clip.template if self.template == "dataset" else self.template or "a photo of a {}."
        self.w, self.text = model.init_row(), clip.templated(template)

    def round(self, cohort: Cohort) -> None:
        """Do nothing, because nothing is trained."""

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return a row for all clients, which does not affect the logits.  # [P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.w

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return CLIP's logits for images: the scaled cosines of their features and the class texts' features.

        Args:
            model: A CLIP model.
            rows: Unused, because nothing is trained.
            inputs: Features of b images of each client, or a dict with them as "image".  # [k, b, D]

        Returns:
            Logits.  # [k, b, C]
        """
        clip: Any = model.module  # a CLIP model
        return clip.scale * clip.image(inputs) @ self.text.T

    def global_row(self) -> Tensor:
        """Return the model's initial parameter vector.  It does not affect the logits.  # [P]"""
        return self.w
