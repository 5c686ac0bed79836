"""A name for the residual stream, in models that compute their blocks outside of `forward`."""

from __future__ import annotations

from torch import nn


class Stream(nn.Identity):
    """[..., width] -> [..., width], unchanged: a layer that taps, captures and adapters can name."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
