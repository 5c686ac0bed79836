"""FedBABU: the head stays at its random initialization while the base is averaged; clients fine-tune at the end.

Oh et al., ICLR 2022, Algorithm 1.  Until the last round a client deploys [u, h]; after it, that row fine-tuned on its
own samples (the download of a whole model that this takes is not in the rounds' bytes).
Departs from the paper: nowhere.  finetune_head="zero" repeats the released code of the PFL benchmarks, where the
server's sum begins by erasing the head too: clients then fine-tune from a head of zeros.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.core.options import Natural, Positive


class FedBABU(Algorithm):
    """finetune_*: epochs, learning rate (null: optimizer.lr), columns, and the head from which the clients start.

    State: w [P], whose head never changes.
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        finetune_epochs: Natural = 1,
        finetune_lr: Positive | None = 0.001,
        finetune_part: Literal["all", "head", "base"] = "all",
        finetune_head: Literal["frozen", "zero"] = "frozen",
    ):
        self.epochs, self.lr, self.part = finetune_epochs, finetune_lr, finetune_part
        self.zero_head = finetune_head == "zero"
        self.tuned_at_end = finetune_epochs > 0

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all, whose head stays as it is."""
        self.w = model.init_row()  # [P]
        self.head, self.base = model.columns["head"], model.without("head")

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: clients train the base u alone."""
        u = cohort.broadcast(u=self.base.take(self.w)).u  # [|u|]
        out = cohort.train(self.base.put(self.w, u), columns=self.base)
        up = cohort.upload(u=self.base.take(out.theta), relative_to={"u": "u"})  # [K, |u|]
        self.w = self.base.put(self.w, cohort.mean(up.u))

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """[u, h]; after the last round fine-tuned."""
        w = self.base.put(self.w, cohort.broadcast(u=self.base.take(self.w)).u)
        if not final:
            return w
        start = self.head.put(w, torch.zeros_like(self.head.take(w))) if self.zero_head else w
        columns = {"all": None, "head": self.head, "base": self.base}[self.part]
        return cohort.train(
            start,
            columns=columns,
            how=LocalTraining(
                epochs=self.epochs, lr=self.lr, key="finetune", optimizer=cohort.engine.optimizer.fresh()
            ),
        ).theta

    def global_row(self) -> Tensor:
        """[u, h]."""
        return self.w
