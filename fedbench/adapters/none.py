"""No adapter: all parameters of the model are trained."""

from __future__ import annotations

from torch import nn

from fedbench.adapters.base import Adapter


class NoAdapter(Adapter):
    """Adapter that does not change the model."""

    def __init__(self) -> None:
        super().__init__((), ())

    def insert(self, model: nn.Module) -> list[str]:
        """Leave the model unchanged, and return [], the names of new parameters; so all parameters are trained."""
        return []
