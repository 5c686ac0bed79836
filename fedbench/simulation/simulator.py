"""The simulation of one run: build its components, run its rounds, evaluate.

Callbacks write the files of a run and print its progress (callbacks/).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fedbench.channel.compression import TINY
from fedbench.channel.cost import RoundCost
from fedbench.channel.sealed import find_sealed, refuse
from fedbench.core import torch_settings
from fedbench.core.options import PeerLost, listed, require
from fedbench.engine import ranks as processes
from fedbench.engine.cohort import Cohort
from fedbench.simulation import build, checkpoint, evaluate, new_clients
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.callbacks.build import build as build_callbacks
from fedbench.simulation.callbacks.build import build_on_other_ranks
from fedbench.simulation.early_stopping import EarlyStopping, require_validation
from fedbench.simulation.environment import synchronize
from fedbench.simulation.log import Output
from fedbench.simulation.measured import write_measured
from fedbench.simulation.partition_files import rewrite_damaged_partition, save_partition
from fedbench.simulation.resume_checks import check_saved
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.sampling import draw_cohort, evaluated_clients, participants
from fedbench.simulation.stop_signals import StopSignals
from fedbench.simulation.summary import log_components, log_run, summary
from fedbench.tasks import scores

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig,
    run_dir: Path,
    resume: bool = False,
    command_entries: Mapping[str, Any] | None = None,
    output: Output = "lines",
) -> dict[str, Any]:
    """Run or resume an experiment, and return its summary.

    If several processes share the run, each of them calls this function.  Only rank 0 writes and prints.

    Args:
        cfg: The checked configuration.
        run_dir: The run folder.
        resume: Whether to resume from the checkpoint.
        command_entries: Entries for summary.json about the command: `command`, as typed, and `classes`, a dict from
            group to a class that was given in place of an option.
        output: What the run prints: "lines", "bar" or "warnings".

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: The user made a mistake, for example in an option.
        KeyboardInterrupt: A stop signal arrived.  The current round is finished and saved first; a second signal
            stops at once.
    """
    try:
        with torch_settings.preserved():
            return _run(cfg, run_dir, resume, command_entries or {}, output)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        processes.current().report_failure(error)
        raise


def _run(
    cfg: DictConfig, run_dir: Path, resume: bool, command_entries: Mapping[str, Any], output: Output
) -> dict[str, Any]:
    """Run or resume an experiment, without restoring torch's settings and reporting failures to other processes.

    Args:
        cfg: The checked configuration.
        run_dir: The run folder.
        resume: Whether to resume from the checkpoint.
        command_entries: Entries for summary.json about the command.
        output: What the run prints: "lines", "bar" or "warnings".

    Returns:
        The content of summary.json.
    """
    began, is_rank_0 = time.monotonic(), processes.current().is_first
    saved = checkpoint.load(run_dir) if resume else None
    callbacks = build_callbacks(cfg, output) if is_rank_0 else build_on_other_ranks(cfg)
    sim = prepare(cfg, run_dir, saved, write=is_rank_0)
    sim.command_entries = command_entries
    log_components(sim)
    with closing(sim.engine.executor):
        started: list[Callback] = []
        try:
            with StopSignals() as stop:
                for callback in callbacks:
                    started.append(callback)
                    callback.on_start(sim, (saved or {}).get(callback.name))  # with its state in the checkpoint
                run_rounds(sim, callbacks, stop, began)
        except BaseException as error:
            with suppress(OSError):  # if the disk is full, the error above is the one to report
                end(sim, started, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        return end(sim, callbacks, "paused" if sim.is_paused else "finished")


def end(sim: Simulation, callbacks: Sequence[Callback], status: Status) -> dict[str, Any]:
    """Call ``on_end`` of every callback, even if one raises, and return the content of summary.json.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        callbacks: The callbacks that were started, in calling order.
        status: finished, paused, failed or interrupted.
    """
    result = summary(sim, status)
    with ExitStack() as stack:
        for callback in reversed(callbacks):  # an ExitStack calls in reverse order
            stack.callback(callback.on_end, sim, status, result)
    return result


# -- prepare ---------------------------------------------------------------------------------------------
def prepare(cfg: DictConfig, run_dir: Path, saved: dict[str, Any] | None, write: bool = False) -> Simulation:
    """Build the data, model, method and engine of a run.  Restore a resumed run, and save the partition of a new one.

    Args:
        cfg: The checked configuration.
        run_dir: The run folder.
        saved: The checkpoint from which to resume; None for a new run.
        write: Whether this process logs the run and writes its files.

    Returns:
        The run before its next round.
    """
    if saved is not None:
        check_saved(cfg, run_dir, saved)
    ranks = processes.current()
    algorithm = build.algorithm(cfg)
    build.check_settings(cfg, algorithm)
    arrays = ranks.first_on_each_machine(lambda: build.data(cfg))
    ranks.require_equal("data set", arrays.digest)
    split = build.partition(cfg, arrays)
    ranks.require_equal("partition", split.hash)
    if cfg.stop.patience is not None:
        require_validation(cfg.stop.patience, split)
    if write:
        log_run(cfg, split, 0 if saved is None else saved["round"])
    engine = build.engine(cfg, arrays, split, json.loads(saved["executor"]) if saved else None, algorithm)
    algorithm.setup(engine.federation, engine.model, engine.rows)
    build.check_states(engine)
    build.check_new_clients(engine, algorithm)
    patience = cfg.stop.patience
    early_stopping = None if patience is None else EarlyStopping(patience)
    sim = Simulation(cfg, run_dir, engine, algorithm, split, data_hash=arrays.digest, early_stopping=early_stopping)
    if saved is not None:
        sim.load(saved)
        if write:
            rewrite_damaged_partition(split, arrays, run_dir)
    elif ranks.is_first:
        save_partition(split, arrays, run_dir)
    return sim


# -- rounds ----------------------------------------------------------------------------------------------
def run_rounds(sim: Simulation, callbacks: Sequence[Callback], stop: StopSignals, began: float) -> None:
    """Run the remaining rounds up to a pause, and adapt new clients after the last one.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        callbacks: The callbacks, called after each round in this order.
        stop: Records stop signals.
        began: The time at which this process began the run (time.monotonic), in seconds.

    Raises:
        KeyboardInterrupt: A stop signal arrived.
    """
    cfg, earlier = sim.cfg, sim.cost["total_s"]  # earlier: seconds of the processes before a resume
    while sim.done < cfg.rounds and not sim.is_stopped_early and not sim.is_paused:
        costs = run_round(sim, callbacks)
        sim.cost["total_s"] = earlier + time.monotonic() - began
        stop_requested = stop.requested()
        sim.is_last_round = stop_requested or sim.done == cfg.rounds or sim.is_stopped_early or sim.is_paused
        for callback in callbacks:
            callback.on_round_end(sim, costs)
        if stop_requested and sim.done < cfg.rounds and not sim.is_stopped_early:
            raise KeyboardInterrupt
    if sim.is_paused:
        return
    # what the method itself measures of each client, if anything, in measured.npz
    write_measured(sim.run_dir, sim.algorithm, sim.engine, _evaluated(sim))
    if cfg.new_clients.count:
        adapt_new_clients(sim, stop.raise_if_requested)
        sim.cost["total_s"] = earlier + time.monotonic() - began


def run_round(sim: Simulation, callbacks: Sequence[Callback]) -> dict[str, float]:
    """Train one round, and evaluate it every eval.every rounds and after the last round.

    Args:
        sim: The run, whose number of finished rounds increases.
        callbacks: The callbacks, which get the scores of an evaluated round.

    Returns:
        The values of the round's line in costs.csv, by column.
    """
    engine, cfg = sim.engine, sim.cfg
    federation = engine.federation
    began = time.perf_counter()
    if engine.central is not None and engine.central.sampling == "poisson":
        sampled = engine.central.draw_poisson(engine.seed, sim.done)
    else:
        sampled = draw_cohort(engine.seed, sim.done, federation.num_clients, federation.cohort_size)
    ids = participants(engine.seed, sim.done, sampled, cfg.system.dropout)
    cohort = Cohort(engine, ids, sim.done, dropped=len(sampled) - len(ids))
    if len(ids) or engine.central is not None:  # without clients, central privacy changes the server by noise
        sim.algorithm.round(cohort)
        check_options_had_effect(sim, cohort.cost)
        report_left_out(sim, cohort.cost)
    if engine.compression is not None and cohort.cost.losses is not None:
        # a compressor that adapts to the training losses of clients; the bytes are those of uploading these losses
        cohort.cost.bytes_up += engine.compression.observe(cohort.cost.losses)
    synchronize(engine.device)
    seconds = {"round_s": time.perf_counter() - began}
    sim.done += 1
    if sim.done % cfg.eval.every == 0 or sim.done == cfg.rounds:
        began = time.perf_counter()
        check_ranks_agree(sim)
        values, clients = evaluate_round(sim, cohort.cost)
        # with privacy=central also the epsilon that was spent, and adaptive clipping norms
        values |= {} if engine.central is None else engine.central.metrics(sim.done)
        seconds["eval_s"] = time.perf_counter() - began
        sim.record_metrics(values)
        sim.keep_best_state()
        if sim.return_to_best():
            log_return(sim)
            values, clients = evaluate_round(sim, cohort.cost)
            values |= {} if engine.central is None else engine.central.metrics(sim.done)
            sim.last = values
        report_counts(sim, values, len(clients["client"]))
        for callback in callbacks:
            callback.on_evaluation(sim, values, clients)
    return sim.add_cost(cohort.cost, seconds, len(ids))


def check_options_had_effect(sim: Simulation, cost: RoundCost) -> None:
    """Check after the first round that client_weights, aggregator, attack, server and compression had an effect.

    A round without local steps may send nothing.  Then the last four are checked after the next round.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        cost: The cost of the round.

    Raises:
        ConfigError: An option had no effect.
    """
    engine, choices = sim.engine, sim.cfg.choices
    attackers = engine.attackers
    sim.takes_means |= cost.takes_means
    check_later = not cost.steps and sim.done + 1 < sim.cfg.rounds
    method = build.unwrapped(sim.algorithm)
    if engine.central is not None and (name := find_sealed(vars(method))):
        refuse(name, "keeps it as state, from which other clients may receive it")
    require(
        engine.central is None or cost.releases > 0,
        f"privacy=central has no effect: algorithm={choices.algorithm} does not average uploads; use privacy=local, or "
        "another algorithm such as fedavg",
    )
    require(
        engine.client_weights == "samples" or sim.takes_means or engine.central is not None,
        f"client_weights={engine.client_weights} has no effect: algorithm={choices.algorithm} does not "
        "average clients by number of samples; use client_weights=samples",
    )
    require(
        engine.aggregator is None or cost.takes_aggregates or check_later,
        f"aggregator={choices.aggregator} has no effect: algorithm={choices.algorithm} does not average uploads; "
        "use aggregator=mean, or another algorithm such as fedavg",
    )
    require(
        attackers is None or not attackers.attack.changes_uploads or cost.takes_uploads or check_later,
        f"attack={choices.attack} has no effect: algorithm={choices.algorithm} uploads nothing; use attack=none, an "
        "attack on data such as attack=label_flip, or another algorithm such as fedavg",
    )
    require(
        engine.server is None or cost.takes_server_steps or check_later,
        f"server={choices.server} has no effect: algorithm={choices.algorithm} does not replace its server model by "
        "the mean of uploads, or has a rule of its own; use server=average, or another algorithm such as fedavg",
    )
    require(
        engine.compression is None or engine.compression.acted or check_later,
        f"compression={choices.compression} has no effect: algorithm={choices.algorithm} sends no float32 tensor with "
        f"{TINY} or more numbers per client; use compression=none",
    )


def report_left_out(sim: Simulation, cost: RoundCost) -> None:
    """Warn on rank 0, once in a run, that the aggregation rule left out uploads with NaN or infinite values.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        cost: The cost of the round, whose `left_out` has the ids of these clients.
    """
    if cost.left_out and not sim.cost.get("left_out") and sim.engine.executor.ranks.is_first:
        log.warning(
            "round %d: aggregator=%s leaves out the uploads of %s, which have NaN or infinite values; costs.csv counts "
            "such clients of each round in the column left_out",
            sim.done + 1,
            sim.cfg.choices.aggregator,
            listed(f"client {i}" for i in sorted(cost.left_out)),
        )


# -- evaluation ------------------------------------------------------------------------------------------
def evaluate_round(sim: Simulation, cost: RoundCost) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Evaluate the round that just finished.

    Names of metrics begin with their scope:
      - personal: the model that each client deploys, on its test samples;
      - global: the server's model on each client's test samples, if the method has a global model;
      - val: the model that each client deploys, on its validation samples, if there are any.

    Attackers are not evaluated.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        cost: The cost of the round.

    Returns:
        The metrics over clients, by name; and the columns of clients.csv by name, [n] each, for n evaluated clients.
    """
    engine, ids, round = sim.engine, _evaluated(sim), sim.done - 1
    final = sim.done == sim.cfg.rounds or sim.is_stopped_early
    sizes = {part: samples.sizes_of(ids) for part, samples in engine.federation.splits.items()}
    values: dict[str, float] = {"train/loss": cost.loss}
    names = {} if sim.split.names is None else {"name": np.array(sim.split.names)[ids]}
    columns: dict[str, np.ndarray] = {"client": ids, **names, "n_train": sizes["train"], "n_test": sizes["test"]}
    scopes, all_deploy_global = evaluate.personal_and_global(sim.algorithm, engine, ids, round, final)
    # None before the first evaluation; True if it was so in all evaluations
    sim.personal_is_global = all_deploy_global and sim.personal_is_global is not False
    if sizes["val"].any():
        scopes["val"] = evaluate.personal(sim.algorithm, engine, ids, round, final, "val")
    for scope, per_client in scopes.items():
        for metric, of_clients in per_client.items():
            split = "val" if scope == "val" else "test"
            if metric == scores.ATTACK_SUCCESS:  # on test samples with the trigger of a backdoor
                split = evaluate.TRIGGERED
            summaries = scores.summarize_clients({metric: of_clients}, sizes[split])
            values |= {f"{scope}/{name}": value for name, value in summaries.items()}
        columns |= {f"{scope}/{name}": per_client[name] for name in per_client}
    return values, columns


def log_return(sim: Simulation) -> None:
    """Log that the run ended and its best model was restored, on rank 0.

    The line has the reason of the end, and the round with the best validation score, whose model is restored.
    """
    if not sim.engine.executor.ranks.is_first:
        return
    best, metric = sim.best_val["round"], f"val/{sim.engine.task.primary}"  # type: ignore[index]
    reason = f"no better {metric} in {sim.cfg.stop.patience} evaluations" if sim.is_stopped_early else "last round"
    log.info(
        "round %d: %s, so the run ends with the model of round %d; the last line of the tables has its scores",
        sim.done,
        reason,
        best,
    )


def report_counts(sim: Simulation, values: Mapping[str, float], clients: int) -> None:
    """Log once for each metric that is undefined for some clients, which its mean then omits.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        values: The metrics over clients, by name.  A metric that is undefined for some clients has a second entry,
            named metric + scores.COUNT_SUFFIX: the number of the others.
        clients: The number of evaluated clients.
    """
    new = {name: n for name, n in scores.defined_counts(values).items() if name not in sim.reported_counts}
    sim.reported_counts.update(new)
    if not sim.engine.executor.ranks.is_first:
        return
    for n in sorted(set(new.values())):
        names = ", ".join(name for name, count in new.items() if count == n)
        log.info("%s: mean over %d of %d clients; the score is undefined for the others", names, n, clients)


def check_ranks_agree(sim: Simulation) -> None:
    """Warn once if the server's state differs between processes.

    Every process computes it with the same operations, but GPUs of different kinds may round differently.
    """
    ranks = sim.engine.executor.ranks
    state = sim.algorithm.state_dict() if ranks.is_distributed else {}
    # the sum of each tensor, from all processes; "comparison" names this step in error messages
    sums = ranks.gather("comparison", [float(t.double().sum()) for t in state.values()])
    differ = any(repr(other) != repr(sums[0]) for other in sums)  # as text, so that NaN equals NaN
    if ranks.is_first and differ and not sim.ranks_differ:
        sim.ranks_differ = True
        log.warning(
            "after round %d the server's state differs between processes, because their machines round differently; "
            "results may differ from those of one process by more than rounding errors",
            sim.done,
        )


def adapt_new_clients(sim: Simulation, pause: Callable[[], None]) -> None:
    """Let the new clients, which took no part in training, adapt the global model after the last round.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        pause: Called between epochs.  It may raise to stop.
    """
    engine, options = sim.engine, sim.cfg.new_clients
    rows = new_clients.starting_rows(sim.algorithm, engine)
    ids, curves = new_clients.adapt(engine, rows, options.epochs, options.lr, options.momentum, pause)
    splits = engine.with_new_clients.splits
    sizes = {f"n_{part}": splits[part].sizes_of(ids) for part in ("train", "test")}
    if engine.executor.ranks.is_first:
        names = {} if sim.split.names is None else {"name": np.array(sim.split.names)[ids]}
        new_clients.write(sim.run_dir / new_clients.FILE, ids, curves, {**names, **sizes})
    sim.new_clients = new_clients.summary(curves, sizes["n_test"], engine.task.primary)


def _evaluated(sim: Simulation) -> np.ndarray:
    """Return the ids of the training clients to evaluate, ascending: all honest ones by default.

    The option eval.clients sets a number: then this many are drawn at random, the same in all rounds.
    """
    return evaluated_clients(sim.cfg, sim.engine.federation.num_clients)
