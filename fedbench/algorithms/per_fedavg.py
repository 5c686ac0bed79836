"""Per-FedAvg: a common model from which one gradient step at each client does well.

Fallah et al., NeurIPS 2020, Algorithm 1:  min_w sum_i q_i f_i(w - alpha grad f_i(w)).  mode="fo" drops the second
derivative, "hf" takes its product with the gradient by a central difference of gradients.  A step, on the parts of a
batch:  theta = w - alpha grad_1 f(w),  w <- w - lr (grad_2 f(theta) - alpha H_3(w) grad_2 f(theta)),  in fo without H.
Every local step draws one batch of 2 (hf: 3) times local.batch_size and cuts it into independent parts; a tail
smaller than that is dropped.  A client deploys w after one step of size alpha on one of its training batches.
Departs from the paper: aggregation weighted by samples, as the released code of the PFL benchmarks (with
client_weights=uniform as the paper's).  Departs from that code: it adapts by a step of the outer rate, whatever
alpha is.
Reduces to: SGD on the second part of the batches at alpha = 0.
"""

from typing import Any, Literal

from torch import Tensor

from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.options import NonNegative, Positive, require
from fedbench.engine.optim import SGD
from fedbench.engine.per_client import per_client


class PerFedAvg(Algorithm):
    """alpha: size of the inner step (null: the optimizer's learning rate, which is the outer one); delta: of the
    difference, at which the product with the Hessian is taken.  Both may be lists, one for each client, in training and
    when it adapts.  State: w [P]."""

    def __init__(
        self,
        mode: Literal["fo", "hf"] = "fo",
        alpha: NonNegative | list[NonNegative] | None = None,
        delta: Positive | list[Positive] = 1e-3,
    ):
        self.mode, self.alpha, self.delta = mode, per_client(alpha), per_client(delta)
        self.parts = {"fo": 2, "hf": 3}[mode]

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """A sample for each part of a batch."""
        super().check(federation, model, optimizer)
        least = int(federation.num_samples.min())
        require(
            least >= self.parts,
            f"algorithm=per_fedavg cuts every batch into {self.parts} parts: a client has "
            f"only {least} training sample{'s' * (least != 1)}",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.w = model.init_row()  # [P]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(
            w,
            step=self.step,
            how=LocalTraining(batch_size=self.parts * cohort.engine.batch_size, drop_last=True, counted=1 / self.parts),
        )  # counted: the part that defines the step
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]
        self.w = cohort.mean(up.theta)

    def step(self, s: Step, batch: Batch) -> None:
        """Meta-gradient on independent parts of the batch, at w adapted on the first."""
        alpha, delta = s.lr if self.alpha is None else s.value(self.alpha), s.value(self.delta)
        part = batch.split(self.parts)
        adapted = s.theta - alpha * s.grad(part[0])  # [k, P]
        g = s.grad(part[1], rows=adapted)  # [k, P]
        if self.mode == "hf":  # g - alpha H g
            ahead = s.grad(part[2], rows=s.theta + delta * g)
            behind = s.grad(part[2], rows=s.theta - delta * g)
            g = g - alpha * (ahead - behind) / (2 * delta)
        s.descend(g)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w after one step on a training batch."""
        how = LocalTraining(steps=1, key="adapt", lr=self.adaptation_rate(cohort), optimizer=SGD(1.0))
        return cohort.train(cohort.broadcast(w=self.w).w, how=how).theta

    def adaptation_rate(self, cohort: Cohort) -> Any:
        """Return the size of the step by which a client adapts w."""
        return cohort.rate() if self.alpha is None else cohort.value(self.alpha)

    def global_row(self) -> Tensor:
        """w."""
        return self.w
