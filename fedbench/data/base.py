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
NOT_DATA = ("fit", "shared")  # fields without influence on the digest; shared only if it is None


@dataclass
class Arrays:
    """A data set of n samples in memory; inputs may also be an np.memmap.

    Attributes:
        inputs: uint8 images [n, channels, height, width], float32 features [n, ...], or a dict of such arrays (image
            and question tokens), all with the same first dimension unless ``shared`` names them.
        targets: int64 labels [n] in [0, C), float32 multi-hot rows [n, C], masks [n, height, width] (uint8 or int64),
            or float32 numbers [n] or [n, R], of which R is num_classes.
        task: The kind of targets, by the name of its file in fedbench/tasks.
        split: The published split, [n] int8: 0 train, 1 validation, 2 test (all 0 without a split); 3 extra,
            such as synthesized images, for training only, which needs domain.
        domain: The natural client (hospital, user, style) of each sample, [n] int64, or None.
        mean, std: Per channel, of x/255, for uint8 images.  None leaves inputs as they are.
        published_scaling: The mean and std per channel of the papers, where they differ from mean and std.
        class_mask: The classes of each natural client, [domains, C] bool, or None for all classes.
        template: The sentence with a class name for a vision-language model; {} is the name.
        subject: The patient of each sample, [n] int64 >= 0, or None.  No patient is both in training and in test data.
        shared: For inputs that several samples share (an image with nine questions), the index of each sample's entry,
            [n] int64, by the name of the input ("inputs" if there is one).
        fit: fit(arrays, split, normalize) returns the arrays that clients train on, for example standardized by the
            training parts.  Its argument is these arrays without fit, whose inputs may be any [n, ...].  None: these
            arrays.  See ``for_split``.
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
        """A hash of all values and labels."""
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
        """The number of natural clients, 0 if there are none."""
        return 0 if self.domain is None else int(self.domain.max()) + 1

    def labels(self) -> np.ndarray:
        """Return one label per sample [n] int64, defined by the task, by which partitions divide the samples."""
        return self._task().labels(self.targets, self.num_classes)

    def _task(self) -> "Task":
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
        """Return the arrays with one entry of each input per sample; shared entries are copied."""
        if self.shared is None:
            return self
        parts = {name: v[self.shared[name]] if name in self.shared else v for name, v in self.parts().items()}
        return replace(self, inputs=unwrap_inputs(parts, self.inputs), shared=None)

    def check(self) -> "Arrays":
        """Return the arrays; raise ConfigError for the first field that does not fit."""
        self._check_lengths()
        if self.fit is None:  # before it, inputs may be anything
            self._check_inputs()
        self._check_targets()
        self._check_domains()
        return self

    def _check_lengths(self) -> None:
        n = len(self.targets)
        require(n > 0, "the data set holds no samples")
        shared = self.shared or {}
        odd = sorted(shared.keys() - self.parts().keys())
        require(not odd, f"shared names {', '.join(odd)}, which is no input: {', '.join(self.parts())}")
        rows: dict[str, np.ndarray] = {k: shared.get(k, v) for k, v in self.parts().items()} | {"split": self.split}
        rows |= {k: v for k, v in (("domain", self.domain), ("subject", self.subject)) if v is not None}
        for name, values in rows.items():
            require(len(values) == n, f"the data set has {n:,} targets but {len(values):,} rows of {name}")
        is_valid = np.isin(self.split, (TRAIN, VAL, TEST, EXTRA)).all()
        require(bool(is_valid), "split must be 0 (train), 1 (val), 2 (test) or 3 (extra)")
        for name, entry in shared.items():
            count = len(self.parts()[name])
            inside = entry.dtype == np.int64 and int(entry.min()) >= 0 and int(entry.max()) < count
            require(inside, f"shared: entries of {name} must be int64 from 0 to {count - 1}")

    def _check_inputs(self) -> None:
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
                # A sum is one pass without a temporary array; it is finite iff (barring overflow) all are.
                fine = all(np.isfinite(block.sum(dtype=np.float64)) for block in blocks(values))
                require(fine, f"{name} holds values that are not finite (NaN or infinite)")
        channels = next((v.shape[1] for v in self.parts().values() if v.dtype == np.uint8), None)
        for name in ("mean", "std"):
            given = getattr(self, name)
            require(
                given is None or channels is None or len(given) == channels,
                f"{name} has {len(given or ())} entries but the images have {channels} channels",
            )
        require(
            self.std is None or min(self.std) > 0, f"std is {self.std}, and images are divided by it: give numbers > 0"
        )

    def _check_targets(self) -> None:
        self._task().check(self.targets, self.num_classes)
        require(
            self.class_names is None or len(self.class_names) == self.num_classes,
            f"{len(self.class_names or ())} class names for {self.num_classes} classes",
        )
        require_distinct(self.class_names or (), "the class names")

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
    """A data source, constructed from its YAML."""

    def load(self) -> Arrays:
        """Read, download, convert or generate the data set; raise ConfigError if that fails."""
        ...
