"""What every data source returns: plain numpy arrays, checked once, before anything is partitioned.

A source is a class whose constructor takes the options of its YAML and whose ``load()`` returns
``Arrays``.  Adding one touches two files: ``fedbench/data/x.py`` and ``conf/dataset/x.yaml``.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedbench.core import digests
from fedbench.core.options import require

if TYPE_CHECKING:
    from fedbench.partition.base import Split

TRAIN, VAL, TEST, EXTRA = 0, 1, 2, 3
TASKS = ("classification", "multilabel", "segmentation")


@dataclass
class Arrays:
    """A whole data set of n samples in memory.

    inputs: uint8 images [n, channels, height, width], float32 features [n, ...], or a dict of such
        arrays (image and question tokens), all with the same first dimension.
    targets: int64 labels [n] in [0, C) | float32 multi-hot rows [n, C] | int64 masks [n, height, width].
    split: [n] int8 as published: 0 train, 1 validation, 2 test (all 0 where the set has no split); 3 extra, for
        training only and beside the set proper (synthesized images), which needs domain.
    domain: [n] int64, the natural silo (hospital, user, style) of each sample, or None.
    mean, std: per channel, of x/255, for uint8 images; None leaves inputs as they are.
    published_scaling: the mean and std per channel that papers use for this set, where that is not mean, std.
    class_mask: [domains, C] bool, the classes that exist in each natural silo, or None (all of them).
    template: the sentence that names a class to a vision-language model, {} being the name.
    subject: [n] int64 >= 0, whom (which patient) a sample is of, or None; nobody is both trained and tested on.
    shown: of a split over clients, the row of inputs that each sample shows in it [n]; None: its own.
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
    shown: "Callable[[Split], np.ndarray] | None" = None

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def digest(self) -> str:
        """Of all that the samples are, so that changed values or labels are noticed."""
        return digests.digest({f.name: getattr(self, f.name) for f in fields(self) if f.name != "shown"})

    @property
    def nbytes(self) -> int:
        """What inputs and targets take in memory."""
        return sum(values.nbytes for values in self._parts().values()) + self.targets.nbytes

    @property
    def input_shape(self) -> tuple | dict[str, tuple]:
        """Shape of one sample (of each input)."""
        shapes = {k: tuple(v.shape[1:]) for k, v in self._parts().items()}
        return shapes if isinstance(self.inputs, dict) else shapes["inputs"]

    @property
    def num_domains(self) -> int:
        """How many natural silos the samples come from (0 where the set knows none)."""
        return 0 if self.domain is None else int(self.domain.max()) + 1

    def labels(self) -> np.ndarray:
        """One label per sample [n] int64, what partitions look at.

        Classification: the target.  Multi-label: the first positive class, C where there is none (so the
        values span C + 1 "classes").  Segmentation: the most frequent class other than 0, 0 where a mask
        shows nothing else.
        """
        if self.task == "multilabel":
            positive = self.targets > 0  # [n, C]
            return np.where(positive.any(1), positive.argmax(1), self.num_classes).astype(np.int64)
        if self.task == "segmentation":
            masks = self.targets.reshape(len(self), -1)  # [n, pixels]
            counts = np.stack([(masks == c).sum(1) for c in range(1, self.num_classes)], 1)
            return np.where(counts.any(1), counts.argmax(1) + 1, 0).astype(np.int64)
        return self.targets

    def dealt(self, split: "Split") -> "Arrays":
        """As the clients of a split meet the samples: these arrays, or (see ``shown``) with other inputs."""
        if self.shown is None:
            return self
        rows = self.shown(split)
        parts = {name: values[rows] for name, values in self._parts().items()}
        return replace(self, inputs=parts if isinstance(self.inputs, dict) else parts["inputs"], shown=None)

    def check(self) -> "Arrays":
        """Return self, or raise ConfigError with one sentence about the first thing that does not fit."""
        require(self.task in TASKS, f"unknown task {self.task!r}: one of {', '.join(TASKS)}")
        self._check_lengths()
        self._check_inputs()
        self._check_targets()
        self._check_domains()
        return self

    def with_classes(self, names: list[str], source: str) -> "Arrays":
        """These arrays, checked, with all the classes a known data set has, also those no sample shows."""
        require(
            self.num_classes <= len(names),
            f"{source} holds {self.num_classes} classes, more than the {len(names)} of this data set",
        )
        self.num_classes, self.class_names = len(names), names
        return self.check()

    def _parts(self) -> dict[str, np.ndarray]:
        return self.inputs if isinstance(self.inputs, dict) else {"inputs": self.inputs}

    def _check_lengths(self) -> None:
        n = len(self.targets)
        require(n > 0, "the data set holds no samples")
        rows = {**self._parts(), "split": self.split}
        rows |= {k: v for k, v in (("domain", self.domain), ("subject", self.subject)) if v is not None}
        for name, values in rows.items():
            require(len(values) == n, f"the data set has {n:,} targets but {len(values):,} rows of {name}")
        known = np.isin(self.split, (TRAIN, VAL, TEST, EXTRA)).all()
        require(bool(known), "split must be 0 (train), 1 (val), 2 (test) or 3 (extra)")

    def _check_inputs(self) -> None:
        for name, values in self._parts().items():
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
                # A sum is one pass without a temporary array; it is finite iff (barring overflow) all are.
                fine = np.isfinite(values.sum(dtype=np.float64))
                require(bool(fine), f"{name} holds values that are not finite (NaN or infinite)")
        channels = next((v.shape[1] for v in self._parts().values() if v.dtype == np.uint8), None)
        for name in ("mean", "std"):
            given = getattr(self, name)
            require(
                given is None or channels is None or len(given) == channels,
                f"{name} has {len(given or ())} entries but the images have {channels} channels",
            )

    def _check_targets(self) -> None:
        y, classes = self.targets, self.num_classes
        require(classes >= 2, f"the data set has {classes} class(es), expected at least 2")
        if self.task == "multilabel":
            require(
                y.ndim == 2 and y.shape[1] == classes and y.dtype == np.float32,
                f"multi-label targets are {y.dtype} {y.shape}, expected float32 [n, {classes}]",
            )
            return
        require(y.dtype == np.int64, f"targets have dtype {y.dtype}, expected int64")
        wanted = 1 if self.task == "classification" else 3
        require(y.ndim == wanted, f"targets of {self.task} have shape {y.shape}, expected {wanted} dimension(s)")
        require(
            int(y.min()) >= 0 and int(y.max()) < classes,
            f"labels span {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}",
        )
        require(
            self.class_names is None or len(self.class_names) == classes,
            f"{len(self.class_names or ())} class names for {classes} classes",
        )

    def _check_domains(self) -> None:
        if self.domain is None:
            require(self.class_mask is None, "class_mask is per natural silo, but domain is None")
            return
        require(
            self.domain.dtype == np.int64 and int(self.domain.min()) >= 0,
            f"domain must be int64 >= 0, got {self.domain.dtype} from {self.domain.min()}",
        )
        names, mask = self.domain_names, self.class_mask
        require(
            names is None or len(names) >= self.num_domains,
            f"{len(names or ())} domain names for {self.num_domains} domains",
        )
        if mask is not None:
            require(
                mask.dtype == bool and mask.shape == (self.num_domains, self.num_classes),
                f"class_mask is {mask.dtype} {mask.shape}, expected [{self.num_domains}, {self.num_classes}]",
            )
            require(bool(mask.any(1).all()), "class_mask leaves a silo without any valid class")


class Source(Protocol):
    """A data source: constructed from its YAML, loaded once per run."""

    def load(self) -> Arrays:
        """Read (or download, convert, generate) the whole data set; ConfigError where it cannot be had."""
        ...
