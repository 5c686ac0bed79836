"""Check of the model's head for methods that compute its outputs themselves."""

from __future__ import annotations

from torch import nn

from fedbench.algorithms.base import FlatModel
from fedbench.core.options import require


def require_linear_head(model: FlatModel) -> None:
    """Require a head that is a linear layer or a 1x1 convolution.

    Raises:
        ConfigError: The model has another head, or none.
    """
    head = getattr(model.module, "head", None)
    is_pixelwise = isinstance(head, nn.Conv2d) and head.kernel_size == (1, 1) and head.groups == 1
    require(
        isinstance(head, nn.Linear) or is_pixelwise,
        "the method computes outputs of the head itself: it needs a model whose module named head is a linear layer or "
        f"a 1x1 convolution, and this model's head is {'missing' if head is None else type(head).__name__}",
    )
