"""A named layer for the residual stream, in models that compute their blocks outside of `forward`."""

from __future__ import annotations

from torch import nn


class Stream(nn.Identity):
    """[..., width] -> [..., width], unchanged: a layer for hooks, captures and adapters to name."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
