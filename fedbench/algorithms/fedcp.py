"""FedCP: a policy splits each sample's features between a global and a personal head.

Zhang et al., KDD 2023, Algorithm 1.  With features z of the base u, the client's head h_i, the global head g, which is
not trained, the policy network r, and z0 the features of the received base:

    v_i = sum over classes of the weight of h_i                                        [F]
    s, 1 - s = softmax of relu(LayerNorm(linear(z v_i / |v_i|))) + Gumbel noise        [2, F], over the two
    loss = task loss of h_i(z s) + g(z (1 - s)) + lam MMD(z, z0)

MMD has Gaussian kernels exp(-d^2 / 2a), a = 10, 15, 20, 50.  v_i is that of the head before training.  u, h_i and r
train.  The client uploads u, r and (h_i + g) / 2, of which the server takes means.
Deployed: [u, h_i, g, r] without noise.
Departs from the paper: released codes draw noise at test time, too, and start v_i at random.
Reduces to: FedPer with s = 1 and lam = 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.algorithms._features import frozen_features, mmd, num_features, refuse_features_of_tokens
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
from fedbench.core.options import NonNegative, require
from fedbench.engine.per_client import PerClient, per_client


class FedCP(Algorithm):
    """FedCP.  w: shared columns, base u and policy network r; g: global head; h_i: personal head of client i.

    Args:
        lam: Weight of the distance between the features of the trained and the received base, >= 0, or a list with one
            per client.

    State:
        w: Shared columns: base u and policy r, [|w|].
        g: Global head, [|head|].
        h: Personal heads as last trained, [N, |head|].
    """

    requires = ("head",)
    has_base = True

    def __init__(self, lam: NonNegative | list[NonNegative] = 5.0):
        self.lam: float | PerClient = per_client(lam)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model's layer named head is linear, and samples are not token sequences."""
        super().check(federation, model, optimizer)
        head = getattr(model.module, "head", None)
        require(
            isinstance(head, nn.Linear),
            "algorithm=fedcp splits each sample's features between two heads, so the model's module named head must be "
            f"a linear layer, but it is {'missing' if head is None else f'a {type(head).__name__}'}: choose another "
            "model, or make its last layer a torch.nn.Linear named head",
        )
        refuse_features_of_tokens(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add a global head g and a policy network r to the model, and create the state.

        The state is w, the shared columns (base u and policy r), the global head g, and the personal heads h_i.
        """
        size = num_features(model)
        # new columns: a copy of the head, and a random policy, whose random numbers have the key "fedcp"
        model.extend(head_g="copy:head", policy=model.seeded(lambda: policy(size), "fedcp"))
        self.head, self.head_g = model.columns["head"], model.columns["head_g"]
        self.shared = (self.head | self.head_g).rest(model.size)  # all columns outside both heads: base and policy
        row = model.init_row()
        self.w = self.shared.take(row).clone()  # [|w|]
        self.g = self.head_g.take(row).clone()  # [|head|]
        self.h = rows("h", default=self.head.take(row))  # [N, |head|]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedCP: clients train base, head and policy; the server averages base, policy and heads.

        The policy splits each sample's features between the client's head h and the global head g.  A client uploads
        the mean of both heads, and the mean of these over clients is the next g.
        """
        server = cohort.broadcast(w=self.w, g=self.g)
        theta = self.train(cohort, self.rows_of(cohort, server.w, server.g))  # [K, P]
        h = self.head.take(theta)
        up = cohort.upload(
            w=self.shared.take(theta), g=(h + self.head_g.take(theta)) / 2, relative_to={"w": "w", "g": "g"}
        )  # the changes of w and g are sent; the new ones: the means, or the step of the option server towards them
        self.w, self.g = cohort.mean(up.w, updates="w"), cohort.mean(up.g, updates="g")
        self.h[cohort.ids] = h

    def train(self, cohort: Cohort, start: Tensor) -> Tensor:
        """Train base, personal head and policy of each client, with the global head fixed.

        Args:
            cohort: The clients.
            start: Their models [u, h_i, g, r] before training.  # [K, P]

        Returns:
            The trained models.  # [K, P]
        """
        # any client's row, because only its base is read, which is the same for all; no client: it is not read  [P]
        received = start[0] if len(start) else cohort.model.init_row()

        def loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            """Return the task's loss plus lam times the distance of features z to z0, those of the received base.

            # [k, B]
            """
            z, z0 = s.features(rows, batch), frozen_features(s, received, batch)  # [k, B, F] each
            # v: the unit vectors that condition the policy; noise: Gumbel noise of its split
            logits = self.logits(s.model, rows, z, s.state.v, self.noise(s, z))  # [k, B, C]
            distance = mmd(z, z0, batch.weight)[:, None]  # [k, 1]
            # s.value: one number, or [k, 1] if lam is a list
            return s.task_loss(logits, batch) + s.value(self.lam) * distance

        trained = self.head_g.rest(cohort.model.size)  # all columns except the global head
        v = self.contexts(cohort, start)  # unit vectors that condition the policy  [K, F]
        # uploaded: the columns that leave the client, whose gradients privacy clips
        return cohort.train(start, loss=loss, columns=trained, how=LocalTraining(uploaded=trained), v=v).theta

    def contexts(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """Return the unit vectors that condition the policy: the sum over classes of the weights of each client's head.

        rows [K, P] are the models with these heads.  # [K, F]
        """
        return context(cohort.model, rows)

    def noise(self, s: Step, z: Tensor) -> Tensor:
        """Return new standard Gumbel noise for both shares, global and personal, of each feature in z [k, B, F].

        # [k, B, 2, F]
        """
        u = s.rng.uniform(z.shape[1], 2, z.shape[2]).clamp_min(2**-25)  # > 0, so that its logarithm is finite
        return -(-u.log()).log()

    def logits(self, model: FlatModel, rows: Tensor, z: Tensor, v: Tensor, noise: Tensor | float) -> Tensor:
        """Return the sum of both heads' logits, h_i(z s) + g(z (1 - s)), with the policy's split s of features z.

        Args:
            model: The model.
            rows: Rows [u, h_i, g, r]: base, personal head, global head and policy.  # [k, P]
            z: Features.  # [k, B, F]
            v: Unit vectors v_i / |v_i| of the personal heads, which condition the policy.  # [k, F]
            noise: Gumbel noise [k, B, 2, F], or 0.0.

        Returns:
            Logits.  # [k, B, C]
        """
        s = split(model.named(rows), z, v, noise)  # [k, B, 2, F]
        return model.head(rows, z * s[:, :, 0]) + model.head(rows, z * s[:, :, 1], name="head_g")

    def rows_of(self, cohort: Cohort, w: Tensor, g: Tensor) -> Tensor:
        """Return the sampled clients' whole models, whose parts come from the server and from the clients.

        Args:
            cohort: The sampled clients.
            w: Shared part of all models, without the heads.  # [|w|]
            g: Global head, the same for all.  # [|head|]

        Returns:
            Flat parameter vectors of w, g and each client's own head h_i.  # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = w.new_empty(len(cohort), cohort.model.size)
        return self.head.put(self.head_g.put(self.shared.put(rows, w), g), self.h[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, with base u, heads h_i and g, and policy r.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        server = cohort.broadcast(w=self.w, g=self.g)
        return self.rows_of(cohort, server.w, server.g)

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits for b samples of each client without Gumbel noise, which is used in training only.

        Args:
            model: The model.
            rows: The models of k clients.  # [k, P]
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            Logits.  # [k, b, C]
        """
        return self.logits(model, rows, model.features(rows, inputs), context(model, rows), noise=0.0)


def policy(size: int) -> nn.Module:
    """Return a new policy network r, from `size` features to 2 `size` numbers >= 0.

    They decide which share of each feature the global head reads, and which one the personal head.
    """
    return nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())


def context(model: FlatModel, rows: Tensor) -> Tensor:
    """Return the unit vector that conditions the policy: the personal head's weights, summed over classes.

    Args:
        model: The model.
        rows: Rows with the heads h_i.  # [k, P]

    Returns:
        v_i / |v_i|, where v_i is the sum.  # [k, F]
    """
    return F.normalize(model.named(rows)["head.weight"].sum(1), dim=1)  # named: parameters by name  [k, C, F]


def split(named: dict[str, Tensor], z: Tensor, v: Tensor, noise: Tensor | float) -> Tensor:
    """Return how much of each feature the personal and the global head read, by the policy network.

    Args:
        named: The clients' parameters by name, including those of the policy.  # [k, ...] each
        z: Features.  # [k, B, F]
        v: Unit vectors v_i / |v_i| of the personal heads, which condition the policy.  # [k, F]
        noise: Gumbel noise [k, B, 2, F], or 0.0.

    Returns:
        Shares s and 1 - s, of sum 1 over the third dimension.  # [k, B, 2, F]
    """
    hidden = (z * v[:, None]) @ named["policy.0.weight"].mT + named["policy.0.bias"][:, None]  # [k, B, 2 F]
    hidden = F.layer_norm(hidden, hidden.shape[2:])  # normalization; its weight and bias are applied below
    hidden = torch.relu(hidden * named["policy.1.weight"][:, None] + named["policy.1.bias"][:, None])
    return (hidden.unflatten(2, (2, -1)) + noise).softmax(2)
