"""Image classifiers of Hugging Face's transformers, their classifier replaced by `head`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.models._backbone import Backbone, classifier_of, require_name


class HFModel(Backbone):
    """[B, channels, H, W] -> [B, C].

    name: a model_type of transformers, such as vit, swin or convnext.  weights: null for random ones of the
    configuration that options change (hidden_size, num_hidden_layers), or a folder as save_pretrained writes it, whose
    configuration counts and whose classifier is left out.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        name: str = "vit",
        weights: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        try:
            from transformers import AutoConfig, AutoModelForImageClassification
            from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as KNOWN
        except ImportError as error:
            raise ConfigError("model=hf needs transformers: pip install transformers") from error
        # eager: what torch.vmap and autograd can follow
        how = {"attn_implementation": "eager"}
        channels = input_shape[0]
        if weights is None:
            require_name(name, KNOWN, "transformers for images")
            given = {"image_size": input_shape[-1], "num_channels": channels, **(options or {})}
            known: Any = KNOWN
            channels, classes = given["num_channels"], known[name]
            kind = classes if isinstance(classes, str) else classes[0]  # DeiT has another one, with a teacher

            def make() -> nn.Module:
                config: Any = AutoConfig.for_model(name, architectures=[kind], **given)  # type: ignore
                return AutoModelForImageClassification.from_config(config, **how)
        else:
            folder = Path(weights)
            require((folder / "config.json").is_file(), f"model.weights={weights}: there is no config.json in it")
            channels = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "num_channels", 3)

            def make() -> nn.Module:
                network, info = AutoModelForImageClassification.from_pretrained(
                    folder, local_files_only=True, output_loading_info=True, **how
                )
                drawn = [n for n in sorted(info["missing_keys"]) if n.rpartition(".")[0] != classifier_of(network)]
                require(not drawn, f"model.weights={weights} is not of this network: it lacks {', '.join(drawn[:3])}")
                return network

        key = f"model.name={name}" if weights is None else f"model.weights={weights}"
        super().__init__(make, key, input_shape, num_classes, channels, _logits)


def _logits(out: Any) -> Tensor:
    """What stands for the logits in transformers' output, without a classifier the features."""
    return out if isinstance(out, Tensor) else out.logits
