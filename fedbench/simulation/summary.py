"""Describe a run: in its log before round 1, and in summary.json."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from fedbench.core.digests import Mark, digest, mark_of
from fedbench.core.files import replace_text
from fedbench.core.settings import clients_to_train
from fedbench.core.split import Split
from fedbench.engine.federation import Federation
from fedbench.simulation import new_clients
from fedbench.simulation.environment import describe_environment, now, peak_memory
from fedbench.simulation.run_state import Simulation
from fedbench.simulation.sampling import cohort_size, evaluated_clients
from fedbench.simulation.summary_text import attack_line, clauses

log = logging.getLogger(__name__)
MOST_CLASSES, MOST_NAMES, LONGEST_NAME = 10, 10, 24  # classes, client names and characters per name in the log
# Files beside the tables that reports read.  A finished run's summary has a checksum of each.
HASHED_FILES = ("partition.npz", "partition.json", "matrices.npz", "measured.npz", new_clients.FILE)


def log_run(cfg: DictConfig, split: Split, done: int) -> None:
    """Log the first line of a run: method, data set, clients, rounds, model and seed.

    Args:
        cfg: The checked configuration.
        split: The partition of the data over all clients, new clients included.
        done: The number of rounds before this process.
    """
    choices = cfg.choices
    num_clients = clients_to_train(split.num_clients, cfg.new_clients.count)
    log.info(
        "%s on %s, %s partition: %d clients, %d per round, %d rounds, model %s, seed %d%s",
        name_of(cfg),
        choices.dataset,
        choices.partition,
        num_clients,
        cohort_size(cfg, num_clients),
        cfg.rounds,
        choices.model,
        cfg.seed,
        f"; resuming after round {done} of {cfg.rounds}" if done else "",
    )


def name_of(cfg: DictConfig) -> str:
    """Return the name of a run: the option `name`, or else the algorithm, with "+ft" if finetune.epochs > 0."""
    return cfg.name or str(cfg.choices.algorithm) + ("+ft" if cfg.finetune.epochs else "")


def log_components(sim: Simulation) -> None:
    """Log task, data, model, executor, privacy, and the memory for client states, one line each, before round 1."""
    engine, federation = sim.engine, sim.engine.federation
    log.info("%s", task_line(federation))
    log.info(
        "%d clients%s: %s training samples, %d to %d per client; partition %s",
        federation.num_clients,
        _client_names(sim.split.names, federation.num_clients),
        f"{federation.num_samples.sum():,}",
        federation.num_samples.min(),
        federation.num_samples.max(),
        sim.split.hash[:12],
    )
    if federation.cohort_size == 1 < federation.num_clients:
        log.info("a round has one client, so nothing is averaged; set clients_per_round or sample_rate for more")
    num_new = engine.with_new_clients.num_clients - federation.num_clients
    if num_new > 0:
        log.info("%d new clients take no part in training and adapt the global model at the end", num_new)
    model = engine.model
    log.info(
        "model: %s parameters and buffers per client, %s of them trained; executor %s",
        f"{model.size:,}",
        f"{model.trained.size:,}",
        engine.executor.plan,
    )
    rule = engine.aggregator
    if rule is not None and not rule.uses_weights and engine.client_weights == "samples":
        log.info("aggregator: this rule treats all clients equally, whatever their numbers of samples")
    if engine.attackers is not None:
        log.info("%s", attack_line(sim.cfg.choices.attack, engine.attackers.ids.tolist(), federation.num_clients))
    if engine.privacy is not None:
        log.info("privacy: %s", "\n  ".join(clauses(engine.privacy.guarantee())))
    if engine.central is not None:
        log.info("privacy: %s", "\n  ".join(clauses(engine.central.guarantee())))
    ranks = engine.executor.ranks
    if ranks.world_size > 1:
        data = "all data" if federation.shard is None else "the samples of its own clients"
        state = "the state of its own clients" if engine.rows.is_sharded else "all state"
        message = "%d processes share the clients of every round; each stores %s and %s"
        log.info(message, ranks.world_size, data, state)
    for line in engine.rows.plan():  # one for each client state: its size and location
        log.info("state %s", line)
    for buffer in engine.optimizer.buffers if engine.optimizer.reset == "never" else ():
        # of one client; model.spans has an entry for each tensor of parameters
        initial = engine.optimizer.new(buffer, torch.empty(1, model.size), len(model.spans))
        size = engine.rows.size(buffer, initial[0])
        log.info("state %s, for each kind of model that clients train (optimizer.reset=never)", size)


def _client_names(names: Sequence[str] | None, count: int) -> str:
    """Return the first few client names, in parentheses; "" if clients have no names.

    Args:
        names: The names of the clients, new ones included, or None.
        count: The number of training clients, which are the first ones.
    """
    if names is None:
        return ""
    shown = [name[:LONGEST_NAME] for name in names[: min(count, MOST_NAMES)]]
    return f" ({', '.join(shown)}{', ...' if count > MOST_NAMES else ''})"


def task_line(federation: Federation) -> str:
    """Return a line about the task, as in "classification: 3 classes; training samples: cat 5, dog 7, cow 2".

    At most MOST_CLASSES classes are listed, and none for tasks without classes.
    """
    task, count = federation.task, federation.num_classes
    # predicts: what num_classes counts, in the plural, such as "numbers"; [:-1]: without the s
    text = f"{task.kind or type(task).__name__}: {count:,} {task.predicts if count != 1 else task.predicts[:-1]}"
    totals = federation.class_totals
    if totals is None:
        return text
    names = [name[:LONGEST_NAME] for name in federation.class_names or map(str, range(count))]
    listed = ", ".join(f"{name} {total:,}" for name, total in zip(names[:MOST_CLASSES], totals.tolist()))
    more, empty = ", ..." if count > MOST_CLASSES else "", int((totals == 0).sum())
    none = f"; {empty:,} without any" if empty else ""
    return f"{text}; training samples: {listed}{more}{none}"


def summary(sim: Simulation, status: str) -> dict[str, Any]:
    """Return the content of summary.json: the setting, scores, cost and environment of a run.

    Args:
        sim: The run, with its configuration, method, engine, and the scores and costs so far.
        status: finished, paused, failed or interrupted.
    """
    cfg, engine, task, cost = sim.cfg, sim.engine, sim.engine.task, dict(sim.cost)
    cost["images_per_s"] = cost["samples"] / max(cost["train_s"], 1e-9)
    cost["peak_memory_mb"] = peak_memory(engine.device)
    choices = cfg.choices
    return {
        "status": status,
        "name": name_of(cfg),
        "rounds_done": sim.done,
        **{group: choices[group] for group in ("algorithm", "dataset", "partition", "model", "experiment")},
        **({"classes": sim.command_entries["classes"]} if sim.command_entries.get("classes") else {}),
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
        "tuned_at_end": sim.algorithm.fine_tunes_after_training,
        "config_hash": sim.config_hash,
        "partition_hash": sim.split.hash,
        "data_hash": sim.data_hash,
        "last": sim.last,  # metrics by name
        "best": sim.best,  # by test score: the round, and metrics by name
        "best_val": sim.best_val,
        **({"stopped_early": sim.early_stopping.stopped_at} if sim.is_stopped_early else {}),
        **({"new_clients": sim.new_clients} if sim.new_clients else {}),
        **({"privacy": engine.privacy.summary()} if engine.privacy else {}),
        **({"privacy": engine.central.summary(sim.done)} if engine.central else {}),
        **({"attack": {"name": choices.attack, "attackers": engine.attackers.ids}} if engine.attackers else {}),
        "cost": cost,
        "executor": {**engine.executor.state(), "ranks": engine.executor.ranks.world_size},
        **describe_environment(),
        "command": sim.command_entries.get("command"),
        "started": sim.started,
        "finished": now() if status == "finished" else None,
    }


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json as JSON types, with a digest of all entries as the entry "digest"."""
    values = json_values(values)
    return {**values, "digest": digest(values)}


def output_marks(run_dir: Path) -> dict[str, Mark]:
    """Return {file name: [size in bytes, CRC-32 as hex]} of the files in HASHED_FILES that the run folder has."""
    return {name: mark_of(run_dir / name) for name in HASHED_FILES if (run_dir / name).is_file()}


def write_summary(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write summary.json atomically.  Numbers that are not finite become null.

    Args:
        run_dir: The run folder.
        values: The content, which may have NumPy values and paths.
    """
    text = json.dumps(json_values(dict(values)), indent=1, allow_nan=False) + "\n"
    replace_text(run_dir / "summary.json", [text])


def json_values(value: Any) -> Any:
    """Return nested values with JSON types: NumPy values become numbers or lists, paths text, NaN and inf None."""
    if isinstance(value, dict):
        return {str(name): json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return json_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
