"""FedRoD: a shared base with a generic head trained by a class-balanced loss, and a personal head added to it.

Chen and Chao, ICLR 2022, Algorithm 1, with linear personal heads (without its hypernetwork).  With z = u(x) and
pi_i[c] client i's share of class c:  balanced softmax  CE(h(z) + log pi_i, y)  trains u and h;
CE(sg h(z) + g_i(sg z), y)  trains g_i.  No parameter has a gradient from both losses, so one step on their sum equals
the algorithm's two steps.  Deployed: h(z) + g_i(z).
In segmentation every pixel is a sample with features z, and pi_i are shares of pixels.
Departs from the paper: aggregation is weighted by samples.  A class absent from a client leaves the first softmax
(log 0).  Shares are counted over all labels, so no loss is infinite.  train/loss is the sum of both losses.
Reduces to: FedAvg for u and h if all classes are equally frequent.
"""

from typing import Any

import torch
from torch import Tensor

from fedbench.algorithms._distillation import require_classes
from fedbench.algorithms._heads import require_linear_head
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    Inputs,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)


class FedRoD(Algorithm):
    """FedRoD.  u: shared base; h: shared head; w: server's row with u and h; g_i: personal head of client i.

    State:
        w: Shared base u and generic head h, [P]; its columns "head2" are the initial personal head.
        g: Personal heads, [N, |head|].
    """

    requires = ("head",)
    has_base = True

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless targets are classes of samples or pixels, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_classes(federation, self._name)
        require_linear_head(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add a second head to the model, which is personal; set the server model w [P] and the heads g_i [N, |head|].

        w is the initial model.  g_i, stored by `rows`, are copies of its first head.
        """
        model.extend(head2="copy:head")  # new columns "head2" in every row, at first a copy of the head
        self.w = model.init_row()  # [P]
        self.personal = model.columns["head2"]  # columns of the personal head
        self.shared = self.personal.rest(model.size)  # all other columns
        self.g = rows("g", default=self.personal.take(self.w))  # [N, |head|]; a row equals the default until it is set
        self.counts = federation.label_counts  # [N, C] on the host

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedRoD: clients train base and both heads; the server averages base and generic head."""
        w = cohort.broadcast(w=self.shared.take(self.w)).w  # [u, h]
        counts = torch.from_numpy(self.counts[cohort.ids]).to(self.w)  # training samples of each class  [K, C]
        log_pi = (counts / counts.sum(1, keepdim=True)).log()  # [K, C], -inf for absent ones
        start = self.personal.put(self.shared.put(self.w, w), self.g[cohort.ids])  # [u, h, g_i]  [K, P]
        # uploaded: the columns that leave the client, whose gradients privacy clips
        out = cohort.train(start, loss=self.loss, how=LocalTraining(uploaded=self.shared), log_pi=log_pi)
        self.g[cohort.ids] = self.personal.take(out.theta)
        up = cohort.upload(w=self.shared.take(out.theta), relative_to={"w": "w"})  # the change of w is sent
        self.w = self.shared.put(self.w, cohort.mean(up.w, updates="w"))  # or the option server's step to it

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Return the balanced softmax loss of h(z) plus the cross-entropy of h(z) + g_i(z), which trains g_i only.

        z are the features of u.  The balanced softmax adds log pi_c to each logit, where pi_c is the share of class c
        among the client's training samples.  # [k, B]
        """
        z = s.features(rows, batch)  # [k, B, F]
        generic = s.model.head(rows, z)  # [k, B, C, ...]
        personal = generic.detach() + s.model.head(rows, z.detach(), name="head2")  # "head2": the parameters of g_i
        # equal for all samples and pixels
        log_pi = s.state.log_pi.view(len(generic), 1, -1, *[1] * (generic.dim() - 3))  # [k, 1, C, ...]
        return s.task_loss(generic + log_pi, batch) + s.task_loss(personal, batch)  # [k, B]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: shared base u and head h with personal heads g_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        w = cohort.broadcast(w=self.shared.take(self.w)).w
        return self.personal.put(self.shared.put(self.w, w), self.g[cohort.ids])

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the logits of both heads, the generic h and the personal g_i.

        Args:
            model: The model.
            rows: The models of k clients.  # [k, P]
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            Logits h(z) + g_i(z) for the features z.  # [k, b, C, ...]
        """
        z = model.features(rows, inputs)
        return model.head(rows, z) + model.head(rows, z, name="head2")  # "head2": the parameters of g_i

    def global_row(self) -> Tensor:
        """Return the server model: averaged base and generic head h, and the initial values of the personal head.

        # [P]
        """
        return self.w
