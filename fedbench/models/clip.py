"""A frozen open_clip model for prompt learning: text features of contexts, and features of images.

The towers are stored once, outside of all rows, in evaluation mode (including batch norm).

The text tower reads embeddings.  The sequence of a class is SOS, context, name, ".", EOT, where the tokens of the
context replace placeholders.  Two shortcuts do not change the result.  Attention is causal, so positions after the
last EOT are not computed.  SOS and context are the same for all classes, so they are computed once.

Letters: A contexts (clients), C classes, l context tokens, d width of the text tower, D joint dimension, p positions
common to all classes, S other positions, h heads, M image tokens.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.core.weights import NO_WEIGHTS
from fedbench.models._private_open_clip import pooled_and_tokens
from fedbench.models._torchscript import is_torchscript, read_torchscript
from fedbench.nn.stream import Stream

log = logging.getLogger(__name__)
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")  # entries of OpenAI's files
PLACEHOLDER = "X"  # a word of one token, which CoOp replaces by a token of the context
Layer = Callable[[str, Tensor], Tensor]  # (name of a layer, its inputs [A, ...]) -> its outputs


class TextTower:
    """Text features of C classes as a function of a context, token embeddings before the class names.

    Source: CoOp (Zhou et al., IJCV 2022), unified context before the class name.

    Args:
        clip: An open_clip model.
        tokenize: Its tokenizer.
        class_names: Names of the classes.
        length: l, tokens of the context.

    Raises:
        ConfigError: The prompt is too long for the tower.
    """

    def __init__(self, clip: Any, tokenize: Any, class_names: Sequence[str], length: int):
        self.clip = clip
        self.blocks = nn.ModuleList(TextBlock(block) for block in clip.transformer.resblocks)
        self._layers = dict(self.blocks.named_modules())
        names = [name.replace("_", " ") for name in class_names]
        tokens = tokenize([" ".join([PLACEHOLDER] * length + [name]) + "." for name in names])  # [C, 77]
        eot = tokens.argmax(1)  # EOT is the largest token
        self.length = length
        self.total = int(eot.max()) + 1  # positions to compute
        num_tokens = 1 + length + max(len(tokenize.encode(name)) for name in names) + 2
        require(
            num_tokens <= tokens.shape[1],
            f"model.context={length}: with the longest class name, the prompt has {num_tokens} tokens, but "
            f"model.backbone reads {tokens.shape[1]}. Set model.context to at most "
            f"{length - num_tokens + tokens.shape[1]}, or shorten the class names",
        )
        self.common = 1 + length  # p: SOS and the context
        embedded = embed(clip, tokens[:, : self.total])  # [C, L, d]
        self.sos = embedded[0, :1]  # [1, d]
        self.tail = embedded[:, self.common :]  # [C, S, d]
        self.eot = eot - self.common  # [C]

    def to(self, device: torch.device | str) -> TextTower:
        """Move the layers and constants of this tower to a device, in place, and return the tower itself."""
        self.clip.to(device)
        self.blocks.to(device)
        self.sos, self.tail, self.eot = (t.to(device) for t in (self.sos, self.tail, self.eot))
        return self

    def __call__(self, contexts: Tensor, layer: Layer | None = None) -> Tensor:
        """Return L2-normalized text features.

        Args:
            contexts: Contexts, [..., l, d].
            layer: Computes the layers of `blocks` by name, on inputs [A, ...].  None: the layers of the backbone.

        Returns:
            Features, [..., C, D].
        """
        layer = layer or self._backbone_layer
        A, C = contexts.shape[:-2].numel(), len(self.tail)
        P = contexts.reshape(A, self.length, -1)  # [A, l, d]
        head = torch.cat([self.sos.expand(A, 1, -1), P], 1)  # [A, p, d], the positions common to all classes
        tail = self.tail.expand(A, -1, -1, -1)  # [A, C, S, d], the other positions of each class
        positions = self.clip.positional_embedding
        head, tail = head + positions[: self.common], tail + positions[self.common : self.total]
        for i in range(len(self.blocks)):
            head, tail = self._block(i, head, tail, layer)
        eot = self.eot.view(1, C, 1, 1).expand(A, C, 1, tail.shape[-1])  # position of each class's last token
        x = self.clip.ln_final(tail.gather(2, eot)[:, :, 0])  # [A, C, d]
        return F.normalize(project(x, self.clip.text_projection), dim=-1).view(*contexts.shape[:-2], C, -1)

    def _backbone_layer(self, name: str, x: Tensor) -> Tensor:
        return self._layers[name](x)

    def _block(self, i: int, head: Tensor, tail: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Compute block i of the text tower for A contexts and C classes.

        The layers scale1 and scale2 are CLIP's, usually the identity.  The layer end is the identity, to which an
        adapter can be added.

        Args:
            i: Number of the block.
            head: Inputs at the positions common to all classes.  # [A, p, d]
            tail: Inputs at the other positions of each class.  # [A, C, S, d]
            layer: layer(name, x) returns the output of a layer, such as "0.norm1", for an input x.

        Returns:
            The outputs at the same positions, as head and tail.
        """
        to_head, to_tail = self._attention(i, layer(f"{i}.norm1", head), layer(f"{i}.norm1", tail), layer)
        head, tail = head + layer(f"{i}.scale1", to_head), tail + layer(f"{i}.scale1", to_tail)
        to_head, to_tail = (layer(f"{i}.mlp", layer(f"{i}.norm2", x)) for x in (head, tail))
        head, tail = head + layer(f"{i}.scale2", to_head), tail + layer(f"{i}.scale2", to_tail)
        return layer(f"{i}.end", head), layer(f"{i}.end", tail)

    def _attention(self, i: int, head: Tensor, tail: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Compute causal self-attention over p common positions followed by S positions of each class.

        Common positions attend to each other only, because the others are later.  The positions of a class attend to
        the common ones and to their own; one softmax covers both.  A is the number of contexts, C that of classes, h
        that of attention heads.  q, k, v are of common positions, Q, K, V of those of each class.

        Args:
            i: Number of the block.
            head: Inputs at the positions common to all classes.  # [A, p, d]
            tail: Inputs at the other positions of each class.  # [A, C, S, d]
            layer: layer(name, x) returns the output of a layer, such as "0.qkv", for an input x.

        Returns:
            The outputs at the same positions, as head and tail.
        """
        (A, p, d), (_, C, S, _), h = head.shape, tail.shape, cast(TextBlock, self.blocks[i]).heads
        parts = layer(f"{i}.qkv", head).chunk(3, -1)
        q, k, v = (t.view(A, p, h, -1).transpose(1, 2) for t in parts)  # [A, h, p, d/h]
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(A, p, d)
        parts = layer(f"{i}.qkv", tail).chunk(3, -1)
        Q, K, V = (t.view(A, C, S, h, -1).permute(0, 3, 1, 2, 4) for t in parts)  # [A, h, C, S, d/h]
        Q = Q * Q.shape[-1] ** -0.5
        to_common = (Q.flatten(2, 3) @ k.transpose(-1, -2)).view(A, h, C, S, p)
        later = torch.ones(S, S, dtype=torch.bool, device=head.device).triu(1)  # positions that are not visible
        to_own = (Q @ K.transpose(-1, -2)).masked_fill(later, float("-inf"))  # [A, h, C, S, S]
        on_common, on_own = torch.cat([to_common, to_own], -1).softmax(-1).split([p, S], -1)
        second = (on_common.flatten(2, 3) @ v).view(A, h, C, S, -1) + on_own @ V  # [A, h, C, S, d/h]
        second = second.permute(0, 2, 3, 1, 4).reshape(A, C, S, d)
        return layer(f"{i}.attn", first), layer(f"{i}.attn", second)


class TextBlock(nn.Module):
    """The layers of a block of open_clip's text tower, as layers of PyTorch that adapters support.

    They share the parameters of the block.  `qkv` and `attn` are the projections before and after attention, so an
    adapter of `attn` changes the output of attention.
    """

    def __init__(self, block: Any):
        super().__init__()
        attention = block.attn
        self.norm1, self.norm2 = _layer_norm(block.ln_1), _layer_norm(block.ln_2)
        self.qkv = _linear(attention.in_proj_weight, attention.in_proj_bias)
        self.attn = _linear(attention.out_proj.weight, attention.out_proj.bias)
        mlp_layers = (_linear(m.weight, m.bias) if isinstance(m, nn.Linear) else m for m in block.mlp)
        self.mlp = nn.Sequential(*mlp_layers)
        self.scale1, self.scale2 = block.ls_1, block.ls_2
        self.end = Stream(attention.embed_dim)
        self.heads: int = attention.num_heads


def _linear(weight: Any, bias: Any) -> nn.Linear:
    """Return an nn.Linear that shares the given parameters, without copies.

    Args:
        weight: The weight.  # [outputs, inputs]
        bias: The bias [outputs], or None for a layer without bias.
    """
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    return layer


def _layer_norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    """Return a plain nn.LayerNorm with the same parameters as `norm`, which may be of a subclass that casts dtypes."""
    layer = nn.LayerNorm(list(norm.normalized_shape), norm.eps, device="meta")
    layer.weight, layer.bias = norm.weight, norm.bias
    return layer


def project(x: Tensor, projection: Any) -> Tensor:
    """Map features of a tower to the space that images and texts share.

    Args:
        x: Features, [..., width].
        projection: A matrix [width, D], a linear layer, or None for the identity.

    Returns:
        Projected features, [..., D].
    """
    if projection is None:
        return x
    return projection(x) if isinstance(projection, nn.Module) else x @ projection


def embed(clip: Any, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens in float32 on the CPU.

    The model may be on any device, because all runs of a process share it.

    Args:
        clip: An open_clip model.
        tokens: Indices of tokens, [...] int64.

    Returns:
        Embeddings, [..., d].
    """
    table = clip.token_embedding.weight
    return table.detach()[tokens.to(table.device)].float().cpu()


def joint_width(clip: Any) -> int:
    """Return D, the size of the features that an open_clip model computes for texts and images."""
    last = clip.text_projection
    if last is None:
        return clip.positional_embedding.shape[1]
    return last.out_features if isinstance(last, nn.Linear) else last.shape[1]


class ImageTower:
    """Image features of a frozen open_clip model, not normalized."""

    def __init__(self, clip: Any):
        self.clip = clip
        size = clip.visual.image_size
        self.size: int = size[0] if isinstance(size, tuple | list) else size

    @torch.no_grad()
    def pooled(self, images: Tensor) -> Tensor:
        """Return one feature vector per image, not normalized.

        Args:
            images: Images with CLIP's pixel normalization.  # [n, 3, size, size]

        Returns:
            Feature vectors in the space that images and texts share.  # [n, D]
        """
        return self.clip.encode_image(images)

    @torch.no_grad()
    def with_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of whole images, and of their parts, both projected and not normalized.

        Args:
            images: Images with CLIP's pixel normalization, [n, 3, size, size].

        Returns:
            The features that `pooled` returns [n, D], and those of M patches or positions of the feature map [n, M, D].
        """
        visual = self.clip.visual  # only CLIP's ResNets, not its vision transformers, have the layer attnpool
        return _convolutional(visual, images) if hasattr(visual, "attnpool") else _transformer(visual, images)


def _convolutional(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the attention pool of CLIP's ResNet with the mean and all positions of the feature map as queries.

    CLIP uses the mean alone as query.  The outputs of the other queries are the tokens.

    Args:
        visual: The ResNet.
        images: Normalized images.  # [n, 3, H, W]

    Returns:
        Pooled features [n, D], and tokens of the feature map [n, M, D].
    """
    x = visual.stem(images)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        x = layer(x)
    pool = visual.attnpool
    x = x.flatten(2).permute(2, 0, 1)  # [M, n, width]
    x = torch.cat([x.mean(0, keepdim=True), x]) + pool.positional_embedding[:, None]  # [1 + M, n, width]
    (length, n, _), h = x.shape, pool.num_heads
    q, k, v = (layer(x).view(length, n, h, -1).permute(1, 2, 0, 3) for layer in (pool.q_proj, pool.k_proj, pool.v_proj))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1)
    out = pool.c_proj(mixed)  # [n, 1 + M, D]
    return out[:, 0], out[:, 1:]


def _transformer(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features of whole images and of their patches, after the last norm of a vision transformer, projected.

    Args:
        visual: open_clip's VisionTransformer.
        images: Images with CLIP's pixel normalization.  # [n, 3, H, W]

    Returns:
        The class tokens [n, D], and the patch tokens [n, M, D].

    Raises:
        ConfigError: The transformer does not pool patches by a class token.
    """
    require(
        visual.attn_pool is None and not visual.final_ln_after_pool and visual.pool_type == "tok",
        "model.backbone does not pool patches by a class token, but the algorithm reads image tokens: set a ResNet or "
        "ViT of CLIP, such as model.backbone=RN50-quickgelu or ViT-B-16-quickgelu",
    )
    pooled, tokens = pooled_and_tokens(visual, images)
    return project(pooled, visual.proj), project(tokens, visual.proj)


@functools.lru_cache(maxsize=2)
def load(backbone: str, pretrained: str | None, cache_dir: str | None = None) -> tuple[Any, Any]:
    """Return the open_clip model (frozen, in evaluation mode) and its tokenizer.

    Args:
        backbone: Name of the model in open_clip.
        pretrained: A tag of open_clip (downloaded once), a checkpoint file (open_clip's, or OpenAI's TorchScript
            archive), or None for random weights.
        cache_dir: Folder of downloaded weights.

    Raises:
        ConfigError: The model or the weights do not exist or do not fit, for example if only one has QuickGELU.
    """
    import open_clip

    open_clip.add_model_config(Path(__file__).with_name("tiny-clip.json"))  # a small model of fedbench itself
    names = open_clip.list_models()
    require(
        backbone in names,
        f"model.backbone={backbone} is not a model of open_clip: use RN50-quickgelu, ViT-B-16-quickgelu, tiny-clip, or "
        f"another of the {len(names)} models of open_clip.list_models()",
    )
    _check_weights(open_clip, backbone, pretrained)
    # open_clip cannot read OpenAI's TorchScript archives without running their code, so they are read here.
    archive = Path(pretrained) if pretrained is not None and is_torchscript(Path(pretrained)) else None
    if archive is not None:
        _check_activation(open_clip, backbone, str(archive), needs_quick_gelu=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that random weights are equal in all runs
        try:
            if archive is None:
                clip = open_clip.create_model(backbone, pretrained=pretrained, cache_dir=cache_dir)
            else:
                config: Any = open_clip.get_model_config(backbone)
                clip = open_clip.CLIP(**config)
                clip.load_state_dict(_openai_state(archive))
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"model.backbone={backbone} with model.pretrained={pretrained} could not be loaded "
                f"({_reason(error)}): set model.pretrained to a checkpoint file of that model, or to null for random "
                "weights"
            ) from error
    return frozen(clip), open_clip.get_tokenizer(backbone)


def frozen(clip: Any) -> Any:
    """Set an open_clip model to evaluation mode without gradients, and return it.

    Raises:
        ConfigError: Its text tower is not the causal transformer of CLIP, which prompts need.
    """
    transformer = getattr(clip, "transformer", None)
    fits = (  # a transformer with a causal mask, whose feature of a text is the output at its last token
        transformer is not None
        and clip.text_pool_type in ("argmax", "eos")
        and clip.attn_mask is not None
        and all(isinstance(getattr(b, "attn", None), nn.MultiheadAttention) for b in transformer.resblocks)
    )
    require(
        fits,
        "model.backbone has no causal text transformer of CLIP, which prompts need: set a CLIP, such as "
        "model.backbone=RN50-quickgelu or ViT-B-16-quickgelu",
    )
    return clip.eval().requires_grad_(False)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, with the second (cut to 200 characters) if it ends with a colon.

    Of an UnpicklingError return `NO_WEIGHTS`; without a message return the class of the error.
    """
    if isinstance(error, pickle.UnpicklingError):
        return NO_WEIGHTS  # replaces PyTorch's advice to load it with weights_only=False
    first, *rest = str(error).splitlines() or [type(error).__name__]
    if first.endswith(":") and rest:
        second = rest[0].strip()
        return f"{first} {second[:200].rpartition(' ')[0]} ..." if len(second) > 200 else f"{first} {second}"
    return first


def _check_weights(open_clip: Any, backbone: str, pretrained: str | None) -> None:
    """Raise a ConfigError unless weights exist and were trained with the activation of the backbone.

    Args:
        open_clip: The library.
        backbone: Name of the model in open_clip.
        pretrained: A tag of open_clip.  None (random weights) and existing files are accepted without a check.
    """
    tags = open_clip.list_pretrained_tags_by_model(backbone)
    if pretrained is None or Path(pretrained).is_file():
        return
    require(
        pretrained in tags,
        f"model.pretrained={pretrained} is neither a file nor weights of open_clip for {backbone}: set "
        f"{'one of ' + ', '.join(tags) if tags else 'a checkpoint file'}, or null for random weights",
    )
    config = open_clip.get_pretrained_cfg(backbone, pretrained) or {}
    _check_activation(open_clip, backbone, pretrained, needs_quick_gelu=bool(config.get("quick_gelu")))


def _check_activation(open_clip: Any, backbone: str, pretrained: str, needs_quick_gelu: bool) -> None:
    """Raise a ConfigError if the weights were trained with another activation than that of the backbone.

    Args:
        open_clip: The library.
        backbone: Name of the model in open_clip.
        pretrained: Tag or file of the weights, for the message.
        needs_quick_gelu: Whether the weights were trained with QuickGELU.
    """
    has_quick_gelu = bool((open_clip.get_model_config(backbone) or {}).get("quick_gelu", False))
    other = f"{backbone}-quickgelu" if needs_quick_gelu else backbone.removesuffix("-quickgelu")
    # open_clip has both forms of many models: "ViT-B-16", and "ViT-B-16-quickgelu" with the activation of OpenAI's
    advice = f"use {other}" if other in open_clip.list_models() else "use the backbone of these weights"
    require(
        needs_quick_gelu == has_quick_gelu,
        f"model.pretrained={pretrained} was trained {'with' if needs_quick_gelu else 'without'} QuickGELU, but "
        f"model.backbone={backbone} is {'with' if has_quick_gelu else 'without'} it, so its features would be wrong: "
        f"{advice}",
    )


def _openai_state(path: Path) -> dict[str, Tensor]:
    """Return the weights in OpenAI's TorchScript file of CLIP, by name, as float32.

    Entries that are settings, such as input_resolution, are left out.
    """
    stored = read_torchscript(path)
    return {name: t.float() for name, t in stored.items() if name.rpartition(".")[2] not in NOT_WEIGHTS}


def digest(module: nn.Module) -> str:
    """Return a hash of the names and values in a module's state dict: 16 hexadecimal digits.  It is a key of caches."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
