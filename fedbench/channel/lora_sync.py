"""Rules by which a server combines the clients' LoRA factors A_i [r, in] and B_i [out, r] (option adapter.sync).

p_i are the weights of the server's mean, W the frozen weight, s = alpha / r, R the largest rank.  Each rule is applied
to each adapted layer.  All other columns, such as the head, get their mean.
  average  A = sum_i p_i A_i,  B = sum_i p_i B_i.  FedIT: Zhang et al., ICASSP 2024.
  ffa      A is frozen at its initial value, and only B is trained and sent.  FFA-LoRA: Sun et al., ICLR 2024.
  flex     U S V^T = sum_i p_i B_i A_i;  B = (U S)[:, :R],  A = V^T[:R].  FlexLoRA: Bai et al., NeurIPS 2024.
  het      the means of average with the weights |B_i A_i|_F / sum_j |B_j A_j|_F.  HetLoRA: Cho et al., EMNLP 2024.
The equations are those of the papers.  Their released codes were not compared.
Departures: flex truncates the product to rank R at the server, and clients of lower rank truncate it further.  In het,
each layer has its own weights, and ranks are not pruned: the penalty of the paper that prepares it is left out, too.

Letters: K clients, n length of a message, P length of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbench.nn.flat import FlatModel

Sync = Literal["average", "ffa", "flex", "het"]


class Factors(NamedTuple):
    """The factors of one adapted layer.

    Attributes:
        A: Factors of the clients, [K, R, in]; those of a convolution are flattened, [K, R, in kh kw].
        B: Factors of the clients.  # [K, out, R]
        weights: Weights of the mean, p_i.  # [K]
    """

    A: Tensor
    B: Tensor
    weights: Tensor

    @property
    def mean_product(self) -> Tensor:
        """The mean of the products, sum_i p_i B_i A_i.  # [out, in]"""
        weighted = self.weights[:, None, None] * self.B
        return weighted.transpose(0, 1).flatten(1) @ self.A.flatten(0, 1)  # one product [out, K R] [K R, in]


class LoraSync:
    """The rule of a run.

    Args:
        name: The rule.
        model: The model, whose factors are named lora_A and lora_B.
    """

    def __init__(self, name: Sync, model: FlatModel):
        self.name, self.model = name, model
        self._combine = RULES[name]

    def combine(self, mean: Tensor, uploads: Tensor, weights: Tensor) -> Tensor:
        """Return the server's new value of a tensor.

        Args:
            mean: The mean of the uploads.  # [n]
            uploads: The uploads.  # [K, n]
            weights: Weights of the mean.  # [K]

        Returns:
            The mean, in which the factors of all adapted layers are replaced by those of the rule.  # [n]
        """
        layout = self.model.message_layout(len(mean))
        new = mean.clone()
        for name, (start, stop, shape) in layout.spans.items() if layout is not None else ():
            if ".lora_A." not in name:
                continue
            first, last, _ = layout.spans[name.replace(".lora_A.", ".lora_B.")]
            A = uploads[:, start:stop].view(len(uploads), shape[0], -1)
            B = uploads[:, first:last].view(len(uploads), -1, shape[0])
            new_A, new_B = self._combine(Factors(A, B, weights))
            new[start:stop], new[first:last] = new_A.reshape(-1), new_B.reshape(-1)
        return new


def flex(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of rank R of the mean product, by its singular values."""
    rank = factors.A.shape[1]
    # in double precision on the host, so that resumed runs and all processes have equal bytes
    U, S, Vh = torch.linalg.svd(factors.mean_product.double().cpu(), full_matrices=False)
    A = factors.A.new_zeros(factors.A.shape[1:])  # a layer with fewer than R inputs or outputs has zeros at the end
    B = factors.B.new_zeros(factors.B.shape[1:])
    A[: len(S)], B[:, : len(S)] = Vh[:rank].to(A), (U * S)[:, :rank].to(B)
    return A, B


def het(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return the means of the factors, weighted by the Frobenius norms of the products.

    If all products are 0, the weights are those of the mean.
    """
    # |B A|_F^2 = trace((B^T B) (A A^T)), without the dense product
    squares = ((factors.B.mT @ factors.B) * (factors.A @ factors.A.mT)).sum((1, 2))
    norms = squares.clamp_min(0).sqrt()  # [K]
    total = norms.sum()
    weights = torch.where(total > 0, norms / total.clamp_min(torch.finfo(norms.dtype).tiny), factors.weights)
    return torch.einsum("k,kri->ri", weights, factors.A), torch.einsum("k,kor->or", weights, factors.B)


RULES: dict[str, Callable[[Factors], tuple[Tensor, Tensor]]] = {"flex": flex, "het": het}
