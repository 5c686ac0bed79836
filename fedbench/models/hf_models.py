"""Image classifiers of Hugging Face's transformers.  `head` replaces their classifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.models._backbone import Backbone, classifier_of, library_errors, refuse_options, require_name


class HFModel(Backbone):
    """[B, channels, H, W] -> [B, C].

    Args:
        name: A model_type of transformers, such as vit, swin or convnext.
        weights: null, or a folder of save_pretrained, whose configuration is used and whose classifier is not.
        options: Changes of the configuration, such as hidden_size and num_hidden_layers; without weights only.
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
            from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        except ImportError as error:
            raise ConfigError(
                "model=hf needs the package transformers, which is not installed: run pip install transformers"
            ) from error
        require(
            not isinstance(input_shape, Mapping),
            f"model=hf needs images, but the data set gives {', '.join(map(str, input_shape))}: choose "
            "model=hf_text for dataset=text_csv, or model=hf_causal for language models",
        )
        refuse_options(options, weights)
        attention = {"attn_implementation": "eager"}  # torch.vmap and autograd support no other
        channels = input_shape[0]
        if weights is None:
            known_models: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
            require_name(name, known_models, "transformers for images")
            arguments = {"image_size": input_shape[-1], "num_channels": channels, **(options or {})}
            channels = arguments["num_channels"]
            classes = known_models[name]
            architecture = classes if isinstance(classes, str) else classes[0]  # DeiT's second class has a teacher

            def build() -> nn.Module:
                """Return a new network of the kind `name`, such as "vit", with random weights and a classifier."""
                new_config: Any = AutoConfig.for_model(name, architectures=[architecture], **arguments)  # type: ignore
                return AutoModelForImageClassification.from_config(new_config, **attention)
        else:
            folder = Path(weights)
            require(
                (folder / "config.json").is_file(),
                f"model.weights={weights} is {'a folder without config.json' if folder.is_dir() else 'not a folder'}: "
                "set a folder that save_pretrained of transformers wrote, or null for random weights",
            )
            remedy = "Set a folder that save_pretrained of transformers wrote for an image classifier"
            with library_errors(f"model.weights={weights}", "be read", remedy):
                config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            channels = getattr(config, "num_channels", 3)

            def build() -> nn.Module:
                """Return the network in `folder`, the value of model.weights.

                Raise ConfigError if the folder lacks weights other than those of the classifier.
                attention: the option of transformers for an attention that torch.vmap supports.
                """
                network, info = AutoModelForImageClassification.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **attention
                )
                missing = [n for n in sorted(info["missing_keys"]) if n.rpartition(".")[0] != classifier_of(network)]
                require(
                    not missing,
                    f"model.weights={weights} is not of this network: it lacks {', '.join(missing[:3])}. {remedy}",
                )
                return network

        key = f"model.name={name}" if weights is None else f"model.weights={weights}"
        super().__init__(build, key, input_shape, num_classes, channels, features_of=_logits)


def _logits(output: Any) -> Tensor:
    """Return the logits of an output of transformers: a tensor itself, or its attribute ``logits``.

    They are the features, because the classifier is replaced by the identity.
    """
    return output if isinstance(output, Tensor) else output.logits
