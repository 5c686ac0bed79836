"""kNN-Per: the server's model, interpolated with the nearest neighbours among the client's own samples.

Marfoq et al., ICML 2022, Algorithm 1.  Training is FedAvg.  Client i stores the features z [F] and the classes of its
training samples.  For a sample with features z, and its k nearest stored samples j at distances d_j = |z - z_j|:

    p_knn[c] = sum over j of class c of exp(-d_j^2 / (F s)) / sum over all j
    p = lam_i p_knn + (1 - lam_i) softmax(logits)

Departs from the paper: lam_i is chosen by accuracy from 0, 0.1, ..., 1, the smallest of equally good ones, and is 0.5
for a client without validation samples.  The released code scores all lam on the test samples and selects none.
Reduces to: FedAvg with lam = 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedbench.algorithms._features import require_features, require_labels
from fedbench.algorithms.base import Cohort, Federation, FlatModel, Inputs, Optimizer, RowStore
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import Count, Fraction, Positive, Probability
from fedbench.engine.per_client import PerClient, per_client

GRID = 11  # values of lam, from 0 to 1
WITHOUT_VALIDATION = 0.5  # lam of a client without validation samples


class KNNPer(FedAvg):
    """kNN-Per.  A client stores its training samples' features z [F], and predicts with the nearest of them, too.

    Args:
        k: Number of neighbours.
        scale: Scale s of the kernel, > 0.
        lam: Weight of the neighbours, in [0, 1], or a list with one per client.  None: each client chooses it on its
            validation samples.
        capacity: Fraction of a client's training samples that it stores, in (0, 1].

    State:
        w: Server model, [P].
    """

    requires = ("head",)

    def __init__(
        self,
        k: Count = 10,
        scale: Positive = 1.0,
        lam: Probability | list[Probability] | None = None,
        capacity: Fraction = 1.0,
    ):
        super().__init__()
        self.k, self.scale, self.capacity = k, scale, capacity
        self.lam: float | PerClient | None = per_client(lam)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w to the initial model.  # [P]"""
        super().setup(federation, model, rows)  # sets self.w
        self.num_classes = federation.num_classes

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """Return what the cohort deploys: the server's model, and each client's stored features and classes.

        A client stores the fraction `capacity` of its training samples.
        `final`, whether the last round is over, changes nothing.

        Returns:
            theta, the server's model [P]; z [K, m, F] and y [K, m], features and classes of the stored samples, where
            class -1 is padding; lam, the weight of the neighbours in each client's prediction [K, 1].
        """
        w, federation = cohort.broadcast(w=self.w).w, cohort.federation
        samples = federation.splits["train"]
        if self.capacity < 1:
            samples = cohort.subsample("train", self.capacity, key="knn_per")
        z = cohort.forward(w, features, split=samples)  # [m_i, F] each
        # their classes  [m_i] each
        y = [federation.targets[torch.from_numpy(samples[i]).to(cohort.device)] for i in cohort.ids]
        rows = {
            "theta": w,
            "z": pad_sequence(z, batch_first=True),
            "y": pad_sequence(y, batch_first=True, padding_value=-1),
        }
        # by default the weight of highest accuracy on each client's validation samples
        lam = self.chosen(cohort, rows) if self.lam is None else cohort.value(self.lam)
        return {**rows, "lam": torch.as_tensor(lam, dtype=w.dtype, device=w.device).expand(len(cohort), 1)}

    def chosen(self, cohort: Cohort, rows: dict[str, Tensor]) -> Tensor:
        """Return each client's weight lam_i of the neighbours, that of highest accuracy on validation samples.

        Args:
            cohort: The clients.
            rows: theta, z and y of `personalized`.

        Returns:
            lam_i from 0, 0.1, ..., 1, the smallest of equally good ones; 0.5 without validation samples.  # [K, 1]
        """

        def both(model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
            return torch.stack(self.probabilities(model, rows, inputs), 2)  # p_knn, then the softmax  [k, b, 2, C]

        # positions of each client's validation samples in the data set; the GRID = 11 values of lam to try
        split, grid = cohort.federation.splits["val"], torch.linspace(0, 1, GRID, device=cohort.device)
        lam = torch.full((len(cohort), 1), WITHOUT_VALIDATION, device=cohort.device)  # 0.5
        for position, p in enumerate(cohort.forward(rows, both, split="val")):
            if len(p):  # p: both probabilities of the client's n validation samples  [n, 2, C]
                y = cohort.federation.targets[torch.from_numpy(split[cohort.ids[position]]).to(p.device)]  # [n]
                # lam p_knn + (1 - lam) softmax for each lam of the grid
                mixed = torch.lerp(p[:, None, 1], p[:, None, 0], grid[:, None])  # [n, GRID, C]
                accuracy = (mixed.argmax(2) == y[:, None]).float().mean(0)  # [GRID]
                lam[position] = grid[accuracy.argmax()]  # the first, and so smallest, of equal ones
        return lam

    def probabilities(self, model: FlatModel, rows: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the neighbours and those of the server's model.

        Args:
            model: The model.
            rows: theta, z and y of `personalized`, for k clients.
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            p_knn, and the softmax of the logits.  # [k, b, C] each
        """
        z = model.features(rows["theta"], inputs)  # [k, b, F]
        p_knn = neighbours(
            z.flatten(2).float(),
            rows["z"],
            rows["y"],
            k=self.k,
            scale=self.scale,
            num_classes=self.num_classes,
        )
        return p_knn, model.head(rows["theta"], z).float().softmax(2)

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the log of lam p_knn + (1 - lam) softmax(logits) as logits, for inputs [k, b, ...].  # [k, b, C]

        rows is the output of `personalized` for k clients: models, stored features and labels, and lam.
        """
        p_knn, p = self.probabilities(model, rows, inputs)
        return torch.lerp(p, p_knn, rows["lam"][:, None]).clamp_min(torch.finfo(p.dtype).tiny).log()


def features(model: FlatModel, rows: Tensor, inputs: Inputs) -> Tensor:
    """Return the inputs of the head, flattened, for inputs [k, b, ...] of k clients with models rows [k, P].

    # [k, b, F] float32
    """
    return model.features(rows, inputs).flatten(2).float()


def neighbours(z: Tensor, stored: Tensor, y: Tensor, k: int, scale: float, num_classes: int) -> Tensor:
    """Return the shares of the classes among the nearest stored samples, weighted by a Gaussian kernel.

    The weight of a neighbour at distance d is proportional to exp(-d^2 / (F scale)).

    Args:
        z: Features of b samples of each of n clients.  # [n, b, F]
        stored: Features of the stored samples of each client.  # [n, m, F]
        y: Their classes; -1 is padding.  # [n, m]
        k: Number of neighbours.
        scale: Scale of the kernel, > 0.
        num_classes: C.

    Returns:
        The shares p_knn, of sum 1.  # [n, b, C]
    """
    # this mode is exact: equal features have distance 0
    distances = torch.cdist(z, stored, compute_mode="donot_use_mm_for_euclid_dist").square()  # [n, b, m]
    distances = distances.masked_fill(y[:, None] < 0, torch.inf)
    nearest, index = distances.topk(min(k, stored.shape[1]), largest=False)  # [n, b, k]
    share = (-nearest / (z.shape[2] * scale)).softmax(2)  # [n, b, k], 0 for padding
    # clamp_min: padding, whose share is 0, counts as class 0  [n, b, k]
    classes = y[:, None].expand(-1, z.shape[1], -1).gather(2, index).clamp_min(0)
    return share.new_zeros(*z.shape[:2], num_classes).scatter_add(2, classes, share)
