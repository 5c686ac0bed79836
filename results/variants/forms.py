"""Methods as libraries compute them, where this differs from the paper and no option of fedbench has it.

Each class states the library, the commit, and what the library computes otherwise.  docs/variants.md compares them.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.algorithms._features import ClassStatistics
from fedbench.algorithms.base import Cohort, Columns, Federation, FlatModel, RowStore
from fedbench.algorithms.fedavgm import FedAvgM
from fedbench.algorithms.fedbn import FedBN
from fedbench.algorithms.fedgh import FedGH
from fedbench.algorithms.fedlc import FedLC
from fedbench.algorithms.fednova import FedNova
from fedbench.algorithms.fedpac import FedPAC
from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.models.resnet import Block, ResNet
from fedbench.server.base import ServerStep
from fedbench.server.momentum import Momentum


# -- fluke, makgyver/fluke a0bd26a -------------------------------------------------------------------------
class LateMomentum(Momentum):
    """Server momentum that starts in the second round.  The first round leaves w unchanged."""

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Return w after one step of momentum, or w itself in the first round.  # [p]"""
        return super().step(s, state) if s.round > 0 else s.w


class FlukeFedAvgM(FedAvgM):
    """FedAvgM of fluke (makgyver/fluke a0bd26a).

    In the first round the momentum vector is created as zero, and the clients' mean change is not added to it.
    So the first round's update is dropped.
    """

    def __init__(self, beta: UnitInterval = 0.9):
        super().__init__(beta)
        self.rule = LateMomentum(beta)


class NovaOfModels(FedNova):
    """Base class of forms of FedNova in which w is a weighted sum of the clients' models."""

    def __init__(self) -> None:
        super().__init__()

    def round(self, cohort: Cohort) -> None:
        """Run one round."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w)
        a = self.accumulation(out.steps, out.lr)  # [K]
        up = cohort.upload(theta=out.theta, a=a, relative_to={"theta": "w"}, previous={"a": None}, uncompressed=["a"])
        p = cohort.num_samples / cohort.num_samples.sum()  # [K]
        self.w = cohort.mean(up.theta, self.model_weights(p, up.a))

    def model_weights(self, p: Tensor, a: Tensor) -> Tensor:
        """Return the weights of the clients' models, from their shares of samples p and norms a.  # [K]"""
        raise NotImplementedError


class FlukeFedNova(NovaOfModels):
    """FedNova of fluke (makgyver/fluke a0bd26a).

    The weights p_i tau_eff / a_i multiply models instead of changes:  w <- sum_i p_i tau_eff theta_i / a_i.
    Their sum is at least 1, and larger if clients take different numbers of steps.  Then w grows in each round.
    """

    def model_weights(self, p: Tensor, a: Tensor) -> Tensor:
        """Return p_i tau_eff / a_i.  # [K]"""
        return p * (p * a).sum() / a


# -- Flower, baselines/fednova of adap/flower 2079194 ---------------------------------------------------------
class FlowerFedNova(NovaOfModels):
    """FedNova of Flower's baseline (adap/flower 2079194, baselines/fednova).

    The server takes a weighted mean of the changes, with the weights p_i tau_eff / a_i.  A mean divides by the sum of
    its weights, so tau_eff cancels:  w <- w - sum_i (p_i / a_i) (w - theta_i) / sum_j (p_j / a_j).
    """

    def model_weights(self, p: Tensor, a: Tensor) -> Tensor:
        """Return p_i / a_i, scaled to a sum of 1.  # [K]"""
        return (p / a) / (p / a).sum()


# -- PFLlib, TsingZ0/PFLlib d832e76 --------------------------------------------------------------------------
class PFLlibFedLC(FedLC):
    """FedLC of PFLlib (TsingZ0/PFLlib d832e76).

    Label counts of all clients are added, so the shift of the logits is the same for all clients.
    """

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Initialize w, and count the classes of all clients together."""
        super().setup(federation, model, rows)
        self.n = np.tile(self.n.sum(0), (len(self.n), 1))  # [N, C]


class AliasedFedPAC(FedPAC):
    """FedPAC with one fault of PFLlib (TsingZ0/PFLlib d832e76).

    Uploaded heads are references.  The server replaces the clients' heads one after the other, so the head of client i
    is a mixture of heads that are already replaced (before i) and of trained ones.  Weights below 0.001 become 0, and
    the others are not scaled to a sum of 1.
    """

    def head_weights(self, V: Tensor, H: Tensor) -> Tensor:
        """Return the weights of the trained heads in each client's head, after all replacements.  # [K, K]"""
        return mixed_in_turn(super().head_weights(V, H), torch.arange(len(V), device=V.device))

    def normalized(self, a: np.ndarray) -> np.ndarray:
        """Return the weights unchanged.  # [K, K]"""
        return a


class PFLlibFedPAC(AliasedFedPAC):
    """FedPAC of PFLlib (TsingZ0/PFLlib d832e76).

    Heads are references, as in AliasedFedPAC.  The list of uploaded heads is also shuffled, but the lists of V and H
    are not.  So client pi(i) receives the weights of client i, and a_ij belongs to the head of client pi(j).
    """

    def __init__(self, lam: NonNegative = 1.0):
        super().__init__(lam, weights="uniform")

    def round(self, cohort: Cohort) -> None:
        """Run one round, with a random order of the heads."""
        self.order = cohort.random("order of heads").uniform(1)[:, 0].argsort()  # pi, [K]
        super().round(cohort)

    def head_weights(self, V: Tensor, H: Tensor) -> Tensor:
        """Return the weights of the trained heads in each client's head, after all replacements.  # [K, K]"""
        return mixed_in_turn(FedPAC.head_weights(self, V, H), self.order)


def mixed_in_turn(a: Tensor, order: Tensor) -> Tensor:
    """Return the weights of the original heads, if heads are replaced one after the other.

    Args:
        a: Weights; row i and column j belong to the heads at positions i and j of the list.  # [K, K]
        order: The client of each position of the list.  # [K]

    Returns:
        The weights of client j's original head in client i's new head.  # [K, K]
    """
    mixed = torch.eye(len(a), dtype=a.dtype, device=a.device)
    for weights, client in zip(a, order):
        mixed[client] = weights @ mixed[order]
    return mixed


class PFLlibFedGH(FedGH):
    """FedGH of PFLlib (TsingZ0/PFLlib d832e76).

    The server's head is the object that is also the head of client 0.  If client 0 takes part, the server continues
    from the head that client 0 trained.  The server's learning rate is 1.
    """

    def __init__(self, head_lr: Positive = 1.0):
        super().__init__(head_lr)

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        """Take over the head of client 0, and return the statistics of the features of all training samples."""
        clients = cohort.ids.tolist()
        if 0 in clients:
            self.h = self.head.take(theta[clients.index(0)])
        return super().statistics(cohort, theta)


class FedBNByName(FedBN):
    """FedBN of PFLlib (TsingZ0/PFLlib d832e76), for the model below.

    Layers are personal if "bn" is in their name, here "norm" or "body.1".  The batch norm of a shortcut has another
    name, so its scales and shifts are averaged.  Running statistics are never sent.
    """

    def personal_columns(self, model: FlatModel) -> Columns:
        """Return the parameters with such a name, and all running statistics."""
        return model.add_group("personal_by_name", ["*norm*", "body.1.*", "*.running_*"])


# -- a model for FedBN -------------------------------------------------------------------------------------
class NormedShortcuts(ResNet):
    """The model resnet with batch norm in its shortcuts, as in torchvision.  [B, channels, H, W] -> [B, C]."""

    def __init__(self, input_shape: tuple, num_classes: int, widths: Iterable[int] = (16, 32, 64)):
        super().__init__(input_shape, num_classes, list(widths), "batch")
        for block in self.body:
            if isinstance(block, Block) and isinstance(block.short, nn.Conv2d):
                block.short = nn.Sequential(block.short, nn.BatchNorm2d(block.short.out_channels))
