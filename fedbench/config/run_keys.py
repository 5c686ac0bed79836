"""The keys that a run may have outside the options of its groups' classes, with their types and ranges.

Values are checked against the annotations of these dataclasses (schema.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedbench.core.options import (
    Count,
    Device,
    Folder,
    Fraction,
    Interior,
    Name,
    Natural,
    NonNegative,
    Pair,
    Positive,
    Seed,
    Share,
    Unbounded,
)
from fedbench.data.spec import DataSpec


@dataclass
class LocalConfig:
    """A client's work in a round: passes over its training part, samples per step."""

    epochs: Count | list[Count]
    batch_size: Count
    drop_last: bool


@dataclass
class SystemConfig:
    """Devices that are lost in a round, and slow ones (simulation/sampling.py); fewest_epochs null: no draws."""

    dropout: Share
    slow: Share
    slow_steps: Interior
    fewest_epochs: Count | None


@dataclass
class EvalConfig:
    """Every so many rounds, over ``clients`` of the clients (null: all)."""

    every: Count
    clients: Count | None
    batch_size: Count | None


@dataclass
class FinetuneConfig:
    """Training on from the downloaded row before it is evaluated (or once, at the end)."""

    epochs: Natural
    lr: Positive | list[Positive] | None
    when: Literal["evaluation", "end"]
    part: str


@dataclass
class NewClientsConfig:
    """The last ``count`` clients stay out of the rounds, and then train a copy of the global model."""

    count: Natural
    epochs: Natural
    lr: Positive
    momentum: Share


@dataclass
class PrivacyConfig:
    """Clipping, and noise on everything that clients upload (privacy.py); epsilon null: off."""

    epsilon: Unbounded | None
    delta: Interior
    clip: Unbounded | None
    calibration: Literal["paper", "analytic"]
    sensitivity: Literal["clip", "lr_over_n"]


@dataclass
class CheckpointConfig:
    """every n rounds; null: as often as costs under 5% of the time; 0: at the end."""

    every: Natural | None


@dataclass
class HardwareConfig:
    """Where and how a run is computed.  Only the precision changes results beyond rounding.

    Attributes:
        device: auto, cpu, cuda, cuda:1 or mps.
        executor: How clients are computed: one by one, in threads or all at once; auto: the fastest of those timed.
        chunk: Clients computed at once; null: chosen.
        threads: CPU threads; null: chosen.
        precision: Of matrix products.
        graphs: CUDA graphs.
        data: Where samples are kept; auto: on the device if they fit.
        ddp: Share the run between the processes that torchrun started.
    """

    device: Device
    executor: Literal["auto", "loop", "threads", "vmap"]
    chunk: Count | None
    threads: Count | None
    precision: Literal["float32", "tf32", "bf16"]
    graphs: bool | Literal["auto"] = "auto"
    data: Literal["auto", "device", "host"] = "auto"
    ddp: bool = False


@dataclass
class TrackingConfig:
    """Weights & Biases.  The run folder's files are written in any case.

    Attributes:
        mode: auto (online, or offline without a login), online, offline or disabled.
        project: Name of the project.
        entity: User or team; null: the login's.
        group: Group of the run; null: the sweep, the experiment file, or the data set and the partition.
        tags: Further tags.
    """

    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass
class ScheduleConfig:
    """The learning rate: ``warmup`` rounds of growth, then ``name``; final: share left; per: what has one rate."""

    name: Literal["constant", "cosine", "linear", "exponential"] = "constant"
    warmup: NonNegative = 0
    gamma: Positive = 1.0
    final: NonNegative = 0.0
    per: Literal["round", "step"] = "round"


@dataclass
class AugmentConfig:
    """Of training images: horizontal flips, crops after ``crop`` pixels of padding."""

    flip: bool = False
    crop: Natural = 0


@dataclass
class DatasetKeys:
    """What the federation, not the source, does with the samples.

    Attributes:
        split: Test parts: of all samples merged, the published ones, or drawn by label.
        test_fraction: Share of a client's samples in its test part.
        val_fraction: Share of a client's training samples in its validation part.
        normalize: Standardize the inputs by the training parts.
        augment: Of training images: flip (true: horizontal flips) and crop (pixels of padding); null: none.
        subset: Share of the samples that are used.
        data_dir: The folder with data sets.
    """

    split: Literal["merged", "published", "stratified"]
    test_fraction: Share
    val_fraction: Share
    normalize: bool
    augment: AugmentConfig | None
    subset: Fraction = 1.0


@dataclass
class PartitionKeys:
    """Keys of every partition.

    Attributes:
        num_clients: Number of clients; null: as many as the partition makes.
        seed: Seed of the partition.
    """

    num_clients: Count | None
    seed: Seed


@dataclass
class ModelKeys:
    """Keys of every model.

    Attributes:
        columns: Column groups by name, each a list of patterns of parameter names.
        freeze: Patterns of parameters that are not trained.
    """

    columns: dict[str, list[str]] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)


@dataclass
class OptimizerKeys:
    """Keys of every optimizer.

    Attributes:
        schedule: The learning rate over the rounds: name, warmup, gamma, final, per.
    """

    schedule: ScheduleConfig


@dataclass
class RunConfig:
    """Every top-level key of a run.  paper: which printed cells it answers, for reports (report/paper.py)."""

    name: Name | None
    seed: Natural
    rounds: Count
    sample_rate: Fraction
    clients_per_round: Count | None
    client_weights: Literal["samples", "uniform"]
    folds: Pair | None
    fold: Natural
    local: LocalConfig
    system: SystemConfig
    eval: EvalConfig
    finetune: FinetuneConfig
    new_clients: NewClientsConfig
    checkpoint: CheckpointConfig
    resume: str | None
    data_dir: Folder
    output_dir: Folder
    sweep_dir: Folder
    dataset: dict
    task: dict
    partition: dict
    model: dict
    adapter: dict
    algorithm: dict
    optimizer: dict
    compression: dict
    hardware: HardwareConfig
    tracking: TrackingConfig
    callbacks: dict
    privacy: PrivacyConfig | None = None
    paper: dict | None = None
    choices: dict | None = None


# by group: the dataclass here that states the keys which are not those of the group's class
RESERVED: dict[str, type | None] = {
    "dataset": DatasetKeys,
    "task": None,
    "partition": PartitionKeys,
    "model": ModelKeys,
    "adapter": None,
    "optimizer": OptimizerKeys,
    "algorithm": None,
    "compression": None,
}
# by group: the dataclass here that states keys of the group
KEYS: dict[str, type | None] = {**RESERVED, "hardware": HardwareConfig, "tracking": TrackingConfig}
# by group: a name that every class of it has or inherits, and what such a class is called
KINDS = {
    "dataset": ("load", "data source, which has load()"),
    "task": ("for_targets", "fedbench.tasks.base.Task"),
    "partition": ("assign", "partition, which has assign()"),
    "model": ("Module", "torch.nn.Module"),
    "adapter": ("Adapter", "fedbench.adapters.base.Adapter"),
    "optimizer": ("Optimizer", "fedbench.engine.optim.Optimizer"),
    "algorithm": ("Algorithm", "fedbench.algorithms.base.Algorithm"),
    "compression": ("Compressor", "fedbench.compression.base.Compressor"),
}
# constructor arguments that the data set (or the algorithm: reads) decides
INJECTED = {"model": (*DataSpec.__dataclass_fields__, "spec")}
