"""FedKD: a teacher stays with the client, and a student is exchanged as truncated singular value decompositions.

Wu et al., Nature Communications 2022.  On each batch, with c = CE(theta_i) + CE(g), and predictions p and features z of
the client's teacher theta_i and of the received student g:

    L = c + (KL(p_g || p_theta) + KL(p_theta || p_g) + 2 mean of (z_theta - W_i z_g)^2) / c

theta_i, W_i [F, F] and g descend L.  Every matrix of g is sent as the first k singular values and vectors, with the
smallest k whose squared values exceed the fraction T of their sum.  T rises from T_start to T_end over the rounds.  The
server averages the students uniformly, and truncates the mean in the same way.  A convolution [o, i, h, w] is a matrix
[o, i h w].  Deployed: theta_i.
Departs from the paper: the student itself is truncated, not its update, as in PFLlib, and KL is divided by the number
of classes.  There a matrix becomes 0 if it needs all singular values; here it is then sent whole.  A matrix whose
factors are not smaller counts as uncompressed.
"""

import torch
from torch import Tensor, nn

from fedbench.algorithms._distillation import kl, log_probabilities
from fedbench.algorithms._features import features_and_logits, num_features, require_features, require_labels
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
from fedbench.core.options import Fraction, Positive


class FedKD(Algorithm):
    """FedKD.  theta_i: teacher, personal; g: student, exchanged; W_i [F, F] maps features of g to those of theta_i.

    Args:
        student_lr: Learning rate of g.  None: that of theta_i.
        T_start: Fraction of the squared singular values that is kept in the first round, in (0, 1].
        T_end: The same in the last round.

    State:
        w: Mean of the students, [P].  g: The same, truncated, as the server sends it, [P].
        numbers: How many numbers represent g, [1].
        theta: Teachers, [N, P].  W: Maps from features of the student to those of the teacher, [N, F F].
    """

    requires = ("head",)

    def __init__(self, student_lr: Positive | None = None, T_start: Fraction = 0.95, T_end: Fraction = 0.98):
        self.student_lr, self.T_start, self.T_end = student_lr, T_start, T_end

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: student, teachers theta_i with the same initial values, and the feature maps W_i.

        w is the mean of the clients' students, and g is w truncated, which the clients receive.
        """
        self.w = self.g = model.init_row()  # [P]
        self.numbers = torch.tensor([self.g.numel()], device=self.g.device)  # how many numbers represent g: all
        self.theta = rows("theta", default=self.g)  # [N, P]; a row equals the default until it is set
        size = num_features(model)
        # a random linear map from student features to teacher features
        initial_W = model.seeded(lambda: nn.Linear(size, size, bias=False), "fedkd").weight.detach()
        self.W = rows("W", default=initial_W.flatten().to(self.g))  # [N, F F]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedKD: clients train teacher and student; the server averages and truncates the students.

        The teacher theta_i stays at the client.  Of the student g, each matrix is sent as its largest singular values
        and vectors, which have the fraction T of the energy.
        """
        # num_values: how many numbers are sent for g, to count bytes
        g = cohort.broadcast(g=self.g, num_values={"g": self.numbers.expand(len(cohort))}).g
        W = self.W[cohort.ids]  # [K, F F]
        out = cohort.train(
            g,
            step=self.step,
            # names under which the optimizer states are stored
            how=LocalTraining(buffers={"theta": "theta", "teacher": "teacher", "W": "W"}),
            teacher=self.theta[cohort.ids],
            W=W,
            slope=torch.zeros_like(W),
        )
        self.theta[cohort.ids], self.W[cohort.ids] = out.teacher, out.W
        # from T_start to T_end, linear in the round
        T = self.T_start + (self.T_end - self.T_start) * cohort.round / max(cohort.rounds - 1, 1)
        low_rank, numbers = truncated(cohort.model, out.theta, T)  # [K, P], [K]
        # the change of g is sent; num_values counts the numbers of the factors, which determine its size in bytes
        up = cohort.upload(g=low_rank, relative_to={"g": "g"}, num_values={"g": numbers})
        self.w = cohort.mean(up.g, weights="uniform", updates="g")  # or the option server's step towards the mean
        # what the server sends next: w truncated, and how many numbers that takes
        (self.g,), self.numbers = truncated(cohort.model, self.w[None], T)

    def step(self, s: Step, batch: Batch) -> None:
        """Take one step of the teacher, of W_i and of the student.

        Args:
            s: The step of k clients: s.theta is the student g, s.state.teacher the teacher theta_i, s.state.W is W_i.
            batch: One batch of every client.
        """
        at_theta = s.grad(batch, rows=s.state.teacher, loss=self.teacher_loss)
        at_g = s.grad(batch, loss=self.student_loss)
        # uploaded=False: teacher and W_i stay with the client
        s.descend(at_theta, name="teacher", uploaded=False)
        s.descend(s.state.slope, name="W", uploaded=False)  # slope: the gradient of L in W_i, stored by teacher_loss
        s.descend(at_g, lr=self.student_lr)

    def teacher_loss(self, s: Step, theta: Tensor, batch: Batch) -> Tensor:
        """Return L, the common loss of teacher and student, as a function of the teacher theta_i.

        The student, s.theta, is fixed.  It also writes the gradient of L in W_i to the state `slope`.

        Args:
            s: The step of k clients.
            theta: The teachers.  # [k, P]
            batch: One batch of every client.

        Returns:
            L of each client.  # [k]
        """
        of_theta = features_and_logits(s, theta, batch)
        with torch.no_grad():
            of_g = features_and_logits(s, s.theta, batch)
        return self.loss(s, of_theta, of_g, batch, stores_slope=True)

    def student_loss(self, s: Step, g: Tensor, batch: Batch) -> Tensor:
        """Return the common loss of teacher and student, as a function of the student; the teacher is fixed.

        Args:
            s: The step of k clients; s.state.teacher has their teachers [k, P].
            g: The students.  # [k, P]
            batch: One batch of every client.

        Returns:
            The loss of each client.  # [k]
        """
        of_g = features_and_logits(s, g, batch)
        with torch.no_grad():
            of_theta = features_and_logits(s, s.state.teacher, batch)
        return self.loss(s, of_theta, of_g, batch)

    def loss(
        self,
        s: Step,
        of_theta: tuple[Tensor, Tensor],
        of_g: tuple[Tensor, Tensor],
        batch: Batch,
        stores_slope: bool = False,
    ) -> Tensor:
        """Return the loss L of teacher and student: both cross-entropies c, plus (divergences + 2 e) / c.

        The divergences are KL in both directions, and e is the mean of (z_theta - W_i z_g)^2 for features z of both.

        Args:
            s: The step.
            of_theta: Features [k, B, F] and logits [k, B, C] of the teacher.
            of_g: Features and logits of the student.
            batch: One batch of every client.
            stores_slope: Whether to write the gradient of L in W_i to the state `slope`.

        Returns:
            L of each client.  # [k]
        """
        (z_theta, logits_theta), (z_g, logits_g) = of_theta, of_g
        z_theta, z_g = z_theta.float(), z_g.float()
        W = s.state.W.unflatten(1, (z_g.shape[2], -1))  # [k, F, F]
        error = z_theta - z_g @ W.mT  # [k, B, F]
        log_theta, log_g = log_probabilities(logits_theta, batch), log_probabilities(logits_g, batch)
        # "mean": over classes, as the released code
        divergence = kl(log_g, log_theta, over_classes="mean") + kl(log_theta, log_g, over_classes="mean")  # [k, B]
        # self.mean: over the samples of the batch
        c = self.mean(s.task_loss(logits_theta, batch) + s.task_loss(logits_g, batch), batch)  # [k]
        if stores_slope:  # d/dW of 2 mean of error^2 / c, by hand, because W_i is not part of the differentiated rows
            weighted = error * batch.weight[..., None]  # [k, B, F]
            slope = weighted.mT @ z_g * (-4 / error.shape[2] / c)[:, None, None]  # [k, F, F]
            s.state.slope.copy_(slope.detach().flatten(1))
        return c + self.mean(divergence + 2 * error.square().mean(2), batch) / c

    def mean(self, values: Tensor, batch: Batch) -> Tensor:
        """Return each client's mean of values [k, B] over its batch, weighted by batch.weight, which sums to 1.

        # [k]
        """
        return (values * batch.weight).sum(1)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the teachers theta_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """Return w, the mean of the clients' students; not g, its low-rank version that clients receive.  # [P]"""
        return self.w


def truncated(model: FlatModel, rows: Tensor, T: float) -> tuple[Tensor, Tensor]:
    """Set the smallest singular values of all trained matrices to 0.

    Args:
        model: The model.
        rows: Rows.  # [K, P]
        T: Fraction of the sum of squared singular values that the remaining ones must exceed.

    Returns:
        The truncated rows [K, P], and how many numbers represent each row, matrices as singular values and vectors [K].
    """
    rows = rows.clone()
    numbers = torch.full((len(rows),), rows.shape[1], device=rows.device)
    for name, matrix in model.named(rows).items():  # views of rows, [K, ...] each
        if matrix.dim() > 2 and name not in model.buffer_names:  # matrices and kernels; vectors stay as they are
            U, S, Vh = torch.linalg.svd(matrix.flatten(2), full_matrices=False)  # [K, m, r], [K, r], [K, r, n]
            energy = S.square().cumsum(1)  # sums of the largest squared singular values  [K, r]
            rank = ((energy <= T * energy[:, -1:]).sum(1) + 1).clamp_max(S.shape[1])  # [K]
            mask = torch.arange(S.shape[1], device=S.device) < rank[:, None]  # [K, r]
            matrix.copy_(((U * (S * mask)[:, None]) @ Vh).view_as(matrix))
            full = U.shape[1] * Vh.shape[2]  # numbers of the matrix itself
            # factors of U, S and V, if they take fewer numbers
            numbers += (rank * (U.shape[1] + Vh.shape[2] + 1)).clamp_max(full) - full
    return rows, numbers
