"""The round loop: sample, algorithm.round, evaluate, track, checkpoint."""

from __future__ import annotations

import functools
import json
import logging
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

import fedbench
from fedbench.algorithms.base import Algorithm
from fedbench.core import rng, signals
from fedbench.core.digests import Mark, digest, mark_of
from fedbench.core.options import ConfigError, PeerLost, require
from fedbench.core.settings import config_hash, flatten, plain
from fedbench.engine import joint
from fedbench.engine import ranks as processes
from fedbench.engine.cohort import Cohort, Engine, Ledger
from fedbench.engine.executor import cores
from fedbench.partition.base import Split
from fedbench.simulation import build, checkpoint, evaluate, new_clients
from fedbench.simulation.continuing import check_saved
from fedbench.simulation.progress import Progress, ending
from fedbench.simulation.recorder import MatrixLog, write_measured
from fedbench.simulation.tracking import Tracker
from fedbench.simulation.tracking import plain as writable
from fedbench.tasks import scores

log = logging.getLogger(__name__)
# what a run leaves beside its tables, for reports: whoever believes a summary that says finished looks at them again
OUTPUTS = ("partition.npz", "partition.json", "matrices.npz", "measured.npz", new_clients.FILE)
SCORE, VAL = "personal/accuracy", "val/accuracy"


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Simulation:
    """One run: its parts, and how far it has come (done: rounds finished)."""

    cfg: DictConfig
    run_dir: Path
    engine: Engine
    algorithm: Algorithm
    split: Split
    done: int = 0
    best: dict[str, Any] | None = None
    best_val: dict[str, Any] | None = None
    last: dict[str, float] = field(default_factory=dict)
    newcomers: dict[str, Any] | None = None
    matrices: MatrixLog | None = None
    data_hash: str = ""
    rotate: bool = True                               # whether checkpoint.pt is sound: the next one keeps it
    uneven: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=now)
    cost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(
        ("train_s", "eval_s", "total_s", "steps", "samples", "bytes_down", "bytes_up"), 0))

    @functools.cached_property
    def config_hash(self) -> str:
        return config_hash(self.cfg)                  # 8 ms: more than the rest of a small checkpoint

    @functools.cached_property
    def config_text(self) -> str:
        return json.dumps(flatten(plain(self.cfg)))

    def state(self) -> dict[str, Any]:
        """Everything the rounds to come depend on, as plain tensors, numbers and text."""
        return {"round": self.done, "config_hash": self.config_hash, "partition_hash": self.split.hash,
                "config": self.config_text, "data_hash": self.data_hash,
                "matrices": json.dumps(self.matrices.digests if self.matrices else {}),
                "algorithm": self.algorithm.state_dict(), "rows": self.engine.rows.state_dict(),
                "record": json.dumps({"best": self.best, "best_val": self.best_val, "last": self.last,
                                      "cost": self.cost}), "executor": json.dumps(self.engine.executor.state())}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; ConfigError where it, or the data, do not fit the run."""
        then, now = state.get("data_hash", self.data_hash), self.data_hash
        require(then == now, f"resume={self.run_dir}: the data are no longer those of the run (digest {now[:12]}, the "
                f"run's {then[:12]}): put its files back, or start a new run")
        require(state["partition_hash"] == self.split.hash,
                f"resume={self.run_dir}: the data now gives another partition ({self.split.hash[:12]}) than the "
                f"run's ({state['partition_hash'][:12]}); the data set's files have changed")
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ConfigError(f"resume={self.run_dir}: the checkpoint does not fit the run ({said})") from error

    def _load(self, state: dict[str, Any]) -> None:
        for name in state["rows"]:                    # stores of optimizer buffers are made when first used
            if name.startswith("optimizer/") and name not in self.engine.rows.all:
                _, owner, buffer = name.split("/")
                self.engine.memory(owner, buffer, state["rows"][name]["rows"].shape[1])
        self.engine.rows.load_state_dict(state["rows"])
        device = self.engine.device                   # checkpoints are read to host memory
        check_like(self.algorithm.state_dict(), state["algorithm"])
        self.algorithm.load_state_dict({n: t.to(device, copy=True) for n, t in state["algorithm"].items()})
        record = json.loads(state["record"])
        self.done, self.best, self.best_val = state["round"], record["best"], record["best_val"]
        self.last, self.cost = record["last"], record["cost"]
        self.rotate = state.get("file", checkpoint.NAME) == checkpoint.NAME

    def note(self, values: dict[str, float]) -> None:
        """Remember the last evaluation, the best one, and the best one by validation."""
        self.last = values
        nan = float("nan")
        score, best = (v.get(SCORE, nan) for v in (values, self.best["values"] if self.best else {}))
        if scores.is_better(SCORE, score, best) or best != best:
            self.best = {"metric": SCORE, "round": self.done, "values": values}
        val, best = (v.get(VAL, nan) for v in (values, self.best_val["values"] if self.best_val else {}))
        if scores.is_better(VAL, val, best):
            self.best_val = {"metric": VAL, "round": self.done, "values": values}

    def spend(self, ledger: Ledger, seconds: dict[str, float]) -> dict[str, float]:
        """Add a round to the totals; returns its row of costs.csv."""
        row = {"cohort": self.engine.federation.cohort_size, "steps": ledger.steps, "samples": ledger.samples,
               "train_s": seconds["round_s"], "eval_s": seconds.get("eval_s", 0.0),
               "images_per_s": ledger.samples / max(seconds["round_s"], 1e-9), "bytes_down": ledger.bytes_down,
               "bytes_up": ledger.bytes_up, "peak_memory_mb": peak_memory(self.engine.device)}
        for name in ("train_s", "eval_s", "steps", "samples", "bytes_down", "bytes_up"):
            self.cost[name] += row[name]
        return row


def check_like(fresh: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """ValueError unless a method's stored tensors are those that it begins with, and of their kinds; more may have
    come in its rounds."""
    for name, tensor in fresh.items():
        other = stored[name]
        grown = other.dim() > 1 and other.shape[1:] == tensor.shape[1:]               # APPLE's cores as they were sent
        if other.dtype != tensor.dtype or not (grown or other.shape == tensor.shape):
            raise ValueError(f"{name} is {other.dtype} {tuple(other.shape)}, not {tensor.dtype} {tuple(tensor.shape)}")


def run(
    cfg: DictConfig, run_dir: Path, resume: bool = False, origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run (or go on with) the experiment of a checked config in run_dir; returns the summary.

    origin: what the summary says of who asked for it: the `command` as it was typed, and by group the `classes` in
    place of the options' own.

    Raises ConfigError for what the user can mend, and KeyboardInterrupt, with the state saved, after Ctrl-C or
    SIGTERM, SIGHUP, SIGQUIT (the round under way is finished first; a second signal stops at once).  Where processes
    share the run all call this, and the first alone writes and prints.
    """
    try:
        return _run(cfg, run_dir, resume, origin or {}, processes.current().first)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        processes.current().report(error)
        raise


def _run(cfg: DictConfig, run_dir: Path, resume: bool, origin: Mapping[str, Any], first: bool) -> dict[str, Any]:
    began = time.monotonic()
    saved = checkpoint.load(run_dir) if resume else None
    sim = prepare(cfg, run_dir, saved, write=first)
    sim.origin = origin
    announce(sim)
    earlier, clock = sim.cost["total_s"], checkpoint.Clock(cfg.checkpoint.every)
    label = run_dir.name if joint.current() else ""
    marks = saved.get("tables") if saved else None
    with (Tracker(run_dir, cfg, sim.done if saved else None, marks=marks) if first else Silent() as tracker,
          Progress(cfg.rounds, sim.done, label) if first else Silent() as progress, Signals() as heard):
        tracker.summary(summary(sim, "running"))
        try:
            while sim.done < cfg.rounds:
                play(sim, tracker, progress)
                sim.cost["total_s"] = earlier + time.monotonic() - began
                stop = heard.asked()
                if first and clock.due(sim.done, sim.done == cfg.rounds or stop):
                    clock.time(lambda: keep(sim, tracker.marks() or {}))
                if stop and sim.done < cfg.rounds:
                    raise KeyboardInterrupt
            write_measured(run_dir, sim.algorithm, sim.engine, evaluated_clients(sim))
            if cfg.new_clients.count:
                welcome(sim, heard.heed)
                sim.cost["total_s"] = earlier + time.monotonic() - began
        except (Exception, SystemExit):                # a method that calls sys.exit() has not finished
            with suppress(OSError):                   # of a full disk: what failed first is what is told
                tracker.summary(summary(sim, "failed"))
            raise
        result = summary(sim, "finished")
        if first:
            tracker.summary(sealed({**result, "files": {**(tracker.marks() or {}), **outputs(run_dir)}}))
    sim.engine.executor.close()
    if first:
        ending(result, run_dir)
    return result


def keep(sim: Simulation, tables: dict[str, Mark]) -> None:
    """Save all that a resumed run goes on from.  tables: the marks of those on the disk."""
    if sim.matrices is not None:
        sim.matrices.save()
    checkpoint.save(sim.run_dir, {**sim.state(), "tables": tables}, sim.rotate)
    sim.rotate = True


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """A summary with the digest of all that it says, as it will be read."""
    values = writable(values)
    return {**values, "digest": digest(values)}


def outputs(run_dir: Path) -> dict[str, Mark]:
    """The marks of what else a finished run leaves."""
    return {name: mark_of(run_dir / name) for name in OUTPUTS if (run_dir / name).is_file()}


def play(sim: Simulation, tracker: Tracker | Silent, progress: Progress | Silent) -> None:
    """One round: train, and, when it is due, evaluate."""
    engine, cfg = sim.engine, sim.cfg
    federation = engine.federation
    began = time.perf_counter()
    ids = build.draw_cohort(engine.seed, sim.done, federation.num_clients, federation.cohort_size)
    cohort = Cohort(engine, ids, sim.done)
    sim.algorithm.round(cohort)
    synchronize(engine.device)
    seconds = {"round_s": time.perf_counter() - began}
    sim.done += 1
    if sim.done % cfg.eval.every == 0 or sim.done == cfg.rounds:
        began = time.perf_counter()
        compare(sim)
        values, clients = measure(sim, cohort.ledger)
        seconds["eval_s"] = time.perf_counter() - began
        tracker.metrics(sim.done, values)
        tracker.clients(sim.done, clients)
        sim.note(values)
        if sim.matrices is not None:
            sim.matrices.note(sim.done)
    tracker.costs(sim.done, row := sim.spend(cohort.ledger, seconds))
    progress.update(sim.done, sim.last.get(SCORE, float("nan")), row["images_per_s"])


def compare(sim: Simulation) -> None:
    """Say, once, if the server's state is not the same in all processes, where it is computed by equal operations."""
    ranks = sim.engine.executor.ranks
    state = sim.algorithm.state_dict() if ranks.together else {}
    sums = ranks.gather("comparison", [float(t.double().sum()) for t in state.values()])
    if ranks.first and not sim.uneven and any(repr(other) != repr(sums[0]) for other in sums):      # NaN equals NaN
        sim.uneven = True
        log.warning("after round %d the server's state differs between processes: their machines round differently, "
                    "and results may be further from those of one process than rounding is", sim.done)


def measure(sim: Simulation, ledger: Ledger) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """All metrics after the round just finished: over clients, and per client."""
    engine, ids, round = sim.engine, evaluated_clients(sim), sim.done - 1
    final = sim.done == sim.cfg.rounds
    sizes = {part: engine.federation.splits[part].sizes_of(ids) for part in ("train", "val", "test")}
    values: dict[str, float] = {"train/loss": ledger.loss}
    columns: dict[str, np.ndarray] = {"client": ids, "n_train": sizes["train"], "n_test": sizes["test"]}
    scopes = {"personal": evaluate.personal(sim.algorithm, engine, ids, round, final)}
    if (row := sim.algorithm.global_row()) is not None:
        scopes["global"] = scopes["personal"] if sim.algorithm.personal_is_global else \
            evaluate.shared(row, engine, ids, round)
    if sizes["val"].any():
        scopes["val"] = evaluate.personal(sim.algorithm, engine, ids, round, final, "val")
    for scope, found in scopes.items():
        part = "val" if scope == "val" else "test"
        values |= {f"{scope}/{n}": float(v) for n, v in scores.over_clients(found, sizes[part]).items()}
        columns |= {f"{scope}/{n}": v for n, v in found.items()}
    return values, columns


def welcome(sim: Simulation, pause: Callable[[], None]) -> None:
    """After the rounds: the new clients adapt the global model."""
    engine, wanted = sim.engine, sim.cfg.new_clients
    row = new_clients.starting_row(sim.algorithm, engine)
    ids, found = new_clients.adapt(engine, row, wanted.epochs, wanted.lr, wanted.momentum, pause)
    splits = engine.everyone.splits
    sizes = {f"n_{part}": splits[part].sizes_of(ids) for part in ("train", "test")}
    if engine.executor.ranks.first:
        new_clients.write(sim.run_dir / new_clients.FILE, ids, found, sizes)
    sim.newcomers = new_clients.summary(found, sizes["n_test"])


def evaluated_clients(sim: Simulation) -> np.ndarray:
    """All clients, or eval.clients of them, the same ones throughout the run."""
    n, wanted = sim.engine.federation.num_clients, sim.cfg.eval.clients
    if wanted is None or wanted >= n:
        return np.arange(n)
    return np.sort(rng.generator(int(sim.cfg.seed), "evaluated").choice(n, wanted, replace=False, shuffle=False))


def prepare(cfg: DictConfig, run_dir: Path, saved: dict[str, Any] | None, write: bool = False) -> Simulation:
    """Build every part; the partition is saved with the run.  write: where this process writes the run's files."""
    if saved is not None:
        check_saved(cfg, run_dir, saved)
    ranks = processes.current()
    algorithm = build.algorithm(cfg)
    build.check_settings(cfg, algorithm)
    arrays = ranks.in_turn(lambda: build.data(cfg))
    ranks.agree("data set", arrays.digest)
    split = build.partition(cfg, arrays)
    ranks.agree("partition", split.hash)
    engine = build.engine(cfg, arrays, split, json.loads(saved["executor"]) if saved else None, algorithm)
    algorithm.setup(engine.federation, engine.model, engine.rows)
    matrices = MatrixLog(run_dir, algorithm, engine.federation.num_clients, cfg.rounds, cfg.eval.every)
    sim = Simulation(cfg, run_dir, engine, algorithm, split, matrices=matrices if ranks.first else None,
                     data_hash=arrays.digest)
    if saved is not None:
        sim.load(saved)
        matrices.load(sim.done, json.loads(saved["matrices"]) if "matrices" in saved else None)
        if write:
            build.mend_partition(split, arrays, run_dir)
    elif ranks.first:
        build.save_partition(split, arrays, run_dir)
        matrices.note(0)
    return sim


def announce(sim: Simulation) -> None:
    """What is about to run and what it may take in memory, before round 1."""
    e, f = sim.engine, sim.engine.federation
    log.info("%d clients, %d a round, %s training samples (%d to %d a client), partition %s", f.num_clients,
             f.cohort_size, f"{f.num_samples.sum():,}", f.num_samples.min(), f.num_samples.max(), sim.split.hash[:12])
    if e.everyone.num_clients > f.num_clients:
        log.info("%d more clients take no part and adapt the global model at the end",
                 e.everyone.num_clients - f.num_clients)
    log.info("model: %s numbers a row (%s trained); executor %s", f"{e.model.size:,}", f"{e.model.trained.size:,}",
             e.executor.plan)
    if e.privacy is not None:
        log.info("privacy: %s", e.privacy.guarantee())
    ranks = e.executor.ranks
    if ranks.size > 1:
        log.info("%d processes share the clients of every round; each holds all data and all state", ranks.size)
    for line in e.rows.plan():
        log.info("state %s", line)
    for buffer in e.optimizer.buffers if e.optimizer.reset == "never" else ():
        size = e.rows.size(buffer, e.optimizer.new(buffer, torch.empty(1, e.model.size))[0])
        log.info("state %s, for each kind of row that clients train (optimizer.reset=never)", size)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """MB: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**10
    # a process started from another one begins at that one's peak here
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def summary(sim: Simulation, status: str) -> dict[str, Any]:
    """summary.json: what ran, what came out, and what it took."""
    cfg, cost = sim.cfg, dict(sim.cost)
    cost["images_per_s"] = cost["samples"] / max(cost["train_s"], 1e-9)
    cost["peak_memory_mb"] = peak_memory(sim.engine.device)
    choices = cfg.choices
    name = cfg.name or str(choices.algorithm) + ("+ft" if cfg.finetune.epochs else "")
    return {"status": status, "name": name, "rounds_done": sim.done,
            **{group: choices[group] for group in ("algorithm", "dataset", "partition", "model", "experiment")},
            **({"classes": sim.origin["classes"]} if sim.origin.get("classes") else {}),
            "seed": cfg.seed, "rounds": cfg.rounds, "num_clients": sim.engine.federation.num_clients,
            "cohort": sim.engine.federation.cohort_size, "personal_is_global": sim.algorithm.personal_is_global,
            "config_hash": sim.config_hash, "partition_hash": sim.split.hash,
            "data_hash": sim.data_hash, "last": sim.last, "best": sim.best,
            "best_val": sim.best_val, **({"new_clients": sim.newcomers} if sim.newcomers else {}),
            **({"privacy": sim.engine.privacy.summary()} if sim.engine.privacy else {}), "cost": cost,
            "executor": {**sim.engine.executor.state(), "ranks": sim.engine.executor.ranks.size}, **surroundings(),
            "command": sim.origin.get("command"), "started": sim.started,
            "finished": now() if status == "finished" else None}


@functools.cache
def surroundings() -> dict[str, Any]:
    """Commit, versions and machine of this process."""
    root = Path(__file__).resolve().parents[1]
    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    own = (root / ".git").exists() and shutil.which("git") is not None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"commit": git("rev-parse", "HEAD") if own else None,
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")) if own else None,
            "versions": {"fedbench": fedbench.__version__, "torch": torch.__version__, "numpy": np.__version__,
                         "python": platform.python_version()},
            "machine": {"processor": processor(), "cores": cores(), "gpu": gpu, "system": platform.platform()}}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


class Silent:
    """What processes that neither write nor print have in place of a tracker and of a progress bar."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: None


class Signals:
    """Ctrl-C and its like (signals.py) ask for a stop after the round under way; a second one interrupts at once.  A
    meeting of runs hears them for all."""

    def __enter__(self) -> Signals:
        self.stop, self.answering = False, ExitStack()
        if threading.current_thread() is threading.main_thread() and not joint.current():
            self.answering.enter_context(signals.answered(self._ask))
        return self

    def asked(self) -> bool:
        """Whether a stop was asked for, of this process or of another one of the run."""
        meeting = joint.current()
        stop = self.stop or (meeting is not None and meeting.stop)
        return bool(processes.current().meet("end of a round", int(stop)))

    def heed(self) -> None:
        """Raise KeyboardInterrupt if a stop was asked for."""
        if self.asked():
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: Any) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        if processes.current().first:
            log.warning("stopping after this round, which is saved; once more to stop at once")

    def __exit__(self, *error: object) -> None:
        self.answering.close()
