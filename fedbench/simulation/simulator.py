"""The round loop: draw a cohort, algorithm.round, evaluate, track, save a checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fedbench.core import torch_settings
from fedbench.core.digests import Mark
from fedbench.core.options import PeerLost, require
from fedbench.engine import joint
from fedbench.engine import ranks as processes
from fedbench.engine.cohort import Cohort, Ledger
from fedbench.engine.compression import TINY
from fedbench.simulation import build, checkpoint, evaluate, new_clients
from fedbench.simulation.continuing import check_saved
from fedbench.simulation.environment import synchronize
from fedbench.simulation.partition_files import rewrite_damaged_partition, save_partition
from fedbench.simulation.progress import NullProgress, Progress
from fedbench.simulation.recorder import MatrixLog, write_measured
from fedbench.simulation.reporting import announce, output_marks, seal, summary
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.sampling import draw_cohort, evaluated_clients, survivors
from fedbench.simulation.stopping import StopSignals
from fedbench.simulation.tracking import NullTracker, Tracker
from fedbench.tasks import scores

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig,
    run_dir: Path,
    resume: bool = False,
    origin: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run or resume the experiment of a checked config in run_dir, and return the summary.

    If processes share the run, all call this, and only the first writes and prints.

    Args:
        cfg: The checked config.
        run_dir: The run folder.
        resume: Whether to resume from the checkpoint.
        origin: Entries of the summary about the request: the `command` as typed, and `classes` by group that replace
            the options' own.
        progress: Whether to show progress.

    Raises:
        ConfigError: A mistake that the user can repair.
        KeyboardInterrupt: A stop signal arrived, and the state is saved (core/signals.py).  The current round is
            finished first; a second signal stops at once.
    """
    settings = nullcontext() if joint.current() else torch_settings.kept()  # runs that take turns keep them together
    try:
        with settings:
            return _run(cfg, run_dir, resume, origin or {}, processes.current().first, progress)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        processes.current().report(error)
        raise


def _run(
    cfg: DictConfig, run_dir: Path, resume: bool, origin: Mapping[str, Any], writes: bool, shows: bool
) -> dict[str, Any]:
    """writes: whether this process is the one that writes files; shows: whether it shows progress."""
    began = time.monotonic()
    saved = checkpoint.load(run_dir) if resume else None
    sim = prepare(cfg, run_dir, saved, write=writes)
    sim.origin = origin
    announce(sim)
    with (
        closing(sim.engine.executor),
        _tracker(sim, saved) if writes else NullTracker() as tracker,
        _progress(sim) if writes and shows else NullProgress() as progress,
        StopSignals() as stop,
    ):
        tracker.summary(summary(sim, "running"))
        try:
            run_rounds(sim, tracker, progress, stop, began)
        except (Exception, SystemExit):  # a method that calls sys.exit() has not finished
            with suppress(OSError):  # of a full disk: what failed first is what is told
                tracker.summary(summary(sim, "failed"))
            raise
        result = summary(sim, "finished")
        if writes:
            tracker.summary(seal({**result, "files": {**tracker.marks(), **output_marks(run_dir)}}))
    return result


def _tracker(sim: Simulation, saved: dict[str, Any] | None) -> Tracker:
    """saved: the checkpoint that the run goes on from; its tables are cut where they ended then."""
    if saved is None:
        return Tracker(sim.run_dir, sim.cfg)
    return Tracker(sim.run_dir, sim.cfg, sim.done, marks=saved.get("tables"))


def _progress(sim: Simulation) -> Progress:
    label = sim.run_dir.name if joint.current() else ""
    return Progress(sim.cfg.rounds, sim.done, label, sim.engine.task.primary)


def run_rounds(
    sim: Simulation, tracker: Tracker | NullTracker, progress: Progress | NullProgress, stop: StopSignals, began: float
) -> None:
    """All rounds that are left, checkpoints between them, and what follows the last one.

    began: when this process began with the run (time.monotonic).  KeyboardInterrupt where a stop was asked for.
    """
    cfg, earlier = sim.cfg, sim.cost["total_s"]
    schedule = checkpoint.CheckpointSchedule(cfg.checkpoint.every)
    writes = isinstance(tracker, Tracker)
    while sim.done < cfg.rounds:
        run_round(sim, tracker, progress)
        sim.cost["total_s"] = earlier + time.monotonic() - began
        stopping = stop.requested()
        if writes and schedule.is_due(sim.done, final=stopping or sim.done == cfg.rounds):
            schedule.timed(lambda: save_checkpoint(sim, tracker.marks()))
        if stopping and sim.done < cfg.rounds:
            raise KeyboardInterrupt
    write_measured(sim.run_dir, sim.algorithm, sim.engine, _evaluated(sim))
    if cfg.new_clients.count:
        adapt_new_clients(sim, stop.raise_if_requested)
        sim.cost["total_s"] = earlier + time.monotonic() - began


def run_round(sim: Simulation, tracker: Tracker | NullTracker, progress: Progress | NullProgress) -> None:
    """One round: train, and, when it is due, evaluate."""
    engine, cfg = sim.engine, sim.cfg
    federation = engine.federation
    began = time.perf_counter()
    drawn = draw_cohort(engine.seed, sim.done, federation.num_clients, federation.cohort_size)
    ids = survivors(engine.seed, sim.done, drawn, cfg.system.dropout)
    cohort = Cohort(engine, ids, sim.done, lost=len(drawn) - len(ids))
    if len(ids):  # else the server stays as it was
        sim.algorithm.round(cohort)
        check_used(sim, cohort.ledger)
    if engine.compression is not None and cohort.ledger.losses is not None:
        cohort.ledger.bytes_up += engine.compression.observe(cohort.ledger.losses)
    synchronize(engine.device)
    seconds = {"round_s": time.perf_counter() - began}
    sim.done += 1
    if sim.done % cfg.eval.every == 0 or sim.done == cfg.rounds:
        began = time.perf_counter()
        check_ranks_agree(sim)
        values, clients = evaluate_round(sim, cohort.ledger)
        seconds["eval_s"] = time.perf_counter() - began
        tracker.metrics(sim.done, values)
        tracker.clients(sim.done, clients)
        sim.record_metrics(values)
        report_counts(sim, values, len(clients["client"]))
        if sim.matrices is not None:
            sim.matrices.note(sim.done)
    tracker.costs(sim.done, row := sim.add_cost(cohort.ledger, seconds, len(ids)))
    progress.update(sim.done, sim.last.get(sim.primary, float("nan")), row["images_per_s"])


def check_used(sim: Simulation, ledger: Ledger) -> None:
    """Refuse, after the first round, options that had no effect.

    A round without local steps may send nothing.  Compression is then checked after the next round, if there is one.
    """
    engine, choices = sim.engine, sim.cfg.choices
    sim.takes_means |= ledger.takes_means
    waits = not ledger.steps and sim.done + 1 < sim.cfg.rounds
    require(
        engine.weights == "samples" or sim.takes_means,
        f"weights={engine.weights}: algorithm={choices.algorithm} takes no mean of clients weighted by "
        "their samples; leave weights out",
    )
    require(
        engine.compression is None or engine.compression.acted or waits,
        f"compression={choices.compression}: algorithm={choices.algorithm} sends nothing that is compressed, which are "
        f"float32 tensors of {TINY} numbers a client and more; leave compression out",
    )


def evaluate_round(sim: Simulation, ledger: Ledger) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """All metrics after the round just finished: over clients, and per client [n].

    ledger: of the round's cohort.  Names begin with their scope: personal (what clients deploy), global (the server's
    row, where there is one), val (what clients deploy, on validation samples, where there are any).
    """
    engine, ids, round = sim.engine, _evaluated(sim), sim.done - 1
    final = sim.done == sim.cfg.rounds
    sizes = {part: engine.federation.splits[part].sizes_of(ids) for part in ("train", "val", "test")}
    values: dict[str, float] = {"train/loss": ledger.loss}
    names = {} if sim.split.names is None else {"name": np.array(sim.split.names)[ids]}
    columns: dict[str, np.ndarray] = {"client": ids, **names, "n_train": sizes["train"], "n_test": sizes["test"]}
    scopes, same = evaluate.personal_and_global(sim.algorithm, engine, ids, round, final)
    sim.personal_is_global = same and sim.personal_is_global is not False
    if sizes["val"].any():
        scopes["val"] = evaluate.personal(sim.algorithm, engine, ids, round, final, "val")
    for scope, per_client in scopes.items():
        part = "val" if scope == "val" else "test"
        values |= {f"{scope}/{n}": v for n, v in scores.over_clients(per_client, sizes[part]).items()}
        columns |= {f"{scope}/{n}": v for n, v in per_client.items()}
    return values, columns


def report_counts(sim: Simulation, values: Mapping[str, float], clients: int) -> None:
    """Log once for each metric that its mean leaves out clients without a defined value."""
    new = {name: n for name, n in scores.counts(values).items() if name not in sim.counted}
    sim.counted.update(new)
    for n in sorted(set(new.values())) if sim.engine.executor.ranks.first else ():
        names = ", ".join(name for name, count in new.items() if count == n)
        log.info("%s: over %d of %d clients, as the others have no such score", names, n, clients)


def check_ranks_agree(sim: Simulation) -> None:
    """Say, once, if the server's state is not the same in all processes, where it is computed by equal operations."""
    ranks = sim.engine.executor.ranks
    state = sim.algorithm.state_dict() if ranks.is_distributed else {}
    sums = ranks.gather("comparison", [float(t.double().sum()) for t in state.values()])
    differ = any(repr(other) != repr(sums[0]) for other in sums)  # NaN equals NaN
    if ranks.first and differ and not sim.ranks_differ:
        sim.ranks_differ = True
        log.warning(
            "after round %d the server's state differs between processes: their machines round differently, "
            "and results may be further from those of one process than rounding is",
            sim.done,
        )


def save_checkpoint(sim: Simulation, tables: dict[str, Mark]) -> None:
    """Save all that a resumed run goes on from.  tables: the marks of those on the disk."""
    if sim.matrices is not None:
        sim.matrices.save()
    checkpoint.save(sim.run_dir, {**sim.state(), "tables": tables}, sim.is_sound)
    sim.is_sound = True


def adapt_new_clients(sim: Simulation, pause: Callable[[], None]) -> None:
    """After the rounds: clients that took no part adapt the global model.  pause: called between epochs; may raise."""
    engine, options = sim.engine, sim.cfg.new_clients
    rows = new_clients.starting_rows(sim.algorithm, engine)
    ids, curves = new_clients.adapt(engine, rows, options.epochs, options.lr, options.momentum, pause)
    splits = engine.with_new_clients.splits
    sizes = {f"n_{part}": splits[part].sizes_of(ids) for part in ("train", "test")}
    if engine.executor.ranks.first:
        names = {} if sim.split.names is None else {"name": np.array(sim.split.names)[ids]}
        new_clients.write(sim.run_dir / new_clients.FILE, ids, curves, {**names, **sizes})
    sim.new_clients = new_clients.summary(curves, sizes["n_test"], engine.task.primary)


def _evaluated(sim: Simulation) -> np.ndarray:
    return evaluated_clients(sim.cfg, sim.engine.federation.num_clients)


def prepare(cfg: DictConfig, run_dir: Path, saved: dict[str, Any] | None, write: bool = False) -> Simulation:
    """Build every part of a run, a new one or that of a checkpoint; the partition is saved with a new run.

    write: whether this process writes the run's files.
    """
    if saved is not None:
        check_saved(cfg, run_dir, saved)
    ranks = processes.current()
    algorithm = build.algorithm(cfg)
    build.check_settings(cfg, algorithm)
    arrays = ranks.first_on_each_machine(lambda: build.data(cfg))
    ranks.agree("data set", arrays.digest)
    split = build.partition(cfg, arrays)
    ranks.agree("partition", split.hash)
    engine = build.engine(cfg, arrays, split, json.loads(saved["executor"]) if saved else None, algorithm)
    algorithm.setup(engine.federation, engine.model, engine.rows)
    matrices = MatrixLog(run_dir, algorithm, engine.federation.num_clients, cfg.rounds, cfg.eval.every)
    sim = Simulation(
        cfg, run_dir, engine, algorithm, split, matrices=matrices if ranks.first else None, data_hash=arrays.digest
    )
    if saved is not None:
        sim.load(saved)
        matrices.load(sim.done, json.loads(saved["matrices"]) if "matrices" in saved else None)
        if write:
            rewrite_damaged_partition(split, arrays, run_dir)
    elif ranks.first:
        save_partition(split, arrays, run_dir)
        matrices.note(0)
    return sim
