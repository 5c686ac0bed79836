"""The NumPy arrays that every data source returns, with their checks.

A source is a class whose constructor takes the options of its YAML and whose ``load()`` returns ``Arrays``.  A new
source needs two files: ``x.py`` in the folder of its kind (images, tables, scans, questions, text, arrays) and
``conf/dataset/x.yaml``.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedbench.core import digests
from fedbench.core.inputs import map_inputs, unwrap_inputs, wrap_inputs
from fedbench.core.mapped import blocks
from fedbench.core.options import ConfigError, require, require_distinct

if TYPE_CHECKING:
    from fedbench.core.split import Split
    from fedbench.tasks.base import Task

TRAIN, VAL, TEST, EXTRA = 0, 1, 2, 3
PARTS = {"train": TRAIN, "val": VAL, "test": TEST}
NOT_DATA = ("fit", "shared")  # fields that are not part of the digest; shared is added if it is not None


@dataclass
class Arrays:
    """A data set of n samples of C classes in memory; inputs may also be an np.memmap.

    Attributes:
        inputs: uint8 images [n, channels, height, width], float32 features [n, ...], or a dict of such arrays (image
            and question tokens), all with the same first dimension unless ``shared`` names them.
        targets: int64 labels [n] in [0, C), float32 multi-hot rows [n, C], masks [n, height, width] (uint8 or int64),
            or float32 numbers [n] or [n, R], of which R is num_classes.
        task: The kind of targets, by the name of its file in fedbench/tasks.
        split: The published split, [n] int8: 0 train, 1 validation, 2 test (all 0 without a published split), 3 extra.
            Extra samples, such as synthesized images, are used for training only, and need domain.
        domain: The natural client (hospital, user, style) of each sample, [n] int64, or None.
        mean, std: Mean and standard deviation of x / 255 per channel, by which uint8 images are normalized.  None: they
            are not normalized.
        published_scaling: The mean and std per channel of the papers, where they differ from ``mean`` and ``std``.
        class_mask: The classes of each natural client, [domains, C] bool, or None for all classes.
        template: The sentence with a class name for a vision-language model; {} is the name.
        subject: The patient of each sample, [n] int64 >= 0, or None.  No patient is both in training and in test data.
        shared: For inputs that several samples share (an image with nine questions), the index of each sample's entry,
            [n] int64, by the name of the input ("inputs" if there is one).
        fit: Function that prepares inputs once the samples are divided over clients, for example standardizes them by
            the training parts.  fit(arrays, split, normalize) receives these arrays without fit, whose inputs may be
            any [n, ...], and returns the arrays that clients train on.  None: clients train on these arrays.
    """

    inputs: np.ndarray | dict[str, np.ndarray]
    targets: np.ndarray
    split: np.ndarray
    num_classes: int
    task: str = "classification"
    class_names: list[str] | None = None
    domain: np.ndarray | None = None
    domain_names: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    class_mask: np.ndarray | None = None
    subject: np.ndarray | None = None
    template: str = "a photo of a {}."
    published_scaling: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    fit: "Callable[[Arrays, Split, bool], Arrays] | None" = None
    shared: dict[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def digest(self) -> str:
        """A hash, in hexadecimal digits, that is equal for equal data: of all fields except ``fit``."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_DATA}
        if self.targets.dtype == np.uint8:  # masks have the same digest with any dtype
            facts["targets"] = digests.Widened(self.targets, np.int64)
        return digests.digest(facts if self.shared is None else {**facts, "shared": self.shared})

    def parts(self) -> dict[str, np.ndarray]:
        """Return the inputs as a dict from name to array, {"inputs": array} if they are a single array."""
        return wrap_inputs(self.inputs)

    @property
    def images(self) -> np.ndarray | None:
        """The inputs if they are a single array [n, channels, height, width], else None."""
        return self.inputs if isinstance(self.inputs, np.ndarray) and self.inputs.ndim == 4 else None

    @property
    def nbytes(self) -> int:
        """The memory of inputs and targets together, in bytes."""
        return sum(values.nbytes for values in self.parts().values()) + self.targets.nbytes

    @property
    def input_shape(self) -> tuple | dict[str, tuple]:
        """The shape of one sample, such as (3, 32, 32), or a dict of the shapes by name if the inputs are a dict."""
        return map_inputs(lambda x: tuple(x.shape[1:]), self.inputs)

    @property
    def num_domains(self) -> int:
        """The number of natural clients, such as hospitals: the largest index in ``domain`` + 1; 0 if it is None."""
        return 0 if self.domain is None else int(self.domain.max()) + 1

    def labels(self) -> np.ndarray:
        """Return the label of each sample, by which partitions divide the samples.  # [n] int64

        The task defines it: the class, or for example the first label of a multi-label sample.
        """
        return self._task().labels(self.targets, self.num_classes)

    def _task(self) -> "Task":
        """Return the task (labels, loss and metrics) that ``self.task`` names, with its default options."""
        from fedbench.tasks.base import task_for  # imports torch, which reading a data set does not need

        return task_for(self.task)()

    def for_split(self, split: "Split", normalize: bool = True) -> "Arrays":
        """Return the checked arrays that the clients of a split train on: these, or the result of ``fit``.

        ``fit`` is a function that prepares inputs by the training parts, such as standardization.  None: there is none.

        Args:
            split: The samples of each client.
            normalize: Whether features are standardized (dataset.normalize).
        """
        if self.fit is None:
            return self
        return self.fit(replace(self, fit=None), split, normalize).check()

    def expanded(self) -> "Arrays":
        """Return these arrays without ``shared``: an input that several samples share is copied for each of them.

        ``shared`` is a dict from the name of such an input to the index of each sample's entry, [n].  None: no input
        is shared.
        """
        if self.shared is None:
            return self
        parts = {
            name: values[self.shared[name]] if name in self.shared else values for name, values in self.parts().items()
        }
        return replace(self, inputs=unwrap_inputs(parts, self.inputs), shared=None)

    def check(self) -> "Arrays":
        """Return these arrays unchanged; raise ConfigError if a field has a wrong length, dtype, shape or value."""
        self._check_lengths()
        if self.fit is None:  # else the caller checks the arrays that fit returns; before it, inputs may have any dtype
            self._check_inputs()
        self._check_targets()
        self._check_domains()
        return self

    def _check_lengths(self) -> None:
        """Check that all fields have an entry for each of the n samples, and the values of ``split`` and ``shared``.

        Raises:
            ConfigError: A length or value is wrong.
        """
        n = len(self.targets)
        require(n > 0, "the data set has no samples: set dataset.path to data with samples, or options that keep some")
        shared = self.shared or {}
        unknown = sorted(shared.keys() - self.parts().keys())
        require(
            not unknown,
            f"Arrays.shared has the keys {', '.join(unknown)}, but only the inputs {', '.join(self.parts())} are "
            "allowed: remove or rename the keys",
        )
        # shared: from the name of an input with fewer entries than samples to the entry of each sample, [n]
        per_sample: dict[str, np.ndarray] = {name: shared.get(name, values) for name, values in self.parts().items()}
        per_sample["split"] = self.split
        per_sample |= {k: v for k, v in (("domain", self.domain), ("subject", self.subject)) if v is not None}
        for name, values in per_sample.items():
            require(
                len(values) == n,
                f"the data set has {n:,} targets but {len(values):,} rows of {name}: give each sample one of both",
            )
        wrong = self.split[~np.isin(self.split, (TRAIN, VAL, TEST, EXTRA))]
        if len(wrong):
            raise ConfigError(
                f"Arrays.split has {wrong[0]}, but each sample must have 0 (train), 1 (val), 2 (test) or 3 (extra): "
                "replace all other values"
            )
        for name, index in shared.items():
            count = len(self.parts()[name])
            are_indices = index.dtype == np.int64 and int(index.min()) >= 0 and int(index.max()) < count
            require(
                are_indices,
                f"Arrays.shared[{name!r}] has {index.dtype} entries from {index.min()} to {index.max()}, but must have "
                f"int64 indices from 0 to {count - 1}: number the entries of {name} from 0",
            )

    def _check_inputs(self) -> None:
        """Check dtypes, shapes and values of the inputs, and the number of entries of ``mean`` and ``std``.

        Pixels are normalized by ``mean`` and ``std``, numbers per channel; None: not at all.

        Raises:
            ConfigError: One of them is wrong.
        """
        for key, values in self.parts().items():
            name = f"Arrays.inputs[{key!r}]" if isinstance(self.inputs, dict) else "Arrays.inputs"
            require(
                0 not in values.shape,
                f"{name} has shape {values.shape}, so that its samples have no numbers: give each sample at least one",
            )
            require(
                values.dtype in (np.uint8, np.float32, np.int64),
                f"{name} has dtype {values.dtype}, expected uint8 images, float32 features or int64 tokens: convert "
                "it to one of these",
            )
            if values.dtype == np.uint8:
                require(
                    values.ndim == 4,
                    f"{name} is uint8 of shape {values.shape}, expected images [n, channels, height, width]: reshape "
                    "it, or convert other inputs to float32",
                )
            if values.dtype == np.float32:
                # A sum needs no temporary array.  It is finite if and only if all values are, except for overflow.
                are_finite = all(np.isfinite(block.sum(dtype=np.float64)) for block in blocks(values))
                require(
                    are_finite,
                    f"{name} holds values that are not finite (NaN or infinite): replace them by numbers in the data",
                )
        channels = next((v.shape[1] for v in self.parts().values() if v.dtype == np.uint8), None)
        for name in ("mean", "std"):
            per_channel = getattr(self, name)
            require(
                per_channel is None or channels is None or len(per_channel) == channels,
                f"Arrays.{name} has {len(per_channel or ())} entries but the images have {channels} channels: give one "
                "for each channel",
            )
        require(
            self.std is None or min(self.std) > 0,
            f"Arrays.std is {self.std}, and images are divided by it: give numbers > 0",
        )

    def _check_targets(self) -> None:
        """Check the targets by the rules of their task, and the class names; raise ConfigError if they are wrong.

        The task is that of ``self.task``, such as "classification".
        """
        self._task().check(self.targets, self.num_classes)
        require(
            self.class_names is None or len(self.class_names) == self.num_classes,
            f"the data set has {len(self.class_names or ())} class names for {self.num_classes} classes: give one per "
            "class",
        )
        require_distinct(self.class_names or (), "the class names")

    def _check_domains(self) -> None:
        """Check the natural clients (hospitals, users) and their classes.

        ``domain`` has the natural client of each sample, [n]; ``domain_names`` their names; and ``class_mask`` whether
        each of them has each class, [domains, C].

        Raises:
            ConfigError: One of these fields is wrong, or does not fit the others.
        """
        if self.domain is None:
            require(
                self.class_mask is None,
                "Arrays.class_mask has a row for each natural client, but Arrays.domain, the natural client of each "
                "sample, is None: set both or none",
            )
            return
        require(
            self.domain.dtype == np.int64 and int(self.domain.min()) >= 0,
            f"Arrays.domain must be int64 >= 0, but is {self.domain.dtype} from {self.domain.min()}: number the "
            "natural clients from 0",
        )
        names, mask = self.domain_names, self.class_mask
        require(
            names is None or len(names) >= self.num_domains,
            f"Arrays.domain_names lists {len(names or ())} names for {self.num_domains} domains (natural clients): "
            "list one name for each domain",
        )
        if mask is not None:
            require(
                mask.dtype == bool and mask.shape == (self.num_domains, self.num_classes),
                f"Arrays.class_mask has dtype {mask.dtype} and shape {mask.shape}, but must be bool with shape "
                f"[{self.num_domains}, {self.num_classes}], the numbers of natural clients and classes: "
                "make it in this form",
            )
            require(
                bool(mask.any(1).all()),
                f"Arrays.class_mask leaves natural client {int(mask.any(1).argmin())} without any class: set at least "
                "one entry of its row to True",
            )


class Source(Protocol):
    """A data set that a user can choose: a class whose constructor takes the options of its YAML."""

    def load(self) -> Arrays:
        """Return the data set, read, downloaded, converted or generated; raise ConfigError if that fails.

        Implementations should return ``Arrays(...).check()``.
        """
        ...
