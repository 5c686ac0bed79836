"""Runs grouped by all that defines them but the seed, and the table of what each group reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.core import moved
from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import UNHASHED_KEYS, is_matched
from fedbench.report import scores
from fedbench.report.runs import Run, rounds_of
from fedbench.report.scores import Options, scores_of
from fedbench.report.table import Column, DataFrame, Spread, Table, pandas
from fedbench.report.words import label_columns, line_of, printed

SHOWN = ("dataset", "partition", "model")  # groups that become columns wherever they differ
# Keys that do not define a run: where it ran, how it was watched, and what it is called.
IGNORED = (*UNHASHED_KEYS, "seed", "name", "paper", "paper.*")
IGNORED += tuple(f"choices.{group}" for group in ("hardware", "tracking", "callbacks", "experiment"))
DATA = ("dataset.path", "dataset.paths", "dataset.folder", "dataset.trust")  # where the data are
# What belongs to a method, and not to the setting it is compared in.
OF_METHOD = ("algorithm", "optimizer", "finetune", "compression", "choices.optimizer", "choices.algorithm",
             "choices.compression")  # fmt: skip


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
    """Return the config entries that define a run but its seed, by dotted names; its data by their digest."""
    entries = {key: moved.current(value) if key.endswith("_target_") and isinstance(value, str) else value
               for key, value in run.flat_config.items() if not is_matched(key, IGNORED)}  # fmt: skip
    if digest := run.summary.get("data_hash"):
        entries = {key: value for key, value in entries.items() if key not in DATA} | {"data": str(digest)[:12]}
    return entries


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


def frame_of(groups: list[Group], runs: list[Run], options: Options) -> DataFrame:
    """Return the scores of all groups, a row for each run; ``group`` is the group's position."""
    rows = [{"group": i, **scores_of(run, options, runs)} for i, group in enumerate(groups) for run in group.runs]
    return pandas().DataFrame(rows)


def over_seeds(values: Iterable[float | None]) -> Spread:
    """Return the mean and population std of the values that exist; no std for a single one."""
    numbers = pandas().Series(values, dtype=float)
    count = int(numbers.count())
    return Spread(float(numbers.mean()), float(numbers.std(ddof=0)) if count > 1 else None, count, len(numbers))


def aggregated(frame: DataFrame) -> DataFrame:
    """Return a Spread over seeds of each score, a row for each group; the ± of a gain is its mean over seeds."""
    by_group = frame.groupby("group")
    table = by_group[[name for name in frame if name not in ("group", "counted")]].agg(over_seeds)
    counted = by_group["counted"].agg(lambda texts: ", ".join(texts.fillna("all").unique()))
    table["counted"] = counted.astype(object).where(counted != "all", None)
    table["n"] = by_group.size()
    table["gain_last"] = [Spread(gain.mean, std.mean, gain.count, gain.of) if gain.count else None
                          for gain, std in zip(table["gain_last"], table["gain_last_clients"])]  # fmt: skip
    return table


def results(groups: list[Group], runs: list[Run], options: Options) -> Table:
    """Return the table of results: a row per group, best first within a data set, partition and model.

    Sorts the groups in this order.
    """
    aggregates = aggregated(frame_of(groups, runs, options)).to_dict("records")
    scored = {id(group): row for group, row in zip(groups, aggregates)}
    sign = 1 if scores.lower_is_better(options.metric) else -1

    def order(group: Group) -> tuple[Any, ...]:
        value = scored[id(group)][options.select]
        return *map(_sortable, group.setting.values()), not value.count, sign * value.mean

    groups.sort(key=order)
    labels = label_columns(groups[0].labels, groups[0].conf)
    unit = " (%)" if scores.is_fraction(options.metric) else ""
    rows = [group.labels | {"tuned": group.tuned} | scored[id(group)] for group in groups]
    return Table(f"{options.metric}{unit}: {facts(groups)}", [*labels, *_columns(options, rows)], rows)


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Numbers by size before texts by letter."""
    number = isinstance(value, (int, float))
    return (not number, value if number else 0, str(value))


def _columns(options: Options, rows: list[dict[str, Any]]) -> list[Column]:
    metric = {"last": "last", "best": "best", "best_val": "best by val", "worst": "worst tenth", "global": "global",
              "gain_last": "gain@last"}  # fmt: skip
    counted = [Column("counted", "over clients", none="all")] if any(row["counted"] for row in rows) else []
    return [
        Column("n", "n"),
        *counted,
        *(Column(key, title, **options.form) for key, title in metric.items()),
        Column("rounds_to_target", f"rounds to {options.goal}", 1, none="never"),
        Column("seconds_to_target", f"s to {options.goal}", 1, none="never"),
        Column("images_per_s", "images/s", 0),
    ]


def facts(groups: list[Group]) -> str:
    """Return what all runs share: data set, partition, model, clients, cohort, rounds."""
    words = {"dataset": "{}", "partition": "{} partition", "model": "{}", "num_clients": "{} clients",
             "cohort": "{} a round", "rounds": "{} rounds"}  # fmt: skip
    firsts = [group.runs[0] for group in groups]
    shared = {key: {run.choice(key) if key in SHOWN else run.summary.get(key) for run in firsts} for key in words}
    return ", ".join(words[key].format(*of) for key, of in shared.items() if len(of) == 1 and None not in of)


def sent_table(groups: list[Group], wide: Table, options: Options) -> Table | None:
    """Return what was sent, a row for each of the table of results; None if nothing was compressed."""
    if not any(scores.is_compressed(run) for group in groups for run in group.runs):
        return None
    columns = [
        *label_columns(groups[0].labels, groups[0].conf),
        Column("n", "n"),
        Column("last", "last", **options.form),
        *(Column(f"mb_{d}", f"MB {d}", 2) for d in ("up", "down")),
        *(Column(f"part_{d}", f"{d} (% of dense)", 2, 100) for d in ("up", "down")),
        Column("mb_to_target", f"MB to {options.goal}", 2, none="never"),
    ]
    return Table("what was sent, by all clients together", columns, wide.rows)


def notes(groups: list[Group], repeated: int, options: Options, shown: Iterable[str] | None = None) -> list[str]:
    """Return what a reader of the tables must know.

    shown: the keys of their columns (default: all).
    """
    about = {
        "last": "last: the last round.",
        "best": "best: the round with the best mean on the test sets, as PFL papers print it.",
        "best_val": "best by val: the round with the best validation score.",
        "counted": "over clients: how many the means are over, where a score is not defined for all (or with "
        "eval.clients).",
        "worst": f"worst tenth: mean of the worst tenth of clients, at the {options.select} round.",
        "global": f"global: mean over clients of the global model, at the {options.select} round.",
        "gain_last": "gain@last: each client's score less that of Local with the same seed, at the last round; "
        "mean ± std over clients.",
        "rounds_to_target": f"rounds to {options.goal}: the first evaluated round that reaches it; (k of n): only k of "
        "n seeds do.",
        "seconds_to_target": f"s to {options.goal}: seconds of training and the server step, without evaluation.",
        "images_per_s": "images/s: training images a second.",
        "mb_up": "MB: 10^6 bytes, of all rounds. % of dense: of what they would be without compression.",
    }
    shown = about if shown is None else set(shown)
    lines = [
        "± is the population standard deviation (ddof=0), as the papers' authors compute it, over n seeds. "
        f"--select {options.select} orders the rows.",
        " ".join(text for key, text in about.items() if key in shown),
    ]
    same = [g.labels["method"] for g in groups if "method" in g.labels and g.runs[0].summary.get("personal_is_global")]
    if same:
        names = ", ".join(printed(str(name), groups[0].conf) for name in dict.fromkeys(same))
        lines.append(f"personal equals global for {names}: one model for all.")
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
