"""Zero-shot CLIP: class names in a sentence; nothing is trained and nothing is sent.

Radford et al., ICML 2021.  logits = s <g(x), text("a photo of a {class}.")>.  personal/* and global/* are the same and
depend on the partition only by which client has which test samples.
"""

from typing import Any

from fedbench.algorithms.base import Algorithm


class ZeroShot(Algorithm):
    """template: the sentence, {} being the name; null: "a photo of a {}."; dataset: the data set's own.

    State: w [P], the model's initial row, which takes no part; text [C, D].
    """

    requires = ("prompt",)
    personal_is_global = True

    def __init__(self, template: str | None = None):
        self.template = template

    def setup(self, federation, model, rows):
        clip: Any = model.module
        template = clip.template if self.template == "dataset" else self.template or "a photo of a {}."
        self.w, self.text = model.init_row(), clip.templated(template)

    def round(self, cohort):
        pass

    def personalized(self, cohort, final):
        return self.w

    def predict(self, model, rows, inputs):
        clip: Any = model.module
        return clip.scale * clip.image(inputs) @ self.text.T

    def global_row(self):
        return self.w
