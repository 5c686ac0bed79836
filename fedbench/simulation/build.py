"""From a checked config to the parts of a run: data, partition, model, engine, algorithm.

`_target_` is the registry.  Keys that belong to fedbench rather than to a target's constructor (dataset.split,
model.columns, ...) are taken out here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.core import rng
from fedbench.core.faults import told
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import check_cohort, clients_to_train
from fedbench.data import _known as known
from fedbench.data._known import DATASET_KEYS
from fedbench.data.base import EXTRA, Arrays
from fedbench.engine import executor as executors
from fedbench.engine import joint
from fedbench.engine import ranks as processes
from fedbench.engine.cohort import Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.federation import Federation
from fedbench.engine.optim import Optimizer
from fedbench.engine.privacy import Privacy
from fedbench.engine.privacy import check as check_method
from fedbench.engine.rows import RowStore, disk_space, memory
from fedbench.nn.flat import FlatModel
from fedbench.partition._extra import count_extra
from fedbench.partition.base import Split, build_split
from fedbench.simulation import autotune
from fedbench.simulation.autotune import use
from fedbench.simulation.outputs import check_outputs, check_parameters
from fedbench.simulation.tracking import replace_file

log = logging.getLogger(__name__)
MOST_CELLS = 200_000           # of clients x classes in partition.json


def make(group: DictConfig | Mapping, reserved: tuple[str, ...] = (), **extra: Any) -> Any:
    """Instantiate a group's target with its keys, less the reserved ones, and extra arguments.

    A ConfigError of the target's comes through as it is; whatever else it raises is told in one sentence.
    """
    values: Any = OmegaConf.to_container(group, resolve=True) if isinstance(group, DictConfig) else group
    kept = {k: v for k, v in values.items() if k not in reserved}
    try:
        return instantiate({"_convert_": "all", "_recursive_": False, **kept}, **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"{_key(group)}_target_={values['_target_']} cannot be built: {told(cause)}") from cause


def _key(group: DictConfig | Mapping) -> str:
    """``model.``, where a config's group is that of the model."""
    return f"{group._get_full_key(None)}." if isinstance(group, DictConfig) else ""


def device_of(cfg: DictConfig) -> torch.device:
    """The compute device; asking for one that is absent is refused.  Ranks of a machine get one GPU each, unless all
    are given the same by its number."""
    name, ranks = cfg.hardware.device, processes.current()
    if ranks.size > 1 and torch.cuda.is_available() and name in ("auto", "cuda"):
        require(ranks.local_size <= torch.cuda.device_count(),
                f"torchrun started {ranks.local_size} processes on a machine with {torch.cuda.device_count()} CUDA "
                f"devices: use --nproc-per-node={torch.cuda.device_count()}, or hardware.device=cuda:0 to share one")
        return torch.device("cuda", ranks.local)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require(not name.startswith("cuda") or torch.cuda.is_available(),
            f"hardware.device={name}: this machine has no usable CUDA device "
            f"(torch {torch.__version__}); use hardware.device=cpu or auto")
    require(name != "mps" or torch.backends.mps.is_available(), "hardware.device=mps: not available here; use cpu")
    device = torch.device(name)
    require(device.index is None or device.index < torch.cuda.device_count(),
            f"hardware.device={name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def set_precision(name: str) -> None:
    """float32: exact float32; tf32: tensor cores for float32 products where the GPU has them; bf16 is the model's."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"


def check_settings(cfg: DictConfig, method: Algorithm) -> None:
    """Refuse what can be refused before any data are loaded: parts of the wrong kind, and what they say themselves."""
    device = device_of(cfg)
    graphs(cfg.hardware.graphs, device)
    source, module = _target(cfg.dataset), _target(cfg.model)
    require(not inspect.isclass(source) or hasattr(source, "load"),
            f"dataset._target_={cfg.dataset._target_} is no data source, which has load()")
    require(not inspect.isclass(module) or issubclass(module, torch.nn.Module),
            f"model._target_={cfg.model._target_} is no torch.nn.Module")
    part(cfg, "partition")
    everyone, new = cfg.partition.num_clients, cfg.new_clients.count
    method.check_settings(None if everyone is None else clients_to_train(everyone, new),
                          list(cfg.model.get("columns") or ()), part(cfg, "optimizer"))


KINDS = {"dataset": (DATASET_KEYS, "a data source, which has load()", lambda x: callable(getattr(x, "load", None))),
         "partition": (("num_clients", "seed"), "a partition, which has assign(...)",
                       lambda x: callable(getattr(x, "assign", None))),
         "optimizer": ((), "a fedbench.engine.optim.Optimizer", lambda x: isinstance(x, Optimizer)),
         "algorithm": ((), "a fedbench.algorithms.base.Algorithm", lambda x: isinstance(x, Algorithm))}


def part(cfg: DictConfig, group: str) -> Any:
    """What a group's target makes of its keys, refused unless it is of the group's kind."""
    reserved, words, fits = KINDS[group]
    built = make(cfg[group], reserved)
    require(fits(built), f"{group}._target_={cfg[group]._target_} makes an object of type {type(built).__name__}, "
            f"expected {words}")
    return built


def data(cfg: DictConfig) -> Arrays:
    key = known.key_of(_plain(cfg.dataset))
    return joint.share(("data", key), lambda: known.load(key, str(cfg.data_dir), lambda: load(cfg)))


def load(cfg: DictConfig) -> Arrays:
    """The data set, read (or downloaded, or generated) anew."""
    source, name = part(cfg, "dataset"), f"dataset._target_={cfg.dataset._target_}"
    try:
        arrays = source.load()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{name} cannot load its data: {told(error)}") from error
    require(isinstance(arrays, Arrays), f"{name}: load() returns an object of type {type(arrays).__name__}, expected "
            "fedbench.data.base.Arrays")
    return arrays


def partition(cfg: DictConfig, arrays: Arrays) -> Split:
    """The split of the data over clients: a function of the dataset and partition groups alone."""
    method = part(cfg, "partition")
    d = cfg.dataset
    return build_split(arrays, method, cfg.partition.num_clients, cfg.partition.seed, d.split, d.test_fraction,
                       d.val_fraction, d.get("subset", 1.0))


def cohort_size(cfg: DictConfig, num_clients: int) -> int:
    """K: clients_per_round, or max(1, floor(N * sample_rate))."""
    if cfg.clients_per_round is None:
        return max(1, int(num_clients * cfg.sample_rate + 1e-9))
    check_cohort(cfg.clients_per_round, num_clients)
    return int(cfg.clients_per_round)


def training_part(everyone: Federation, new: int) -> Federation:
    """The federation without its last `new` clients."""
    n = clients_to_train(everyone.num_clients, new)
    return everyone.among(np.arange(n)) if new else everyone


def federation(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    """All clients' data on the device.  A model with a frozen part that reads the inputs (an image tower) says so by
    a method `prepare`: the federation then holds what that part makes of them.  Runs of a meeting share the tensors."""
    reader = (_text(cfg.model), int(cfg.seed), str(cfg.algorithm._target_)) if _reads(cfg) else ()
    key = ("federation", _text(cfg.dataset), _text(cfg.partition), str(device), reader)
    built = joint.share(key, lambda: _federation(cfg, arrays, split, device))
    return replace(built, splits=dict(built.splits)) if joint.current() else built


def _reads(cfg: DictConfig) -> bool:
    return hasattr(_target(cfg.model), "prepare")


def _federation(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    augment = _plain(cfg.dataset.augment)
    if not _reads(cfg):
        return Federation.build(arrays, split, device, cfg.dataset.normalize, augment)
    require(not augment, f"dataset.augment cannot come before the frozen part of model={cfg.choices.model}: set it to "
            "null, and see model.augment")
    reader = _module(cfg, arrays)
    built = Federation.build(reader.prepare(arrays, split, device), split, device, cfg.dataset.normalize)
    built.augment = lambda x, y, random: (reader.training_view(x, random), y)
    built.present = reader.evaluation_view
    return built


def _target(group: DictConfig) -> Any:
    try:
        return get_object(group._target_)
    except Exception as error:                                        # whatever the user's own module raises
        raise ConfigError(f"{_key(group)}_target_={group._target_} cannot be imported: {told(error)}") from error


def _module(cfg: DictConfig, data: Arrays | Federation, *number: int) -> Any:
    """The module for this data, its initialization keyed by the seed: the number-th draw.  A constructor is given of
    input_shape, num_classes, class_names, template and reads (what the algorithm reads of inputs) those it takes."""
    known = {"input_shape": data.input_shape, "num_classes": data.num_classes, "class_names": data.class_names,
             "template": data.template, "reads": getattr(_target(cfg.algorithm), "reads", ())}
    named, passed_on = _taken(_target(cfg.model))
    given = {name: value for name, value in known.items() if name in named}
    tried = [n for n in ("input_shape", "num_classes") if n not in named] if passed_on else []
    while True:
        try:
            return _drawn(cfg, given | {name: known[name] for name in tried}, *number)
        except ConfigError as error:              # whom **kwargs reach, and what that one takes, only a call can tell
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in tried:
                raise
            tried.remove(unknown[1])


def _drawn(cfg: DictConfig, given: dict[str, Any], *number: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(int(cfg.seed), "init", *number) >> 1)
        return make(cfg.model, ("columns",), **given)


def _taken(target: Any) -> tuple[set[str], bool]:
    """The names that a class or function takes, those that it passes on to its bases included; whether it takes and
    passes on any other."""
    named: set[str] = set()
    for one in _constructors(target):
        found = inspect.signature(one).parameters.values()
        named.update(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in found):
            return named, False
    return named, True


def _constructors(target: Any) -> list[Any]:
    """What runs when a target is called: itself, or the __init__ of a class and of its bases."""
    if not inspect.isclass(target):
        return [target]
    return [vars(c)["__init__"] for c in target.__mro__ if "__init__" in vars(c) and c not in (object, torch.nn.Module)]


def _constants(model: FlatModel) -> str:
    """A hash of what a model holds beside its rows: frozen parameters and constant buffers."""
    found = hashlib.sha256()
    for name, t in (*model.module.named_parameters(), *model.module.named_buffers()):
        if not t.requires_grad and name not in model.buffer_names:
            found.update(name.encode() + t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def model(cfg: DictConfig, federation: Federation) -> FlatModel:
    """The model on this federation's shapes, its initialization keyed by the seed."""
    def draw(*number: int) -> torch.nn.Module:
        return _module(cfg, federation, *number)
    module = draw()
    check_parameters(module, f"model._target_={cfg.model._target_}")
    columns = OmegaConf.to_container(cfg.model.columns, resolve=True) if cfg.model.get("columns") else {}
    return FlatModel(module, columns, federation.device, draw, int(cfg.seed))         # type: ignore[arg-type]


def algorithm(cfg: DictConfig) -> Algorithm:
    """The method, wrapped by fine-tuning where finetune.epochs > 0."""
    method = part(cfg, "algorithm")
    tune = cfg.finetune
    return FineTuned(method, tune.epochs, tune.lr, tune.when, tune.part) if tune.epochs else method


def memory_limits(device: torch.device, ranks: int = 1) -> tuple[int, int, int]:
    """Bytes that the stores of rows may come to take on the device, in host memory and on disk: half of the memory, and
    what is free; of the host's, every one of the machine's ranks has its part."""
    host, disk = memory(torch.device("cpu")) // 2 // ranks, disk_space() // ranks
    return (memory(device) // 2, host, disk) if device.type == "cuda" else (host, 0, disk)


def engine(cfg: DictConfig, arrays: Arrays, split: Split, stored: Mapping | None = None,
           method: Algorithm | None = None) -> Engine:
    """Everything a cohort needs.  stored: the executor's plan of a run that is resumed.  method: what it is for, which
    refuses what it cannot run on before executors are timed."""
    device, ranks = device_of(cfg), processes.current()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    set_precision(cfg.hardware.precision)
    everyone = ranks.in_turn(lambda: federation(cfg, arrays.dealt(split), split, device))     # keeps features on disk
    training = training_part(everyone, cfg.new_clients.count)
    training.cohort_size = cohort_size(cfg, training.num_clients)
    flat = ranks.in_turn(lambda: model(cfg, training))                                        # and so are weights
    flat.autocast = cfg.hardware.precision == "bf16"
    h, share = cfg.hardware, -(-training.cohort_size // ranks.size)
    plans = [Plan(**stored)] if stored else executors.plans(
        h.executor, h.chunk, h.threads, device, share, ranks.local_size, graphs(h.graphs, device), convolves(flat))
    store = RowStore(training.num_clients, device, *memory_limits(device, ranks.local_size),
                     cfg.rounds * training.cohort_size)
    optimizer = part(cfg, "optimizer")
    optimizer.check(training.num_clients)
    built = Engine(training, flat, optimizer, Executor(plans[0], device, ranks), store, int(cfg.seed),
                   cfg.rounds, cfg.local.epochs, cfg.local.batch_size, cfg.local.drop_last,
                   cfg.eval.batch_size or eval_batch(device),
                   cfg.eval.batch_size or shared_batch(device, training.sample_bytes), everyone=everyone)
    built.privacy = privacy(cfg, built.rows)
    flat.convolution = plans[0].convolution                                                   # type: ignore
    check_outputs(flat, training, f"model._target_={cfg.model._target_}")
    if method is not None:
        check_method(built, method)
    if not stored and (len(plans) > 1 or flat.mapped):
        choose_executor(built, plans)
    meet(built, cfg)
    return built


def meet(engine: Engine, cfg: DictConfig) -> None:
    """Where several runs share the process: let this one's gradients be computed with those of its kin, the runs with
    the same model on the same kind of data."""
    meeting, plan = joint.current(), engine.executor.plan
    if meeting is None:
        return
    precision = cfg.hardware.precision
    require(meeting.share(("precision",), lambda: precision) == precision, f"hardware.precision={precision}: runs that "
            "are computed together have one precision; use another hydra/launcher")
    if plan.workers == 1 and plan.chunk != 1:
        f = engine.federation
        kin = (_text(cfg.model), _constants(engine.model), str(f.input_shape), f.num_classes,
               tuple(f.class_names or ()), f.template, str(engine.device))
        engine.executor.gradients = meeting.member(engine.executor.gradients, kin)


def convolves(model: FlatModel) -> bool:
    """Whether convolutions of several clients have more than one way to be computed: not in a mapped module."""
    return model.program is not None and any(isinstance(m, torch.nn.Conv2d) for m in model.module.modules())


def graphs(wanted: bool | str, device: torch.device) -> bool | None:
    """hardware.graphs: True, False, or None where it is to be timed."""
    require(wanted is not True or device.type == "cuda",
            f"hardware.graphs=true: CUDA graphs need a CUDA device, and this run is on {device}; use auto or false")
    return None if wanted == "auto" else bool(wanted)


def privacy(cfg: DictConfig, rows: RowStore) -> Privacy | None:
    """What is done to uploads, unless privacy.epsilon=null."""
    wanted = cfg.get("privacy")
    return None if wanted is None or wanted.epsilon is None else Privacy(rows, **wanted)


def eval_batch(device: torch.device) -> int:
    """Samples per evaluation batch.  A GPU wants many; of CPUs, one with small caches convolves 64 1.2 times as fast as
    256, one with large caches 256 1.2 times as fast as 64 (and 128 1.14 times)."""
    return 128 if device.type == "cpu" else 512


def shared_batch(device: torch.device, sample_bytes: int) -> int:
    """Samples per evaluation batch of a row that all clients hold, so that nothing is padded: more where inputs are
    small and a batch is made of overheads (1,000 clients of 7 test samples of 64 numbers: 1.4 times as fast)."""
    return max(eval_batch(device), (1 << 18 if device.type == "cpu" else 1 << 22) // sample_bytes)


def _text(group: DictConfig, reserved: tuple[str, ...] = ()) -> str:
    """A group's values, less the reserved ones, as a key."""
    values = OmegaConf.to_container(group, resolve=True)
    return json.dumps({k: v for k, v in values.items() if k not in reserved}, sort_keys=True)    # type: ignore


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def draw_cohort(seed: int, round: int, num_clients: int, size: int) -> np.ndarray:
    """The clients of a round, uniform without replacement; the same for every algorithm under one seed.  # [K]"""
    if size == num_clients:
        return np.arange(num_clients)
    return np.sort(rng.generator(seed, "cohort", round).choice(num_clients, size, replace=False, shuffle=False))


def choose_executor(engine: Engine, plans: list[Plan], steps: int = 3) -> None:
    """Keep the plan that is the fastest for a few local steps of at most 8 clients (64 on a GPU) and 32 samples, of
    those that the model can be trained by.  Where processes share the run, the first one times and all keep what it
    found."""
    ranks = engine.executor.ranks
    ids = draw_cohort(engine.seed, 0, engine.federation.num_clients, engine.federation.cohort_size)
    ids = ids[:8 if engine.device.type == "cpu" else 64]
    best = autotune.fastest(engine, ids, plans, steps) if ranks.first else plans[0]
    use(engine, ranks.decide("choice of the executor", best), ranks)


def save_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """The partition as an artifact: partition.npz, and partition.json with its hash and sizes."""
    split.save(run_dir / "partition.npz")
    replace_file(run_dir / "partition.json", [json.dumps(facts(split, arrays)) + "\n"])


def mend_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """Write the partition's files again where they are no longer what they were."""
    try:
        now, there = facts(split, arrays), json.loads((run_dir / "partition.json").read_text())
        fits = Split.load(run_dir / "partition.npz").hash == split.hash and there["hash"] == split.hash and \
            all(now.get(name) == value for name, value in there.items())      # of an older version: some are missing
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        log.warning("%s: partition.npz or partition.json was not that of the run; both are written again", run_dir)
        save_partition(split, arrays, run_dir)


def facts(split: Split, arrays: Arrays) -> dict[str, Any]:
    """What partition.json says."""
    return {"hash": split.hash, "num_clients": split.num_clients, "num_classes": arrays.num_classes,
            "train": split.train.sizes.tolist(), "val": split.val.sizes.tolist(), "test": split.test.sizes.tolist(),
            **described(split, arrays)}


def described(split: Split, arrays: Arrays) -> dict[str, Any]:
    """What figures and reports ask of a partition: extra samples among the training ones [N], each client's natural
    silo [N], classes, and training samples by client and class [N, C] unless they are very many."""
    train, facts = split.train, {}
    if (arrays.split == EXTRA).any():
        facts["extra"] = count_extra(split, arrays).tolist()
    if arrays.domain is not None and arrays.domain_names is not None:
        facts["domains"] = [arrays.domain_names[d] for d in arrays.domain[train.indices[train.offsets[:-1]]]]
    if split.num_clients * arrays.num_classes <= MOST_CELLS:
        cells = train.owners() * (arrays.num_classes + 1) + arrays.labels()[train.indices]     # multi-label: C is none
        table = np.bincount(cells, minlength=split.num_clients * (arrays.num_classes + 1))
        facts["label_counts"] = table.reshape(split.num_clients, -1)[:, :arrays.num_classes].tolist()
        facts["class_names"] = arrays.class_names
    return facts
