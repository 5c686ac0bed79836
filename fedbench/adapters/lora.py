"""LoRA: low-rank updates of linear layers, convolutions and attention.

Hu et al., ICLR 2022:  y = W x + b + (alpha / r) B A x,  A [r, in], B [out, r].  B is initialized to 0, so a newly
adapted model has the outputs of the original one.  As in peft, for a convolution A is a convolution to r channels with
the same kernel, and B a 1x1 convolution; in nn.MultiheadAttention the joint matrix of queries, keys and values has one
product, and the output projection another.
If ranks differ between clients, all products have the factor alpha / max_i r_i.  HetLoRA (Cho et al., EMNLP 2024)
writes W + B_i A_i without a factor.  Only with one factor is a client's product the truncation of the server's.
Limits: the mean of the clients' B times the mean of their A is not the mean of their B A (docs/federated_adapters.md).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.adapters.base import Adapter
from fedbench.channel.lora_sync import Sync
from fedbench.core.options import Count, Positive, check_each, require
from fedbench.nn.transposed_linear import is_transposed_linear


class LoRA(Adapter):
    """Adapter that adds products of rank `rank`, multiplied by alpha / rank, to the weights of linear layers.

    Args:
        places: Patterns of layer names; of these, linear layers, transformers' Conv1D and nn.MultiheadAttention are
            adapted.
        rank: Rank r of the product, or a list with the rank r_i of each client.
        alpha: The product is multiplied by alpha / r, where r is the largest rank of a list.
        convolutions: Whether convolutions are adapted too, except grouped ones.
        train: Patterns of parameters that are trained besides the products.
        sync: How the server combines the clients' products (channel/lora_sync.py).  ffa freezes A.
    """

    def __init__(
        self,
        places: Sequence[str] = ("*",),
        rank: Count | list[Count] = 8,
        alpha: Positive = 8.0,
        convolutions: bool = False,
        train: Sequence[str] = ("head.*",),
        sync: Sync = "average",
    ):
        super().__init__(places, train)
        self.sync = sync
        self.ranks = None if isinstance(rank, int) else list(rank)  # [N]
        self.rank = rank if isinstance(rank, int) else max(rank)  # of the rows
        self.alpha, self.convolutions = alpha, convolutions
        if self.ranks and min(self.ranks) < max(self.ranks):
            self.client_ranks = self.ranks

    def check(self, num_clients: int) -> None:
        """Raise ConfigError unless the option `rank` is one number or lists one for each of the N training clients.

        Args:
            num_clients: Number of training clients, N.
        """
        check_each("adapter.rank", self.ranks, num_clients, what="ranks")  # what: the word in the message

    def add(self, model: nn.Module) -> list[str]:
        """Adapt the layers; with the option sync=ffa, freeze the factors A of their products B A.

        Args:
            model: The model, which is changed.

        Returns:
            Names of the new parameters that are trained.
        """
        names = super().add(model)
        if self.sync != "ffa":
            return names
        for name in names:
            model.get_parameter(name).requires_grad_(".lora_A." not in name)
        return [name for name in names if model.get_parameter(name).requires_grad]

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """Return a layer with a low-rank product added to its weight.

        Args:
            layer: The layer.
            name: Unused.

        Returns:
            The adapted layer.  None: it is neither a linear layer, nor nn.MultiheadAttention with a joint matrix, nor,
            with the option convolutions, an ungrouped convolution.
        """
        if type(layer) is nn.Linear:
            return LoRALinear(layer, self.rank, self.alpha)
        if is_transposed_linear(layer):
            return LoRATransposedLinear(layer, self.rank, self.alpha)
        if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            return LoRAAttention(layer, self.rank, self.alpha)
        if self.convolutions and type(layer) is nn.Conv2d and layer.groups == 1:
            return LoRAConv2d(layer, self.rank, self.alpha)
        return None

    def peft_config(self, layers: Mapping[str, nn.Module]) -> dict[str, Any] | None:
        """Return the contents of peft's LoraConfig, by which the library peft reads the adapted layers.

        Args:
            layers: The adapted layers by name.

        Returns:
            The configuration, or None if a layer is not one that peft adapts (of a subclass).

        Raises:
            ConfigError: An adapted layer is nn.MultiheadAttention.
        """
        attention = [name for name, layer in layers.items() if isinstance(layer, LoRAAttention)]
        require(
            not attention,
            f"the layer {attention[0] if attention else ''} is an nn.MultiheadAttention, whose LoRA the library peft "
            "computes wrongly (version 0.21 adds its output's product twice): export with --merged instead of --peft",
        )
        kinds = {type(layer) for layer in layers.values()}
        if not kinds <= {LoRALinear, LoRATransposedLinear, LoRAConv2d}:
            return None
        # peft corrects this value in layers of the other kind, with a warning
        fan_in_fan_out = {"fan_in_fan_out": True} if kinds == {LoRATransposedLinear} else {}
        rank = len(next(iter(layers.values())).lora_A.weight)  # type: ignore[union-attr, arg-type]
        return {
            "peft_type": "LORA",
            "r": rank,  # of this client
            # peft multiplies by alpha / r, and fedbench by alpha / self.rank, the same for all clients
            "lora_alpha": self.alpha if rank == self.rank else self.alpha * rank / self.rank,
            # a regular expression, because peft matches the names in a list as suffixes
            "target_modules": "|".join(re.escape(name) for name in layers),
            **fan_in_fan_out,
        }


class _WithProduct(nn.Module):
    """A layer plus (alpha / r) times lora_B after lora_A.  Exported files need peft's names."""

    def __init__(self, layer: nn.Module, a: nn.Module, b: nn.Module, scale: float):
        super().__init__()
        self.base_layer, self.scale = layer, scale
        self.lora_A, self.lora_B = a, b
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))  # type: ignore[arg-type]
        nn.init.zeros_(b.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + (alpha / r) B A x for inputs x [..., in], or x [B, in, H, W] of a convolution."""
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))

    @property
    def weight(self) -> Tensor:
        """The adapted weight W + (alpha / r) B A in the shape of W, for modules that do not call the layer."""
        product = self.lora_B.weight.flatten(1) @ self.lora_A.weight.flatten(1)  # type: ignore[operator, union-attr]
        return self.base_layer.weight + self.scale * product.view_as(self.base_layer.weight)  # type: ignore

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias b [out] of the original layer, or None if it has none."""
        return self.base_layer.bias  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original layer that this module lacks, such as the stride of a convolution.

        Raises:
            AttributeError: The original layer lacks it, too.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":  # not set yet
                raise
            return getattr(self.base_layer, name)

    def merged(self) -> nn.Module:
        """Return a copy of the original layer whose weight is W + (alpha / r) B A; this layer does not change."""
        layer: Any = copy.deepcopy(self.base_layer)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
        return layer


def cut_to_rank(model: nn.Module, rank: int) -> None:
    """Keep only the first rows of A and columns of B in all LoRA layers, in place.

    Args:
        model: The model.
        rank: How many are kept, at most the rank of the layers.
    """
    for layer in model.modules():
        if isinstance(layer, _WithProduct):
            layer.lora_A.weight = nn.Parameter(layer.lora_A.weight[:rank].detach().clone())  # type: ignore[index]
            layer.lora_B.weight = nn.Parameter(layer.lora_B.weight[:, :rank].detach().clone())  # type: ignore[index]


class LoRALinear(_WithProduct):
    """Adapted linear layer [..., in] -> [..., out], with A [r, in] and B [out, r]."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        down = nn.Linear(layer.in_features, rank, bias=False)
        super().__init__(layer, down, nn.Linear(rank, layer.out_features, bias=False), alpha / rank)


class LoRATransposedLinear(_WithProduct):
    """Adapted Conv1D of transformers [..., in] -> [..., out] with the weight [in, out]; A [r, in] and B [out, r]."""

    def __init__(self, layer: Any, rank: int, alpha: float):
        inputs, outputs = layer.weight.shape
        down, up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        super().__init__(layer, down, up, alpha / rank)

    @property
    def weight(self) -> Tensor:
        """The weight W + (alpha / r) (B A)^T.  # [in, out]"""
        product = self.lora_B.weight @ self.lora_A.weight  # type: ignore[operator]
        return self.base_layer.weight + self.scale * product.t()  # type: ignore[operator]


class LoRAConv2d(_WithProduct):
    """Adapted convolution [B, in, H, W] -> [B, out, H', W'], with A [r, in, kh, kw] and B [out, r, 1, 1]."""

    def __init__(self, layer: nn.Conv2d, rank: int, alpha: float):
        windows: Any = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        down = nn.Conv2d(layer.in_channels, rank, *windows, bias=False, padding_mode=layer.padding_mode)
        super().__init__(layer, down, nn.Conv2d(rank, layer.out_channels, 1, bias=False), alpha / rank)


class LoRAAttention(_WithProduct):
    """Adapted nn.MultiheadAttention: A [r, d] and B [3 d, r] for in_proj_weight, and an adapted output projection."""

    def __init__(self, layer: nn.MultiheadAttention, rank: int, alpha: float):
        d = layer.embed_dim
        down, up = nn.Linear(d, rank, bias=False), nn.Linear(rank, 3 * d, bias=False)
        super().__init__(layer, down, up, alpha / rank)
        layer.out_proj = LoRALinear(layer.out_proj, rank, alpha)  # type: ignore[assignment]

    @property
    def in_proj_weight(self) -> Tensor:
        """The joint weight of queries, keys and values, W + (alpha / r) B A.  # [3 d, d]"""
        product = self.lora_B.weight @ self.lora_A.weight  # type: ignore[operator]
        return self.base_layer.in_proj_weight + self.scale * product  # type: ignore[operator]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the outputs of nn.MultiheadAttention for the same arguments, with the adapted weights."""
        weight = {"in_proj_weight": self.in_proj_weight}
        return torch.func.functional_call(self.base_layer, weight, inputs, options)

    def merged(self) -> nn.Module:
        """Return a copy of the original nn.MultiheadAttention, with the adapted values as weights of both projections.

        The projections are those of queries, keys and values (in_proj_weight), and of the output.
        """
        layer: Any = copy.deepcopy(self.base_layer)
        layer.out_proj = layer.out_proj.merged()
        with torch.no_grad():
            layer.in_proj_weight.copy_(self.in_proj_weight)
        return layer
