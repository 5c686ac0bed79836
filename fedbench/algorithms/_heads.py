"""Check of the model's head for methods that compute its outputs themselves."""

from __future__ import annotations

from torch import nn

from fedbench.algorithms.base import FlatModel
from fedbench.core.options import require


def require_linear_head(model: FlatModel, name: str) -> None:
    """Require a head that is a linear layer or a 1x1 convolution.

    Args:
        model: The model.
        name: The method's name in the option algorithm, for the message.

    Raises:
        ConfigError: The model has another head, or none.
    """
    head = getattr(model.module, "head", None)
    is_pixelwise = isinstance(head, nn.Conv2d) and head.kernel_size == (1, 1) and head.groups == 1
    require(
        isinstance(head, nn.Linear) or is_pixelwise,
        f"algorithm={name} computes the head itself, so the module named head must be a linear layer or a 1x1 "
        f"convolution, but it is {'missing' if head is None else f'a {type(head).__name__}'}: "
        "choose another model, or make its last layer a torch.nn.Linear named head",
    )
