"""Rules by which a server combines the clients' LoRA factors A_i [r, in] and B_i [out, r] (option adapter.sync).

p_i are the weights of the server's mean, W the frozen weight, s = alpha / r, R the largest rank.  Each rule is applied
to each adapted layer.  All other columns, such as the head, get their mean.
  average  A = sum_i p_i A_i,  B = sum_i p_i B_i.  FedIT: Zhang et al., ICASSP 2024.
  ffa      A is frozen at its initial value, and only B is trained and sent.  FFA-LoRA: Sun et al., ICLR 2024.
  fedsa    A = sum_i p_i A_i; B_i stays with the client.  FedSA-LoRA: Guo et al., ICLR 2025.
  flora    W += s sum_i p_i B_i A_i; A is drawn anew, and B = 0.  FLoRA: Wang et al., NeurIPS 2024.
  flex     U S V^T = sum_i p_i B_i A_i;  B = (U S)[:, :R],  A = V^T[:R].  FlexLoRA: Bai et al., NeurIPS 2024.
  het      the means of average with the weights |B_i A_i|_F / sum_j |B_j A_j|_F.  HetLoRA: Cho et al., EMNLP 2024.
  fedex    A and B as in average;  W += s (sum_i p_i B_i A_i - B A).  FedEx-LoRA: Singhal et al., ACL 2025.
Compared with the released codes of average, fedsa, flora, flex and fedex, and with ffa in those of fedsa and fedex.
Departures:
  fedsa    The head is averaged.  For classification, the released code keeps it with the client, as algorithm=fedper.
  flora    All clients draw the same A from a shared seed, so that it is not sent.  In the code, each draws its own.
  flex     The server's model has rank R, too.  In the code, it has the whole product.
  het      Ranks are not pruned, and the penalty that prepares this is left out (rank self-pruning).  Each layer has its
           own weights.
  fedex    p_i weigh the clients.  The paper weighs them equally, as client_weights=uniform does.
With different ranks, s is alpha / R for all clients.  The code of flex has alpha / r_i, and het has no factor.
What flora and fedex add to W is sent as the cheaper of two: the numbers of all rounds that a client missed, or the sum
over rounds as dense matrices.  The numbers of a round are the stacked factors of its clients.  In fedex, a layer's
residual is sent as a matrix if this is less; the paper sends factors of a rank up to K r (communication protocol).
In fedsa under FedProx, the proximal term pulls B_i towards 0, its initial value.

Letters: N clients, K clients of a cohort, n length of a message, P length of a row, D numbers of all adapted weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.channel.server_update import SERVER
from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import RowStore
from fedbench.nn.client_ranks import ClientRanks
from fedbench.nn.columns import Columns
from fedbench.nn.flat import FlatModel
from fedbench.nn.row_layout import MessageLayout
from fedbench.nn.transposed_linear import is_transposed_linear

Sync = Literal["average", "ffa", "fedsa", "flora", "flex", "het", "fedex"]


class Factors(NamedTuple):
    """The LoRA factors A [K, R, in] and B [K, out, R] of one adapted layer, and the clients' weights p_i [K].

    Attributes:
        A: Factors of the clients, [K, R, in]; those of a convolution are flattened, [K, R, in kh kw].
        B: Factors of the clients.  # [K, out, R]
        weights: Weights of the mean, p_i.  # [K]
        new_A: Returns a newly drawn factor.  # [R, in]
    """

    A: Tensor
    B: Tensor
    weights: Tensor
    new_A: Callable[[], Tensor]

    @property
    def mean_product(self) -> Tensor:
        """The mean of the products, sum_i p_i B_i A_i, in double precision.  # [out, in]"""
        weighted = self.weights[:, None, None].double() * self.B.double()
        return weighted.transpose(0, 1).flatten(1) @ self.A.double().flatten(0, 1)  # [out, K R] [K R, in]

    def means(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum_i w_i A_i [R, in], sum_i w_i B_i [out, R]) over the K clients.

        Args:
            weights: w_i, of sum 1.  # [K]
        """
        return torch.einsum("k,kri->ri", weights, self.A), torch.einsum("k,kor->or", weights, self.B)


class Combined(NamedTuple):
    """The server's new factors of a layer.

    Attributes:
        A: The factor A.  # [R, in]
        B: The factor B.  # [out, R]
        added: What is added to the frozen weight, divided by s; None for nothing.  # [out, in]
    """

    A: Tensor
    B: Tensor
    added: Tensor | None = None


class LoraSync:
    """The rule of a run: `personal` columns stay with the clients (fedsa); `backbone`: frozen weights that it changes.

    State: the row stores "lora_sync/B", with the clients' own B (fedsa) [N, |B|], and those of `Backbone`.

    Args:
        name: The rule.
        model: The model, whose factors are named lora_A and lora_B.
        rows: Creates the states.
        seed: The run's seed.
        client_ranks: The columns that each client has if ranks differ.

    Attributes:
        backbone: The frozen weights that the rule changes, or None.
        personal: The columns of a row that stay with the client, or None.
    """

    def __init__(
        self, name: Sync, model: FlatModel, rows: RowStore, seed: int = 0, client_ranks: ClientRanks | None = None
    ):
        self.name, self.model, self.seed, self.client_ranks = name, model, seed, client_ranks
        self.backbone = Backbone(model, rows) if name in ("flora", "fedex") else None
        self.personal = Columns(factor_spans(model, "B")) if name == "fedsa" else None
        self._personal_B = None if self.personal is None else rows("lora_sync/B", self.personal.take(model.init_row()))

    # -- aggregation -------------------------------------------------------------------------------------
    def combine(self, context: RoundContext, mean: Tensor, uploads: Tensor, weights: Tensor) -> Tensor:
        """Return the server's new value of a tensor, and change the frozen weights if the rule does.

        Args:
            context: The clients and the round.
            mean: The mean of the clients' uploads of this tensor.  # [n]
            uploads: The uploads.  # [K, n]
            weights: Weights of the mean.  # [K]

        Returns:
            The mean, in which the factors of all adapted layers are replaced by those of the rule.  # [n]
        """
        if self.personal is not None:  # columns of the factors that stay with the clients
            return self.without_personal(mean[None])[0]  # 0 there, where privacy may have added noise
        # the parameters in an upload of this length; None if it is no known part of a row
        layout = self.model.message_layout(len(mean))
        if layout is None or not self._factors_in(len(mean)).size:  # no factors of LoRA in the upload
            return mean
        new, added, num_sent = mean.clone(), {}, 0
        for name, (start, stop, shape) in layout.spans.items():  # columns of a parameter, and its shape, [R, in] for A
            if ".lora_A." not in name:
                continue
            start_B, stop_B, _ = layout.spans[name.replace(".lora_A.", ".lora_B.")]
            A = uploads[:, start:stop].view(len(uploads), shape[0], -1)  # [K, R, in]
            B = uploads[:, start_B:stop_B].view(len(uploads), -1, shape[0])  # [K, out, R]
            # the rule's new factors of the layer, and what it adds to the frozen weight; _new_A draws a new A for flora
            layer = COMBINATIONS[self.name](Factors(A, B, weights, self._new_A(context, name, A)))
            new[start:stop], new[start_B:stop_B] = layer.A.reshape(-1), layer.B.reshape(-1)
            if layer.added is not None:
                added[name] = layer.added
                # numbers by which clients receive the change: all factors, stacked, or fewer of the dense product
                stacked = int(self._count(context.ids, len(mean), Columns([(start, stop), (start_B, stop_B)])).sum())
                num_sent += stacked if self.name == "flora" else min(stacked, layer.added.numel())
        if self.backbone is not None and context.changes_state:  # flora and fedex change the frozen weights
            self.backbone.add(added, num_sent)
        return new

    def _new_A(self, context: RoundContext, name: str, like: Tensor) -> Callable[[], Tensor]:
        """Return a function that draws a new factor A as at the beginning: uniform up to 1 / sqrt(in).

        Args:
            context: The round, a part of the key of the random numbers.
            name: Name of the parameter A.
            like: The factors of the clients, for shape and device.  # [K, R, in]
        """

        def draw() -> Tensor:
            bound = 1 / math.sqrt(like.shape[2])
            random = rng.generator(self.seed, "lora_sync", name, context.round)
            return torch.from_numpy(random.uniform(-bound, bound, like.shape[1:])).to(like)

        return draw

    # -- messages ----------------------------------------------------------------------------------------
    def numbers(self, context: RoundContext, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how many numbers each client sends or receives for those tensors of which the rule changes it.

        Args:
            context: The clients.
            tensors: Tensors that the server sends to all clients [n], or that they upload [K, n], by name.

        Returns:
            The numbers by name.  # [K] each
        """
        counts = {name: self._numbers(context, value) for name, value in tensors.items()}
        return {name: numbers for name, numbers in counts.items() if numbers is not None}

    def _numbers(self, context: RoundContext, value: Tensor) -> Tensor | None:
        """Return how many numbers each client sends or receives for one tensor.

        Args:
            context: The clients.
            value: A tensor that the server sends to all clients [n], or that they upload [K, n].

        Returns:
            The numbers [K]; None if the tensor is sent as it is.
        """
        is_download, n = value.dim() == 1, value.shape[-1]
        if value.dim() > 2 or not value.is_floating_point() or not self._factors_in(n).size:  # without factors
            return None
        num_sent = self._count(context.ids, n, Columns([(0, n)]))  # all columns that the client has  [K]
        if self.personal is not None:  # fedsa: clients keep their factors B
            return num_sent - self._count(context.ids, n, self._factors_in(n, "B"))
        if self.backbone is None or not is_download:
            return None
        # flora, fedex: clients also download the changes of the frozen weights
        missing = self.backbone.missing(context, self.model.message_layout(n))
        if self.name == "flora":  # new factors are drawn by the clients
            num_sent = num_sent - self._count(context.ids, n, self._factors_in(n))
        return num_sent + missing

    def _factors_in(self, length: int, factor: str = "AB") -> Columns:
        """Return the positions of the factors in a message of a length, without those that are not in it.

        Args:
            length: The length of the message.
            factor: "A", "B", or "AB" for both.
        """
        layout = self.model.message_layout(length)
        spans = {} if layout is None else layout.spans
        return Columns((start, stop) for name, (start, stop, _) in spans.items() if _is_factor(name, factor))

    def _count(self, ids: np.ndarray, length: int, columns: Columns) -> Tensor:
        """Return how many of some columns of a message each client has.

        Args:
            ids: The clients.  # [K]
            length: Number of columns of the message.
            columns: The columns to count.

        Returns:
            The numbers, which depend on the clients' LoRA ranks; all columns if ranks are equal.  # [K] int64
        """
        has = None if self.client_ranks is None else self.client_ranks.has(ids, length)
        return torch.full((len(ids),), columns.size) if has is None else columns.take(has).sum(1).cpu()

    # -- factors of clients ------------------------------------------------------------------------------
    def with_personal(self, ids: np.ndarray, rows: Tensor) -> Tensor:
        """Return rows with the clients' personal factors.

        Args:
            ids: The clients.  # [K]
            rows: Model parameters: one row for all clients [P], or one for each [K, P].

        Returns:
            The rows [K, P]; the rows themselves if all factors are shared.
        """
        if self.personal is None or self._personal_B is None:  # both are set with fedsa only
            return rows
        return self.personal.put(rows, self._personal_B[ids])

    def keep_personal(self, ids: np.ndarray, rows: Tensor) -> None:
        """Store the factors B that clients keep, after a training.  With other rules than fedsa, do nothing.

        Args:
            ids: The clients.  # [K]
            rows: Their trained rows, which contain the factors.  # [K, P]
        """
        if self.personal is not None and self._personal_B is not None:
            self._personal_B[ids] = self.personal.take(rows)

    def without_personal(self, value: Tensor) -> Tensor:
        """Return an upload with 0 in the columns of the factors B that clients keep (fedsa).

        Args:
            value: The uploaded rows.  # [K, n]

        Returns:
            A copy with zeros.  The tensor itself if the rule is not fedsa, or the tensor has other axes or no factors.
        """
        factors = (
            self._factors_in(value.shape[-1], "B") if self.personal is not None and value.dim() == 2 else Columns([])
        )
        return factors.put(value, torch.zeros_like(factors.take(value))) if factors.size else value


class Backbone:
    """The frozen weights of the adapted layers: their `initial` values, and `change`, the sum of what was added.

    State: the row stores "lora_sync/backbone", the sum of what was added [1, D]; "lora_sync/sent", how many numbers
    were sent so far to a client that took part in all rounds [1, 1]; "lora_sync/received", this number at each client's
    last download [N, 1].

    Args:
        model: The model, whose layers with LoRA have the attributes `base_layer` and `scale`.
        rows: Creates the states.
    """

    def __init__(self, model: FlatModel, rows: RowStore):
        names = [name for name in model.spans if ".lora_A." in name]
        layers = [model.module.get_submodule(name.partition(".lora_A.")[0]) for name in names]
        self.weights = {name: _frozen_weight(layer) for name, layer in zip(names, layers)}
        # layers whose weight is [in, out], as in GPT-2 of transformers
        self.transposed = {name for name, layer in zip(names, layers) if is_transposed_linear(layer.base_layer)}  # type: ignore
        self.scales = {name: float(layer.scale) for name, layer in zip(names, layers)}  # type: ignore[arg-type]
        self.initial = torch.cat([weight.detach().flatten().clone() for weight in self.weights.values()])  # [D]
        self.change = rows("lora_sync/backbone", torch.zeros_like(self.initial), count=1)
        count = torch.zeros(1, dtype=torch.float64, device=self.initial.device)
        self.num_sent, self.received = rows("lora_sync/sent", count, count=1), rows("lora_sync/received", count)
        self._applied: Tensor | None = None  # the store of `change` when the weights were set

    def restore(self) -> None:
        """Set the frozen weights in the model to initial values plus `change`, if they are not up to date.

        This is so after `change` was loaded from a checkpoint, or from the stored best round.
        """
        if self._applied is not self.change.store:
            self._set_weights()

    def _set_weights(self) -> None:
        """Overwrite the frozen weights in the model by their initial values plus `change`."""
        weights = self.initial + self.change[SERVER][0]  # [D]; SERVER: the only row of `change`
        with torch.no_grad():
            for weight, values in zip(self.weights.values(), weights.split([w.numel() for w in self.weights.values()])):
                weight.copy_(values.view_as(weight))
        self._applied = self.change.store  # loading a state replaces this tensor, so that `restore` notices it

    def add(self, added: dict[str, Tensor], num_sent: int) -> None:
        """Add products to the frozen weights.

        Args:
            added: The products without the factor s, by name of the parameter A.  Personal layers have none.
                # [out, in] each
            num_sent: How many numbers describe them.
        """
        parts = [torch.zeros(weight.numel(), device=self.initial.device) for weight in self.weights.values()]
        for i, name in enumerate(self.weights):
            if name in added:
                product = added[name].t() if name in self.transposed else added[name]  # stored as [in, out]
                parts[i] = (self.scales[name] * product.flatten()).to(self.initial)  # scales: s of each layer
        # the sum of what was added so far  [1, D]; SERVER: the only row
        self.change[SERVER] = self.change[SERVER] + torch.cat(parts)
        self.num_sent[SERVER] = self.num_sent[SERVER] + num_sent
        self._set_weights()

    def missing(self, context: RoundContext, layout: MessageLayout | None) -> Tensor:
        """Return how many numbers each client downloads for the weights to be those of the server, and record it.

        They are those of the rounds since its last download, or all changed weights if these are fewer.
        An evaluation (context.changes_state is False) is not recorded.

        Args:
            context: The clients.
            layout: The parameters in the message, among them the factors of all layers that are not personal.

        Returns:
            The numbers [K], on the host.
        """
        # the layers in the message; weights are named by the parameter A of their layer
        shared = () if layout is None else layout.spans.keys() & self.weights.keys()
        dense = sum(self.weights[name].numel() for name in shared)
        # num_sent: numbers of all rounds so far; received: that number at each client's last download.  At most `dense`
        # numbers are missing, because the server can send the weights themselves.
        missing = (self.num_sent[SERVER] - self.received[context.ids])[:, 0].clamp_max(dense)
        if context.changes_state:
            self.received[context.ids] = self.num_sent[SERVER].expand(len(context), 1)
        return missing.long().cpu()


def _frozen_weight(layer: torch.nn.Module) -> Tensor:
    """Return the frozen weight to which a layer with LoRA adds s B A.  # [out, ...]

    For nn.MultiheadAttention it is in_proj_weight, the weights of query, key and value as one matrix.

    Args:
        layer: The layer with LoRA, whose attribute base_layer is the adapted layer.
    """
    base = layer.base_layer
    joint = getattr(base, "in_proj_weight", None)
    return base.weight if joint is None else joint  # type: ignore[return-value, union-attr]


def _is_factor(name: str, factor: str) -> bool:
    """Return whether the parameter `name` is a LoRA factor A (factor="A"), B ("B"), or either of them ("AB")."""
    return any(f".lora_{letter}." in name for letter in factor)


def factor_spans(model: FlatModel, factor: str) -> list[tuple[int, int]]:
    """Return the columns of a row [P] that are LoRA factors, as (start, stop) pairs in ascending order.

    Args:
        model: The model.
        factor: "A" for the factors A, "B" for B, "AB" for both.
    """
    return [span for name, span in model.spans.items() if _is_factor(name, factor)]


# -- rules -----------------------------------------------------------------------------------------------
def flora(factors: Factors) -> Combined:
    """Combine one layer's factors by the rule flora.

    Returns:
        A newly drawn A, B = 0, and as `added` the mean of the clients' products B_i A_i.
    """
    return Combined(factors.new_A(), torch.zeros_like(factors.B[0]), factors.mean_product)


def flex(factors: Factors) -> Combined:
    """Combine one layer's factors by the rule flex.

    Returns:
        A and B, whose product B A is the best approximation of rank R to the mean of the clients' products B_i A_i.
        `added` is None.
    """
    rank = factors.A.shape[1]
    # in double precision on the host, so that resumed runs and all processes have equal bytes
    U, S, Vh = torch.linalg.svd(factors.mean_product.cpu(), full_matrices=False)
    A = torch.zeros_like(factors.A[0])  # a layer with fewer than R inputs or outputs has zeros at the end
    B = torch.zeros_like(factors.B[0])
    A[: len(S)], B[:, : len(S)] = Vh[:rank].to(A), (U * S)[:, :rank].to(B)
    return Combined(A, B)


def het(factors: Factors) -> Combined:
    """Return the means of the factors, weighted by the Frobenius norms of the products.

    If all products are 0, the weights are those of the mean.
    """
    # |B A|_F^2 = trace((B^T B) (A A^T)), without the dense product
    squares = ((factors.B.mT @ factors.B) * (factors.A @ factors.A.mT)).sum((1, 2))
    norms = squares.clamp_min(0).sqrt()  # [K]
    total = norms.sum()
    weights = torch.where(total > 0, norms / total.clamp_min(torch.finfo(norms.dtype).tiny), factors.weights)
    return Combined(*factors.means(weights))


def fedex(factors: Factors) -> Combined:
    """Combine one layer's factors by the rule fedex.

    Returns:
        The mean A and the mean B.  `added` is the mean of the clients' products B_i A_i, minus (mean B)(mean A).
    """
    A, B = factors.means(factors.weights)
    return Combined(A, B, factors.mean_product - B.double() @ A.double())


COMBINATIONS: dict[str, Callable[[Factors], Combined]] = {"flora": flora, "flex": flex, "het": het, "fedex": fedex}
