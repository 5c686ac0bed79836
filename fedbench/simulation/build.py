"""Build the components of a run from a checked configuration: data, partition, federation, algorithm, engine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from omegaconf import DictConfig

from fedbench.adapters.base import HasHiddenLayers
from fedbench.aggregators.base import Aggregator
from fedbench.aggregators.mean import Mean
from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import OLD_NAMES, Algorithm
from fedbench.attacks.base import Poisoned
from fedbench.channel.attackers import Attackers
from fedbench.channel.central import CentralPrivacy
from fedbench.channel.compression import Compression
from fedbench.channel.lora_sync import LoraSync
from fedbench.channel.privacy import Privacy
from fedbench.compression.none import NoCompression
from fedbench.core.error_text import describe_error
from fedbench.core.options import ConfigError, require
from fedbench.core.renamed import refuse_old_names
from fedbench.core.rows import RowStore
from fedbench.core.settings import clients_to_train
from fedbench.core.split import Split
from fedbench.data import _stored_digest as stored_digest
from fedbench.data.base import Arrays
from fedbench.data.tables._scales import warn_of_scales
from fedbench.engine import executor as executors
from fedbench.engine import ranks as processes
from fedbench.engine.engine import Engine
from fedbench.engine.executor import Executor, Plan
from fedbench.engine.federation import Federation
from fedbench.engine.host_inputs import stay_on_host
from fedbench.engine.shard import Shard
from fedbench.engine.sharded_rows import ShardedRowStore
from fedbench.models.frozen_encoder import FrozenEncoder
from fedbench.nn.client_ranks import ClientRanks
from fedbench.nn.flat import FlatModel
from fedbench.partition._folds import hold_out_fold
from fedbench.partition.base import build_split
from fedbench.server.average import Average
from fedbench.server.base import ServerRule
from fedbench.simulation import autotune
from fedbench.simulation.autotune import use
from fedbench.simulation.build_model import build_module, model, reads_inputs
from fedbench.simulation.devices import (
    cuda_graphs,
    device_of,
    evaluation_batch,
    memory_limits,
    set_precision,
    shared_evaluation_batch,
    smaller_for_masks,
)
from fedbench.simulation.evaluate import TRIGGERED
from fedbench.simulation.instantiate import component, make, plain_values, target_of
from fedbench.simulation.output_checks import check_outputs
from fedbench.simulation.sampling import attacker_ids, cohort_size, draw_cohort, per_client, step_fractions
from fedbench.tasks.base import Task
from fedbench.tasks.scores import register_directions

LARGE = 1000  # if data do not fit in memory, the advice is to lower options of the data set above this value

__all__ = ["algorithm", "check_settings", "data", "engine", "federation", "load", "make", "model", "partition", "task"]


def check_settings(cfg: DictConfig, method: Algorithm) -> None:
    """Check what can be checked before data are loaded: types of the components, and the method's options.

    Args:
        cfg: The checked configuration.
        method: The federated method, such as FedAvg.

    Raises:
        ConfigError: A component has the wrong type, or the method refuses an option.
    """
    cuda_graphs(cfg.hardware.graphs, device_of(cfg))  # raises ConfigError for graphs on a CPU
    source, module = target_of(cfg, "dataset"), target_of(cfg, "model")
    require(
        not inspect.isclass(source) or hasattr(source, "load"),
        f"dataset._target_={cfg.dataset._target_} is not a data source, because it has no method load(): add it, or "
        "choose another class",
    )
    require(
        not inspect.isclass(module) or issubclass(module, torch.nn.Module),
        f"model._target_={cfg.model._target_} is not a torch.nn.Module: name a subclass of it",
    )
    component(cfg, "partition")  # raises ConfigError if it cannot be built
    num_clients, num_new = cfg.partition.num_clients, cfg.new_clients.count
    method.check_settings(
        num_clients=None if num_clients is None else clients_to_train(num_clients, num_new),
        groups=list(cfg.model.get("columns") or ()),  # names of the model's column groups (named sets of parameters)
        optimizer=component(cfg, "optimizer"),
    )


def data(cfg: DictConfig) -> Arrays:
    """Return the data set, and record its digest (data/_stored_digest.py).

    Args:
        cfg: The checked configuration.

    Raises:
        ConfigError: The data cannot be loaded.
    """
    dataset, folder = plain_values(cfg.dataset), os.path.expanduser(cfg.data_dir)
    return stored_digest.load(dataset, folder, lambda: load(cfg))


def load(cfg: DictConfig) -> Arrays:
    """Read, download or generate the data set.

    Args:
        cfg: The checked configuration.

    Raises:
        ConfigError: The data cannot be loaded.
    """
    source, name = component(cfg, "dataset"), f"dataset._target_={cfg.dataset._target_}"
    try:
        arrays = source.load()
    except ConfigError:
        raise
    except MemoryError as error:
        large = [  # options that may be numbers of samples
            f"dataset.{key}={value}" for key, value in cfg.dataset.items() if isinstance(value, int) and value > LARGE
        ]
        advice = f"lower {' or '.join(large)}" if large else "use a smaller data set, or a machine with more memory"
        raise ConfigError(f"{name}: the data do not fit in memory ({error}): {advice}") from error
    except Exception as error:
        raise ConfigError(
            f"{name} cannot load its data: {describe_error(error)}; correct its load(), or the options of dataset"
        ) from error
    require(
        isinstance(arrays, Arrays),
        f"{name}: load() returns an object of type {type(arrays).__name__}, expected fedbench.data.base.Arrays: end it "
        "with return Arrays(...).check()",
    )
    return arrays


def task(cfg: DictConfig, arrays: Arrays) -> Task:
    """Return the task of a data set (its loss and metrics), after checking the targets.

    Args:
        cfg: The checked configuration.
        arrays: The data set.

    Raises:
        ConfigError: The targets do not fit the task.
    """
    built = component(cfg, "task").for_targets(arrays.task)  # task=auto selects the task of the data set's targets
    built.check(arrays.targets, arrays.num_classes)
    return built


def partition(cfg: DictConfig, arrays: Arrays) -> Split:
    """Partition a data set over the clients.

    The result depends only on the groups dataset and partition and on the fold.

    Args:
        cfg: The checked configuration.
        arrays: The data set.

    Returns:
        The training, validation and test samples of each client, new clients included.
    """
    method, options = component(cfg, "partition"), cfg.dataset
    split = build_split(
        arrays,
        method,
        cfg.partition.num_clients,
        cfg.partition.seed,
        split=options.split,
        test_fraction=options.test_fraction,
        val_fraction=options.val_fraction,
        subset=options.get("subset", 1.0),
    )
    return split if cfg.folds is None else hold_out_fold(split, arrays, cfg.folds, cfg.fold, cfg.partition.seed)


def training_clients(with_new_clients: Federation, num_new: int) -> Federation:
    """Return the federation without the new clients.

    Args:
        with_new_clients: The federation of all clients.
        num_new: The number of new clients, which are the last ones.
    """
    n = clients_to_train(with_new_clients.num_clients, num_new)
    return with_new_clients.select_clients(np.arange(n)) if num_new else with_new_clients


def federation(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    """Build the federation of all clients, with their data on the device or in host memory.

    If the model has a frozen encoder, the federation contains its features instead of the inputs.
    Attackers have the samples that the attack gives them.

    Args:
        cfg: The checked configuration.
        arrays: The data set.
        split: Its partition over the clients.
        device: The compute device.

    Raises:
        ConfigError: Augmentation is requested with a frozen encoder, or the attack cannot poison these data.
    """
    augment = plain_values(cfg.dataset.augment)
    arrays = arrays.for_split(split, cfg.dataset.normalize)  # fitted to training samples, if the data set needs it
    warn_of_scales(arrays, split)  # of columns, if they differ much
    poisoned = poison(cfg, arrays, split)
    arrays, split = poisoned.arrays, poisoned.split
    where, normalize, shard = cfg.hardware.get("data", "auto"), cfg.dataset.normalize, _shard(cfg, poisoned)
    if not reads_inputs(cfg):  # the model has no frozen encoder
        on_host = stay_on_host(arrays, where, device)  # where: on the device or the host
        built = Federation.build(arrays, split, device, normalize, augment, on_host=on_host, shard=shard)
        return with_triggered(built, poisoned)
    require(
        not augment,
        f"dataset.augment must be null, because model={cfg.choices.model} has a frozen encoder; use model.augment",
    )
    # the frozen encoder computes its features once; the views return those of a batch, in training perhaps of a crop
    arrays = arrays.expanded()  # inputs that several samples share are copied for each of them
    reader: FrozenEncoder = build_module(cfg, arrays)
    arrays = reader.prepare(arrays, poisoned.used, device)  # used: with triggered samples
    built = Federation.build(arrays, split, device, normalize, on_host=stay_on_host(arrays, where, device), shard=shard)
    built.augment = lambda x, y, random: (reader.training_view(x, random), y)
    built.evaluation_view = reader.evaluation_view
    return with_triggered(built, poisoned)


def divides_samples(cfg: DictConfig) -> bool:
    """Return whether each process of torchrun stores the samples of its own clients only (hardware.samples=sharded).

    False with a single process.
    """
    return processes.current().world_size > 1 and cfg.hardware.get("samples") == "sharded"


def divides_rows(cfg: DictConfig) -> bool:
    """Return whether each process of torchrun stores the states of its own clients only (hardware.rows=sharded).

    False with a single process.
    """
    return processes.current().world_size > 1 and cfg.hardware.get("rows") == "sharded"


def _shard(cfg: DictConfig, poisoned: Poisoned) -> Shard | None:
    """Return the clients and samples of this process; None if it stores those of all clients.

    Args:
        cfg: The checked configuration.
        poisoned: The samples of all clients, new clients included.
    """
    if not divides_samples(cfg):
        return None
    ranks, split = processes.current(), poisoned.split
    owned = ranks.owner(np.arange(split.num_clients)) == ranks.rank
    triggered = () if poisoned.triggered is None else (poisoned.triggered,)
    return Shard.of(owned, (split.train, split.val, split.test, *triggered))


def poison(cfg: DictConfig, arrays: Arrays, split: Split) -> Poisoned:
    """Return the data after the attack on training samples; unchanged data if the attack is none or on uploads.

    Args:
        cfg: The checked configuration.
        arrays: The data set.
        split: Its partition over the clients, new clients included.
    """
    ids = attacker_ids(cfg, clients_to_train(split.num_clients, cfg.new_clients.count))
    if not len(ids):
        return Poisoned(arrays, split)
    return component(cfg, "attack").poison(arrays, split, ids, int(cfg.seed))


def with_triggered(federation: Federation, poisoned: Poisoned) -> Federation:
    """Add the test samples with the trigger of a backdoor to a federation, in place, and return the federation.

    Args:
        federation: The federation.  The samples become its split "triggered".
        poisoned: The data after the attack.  Without triggered samples, the federation is not changed.
    """
    if poisoned.triggered is not None:
        federation.splits[TRIGGERED] = poisoned.triggered
    return federation


def algorithm(cfg: DictConfig) -> Algorithm:
    """Return the method of a run.

    If finetune.epochs > 0, it is wrapped in `FineTuned`, which fine-tunes the models that the clients deploy.
    """
    method = component(cfg, "algorithm")
    refuse_old_names(method, OLD_NAMES)  # former names of attributes, which a constructor may have set
    tune = cfg.finetune
    return FineTuned(method, tune.epochs, tune.lr, tune.when, tune.part) if tune.epochs else method


def engine(
    cfg: DictConfig, arrays: Arrays, split: Split, stored: Mapping | None = None, method: Algorithm | None = None
) -> Engine:
    """Build the engine of a run: federation, model, optimizer, executor, states of clients.

    Args:
        cfg: The checked configuration.
        arrays: The data set.
        split: Its partition over the clients.
        stored: The executor plan of a resumed run.  None: the fastest plan is chosen.
        method: The method.  It is checked against the other components before executors are timed.  None: no check.

    Raises:
        ConfigError: The components do not fit each other.
    """
    device, ranks = _device(cfg), processes.current()
    # whether each process trains its own clients only
    ranks.by_owner = divides_samples(cfg) or divides_rows(cfg)
    clients = _clients(cfg, arrays, split, device)
    training = _training(cfg, clients)  # the federation without the new clients, which only adapt the final model
    component(cfg, "adapter").check(training.num_clients)
    flat = ranks.first_on_each_machine(lambda: model(cfg, training))  # writes weights to disk
    flat.autocast = cfg.hardware.precision == "bf16"
    plans = [Plan.from_state(stored)] if stored else _plans(cfg, training.cohort_size, device)
    built = _assembled(cfg, clients, training, flat, plans[0])
    check_outputs(flat, training, f"model._target_={cfg.model._target_}")
    if method is not None:
        check_method(built, method)
    # time the plans; a single one is tried as well if torch.vmap may fail
    if not stored and (len(plans) > 1 or flat.uses_vmap):
        built = choose_executor(built, plans)
    return built


def _device(cfg: DictConfig) -> torch.device:
    """Return the compute device of this process, after setting up torch for it.

    The precision of matrix products becomes hardware.precision.  A GPU with a number becomes torch's current GPU.
    """
    device = device_of(cfg)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    set_precision(cfg.hardware.precision)
    return device


def _clients(cfg: DictConfig, arrays: Arrays, split: Split, device: torch.device) -> Federation:
    """Return the federation of all clients, new clients included, with the run's task.

    Args:
        cfg: The checked configuration.
        arrays: The data set.
        split: Its partition over the clients.
        device: The compute device.
    """
    ranks = processes.current()
    clients = ranks.first_on_each_machine(lambda: federation(cfg, arrays, split, device))  # writes features to disk
    return replace(clients, task=task(cfg, arrays))


def _training(cfg: DictConfig, clients: Federation) -> Federation:
    """Return the federation of the training clients, with the number of clients per round, and set up its task.

    Then, drop the targets that this process does not store.

    Args:
        cfg: The checked configuration.
        clients: The federation of all clients, new clients included.
    """
    training = training_clients(clients, cfg.new_clients.count)
    training.task.setup(training)
    require(
        TRIGGERED not in training.splits or "accuracy" in training.task.directions(),
        f"attack={cfg.choices.attack} is scored by the accuracy on triggered samples, which the task "
        f"{type(training.task).__name__} does not have: use task=classification",
    )
    register_directions(training.task.directions())  # whether higher values of each metric are better
    training.cohort_size = cohort_size(cfg, training.num_clients)
    training.drop_other_targets()
    # the federation of all clients shares the targets, so that dropped ones use no memory
    clients.targets, clients.stored_targets = training.targets, training.stored_targets
    return training


def _assembled(cfg: DictConfig, clients: Federation, training: Federation, flat: FlatModel, plan: Plan) -> Engine:
    """Return the engine of a run.

    Args:
        cfg: The checked configuration.
        clients: The federation of all clients, new ones included.
        training: The federation of the training clients.
        flat: The model.
        plan: The executor plan.
    """
    rows, optimizer, rule = _rows(cfg, training), component(cfg, "optimizer"), aggregator(cfg, training)
    optimizer.check(training.num_clients)
    eval_batch, shared_batch = _evaluation_batches(cfg, training)
    return Engine(
        federation=training,
        with_new_clients=clients,
        model=flat,
        optimizer=optimizer,
        executor=Executor(plan, training.device, processes.current()),
        rows=rows,
        privacy=privacy(cfg, rows),
        central=central_privacy(cfg, rows, training),
        compression=compression(cfg, rows, flat),
        client_ranks=client_ranks(cfg, flat),
        lora_sync=lora_sync(cfg, flat, rows),
        server=server_rule(cfg),
        aggregator=rule,
        attackers=attackers(cfg, training.num_clients, rows, rule),
        seed=int(cfg.seed),
        rounds=cfg.rounds,
        epochs=per_client("local.epochs", cfg.local.epochs, training.num_clients),
        steps=cfg.local.steps,
        batch_size=per_client("local.batch_size", cfg.local.batch_size, training.num_clients),  # type: ignore[arg-type]
        drop_last=cfg.local.drop_last,
        eval_batch=eval_batch,
        shared_batch=shared_batch,
        client_weights=cfg.client_weights,
        step_fraction=step_fractions(cfg, training.num_clients),
        fewest_epochs=cfg.system.fewest_epochs,
    )


def _rows(cfg: DictConfig, training: Federation) -> RowStore:
    """Return the store of client states, which holds one row per training client and state.

    Its rows may use the part of GPU memory, host memory and disk space that `memory_limits` gives to this process.

    Args:
        cfg: The checked configuration.
        training: The federation of the training clients.
    """
    ranks = processes.current()
    limits = memory_limits(training.device, ranks.local_world_size)  # bytes on the device, in host memory and on disk
    most = cfg.rounds * training.cohort_size  # rows of each state that the run can write
    if divides_rows(cfg):
        return ShardedRowStore(ranks, training.num_clients, training.device, *limits, most=most)
    return RowStore(training.num_clients, training.device, *limits, most=most)


def _evaluation_batches(cfg: DictConfig, training: Federation) -> tuple[int, int]:
    """Return the numbers of samples that an evaluation computes at once, which eval.batch_size may set.

    Args:
        cfg: The checked configuration.
        training: The federation of the training clients.

    Returns:
        The number for each client, and the number of all clients together if they share one model.
    """
    if cfg.eval.batch_size:
        return cfg.eval.batch_size, cfg.eval.batch_size
    outputs = training.outputs_per_sample
    per_client = evaluation_batch(training.device)
    together = shared_evaluation_batch(training.device, training.sample_bytes)
    # with outputs for each pixel, fewer samples fit in memory
    return smaller_for_masks(per_client, outputs), smaller_for_masks(together, outputs)


def _plans(cfg: DictConfig, cohort_size: int, device: torch.device) -> list[Plan]:
    """Return the executor plans to choose from.

    Args:
        cfg: The checked configuration.
        cohort_size: The number of clients per round, which the processes of the run divide.
        device: The compute device.
    """
    hardware, ranks = cfg.hardware, processes.current()
    return executors.candidate_plans(
        hardware.executor,
        hardware.chunk,
        hardware.threads,
        device,
        cohort_size=-(-cohort_size // ranks.world_size),  # of this process, rounded up
        num_processes=ranks.local_world_size,
        graphs=cuda_graphs(hardware.graphs, device),
    )


def privacy(cfg: DictConfig, rows: RowStore) -> Privacy | None:
    """Return the mechanism that clips uploads and adds noise; None with privacy=central or privacy.epsilon=null.

    Args:
        cfg: The checked configuration.
        rows: Creates the states of clients.
    """
    options = cfg.get("privacy")
    return None if options is None or options.get("epsilon") is None else Privacy(rows, **options)


def central_privacy(cfg: DictConfig, rows: RowStore, training: Federation) -> CentralPrivacy | None:
    """Return the mechanism that clips uploads and adds noise to their means; None without privacy=central.

    Args:
        cfg: The checked configuration.
        rows: Creates the state of adaptive clipping.
        training: The federation of the training clients.

    Raises:
        ConfigError: Another component reads single uploads, or an option of the mechanism does not fit the others.
    """
    if cfg.get("privacy") is None or "_target_" not in cfg.privacy:
        return None
    choices, compressor = cfg.choices, component(cfg, "compression")
    for group, refused, instead in (
        ("aggregator", type(component(cfg, "aggregator")) is not Mean, "mean"),
        ("attack", component(cfg, "attack").changes_uploads, "none"),
        ("compression", type(compressor) is not NoCompression and compressor.reads_losses, "none"),
    ):
        require(
            not refused,
            f"{group}={choices[group]} reads uploads or losses of single clients, which privacy=central does not "
            f"cover: use {group}={instead}, or privacy=local",
        )
    is_rate = cfg.clients_per_round is None and cfg.privacy.sampling == "poisson"
    # the expected number of clients of a round, which is not rounded if each client is sampled at a rate
    expected = cfg.sample_rate * training.num_clients if is_rate else training.cohort_size
    return make(
        cfg.privacy,
        key="privacy",
        rows=rows,
        num_clients=training.num_clients,
        expected=float(expected),
        rounds=cfg.rounds,
    )


def client_ranks(cfg: DictConfig, model: FlatModel) -> ClientRanks | None:
    """Return each client's LoRA rank, with the parameters that it has at this rank; None if all ranks are equal.

    Args:
        cfg: The checked configuration.
        model: The model.
    """
    ranks = component(cfg, "adapter").client_ranks
    return None if ranks is None else ClientRanks(ranks, model)


def lora_sync(cfg: DictConfig, model: FlatModel, rows: RowStore) -> LoraSync | None:
    """Return the rule that combines the clients' LoRA factors; None if they are averaged.

    Args:
        cfg: The checked configuration.
        model: The model.
        rows: Creates the clients' and the server's states of the rule.

    Raises:
        ConfigError: The rule changes frozen weights, but models of this class share them between runs of a process.
    """
    name = component(cfg, "adapter").sync
    if name in ("average", "ffa"):  # ffa trains one factor only, which is averaged too
        return None
    require(
        name not in ("flora", "fedex") or not isinstance(model.module, HasHiddenLayers),
        f"adapter.sync={name} changes frozen weights, and those of model={cfg.choices.model} are shared between runs: "
        "use adapter.sync=flex, or another model",
    )
    return LoraSync(name, model, rows, seed=int(cfg.seed), client_ranks=client_ranks(cfg, model))


def server_rule(cfg: DictConfig) -> ServerRule | None:
    """Return the rule by which the server updates its parameters, such as FedAdam.

    None with server=average: they become the weighted mean of the clients' parameters.
    """
    rule = component(cfg, "server")
    return None if type(rule) is Average else rule


def aggregator(cfg: DictConfig, training: Federation) -> Aggregator | None:
    """Return the aggregation rule; None with aggregator=mean.

    Args:
        cfg: The checked configuration.
        training: The federation of the training clients.

    Raises:
        ConfigError: aggregator.f, the tolerated number of wrong uploads, is too large for the clients of a round.
    """
    rule = component(cfg, "aggregator")
    if type(rule) is Mean:
        return None
    rule.check(training.cohort_size)
    return rule


def attackers(cfg: DictConfig, num_clients: int, rows: RowStore, rule: Aggregator | None) -> Attackers | None:
    """Return the clients that attack the run; None if all are honest.

    Args:
        cfg: The checked configuration.
        num_clients: The number of training clients.
        rows: Creates the tensors that attackers remember.
        rule: The aggregation rule, which attackers know.

    Raises:
        ConfigError: An option of the attack does not fit the clients.
    """
    ids = attacker_ids(cfg, num_clients)
    if not len(ids):
        return None
    attack = component(cfg, "attack")
    attack.check(ids, num_clients)
    return Attackers(attack, ids, rows, rule)


def compression(cfg: DictConfig, rows: RowStore, model: FlatModel) -> Compression | None:
    """Return the compression of messages; None with compression=none.

    Args:
        cfg: The checked configuration.
        rows: Creates the states of clients.
        model: The model.

    Raises:
        ConfigError: The compressor reads training losses, which privacy does not protect.
    """
    compressor, options = component(cfg, "compression"), cfg.get("privacy")
    if type(compressor) is NoCompression:
        return None
    require(
        options is None or options.get("epsilon") is None or not compressor.reads_losses,
        f"compression={cfg.choices.compression} reads the clients' training losses, which privacy.epsilon="
        f"{options and options.get('epsilon')} does not protect; use another compression, or privacy.epsilon=null",
    )
    return Compression(compressor, rows, model, int(cfg.seed))


def check_method(engine: Engine, method: Algorithm) -> None:
    """Check that a method supports the federation, model and optimizer and, if privacy is on, that privacy covers it.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        method: The federated method, such as FedAvg.

    Raises:
        ConfigError: The method does not support a component or privacy.
    """
    if engine.client_ranks is not None:
        _check_client_ranks(engine, method)
    if engine.lora_sync is not None:
        _check_lora_sync(engine, engine.lora_sync, method)
    require(
        engine.federation.shard is None or method.reads_all_samples is None,
        f"hardware.samples=sharded does not work with this method: {method.reads_all_samples}; use "
        "hardware.samples=replicated, or another algorithm",
    )
    privacy, parts = engine.privacy, (engine.federation, engine.model)
    if engine.central is not None:
        check_central(engine, method)
    if privacy is None:
        return method.check(*parts, engine.optimizer)
    try:
        method.check(*parts, engine.optimizer.with_clip(privacy.step_clip))
    except ConfigError as refused:
        method.check(*parts, engine.optimizer)  # raises if the method also refuses it without privacy
        raise ConfigError(
            f"privacy.clip={privacy.clip:g} with privacy.calibration=paper clips every local step: "
            f"{refused}; or use privacy.calibration=analytic, which clips only uploads"
        ) from None
    require(
        method.bypasses_upload is None,
        f"privacy.epsilon={privacy.epsilon:g} does not cover this method: {method.bypasses_upload}; choose another "
        "algorithm, or set privacy.epsilon=null",
    )
    require(
        privacy.sensitivity != "lr_over_n" or engine.optimizer.schedule.per == "round",
        "privacy.sensitivity=lr_over_n needs one learning rate per round, but optimizer.schedule.per is "
        f"{engine.optimizer.schedule.per}: use optimizer.schedule.per=round",
    )
    require(  # ratio: the noise's standard deviation as a multiple of the sensitivity, 0 without noise
        privacy.ratio == 0 or not engine.model.buffer_names,
        f"privacy.epsilon={privacy.epsilon:g}: noise could make the running variances of BatchNorm negative; use a "
        "model without BatchNorm, for example model.norm=group if the model has that option",
    )


def _check_client_ranks(engine: Engine, method: Algorithm) -> None:
    """Check that clients may have LoRA factors of different ranks.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        method: The federated method, such as FedAvg.

    Raises:
        ConfigError: The method, the compression or the aggregation rule needs equal ranks.
    """
    inner = unwrapped(method)  # without the wrapper that fine-tunes its models
    # not inherited, because the steps of a subclass may read other columns of what they receive
    require(
        vars(type(inner)).get("supports_client_ranks", False),
        f"adapter.rank lists different ranks, and {type(inner).__name__} is not among the methods that support them "
        "(supports_client_ranks): use algorithm=fedavg, fedprox, scaffold, ditto, pgfed, fedper or local, or one rank",
    )
    require(
        engine.compression is None,
        "adapter.rank lists different ranks, and a compressor needs messages of one length: use compression=none, or "
        "one rank",
    )
    require(
        engine.aggregator is None,
        "adapter.rank lists different ranks, and an aggregation rule would read the columns that a client lacks as "
        "uploads of 0: use aggregator=mean, or one rank",
    )


def _check_lora_sync(engine: Engine, sync: LoraSync, method: Algorithm) -> None:
    """Check that a rule for LoRA can replace the server's mean.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        sync: The rule of adapter.sync for LoRA factors, such as fedex.
        method: The federated method, such as FedAvg.

    Raises:
        ConfigError: The method does not average one server model, or another option replaces the mean.
    """
    inner = unwrapped(method)  # without the wrapper that fine-tunes its models
    require(  # not inherited, because a subclass may have several server models
        vars(type(inner)).get("averages_one_model", False),
        f"adapter.sync={sync.name} replaces the mean of the server's model, which {type(inner).__name__} does not take "
        "once in a round (averages_one_model): use algorithm=fedavg, fedprox, ditto, pgfed or fedper, or "
        "adapter.sync=average",
    )
    require(
        engine.server is None and engine.aggregator is None,
        f"adapter.sync={sync.name} replaces the mean of the clients' factors, and so do server and aggregator: use "
        "server=average aggregator=mean, or adapter.sync=average",
    )
    require(
        sync.name != "fedex" or engine.client_ranks is None,
        "adapter.sync=fedex is exact only if all clients have the same rank, and adapter.rank lists different ones: "
        "use one rank, or adapter.sync=flora or flex",
    )
    require(
        sync.personal is None or not isinstance(method, FineTuned),
        "adapter.sync=fedsa keeps factors with the clients, which finetune.epochs would overwrite: use "
        "finetune.epochs=0, or adapter.sync=average",
    )
    compressor = None if engine.compression is None else engine.compression.compressor
    # personal: the factors B that stay with the clients (fedsa); backbone: the frozen weights that the rule changes
    require(
        compressor is None or (sync.personal is None and (sync.backbone is None or compressor.direction == "up")),
        f"adapter.sync={sync.name} does not send whole models both ways, which compression needs: use compression=none"
        + (", or compression.direction=up" if sync.personal is None else ""),
    )
    # whether residuals or momentum of earlier rounds are kept
    remembers = (compressor is not None and compressor.error_feedback) or engine.optimizer.reset == "never"
    require(
        sync.name not in ("flora", "flex") or not remembers,
        f"adapter.sync={sync.name} replaces the factors by others in each round, and residuals and momentum of earlier "
        "factors would be added to new ones: use compression.error_feedback=false and optimizer.reset=round",
    )


def check_states(engine: Engine) -> None:
    """Check that no client keeps a model if adapter.sync changes frozen weights or keeps LoRA factors with clients.

    Args:
        engine: The engine after the setup of the method, which created the client states.

    Raises:
        ConfigError: A client state has the length of a model.
    """
    sync = engine.lora_sync
    # personal: LoRA factors B that stay with the clients (fedsa); backbone: frozen weights that the rule changes
    if sync is None or (sync.personal is None and sync.backbone is None):
        return
    # states with the length of a model
    models = [rows.name for rows in engine.rows.all.values() if rows.default.numel() == engine.model.size]
    reason = "changes the frozen weights" if sync.personal is None else "keeps B with the client"
    require(
        not models,
        f"adapter.sync={sync.name} {reason}, "
        f"and the method keeps models of clients ({', '.join(models)}) that were trained without it: use "
        "algorithm=fedavg, fedprox or fedper, or another adapter.sync such as flex",
    )


def unwrapped(method: Algorithm) -> Algorithm:
    """Return the method that `FineTuned`, the wrapper of finetune.epochs, contains; any other method unchanged."""
    return method.inner if isinstance(method, FineTuned) else method


def check_new_clients(engine: Engine, method: Algorithm) -> None:
    """Check, after the method's setup, that central privacy covers the initial model of new clients.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        method: The federated method, such as FedAvg.

    Raises:
        ConfigError: New clients would start from the mean of the clients' own models, which has no noise.
    """
    inner, all_clients = unwrapped(method), engine.with_new_clients
    num_new = 0 if all_clients is None else all_clients.num_clients - engine.federation.num_clients
    # whether the method does not replace the default: the global model, or without one the mean of the clients' models
    is_mean = type(inner).initial_row_for_new_clients is Algorithm.initial_row_for_new_clients
    require(
        engine.central is None or num_new == 0 or not is_mean or inner.global_row() is not None,
        f"new_clients.count={num_new}: new clients of this method start from the mean of the models that clients keep, "
        "which privacy=central does not cover: choose a method with a global model, such as fedavg or ditto, or set "
        "new_clients.count=0",
    )


def check_central(engine: Engine, method: Algorithm) -> None:
    """Raise ConfigError if central privacy does not cover a method, as far as this is known before the first round.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        method: The federated method, such as FedAvg.
    """
    require(
        method.bypasses_upload is None,
        f"privacy=central does not cover this method: {method.bypasses_upload}; choose another algorithm, or "
        "privacy=local",
    )
    require(
        not engine.model.buffer_names,
        "privacy=central does not cover the running means and variances of BatchNorm, which noise could make negative; "
        "use a model without BatchNorm, for example model.norm=group if the model has that option",
    )
    require(
        engine.lora_sync is None and engine.client_ranks is None,
        "adapter.sync and a list in adapter.rank combine uploads by rules of their own, which privacy=central does not "
        "cover: use adapter.sync=average and one adapter.rank, or privacy=local",
    )


def choose_executor(engine: Engine, plans: list[Plan], steps: int = 3) -> Engine:
    """Time executor plans on a few local steps, and return the engine with the fastest plan that the model supports.

    If several processes share the run, rank 0 decides.

    Args:
        engine: The clients with their data, the model, the executor and the client states.
        plans: The plans to time.
        steps: The number of local steps to time.

    Returns:
        A copy of the engine with the plan.
    """
    ranks = engine.executor.ranks
    federation = engine.federation
    ids = draw_cohort(engine.seed, 0, federation.num_clients, federation.cohort_size)  # the cohort of round 0
    if federation.shard is not None:  # as many of the clients whose samples this process stores
        ids = np.flatnonzero(federation.shard.owned)[: len(ids)]
    ids = ids[: 8 if engine.device.type == "cpu" else 64]  # enough clients to compare plans
    best = autotune.fastest(engine, ids, plans, steps) if ranks.is_first else plans[0]
    return use(engine, ranks.broadcast_object("choice of the executor", best), ranks)
