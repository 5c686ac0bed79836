"""TabNet: sparse attention selects features of a table in several steps, and each step adds to the decision.

Arik and Pfister, AAAI 2021.  In step i, with the attention a of the step before and the prior p (1 at first):
    M = sparsemax(p * norm(W a)),  p <- p (relaxation - M),  [d, a] = f_i(M * x),  decision <- decision + ReLU(d);
logits = head(decision).  f_i is a sequence of gated linear units, and all steps share the weights of the first ones.
The module also returns an additional loss: sparsity times the entropy of M, mean over steps.
Departs from the paper: batch norm uses virtual batches of at least virtual_batch samples, so that none has a single
sample; the last layer has a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, Fraction, NonNegative, NonNegativeInt, Positive, require

EPSILON = 1e-15  # in the logarithm of the entropy
SCALE = 0.5**0.5  # preserves the variance of a sum of two terms


class GhostNorm(nn.Module):
    """Batch norm of virtual batches.  [B, features] -> [B, features]."""

    def __init__(self, features: int, virtual_batch: int, momentum: float):
        super().__init__()
        self.norm = nn.BatchNorm1d(features, momentum=momentum)
        self.virtual_batch = virtual_batch

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, features] normalized; in training, in virtual batches of at least virtual_batch samples each.

        A smaller batch is one virtual batch.
        """
        parts = x.chunk(max(1, len(x) // self.virtual_batch)) if self.training else (x,)
        return torch.cat([self.norm(part) for part in parts])


class GatedUnit(nn.Module):
    """Normalization and gated linear unit: a * sigmoid(b) of the halves [a, b] of norm(z).

    Args:
        linear: The layer W that computes z = W x, which steps may share.
        virtual_batch: Samples of a virtual batch.
        momentum: Of the batch norm.
    """

    def __init__(self, linear: nn.Linear, virtual_batch: int, momentum: float):
        super().__init__()
        self.norm = GhostNorm(linear.out_features, virtual_batch, momentum)

    def forward(self, z: Tensor) -> Tensor:
        """Normalize z [B, 2 outputs], split it into halves a and b, and return a * sigmoid(b).  # [B, outputs]"""
        return nn.functional.glu(self.norm(z), -1)


class FeatureTransformer(nn.Module):
    """Feature transformer: a chain of gated units.  The input of each unit after the first is added to its output.

    Args:
        shared: Linear layers of the first units, which are submodules of TabNet.
        features: Input features.
        outputs: Output features.
        own: Number of units whose weights no other step uses.
        virtual: Minimum samples of a virtual batch.
        momentum: Momentum of the batch norm's running statistics.
    """

    def __init__(self, shared: nn.ModuleList, features: int, outputs: int, own: int, virtual: int, momentum: float):
        super().__init__()
        first = features if not len(shared) else outputs
        sizes = [first, *[outputs] * own][:own]
        self.linear = nn.ModuleList(nn.Linear(size, 2 * outputs, bias=False) for size in sizes)
        self.units = nn.ModuleList(GatedUnit(layer, virtual, momentum) for layer in [*shared, *self.linear])  # type: ignore[arg-type]

    def forward(self, x: Tensor, shared: nn.ModuleList) -> Tensor:
        """Return the outputs of the last gated unit.

        Args:
            x: Features, [B, features].
            shared: Linear layers of the first units, which all feature transformers of the model share.

        Returns:
            Outputs, [B, outputs].
        """
        y = x
        for i, (linear, unit) in enumerate(zip([*shared, *self.linear], self.units, strict=True)):
            z = unit(linear(y))
            y = z if i == 0 else SCALE * (y + z)  # SCALE: sqrt(0.5) keeps the variance of the sum
        return y


class TabNet(nn.Module):
    """[B, F] -> logits [B, C] and an additional loss [B].

    Args:
        decision: N_d, size of d.
        attention: N_a, size of a.
        steps: Number of decision steps.
        relaxation: gamma.  At 1 each feature can be selected by one step only; larger values allow several.
        shared: Gated units of a feature transformer whose weights all steps share.
        own: Gated units of a feature transformer with weights of its step.
        sparsity: Weight of the additional loss.
        virtual_batch: Minimum samples of a virtual batch.
        momentum: Of the batch norms.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        decision: Count = 8,
        attention: Count = 8,
        steps: Count = 3,
        relaxation: Positive = 1.3,
        shared: NonNegativeInt = 2,
        own: NonNegativeInt = 2,
        sparsity: NonNegative = 1e-3,
        virtual_batch: Count = 128,
        momentum: Fraction = 0.02,
    ):
        super().__init__()
        require(
            len(input_shape) == 1,
            f"model=tabnet needs tables, samples of shape [features], but the data set gives {tuple(input_shape)}: "
            "choose a data set of tables, such as dataset=table_csv, or another model",
        )
        require(
            shared + own > 0,
            "model.shared and model.own are both 0, but a feature transformer needs at least one gated unit: set one "
            "of them to 1 or more",
        )
        features = input_shape[0]
        outputs = decision + attention
        self.decision = decision
        self.relaxation = relaxation
        self.sparsity = sparsity
        self.norm = nn.BatchNorm1d(features, momentum=momentum)
        sizes = [features, *[outputs] * shared][:shared]
        self.shared = nn.ModuleList(nn.Linear(size, 2 * outputs, bias=False) for size in sizes)
        self.transformers = nn.ModuleList(
            FeatureTransformer(self.shared, features, outputs, own, virtual_batch, momentum) for _ in range(steps + 1)
        )
        self.queries = nn.ModuleList(nn.Linear(attention, features, bias=False) for _ in range(steps))
        self.norms = nn.ModuleList(GhostNorm(features, virtual_batch, momentum) for _ in range(steps))
        self.head = nn.Linear(decision, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and an additional loss that is small if few features are selected.

        Args:
            x: Features, [B, F].

        Returns:
            Logits [B, C], and sparsity times the entropy of the masks M, mean over steps [B].
        """
        x = self.norm(x)
        # of a transformer's outputs, the first N_d (self.decision) are d, which decides, the others a, which selects
        a = self.transformers[0](x, self.shared)[:, self.decision :]
        prior = torch.ones_like(x)
        decision = x.new_zeros(())
        entropy = x.new_zeros(())
        steps = zip(list(self.transformers)[1:], self.queries, self.norms, strict=True)
        for transformer, query, norm in steps:
            M = sparsemax(prior * norm(query(a)))  # [B, F]
            prior = prior * (self.relaxation - M)  # lowers features that this step selected; relaxation: gamma
            y = transformer(M * x, self.shared)
            decision = decision + y[:, : self.decision].relu()
            a = y[:, self.decision :]
            entropy = entropy - (M * (M + EPSILON).log()).sum(-1)  # [B]
        return self.head(decision), self.sparsity * entropy / len(self.queries)


def sparsemax(z: Tensor) -> Tensor:
    """Project z [..., n] onto the simplex: max(z - tau, 0), where tau = max_k (sum of the k largest - 1) / k.

    References:
        Martins and Astudillo, ICML 2016.
    """
    largest = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    tau = ((largest.cumsum(-1) - 1) / count).amax(-1, keepdim=True)
    return (z - tau).clamp_min(0)
