"""Networks of timm by name, their classifier replaced by `head`."""

from __future__ import annotations

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.models._backbone import Backbone, load_file, require_name


class TimmModel(Backbone):
    """[B, channels, H, W] -> [B, C].

    name: of timm.list_models(), such as resnet10t or vit_tiny_patch16_224.  weights: null, or a file of a state dict,
    whose classifier is left out; such networks read 3 channels.  options: of the network's constructor (img_size is the
    data set's, where the network takes one).
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
            raise ConfigError("model=timm needs timm: pip install timm") from error
        require_name(name, timm.list_models(), "timm")
        channels = 3 if weights is not None else input_shape[0]
        given = {"in_chans": channels, **(options or {})}

        def make() -> Any:
            size = given.get("img_size", tuple(input_shape[1:]))
            try:
                return timm.create_model(name, **{"img_size": size, **given})
            except TypeError:  # a convolutional network takes images of any size, and no such argument
                return timm.create_model(name, **given)

        super().__init__(make, f"model.name={name}", input_shape, num_classes, channels, load=load_file(weights))
