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
from fedbench.core.options import require, require_distinct

if TYPE_CHECKING:
    from fedbench.core.split import Split
    from fedbench.tasks.base import Task

TRAIN, VAL, TEST, EXTRA = 0, 1, 2, 3
PARTS = {"train": TRAIN, "val": VAL, "test": TEST}
NOT_DATA = ("fit", "shared")  # fields that are not part of the digest; shared is added if it is not None


@dataclass
class Arrays:
    """A data set of n samples in memory; inputs may also be an np.memmap.

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
        """A hash of all fields except fit."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_DATA}
        if self.targets.dtype == np.uint8:  # masks have the same digest with any dtype
            facts["targets"] = digests.Widened(self.targets, np.int64)
        return digests.digest(facts if self.shared is None else {**facts, "shared": self.shared})

    def parts(self) -> dict[str, np.ndarray]:
        """Return the inputs by name; an input without a name is called "inputs"."""
        return wrap_inputs(self.inputs)

    @property
    def images(self) -> np.ndarray | None:
        """The images [n, channels, height, width]; None for other inputs, and for inputs with names."""
        return self.inputs if isinstance(self.inputs, np.ndarray) and self.inputs.ndim == 4 else None

    @property
    def nbytes(self) -> int:
        """The bytes of inputs and targets."""
        return sum(values.nbytes for values in self.parts().values()) + self.targets.nbytes

    @property
    def input_shape(self) -> tuple | dict[str, tuple]:
        """The shape of one sample, or of each of its inputs by name."""
        return map_inputs(lambda x: tuple(x.shape[1:]), self.inputs)

    @property
    def num_domains(self) -> int:
        """The number of natural clients (hospitals, users, styles), 0 if there are none."""
        return 0 if self.domain is None else int(self.domain.max()) + 1

    def labels(self) -> np.ndarray:
        """Return one label per sample [n] int64, defined by the task, by which partitions divide the samples."""
        return self._task().labels(self.targets, self.num_classes)

    def _task(self) -> "Task":
        """Return the task for these targets, with its default options."""
        from fedbench.tasks.base import task_for  # imports torch, which reading a data set does not need

        return task_for(self.task)()

    def for_split(self, split: "Split", normalize: bool = True) -> "Arrays":
        """Return the checked arrays that the clients of a split train on: these, or the result of ``fit``.

        Args:
            split: The samples of each client.
            normalize: Whether features are standardized (dataset.normalize).
        """
        if self.fit is None:
            return self
        return self.fit(replace(self, fit=None), split, normalize).check()

    def expanded(self) -> "Arrays":
        """Return the arrays with one entry of each input per sample, in which entries that samples share are copied."""
        if self.shared is None:
            return self
        parts = {
            name: values[self.shared[name]] if name in self.shared else values for name, values in self.parts().items()
        }
        return replace(self, inputs=unwrap_inputs(parts, self.inputs), shared=None)

    def check(self) -> "Arrays":
        """Return these arrays unchanged; raise ConfigError for the first field that is not as the class describes."""
        self._check_lengths()
        if self.fit is None:  # before fit, inputs may have any dtype and shape
            self._check_inputs()
        self._check_targets()
        self._check_domains()
        return self

    def _check_lengths(self) -> None:
        """Check that all fields have n rows, and the values of ``split`` and ``shared``."""
        n = len(self.targets)
        require(n > 0, "the data set holds no samples: check its path and options")
        shared = self.shared or {}
        unknown = sorted(shared.keys() - self.parts().keys())
        require(
            not unknown, f"shared has {', '.join(unknown)}, but must have names of inputs: {', '.join(self.parts())}"
        )
        rows: dict[str, np.ndarray] = {k: shared.get(k, v) for k, v in self.parts().items()} | {"split": self.split}
        rows |= {k: v for k, v in (("domain", self.domain), ("subject", self.subject)) if v is not None}
        for name, values in rows.items():
            require(len(values) == n, f"the data set has {n:,} targets but {len(values):,} rows of {name}")
        are_codes = np.isin(self.split, (TRAIN, VAL, TEST, EXTRA)).all()
        require(bool(are_codes), "split must be 0 (train), 1 (val), 2 (test) or 3 (extra) for each sample")
        for name, entry in shared.items():
            count = len(self.parts()[name])
            are_indices = entry.dtype == np.int64 and int(entry.min()) >= 0 and int(entry.max()) < count
            require(are_indices, f"shared: entries of {name} must be int64 from 0 to {count - 1}")

    def _check_inputs(self) -> None:
        """Check dtypes, shapes and values of the inputs, and the number of entries of ``mean`` and ``std``."""
        for name, values in self.parts().items():
            require(0 not in values.shape, f"{name} has shape {values.shape}: its samples hold no numbers")
            require(
                values.dtype in (np.uint8, np.float32, np.int64),
                f"{name} has dtype {values.dtype}, expected uint8 images, float32 features or int64 tokens",
            )
            if values.dtype == np.uint8:
                require(
                    values.ndim == 4,
                    f"{name} is uint8 of shape {values.shape}, expected images [n, channels, height, width]",
                )
            if values.dtype == np.float32:
                # A sum needs no temporary array.  It is finite if and only if all values are, except for overflow.
                are_finite = all(np.isfinite(block.sum(dtype=np.float64)) for block in blocks(values))
                require(
                    are_finite, f"{name} holds values that are not finite (NaN or infinite): replace them in the data"
                )
        channels = next((v.shape[1] for v in self.parts().values() if v.dtype == np.uint8), None)
        for name in ("mean", "std"):
            per_channel = getattr(self, name)
            require(
                per_channel is None or channels is None or len(per_channel) == channels,
                f"{name} has {len(per_channel or ())} entries but the images have {channels} channels: give one each",
            )
        require(
            self.std is None or min(self.std) > 0, f"std is {self.std}, and images are divided by it: give numbers > 0"
        )

    def _check_targets(self) -> None:
        """Check the targets by their task, and the names of the classes."""
        self._task().check(self.targets, self.num_classes)
        require(
            self.class_names is None or len(self.class_names) == self.num_classes,
            f"{len(self.class_names or ())} class names for {self.num_classes} classes: give one per class",
        )
        require_distinct(self.class_names or (), "the class names")

    def _check_domains(self) -> None:
        """Check the natural clients: ``domain``, ``domain_names`` and ``class_mask``."""
        if self.domain is None:
            require(
                self.class_mask is None,
                "class_mask has a row for each natural client, but domain, the natural client of each sample, is None",
            )
            return
        require(
            self.domain.dtype == np.int64 and int(self.domain.min()) >= 0,
            f"domain must be int64 >= 0, got {self.domain.dtype} from {self.domain.min()}: number the clients from 0",
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
                f"class_mask is {mask.dtype} {mask.shape}, expected [{self.num_domains}, {self.num_classes}]",
            )
            require(
                bool(mask.any(1).all()),
                f"class_mask leaves natural client {int(mask.any(1).argmin())} without any class: each row must have "
                "a True",
            )


class Source(Protocol):
    """A data set that a user can choose: a class whose constructor takes the options of its YAML."""

    def load(self) -> Arrays:
        """Return the data set, read, downloaded, converted or generated; raise ConfigError if that fails.

        Implementations should return ``Arrays(...).check()``.
        """
        ...
