"""Per-FedAvg: meta-learning of an initial model that each client adapts by one gradient step.

Fallah et al., NeurIPS 2020, Algorithm 1:  min_w sum_i q_i f_i(w - alpha grad f_i(w)).  mode="fo" drops the second
derivative; "hf" approximates its product with the gradient by a central difference of gradients.  A step on three
sub-batches:  theta = w - alpha grad_1 f(w),  w <- w - lr (grad_2 f(theta) - alpha H_3(w) grad_2 f(theta)),  in fo
without the term of H.  Every local step draws 2 (hf: 3) times local.batch_size samples and splits them into
independent sub-batches.  An incomplete last batch is dropped.
A client deploys w after one step of size alpha on one of its training batches.
Departs from the paper: aggregation is weighted by samples, as in the released code of the PFL benchmarks
(client_weights=uniform: as in the paper).
Departs from that code: there a client adapts with the outer learning rate, whatever alpha is.
Reduces to: SGD on the second sub-batches at alpha = 0.
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
    """Per-FedAvg.  w: server model; parts: number of sub-batches of a batch; alpha: size of the step that adapts w.

    Args:
        mode: "fo", first order, or "hf", Hessian-free.
        alpha: Size of the inner step, >= 0; None uses the learning rate of the outer step (optimizer.lr).  A list sets
            one value per client.
        delta: Step size of the difference quotient in mode="hf", > 0.  A list sets one value per client.

    State:
        w: Server model, [P].
    """

    def __init__(
        self,
        mode: Literal["fo", "hf"] = "fo",
        alpha: NonNegative | list[NonNegative] | None = None,
        delta: Positive | list[Positive] = 1e-3,
    ):
        self.mode, self.alpha, self.delta = mode, per_client(alpha), per_client(delta)
        self.parts = {"fo": 2, "hf": 3}[mode]

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each client has at least `parts` training samples.

        `parts` is the number of sub-batches of one step, 2 or 3.
        """
        super().check(federation, model, optimizer)
        fewest = int(federation.num_samples.min())  # training samples of the smallest client
        require(
            fewest >= self.parts,
            f"algorithm=per_fedavg splits every batch into {self.parts} parts, but a client has only {fewest} "
            f"training sample{'s' * (fewest != 1)}: use fewer clients (partition.num_clients), or a partition that "
            f"gives each client at least {self.parts}",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w to the initial model.  # [P]"""
        self.w = model.init_row()  # [P]

    def round(self, cohort: Cohort) -> None:
        """Run one round of Per-FedAvg: clients take meta-gradient steps from w, and the server averages."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = cohort.train(
            w,
            step=self.step,
            how=LocalTraining(
                batch_size=self.parts * cohort.batch_size, drop_last=True, throughput_weight=1 / self.parts
            ),
        )  # drop_last: no smaller last batch of an epoch; throughput_weight: throughput counts one of the sub-batches
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def step(self, s: Step, batch: Batch) -> None:
        """Take one local step of s.theta along the meta-gradient, estimated on 2 parts of the batch.

        mode="hf" (Hessian-free) adds the term with the Hessian H, by differences of size delta on a third part.
        """
        # one number each, or [k, 1] if the option is a list; alpha is by default the learning rate
        alpha, delta = s.lr if self.alpha is None else s.value(self.alpha), s.value(self.delta)
        sub_batches = batch.split(self.parts)
        adapted = s.theta - alpha * s.grad(sub_batches[0])  # [k, P]
        g = s.grad(sub_batches[1], rows=adapted)  # [k, P]
        if self.mode == "hf":  # g - alpha H g, with H g ~ (grad f(theta + delta g) - grad f(theta - delta g)) / 2 delta
            ahead = s.grad(sub_batches[2], rows=s.theta + delta * g)
            behind = s.grad(sub_batches[2], rows=s.theta - delta * g)
            g = g - alpha * (ahead - behind) / (2 * delta)
        s.descend(g)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: w after one step on a training batch of each client.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        # plain SGD, whatever optimizer trains w; its rate 1.0 is replaced by lr; key: of the random batch
        how = LocalTraining(steps=1, key="adapt", lr=self.adaptation_rate(cohort), optimizer=SGD(1.0))
        return cohort.train(cohort.broadcast(w=self.w).w, how=how).theta

    def adaptation_rate(self, cohort: Cohort) -> Any:
        """Return the size of the step that adapts w: the option alpha, or the learning rate if it is None.

        One number, or one per client [K, 1].
        """
        return cohort.rate() if self.alpha is None else cohort.value(self.alpha)

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
