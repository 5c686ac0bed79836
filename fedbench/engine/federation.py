"""The data of a federation: the samples of all clients as tensors, and the indices of each client's samples.

There is no data loader and no copy for each client.  uint8 images stay uint8 in memory.  Batches are normalized and
augmented after they were gathered.

Letters: n samples, N clients, C classes (channels for images), k clients and B batch size of a batch, H and W height
and width of images.
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
from fedbench.core.mapped import can_read_entries, take
from fedbench.core.options import require
from fedbench.core.rng import RowRandom, generator, key
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays
from fedbench.engine.host_inputs import Fetched, HostInput, on_device, run_in_background, sample_size
from fedbench.engine.shard import Shard, positions_in
from fedbench.tasks.base import Task, task_for

Inputs = Tensor | dict[str, Tensor]
StoredInputs = Tensor | HostInput | dict[str, Tensor] | dict[str, HostInput]
MAX_ELEMENTS = 1 << 24  # of tensors that are processed at once


@dataclass
class Augment:
    """Random augmentation of training images.

    Args:
        flip: Whether to flip images horizontally with probability 0.5.
        crop: Number of pixels by which normalized images are padded with 0 before a random crop to their size.
        outside: Label of padded pixels, for targets that are masks.
    """

    flip: bool = False
    crop: int = 0
    outside: int = 0

    def __call__(self, x: Tensor, y: Tensor, random: RowRandom) -> tuple[Tensor, Tensor]:
        """Augment a batch.  Masks are transformed as their images.

        Args:
            x: The images.  # [k, B, C, H, W]
            y: The targets.  Masks are [k, B, H, W].
            random: Random numbers with one row for each client.

        Returns:
            The augmented images, and the targets.
        """
        batch_size = x.shape[1]
        has_masks = y.dim() == 4 and y.shape[2:] == x.shape[3:]
        if self.flip:
            is_flipped = random.uniform(batch_size) < 0.5  # [k, B]
            x = _flip(x, is_flipped)
            y = _flip(y[:, :, None], is_flipped)[:, :, 0] if has_masks else y
        if self.crop:
            offset = (random.uniform(batch_size, 2) * (2 * self.crop + 1)).long()  # [k, B, 2]
            x = _pad_and_crop(x, offset, self.crop, 0)
            y = _pad_and_crop(y[:, :, None], offset, self.crop, self.outside)[:, :, 0] if has_masks else y
        return x, y


def _flip(x: Tensor, is_flipped: Tensor) -> Tensor:
    """Return images x [k, B, C, H, W] in which those where is_flipped [k, B] is True are flipped horizontally."""
    return torch.where(is_flipped[..., None, None, None], x.flip(-1), x)


def _pad_and_crop(x: Tensor, offset: Tensor, padding: int, value: int) -> Tensor:
    """Pad images on all sides, and crop them to their former size.

    Args:
        x: The images.  # [k, B, C, H, W]
        offset: Row and column of the padded image at which the crop begins, from 0 to 2 padding.  # [k, B, 2]
        padding: Number of padded pixels on each side.
        value: The value of padded pixels.

    Returns:
        The images.  # [k, B, C, H, W]
    """
    k, b, channels, height, width = x.shape
    x = torch.nn.functional.pad(x, (padding,) * 4, value=value)
    rows = offset[..., 0, None] + torch.arange(height, device=x.device)  # [k, B, H]
    columns = offset[..., 1, None] + torch.arange(width, device=x.device)  # [k, B, W]
    x = x.gather(-2, rows[:, :, None, :, None].expand(k, b, channels, height, x.shape[-1]))  # width + 2 padding
    return x.gather(-1, columns[:, :, None, None, :].expand(k, b, channels, height, width))


def _max_entry(x: Tensor | HostInput, start: int, count: int) -> int:
    """Return the largest value in a block of an input.

    Args:
        x: The input, such as tokens.  # [n, ...]
        start: First entry of the block.
        count: Number of entries, or fewer at the end of the input.
    """
    index = np.arange(start, min(start + count, x.shape[0]))
    return int((x.take(index) if isinstance(x, HostInput) else x[start : start + count]).max())


@dataclass
class Federation:
    """The samples of all clients: inputs, targets, and `splits`, from "train", "val" or "test" to clients' indices.

    Attributes:
        inputs: The inputs, one or several by name, on the device or in host memory (`HostInput`).  # [n, ...] each
        targets: The targets, on the device.  Masks with labels from -1 to 255 are uint8.  # [n, ...]
        splits: The samples of each client, by split: "train", "val", "test" and those of `hold_out`.
        task: The loss and the metrics.
        num_classes: Number of classes, or of other outputs.
        class_names: Names of the classes, or None.
        class_mask: Whether each client has each class, or None if all have all.  # [N, C] bool
        domains: Domain of each client, or None.  # [N]
        domain_names: Names of the domains, or None.
        scale: Normalization of uint8 images is x * scale + shift.  # [C, 1, 1]
        shift: See scale.
        augment: Augments a training batch (x, y, random), or None.
        evaluation_view: Selects what the model reads from the stored inputs, outside of training.  None: all of them.
        template: Template of texts for class names, "a photo of a {}.".
        shared: For inputs that several samples share, the entry of each sample.  The key is the name of the input,
            or "inputs" if there is only one.  # [n] each
        shard: The clients and samples of this process.  None: all.
        stored: For inputs of which this process stores some entries only, these entries, ascending.  # [m] each
        stored_targets: The samples whose targets this process stores, ascending.  None: all.  # [m]
        known_counts: Results of `counts` from before targets were dropped.  # [N, C] each
        known_totals: `class_totals` from before targets were dropped.  # [C]
        cohort_size: Number of clients of a round, K.
        on_host: Whether inputs are in host memory.
        num_clients: Number of clients, N.
        num_samples: Number of training samples of each client.  # [N]
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
    scale: Tensor | None = None
    shift: Tensor | None = None
    augment: Callable[[Any, Tensor, RowRandom], tuple[Any, Tensor]] | None = None
    evaluation_view: Callable[[Any], Any] | None = None
    template: str = "a photo of a {}."
    shared: dict[str, Tensor] = field(default_factory=dict)
    shard: Shard | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)
    stored_targets: Tensor | None = None
    known_counts: dict[str, np.ndarray] = field(default_factory=dict)
    known_totals: np.ndarray | None = None
    cohort_size: int = 1
    on_host: bool = field(init=False)
    num_clients: int = field(init=False)
    num_samples: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.on_host = any(isinstance(x, HostInput) for x in self.named_inputs().values())
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
        shard: Shard | None = None,
    ) -> Federation:
        """Build a federation from a data set and a partition.

        Args:
            arrays: The data set.
            split: The samples of each client.
            device: The compute device.
            normalize: Whether to normalize uint8 images by the data set's mean and standard deviation.
            augment: dataset.augment: the options flip and crop, or None.
            task: The task.  Default: the one of arrays.task.
            on_host: Whether inputs stay in host memory, or in their files.
            shard: The clients and samples of this process.  Inputs of other samples are not stored, and not read from
                files.  None: all.

        Raises:
            ConfigError: An option of augment is unknown, or inputs are not images.
        """

        def store(values: np.ndarray) -> Any:
            return HostInput(values, torch.device(device)) if on_host else on_device(values, device)

        entries, stored = arrays.shared or {}, {}
        parts = arrays.parts()
        for name, values in parts.items():
            # inputs that stay in a file take no memory
            if shard is not None and not (on_host and can_read_entries(values)):
                stored[name] = shard.entries(entries.get(name))
        domains = _client_domains(arrays, split)
        has_mask = arrays.class_mask is not None and domains is not None
        scale, shift = _scaling(arrays, normalize, device)
        return cls(
            inputs=unwrap_inputs(
                {name: store(take(x, stored[name]) if name in stored else x) for name, x in parts.items()},
                arrays.inputs,
            ),
            targets=on_device(_compact_masks(arrays.targets, arrays.num_classes), device),
            splits={"train": split.train, "val": split.val, "test": split.test},
            task=task or task_for(arrays.task)(),
            num_classes=arrays.num_classes,
            class_names=arrays.class_names,
            class_mask=on_device(arrays.class_mask[domains], device) if has_mask else None,  # type: ignore[index]
            domains=domains,
            domain_names=arrays.domain_names,
            scale=scale,
            shift=shift,
            augment=_augment(augment, arrays),
            template=arrays.template,
            shared={name: torch.from_numpy(x).to("cpu" if on_host else device) for name, x in entries.items()},
            shard=shard,
            stored={name: torch.from_numpy(x).to("cpu" if on_host else device) for name, x in stored.items()},
        )

    @property
    def input_shape(self) -> tuple | dict[str, tuple]:
        """Shape of one sample as the model reads it; a dict of shapes by name if there are several inputs."""
        return self.task.input_shape(map_inputs(lambda x: tuple(x.shape[1:]), self.inputs), self.num_classes)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's inputs, without targets, if all values were float32; at least 1, as it is a divisor."""
        return max(1, sum(4 * sample_size(x) for x in self.named_inputs().values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of inputs and targets in the memory of this process.  Inputs in files count 0."""
        return sum(x.nbytes for x in self.named_inputs().values()) + self.targets.nbytes

    @property
    def outputs_per_sample(self) -> int:
        """Number of values that the model returns for one sample: C for classification, C H W for segmentation."""
        _, target = self.gather(torch.zeros(1, dtype=torch.int64, device=self.device))
        return math.prod(self.task.output_shape(target, self.task.outputs(self.num_classes)))

    @property
    def device(self) -> torch.device:
        """The device that has the targets and computes: cpu or a GPU.  Inputs may be elsewhere (`on_host`)."""
        return self.targets.device

    @property
    def label_counts(self) -> np.ndarray:
        """Number of training samples (or pixels) of each client and class, [N, C] int64; 0 if there are no classes."""
        return self.counts("train")

    def counts(self, split: str) -> np.ndarray:
        """Count the samples (or pixels) of each class.

        Args:
            split: Name of the split, such as "train".

        Returns:
            The counts, 0 if the task has no classes.  # [N, C]
        """
        if split in self.known_counts:  # counted before `drop_other_targets`
            return self.known_counts[split]
        out = torch.zeros(self.num_clients, self.num_classes, dtype=torch.int64, device=self.device)
        samples = self.splits[split]
        # for each sample of the split, the client that has it and its index in the data set
        owners = torch.from_numpy(np.asarray(samples.owners())).to(self.device)
        index = torch.from_numpy(np.asarray(samples.indices)).to(self.device)
        block_size = max(1, MAX_ELEMENTS // (self.num_classes * math.prod(self.targets.shape[1:])))  # limits memory
        for block_owners, block_index in zip(owners.split(block_size), index.split(block_size)):
            class_counts = self.task.class_counts(self.targets_of(block_index), self.num_classes)
            if class_counts is not None:
                out.index_add_(0, block_owners, class_counts)
        return out.cpu().numpy()

    @property
    def class_totals(self) -> np.ndarray | None:
        """Number of training samples (or pixels) of each class, [C] int64; None if a target is not a single class."""
        if self.stored_targets is not None:  # this process has no longer all targets, and counted them before
            return self.known_totals
        index = torch.from_numpy(self.splits["train"].indices).to(self.device)
        totals = self.task.class_totals(self.targets_of(index), self.num_classes)
        return None if totals is None else totals.cpu().numpy()

    def drop_other_targets(self) -> None:
        """Drop the targets of samples that this process does not store, such as masks.  Labels [n] stay.

        Call it after the task has been set up, which may read all targets.
        """
        if self.shard is None or self.targets.dim() == 1:
            return
        # results that need all targets, for later calls of `counts` and `class_totals`
        self.known_counts, self.known_totals = {"train": self.counts("train")}, self.class_totals
        self.stored_targets = torch.from_numpy(self.shard.samples).to(self.device)
        self.targets = self.targets[self.stored_targets]

    def hold_out(
        self, fraction: float, remaining: str = "remaining", held_out: str = "held_out", seed: int = 0
    ) -> None:
        """Divide each client's training samples into two new splits.  The split "train" does not change.

        Args:
            fraction: Fraction of the samples that is held out: at least one sample of a client with two or more.
            remaining: Name of the split of the remaining samples.
            held_out: Name of the split of the held-out samples.
            seed: Key of the random selection.
        """
        remaining_samples, held_out_samples = [], []
        for i in range(self.num_clients):
            samples = self.splits["train"][i]
            order = generator(seed, "hold_out", i).permutation(samples)
            num_remaining = len(samples) - max(int(len(samples) * fraction), int(len(samples) > 1))
            remaining_samples.append(np.sort(order[:num_remaining]))
            held_out_samples.append(np.sort(order[num_remaining:]))
        self.splits |= {remaining: Ragged.from_lists(remaining_samples), held_out: Ragged.from_lists(held_out_samples)}

    def select_clients(self, ids: np.ndarray) -> Federation:
        """Return a federation of some clients, with new ids from 0.

        Args:
            ids: The clients.  # [k]
        """
        index = torch.from_numpy(ids).to(self.device)
        return replace(
            self,
            splits={name: samples.select(ids) for name, samples in self.splits.items()},
            class_mask=None if self.class_mask is None else self.class_mask[index],
            domains=None if self.domains is None else self.domains[ids],
            shard=None if self.shard is None else self.shard.select_clients(ids),
            known_counts={name: counts[ids] for name, counts in self.known_counts.items()},
            known_totals=None,  # those of all clients
        )

    def require_samples(self, ids: np.ndarray) -> None:
        """Raise RuntimeError unless this process stores the samples of the clients ids [k]."""
        if self.shard is not None:
            self.shard.require_owned(ids)

    def gather(self, index: Tensor, training: bool = False, fetched: Fetched | None = None) -> tuple[Inputs, Tensor]:
        """Gather samples.

        Args:
            index: Indices of the samples, on the device.  # [...] int64
            training: Whether to return the inputs for `stochastic_inputs`, instead of those of an evaluation.
            fetched: The result of `fetch` for this index.  Without it, inputs in host memory are gathered here, which
                waits for the device.

        Returns:
            The normalized inputs and the targets.  # [*index.shape, ...]
        """
        flat_index = index.reshape(-1)

        def entries_of(values: Any, entries: Tensor) -> Tensor:
            """Return values [m, ...] at positions `entries` [b], one per element of `index`.  # [*index.shape, ...]"""
            return values.index_select(0, entries).view(*index.shape, *values.shape[1:])

        if self.on_host:  # inputs stay in host memory or in files
            fetched = self.fetch(index.cpu().numpy()) if fetched is None else fetched
            assert fetched is not None
            inputs = {name: x.to(self.device, non_blocking=True) for name, x in fetched.items()}
        else:
            inputs = {name: entries_of(x, self._entries(name, flat_index)) for name, x in self.named_inputs().items()}
        x = unwrap_inputs({name: self.normalized(values) for name, values in inputs.items()}, self.inputs)
        y = self.targets_of(flat_index)
        y = y.view(*index.shape, *y.shape[1:])
        y = y.long() if y.dtype == torch.uint8 else y  # masks are stored as uint8 to save memory
        if training:
            return x, y
        # evaluation_view: selects what the model reads outside of training, for example one of several views
        return self._evaluation_inputs(x if self.evaluation_view is None else self.evaluation_view(x), y, index)

    def targets_of(self, samples: Tensor) -> Tensor:
        """Return the stored targets of samples.

        Args:
            samples: Indices of samples, on the device.  # [b] int64

        Returns:
            The targets.  # [b, ...]
        """
        stored = self.stored_targets  # the samples whose targets this process has, ascending; None: all
        return self.targets.index_select(0, samples if stored is None else positions_in(stored, samples))

    @property
    def has_stochastic_inputs(self) -> bool:
        """Whether inputs of training batches are random: augmented images, or inputs that the task generates."""
        return self.augment is not None or self.task.has_stochastic_inputs

    def stochastic_inputs(self, x: Inputs, y: Tensor, random: RowRandom) -> tuple[Inputs, Tensor]:
        """Return random inputs and targets for training.

        Args:
            x: The normalized inputs, before augmentation: those of `gather` with training=True.  # [k, B, ...]
            y: The targets.  # [k, B, ...]
            random: Random numbers with one row for each client.

        Returns:
            The inputs and the targets: augmented if the data set has an augmentation, and then as the task generates
            them.  # [k, B, ...] each
        """
        if self.augment is not None:
            x, y = self.augment(x, y, random)
        return self.task.stochastic_inputs(x, y, random, self.num_classes)

    def _evaluation_inputs(self, x: Any, y: Tensor, index: Tensor) -> tuple[Inputs, Tensor]:
        """Return inputs and targets for an evaluation.  Random ones depend only on the index of the sample.

        Args:
            x: The normalized inputs.  # [*index.shape, ...]
            y: The targets.  # [*index.shape, ...]
            index: Indices of the samples.  # [...]

        Returns:
            The inputs and targets, as the task generates them if they are random.  # [*index.shape, ...] each
        """
        if not self.task.has_stochastic_inputs:
            return x, y
        # Each sample is passed as a client with a batch of one, whose random numbers have the key of the sample: its
        # index, combined with a key that is shifted to the 63 bits of an int64.
        num_axes, random = index.dim(), RowRandom(index.reshape(-1) ^ (key("evaluation") >> 1))
        x, y = (map_inputs(lambda t: t.reshape(index.numel(), 1, *t.shape[num_axes:]), v) for v in (x, y))
        x, y = self.task.stochastic_inputs(x, y, random, self.num_classes)
        x, y = (map_inputs(lambda t: t.reshape(*index.shape, *t.shape[2:]), v) for v in (x, y))
        return x, y

    def fetch(self, index: np.ndarray) -> Fetched | None:
        """Gather inputs in host memory.

        Args:
            index: Indices of the samples.  # [...]

        Returns:
            The inputs by name [*index.shape, ...], or None if inputs are on the device.
        """
        if not self.on_host:
            return None
        flat_index = torch.from_numpy(np.ascontiguousarray(index).reshape(-1))
        fetched = {}
        for name, x in self.named_inputs().items():
            # _entries: positions of the samples' inputs among the stored ones, as samples may share an input
            fetched[name] = x.take(self._entries(name, flat_index).view(index.shape).numpy())
        return fetched

    def fetch_ahead(self, index: np.ndarray) -> Callable[[], Fetched | None]:
        """Start to gather samples in the background thread.

        Args:
            index: Indices of the samples.  # [...]

        Returns:
            A function without arguments that waits for the result, which is that of `fetch`.
        """
        return run_in_background(lambda: self.fetch(index))

    def largest_tokens(self) -> dict[str, int]:
        """Return {input name: largest value} of int64 inputs, which are tokens; inputs without values are omitted."""
        largest = {}
        for name, x in self.named_inputs().items():
            if x.dtype == torch.int64 and math.prod(x.shape):
                block_size = MAX_ELEMENTS // math.prod(x.shape[1:]) + 1  # samples at a time, to limit memory
                largest[name] = max(_max_entry(x, start, block_size) for start in range(0, x.shape[0], block_size))
        return largest

    def named_inputs(self) -> dict[str, Any]:
        """Return the stored inputs by name; a single input has the name "inputs".

        A tensor or HostInput has an entry for each sample [n, ...].  It has fewer if samples share entries (`shared`)
        or other processes store them (`stored`).
        """
        return wrap_inputs(self.inputs)

    def _entries(self, name: str, samples: Tensor) -> Tensor:
        """Return which stored entry of an input each sample has.

        Args:
            name: Name of the input.
            samples: Indices of samples.  # [b]

        Returns:
            Positions of entries among the stored ones.  They differ from samples if several samples share an entry, or
            if this process stores some entries only.  # [b]
        """
        shared, stored = self.shared.get(name), self.stored.get(name)
        entries = samples if shared is None else shared.index_select(0, samples)
        return entries if stored is None else positions_in(stored, entries)

    def normalized(self, x: Tensor) -> Tensor:
        """Return uint8 images as float32 x * scale + shift, and inputs of other types unchanged.

        Args:
            x: Stored inputs, with a scale and shift per channel if they are images.  # [..., C, H, W]

        Returns:
            The inputs, in the shape of x.  If the federation has no scale, images are floats from 0 to 255.
        """
        if x.dtype != torch.uint8:
            return x
        x = x.float()
        return x if self.scale is None or self.shift is None else x.mul_(self.scale).add_(self.shift)


def _compact_masks(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Return masks [n, H, W] as uint8 if their labels fit, and other targets unchanged.

    The ignored label -1 becomes 255, which is ignored as well if there are at most 255 classes.
    """
    smallest = -1 if num_classes <= 255 else 0
    fits = targets.ndim == 3 and targets.dtype == np.int64 and targets.min() >= smallest and targets.max() <= 255
    return targets.astype(np.uint8) if fits else targets


def _scaling(arrays: Arrays, normalize: bool, device: torch.device | str) -> tuple[Tensor | None, Tensor | None]:
    """Return the normalization of uint8 images x to x * scale + shift.

    Args:
        arrays: The data set, with the mean and standard deviation of each channel of x / 255, or None.
        normalize: Whether to use them.  Otherwise, images are only divided by 255.
        device: The compute device.

    Returns:
        scale and shift.  # [C, 1, 1] each
    """
    mean, std = (arrays.mean, arrays.std) if normalize and arrays.mean is not None else ((0.0,), None)
    std = std or (1.0,) * len(mean)
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)], device=device)
    return scale[:, None, None], shift[:, None, None]


def _augment(options: dict | None, arrays: Arrays) -> Augment | None:
    """Return the augmentation of training images, or None without options.

    Args:
        options: dataset.augment, with the keys flip and crop.
        arrays: The data set.

    Raises:
        ConfigError: An option is unknown, or the data set has no images.
    """
    if not options:
        return None
    unknown = set(options) - {"flip", "crop"}
    require(
        not unknown,
        f"dataset.augment has no option {', '.join(sorted(unknown))}: set only flip (true or false) and crop (pixels)",
    )
    require(
        arrays.images is not None,
        "dataset.augment needs images [channels, height, width], but this data set has none: set dataset.augment=null",
    )
    return Augment(flip=bool(options.get("flip", False)), crop=int(options.get("crop", 0)))


def _client_domains(arrays: Arrays, split: Split) -> np.ndarray | None:
    """Return the domain of each client, an index: that of its first training sample.

    Args:
        arrays: The data set, with the domain of each sample, or None.
        split: Its partition over the clients.

    Returns:
        The domains, [N] int64; None if the data set has none.  A client without training samples gets the domain of
        the next entry in the list of all training samples: the next client's first sample, or else the last sample.
    """
    if arrays.domain is None:
        return None
    # offsets[i]: where the samples of client i begin in `indices`, the list of all clients' samples
    first = split.train.indices[np.minimum(split.train.offsets[:-1], len(split.train.indices) - 1)]
    return arrays.domain[first]
