"""A prompt for a frozen CLIP: the row is the context of l token embeddings in front of the class names.

CoOp (Zhou et al., IJCV 2022); with federated averaging PromptFL (Guo et al., 2023).  logits = s <g(x), text(P)_c>,
both features L2-normalized, s = exp(logit_scale) of the backbone.  Any algorithm trains it: Local is CoOp, FedAvg is
PromptFL.

Neither tower learns, so image features are computed once, before the first round (`prepare`), and kept on disk; the
federation then holds features where it held images.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import ConfigError, Count, NonNegativeInt, require
from fedbench.core.private_torch import MoveListener
from fedbench.core.rng import RowRandom, generator
from fedbench.core.split import Split
from fedbench.data._files import cached
from fedbench.data.base import Arrays
from fedbench.models import clip as towers
from fedbench.models.tiny_clip import TINY, pretrain
from fedbench.nn.batched_layers import BatchedLayers
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.traced_graph import missing_layer_message

log = logging.getLogger(__name__)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
ENCODED_AT_ONCE = 64  # images in one pass of the frozen tower
SMALLEST_CROP = 0.08  # of the area, torchvision's RandomResizedCrop


class CLIPPrompt(MoveListener):
    """Parameters shared [n_shared, d] and own [l - n_shared, d], the context; both learn.  [B, D] -> [B, C].

    backbone, pretrained: of open_clip, a checkpoint file, or null for random weights; tiny-clip with
    pretrained=digits is pre-trained here, on first use (pretraining_seed).
    context: l, drawn from N(0, 0.02^2); init: words that the context starts from instead (they set l).
    shared: how many of the first tokens are the base, the rest being the head; null: half.
    augment: of training images: none; cached_views: one of `views` random crops and flips made beforehand; live: anew
    at every visit, by the frozen tower in every step.
    norm: clip | official, whether images are scaled by CLIP's mean and std, or (before the resize) by those that are
    usual for the data set.
    """

    computed_once = ("blocks.*",)  # layers that read the class names: their outputs are the same for all samples

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        template: str = "a photo of a {}.",
        reads: tuple[str, ...] = (),
        data_dir: str = "data",
        backbone: str = "RN50-quickgelu",
        pretrained: str | None = "openai",
        context: Count = 16,
        init: str | None = None,
        shared: NonNegativeInt | None = None,
        augment: Literal["none", "cached_views", "live"] = "none",
        views: Count = 10,
        norm: Literal["clip", "official"] = "clip",
        pretraining_seed: NonNegativeInt = 0,
    ):
        super().__init__()
        clip, tokenize = (
            pretrain(data_dir, pretraining_seed)
            if (backbone, pretrained) == (TINY, "digits")
            else towers.load(backbone, pretrained, data_dir)
        )
        self._clip, self.tokenize = (clip,), tokenize  # in a tuple: no submodule, no part of the row
        self.class_names = [str(c) for c in range(num_classes)] if class_names is None else list(class_names)
        self.num_classes, self.reads, self.data_dir = num_classes, tuple(reads), data_dir
        self.template, self.augment, self.views, self.norm = template, augment, views, norm
        words = None if init is None else towers.embed(clip, tokenize([init])[0])
        self.length = context if init is None else int(tokenize([init]).argmax()) - 1
        self.width, self.scale = clip.positional_embedding.shape[1], float(clip.logit_scale.exp())
        P = 0.02 * torch.randn(self.length, self.width) if words is None else words[1 : 1 + self.length].clone()
        n = self.length // 2 if shared is None else shared
        require(n <= self.length, f"model.shared={n} is more than the {self.length} tokens of the context")
        self.shared, self.own = nn.Parameter(P[:n].clone()), nn.Parameter(P[n:].clone())
        self.tower = towers.TextTower(clip, tokenize, self.class_names, self.length)
        self.dim = towers.joint_width(clip)  # D
        self.images = towers.ImageTower(clip)
        self._last = threading.local()
        self._layers: tuple[BatchedLayers, ...] = ()  # what calls those that adapters change; in a tuple: no submodule
        self._views: Tensor | None = None  # [images with views, V, ...]
        self._scaling: tuple[Tensor, Tensor] | None = None  # for norm=official
        self._from_bytes = True  # whether images are bytes (or those / 255)

    @property
    def clip(self) -> Any:
        """The frozen open_clip model, which all runs of a process share."""
        return self._clip[0]

    def on_move(self) -> None:
        """Move the text tower along, which is no submodule."""
        self.tower.to(self.shared.device)

    # -- text --------------------------------------------------------------------------------------------
    def context(self, named: dict[str, Tensor]) -> Tensor:
        """The prompts among a model's named parameters.  # [..., l, d]"""
        return torch.cat([named["shared"], named["own"]], -2)

    def text(
        self,
        prompts: Tensor,
        params: dict[str, Tensor] | None = None,
        batched: bool = False,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """L2-normalized text features of prompts [..., l, d]; remembered where no gradient is wanted, since an
        evaluation asks for the same ones batch after batch.  # [..., C, D]

        params, batched, context: as `run` has them, of which a tower that is adapted takes its layers' numbers.
        """
        context, params = context or ForwardContext(), params if params is not None and self._layers else {}

        def layer(name: str, x: Tensor) -> Tensor:
            return self._layers[0].apply(f"blocks.{name}", x, params, batched, context)

        own = [prompts, *(p for n, p in params.items() if n.startswith("blocks.") and n not in context.frozen)]
        tower = functools.partial(self.tower, prompts, layer if params else None)
        if context.observes_layers or (torch.is_grad_enabled() and any(t.requires_grad for t in own)):
            return tower()
        last, features = getattr(self._last, "of", None), getattr(self._last, "text", None)
        if last is not None and features is not None and _begins_with(last, own, prompts.dim() > 2):
            return features[: len(prompts)] if prompts.dim() > 2 else features
        with torch.no_grad():
            features = tower()
        self._last.of, self._last.text = [t.detach().clone() for t in own], features
        return features

    def expose(self) -> list[str]:
        """Hold the text tower's layers as submodules, `blocks.0.qkv` and so on, for an adapter; the prompt learns
        beside it.  They share the backbone's numbers, but each run may say which of them learn."""
        twin = {id(p): nn.Parameter(p.detach(), False) for p in self.tower.blocks.parameters()}
        self.blocks = self.tower.blocks = copy.deepcopy(self.tower.blocks, twin)
        self._layers = (BatchedLayers(self),)
        return ["shared", "own"]

    def sublayers(self) -> dict[str, tuple[str, ...]]:
        """Return patterns of layer names for adapters: the ends of the text tower's blocks."""
        return {"block": ("blocks.*.end",)}

    def templated(self, template: str) -> Tensor:
        """L2-normalized text features of the class names in a plain template, "a photo of a {}.".  # [C, D]"""
        require("{}" in template, f"algorithm.template={template!r} has no {{}} where the class name goes")
        texts = [template.format(name.replace("_", " ")) for name in self.class_names]
        with torch.no_grad():
            return self.clip.encode_text(self.tokenize(texts).to(self.shared.device), normalize=True)

    # -- the batched forward pass that FlatModel calls -----------------------------------------------------
    def run(
        self, params: dict[str, Tensor], inputs: tuple, batched: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Logits of one prompt [l, d] on [B, D], or of k prompts on [k, B, D]."""
        if until is not None:
            raise ConfigError(missing_layer_message(until))
        text = self.text(self.context(params), params, batched, context)
        return self.scale * self.image(inputs[0]) @ text.transpose(-1, -2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the one prompt on image features [B, D].  # [B, C]"""
        return self.run(dict(self.named_parameters()), (x,), False, ForwardContext())

    # -- images ------------------------------------------------------------------------------------------
    def image(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        """L2-normalized image features of a batch.  # [..., D]"""
        return inputs["image"] if isinstance(inputs, dict) else inputs

    def tokens(self, inputs: dict[str, Tensor]) -> Tensor:
        """L2-normalized feature-map tokens of a batch, for algorithms with reads = ("tokens",).  # [..., M, D]"""
        return inputs["tokens"]

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """Normalized features of images as the tower wants them [n, 3, size, size]."""
        if "tokens" not in self.reads:
            return {"image": F.normalize(self.images.pooled(images), dim=-1)}
        pooled, tokens = self.images.with_tokens(images)
        return {"image": F.normalize(pooled, dim=-1), "tokens": F.normalize(tokens, dim=-1)}

    def fit(self, images: Tensor) -> Tensor:
        """Images [n, channels, H, W], bytes, or bytes / 255, or floats that are scaled already, at the tower's size and
        in its scale.

        norm=official scales first and then resizes bilinearly, as the prompt papers' code does for CIFAR.
        """
        size, official = self.images.size, self.norm == "official" and self._scaling is not None
        x, side = images.float() / 255 if images.dtype == torch.uint8 else images, min(images.shape[-2:])
        top, left = (images.shape[-2] - side) // 2, (images.shape[-1] - side) // 2
        x = x[..., top : top + side, left : left + side].expand(-1, 3, -1, -1)  # a centre square
        if official:
            x = self._scaled(x, *self._scaling)  # type: ignore
        if x.shape[-2:] != (size, size):
            x = F.interpolate(
                x, (size, size), mode="bilinear" if official else "bicubic", antialias=not official, align_corners=False
            )
        if official or not self._from_bytes:
            return x
        return self._scaled(x.clamp(0, 1), torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD))

    @staticmethod
    def _scaled(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (x - mean.to(x).view(-1, 1, 1)) / std.to(x).view(-1, 1, 1)

    def cropped(self, images: Tensor, draws: Tensor) -> Tensor:
        """torchvision's RandomResizedCrop and horizontal flip.  images [n, ch, H, W], draws [n, 5] in [0, 1)."""
        from torchvision.transforms.v2.functional import resized_crop

        rows, cols, size, out = images.shape[-2], images.shape[-1], self.images.size, []
        for image, (area, ratio, top, left, flip) in zip(images, draws.tolist()):
            area = (SMALLEST_CROP + (1 - SMALLEST_CROP) * area) * rows * cols
            ratio = (3 / 4) ** (1 - 2 * ratio)  # log-uniform in [3/4, 4/3]
            h, w = min(rows, round((area / ratio) ** 0.5)), min(cols, round((area * ratio) ** 0.5))
            x = resized_crop(
                image,
                int(top * (rows - h + 1)),
                int(left * (cols - w + 1)),
                max(h, 1),
                max(w, 1),
                [size, size],
                interpolation=3,
                antialias=True,
            )
            out.append(x.flip(-1) if flip < 0.5 else x)
        return self.fit(torch.stack(out))

    # -- what the federation holds ---------------------------------------------------------------------------
    def prepare(self, arrays: Arrays, split: Split, device: torch.device) -> Arrays:
        """The data set with its images replaced by their features, for the samples that some client has."""
        images = arrays.images
        if images is None:
            raise ConfigError("model=clip_prompt needs images [channels, height, width]")
        require(images.shape[1] in (1, 3), f"model=clip_prompt needs images of 1 or 3 channels, not {images.shape[1]}")
        if self.norm == "official":
            scaling = arrays.published_scaling or (arrays.mean, arrays.std)
            require(
                images.dtype == np.uint8 and scaling[0] is not None,
                "model.norm=official scales by the data set's "
                "own mean and deviation, and this one says none: use model.norm=clip",
            )
            self._scaling = torch.tensor(scaling[0]), torch.tensor(scaling[1])
        self._from_bytes = images.dtype == np.uint8
        self.to(device)
        used = np.unique(np.concatenate([split.train.indices, split.val.indices, split.test.indices]))
        inputs = self._features(images, used, "evaluation", lambda x, at: self.fit(x), device)
        if self.augment == "cached_views":
            inputs["view"] = self._make_views(images, np.unique(split.train.indices), device)
        elif self.augment == "live":
            inputs["pixels"] = images
        return replace(arrays, inputs=inputs if len(inputs) > 1 else inputs["image"], mean=None, std=None)

    def _features(
        self, images: Any, used: np.ndarray, what: str, view: Callable, device: torch.device
    ) -> dict[str, np.ndarray]:
        """Features [n, ...] of the used images, zero elsewhere; kept on disk."""
        sha = hashlib.sha256(repr((images.shape, str(images.dtype))).encode())
        if isinstance(images, np.memmap):  # its name has a hash of what it was made of
            sha.update(f"{images.filename}".encode() + used.tobytes())
        else:
            for at in np.array_split(used, max(1, len(used) // 1024)):
                sha.update(np.ascontiguousarray(images[at]).tobytes())
        key = (towers.digest(self.clip.visual), self.reads, self.norm, str(self._scaling), what, sha.hexdigest())

        def make() -> dict[str, np.ndarray]:
            log.info("image features: %s images through the frozen tower, once", f"{len(used):,}")
            parts = []
            for start in range(0, len(used), ENCODED_AT_ONCE):
                at = used[start : start + ENCODED_AT_ONCE]
                x = torch.from_numpy(np.ascontiguousarray(images[at])).to(device)
                parts.append({n: t.cpu().numpy() for n, t in self.encode(view(x, at)).items()})
            return {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}

        used_features = cached(self.data_dir, "clip-features", key, make)
        whole = {n: np.zeros((len(images), *f.shape[1:]), np.float32) for n, f in used_features.items()}
        for n, f in used_features.items():
            whole[n][used] = f
        return whole

    def _make_views(self, images: Any, used: np.ndarray, device: torch.device) -> np.ndarray:
        """Cache `views` random views of the training images; returns each image's row among them (0 elsewhere)."""
        made: list[dict[str, np.ndarray]] = []
        for v in range(self.views):

            def view(x: Tensor, at: np.ndarray, v: int = v) -> Tensor:
                return self.cropped(x, torch.from_numpy(np.stack([generator(v, "view", int(i)).random(5) for i in at])))

            made.append(self._features(images, used, f"view {v}", view, device))
        self._views = {
            n: torch.from_numpy(np.stack([m[n][used] for m in made], 1)).to(device)  # type: ignore
            for n in made[0]
        }
        row = np.zeros(len(images), np.int64)
        row[used] = np.arange(len(used))
        return row

    def training_view(self, x: Any, random: RowRandom) -> Any:
        """What a training batch shows: features of random views.  Leading axes [k, B]."""
        if self.augment == "none":
            return self.evaluation_view(x)
        if self.augment == "cached_views":
            at = x["view"]  # [k, B]
            drawn = (random.uniform(at.shape[1]) * self.views).long()
            return self._plain({n: t[at, drawn] for n, t in self._views.items()})  # type: ignore
        pixels = x["pixels"]
        draws = random.uniform(pixels.shape[1], 5).flatten(0, 1)
        features = self.encode(self.cropped(pixels.flatten(0, 1), draws))
        return self._plain({n: t.unflatten(0, pixels.shape[:2]) for n, t in features.items()})

    def evaluation_view(self, x: Any) -> Any:
        """What any other batch shows: the features of the whole images."""
        return x if self.augment == "none" else self._plain({n: t for n, t in x.items() if n in ("image", "tokens")})

    @staticmethod
    def _plain(features: dict[str, Tensor]) -> Any:
        return features if len(features) > 1 else features["image"]


def _begins_with(last: Sequence[Tensor], tensors: Sequence[Tensor], batched: bool) -> bool:
    """Whether what was remembered is these tensors, or, if batched, begins with them."""
    n = len(tensors[0]) if batched else None
    return len(last) == len(tensors) and all(
        a.dim() == b.dim() and a[:n].shape == b.shape and torch.equal(a[:n], b) for a, b in zip(last, tensors)
    )
