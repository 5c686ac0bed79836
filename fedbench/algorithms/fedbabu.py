"""FedBABU: only the base is trained and averaged; clients fine-tune after the last round.

Oh et al., ICLR 2022, Algorithm 1.  The head h keeps its random initialization during training.  Before the last round
ends a client deploys [u, h]; afterwards it deploys this model fine-tuned on its training samples.
Departs from the paper: nowhere.
finetune_head="zero" reproduces the released code of the PFL benchmarks.  Its server erases the head when it sums the
models, so clients fine-tune from a head of zeros.
Limits: the rounds' communication cost does not include the final download of the whole model.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.core.options import NonNegativeInt, Positive


class FedBABU(Algorithm):
    """FedBABU.  u: base, which is trained; h: head, which keeps its initial values until fine-tuning.

    Args:
        finetune_epochs: Epochs of the final fine-tuning; 0 disables it.
        finetune_lr: Learning rate of fine-tuning; None uses optimizer.lr.
        finetune_part: Columns to fine-tune: "all", "head" or "base".
        finetune_head: Head from which fine-tuning starts: "frozen", the initial one, or "zero".

    State:
        w: Server model [u, h], [P]; its head never changes.
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        finetune_epochs: NonNegativeInt = 1,
        finetune_lr: Positive | None = 0.001,
        finetune_part: Literal["all", "head", "base"] = "all",
        finetune_head: Literal["frozen", "zero"] = "frozen",
    ):
        self.epochs, self.lr, self.part = finetune_epochs, finetune_lr, finetune_part
        self.zero_head = finetune_head == "zero"
        self.fine_tunes_after_training = finetune_epochs > 0

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w = [u, h] of base u and head h to the initial model.  # [P]

        Clients have no state, so `rows` is unused.
        """
        self.w = model.init_row()  # [P]
        self.head, self.base = model.columns["head"], model.without("head")

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedBABU (Algorithm 1): clients train the base u alone, and the server averages it."""
        u = cohort.broadcast(u=self.base.take(self.w)).u  # [|u|]
        out = cohort.train(self.base.put(self.w, u), columns=self.base)
        up = cohort.upload(u=self.base.take(out.theta), relative_to={"u": "u"})  # [K, |u|]; the change of u is sent
        self.w = self.base.put(self.w, cohort.mean(up.u, updates="u"))  # or the option server's step to it

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return what the cohort deploys: the server model [P], or at the end each client's fine-tuned copy.

        # [P] or [K, P]
        """
        w = self.base.put(self.w, cohort.broadcast(u=self.base.take(self.w)).u)
        if not final:
            return w
        start = self.head.put(w, torch.zeros_like(self.head.take(w))) if self.zero_head else w  # or the initial head
        columns = {"all": None, "head": self.head, "base": self.base}[self.part]  # None trains all columns
        return cohort.train(
            start,
            columns=columns,
            # key: of the random batches; fresh: without optimizer state from the training
            how=LocalTraining(
                epochs=self.epochs, lr=self.lr, key="finetune", optimizer=cohort.engine.optimizer.fresh()
            ),
        ).theta

    def global_row(self) -> Tensor:
        """Return the server model [u, h] of the averaged base and the initial head.  # [P]"""
        return self.w
