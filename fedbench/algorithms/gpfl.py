"""GPFL: a conditional valve turns features into global and personal ones, for class embeddings and for the head.

Zhang et al., ICCV 2023, Algorithm 1.  The valve and the class embeddings M [C, F] are shared, the head h_i is personal:

    valve(z, q) = relu(z (gamma(q) + 1) + beta(q)),   gamma(q), beta(q) = LayerNorm(relu(linear(q)))
    q_g = mean of M over classes,   q_p = sum over classes of pi_ic M[c],   pi_i the label shares of client i
    loss = CE(h_i(valve(z, q_p))) + CE(cos(valve(z, q_g), M)) + lam |valve(z, q_g) - M0[y]|

M0, q_g and q_p are those of the received M and have no gradient.  The norm is over all samples of the batch.  M and the
valve have weight decay mu.  Clients upload the base u, M and the valve.  Deployed: h_i(valve(z, q_p)).
Departs from the paper: q_g and q_p follow the received M.  Released codes compute them from the M that a client had
before, and use 0 in the first round.
Reduces to: FedPer, beside a cosine classifier, with lam = 0 and a valve of gamma = beta = 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.algorithms._features import num_features, require_features, require_labels
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
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import PerClient, per_client


class GPFL(Algorithm):
    """GPFL.  u: base; M [C, F]: class embeddings; h_i: personal head; lam: weight of a distance; mu: weight decay.

    Args:
        lam: Weight of the distance to the class embeddings, >= 0, or a list with one per client.
        mu: Weight decay of the class embeddings and the valve, >= 0.

    State:
        w: Shared columns: base u, class embeddings M and valve, [|w|].
        h: Personal heads as last trained, [N, |head|].
    """

    requires = ("head",)
    has_base = True

    def __init__(self, lam: NonNegative | list[NonNegative] = 0.01, mu: NonNegative = 0.1):
        self.lam: float | PerClient = per_client(lam)
        self.mu = mu

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add class embeddings and the valve to the model, and create the state: shared columns w, heads h_i.

        The valve is a small network that scales and shifts features, given a condition.
        """
        size = num_features(model)
        # new columns of each row; "gpfl" and the name are the key of the random initial values
        model.extend(
            embeddings=model.seeded(lambda: torch.randn(federation.num_classes, size), "gpfl", "embeddings"),
            valve=model.seeded(lambda: valve(size), "gpfl", "valve"),
        )
        self.head, self.shared = model.columns["head"], model.without("head")  # columns of the head, and all others
        decayed = model.columns["embeddings"] | model.columns["valve"]  # columns with weight decay
        w = model.init_row()
        self.w = self.shared.take(w).clone()  # [|w|]
        self.h = rows("h", default=self.head.take(w))  # [N, |head|]; a row equals the default until it is set
        self.decay = decayed.put(torch.zeros_like(w), torch.full_like(decayed.take(w), self.mu))  # [P]
        self.counts = federation.label_counts  # [N, C] on the host; each client knows its own

    def round(self, cohort: Cohort) -> None:
        """Run one round of GPFL: clients train all parameters; the server averages all but the head."""
        theta = self.train(cohort, cohort.broadcast(w=self.w).w)  # [K, P]
        up = cohort.upload(w=self.shared.take(theta), relative_to={"w": "w"})  # [K, |w|]; the change of w is sent
        self.w = cohort.mean(up.w, updates="w")  # the new w: the mean, or the step of the option server towards it
        self.h[cohort.ids] = self.head.take(theta)

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Train the clients from the received shared columns.

        The features z are changed by the valve in two ways: to personal features for the head, and to global ones,
        which are compared to the class embeddings.

        Args:
            cohort: The clients.
            w: Base, class embeddings and valve.  # [|w|]

        Returns:
            The clients' models after training.  # [K, P]
        """
        start = self.with_heads(cohort, w)  # [K, P]
        received = start[0] if len(start) else cohort.model.init_row()  # without clients it is not read
        M0 = cohort.model.named(received)["embeddings"]  # the received class embeddings, the same in all rows  [C, F]

        def loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            """Return the losses of the head and of the cosines to class embeddings, plus lam times a distance.

            The distance is that of the global features z_g to M0, the received embedding of their class.  s.state.q_p
            and q_g are the conditions by which the valve makes personal and global features.  # [k, B]
            """
            z, named = s.features(rows, batch), s.model.named(rows)  # [k, B, F]
            personal = s.model.head(rows, conditioned(named, z, s.state.q_p))  # [k, B, C]
            z_g = conditioned(named, z, s.state.q_g)  # [k, B, F]
            cosines = F.normalize(z_g, dim=2) @ F.normalize(named["embeddings"], dim=2).mT  # [k, B, C]
            distance = ((z_g - M0[batch.y]) * batch.real[..., None]).flatten(1).norm(dim=1, keepdim=True)  # [k, 1]
            # s.value: one number, or [k, 1] if lam is a list
            return s.task_loss(personal, batch) + s.task_loss(cosines, batch) + s.value(self.lam) * distance

        q_g, q_p = self.conditions(cohort, M0)  # [K, F] each
        # weight decay: self.decay [P] is mu at class embeddings and valve, and 0 elsewhere
        decay = (lambda s: self.decay * s.theta) if self.mu else None
        # uploaded: the columns that leave the client, whose gradients privacy clips
        how = LocalTraining(uploaded=self.shared)
        return cohort.train(start, loss=loss, extra_grad=decay, how=how, q_g=q_g, q_p=q_p).theta

    def conditions(self, cohort: Cohort, M: Tensor) -> tuple[Tensor, Tensor]:
        """Return the conditions q_g and q_p of the valve, the means of class embeddings.

        Args:
            cohort: The clients.
            M: The received class embeddings.  # [C, F]

        Returns:
            q_g, the mean over all classes, and q_p, the mean weighted by the client's label shares.  # [K, F] each
        """
        counts = torch.from_numpy(self.counts[cohort.ids]).to(M)  # [K, C]
        q_p = counts / counts.sum(1, keepdim=True).clamp_min(1) @ M
        return M.mean(0).expand_as(q_p), q_p

    def with_heads(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Return the sampled clients' whole models: the shared part w [|w|] and each client's own head h_i.

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = w.new_empty(len(cohort), self.shared.size + self.head.size)
        return self.head.put(self.shared.put(rows, w), self.h[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """Return what the cohort deploys: theta, rows of w and head h_i [K, P], and the conditions q_p [K, F].

        `final`, whether the last round is over, changes nothing.
        """
        theta = self.with_heads(cohort, cohort.broadcast(w=self.w).w)
        # theta[0]: the class embeddings are the same in all rows
        _, q_p = self.conditions(cohort, cohort.model.named(theta[0])["embeddings"])
        return {"theta": theta, "q_p": q_p}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits h_i(valve(z, q_p)) of inputs [k, b, ...]; rows is the output of `personalized`.

        z are the features of a sample, and q_p is the vector by which client i's valve makes them personal.

        # [k, b, C]
        """
        theta = rows["theta"]
        z = model.features(theta, inputs)  # [k, b, F]
        return model.head(theta, conditioned(model.named(theta), z, rows["q_p"]))  # conditioned: applies the valve


def valve(size: int) -> nn.Module:
    """Return the networks {"gamma", "beta"} of the valve, each from a condition [size] to `size` numbers.

    The condition is a mean of class embeddings.  The valve multiplies features by 1 + gamma, and adds beta.
    """
    parts = {name: nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size)) for name in ("gamma", "beta")}
    return nn.ModuleDict(parts)


def conditioned(named: dict[str, Tensor], z: Tensor, q: Tensor) -> Tensor:
    """Return the features z after the conditional valve: relu(z (gamma(q) + 1) + beta(q)).

    Args:
        named: The clients' parameters by name, including those of the valve.  # [k, ...] each
        z: Features.  # [k, B, F]
        q: Conditions.  # [k, F]

    Returns:
        Conditioned features.  # [k, B, F]
    """
    gamma, beta = (affine(named, f"valve.{name}", q)[:, None] for name in ("gamma", "beta"))  # [k, 1, F] each
    return torch.relu(z * (gamma + 1) + beta)


def affine(named: dict[str, Tensor], name: str, q: Tensor) -> Tensor:
    """Return LayerNorm(relu(linear(q))) for each client.

    Args:
        named: The clients' parameters by name.  # [k, ...] each
        name: Name of the network: "valve.gamma" or "valve.beta".
        q: Conditions.  # [k, F]

    Returns:
        gamma(q) or beta(q).  # [k, F]
    """
    # layers of the network: 0 is linear, 1 the ReLU, and 2 the layer norm
    hidden = torch.relu((named[f"{name}.0.weight"] @ q[..., None])[..., 0] + named[f"{name}.0.bias"])
    return F.layer_norm(hidden, hidden.shape[1:]) * named[f"{name}.2.weight"] + named[f"{name}.2.bias"]
