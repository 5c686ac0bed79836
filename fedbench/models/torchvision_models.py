"""Networks of torchvision by name.  `head` replaces their classifier."""

from __future__ import annotations

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.models._backbone import Backbone, load_file, require_name


class TorchvisionModel(Backbone):
    """[B, 1 or 3, H, W] -> [B, C].

    Args:
        name: A name of torchvision.models, such as resnet18 or vit_b_16.
        weights: null, or a file of a state dict, whose classifier is not used.
        options: Options of the network's constructor.  image_size of a ViT is that of the data set.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        name: str = "resnet18",
        weights: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        try:
            from torchvision import models
        except ImportError as error:
            raise ConfigError(
                "model=torchvision needs the package torchvision, which is not installed: run pip install torchvision"
            ) from error
        require_name(name, models.list_models(module=models), "torchvision.models")
        arguments = {"weights": None, **(options or {})}
        if name.startswith("vit_"):
            arguments.setdefault("image_size", input_shape[-1])
        if name in ("googlenet", "inception_v3"):
            arguments |= {"aux_logits": False, "init_weights": True}  # auxiliary logits are not supported

        def build() -> Any:
            return models.get_model(name, **arguments)

        super().__init__(build, f"model.name={name}", input_shape, num_classes, channels=3, load=load_file(weights))
