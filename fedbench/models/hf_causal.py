"""Causal language models of Hugging Face's transformers, from a folder on the disk or with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.models._backbone import ATTENTION_LAYERS, library_errors, refuse_options, require_name
from fedbench.models._texts import text_length
from fedbench.nn.transposed_linear import is_transposed_linear

ATTENTION = (*ATTENTION_LAYERS, "self_attn")  # names of attention layers in transformers
REMEDY = "Set a folder that save_pretrained of transformers wrote for a causal language model"
NEEDS_TRANSFORMERS = (
    "model=hf_causal needs the package transformers, which is not installed: run pip install transformers"
)


class HFCausal(nn.Module):
    """{"text": int64 [B, T]} -> logits [B, T, C] of the next token at each position.

    No position depends on a later one, so padding at the end of a text needs no mask.

    Args:
        name: A model_type of transformers, such as llama or gpt2, for random weights; null with weights.
        weights: A folder of save_pretrained.  null: random weights.
        options: Changes of the configuration, such as hidden_size and num_hidden_layers; without weights only.

    Attributes:
        network: The network of transformers.
        library_module: The attribute with the network, to which exported adapters belong.
        peft_task: The kind of the network in the library peft.
    """

    library_module: ClassVar[str] = "network"
    peft_task: ClassVar[str] = "CAUSAL_LM"

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        name: str | None = None,
        weights: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        super().__init__()
        require(
            (name is None) != (weights is None),
            "model=hf_causal needs either model.weights, a folder of transformers, or model.name for random weights, "
            f"but model.weights={weights} and model.name={name}: set one of them",
        )
        refuse_options(options, weights)
        key = f"model.weights={weights}" if name is None else f"model.name={name}"
        length = text_length(input_shape, key)
        network: Any = _load(str(weights)) if name is None else _new(name, num_classes, length, options or {})
        self.network = network.float()
        self.num_classes = num_classes
        size, positions = network.config.vocab_size, getattr(network.config, "max_position_embeddings", length)
        require(
            num_classes <= size,
            f"{key} has {size:,} tokens, but the data set has {num_classes:,}: set dataset.tokenizer to the folder of "
            "the model",
        )
        require(
            length <= positions,
            f"{key} reads at most {positions:,} tokens, but dataset.length={length:,}: lower dataset.length",
        )

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            inputs: {"text": int64 token ids [B, T]}.

        Returns:
            Logits of the data set's C tokens, the first ones of the network's.  # [B, T, C]
        """
        logits = self.network(input_ids=inputs["text"], use_cache=False).logits  # [B, T, tokens of the network]
        return logits[..., : self.num_classes]

    def sublayers(self) -> dict[str, list[str]]:
        """Return the names of the layers to which an adapter can be added, by the kind of layer.

        Returns:
            Names of modules for the keys "attention" (projections of queries, keys, values and outputs), "mlp" (whole
            mlps and their linear layers) and "block".
        """
        # from name to (name of the parent, ".", last part of the name, module)
        modules = {name: (*name.rpartition("."), module) for name, module in self.named_modules()}
        mlps = [name for name, (_, _, last, _) in modules.items() if last == "mlp"]
        linear = {  # from the name of a linear layer to that of its parent
            name: parent
            for name, (parent, _, _, module) in modules.items()
            if isinstance(module, nn.Linear) or is_transposed_linear(module)
        }
        return {
            "attention": [name for name, parent in linear.items() if parent.rpartition(".")[2] in ATTENTION],
            "mlp": [*mlps, *(name for name, parent in linear.items() if parent in mlps)],
            "block": [name.rpartition(".")[0] for name in mlps],  # a block has an mlp
        }


def _new(name: str, num_classes: int, length: int, options: dict[str, Any]) -> nn.Module:
    """Return a network with random weights.

    Args:
        name: A model_type of transformers.
        num_classes: The number of tokens.
        length: T, the number of positions unless the options say otherwise.
        options: Changes of the configuration.

    Raises:
        ConfigError: There is no such network, or it cannot be built.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ConfigError(NEEDS_TRANSFORMERS) from error
    require_name(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "transformers for causal language models")  # type: ignore
    with library_errors(f"model.name={name}", "be built", "Change model.options or the network"):
        values = {"vocab_size": num_classes, "max_position_embeddings": length, **options}
        config: Any = AutoConfig.for_model(name, **values)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # as torch.vmap requires


def _load(weights: str) -> nn.Module:
    """Return the network of a folder.

    Args:
        weights: The folder, the value of model.weights.

    Raises:
        ConfigError: It is no folder of a causal language model, or its weights are incomplete.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(NEEDS_TRANSFORMERS) from error
    folder = Path(weights)
    require(
        (folder / "config.json").is_file(),
        f"model.weights={weights} is {'a folder without config.json' if folder.is_dir() else 'not a folder'}. {REMEDY}",
    )
    with library_errors(f"model.weights={weights}", "be read", REMEDY):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="eager",
        )
    network, info = loaded
    missing = sorted(info["missing_keys"])
    require(
        not missing,
        f"model.weights={weights} lacks the weights {', '.join(missing[:3])}"
        f"{' and others' * (len(missing) > 3)}. {REMEDY}",
    )
    return network
