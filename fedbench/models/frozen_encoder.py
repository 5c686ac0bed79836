"""The interface of models with a frozen encoder.  Clients train on its features instead of the inputs."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from fedbench.core.rng import RowRandom
from fedbench.core.split import Split
from fedbench.data.base import Arrays


@runtime_checkable
class FrozenEncoder(Protocol):
    """A model, such as a prompt for CLIP, whose frozen encoder reads every sample once, before the first round."""

    def prepare(self, arrays: Arrays, split: Split, device: torch.device) -> Arrays:
        """Return the data set with features as inputs, for the samples of the clients.

        Args:
            arrays: The data set.
            split: The samples of each client.
            device: Where to compute the features.

        Returns:
            The data set, whose inputs are features, or what `training_view` and `evaluation_view` compute them from.
        """
        ...

    def training_view(self, x: Any, random: RowRandom) -> Any:
        """Return the model's inputs for a training batch, for example the features of a random crop of each image.

        Args:
            x: Inputs of the data set that `prepare` returned, [k, B, ...].
            random: Random numbers of each client.
        """
        ...

    def evaluation_view(self, x: Any) -> Any:
        """Return the model's inputs for a batch of an evaluation, for example the features of each whole image.

        Args:
            x: Inputs of the prepared data set, [..., B, ...].
        """
        ...
