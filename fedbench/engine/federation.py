"""The data of a federation: tensors on the compute device, and which sample belongs to whom.

There is no loader and no copy per client: a client is a list of indices.  uint8 images stay uint8 in memory;
scaling (and augmentation, if any) happens on the gathered batch.

Letters: n samples, N clients, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.inputs import map_inputs, unwrap_inputs, wrap_inputs
from fedbench.core.options import require
from fedbench.core.rng import RowRandom, generator, key
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.engine.host_inputs import Fetched, HostInput, ahead, on_device, sample_size
from fedbench.tasks.base import Task, task_for

Inputs = Tensor | dict[str, Tensor]
StoredInputs = Tensor | HostInput | dict[str, Tensor] | dict[str, HostInput]
COUNTED = 1 << 24  # numbers of counted targets held at a time


@dataclass
class Augment:
    """Training-time augmentation of image batches: random horizontal flip; random crop after `crop` pixels of
    zero padding (of the normalized image).  A target that is a mask of the image's size moves with its image;
    outside: what it says of the pixels that padding adds."""

    flip: bool = False
    crop: int = 0
    outside: int = 0

    def __call__(self, x: Tensor, y: Tensor, random: RowRandom) -> tuple[Tensor, Tensor]:
        """x [k, B, C, H, W], y [k, B, H, W] or anything else; one draw per sample, keyed by client and step."""
        b, masks = x.shape[1], y.dim() == 4 and y.shape[2:] == x.shape[3:]
        if self.flip:
            flipped = random.uniform(b) < 0.5  # [k, B]
            x, y = _flipped(x, flipped), _flipped(y[:, :, None], flipped)[:, :, 0] if masks else y
        if self.crop:
            offset = (random.uniform(b, 2) * (2 * self.crop + 1)).long()  # [k, B, 2]
            x = _shifted(x, offset, self.crop, 0)
            y = _shifted(y[:, :, None], offset, self.crop, self.outside)[:, :, 0] if masks else y
        return x, y


def _flipped(x: Tensor, which: Tensor) -> Tensor:
    """Images x [k, B, C, H, W], those where which [k, B] from right to left."""
    return torch.where(which[..., None, None, None], x.flip(-1), x)


def _shifted(x: Tensor, offset: Tensor, border: int, fill: int) -> Tensor:
    """Images x [k, B, C, H, W] within a border, cut to their own size at offset [k, B, 2]."""
    k, b, channels, rows, cols = x.shape
    x = torch.nn.functional.pad(x, (border,) * 4, value=fill)
    r = offset[..., 0, None] + torch.arange(rows, device=x.device)  # [k, B, H]
    c = offset[..., 1, None] + torch.arange(cols, device=x.device)  # [k, B, W]
    x = x.gather(-2, r[:, :, None, :, None].expand(k, b, channels, rows, x.shape[-1]))
    return x.gather(-1, c[:, :, None, None, :].expand(k, b, channels, rows, cols))


def _largest(x: Tensor | HostInput, start: int, count: int) -> int:
    """Return the maximum of `count` entries of an input, from `start` on."""
    index = np.arange(start, min(start + count, x.shape[0]))
    return int((x.take(index) if isinstance(x, HostInput) else x[start : start + count]).max())


@dataclass
class Federation:
    """Tensors and index lists.

    inputs [n, ...] (or a dict of such), targets [n, ...] (masks as uint8); splits: {"train", "val", "test"} ->
    Ragged, plus those that `hold_out` adds; class_mask [N, C] or None; domains [N] or None; label_counts [N, C] of the
    training part (None where targets are no single labels).  shared: by the name of an input ("inputs" where there is
    one alone) that several samples show and that has an entry for each of m < n, which entry a sample shows [n].

    Inputs may lie in host memory (`HostInput`); everything else is on the device.
    """

    inputs: StoredInputs
    targets: Tensor
    splits: dict[str, Ragged]
    task: Task
    num_classes: int
    class_names: list[str] | None = None
    class_mask: Tensor | None = None
    domains: np.ndarray | None = None
    domain_names: list[str] | None = None
    scale: Tensor | None = None  # x * scale + shift normalizes, [channels, 1, 1]
    shift: Tensor | None = None
    augment: Callable[[Any, Tensor, RowRandom], tuple[Any, Tensor]] | None = None  # of a training batch x, y
    present: Callable[[Any], Any] | None = None  # of any other, where inputs hold more than one view
    template: str = "a photo of a {}."
    shared: dict[str, Tensor] = field(default_factory=dict)
    cohort_size: int = 1  # K, clients per round
    on_host: bool = field(init=False)  # whether inputs lie in host memory
    num_clients: int = field(init=False)
    num_samples: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.on_host = any(isinstance(x, HostInput) for x in self.parts().values())
        self.num_clients = len(self.splits["train"])
        self.num_samples = np.asarray(self.splits["train"].sizes)  # [N]

    @classmethod
    def build(
        cls,
        arrays: Arrays,
        split: Split,
        device: torch.device | str = "cpu",
        normalize: bool = True,
        augment: dict | None = None,
        task: Task | None = None,
        on_host: bool = False,
    ) -> Federation:
        """From plain arrays and a partition.

        normalize: scale uint8 images by the data set's mean and std.  task: default: that of the targets' kind.
        on_host: whether inputs stay in host memory.
        """

        def tensor(a: np.ndarray) -> Tensor:
            return on_device(a, device)

        def store(a: np.ndarray) -> Any:
            return HostInput(a, torch.device(device)) if on_host else tensor(a)

        domains = _client_domains(arrays, split)
        mask = None if arrays.class_mask is None or domains is None else tensor(arrays.class_mask[domains])
        scale, shift = _scaling(arrays, normalize, device)
        return cls(
            map_inputs(store, arrays.inputs),
            tensor(_compact(arrays.targets)),
            {"train": split.train, "val": split.val, "test": split.test},
            task or task_for(arrays.task)(),
            arrays.num_classes,
            arrays.class_names,
            mask,
            domains,
            arrays.domain_names,
            scale,
            shift,
            _augment(augment, arrays),
            template=arrays.template,
            shared={
                name: torch.from_numpy(entry).to("cpu" if on_host else device)
                for name, entry in (arrays.shared or {}).items()
            },
        )

    @property
    def input_shape(self) -> tuple | dict[str, tuple]:
        """Shape of one sample (of each input), as the model is given it."""
        return self.task.input_shape(map_inputs(lambda x: tuple(x.shape[1:]), self.inputs), self.num_classes)

    @property
    def sample_bytes(self) -> int:
        """Of one sample's inputs, as the model reads them, in float32; at least 1."""
        return max(1, sum(4 * sample_size(x) for x in self.parts().values()))

    @property
    def outputs_per_sample(self) -> int:
        """How many numbers a model answers a sample with."""
        _, one = self.gather(torch.zeros(1, dtype=torch.int64, device=self.device))
        return math.prod(self.task.output_shape(one, self.task.outputs(self.num_classes)))

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.targets.device

    @property
    def label_counts(self) -> np.ndarray:
        """How many training samples, or pixels, of each class every client has.  # [N, C]"""
        return self.counts("train")

    def counts(self, split: str) -> np.ndarray:
        """What the task counts of each class in a client's split; zero where it knows no classes.  # [N, C]"""
        out = torch.zeros(self.num_clients, self.num_classes, dtype=torch.int64, device=self.device)
        ragged = self.splits[split]
        owner, index = (torch.from_numpy(np.asarray(a)).to(self.device) for a in (ragged.owners(), ragged.indices))
        at_once = max(1, COUNTED // (self.num_classes * math.prod(self.targets.shape[1:])))
        for mine, samples in zip(owner.split(at_once), index.split(at_once)):
            counted = self.task.class_counts(self.targets[samples], self.num_classes)
            if counted is not None:
                out.index_add_(0, mine, counted)
        return out.cpu().numpy()

    def hold_out(self, share: float, kept: str = "kept", held: str = "held", seed: int = 0) -> None:
        """Add two splits: `held`, a random share of every client's training part (at least one sample where a
        client has two or more), and `kept`, the rest.  "train" stays whole; share and seed determine both."""
        rest, out = [], []
        for i in range(self.num_clients):
            samples = self.splits["train"][i]
            order = generator(seed, "hold_out", i).permutation(samples)
            num_kept = len(samples) - max(int(len(samples) * share), int(len(samples) > 1))
            rest.append(np.sort(order[:num_kept]))
            out.append(np.sort(order[num_kept:]))
        self.splits |= {kept: Ragged.from_lists(rest), held: Ragged.from_lists(out)}

    def among(self, ids: np.ndarray) -> Federation:
        """The same samples for some of the clients [k], who are numbered anew from 0."""
        rows = torch.from_numpy(ids).to(self.device)
        return replace(
            self,
            splits={name: ragged.select(ids) for name, ragged in self.splits.items()},
            class_mask=None if self.class_mask is None else self.class_mask[rows],
            domains=None if self.domains is None else self.domains[ids],
        )

    def gather(self, index: Tensor, training: bool = False, fetched: Fetched | None = None) -> tuple[Inputs, Tensor]:
        """Normalized inputs [*index.shape, ...] and targets of samples, index int64 on the device.

        training: what `drawn` will be given, instead of what an evaluation sees.  fetched: what `fetch` returned for
        this index; where inputs lie in host memory, its absence makes the host wait for the index.
        """
        flat = index.reshape(-1)

        def pick(t: Any, entries: Tensor) -> Tensor:
            return t.index_select(0, entries).view(*index.shape, *t.shape[1:])

        if self.on_host:
            fetched = self.fetch(index.cpu().numpy()) if fetched is None else fetched
            assert fetched is not None
            parts = {name: x.to(self.device, non_blocking=True) for name, x in fetched.items()}
        else:
            parts = {name: pick(x, self._entries(name, flat)) for name, x in self.parts().items()}
        x = unwrap_inputs({name: self.normalized(t) for name, t in parts.items()}, self.inputs)
        y = pick(self.targets, flat)
        y = y.long() if y.dtype == torch.uint8 else y
        if training:
            return x, y
        return self._as_evaluated(x if self.present is None else self.present(x), y, index)

    @property
    def draws(self) -> bool:
        """Whether training batches are drawn: augmented, or made by the task."""
        return self.augment is not None or self.task.has_stochastic_inputs

    def drawn(self, x: Inputs, y: Tensor, random: RowRandom) -> tuple[Inputs, Tensor]:
        """A training batch x, y [k, B, ...] as it is trained on."""
        if self.augment is not None:
            x, y = self.augment(x, y, random)
        return self.task.stochastic_inputs(x, y, random, self.num_classes)

    def _as_evaluated(self, x: Any, y: Tensor, index: Tensor) -> tuple[Inputs, Tensor]:
        """Samples as the task draws them by their numbers index, at any time the same."""
        if not self.task.has_stochastic_inputs:
            return x, y
        axes, random = index.dim(), RowRandom(index.reshape(-1) ^ key("evaluation") >> 1)
        x, y = (map_inputs(lambda t: t.reshape(index.numel(), 1, *t.shape[axes:]), v) for v in (x, y))
        x, y = self.task.stochastic_inputs(x, y, random, self.num_classes)
        x, y = (map_inputs(lambda t: t.reshape(*index.shape, *t.shape[2:]), v) for v in (x, y))
        return x, y

    def fetch(self, index: np.ndarray) -> Fetched | None:
        """Entries of samples [*index.shape, ...], gathered in host memory; None where inputs are on the device."""
        if not self.on_host:
            return None
        flat = torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
        return {name: x.take(self._entries(name, flat).view(index.shape).numpy()) for name, x in self.parts().items()}

    def fetch_ahead(self, index: np.ndarray) -> Callable[[], Fetched | None]:
        """`fetch`, begun in another thread; a call of what is returned waits for it."""
        return ahead(lambda: self.fetch(index))

    def largest_tokens(self) -> dict[str, int]:
        """Return the largest number in each input of tokens (int64), by the input's name."""
        tokens = {name: x for name, x in self.parts().items() if x.dtype == torch.int64 and math.prod(x.shape)}
        some = {name: range(0, x.shape[0], COUNTED // math.prod(x.shape[1:]) + 1) for name, x in tokens.items()}
        return {name: max(_largest(x, start, some[name].step) for start in some[name]) for name, x in tokens.items()}

    def parts(self) -> dict[str, Any]:
        """Return the stored inputs by name.  # [n, ...] each"""
        return wrap_inputs(self.inputs)

    def _entries(self, name: str, samples: Tensor) -> Tensor:
        """Which entries of an input samples [b] show.  # [b]"""
        entry = self.shared.get(name)
        return samples if entry is None else entry.index_select(0, samples)

    def normalized(self, x: Tensor) -> Tensor:
        """uint8 inputs [..., C, H, W] as float32, scaled by the set's mean and std; anything else as it is."""
        if x.dtype != torch.uint8:
            return x
        x = x.float()
        return x if self.scale is None or self.shift is None else x.mul_(self.scale).add_(self.shift)


def _compact(targets: np.ndarray) -> np.ndarray:
    """Masks [n, H, W] as uint8 where that holds their labels: an eighth of the memory; -1 is 255 there, ignored too."""
    small = targets.ndim == 3 and targets.dtype == np.int64 and targets.min() >= -1 and targets.max() <= 255
    return targets.astype(np.uint8) if small else targets


def _scaling(arrays: Arrays, normalize: bool, device: torch.device | str) -> tuple[Tensor | None, Tensor | None]:
    mean, std = (arrays.mean, arrays.std) if normalize and arrays.mean is not None else ((0.0,), None)
    std = std or (1.0,) * len(mean)
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)], device=device)
    return scale[:, None, None], shift[:, None, None]


def _augment(options: dict | None, arrays: Arrays) -> Augment | None:
    if not options:
        return None
    unknown = set(options) - {"flip", "crop"}
    require(not unknown, f"dataset.augment knows flip and crop, not {', '.join(sorted(unknown))}")
    require(arrays.images is not None, "dataset.augment needs image inputs [channels, height, width]")
    return Augment(bool(options.get("flip", False)), int(options.get("crop", 0)))


def _client_domains(arrays: Arrays, split: Split) -> np.ndarray | None:
    """The natural silo of each client's first training sample.  # [N]"""
    if arrays.domain is None:
        return None
    first = split.train.indices[np.minimum(split.train.offsets[:-1], len(split.train.indices) - 1)]
    return arrays.domain[first]
