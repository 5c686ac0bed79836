"""The keys of a run that are not parameters of a group's class, with their types and ranges.

Values are checked against the annotations of these dataclasses (schema.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedbench.core.options import (
    AtLeast2,
    Count,
    Device,
    Folder,
    Fraction,
    Name,
    NonNegative,
    NonNegativeInt,
    OpenUnit,
    Positive,
    PositiveOrInf,
    Seed,
    UnitInterval,
)
from fedbench.data.spec import DataSpec


@dataclass
class LocalConfig:
    """Local training of a client in a round.

    Attributes:
        epochs: Number of local epochs, or a list with one number per client.  A fraction of an epoch is rounded up to
            whole steps.
        steps: Number of local steps of every client, instead of epochs; null: local.epochs.
        batch_size: Samples per local step, or a list with one number per client.
        drop_last: Whether to drop the last batch of an epoch if it is smaller.
    """

    epochs: Positive | list[Positive]
    steps: Count | None
    batch_size: Count | list[Count]
    drop_last: bool


@dataclass
class SystemConfig:
    """Clients that drop out or are slow (simulation/sampling.py).

    Attributes:
        dropout: Probability that a client drops out of a round.
        slow: Fraction of the clients that are slow.
        slow_steps: Fraction of its local steps that a slow client completes.
        fewest_epochs: Each client draws its epochs from fewest_epochs to local.epochs; null: local.epochs.
    """

    dropout: UnitInterval
    slow: UnitInterval
    slow_steps: OpenUnit
    fewest_epochs: Count | None


@dataclass
class EvalConfig:
    """Evaluation.

    Attributes:
        every: Rounds between evaluations.
        clients: Number of clients to evaluate; null: all.
        batch_size: Samples per evaluation batch; null: chosen by the device.
    """

    every: Count
    clients: Count | None
    batch_size: Count | None


@dataclass
class FinetuneConfig:
    """Fine-tuning of each client's model.

    Attributes:
        epochs: Number of epochs; 0: no fine-tuning.
        lr: Learning rate, or a list with one per client; null: optimizer.lr.
        when: When to fine-tune: before each evaluation, or once at the end.
        part: The column group to train, or all.
    """

    epochs: NonNegativeInt
    lr: Positive | list[Positive] | None
    when: Literal["evaluation", "end"]
    part: str


@dataclass
class NewClientsConfig:
    """New clients, which take no part in training and adapt the global model after it.

    Attributes:
        count: Number of new clients, the last ones of the partition.
        epochs: Number of local epochs.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
    """

    count: NonNegativeInt
    epochs: NonNegativeInt
    lr: Positive
    momentum: UnitInterval


@dataclass
class PrivacyConfig:
    """Differential privacy of uploads, privacy=local (channel/privacy.py).

    Attributes:
        epsilon: Epsilon of an upload; null: no privacy, inf: no noise.
        delta: Delta of an upload.
        clip: Clipping norm; null: no clipping.
        calibration: How the noise is calibrated.
        sensitivity: Sensitivity with calibration=paper: the clipping norm, or 2 lr clip / n_i for a client
            of n_i training samples.
    """

    epsilon: PositiveOrInf | None
    delta: OpenUnit
    clip: PositiveOrInf | None
    calibration: Literal["paper", "analytic"]
    sensitivity: Literal["clip", "lr_over_n"]


@dataclass
class StopConfig:
    """Early stopping.

    Attributes:
        patience: Evaluations without a better validation score after which the run stops and returns to its best
            round; null: all rounds run.
    """

    patience: Count | None


@dataclass
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        every: Rounds between checkpoints; null: as often as takes less than 5% of the run time; 0: only at the end.
        pause_after: Round after which the run is saved and the process ends; null: run all rounds.  Commands without
            this option resume the run.
    """

    every: NonNegativeInt | None
    pause_after: Count | None = None


@dataclass
class HardwareConfig:
    """How a run is computed.  Only the precision changes results by more than rounding errors.

    Attributes:
        device: auto, cpu, cuda, cuda:1 or mps.
        executor: How clients are trained: one by one (loop), in threads, or all at once (vmap); auto: the fastest.
        chunk: Clients trained at once; null: automatic.
        threads: CPU threads; null: automatic.
        precision: Precision of matrix products.
        graphs: Whether to use CUDA graphs.
        data: Where samples are stored; auto: on the device if they fit.
        ddp: Whether the processes that torchrun started share the run.
        rows: Whether each process stores the states of all clients (replicated), or of its clients only (sharded).
        samples: Whether each process stores all samples (replicated), or those of its clients only (sharded).
    """

    device: Device
    executor: Literal["auto", "loop", "threads", "vmap"]
    chunk: Count | None
    threads: Count | None
    precision: Literal["float32", "tf32", "bf16"]
    graphs: bool | Literal["auto"] = "auto"
    data: Literal["auto", "device", "host"] = "auto"
    ddp: bool = False
    rows: Literal["replicated", "sharded"] = "replicated"
    samples: Literal["replicated", "sharded"] = "replicated"


@dataclass
class TrackingConfig:
    """Weights & Biases.  The files in the run folder are written in any case.

    Attributes:
        mode: auto (online, or offline without a login), online, offline or disabled.
        project: Name of the project.
        entity: User or team; null: that of the login.
        group: Group of the run; null: the sweep, the experiment file, or the data set and the partition.
        tags: More tags.
    """

    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass
class ScheduleConfig:
    """The schedule of the learning rate over the rounds.

    Attributes:
        name: The shape after the warm-up.
        warmup: Rounds in which the learning rate grows linearly.
        gamma: Factor per round of name=exponential.
        final: The last learning rate as a fraction of the largest, of name=cosine and linear.
        per: When the learning rate changes: every round, or every local step.
    """

    name: Literal["constant", "cosine", "linear", "exponential"] = "constant"
    warmup: NonNegative = 0
    gamma: Positive = 1.0
    final: NonNegative = 0.0
    per: Literal["round", "step"] = "round"


@dataclass
class AugmentConfig:
    """Augmentation of training images.

    Attributes:
        flip: Whether to flip images horizontally at random.
        crop: Pixels of padding before random crops; 0: no crops.
    """

    flip: bool = False
    crop: NonNegativeInt = 0


@dataclass
class DatasetKeys:
    """Keys of every data set.

    Attributes:
        split: Test samples: a random part of all samples (merged), the published ones, or drawn by label (stratified).
        test_fraction: Fraction of a client's samples that are test samples.
        val_fraction: Fraction of a client's training samples that are validation samples.
        normalize: Whether to standardize the inputs by statistics of the training samples.
        augment: Augmentation of training images: flip (horizontal flips) and crop (pixels of padding); null: none.
        subset: Fraction of the samples to use.
        data_dir: The folder of the data sets.
    """

    split: Literal["merged", "published", "stratified"]
    test_fraction: UnitInterval
    val_fraction: UnitInterval
    normalize: bool
    augment: AugmentConfig | None
    subset: Fraction = 1.0


@dataclass
class PartitionKeys:
    """Keys of every partition.

    Attributes:
        num_clients: Number of clients; null: the number that the partition creates.
        seed: Seed of the partition.
    """

    num_clients: Count | None
    seed: Seed


@dataclass
class ModelKeys:
    """Keys of every model.

    Attributes:
        columns: Column groups by name, each a list of patterns of parameter names.
        freeze: Patterns of names of parameters that are not trained.
    """

    columns: dict[str, list[str]] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)


@dataclass
class OptimizerKeys:
    """Keys of every optimizer.

    Attributes:
        schedule: Schedule of the learning rate: name, warmup, gamma, final, per.
    """

    schedule: ScheduleConfig


@dataclass
class RunConfig:
    """The top-level keys of a run.

    The key `paper` has the table and the method of a paper that the run reproduces (report/paper.py).
    """

    name: Name | None
    seed: NonNegativeInt
    rounds: Count
    sample_rate: Fraction
    clients_per_round: Count | None
    client_weights: Literal["samples", "uniform"]
    folds: AtLeast2 | None
    fold: NonNegativeInt
    local: LocalConfig
    system: SystemConfig
    eval: EvalConfig
    finetune: FinetuneConfig
    new_clients: NewClientsConfig
    stop: StopConfig
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
    server: dict
    aggregator: dict
    attack: dict
    compression: dict
    hardware: HardwareConfig
    tracking: TrackingConfig
    callbacks: dict
    privacy: dict | None = None
    paper: dict | None = None
    choices: dict | None = None


# group: dataclass of the keys that are not parameters of the group's class
RESERVED: dict[str, type | None] = {
    "dataset": DatasetKeys,
    "task": None,
    "partition": PartitionKeys,
    "model": ModelKeys,
    "adapter": None,
    "optimizer": OptimizerKeys,
    "algorithm": None,
    "server": None,
    "aggregator": None,
    "attack": None,
    "compression": None,
}
# group: dataclass of keys of the group
KEYS: dict[str, type | None] = {
    **RESERVED,
    "privacy": PrivacyConfig,
    "hardware": HardwareConfig,
    "tracking": TrackingConfig,
}
# group: (a method or base class of its classes, description of its classes)
KINDS = {
    "dataset": ("load", "data source, which has load()"),
    "task": ("for_targets", "fedbench.tasks.base.Task"),
    "partition": ("assign", "partition, which has assign()"),
    "model": ("Module", "torch.nn.Module"),
    "adapter": ("Adapter", "fedbench.adapters.base.Adapter"),
    "optimizer": ("Optimizer", "fedbench.engine.optim.Optimizer"),
    "algorithm": ("Algorithm", "fedbench.algorithms.base.Algorithm"),
    "server": ("ServerRule", "fedbench.server.base.ServerRule"),
    "aggregator": ("Aggregator", "fedbench.aggregators.base.Aggregator"),
    "attack": ("Attack", "fedbench.attacks.base.Attack"),
    "compression": ("Compressor", "fedbench.compression.base.Compressor"),
}
# constructor arguments that are not options: they are set by the data set, or by the attribute `reads` of the method
INJECTED = {
    "model": (*DataSpec.__dataclass_fields__, "spec"),
    "privacy": ("rows", "num_clients", "expected", "rounds"),  # set by the federation
}
