"""What methods ask of a model's head that compute with it by themselves."""

from __future__ import annotations

from torch import nn

from fedbench.algorithms.base import FlatModel
from fedbench.core.options import require


def require_linear_head(model: FlatModel) -> None:
    """Refuse a head that is neither linear nor a convolution of single pixels, which is linear over channels."""
    head = getattr(model.module, "head", None)
    is_pixelwise = isinstance(head, nn.Conv2d) and head.kernel_size == (1, 1) and head.groups == 1
    require(
        isinstance(head, nn.Linear) or is_pixelwise,
        "the method needs a model whose module named head is a linear layer or a convolution of single pixels",
    )
