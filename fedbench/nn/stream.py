"""A named layer for the residual stream, in models that compute their blocks outside of `forward`."""

from __future__ import annotations

from torch import nn


class Stream(nn.Identity):
    """Returns its input [..., width].  Hooks, activations and adapters can refer to it by name.

    Args:
        width: Length of the last axis of its input.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width
