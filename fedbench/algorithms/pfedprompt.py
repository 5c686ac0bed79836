"""pFedPrompt: PromptFL with a local attention over each client's training images.  A reconstruction.

Guo, Guo and Wang, WWW 2023.  Neither text nor code could be obtained.  It is known that all clients learn one prompt
(PromptFL), and that each client has a non-parametric attention over the features of its few images.  Here, with Kf
[n, D] the features of a client's training images, V [n, C] their one-hot labels, g the feature of a test image and T_c
the text features of class c:
    logit_c = s <g, T_c> + (s / 100) alpha sum_k exp(-beta (1 - <g, Kf_k>)) V_kc    (form of Tip-Adapter)
Kf and V are never uploaded, and the prompt is trained without them.
Reduces to: PromptFL (FedAvg) at alpha = 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedbench.algorithms._features import require_labels
from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Inputs, Optimizer, RowStore
from fedbench.core.options import NonNegative


class PFedPrompt(Algorithm):
    """pFedPrompt.  w: row with the shared prompt; each client attends to features [n, D] of its own n training images.

    Args:
        alpha: Weight of the attention over the client's images, >= 0.
        beta: How fast the weight of an image falls with its cosine distance, >= 0.

    State:
        w: Shared prompt, as a row, [P].
    """

    requires = ("prompt",)
    exclusive_columns = True

    def __init__(self, alpha: NonNegative = 1.0, beta: NonNegative = 5.5):
        self.alpha, self.beta = alpha, beta

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set w, the server model with the shared prompt, to the initial model.  # [P]"""
        self.w = model.init_row()  # [P]

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedAvg on the prompt, the only parameters that are trained."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def training_features(self, cohort: Cohort) -> dict[str, Any]:
        """Return the features, labels and numbers of each client's training samples, padded.

        A sample's number is its index in the data set.

        Returns:
            A dict of keys [K, n, D], the features; labels [K, n]; and number [K, n], -1 for padding.  n is the largest
            number of training samples of a client.
        """
        train, targets = cohort.federation.splits["train"], cohort.federation.targets
        numbers = [torch.from_numpy(train[i]) for i in cohort.ids]  # [n_i] each
        number = pad_sequence(numbers, batch_first=True, padding_value=-1).to(cohort.device)  # [K, n]
        keys = cohort.forward(self.w, image_features, split="train")  # [n_i, D] each
        labels = targets[number.clamp_min(0)]  # of padding: any label, which `predict` ignores
        return {"keys": pad_sequence(keys, batch_first=True), "labels": labels, "number": number}

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """Return what the cohort deploys: theta, the prompt as a row [P], and the clients' training features.

        `final`, whether the last round is over, changes nothing.
        """
        return {"theta": cohort.broadcast(w=self.w).w, **self.training_features(cohort)}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits of the prompts, plus the attention over each client's training images.

        Args:
            model: The model.
            rows: Output of `personalized` for k clients.
            inputs: Inputs of B samples of each client.  # [k, B, ...]

        Returns:
            Logits.  # [k, B, C]
        """
        clip: Any = model.module
        theta, real = rows["theta"], (rows["number"] >= 0)[:, None]  # [k, P], [k, 1, n]
        theta = theta[:1] if theta.stride(0) == 0 else theta  # one text pass if all rows are the same prompt
        T = clip.text(clip.context(model.named(theta)))  # [k, C, D]
        g = clip.image(inputs)  # [k, B, D]
        cosines = g @ rows["keys"].transpose(1, 2)  # [k, B, n]
        # attention by classes, without padding; beta: how fast it falls with the cosine distance  [k, B, C]
        bonus = torch.exp(-self.beta * (1 - cosines)) * real @ F.one_hot(rows["labels"], clip.num_classes).to(g)
        # / 100: as Tip-Adapter, whose alpha is not multiplied by the scale of the logits, CLIP's 100
        return clip.scale * (g @ T.transpose(1, 2) + self.alpha / 100 * bonus)

    def global_row(self) -> Tensor:
        """Return the server model w: the averaged prompt, and the frozen parameters.  # [P]"""
        return self.w


def image_features(model: FlatModel, w: Tensor, inputs: Inputs) -> Tensor:
    """Return the image features in `inputs`, a tensor [k, b, D] or a dict that has it as "image".

    `model` and `w` are not needed, because the image tower is frozen.
    """
    clip: Any = model.module
    return clip.image(inputs)
