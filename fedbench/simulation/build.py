"""From a checked config to the parts of a run: data, partition, federation, algorithm, engine.

`_target_` is the registry.  Keys that belong to fedbench rather than to a target's constructor (dataset.split,
model.columns, ...) are taken out (instantiate.py).
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from omegaconf import DictConfig

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.compression.none import NoCompression
from fedbench.core.faults import describe_error
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import clients_to_train
from fedbench.data import _known as known
from fedbench.data._scales import warn_of_scales
from fedbench.data.base import Arrays
from fedbench.engine import executor as executors
from fedbench.engine import joint
from fedbench.engine import ranks as processes
from fedbench.engine.cohort import Engine
from fedbench.engine.compression import Compression
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.federation import Federation
from fedbench.engine.host_inputs import stay_on_host
from fedbench.engine.privacy import Privacy
from fedbench.engine.privacy import check as check_method
from fedbench.engine.rows import RowStore
from fedbench.models.frozen_encoder import FrozenEncoder
from fedbench.nn.flat import FlatModel
from fedbench.partition._folds import hold_out
from fedbench.partition.base import Split, build_split
from fedbench.simulation import autotune
from fedbench.simulation.autotune import use
from fedbench.simulation.build_model import build_module, constants_hash, has_convolutions, model, reads_inputs
from fedbench.simulation.devices import (
    cuda_graphs,
    device_of,
    evaluation_batch,
    memory_limits,
    set_precision,
    shared_evaluation_batch,
    smaller_for_masks,
)
from fedbench.simulation.instantiate import make, part, plain_values, target_of
from fedbench.simulation.outputs import check_outputs
from fedbench.simulation.sampling import cohort_size, draw_cohort, epochs, pace
from fedbench.tasks.base import Task
from fedbench.tasks.scores import declare

FEW = 1000  # options up to here are not named where data do not fit in memory

__all__ = ["algorithm", "check_settings", "data", "engine", "federation", "load", "make", "model", "partition", "task"]


def check_settings(cfg: DictConfig, method: Algorithm) -> None:
    """Refuse what can be refused before any data are loaded: parts of the wrong kind, and what they say themselves."""
    device = device_of(cfg)
    cuda_graphs(cfg.hardware.graphs, device)
    source, module = target_of(cfg, "dataset"), target_of(cfg, "model")
    require(
        not inspect.isclass(source) or hasattr(source, "load"),
        f"dataset._target_={cfg.dataset._target_} is no data source, which has load()",
    )
    require(
        not inspect.isclass(module) or issubclass(module, torch.nn.Module),
        f"model._target_={cfg.model._target_} is no torch.nn.Module",
    )
    part(cfg, "partition")
    num_clients, num_new = cfg.partition.num_clients, cfg.new_clients.count
    method.check_settings(
        None if num_clients is None else clients_to_train(num_clients, num_new),
        list(cfg.model.get("columns") or ()),
        part(cfg, "optimizer"),
    )


def data(cfg: DictConfig) -> Arrays:
    """The data set; runs of one process share it, and its digest is kept beside it (data/_known.py)."""
    dataset, folder = plain_values(cfg.dataset), os.path.expanduser(cfg.data_dir)
    return joint.load_once(("data", known.key_of(dataset)), lambda: known.load(dataset, folder, lambda: load(cfg)))


def load(cfg: DictConfig) -> Arrays:
    """The data set, read (or downloaded, or generated) anew; ConfigError where that fails."""
    source, name = part(cfg, "dataset"), f"dataset._target_={cfg.dataset._target_}"
    try:
        arrays = source.load()
    except ConfigError:
        raise
    except MemoryError as error:
        large = [
            f"dataset.{key}={value}" for key, value in cfg.dataset.items() if isinstance(value, int) and value > FEW
        ]
        advice = f": lower {' or '.join(large)}" if large else ""
        raise ConfigError(f"{name}: its data do not fit in memory ({error}){advice}") from error
    except Exception as error:
        raise ConfigError(f"{name} cannot load its data: {describe_error(error)}") from error
    require(
        isinstance(arrays, Arrays),
        f"{name}: load() returns an object of type {type(arrays).__name__}, expected fedbench.data.base.Arrays",
    )
    return arrays


def task(cfg: DictConfig, arrays: Arrays) -> Task:
    """What is to be learned from these data; ConfigError where their targets are not for it."""
    built = part(cfg, "task").for_targets(arrays.task)
    built.check(arrays.targets, arrays.num_classes)
    return built


def partition(cfg: DictConfig, arrays: Arrays) -> Split:
    """The split of the data over clients: a function of the dataset and partition groups and of the fold alone."""
    method = part(cfg, "partition")
    d = cfg.dataset
    split = build_split(
        arrays,
        method,
        cfg.partition.num_clients,
        cfg.partition.seed,
        d.split,
        d.test_fraction,
        d.val_fraction,
        d.get("subset", 1.0),
    )
    return split if cfg.folds is None else hold_out(split, arrays, cfg.folds, cfg.fold, cfg.partition.seed)


def training_clients(with_new_clients: Federation, num_new: int) -> Federation:
    """The federation without its last clients, num_new of them, which come after training."""
    n = clients_to_train(with_new_clients.num_clients, num_new)
    return with_new_clients.among(np.arange(n)) if num_new else with_new_clients


def federation(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    """All clients' data on the device.

    A model with a frozen part that reads the inputs (an image tower) says so by a method `prepare`: the federation
    then holds what that part makes of them.  Runs that share a process share the tensors.
    """
    features_of = (_text(cfg.model), int(cfg.seed), str(cfg.algorithm._target_)) if reads_inputs(cfg) else ()
    divided = (_text(cfg.dataset), _text(cfg.partition), cfg.folds, cfg.fold)
    key = ("federation", *divided, str(device), cfg.hardware.get("data"), features_of)
    built = joint.load_once(key, lambda: _federation(cfg, arrays, split, device))
    return replace(built, splits=dict(built.splits)) if joint.current() else built


def _federation(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    augment = plain_values(cfg.dataset.augment)
    arrays = arrays.for_split(split, cfg.dataset.normalize)
    warn_of_scales(arrays, split)
    where, normalize = cfg.hardware.get("data", "auto"), cfg.dataset.normalize
    if not reads_inputs(cfg):
        return Federation.build(arrays, split, device, normalize, augment, on_host=stay_on_host(arrays, where, device))
    require(
        not augment,
        f"dataset.augment cannot come before the frozen part of model={cfg.choices.model}: set it to "
        "null, and see model.augment",
    )
    arrays = arrays.expanded()
    reader: FrozenEncoder = build_module(cfg, arrays)
    arrays = reader.prepare(arrays, split, device)
    built = Federation.build(arrays, split, device, normalize, on_host=stay_on_host(arrays, where, device))
    built.augment = lambda x, y, random: (reader.training_view(x, random), y)
    built.present = reader.evaluation_view
    return built


def algorithm(cfg: DictConfig) -> Algorithm:
    """The method, wrapped by fine-tuning where finetune.epochs > 0."""
    method = part(cfg, "algorithm")
    tune = cfg.finetune
    return FineTuned(method, tune.epochs, tune.lr, tune.when, tune.part) if tune.epochs else method


def engine(
    cfg: DictConfig, arrays: Arrays, split: Split, stored: Mapping | None = None, method: Algorithm | None = None
) -> Engine:
    """Everything a cohort needs.

    stored: the executor's plan of a run that is resumed.  method: what the engine is for, which refuses what it cannot
    run on before executors are timed.
    """
    device, ranks = device_of(cfg), processes.current()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    set_precision(cfg.hardware.precision)
    clients = ranks.first_on_each_machine(lambda: federation(cfg, arrays, split, device))  # writes features to disk
    clients = replace(clients, task=task(cfg, arrays))  # runs of one process share tensors, not tasks
    training = training_clients(clients, cfg.new_clients.count)
    training.task.setup(training)
    declare(training.task.directions())
    training.cohort_size = cohort_size(cfg, training.num_clients)
    flat = ranks.first_on_each_machine(lambda: model(cfg, training))  # writes weights to disk
    flat.autocast = cfg.hardware.precision == "bf16"
    plans = [Plan(**stored)] if stored else _plans(cfg, training.cohort_size, flat, device)
    store = RowStore(
        training.num_clients, device, *memory_limits(device, ranks.local_size), cfg.rounds * training.cohort_size
    )
    optimizer = part(cfg, "optimizer")
    optimizer.check(training.num_clients)
    outputs = training.outputs_per_sample
    built = Engine(
        training,
        flat,
        optimizer,
        Executor(plans[0], device, ranks),
        store,
        int(cfg.seed),
        cfg.rounds,
        epochs(cfg, training.num_clients),
        cfg.local.batch_size,
        cfg.local.drop_last,
        cfg.eval.batch_size or smaller_for_masks(evaluation_batch(device), outputs),
        cfg.eval.batch_size or smaller_for_masks(shared_evaluation_batch(device, training.sample_bytes), outputs),
        with_new_clients=clients,
        weights=cfg.weights,
        pace=pace(cfg, training.num_clients),
        fewest_epochs=cfg.system.fewest_epochs,
    )
    built.privacy = privacy(cfg, built.rows)
    built.compression = compression(cfg, built)
    flat.convolution = plans[0].convolution  # type: ignore
    check_outputs(flat, training, f"model._target_={cfg.model._target_}")
    if method is not None:
        check_method(built, method)
    if not stored and (len(plans) > 1 or flat.mapped):
        choose_executor(built, plans)
    join_runs(built, cfg)
    return built


def _plans(cfg: DictConfig, cohort: int, flat: FlatModel, device: torch.device) -> list[Plan]:
    """The plans to choose from, for this process's part of a cohort of so many clients."""
    hardware, ranks = cfg.hardware, processes.current()
    return executors.plans(
        hardware.executor,
        hardware.chunk,
        hardware.threads,
        device,
        -(-cohort // ranks.size),
        ranks.local_size,
        cuda_graphs(hardware.graphs, device),
        has_convolutions(flat),
    )


def join_runs(engine: Engine, cfg: DictConfig) -> None:
    """Where several runs share the process: compute this one's gradients with those of the runs that have the same
    model on the same kind of data (engine/joint.py)."""
    runs, plan = joint.current(), engine.executor.plan
    if runs is None:
        return
    precision = cfg.hardware.precision
    require(
        runs.load_once(("precision",), lambda: precision) == precision,
        f"hardware.precision={precision}: runs that "
        "are computed together have one precision; use another hydra/launcher",
    )
    if plan.workers == 1 and plan.chunk != 1:
        f = engine.federation
        kind = (
            _text(cfg.model),
            _text(cfg.adapter),
            constants_hash(engine.model),
            str(f.input_shape),
            f.num_classes,
            tuple(f.class_names or ()),
            f.template,
            str(engine.device),
        )
        engine.executor.gradients = runs.gradients(engine.executor.gradients, kind)


def privacy(cfg: DictConfig, rows: RowStore) -> Privacy | None:
    """What is done to uploads; None with privacy.epsilon=null."""
    options = cfg.get("privacy")
    return None if options is None or options.epsilon is None else Privacy(rows, **options)


def compression(cfg: DictConfig, engine: Engine) -> Compression | None:
    """What is done to messages; None with compression=none.  ConfigError where privacy does not allow it."""
    operator = part(cfg, "compression")
    if type(operator) is NoCompression:
        return None
    require(
        engine.privacy is None or not operator.reads_losses,
        f"compression={cfg.choices.compression} has clients tell their training losses, which privacy.epsilon="
        f"{cfg.privacy.epsilon} does not cover; use another one",
    )
    return Compression(operator, engine.rows, engine.model, engine.seed)


def choose_executor(engine: Engine, plans: list[Plan], steps: int = 3) -> None:
    """Use the plan that is the fastest for a few local steps of at most 8 clients (64 on a GPU) and 32 samples, of
    those that the model can be trained by.

    Where processes share the run, the first one times and all use its choice.
    """
    ranks = engine.executor.ranks
    ids = draw_cohort(engine.seed, 0, engine.federation.num_clients, engine.federation.cohort_size)
    ids = ids[: 8 if engine.device.type == "cpu" else 64]
    best = autotune.fastest(engine, ids, plans, steps) if ranks.first else plans[0]
    use(engine, ranks.decide("choice of the executor", best), ranks)


def _text(group: DictConfig) -> str:
    """A group's values, as a key."""
    return json.dumps(plain_values(group), sort_keys=True)
