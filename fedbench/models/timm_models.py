"""Networks of timm by name.  `head` replaces their classifier."""

from __future__ import annotations

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.models._backbone import Backbone, load_file, require_name


class TimmModel(Backbone):
    """[B, channels, H, W] -> [B, C].

    Args:
        name: A name of timm.list_models(), such as resnet10t or vit_tiny_patch16_224.
        weights: null, or a file of a state dict, whose classifier is not used.  With weights, the network has 3 input
            channels.
        options: Options of the network's constructor.  img_size is that of the data set if the network has it.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        name: str = "vit_tiny_patch16_224",
        weights: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        try:
            import timm
        except ImportError as error:
            raise ConfigError(
                "model=timm needs the package timm, which is not installed: run pip install timm"
            ) from error
        require_name(name, timm.list_models(), "timm")
        channels = 3 if weights is not None else input_shape[0]
        arguments = {"in_chans": channels, **(options or {})}

        def build() -> Any:
            try:
                return timm.create_model(name, **{"img_size": tuple(input_shape[1:]), **arguments})
            except TypeError:  # convolutional networks have no img_size
                return timm.create_model(name, **arguments)

        super().__init__(build, f"model.name={name}", input_shape, num_classes, channels, load=load_file(weights))
