"""What a model with a frozen part that reads the inputs offers: its features stand in the place of the inputs."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from fedbench.core.rng import RowRandom
from fedbench.core.split import Split
from fedbench.data.base import Arrays


@runtime_checkable
class FrozenEncoder(Protocol):
    """A model (a prompt for CLIP) whose frozen encoder sees every sample once, before the first round."""

    def prepare(self, arrays: Arrays, split: Split, device: torch.device) -> Arrays:
        """The data set with its inputs replaced by what the encoder makes of them, for the samples that some client
        has."""
        ...

    def training_view(self, x: Any, random: RowRandom) -> Any:
        """What a training batch x [k, B, ...] of these inputs shows the model; random: of each client."""
        ...

    def evaluation_view(self, x: Any) -> Any:
        """What any other batch shows the model."""
        ...
