"""pFedPrompt: PromptFL, and beside it every client looks up its own training images.  A reconstruction.

Guo, Guo and Wang, WWW 2023, of which neither text nor code could be had.  Known is that all learn one prompt (PromptFL)
and each has a non-parametric attention over the features of its few images.  Here, with Kf [n, D] the features of a
client's training images, V [n, C] their labels, one-hot, g that of a test image, T_c the text features of class c:
    logit_c = s <g, T_c> + (s / 100) alpha sum_k exp(-beta (1 - <g, Kf_k>)) V_kc    (form of Tip-Adapter)
The memory never leaves its client, and the prompt is trained without it.
Reduces to: PromptFL (FedAvg) at alpha = 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Inputs, Optimizer, RowStore
from fedbench.core.options import NonNegative, require


class PFedPrompt(Algorithm):
    """alpha, beta: above.  State: w [P]."""

    requires, alone = ("prompt",), True

    def __init__(self, alpha: NonNegative = 1.0, beta: NonNegative = 5.5):
        self.alpha, self.beta = alpha, beta

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Labels to remember."""
        super().check(federation, model, optimizer)
        require(
            federation.task.single_label,
            f"algorithm=pfedprompt remembers labels: it needs one class a sample, not task={federation.task.kind}",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One prompt for all."""
        self.w = model.init_row()  # [P]

    def round(self, cohort: Cohort) -> None:
        """FedAvg on the prompt."""
        w = cohort.broadcast(w=self.w).w
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # [K, P]
        self.w = cohort.mean(up.theta)

    def memory(self, cohort: Cohort) -> dict[str, Any]:
        """Return every client's training samples: features, labels and numbers, -1 for padding.

        # [K, n, D], [K, n], [K, n]
        """
        part, targets = cohort.federation.splits["train"], cohort.federation.targets
        number = pad_sequence([torch.from_numpy(part[i]) for i in cohort.ids], True, -1).to(cohort.device)
        keys = cohort.forward(self.w, image_features, "train")  # K x [n_i, D]
        return {"keys": pad_sequence(keys, True), "labels": targets[number.clamp_min(0)], "number": number}

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """The prompt, and what the client remembers."""
        return {"theta": cohort.broadcast(w=self.w).w, **self.memory(cohort)}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits of rows, theta [k, P] and the memory.  # [k, B, C]"""
        clip: Any = model.module
        theta, real = rows["theta"], (rows["number"] >= 0)[:, None]  # [k, P], [k, 1, n]
        theta = theta[:1] if theta.stride(0) == 0 else theta  # all deploy one prompt
        T = clip.text(clip.context(model.named(theta)))  # [k, C, D]
        g = clip.image(inputs)  # [k, B, D]
        near = g @ rows["keys"].transpose(1, 2)  # [k, B, n] cosines
        bonus = torch.exp(-self.beta * (1 - near)) * real @ F.one_hot(rows["labels"], clip.num_classes).to(g)
        return clip.scale * (g @ T.transpose(1, 2) + self.alpha / 100 * bonus)

    def global_row(self) -> Tensor:
        """w."""
        return self.w


def image_features(model: FlatModel, w: Tensor, inputs: Inputs) -> Tensor:
    """Of the frozen image tower, whatever the prompt w is.  # [k, b, D]"""
    clip: Any = model.module
    return clip.image(inputs)
