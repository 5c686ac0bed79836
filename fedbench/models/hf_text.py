"""Text encoders of Hugging Face's transformers with a linear head, for text classification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.models._backbone import ATTENTION_LAYERS, library_errors, refuse_options, require_name

REMEDY = "Set a folder that save_pretrained of transformers wrote for a text encoder"
READS_FLAT_MASKS = ("deberta", "deberta-v2")  # networks that expand a mask [B, T] by themselves, also in torch.vmap


class HFText(nn.Module):
    """{"text": int64 [B, T], "mask": int64 [B, T]} -> [B, C], where mask is 1 for tokens and 0 for padding.

    Args:
        name: A model_type of transformers, such as bert or distilbert, for random weights; null with weights.
        weights: A folder of save_pretrained, whose head is not used.  null: random weights.
        options: Changes of the configuration, such as hidden_size and num_hidden_layers; without weights only.
        pooling: The features that the head receives: those of the first token, or the mean over all tokens.

    Attributes:
        body: The encoder.
        head: The linear layer F -> C.
    """

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        name: str | None = None,
        weights: str | None = None,
        options: dict[str, Any] | None = None,
        pooling: Literal["first", "mean"] = "first",
    ):
        super().__init__()
        require(
            (name is None) != (weights is None),
            "model=hf_text needs either model.weights, a folder of transformers, or model.name for random weights, but "
            f"model.weights={weights} and model.name={name}: set one of them",
        )
        refuse_options(options, weights)
        shapes = input_shape if isinstance(input_shape, Mapping) else {"inputs": tuple(input_shape)}
        require(
            shapes.keys() == {"text", "mask"},
            "model=hf_text needs the inputs text and mask, but the data set gives "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())}: choose dataset=text_csv",
        )
        body: Any = _load(str(weights)) if name is None else _new(name, options or {})
        if getattr(body, "pooler", None) is not None:
            body.pooler = None  # its output is not used
        length, positions = shapes["text"][0], getattr(body.config, "max_position_embeddings", None)
        require(
            positions is None or length <= positions,
            f"model.{'weights' if name is None else 'name'}={weights or name} reads at most {positions} tokens, but "
            f"dataset.length={length}: lower dataset.length",
        )
        self.pooling = pooling
        self.body = body.float()
        self.head = nn.Linear(body.config.hidden_size, num_classes)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, C] for {"text": int64 [B, T], "mask": int64 [B, T]}, where mask is 0 for padding.

        By the option pooling, the head reads the outputs of the first token, or the mean over tokens without padding.
        """
        text, mask = inputs["text"], inputs["mask"]
        z = self.body(input_ids=text, attention_mask=self._attention_mask(mask)).last_hidden_state  # [B, T, F]
        if self.pooling == "first":  # the head reads the first token, else the mean over tokens
            return self.head(z[:, 0])
        is_token = mask[..., None].to(z.dtype)
        return self.head((z * is_token).sum(1) / is_token.sum(1).clamp_min(1))  # 0 for a text without tokens

    def _attention_mask(self, mask: Tensor) -> Tensor:
        """Return the mask [B, T] as the encoder needs it, by default as numbers to add to scores, [B, 1, T, T].

        transformers expands a mask [B, T] in a way that torch.vmap does not support.
        """
        if self.body.config.model_type in READS_FLAT_MASKS:  # these expand it in a way that torch.vmap supports
            return mask
        added = torch.where(mask[:, None, None] == 0, torch.finfo(torch.float32).min, 0.0)
        return added.expand(-1, 1, mask.shape[1], -1)

    def sublayers(self) -> dict[str, list[str]]:
        """Return the names of the layers to which an adapter can be added, by the kind of layer.

        Returns:
            Names of the linear layers of attention, for the key "attention".
        """
        linear = [name for name, module in self.body.named_modules() if isinstance(module, nn.Linear)]
        is_attention = [bool({"self_attn", *ATTENTION_LAYERS} & set(name.split("."))) for name in linear]
        return {"attention": [f"body.{name}" for name, chosen in zip(linear, is_attention) if chosen]}


def _new(name: str, options: dict[str, Any]) -> nn.Module:
    """Return an encoder with random weights.

    Args:
        name: A model_type of transformers.
        options: Changes of the configuration.

    Raises:
        ConfigError: There is no such encoder, or it cannot be built.
    """
    transformers, names = _transformers()
    require_name(name, names, "transformers for texts")
    with library_errors(f"model.name={name}", "be built", "Change model.options or the network"):
        config: Any = transformers.AutoConfig.for_model(name, **options)
        return transformers.AutoModel.from_config(config, attn_implementation="eager")  # as torch.vmap requires


def _load(weights: str) -> nn.Module:
    """Return the encoder of a folder.

    Args:
        weights: The folder, the value of model.weights.

    Raises:
        ConfigError: It is no folder of a text encoder, or its weights are incomplete.
    """
    transformers, names = _transformers()
    folder = Path(weights)
    require(
        (folder / "config.json").is_file(),
        f"model.weights={weights} is {'a folder without config.json' if folder.is_dir() else 'not a folder'}. {REMEDY}",
    )
    with library_errors(f"model.weights={weights}", "be read", REMEDY):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = config.model_type
        loaded: Any = transformers.AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="eager",
        )
    require(kind in names, f"model.weights={weights} has the network {kind}, which is no text encoder. {REMEDY}")
    network, info = loaded
    # pooler: a layer that `forward` does not use
    missing = [name for name in sorted(info["missing_keys"]) if not name.startswith("pooler.")]
    require(
        not missing,
        f"model.weights={weights} lacks the weights {', '.join(missing[:3])}"
        f"{' and others' * (len(missing) > 3)}. {REMEDY}",
    )
    return network


def _transformers() -> tuple[Any, Any]:
    """Return the library, and a dict whose keys are the model types of its text encoders, such as "bert".

    Raise ConfigError if it is not installed.
    """
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except ImportError as error:
        raise ConfigError(
            "model=hf_text needs the package transformers, which is not installed: run pip install transformers"
        ) from error
    return transformers, MODEL_FOR_MASKED_LM_MAPPING_NAMES  # encoders are those that can predict masked words
