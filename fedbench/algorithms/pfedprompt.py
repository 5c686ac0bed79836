"""pFedPrompt: PromptFL, and beside it every client looks up its own training images.  A reconstruction.

Guo, Guo and Wang, WWW 2023, of which neither text nor code could be had.  Known is that all learn one prompt (PromptFL)
and each has a non-parametric attention over the features of its few images.  Here, with Kf [n, D] the features of a
client's training images, V [n, C] their labels, one-hot, g that of a test image, T_c the text features of class c:
mode=logits   logit_c = s <g, T_c> + (s / 100) alpha sum_k exp(-beta (1 - <g, Kf_k>)) V_kc    (form of Tip-Adapter)
mode=attend   logit_c = s <g', T_c>,   g' = normalize(g + alpha sum_k softmax_k(s <g, Kf_k>) Kf_k)
The memory never leaves its client.  The prompt is trained without it (in_training: with it, less the sample itself).
Reduces to: PromptFL (FedAvg) at alpha = 0.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, Inputs, Optimizer, RowStore, Step
from fedbench.core.options import NonNegative, require


class PFedPrompt(Algorithm):
    """alpha, beta, mode, in_training: above.  State: w [P]."""

    requires, alone = ("prompt",), True

    def __init__(
        self,
        alpha: NonNegative = 1.0,
        beta: NonNegative = 5.5,
        mode: Literal["logits", "attend"] = "logits",
        in_training: bool = False,
    ):
        self.alpha, self.beta, self.mode, self.in_training = alpha, beta, mode, in_training

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
        out = cohort.train(w, loss=self.loss, **self.memory(cohort)) if self.in_training else cohort.train(w)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]
        self.w = cohort.mean(up.theta)

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the logits, with in_training: the sample itself is left out of the memory.  # [k, B]"""
        itself = s.state.number[:, None] == batch.index[:, :, None]  # [k, B, n]
        others = (s.state.number >= 0)[:, None] & ~itself
        return s.task_loss(self.logits(s.model, rows, batch.x, s.state.keys, s.state.labels, others), batch)

    def memory(self, cohort: Cohort) -> dict[str, Any]:
        """What every client keeps of its own training samples: features, labels, and the samples' numbers, -1 for
        padding.  # [K, n, D], [K, n], [K, n]"""
        part, targets = cohort.federation.splits["train"], cohort.federation.targets
        number = pad_sequence([torch.from_numpy(part[i]) for i in cohort.ids], True, -1).to(cohort.device)
        keys = cohort.forward(self.w, image_features, "train")  # K x [n_i, D]
        return {"keys": pad_sequence(keys, True), "labels": targets[number.clamp_min(0)], "number": number}

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """The prompt, and what the client remembers."""
        return {"theta": cohort.broadcast(w=self.w).w, **self.memory(cohort)}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """rows: theta [k, P] and the memory."""
        real = (rows["number"] >= 0)[:, None]  # [k, 1, n]
        return self.logits(model, rows["theta"], inputs, rows["keys"], rows["labels"], real)

    def logits(
        self, model: FlatModel, theta: Tensor, inputs: Inputs, keys: Tensor, labels: Tensor, real: Tensor
    ) -> Tensor:
        """Logits with the keys that are `real` for each sample, [k, 1 or B, n].  # [k, B, C]"""
        clip: Any = model.module
        theta = theta[:1] if theta.stride(0) == 0 else theta  # all deploy one prompt
        T = clip.text(clip.context(model.named(theta)))  # [k, C, D]
        g = clip.image(inputs)  # [k, B, D]
        near = g @ keys.transpose(1, 2)  # [k, B, n] cosines
        if self.mode == "attend":
            weight = (clip.scale * near).masked_fill(~real, float("-inf")).softmax(2).nan_to_num(0)  # no key: 0
            return clip.scale * F.normalize(g + self.alpha * weight @ keys, dim=2) @ T.transpose(1, 2)
        bonus = torch.exp(-self.beta * (1 - near)) * real @ F.one_hot(labels, clip.num_classes).to(g)
        return clip.scale * (g @ T.transpose(1, 2) + self.alpha / 100 * bonus)

    def global_row(self) -> Tensor:
        """w."""
        return self.w


def image_features(model: FlatModel, w: Tensor, inputs: Inputs) -> Tensor:
    """Of the frozen image tower, whatever the prompt w is.  # [k, b, D]"""
    clip: Any = model.module
    return clip.image(inputs)
