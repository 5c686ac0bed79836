"""What a run says of itself: on the log before round 1, and in summary.json."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench.core.digests import Mark, digest, mark_of
from fedbench.core.files import replace_text
from fedbench.engine.federation import Federation
from fedbench.simulation import new_clients
from fedbench.simulation.environment import describe_environment, now, peak_memory
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.sampling import evaluated_clients
from fedbench.simulation.summary_text import clauses

log = logging.getLogger(__name__)
MOST_CLASSES, MOST_NAMES, LONGEST_NAME = 10, 10, 24  # limits of names printed at the start of a run
# what a run leaves beside its tables, for reports: whoever believes a summary that says finished looks at them again
OUTPUTS = ("partition.npz", "partition.json", "matrices.npz", "measured.npz", new_clients.FILE)


def log_start(sim: Simulation) -> None:
    """Say what is about to run and what it may take in memory."""
    engine, federation = sim.engine, sim.engine.federation
    if sim.done:
        log.info("resuming after round %d of %d", sim.done, sim.cfg.rounds)
    log.info("%s", what_is_learned(federation))
    log.info(
        "%d clients%s, %d a round, %s training samples (%d to %d a client), partition %s",
        federation.num_clients,
        _named(sim.split.names, federation.num_clients),
        federation.cohort_size,
        f"{federation.num_samples.sum():,}",
        federation.num_samples.min(),
        federation.num_samples.max(),
        sim.split.hash[:12],
    )
    if federation.cohort_size == 1 < federation.num_clients:
        log.info("a round has one client, so that it averages nothing: clients_per_round or sample_rate ask for more")
    newcomers = engine.with_new_clients.num_clients - federation.num_clients
    if newcomers > 0:
        log.info("%d more clients take no part and adapt the global model at the end", newcomers)
    model = engine.model
    log.info(
        "model: %s numbers a row (%s trained); executor %s",
        f"{model.size:,}",
        f"{model.trained.size:,}",
        engine.executor.plan,
    )
    if engine.privacy is not None:
        log.info("privacy: %s", "\n  ".join(clauses(engine.privacy.guarantee())))
    ranks = engine.executor.ranks
    if ranks.size > 1:
        log.info("%d processes share the clients of every round; each holds all data and all state", ranks.size)
    for line in engine.rows.plan():
        log.info("state %s", line)
    for buffer in engine.optimizer.buffers if engine.optimizer.reset == "never" else ():
        size = engine.rows.size(buffer, engine.optimizer.new(buffer, torch.empty(1, model.size), len(model.spans))[0])
        log.info("state %s, for each kind of row that clients train (optimizer.reset=never)", size)


def _named(names: Sequence[str] | None, count: int) -> str:
    """Return the names of the first clients, in brackets."""
    if names is None:
        return ""
    shown = [name[:LONGEST_NAME] for name in names[: min(count, MOST_NAMES)]]
    return f" ({', '.join(shown)}{', ...' if count > MOST_NAMES else ''})"


def what_is_learned(federation: Federation) -> str:
    """Return one line with the task and its classes, labels or numbers, with their training samples."""
    task, count = federation.task, federation.num_classes
    text = f"{task.kind or type(task).__name__}: {count:,} {task.predicts if count != 1 else task.predicts[:-1]}"
    index = torch.from_numpy(federation.splits["train"].indices).to(federation.targets.device)
    totals = task.class_totals(federation.targets[index], count)
    if totals is None:
        return text
    names = [name[:LONGEST_NAME] for name in federation.class_names or map(str, range(count))]
    listed = ", ".join(f"{name} {total:,}" for name, total in zip(names[:MOST_CLASSES], totals.tolist()))
    more, empty = ", ..." if count > MOST_CLASSES else "", int((totals == 0).sum())
    none = f"; {empty:,} of them without one" if empty else ""
    return f"{text}, with training samples: {listed}{more}{none}"


def summary(sim: Simulation, status: str) -> dict[str, Any]:
    """summary.json: what ran, what came out, and what it took."""
    cfg, engine, task, cost = sim.cfg, sim.engine, sim.engine.task, dict(sim.cost)
    cost["images_per_s"] = cost["samples"] / max(cost["train_s"], 1e-9)
    cost["peak_memory_mb"] = peak_memory(engine.device)
    choices = cfg.choices
    name = cfg.name or str(choices.algorithm) + ("+ft" if cfg.finetune.epochs else "")
    return {
        "status": status,
        "name": name,
        "rounds_done": sim.done,
        **{group: choices[group] for group in ("algorithm", "dataset", "partition", "model", "experiment")},
        **({"classes": sim.origin["classes"]} if sim.origin.get("classes") else {}),
        "seed": cfg.seed,
        "rounds": cfg.rounds,
        "num_clients": engine.federation.num_clients,
        "evaluated_clients": len(evaluated_clients(cfg, engine.federation.num_clients)),
        "cohort": engine.federation.cohort_size,
        "task": {
            "kind": task.kind,
            "primary": task.primary,
            "scores": {name: d._asdict() for name, d in task.directions().items()},
        },
        "personal_is_global": bool(sim.personal_is_global),
        "tuned_at_end": sim.algorithm.tuned_at_end,
        "config_hash": sim.config_hash,
        "partition_hash": sim.split.hash,
        "data_hash": sim.data_hash,
        "last": sim.last,
        "best": sim.best,
        "best_val": sim.best_val,
        **({"new_clients": sim.new_clients} if sim.new_clients else {}),
        **({"privacy": engine.privacy.summary()} if engine.privacy else {}),
        "cost": cost,
        "executor": {**engine.executor.state(), "ranks": engine.executor.ranks.size},
        **describe_environment(),
        "command": sim.origin.get("command"),
        "started": sim.started,
        "finished": now() if status == "finished" else None,
    }


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """A summary with the digest of all that it says, as it will be read."""
    values = json_values(values)
    return {**values, "digest": digest(values)}


def output_marks(run_dir: Path) -> dict[str, Mark]:
    """The marks of what a finished run leaves beside its tables."""
    return {name: mark_of(run_dir / name) for name in OUTPUTS if (run_dir / name).is_file()}


def write_summary(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Replace summary.json atomically.  Numbers that are not finite become null."""
    text = json.dumps(json_values(dict(values)), indent=1, allow_nan=False) + "\n"
    replace_text(run_dir / "summary.json", [text])


def json_values(value: Any) -> Any:
    """Return the value with NumPy scalars and arrays, paths and non-finite numbers replaced by what JSON can hold."""
    if isinstance(value, dict):
        return {str(name): json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return json_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
