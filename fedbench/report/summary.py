"""Runs grouped by everything but the seed, and the tables that say what came out of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, require
from fedbench.report import scores
from fedbench.report.runs import Run, rounds_of
from fedbench.report.table import Column, Spread, Table
from fedbench.report.words import label_columns, line_of, printed, told

SHOWN = ("dataset", "partition", "model")  # groups that become columns wherever they differ
# What does not make two runs different experiments: where they ran, and how they were watched.
IGNORED = ("seed", "name", "paper", "resume", "data_dir", "output_dir", "sweep_dir", "checkpoint", "hardware",
           "tracking")  # fmt: skip
# What belongs to a method, and not to the setting it is compared in.
OF_METHOD = ("algorithm", "optimizer", "finetune", "compression", "choices.optimizer", "choices.algorithm",
             "choices.compression")  # fmt: skip


@dataclass
class Options:
    """What the report is asked for; ``group`` are the config keys to group by, or None: all but the seed."""

    metric: str = "personal/accuracy"
    select: str = "last"
    target: float = 0.7
    group: list[str] | None = None


@dataclass
class Group:
    """Finished runs that differ in their seed only.

    ``labels`` tell it from the other groups, in column order; ``setting`` is what methods are compared within:
    data set, partition, model, and what differs of them between groups.
    """

    runs: list[Run]
    labels: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """One line for a legend, within a setting."""
        return line_of(self.within, self.tuned, self.conf)

    @property
    def conf(self) -> tuple[Path, ...] | None:
        """The conf folders of its runs."""
        return self.runs[0].conf

    @property
    def within(self) -> dict[str, Any]:
        """The labels that tell it from the others of its setting."""
        return {key: value for key, value in self.labels.items() if key not in self.setting}

    @property
    def tuned(self) -> bool:
        """Whether the method fine-tunes what clients deploy, after the last round only."""
        return any(run.tuned for run in self.runs)


def identity(run: Run) -> dict[str, Any]:
    """The config entries that make a run what it is, by dotted names."""
    return {
        name: value
        for name, value in run.flat_config.items()
        if name.split(".")[0] not in IGNORED and not name.startswith(("choices.hardware", "choices.tracking",
                                                                      "choices.experiment"))
    }  # fmt: skip


def group_runs(runs: list[Run], keys: list[str] | None = None) -> tuple[list[Group], int]:
    """Finished runs grouped by all but the seed, or by ``keys``; and how many repeated runs were left out.

    Of several runs of one group and seed the one that finished last counts.
    """
    groups: dict[Any, dict[Any, Run]] = {}
    finished = [run for run in runs if run.finished]
    for run in sorted(finished, key=lambda r: str(r.summary.get("finished"))):
        if keys is None:
            key = (run.method, *sorted((k, repr(v)) for k, v in identity(run).items()))
            same_cell: Any = run.seed
        else:
            key = tuple(repr(lookup(run, k)) for k in keys)
            same_cell = (run.seed, *sorted((k, repr(v)) for k, v in identity(run).items()))
        groups.setdefault(key, {})[same_cell] = run
    grouped = [Group(list(by_seed.values())) for by_seed in groups.values()]
    _label(grouped, keys)
    return grouped, len(finished) - sum(len(group.runs) for group in grouped)


def lookup(run: Run, key: str) -> Any:
    """A config value by its dotted name; a group's name means the option chosen; ``name`` the method."""
    if key in ("name", "method"):
        return run.method
    chosen = run.choice(key)
    value = run.flat_config.get(key) if chosen is None else chosen
    require(chosen is not None or key in run.flat_config, f"--group {key}: {run.path} has no such config key")
    return value


def _label(groups: list[Group], keys: list[str] | None) -> None:
    """Name each group: its method, the options that differ, and the values that tell namesakes apart."""
    if keys is not None:
        for group in groups:
            group.labels = {key: lookup(group.runs[0], key) for key in keys}
        return
    firsts = [group.runs[0] for group in groups]
    shown = [name for name in SHOWN if len({run.choice(name) for run in firsts}) > 1]
    namesakes: dict[Any, list[Run]] = {}
    for run in firsts:
        namesakes.setdefault((run.method, *(run.choice(name) for name in SHOWN)), []).append(run)
    telling = dict.fromkeys(key for same in namesakes.values() for key in differing(same))
    for group in groups:
        run, ours = group.runs[0], identity(group.runs[0])
        values = {_short(key, telling): ours.get(key) for key in telling}
        group.labels = {"method": run.method} | {name: run.choice(name) for name in shown} | values
        group.setting = {name: run.choice(name) for name in SHOWN}
        group.setting |= {_short(key, telling): ours.get(key) for key in telling if not key.startswith(OF_METHOD)}


def differing(runs: list[Run]) -> list[str]:
    """Config keys whose values differ among runs; a chosen option stands for the values inside it, where all runs that
    chose it have the same."""
    entries = [identity(run) for run in runs]

    def differs(key: str, among: list[dict[str, Any]]) -> bool:
        return len({repr(entry.get(key)) for entry in among}) > 1

    keys = [key for key in dict.fromkeys(k for e in entries for k in e) if differs(key, entries)]
    alike: dict[str, list[list[dict[str, Any]]]] = {}  # group whose choice differs -> the entries of each choice
    for choice in (key for key in keys if key.startswith("choices.")):
        by_option: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            by_option.setdefault(repr(entry.get(choice)), []).append(entry)
        alike[choice.removeprefix("choices.")] = list(by_option.values())
    return [key for key in keys if any(differs(key, same) for same in alike.get(key.split(".")[0], [entries]))]


def _short(key: str, keys: Iterable[str]) -> str:
    """The last part of a dotted key, where that is enough."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def results(groups: list[Group], runs: list[Run], options: Options) -> Table:
    """The table of results: a row per group, best first within a data set, partition and model.

    It is wide, as a CSV wants it; ``narrow`` cuts it for a reader.
    """
    scored = {id(g): _scores(g, options) | _gains(g, runs, options) for g in groups}
    better = -1 if scores.lower_is_better(options.metric) else 1

    def order(group: Group) -> tuple[Any, ...]:
        value = scored[id(group)][options.select].mean
        return *map(_sortable, group.setting.values()), np.isnan(value), -better * value

    groups.sort(key=order)
    labels = label_columns(dict.fromkeys(k for g in groups for k in g.labels), groups[0].conf)
    unit = " (%)" if scores.is_fraction(options.metric) else ""
    title = f"{options.metric}{unit}: {facts(groups)}"
    ordered = [group.labels | {"tuned": group.tuned} | scored[id(group)] for group in groups]
    columns = [column for column in _columns(options) if column.key != "counted" or any(r["counted"] for r in ordered)]
    return Table(title, [*labels, *columns, *_gain_columns(options)], ordered)


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Numbers by size before texts by letter."""
    number = isinstance(value, (int, float))
    return (not number, value if number else 0, str(value))


def narrow(wide: Table, options: Options) -> list[Table]:
    """The wide table as a reader wants it: results, and gains over Local where there are any."""
    gain_keys = {column.key for column in _gain_columns(options)}
    score_keys = {column.key for column in _columns(options)}
    labels = [c for c in wide.columns if c.key not in gain_keys | score_keys]
    columns = [c for c in wide.columns if c.key not in gain_keys]
    tables = [Table(wide.title, columns, wide.rows)]
    gained = [row for row in wide.rows if "gain_n" in row and not row["is_local"]]
    if gained:
        title = f"{options.metric}: gain over Local, mean ± std over clients"
        tables.append(Table(title, [*labels, *_gain_columns(options)], gained))
    return [told(table, [column.key for column in labels]) for table in tables]


def _columns(options: Options) -> list[Column]:
    scale = 100 if scores.is_fraction(options.metric) else 1
    digits = 2 if scale == 100 else 4
    target = f"{options.target * scale:g}" + ("%" if scale == 100 else "")
    metric = [("last", "last"), ("best", "best"), ("best_val", "best by val"), ("worst", "worst tenth"),
              ("global", "global")]  # fmt: skip
    return [
        Column("n", "n"),
        Column("counted", "over clients", none="all"),
        *(Column(key, title, digits, scale) for key, title in metric),
        Column("rounds_to_target", f"rounds to {target}", 1, none="never"),
        Column("seconds_to_target", f"s to {target}", 1, none="never"),
        Column("images_per_s", "images/s", 0),
    ]


def _scores(group: Group, options: Options) -> dict[str, Any]:
    """What a group reaches, over its seeds."""
    metric, runs = options.metric, group.runs
    rounds = {name: [scores.selected_round(run, metric, name) for run in runs] for name in scores.SELECTIONS}

    def at(name: str, select: str) -> Spread:
        return over_seeds(scores.value_at(run, name, t) for run, t in zip(runs, rounds[select]))

    to_target = [scores.rounds_to(run, metric, options.target) for run in runs]
    counted = [scores.clients_at(run, metric, t) for run, t in zip(runs, rounds[options.select])]
    return {
        "n": len(runs),
        "counted": ", ".join(dict.fromkeys(text or "all" for text in counted)) if any(counted) else None,
        **{name: at(metric, name) for name in scores.SELECTIONS},
        "worst": at(f"{metric}_worst", options.select),
        "global": at(metric.replace("personal/", "global/"), options.select),
        "rounds_to_target": over_seeds(to_target),
        "seconds_to_target": over_seeds(scores.seconds_to(run, t) for run, t in zip(runs, to_target)),
        "images_per_s": over_seeds((run.summary.get("cost") or {}).get("images_per_s") for run in runs),
    }


def _gain_columns(options: Options) -> list[Column]:
    scale, digits = (100, 2) if scores.is_fraction(options.metric) else (1, 4)
    return [
        Column("gain_n", "n"),
        *(Column(f"gain_{name}", f"gain@{name}", digits, scale) for name in scores.GAINS),
        Column("gain_better", "better@own_best (%)", 0, 100),
    ]


def _gains(group: Group, runs: list[Run], options: Options) -> dict[str, Any]:
    """A group's gains over Local: each the mean over seeds of the mean, and of the std, over clients."""
    pairs = [(run, local) for run in group.runs if (local := scores.local_of(run, runs))]
    gains = [gain for run, local in pairs if (gain := scores.gains(run, local, options.metric))]
    if not gains:
        return {}
    row: dict[str, Any] = {"gain_n": len(gains), "is_local": all(run is local for run, local in pairs)}
    for name in scores.GAINS:
        if known := [gain[name] for gain in gains if name in gain]:
            mean, std = np.mean([g.mean for g in known]), np.mean([g.std for g in known])
            row[f"gain_{name}"] = Spread(float(mean), float(std), len(known), len(known))
    row["gain_better"] = over_seeds(gain["own_best"].better for gain in gains)
    return row


def over_seeds(values: Iterable[float | None]) -> Spread:
    """Mean and population std of the values that are known; no std for a single seed."""
    numbers = np.array(list(values), dtype=np.float64)
    known = numbers[~np.isnan(numbers)]
    if not len(known):
        return Spread(float("nan"), None, 0, len(numbers))
    return Spread(float(known.mean()), float(known.std()) if len(known) > 1 else None, len(known), len(numbers))


def facts(groups: list[Group]) -> str:
    """What all runs share: data set, partition, model, clients, cohort, rounds."""
    firsts = [group.runs[0] for group in groups]

    def shared(value: Callable[[Run], Any], text: str) -> list[str]:
        values = {value(run) for run in firsts}
        return [text.format(values.pop())] if len(values) == 1 and None not in values else []

    words = [part for name, text in (("dataset", "{}"), ("partition", "{} partition"), ("model", "{}"))
            for part in shared(lambda run, name=name: run.choice(name), text)]  # fmt: skip
    for name, text in (("num_clients", "{} clients"), ("cohort", "{} a round"), ("rounds", "{} rounds")):
        words += shared(lambda run, name=name: run.summary.get(name), text)
    return ", ".join(words)


def notes(groups: list[Group], repeated: int, options: Options) -> list[str]:
    """What a reader of the tables must know."""
    lines = [
        "± is the population standard deviation (ddof=0), as the papers' authors compute it: over n seeds, "
        "in gains over clients.",
        "last: the last round. best: the round with the best mean on the test sets, as PFL papers print it. "
        "best by val: the round with the best validation accuracy.",
        f"--select {options.select} orders the rows, and worst tenth and global are taken at that round.",
        "s to target counts training and the server step, not evaluation; (k of n): only k of n seeds get there.",
    ]
    same = [g.labels["method"] for g in groups if "method" in g.labels and g.runs[0].summary.get("personal_is_global")]
    if same:
        names = ", ".join(printed(str(name), groups[0].conf) for name in dict.fromkeys(same))
        lines.append(f"personal equals global for {names}: one model for all.")
    if any(scores.clients_at(run, options.metric, scores.selected_round(run, options.metric, options.select))
           for group in groups for run in group.runs):  # fmt: skip
        lines.append(
            "over clients: how many the means are over, where a score is not defined for all (or with eval.clients)."
        )
    if repeated:
        lines.append(f"{repeated} earlier runs of a configuration and seed that was run again are left out.")
    hashes: dict[Any, set[Any]] = {}
    for group in groups:
        key = tuple(f"{name} {value}" for name, value in group.setting.items())
        hashes.setdefault(key, set()).update(run.summary.get("partition_hash") for run in group.runs)
    for key, partitions in hashes.items():
        if len(partitions) > 1:
            lines.append(f"{', '.join(key)}: partitioned in {len(partitions)} ways, compare with care.")
    return lines


def unfinished(runs: list[Run]) -> Table | None:
    """The runs that have not finished and the command that goes on with each; those that failed before their first
    round, of which there is nothing to go on with, are counted in one line."""
    open_runs = [run for run in runs if not run.finished]
    if not open_runs:
        return None
    status = {run.path: _status(run) for run in open_runs}
    failed = [run for run in open_runs if status[run.path].startswith("failed") and not rounds_of(run)]
    rows = []
    for run in (run for run in open_runs if run not in failed):
        rows.append({
            "run": str(run.path),
            "status": status[run.path],
            "rounds": f"{rounds_of(run)} of {run.summary.get('rounds', run.config.get('rounds', '?'))}",
            "command": _to_finish(run),
        })  # fmt: skip
    columns = [Column("run", "run"), Column("status", "status"), Column("rounds", "rounds"),
               Column("command", "to finish it")]  # fmt: skip
    notes = [_failed_starts(failed, status)] if failed else []
    return Table("not finished", columns, rows, notes) if rows else Table("", [], notes=notes)


def _failed_starts(failed: list[Run], status: Mapping[Path, str]) -> str:
    """How many runs failed before their first round, and why the first did."""
    reasons = {status[run.path] for run in failed}
    count = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
    more = len(reasons) - 1
    others = f" ({more} other reason{'s' * (more > 1)}: see error.txt)" if more else ""
    first = "" if len(failed) == 1 else "the first, "
    return f"{count} failed before the first round; {first}{failed[0].path}, {status[failed[0].path]}{others}"


def _to_finish(run: Run) -> str:
    """The command that goes on with an unfinished run, or why there is none."""
    from fedbench.simulation.run_folder import is_resumable  # reports of finished runs start without it
    from fedbench.simulation.status import resume_command

    try:
        return resume_command(run.path) if is_resumable(run.path) else "start it again: no checkpoint"
    except ConfigError as error:
        return f"start it again: {error}"


def left_out(damaged: Mapping[Path, str], runs: list[Run]) -> list[str]:
    """A line for each damaged run: what of it is in no table, and why."""
    lines = [f"damaged, left out: {path}: {why}" for path, why in damaged.items()]
    return lines + [f"damaged, without its clients: {run.path}: {run.left_out}" for run in runs if run.left_out]


def _status(run: Run) -> str:
    """failed with the first line of error.txt, or the status as written."""
    error = run.path / "error.txt"
    killed = read_json(run.path / "status.json").get("status") in ("running", "interrupted")
    none = "failed" if error.is_file() else "running" if killed else "no summary.json"
    status = str(run.summary.get("status") or none)
    if status == "running" or not error.is_file():
        return "interrupted" if status == "running" else status
    lines = error.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{status}: {lines[0][:100]}" if lines else status
