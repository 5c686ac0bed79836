"""HeurFedAMP: FedAMP with weights from cosine similarities of models, which also suit models with many parameters.

Huang et al., AAAI 2021, section "HeurFedAMP":  X_ij = (1 - xi) softmax_{j != i}(sigma cos(w_i, w_j)),  X_ii = xi.
Departs from the paper: as FedAMP, but local SGD starts from u_i.
Reduces to: Local at xi = 1 and lam = 0; uniformly weighted FedAvg at sigma = 0, xi = 1/N and lam = 0 with full
participation.
"""

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Federation, FlatModel, Optimizer, RowStore
from fedbench.algorithms.fedamp import FedAMP
from fedbench.core.linalg import products
from fedbench.core.options import Count, Fraction, NonNegative, Positive, Probability


class HeurFedAMP(FedAMP):
    """HeurFedAMP.  X_ii: weight of a client's own model; other options and the state are those of FedAMP.

    Args:
        xi: Weight X_ii of a client's model in its mixture, in [0, 1]; None is 1/N.
        sigma: Factor of the cosines in the softmax, >= 0.
    """

    starts_from_cloud = True

    def __init__(
        self,
        xi: Probability | None = None,
        sigma: NonNegative = 25.0,
        lam: NonNegative | list[NonNegative] = 1.0,
        alpha_k: Positive = 1e4,
        decay: Fraction = 0.1,
        decay_every: Count = 30,
    ):
        super().__init__(lam, alpha_k, sigma, decay, decay_every)
        self.xi = xi

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Run the checks of the base class `Algorithm`, without FedAMP's: softmax weights cannot become negative."""
        Algorithm.check(self, federation, model, optimizer)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create FedAMP's state, and set X_ii, the weight of a client's own model, to the option xi.

        If xi is None, it is 1 / N for N clients.
        """
        super().setup(federation, model, rows)
        self.X_ii = 1 / federation.num_clients if self.xi is None else self.xi

    def compare(self, w_i: Tensor, w_j: Tensor) -> Tensor:
        """Return the cosine of every model of w_i [K, p] and every model of w_j [m, p]; 0 if one is a zero vector.

        # [K, m]
        """
        lengths = w_i.norm(dim=1)[:, None] * w_j.norm(dim=1)  # [K, m]
        return products(w_i, w_j) / lengths.clamp_min(1e-12)

    def attention(self, cosines: Tensor, is_other: Tensor, alpha: float) -> Tensor:
        """Return the weights X_ij of the other clients' models, (1 - X_ii) times a softmax of sigma times cosines.

        Args:
            cosines: Cosines of the models of K clients i and M clients j.  # [K, M]
            is_other: Whether j != i; X_ij is 0 where it is False.  # [K, M] bool
            alpha: Unused; FedAMP's step size, which the option X_ii replaces.

        Returns:
            The weights; all 0 for a client without others.  # [K, M]
        """
        scores = (cosines * float(self.sigma)).masked_fill(~is_other, float("-inf"))
        return (1 - self.X_ii) * scores.softmax(1).nan_to_num(0)  # without other clients: 0
