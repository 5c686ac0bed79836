"""A prompt for a frozen CLIP: the parameters are the context, l token embeddings before the class names.

CoOp (Zhou et al., IJCV 2022); with federated averaging PromptFL (Guo et al., 2023).  logits = s <g(x), text(P)_c> with
L2-normalized features and s = exp(logit_scale) of the backbone.  Any algorithm can train it: Local is CoOp, FedAvg is
PromptFL.

The towers are not trained.  Image features are therefore computed once, before the first round (`prepare`), and stored
on disk.  The federation has features instead of images.
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
ENCODER_BATCH = 64  # images in one pass of the frozen tower
MIN_CROP = 0.08  # of the area, as in torchvision's RandomResizedCrop


class CLIPPrompt(MoveListener):
    """A learned context of l tokens [l, d] for a frozen CLIP.  Image features [B, D] -> logits [B, C].

    The parameters `shared` [n_shared, d] and `own` [l - n_shared, d] are the context.

    Args:
        data_dir: Folder of weights and image features.
        backbone: Model of open_clip.
        pretrained: A tag of open_clip, a checkpoint file, or null for random weights.  tiny-clip with digits is
            pre-trained on first use.
        context: l, tokens of the context, initially from N(0, 0.02^2).
        init: Words whose embeddings are the initial context instead; they determine l.
        shared: Number of first tokens that are the base.  The others are the head.  null: half.
        augment: Of training images: none; cached_views: one of `views` random crops and flips, computed before
            training; live: a new one in every step, which the frozen tower encodes.
        views: Number of cached views.
        norm: Scaling of images: clip, by CLIP's mean and standard deviation; official, by those of the data set,
            before resizing.
        pretraining_seed: Seed of the pre-training of tiny-clip.
    """

    computed_once = ("blocks.*",)  # layers that read the class names, with the same outputs for all samples

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
        if (backbone, pretrained) == (TINY, "digits"):
            clip, tokenize = pretrain(data_dir, pretraining_seed)
        else:
            clip, tokenize = towers.load(backbone, pretrained, data_dir)
        self._clip = (clip,)  # in a tuple, so that it is not a submodule and not in the row
        self.tokenize = tokenize
        self.class_names = [str(c) for c in range(num_classes)] if class_names is None else list(class_names)
        self.num_classes = num_classes
        self.reads = tuple(reads)
        self.data_dir = data_dir
        self.template = template
        self.augment = augment
        self.views = views
        self.norm = norm
        words = None if init is None else towers.embed(clip, tokenize([init])[0])
        self.length = context if init is None else int(tokenize([init]).argmax()) - 1
        self.width = clip.positional_embedding.shape[1]
        self.scale = float(clip.logit_scale.exp())
        P = 0.02 * torch.randn(self.length, self.width) if words is None else words[1 : 1 + self.length].clone()
        num_shared = self.length // 2 if shared is None else shared
        require(
            num_shared <= self.length,
            f"model.shared={num_shared} must be at most {self.length}, the number of tokens of the context: lower "
            "model.shared, or raise model.context (or the number of words of model.init)",
        )
        self.shared = nn.Parameter(P[:num_shared].clone())
        self.own = nn.Parameter(P[num_shared:].clone())
        self.text_tower = towers.TextTower(clip, tokenize, self.class_names, self.length)
        self.dim = towers.joint_width(clip)  # D
        self.image_tower = towers.ImageTower(clip)
        self._last = threading.local()  # the last text features of each thread, and what they were computed from
        self._layers: tuple[BatchedLayers, ...] = ()  # calls adapted layers; in a tuple, as _clip
        self._views: Tensor | None = None  # [images with views, V, ...]
        self._scaling: tuple[Tensor, Tensor] | None = None  # for norm=official
        self._from_bytes = True  # whether images are uint8, or these / 255

    @property
    def clip(self) -> Any:
        """The frozen open_clip model, one object for all runs of a process."""
        return self._clip[0]

    def on_move(self) -> None:
        """Move the text tower to the device of this module's parameters.

        It is called after `to`, which does not move the tower, because the tower is not a submodule.
        """
        self.text_tower.to(self.shared.device)

    # -- text --------------------------------------------------------------------------------------------
    def context(self, named: dict[str, Tensor]) -> Tensor:
        """Return the context, the learned token embeddings of the prompt: the shared ones, then the personal ones.

        Args:
            named: Parameters by name, with "shared" [..., l1, d] and "own" [..., l2, d].

        Returns:
            The context.  # [..., l1 + l2, d]
        """
        return torch.cat([named["shared"], named["own"]], -2)

    def text(
        self,
        prompts: Tensor,
        params: dict[str, Tensor] | None = None,
        batched: bool = False,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Return L2-normalized text features of prompts.

        Without gradients, the last result is cached, because an evaluation uses the same prompts for all batches.

        Args:
            prompts: Contexts, [..., l, d].
            params: Parameters of adapted layers by name, [k, ...] each if batched.  None: no layer is adapted.
            batched: Whether prompts and parameters have an axis of k clients.
            context: Options of the forward pass.  None: evaluation mode.

        Returns:
            Features, [..., C, D].
        """
        context = context or ForwardContext()
        params = params if params is not None and self._layers else {}  # _layers: empty without an adapter

        def layer(name: str, x: Tensor) -> Tensor:
            """Return the output of a layer for the input x, computed with its parameters in `params`.

            batched: whether these have an axis of clients.  context: options of the forward pass, such as dropout.

            Args:
                name: Name of the layer within the tower's blocks, such as "0.qkv".
                x: Its input.  # [..., width]
            """
            return self._layers[0].apply(f"blocks.{name}", x, params, batched, context)

        adapted = [p for n, p in params.items() if n.startswith("blocks.") and n not in context.frozen]
        tensors = [prompts, *adapted]  # all on which the result depends
        tower = functools.partial(self.text_tower, prompts, layer if params else None)  # computes the features
        # hooks and recorded outputs need a pass through the layers, as gradients do
        if context.observes_layers or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return tower()
        # the cache of this thread: the tensors of the last call, and their features
        last, features = getattr(self._last, "tensors", None), getattr(self._last, "features", None)
        has_clients = prompts.dim() > 2
        if last is not None and features is not None and _are_first_of(tensors, last, has_clients):
            return features[: len(prompts)] if has_clients else features
        with torch.no_grad():
            features = tower()
        self._last.tensors, self._last.features = [t.detach().clone() for t in tensors], features
        return features

    def expose(self) -> list[str]:
        """Make the layers of the text tower submodules (`blocks.0.qkv` ...), so that an adapter can change them.

        They share the values of the backbone, but each run has its own parameters that can be trained.

        Returns:
            Names of the parameters that are trained with any adapter.
        """
        # deepcopy takes the parameters from its memo instead of copying them
        shared_values = {
            id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self.text_tower.blocks.parameters()
        }
        self.blocks = self.text_tower.blocks = copy.deepcopy(self.text_tower.blocks, shared_values)
        # computes layers of k clients; in a tuple, so that torch.nn.Module does not register it as submodule
        self._layers = (BatchedLayers(self),)
        return ["shared", "own"]  # the two parts of the learned context

    def sublayers(self) -> dict[str, tuple[str, ...]]:
        """Return {"block": patterns of layer names}: where adapter.places=block adds adapters.

        These are the ends of the text tower's blocks.
        """
        return {"block": ("blocks.*.end",)}

    def templated(self, template: str) -> Tensor:
        """Return L2-normalized text features of the class names in a sentence.

        Args:
            template: The sentence, such as "a photo of a {}.", where {} is replaced by the class name.

        Returns:
            Features, [C, D].
        """
        require(
            "{}" in template,
            f"algorithm.template={template!r} has no place for the class name: write {{}} there, as in 'a photo of a "
            "{}.'",
        )
        texts = [template.format(name.replace("_", " ")) for name in self.class_names]
        with torch.no_grad():
            return self.clip.encode_text(self.tokenize(texts).to(self.shared.device), normalize=True)

    # -- the batched forward pass that FlatModel calls -----------------------------------------------------
    def run(
        self, params: dict[str, Tensor], inputs: tuple, batched: bool, context: ForwardContext, until: str | None = None
    ) -> Tensor:
        """Return the logits of one prompt [l, d], or of k prompts.

        Args:
            params: Named parameters: the prompts [l, d] or [k, l, d] in two parts, and those of adapted layers.
            inputs: One entry, the image features.  # [B, D] or [k, B, D]
            batched: Whether params and inputs have the axis of k clients.
            context: Options of the forward pass, such as dropout (`ForwardContext`); not the context of the prompt.
            until: Name of a layer whose input is wanted.  Must be None, because a prompt has no layer named head.

        Returns:
            Logits.  # [B, C] or [k, B, C]
        """
        if until is not None:
            raise ConfigError(missing_layer_message(until))
        text = self.text(self.context(params), params, batched, context)  # [C, D] or [k, C, D]
        return self.scale * self.image(inputs[0]) @ text.transpose(-1, -2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for image features x [B, D], with the prompt that this module stores."""
        return self.run(dict(self.named_parameters()), (x,), batched=False, context=ForwardContext())

    # -- images ------------------------------------------------------------------------------------------
    def image(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        """Return image features [..., D]: `inputs` itself if it is a tensor, inputs["image"] if it is a dict."""
        return inputs["image"] if isinstance(inputs, dict) else inputs

    def tokens(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return inputs["tokens"], the features of the M parts of each image in a batch.

        They exist for algorithms with reads = ("tokens",).

        Returns:
            L2-normalized tokens, [..., M, D].
        """
        return inputs["tokens"]

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """Return L2-normalized features of images [n, 3, size, size], as `fit` returns them.

        Returns:
            image [n, D], and tokens [n, M, D] if an algorithm reads them.
        """
        if "tokens" not in self.reads:
            return {"image": F.normalize(self.image_tower.pooled(images), dim=-1)}
        pooled, tokens = self.image_tower.with_tokens(images)
        return {"image": F.normalize(pooled, dim=-1), "tokens": F.normalize(tokens, dim=-1)}

    def fit(self, images: Tensor) -> Tensor:
        """Crop the center square of images, and resize and standardize it for the tower.

        norm=official standardizes first and then resizes bilinearly, as the prompt papers' code does for CIFAR.

        Args:
            images: Images [n, channels, H, W]: uint8; the same divided by 255; or floats that are standardized already.

        Returns:
            Images, [n, 3, size, size].
        """
        size = self.image_tower.size  # of the images that the tower reads
        # _scaling: mean and standard deviation of the data set's channels, set by `prepare` if norm=official
        official = self.norm == "official" and self._scaling is not None
        x = images.float() / 255 if images.dtype == torch.uint8 else images
        side = min(images.shape[-2:])
        top = (images.shape[-2] - side) // 2
        left = (images.shape[-1] - side) // 2
        x = x[..., top : top + side, left : left + side].expand(-1, 3, -1, -1)  # the center square
        if official:
            x = self._scaled(x, *self._scaling)  # type: ignore
        if x.shape[-2:] != (size, size):
            x = F.interpolate(
                x, (size, size), mode="bilinear" if official else "bicubic", antialias=not official, align_corners=False
            )
        if official or not self._from_bytes:  # floats of a data set without bytes are standardized already
            return x
        return self._scaled(x.clamp(0, 1), torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD))

    @staticmethod
    def _scaled(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (x - mean.to(x).view(-1, 1, 1)) / std.to(x).view(-1, 1, 1)

    def cropped(self, images: Tensor, draws: Tensor) -> Tensor:
        """Apply torchvision's RandomResizedCrop and a random horizontal flip, and `fit`.

        Args:
            images: Images, [n, channels, H, W].
            draws: Random numbers in [0, 1) for area, aspect ratio, top, left and flip of each image, [n, 5].

        Returns:
            Images for the tower.  # [n, 3, size, size]
        """
        from torchvision.transforms.v2.functional import resized_crop

        rows, cols = images.shape[-2:]
        size = self.image_tower.size
        crops = []
        for image, (area, ratio, top, left, flip) in zip(images, draws.tolist()):
            area = (MIN_CROP + (1 - MIN_CROP) * area) * rows * cols  # MIN_CROP = 0.08 of the image, to all of it
            ratio = (3 / 4) ** (1 - 2 * ratio)  # log-uniform in [3/4, 4/3]
            h, w = min(rows, round((area / ratio) ** 0.5)), min(cols, round((area * ratio) ** 0.5))
            x = resized_crop(
                image,
                int(top * (rows - h + 1)),
                int(left * (cols - w + 1)),
                max(h, 1),
                max(w, 1),
                [size, size],
                interpolation=3,  # bicubic
                antialias=True,
            )
            crops.append(x.flip(-1) if flip < 0.5 else x)
        return self.fit(torch.stack(crops))

    # -- features for the federation -------------------------------------------------------------------------
    def prepare(self, arrays: Arrays, split: Split, device: torch.device) -> Arrays:
        """Return the data set with CLIP's image features [n, D] as inputs, computed once or read from the cache.

        Args:
            arrays: The data set, with images [n, 1 or 3, H, W].
            split: The samples of each client.  Features of other samples are 0.
            device: Where to compute the features.

        Returns:
            The data set.  With augment="cached_views" or "live", or if an algorithm reads tokens, its inputs are a dict
            with the entry "image" and further ones.

        Raises:
            ConfigError: The inputs are not images, or have the wrong channels or scaling.
        """
        images = arrays.images
        if images is None:
            raise ConfigError(
                "model=clip_prompt needs images [channels, height, width], but the data set has other inputs: choose a "
                "data set of images, or another model"
            )
        require(
            images.shape[1] in (1, 3),
            f"model=clip_prompt needs images with 1 or 3 channels, but those of the data set have {images.shape[1]}: "
            "choose another data set or model",
        )
        if self.norm == "official":
            scaling = arrays.published_scaling or (arrays.mean, arrays.std)
            require(
                images.dtype == np.uint8 and scaling[0] is not None,
                "model.norm=official needs uint8 images and the mean and std of the data set, but this data set has "
                "none: set model.norm=clip",
            )
            self._scaling = torch.tensor(scaling[0]), torch.tensor(scaling[1])
        self._from_bytes = images.dtype == np.uint8
        self.to(device)
        used = np.unique(np.concatenate([split.train.indices, split.val.indices, split.test.indices]))
        # the images are only resized and cropped; "evaluation" separates their cache from that of random views
        inputs = self._features(images, used, "evaluation", lambda x, index: self.fit(x), device)
        if self.augment == "cached_views":
            inputs["view"] = self._make_views(images, np.unique(split.train.indices), device)
        elif self.augment == "live":
            inputs["pixels"] = images
        # without mean and std, by which only pixels are normalized
        return replace(arrays, inputs=inputs if len(inputs) > 1 else inputs["image"], mean=None, std=None)

    def _features(
        self, images: Any, used: np.ndarray, purpose: str, view: Callable, device: torch.device
    ) -> dict[str, np.ndarray]:
        """Return features of the images that clients use.  They are computed once and cached on disk.

        Args:
            images: All images of the data set.  # [n, channels, H, W]
            used: Indices of the images of clients.
            purpose: Part of the key of the cache: "evaluation", or which random view it is.
            view: Function of some images and their indices, which returns what the tower reads.
            device: Where to compute the features.

        Returns:
            Features by name, 0 for other images.  # [n, ...] each
        """
        sha = hashlib.sha256(repr((images.shape, str(images.dtype))).encode())  # of the images that clients use
        if isinstance(images, np.memmap):  # its name has a hash of its content
            sha.update(f"{images.filename}".encode() + used.tobytes())
        else:
            for index in np.array_split(used, max(1, len(used) // 1024)):
                sha.update(np.ascontiguousarray(images[index]).tobytes())
        key = (towers.digest(self.clip.visual), self.reads, self.norm, str(self._scaling), purpose, sha.hexdigest())

        def make() -> dict[str, np.ndarray]:
            """Return a dict from name to features of all images that a client uses.  # [number of these images, ...]

            `used` are the indices of these images, and `view` returns the image or a crop of it that is encoded.
            """
            log.info("computing features of %s images with the frozen tower (once)", f"{len(used):,}")
            batches = []
            for start in range(0, len(used), ENCODER_BATCH):
                index = used[start : start + ENCODER_BATCH]
                x = torch.from_numpy(np.ascontiguousarray(images[index])).to(device)
                batches.append({name: t.cpu().numpy() for name, t in self.encode(view(x, index)).items()})
            return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

        used_features = cached(self.data_dir, "clip-features", key, make)
        features = {name: np.zeros((len(images), *f.shape[1:]), np.float32) for name, f in used_features.items()}
        for name, f in used_features.items():
            features[name][used] = f
        return features

    def _make_views(self, images: Any, used: np.ndarray, device: torch.device) -> np.ndarray:
        """Compute features of random crops and flips of the training images, and store them in self._views.

        Each image has as many of these views as the option `views` states.

        Args:
            images: All images of the data set.  # [n, channels, H, W]
            used: Indices of the training images.
            device: Where to compute the features.

        Returns:
            Row of each image in self._views, and 0 for images that are not used for training.  # [n]
        """
        views: list[dict[str, np.ndarray]] = []  # of each view: features of all images by name
        for v in range(self.views):
            # v=v: each function keeps the number of its view
            def view(x: Tensor, index: np.ndarray, v: int = v) -> Tensor:
                # area, aspect ratio, top, left and flip of each crop, which depend on view and image only  [n, 5]
                draws = np.stack([generator(v, "view", int(i)).random(5) for i in index])
                return self.cropped(x, torch.from_numpy(draws))

            views.append(self._features(images, used, f"view {v}", view, device))
        self._views = {
            name: torch.from_numpy(np.stack([view[name][used] for view in views], 1)).to(device)  # type: ignore
            for name in views[0]
        }
        row = np.zeros(len(images), np.int64)
        row[used] = np.arange(len(used))
        return row

    def training_view(self, x: Any, random: RowRandom) -> Any:
        """Return the features of a training batch: of random views, or with augment="none" of whole images.

        Args:
            x: Inputs of the prepared data set.  # [k, B, ...]
            random: Random numbers of each client.

        Returns:
            Features [k, B, ...]: a tensor, or a dict by name if an algorithm also reads tokens.
        """
        if self.augment == "none":
            return self.evaluation_view(x)
        if self.augment == "cached_views":
            row = x["view"]  # [k, B], row of each image in self._views
            view = (random.uniform(row.shape[1]) * self.views).long()  # [k, B], which of its views
            return self._unwrap({name: t[row, view] for name, t in self._views.items()})  # type: ignore
        pixels = x["pixels"]  # [k, B, channels, H, W]
        # five numbers for each image, for area, aspect ratio, top, left and flip of its crop  [k B, 5]
        draws = random.uniform(pixels.shape[1], 5).flatten(0, 1)
        features = self.encode(self.cropped(pixels.flatten(0, 1), draws))  # [k B, ...] each
        return self._unwrap({n: t.unflatten(0, pixels.shape[:2]) for n, t in features.items()})

    def evaluation_view(self, x: Any) -> Any:
        """Return the features of whole, uncropped images for a batch of an evaluation.

        Args:
            x: Inputs of the prepared data set, [..., B, ...].

        Returns:
            Features [..., B, D]: a tensor, or a dict by name if an algorithm also reads tokens.
        """
        if self.augment == "none":
            return x  # the features themselves
        return self._unwrap({n: t for n, t in x.items() if n in ("image", "tokens")})  # without what views need

    @staticmethod
    def _unwrap(features: dict[str, Tensor]) -> Any:
        """Return the tensor features["image"] if the dict has no other entry, else the dict itself."""
        return features if len(features) > 1 else features["image"]


def _are_first_of(tensors: Sequence[Tensor], last: Sequence[Tensor], has_clients: bool) -> bool:
    """Return whether a cached result contains the result for some tensors: whether it was computed from the same ones.

    Args:
        tensors: Tensors for which a result is needed.
        last: Tensors from which the cached result was computed.
        has_clients: Whether they have a first axis of clients.  Then `last` may have further clients at the end.
    """
    num_clients = len(tensors[0]) if has_clients else None  # None: the slice below selects everything
    return len(last) == len(tensors) and all(
        old.dim() == new.dim() and old[:num_clients].shape == new.shape and torch.equal(old[:num_clients], new)
        for old, new in zip(last, tensors)
    )
