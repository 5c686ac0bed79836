"""FedDAT: each client has a personal adapter and a shared one, which distill knowledge into each other.

Chen et al., AAAI 2024, as in its released code.  Every adapted layer has three adapters: A0 is personal; A1 is
received, trained and uploaded; A2 is A1 as received.  Let KL(t -> s) be the divergence between softmax(t / tau) and
softmax(s / tau), times tau^2.  Every step on a batch (x, y) also trains the personal head:
    z_T = f(x; (A0 + A2) / 2), fixed;   A1:  1/2 [ loss(f(x; A1), y) + KL(z_T -> f(x; A1)) ];
    z_1 = f(x; A1) before that step, fixed;   A0:  1/2 [ loss(z_D, y) + KL(z_1 -> z_D) ],  z_D = f(x; (A0 + A2) / 2);
server: A1 = the mean over clients (client_weights=uniform: as in the code).  Deployed: (A0 + A2) / 2.
Departs from the code: parameters outside a loss are not updated (there, Adam's momentum also moves A0 in A1's step);
A0 starts equal to A1 (there, all three are drawn independently, the same for all clients).
Needs two bottlenecks in each adapted layer, adapter.twin=true: f(x; A1) is computed with A1 in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.algorithms._paired_adapters import columns_of_pairs
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
from fedbench.core.options import Positive, require
from fedbench.engine.step import Loss


class FedDAT(Algorithm):
    """FedDAT.  A0, A1 [A]: personal and shared adapter; A2: A1 as received; first, second: columns of both bottlenecks.

    Args:
        tau: Temperature of the distillation, > 0.

    State:
        A1: Shared adapter, [A].
        A0: Personal adapters, [N, A].
        A2: Shared adapter as each client last received it, [N, A].
        head: Personal heads, and other trained columns outside the adapters, [N, |head|].
    """

    requires = ("head",)
    has_base = True

    def __init__(self, tau: Positive = 3.0):
        self.tau = tau

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each adapted layer has two bottlenecks, and samples are not token sequences."""
        super().check(federation, model, optimizer)
        require(
            federation.task.predicts != "tokens",
            f"algorithm=feddat distills the classes of a sample, and with task={federation.task.kind} a sample has "
            "many tokens: use algorithm=fedpia, fedper or ditto for texts",
        )
        _, second = columns_of_pairs(model)  # columns of the second bottlenecks; empty if there are none
        require(
            bool(second),
            "algorithm=feddat gives every client two adapters, and this model does not have two in each adapted layer: "
            "use adapter=houlsby, pfeiffer, parallel or compacter with adapter.twin=true",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's adapter A1 [A] and the clients' adapters A0 and A2 [N, A] to the initial model's adapter.

        The clients' heads and other parameters outside the adapters also start from the initial model.  `rows` stores
        all tensors of clients.
        """
        self.first, self.second = columns_of_pairs(model)  # columns of the first and second bottlenecks of all layers
        self.rest = (self.first | self.second).rest(model.size)  # the head and all other columns
        w = self.initial = model.init_row()  # [P]
        self.A1 = self.first.take(w).clone()  # [A]
        self.A0, self.A2 = (rows(name, default=self.A1) for name in ("A0", "A2"))  # [N, A], at first the default
        self.head = rows("head", default=self.rest.take(w))  # [N, |head|]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedDAT: clients train A0 and A1, which distill into each other; the server averages A1.

        A0 is the client's personal adapter, A1 the shared one, and A2 the shared one as the client received it.  Each
        layer has two bottlenecks, in the columns `first` and `second`; `rest` are all other columns, with the head.
        """
        A1 = cohort.broadcast(A1=self.A1).A1  # [A]
        start = self.rows(cohort, A1, A1)  # A1 in both bottlenecks  [K, P]
        A0 = self.first.put(start, self.A0[cohort.ids])  # as rows of the model  [K, P]
        # uploaded: the columns that leave the client, whose gradients privacy clips
        # buffers: names under which the optimizer states of theta (with A1) and A0 are stored
        how = LocalTraining(uploaded=self.first, buffers={"theta": "theta", "A0": "A0"})
        out = cohort.train(start, step=lambda s, batch: self.step(s, batch, A1), how=how, A0=A0)
        self.A0[cohort.ids], self.A2[cohort.ids] = self.first.take(out.A0), A1.expand(len(cohort), -1)
        self.head[cohort.ids] = self.rest.take(out.theta)
        up = cohort.upload(A1=self.first.take(out.theta), relative_to={"A1": "A1"})  # the change of A1 is sent
        self.A1 = cohort.mean(up.A1, updates="A1")  # the new A1: the mean, or the step of the option server towards it

    def rows(self, cohort: Cohort, first: Tensor, second: Tensor) -> Tensor:
        """Build each client's model from its head and two bottlenecks per layer.

        Args:
            cohort: The clients.
            first: Values of the first bottlenecks, [A] for all clients or [K, A].
            second: Values of the second bottlenecks, [A] for all clients or [K, A].

        Returns:
            The models.  # [K, P]
        """
        # columns.put(row, values) returns a copy of row with these columns replaced; rest: the head and other columns
        row = self.rest.put(self.initial.expand(len(cohort), -1), self.head[cohort.ids])
        return self.second.put(self.first.put(row, first), second)

    def step(self, s: Step, batch: Batch, A2: Tensor) -> None:
        """Take a step on A1 and the head, then one on A0 and the head; both learn from each other by distillation.

        A1 alone is one model.  A0 with the fixed A2 is the other, which averages the outputs of both adapters.  `first`
        and `second` are the columns of the two bottlenecks of all layers, and `rest` all others, with the head.

        Args:
            s: The step.  s.theta has A1 in its first bottlenecks, s.state.A0 has A0 there.
            batch: One batch of every client.
            A2: The shared adapter as received, which is not trained.  # [A]
        """
        first, second = self.first, self.second

        def mixture() -> Tensor:  # the model with A0 and A2, whose outputs are averaged
            return second.put(first.put(s.theta, first.take(s.state.A0)), A2)  # [k, P]

        outputs: dict[str, Tensor] = {}  # the first loss stores the logits f(x; A1) here as "student"
        z_T = s.forward(mixture(), batch).detach()  # logits of A0 with A2, which teach A1
        with_A1 = second.put(s.theta, first.take(s.theta))  # A1 in both bottlenecks  [k, P]
        g = s.grad(batch, rows=with_A1, loss=self.distillation(z_T, outputs))  # [k, P]
        # the gradient of A1 is the sum of those of its two copies
        s.descend(first.put(g, first.take(g) + second.take(g)), columns=first | self.rest)
        g = s.grad(batch, rows=mixture(), loss=self.distillation(outputs["student"]))
        # uploaded=False: A0 and the head stay with the client
        s.descend(g, name="A0", columns=first, uploaded=False)
        s.descend(g, columns=self.rest, uploaded=False)

    def distillation(self, teacher: Tensor, outputs: dict[str, Tensor] | None = None) -> Loss:
        """Return a loss function for 1/2 [ loss(z, y) + KL(teacher || z) ], where z are the logits of its rows.

        Args:
            teacher: Logits of the teacher.  # [k, B, C, ...]
            outputs: A dict in which the loss function stores z, detached, as "student"; None: z is not stored.

        Returns:
            A function of the step, rows [k, P] and the batch, which returns the losses [k, B].  KL has temperature tau.
        """

        def loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            """Return half the task's loss plus half the distillation loss from `teacher` of each sample.  # [k, B]

            rows [k, P] are the models.  The detached logits are stored in `outputs`, if it is not None.
            """
            z = s.forward(rows, batch)  # [k, B, C, ...]
            if outputs is not None:
                outputs["student"] = z.detach()
            return 0.5 * (s.task_loss(z, batch) + distillation_loss(teacher, z, self.tau, batch.class_mask))

        return loss

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: head, A0 and A2.  Before a client's first round A0 = A2 = A1.

        `final`, whether the last round is over, changes nothing.  # [K, P]
        """
        A1 = cohort.broadcast(A1=self.A1).A1  # [A]
        took_part = self.A0.has(cohort.ids)[:, None]  # [K, 1]
        A0, A2 = (torch.where(took_part, rows[cohort.ids], A1) for rows in (self.A0, self.A2))  # [K, A]
        return self.rows(cohort, A0, A2)

    def initial_row_for_new_clients(self, cohorts: object) -> Tensor:
        """Return the model of all new clients: A1 in both bottlenecks, and the initial values in other columns.  # [P]

        `cohorts`, the training clients, is not used.
        """
        return self.second.put(self.first.put(self.initial, self.A1), self.A1)


def distillation_loss(teacher: Tensor, student: Tensor, tau: float, class_mask: Tensor | None = None) -> Tensor:
    """Compute the distillation loss tau^2 KL(softmax(teacher / tau) || softmax(student / tau)).

    Args:
        teacher: Logits.  # [k, B, C, ...]
        student: Logits.  # [k, B, C, ...]
        tau: Temperature.
        class_mask: True for the classes that a client has; None: all clients have all.  # [k, C] bool

    Returns:
        Loss of each sample, averaged over the dimensions after C.  # [k, B]
    """
    if class_mask is not None:  # absent classes get probability 0
        absent = ~class_mask.view(len(class_mask), 1, -1, *[1] * (student.dim() - 3))
        teacher, student = (t.masked_fill(absent, torch.finfo(t.dtype).min) for t in (teacher, student))
    log_p, log_q = ((t / tau).log_softmax(2) for t in (teacher, student))
    divergence = (log_p.exp() * (log_p - log_q)).sum(2)  # [k, B, ...]
    return tau**2 * (divergence.flatten(2).mean(2) if divergence.dim() > 2 else divergence)
