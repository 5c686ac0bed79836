"""No adapter: all of a model's own parameters learn."""

from __future__ import annotations

from torch import nn

from fedbench.adapters.base import Adapter


class NoAdapter(Adapter):
    """Leaves a model as it is."""

    def __init__(self) -> None:
        super().__init__((), ())

    def insert(self, model: nn.Module) -> list[str]:
        """Nothing is new."""
        return []
