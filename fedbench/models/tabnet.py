"""TabNet: a table's features are chosen step by step, by attention that is sparse, and each step adds to the decision.

Arik and Pfister, AAAI 2021.  In step i, with the attention a of the step before and the prior p (1 at first):
    M = sparsemax(p * norm(W a)),  p <- p (relaxation - M),  [d, a] = f_i(M * x),  decision <- decision + ReLU(d);
logits = head(decision).  f_i is a chain of gated linear units, the first ones with weights that all steps share.
The loss has a term more, sparsity times the mean over steps of the entropy of M, which the module returns beside its
logits.  Departs from the paper: a batch is normalized in virtual ones of at least virtual_batch samples, so that a rest
of a single sample never stands alone; the last layer has a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, Fraction, NonNegative, NonNegativeInt, Positive, require

EPSILON = 1e-15  # in the entropy's logarithm
HALF = 0.5**0.5  # keeps the variance of a sum of two


class GhostNorm(nn.Module):
    """Batch norm by virtual batches.  [B, n] -> [B, n]."""

    def __init__(self, features: int, virtual_batch: int, momentum: float):
        super().__init__()
        self.norm, self.virtual_batch = nn.BatchNorm1d(features, momentum=momentum), virtual_batch

    def forward(self, x: Tensor) -> Tensor:
        """As many virtual batches as have virtual_batch samples at least."""
        parts = x.chunk(max(1, len(x) // self.virtual_batch)) if self.training else (x,)
        return torch.cat([self.norm(part) for part in parts])


class GatedUnit(nn.Module):
    """a * sigmoid(b) of the halves [a, b] of norm(W x).  [B, inputs] -> [B, outputs].  linear: W, which steps may
    share."""

    def __init__(self, linear: nn.Linear, virtual_batch: int, momentum: float):
        super().__init__()
        self.norm = GhostNorm(linear.out_features, virtual_batch, momentum)

    def forward(self, z: Tensor) -> Tensor:
        """z = W x [B, 2 outputs]."""
        return nn.functional.glu(self.norm(z), -1)


class FeatureTransformer(nn.Module):
    """f: gated units, each after the first one added to its input.  shared: linear layers of the first ones, which are
    held by TabNet."""

    def __init__(self, shared: nn.ModuleList, features: int, outputs: int, own: int, virtual: int, momentum: float):
        super().__init__()
        first = features if not len(shared) else outputs
        sizes = [first, *[outputs] * own][:own]
        self.linear = nn.ModuleList(nn.Linear(size, 2 * outputs, bias=False) for size in sizes)
        self.units = nn.ModuleList(GatedUnit(layer, virtual, momentum) for layer in [*shared, *self.linear])  # type: ignore[arg-type]

    def forward(self, x: Tensor, shared: nn.ModuleList) -> Tensor:
        """[B, features] -> [B, outputs]."""
        y = x
        for number, (linear, unit) in enumerate(zip([*shared, *self.linear], self.units, strict=True)):
            z = unit(linear(y))
            y = z if number == 0 else HALF * (y + z)
        return y


class TabNet(nn.Module):
    """[B, F] -> logits [B, C] and the extra loss [B].

    decision, attention: numbers N_d of d and N_a of a.  steps: after the first transformation, which only gives a.
    relaxation: how often a feature may be chosen, 1: once.  shared, own: gated units of a transformer.  sparsity: of
    the extra loss.  virtual_batch, momentum: of the norms.
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
            f"model=tabnet reads tables [features], but the data set gives {tuple(input_shape)}",
        )
        require(shared + own > 0, "model.shared and model.own are both 0: a transformer needs a unit")
        (features,), outputs = input_shape, decision + attention
        self.decision, self.relaxation, self.sparsity = decision, relaxation, sparsity
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
        """Logits, and sparsity times the mean entropy of the masks."""
        x = self.norm(x)
        a = self.transformers[0](x, self.shared)[:, self.decision :]
        prior, decision, entropy = torch.ones_like(x), x.new_zeros(()), x.new_zeros(())  # sums, from 0
        rest = list(self.transformers)[1:]
        for transformer, query, norm in zip(rest, self.queries, self.norms, strict=True):
            M = sparsemax(prior * norm(query(a)))  # [B, F]
            prior = prior * (self.relaxation - M)
            y = transformer(M * x, self.shared)
            decision, a = decision + y[:, : self.decision].relu(), y[:, self.decision :]
            entropy = entropy - (M * (M + EPSILON).log()).sum(-1)  # [B]
        return self.head(decision), self.sparsity * entropy / len(self.queries)


def sparsemax(z: Tensor) -> Tensor:
    """The point of the simplex that is next to z [..., n]: max(z - tau, 0), tau = max_k (sum of the k largest - 1) / k.

    Martins and Astudillo, ICML 2016.
    """
    largest = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    tau = ((largest.cumsum(-1) - 1) / count).amax(-1, keepdim=True)
    return (z - tau).clamp_min(0)
