"""Groups of runs that differ only in the seed, and tables of their scores over seeds."""

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
from fedbench.report.display import label_columns, legend_name, method_name
from fedbench.report.runs import Run, rounds_of
from fedbench.report.scores import Options, scores_of
from fedbench.report.table import Column, DataFrame, Spread, Table, pandas

SETTING = ("dataset", "partition", "model")  # config groups that become columns if they differ
# Keys that do not define a run: where it ran, how it was logged, and its names.
IGNORED = (*UNHASHED_KEYS, "seed", "name", "paper", "paper.*")
IGNORED += tuple(f"choices.{group}" for group in ("hardware", "tracking", "callbacks", "experiment"))
DATA_PATHS = ("dataset.path", "dataset.paths", "dataset.folder", "dataset.trust")
# Keys of the method, in contrast to those of the setting in which methods are compared.
METHOD_PREFIXES = ("algorithm", "optimizer", "finetune", "compression", "server", "aggregator", "choices.optimizer",
                   "choices.algorithm", "choices.compression", "choices.server", "choices.aggregator")  # fmt: skip
RESULT_KEYS = ("n", "counted", "last", "best", "best_val", "worst", "global", "gain_last", "rounds_to_target",
               "seconds_to_target", "images_per_s")  # fmt: skip
SENT_KEYS = ("n", "last", "mb_up", "mb_down", "part_up", "part_down", "mb_to_target")


@dataclass
class Group:
    """Finished runs that differ only in the seed, with the method and options (labels) that distinguish them.

    Attributes:
        runs: The runs.
        labels: The method and the config values that distinguish this group from others, by the titles of their
            columns and in their order.
        setting: Data set, partition, model, and config values outside of the method.  Methods are compared within a
            setting.
    """

    runs: list[Run]
    labels: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in a legend: the method and its distinguishing options, such as "FedProx mu=0.1"."""
        return legend_name(self.method_labels, self.tuned, self.conf)

    @property
    def conf(self) -> tuple[Path, ...] | None:
        """The config folders in which the runs' methods are found (algorithm/NAME.yaml); None for fedbench's own."""
        return self.runs[0].conf

    @property
    def method_labels(self) -> dict[str, Any]:
        """The entries of ``labels`` whose keys are not in ``setting``: the method and its distinguishing options."""
        return {key: value for key, value in self.labels.items() if key not in self.setting}

    @property
    def tuned(self) -> bool:
        """Whether clients fine-tune their models after the last round, and do not do so in the rounds before."""
        return any(run.tuned for run in self.runs)


def identity(run: Run) -> dict[str, Any]:
    """Return a dict from dotted key to value, for the config entries that define a run except for its seed.

    A hash of the data replaces their paths, so that runs on different machines are the same.
    """
    entries = {}
    for key, value in run.flat_config.items():
        if not is_matched(key, IGNORED):  # patterns of seed, names, and keys that do not affect results
            is_class = key.endswith("_target_") and isinstance(value, str)
            entries[key] = moved.current(value) if is_class else value  # classes of earlier releases have new paths
    if data_hash := run.summary.get("data_hash"):
        entries = {key: value for key, value in entries.items() if key not in DATA_PATHS}
        entries["data"] = str(data_hash)[:12]
    return entries


def group_runs(runs: list[Run], keys: list[str] | None = None) -> tuple[list[Group], int]:
    """Group the finished runs.

    Args:
        runs: The runs.
        keys: The config keys to group by; None for all that define a run but the seed.

    Returns:
        The groups, and the number of repeated runs.  Of several runs with equal configuration and seed, only the one
        that finished last is in a group.

    Raises:
        ConfigError: A run does not have one of the keys.
    """
    groups: dict[Any, dict[Any, Run]] = {}
    # by the time at which they finished
    finished = sorted((run for run in runs if run.finished), key=lambda run: str(run.summary.get("finished")))
    for run in finished:
        definition = tuple(sorted((key, repr(value)) for key, value in identity(run).items()))
        group = (run.method, definition) if keys is None else tuple(repr(lookup(run, key)) for key in keys)
        groups.setdefault(group, {})[run.seed, definition] = run  # replaces an earlier run
    grouped = [Group(list(members.values())) for members in groups.values()]
    if keys is None:
        _label(grouped)
    else:
        for group in grouped:
            group.labels = {key: lookup(group.runs[0], key) for key in keys}
    return grouped, len(finished) - sum(len(group.runs) for group in grouped)


def lookup(run: Run, key: str) -> Any:
    """Return the value by which ``--group`` groups a run.

    Args:
        run: The run.
        key: A dotted config key, a config group such as "dataset" for its chosen option, or "method" or "name" for the
            name of the method.

    Raises:
        ConfigError: The run does not have the key.
    """
    if key in ("name", "method"):
        return run.method
    chosen = run.choice(key)
    require(
        chosen is not None or key in run.flat_config,
        f"--group {key}: {run.path} has no such config key; give a key of its config.yaml, such as algorithm or seed",
    )
    return run.flat_config[key] if chosen is None else chosen


def _label(groups: list[Group]) -> None:
    """Set the labels and the setting of each group.

    Labels are the method; data set, partition and model if they vary; and the keys that distinguish groups with the
    same method, data set, partition and model.  The setting is data set, partition and model, and those of the keys
    that do not belong to the method.
    """
    first_runs = [group.runs[0] for group in groups]
    varying = [name for name in SETTING if len({run.choice(name) for run in first_runs}) > 1]
    by_method_and_setting: dict[Any, list[Run]] = {}
    for run in first_runs:
        by_method_and_setting.setdefault((run.method, *(run.choice(name) for name in SETTING)), []).append(run)
    keys = list(dict.fromkeys(key for runs in by_method_and_setting.values() for key in differing(runs)))
    last_parts = [key.rpartition(".")[2] for key in keys]
    titles = {key: last if last_parts.count(last) == 1 else key for key, last in zip(keys, last_parts)}
    for group, run in zip(groups, first_runs):
        values = identity(run)
        group.labels = {"method": run.method} | {name: run.choice(name) for name in varying}
        group.labels |= {title: values.get(key) for key, title in titles.items()}
        group.setting = {name: run.choice(name) for name in SETTING}
        group.setting |= {
            title: values.get(key) for key, title in titles.items() if not key.startswith(METHOD_PREFIXES)
        }


def differing(runs: list[Run]) -> list[str]:
    """Return the config keys whose values differ among runs, except for the seed and keys that do not affect results.

    A key below a config group, such as algorithm.mu, is left out if it differs only between runs with different
    options of the group, here different algorithms.
    """
    # identity: the config values that define a run, except for its seed
    values = [{key: repr(value) for key, value in identity(run).items()} for run in runs]
    frame = pandas().DataFrame(values).fillna("None")  # a missing key is the same as null
    keys = [key for key in frame if frame[key].nunique() > 1]

    def differs_within_option(key: str) -> bool:
        choice = f"choices.{key.partition('.')[0]}"
        return choice not in keys or frame.groupby(choice)[key].nunique().max() > 1

    return [key for key in keys if differs_within_option(key)]


def over_seeds(values: Iterable[float | None]) -> Spread:
    """Return mean and population standard deviation of the values that are neither None nor NaN.

    The standard deviation of fewer than two such values is None.
    """
    numbers = pandas().Series(values, dtype=float)
    count = int(numbers.count())
    std = float(numbers.std(ddof=0)) if count > 1 else None
    return Spread(float(numbers.mean()), std, count, total=len(numbers))


def scores_over_seeds(groups: list[Group], runs: list[Run], options: Options) -> DataFrame:
    """Return the scores of each group over seeds.

    Args:
        groups: Groups of runs that differ only in the seed.
        runs: The runs among which the runs of Local (clients that train alone) are searched.
        options: Metric, selected round, target and grouping of the report.

    Returns:
        A DataFrame with a row per group and a column per score of `fedbench.report.scores.scores_of`.  Cells are
        Spreads over seeds, except for the columns "n" (number of runs) and "counted" (text or None).  The standard
        deviation of "gain_last" is over clients, as a mean over seeds.
    """
    rows = [{"group": i, **scores_of(run, options, runs)} for i, group in enumerate(groups) for run in group.runs]
    by_group = pandas().DataFrame(rows).groupby("group")
    table = by_group[[name for name in rows[0] if name not in ("group", "counted")]].agg(over_seeds)
    client_counts = by_group["counted"].agg(lambda texts: ", ".join(texts.fillna("all").unique()))
    table["counted"] = client_counts.astype(object).where(client_counts != "all", None)
    table["n"] = by_group.size()
    # gain_last: mean gain over Local; gain_last_clients: its standard deviation over the clients of a run
    table["gain_last"] = [
        Spread(gain.mean, std.mean, gain.count, gain.total) if gain.count else None
        for gain, std in zip(table["gain_last"], table["gain_last_clients"])
    ]
    return table


def score_columns(percent: bool, target: float) -> dict[str, Column]:
    """Return a dict from the key of a score, such as "last", to its column, for all scores.

    Args:
        percent: Whether the metric is displayed in percent.
        target: The target of the metric, for headings.
    """
    scale, digits = (100, 2) if percent else (1, 4)
    goal = f"{target * scale:g}{'%' if percent else ''}"
    # worst: mean of the worst tenth of clients; gain_last: gain over Local (clients that train alone)
    titles = {"last": "last", "best": "best", "best_val": "best by val", "worst": "worst tenth", "global": "global",
              "gain_last": "gain@last"}  # fmt: skip
    columns = [
        Column("n", "n"),
        Column("counted", "over clients", missing="all"),  # number of clients in the mean, if not all
        *(Column(key, title, digits, scale) for key, title in titles.items()),
        Column("rounds_to_target", f"rounds to {goal}", digits=1, missing="never"),
        Column("seconds_to_target", f"s to {goal}", digits=1, missing="never"),
        Column("images_per_s", "images/s", digits=0),
        *(Column(f"mb_{d}", f"MB {d}") for d in ("up", "down")),
        *(Column(f"part_{d}", f"{d} (% of dense)", scale=100) for d in ("up", "down")),  # dense: without compression
        Column("mb_to_target", f"MB to {goal}", missing="never"),
    ]
    return {column.key: column for column in columns}


def results(groups: list[Group], runs: list[Run], options: Options) -> Table:
    """Return the table of results, with a row per group.

    Rows are sorted by setting (data set, partition, model), and within a setting by the metric at the selected round,
    the best first.  A true value
    under "tuned" marks a method with a dagger: it fine-tunes after the last round only.

    Args:
        groups: The groups; sorted in place in the order of the rows.
        runs: The runs among which the runs of Local (clients that train alone) are searched.
        options: Metric, selected round, target and grouping of the report.
    """
    spreads = scores_over_seeds(groups, runs, options).to_dict("records")
    scored = {id(group): row for group, row in zip(groups, spreads)}  # by identity: groups are not hashable
    sign = 1 if scores.lower_is_better(options.metric) else -1

    def order(group: Group) -> tuple[Any, ...]:
        value = scored[id(group)][options.select]
        return *map(sort_key, group.setting.values()), not value.count, sign * value.mean  # without a value: last

    groups.sort(key=order)
    rows = [group.labels | {"tuned": group.tuned} | scored[id(group)] for group in groups]
    percent = scores.is_fraction(options.metric)
    columns = score_columns(percent, options.target)
    keys = [key for key in RESULT_KEYS if key != "counted" or any(row["counted"] for row in rows)]
    title = f"{options.metric}{' (%)' if percent else ''}: {common_facts(groups)}"
    labels = label_columns(groups[0].labels, groups[0].conf)
    return Table(title, [*labels, *(columns[key] for key in keys)], rows, name="results")


def sort_key(value: Any) -> tuple[bool, float, str]:
    """Return a key for sorting, (is no number, number or 0, text): numbers come first; then other values, by text."""
    is_number = isinstance(value, int | float) and value == value  # not NaN
    return (not is_number, value if is_number else 0.0, str(value))


def common_facts(groups: list[Group]) -> str:
    """Return what the groups have in common, by the first run of each: data set, partition, model, clients and so on.

    Returns:
        A text such as "mnist, dirichlet partition, 20 clients, 5 a round, 100 rounds".  Facts that differ between the
        groups, or that a run does not record, are left out; "" if all are.
    """
    formats = {"dataset": "{}", "partition": "{} partition", "model": "{}", "num_clients": "{} clients",
             "cohort": "{} a round", "rounds": "{} rounds"}  # fmt: skip
    facts = []
    for key, text in formats.items():
        values = {g.runs[0].choice(key) if key in SETTING else g.runs[0].summary.get(key) for g in groups}
        if len(values) == 1 and None not in values:
            facts.append(text.format(*values))
    return ", ".join(facts)


def sent_table(groups: list[Group], table: Table, options: Options) -> Table | None:
    """Return the table of communication; None if no run was compressed.

    Args:
        groups: Groups of runs that differ only in the seed.
        table: The table of results, whose rows are used.
        options: Metric, selected round, target and grouping of the report.
    """
    if not any(scores.is_compressed(run) for group in groups for run in group.runs):
        return None
    columns = score_columns(scores.is_fraction(options.metric), options.target)
    labels = label_columns(groups[0].labels, groups[0].conf)
    title = "what was sent, by all clients together"
    return Table(title, [*labels, *(columns[key] for key in SENT_KEYS)], table.rows, name="communication")


def notes(groups: list[Group], repeated: int, options: Options, shown: Iterable[str] | None = None) -> list[str]:
    """Return the explanations below the tables.

    Args:
        groups: Groups of runs that differ only in the seed.
        repeated: The number of runs that are left out because a later run has the same configuration and seed.
        options: Metric, selected round, target and grouping of the report.
        shown: The keys of the columns to explain; None for all.
    """
    titles = {k: c.title for k, c in score_columns(scores.is_fraction(options.metric), options.target).items()}
    explanations = {
        "last": "last: the last round.",
        "best": "best: the round with the best mean test score, as in PFL papers.",
        "best_val": "best by val: the round with the best validation score.",
        "counted": "over clients: the number of clients in the means, if the score is undefined for some (or with "
        "eval.clients).",
        "worst": f"worst tenth: mean over the worst tenth of clients, at the {options.select} round.",
        "global": f"global: mean over clients of the global model, at the {options.select} round.",
        "gain_last": "gain@last: each client's score minus that of Local with the same seed, at the last round; "
        "mean ± std over clients.",
        "rounds_to_target": f"{titles['rounds_to_target']}: the first evaluated round that reaches the target; "
        "(k of n): k of n seeds reach it.",
        "seconds_to_target": f"{titles['seconds_to_target']}: seconds of training and server steps until then, "
        "without evaluation.",
        "images_per_s": "images/s: training images per second.",
        "mb_up": "MB: 10^6 bytes, of all rounds. % of dense: in percent of the bytes without compression.",
    }
    shown = explanations if shown is None else set(shown)
    lines = [
        "± is the population standard deviation (ddof=0) over n seeds, as in papers. "
        f"Rows are sorted by the {options.select} round (--select).",
        " ".join(text for key, text in explanations.items() if key in shown),
    ]
    one_model = [group for group in groups if group.runs[0].summary.get("personal_is_global")]
    names = {method_name(str(g.labels["method"]), g.conf): None for g in one_model if "method" in g.labels}
    if names:
        lines.append(f"personal equals global for {', '.join(names)}: the method has one model for all clients.")
    if repeated:
        lines.append(f"{repeated} earlier runs are left out: a later run has the same configuration and seed.")
    partitions: dict[str, set[Any]] = {}
    for group in groups:
        setting = ", ".join(f"{key} {value}" for key, value in group.setting.items())
        partitions.setdefault(setting, set()).update(run.summary.get("partition_hash") for run in group.runs)
    for setting, hashes in partitions.items():
        if len(hashes) > 1:
            lines.append(f"{setting}: the runs have {len(hashes)} different partitions, compare with care.")
    return lines


def unfinished(runs: list[Run]) -> Table | None:
    """Return a table of the unfinished runs with the commands that resume them; None if all runs are finished.

    Runs that failed before their first round are not rows, because they cannot be resumed.  A note counts them.
    """
    rows = []
    failed = []
    for run in (run for run in runs if not run.finished):
        status, done = _status(run), rounds_of(run)
        if status.startswith("failed") and not done:
            failed.append((run.path, status))
            continue
        rounds = run.summary.get("rounds", run.config.get("rounds", "?"))
        row = {"run": str(run.path), "status": status, "rounds": f"{done} of {rounds}", "command": _to_finish(run)}
        rows.append(row)
    if not rows and not failed:
        return None
    titles = {"run": "run", "status": "status", "rounds": "rounds", "command": "to finish it"} if rows else {}
    columns = [Column(key, title) for key, title in titles.items()]
    notes = [_failed_starts(failed)] if failed else []
    return Table("not finished" if rows else "", columns, rows, notes, name="unfinished")


def _failed_starts(failed: list[tuple[Path, str]]) -> str:
    """Return a line that says how many runs failed before their first round, and why the first one failed.

    Args:
        failed: Path and status of each such run, at least one.
    """
    path, status = failed[0]
    if len(failed) == 1:
        return f"1 run failed before the first round; {path}, {status}"
    others = len({reason for _, reason in failed}) - 1
    more = f" ({others} other reason{'s' if others > 1 else ''}: see error.txt)" if others else ""
    return f"{len(failed)} runs failed before the first round; the first, {path}, {status}{more}"


def _to_finish(run: Run) -> str:
    """Return the command that resumes a run; if it cannot be resumed, "start it again: " with the reason."""
    from fedbench.simulation.run_folder import is_resumable  # slow to import
    from fedbench.simulation.status import resume_command

    try:
        return resume_command(run.path) if is_resumable(run.path) else "start it again: it has no checkpoint"
    except ConfigError as error:
        return f"start it again: {error}"


def _status(run: Run) -> str:
    """Return the status of an unfinished run, followed by the first line of its error.txt if it has this file.

    The status is that of summary.json.  Without summary.json, it is "failed" if there is an error.txt, and else that of
    status.json.  A run that was killed still has the status "running", which is returned as "interrupted".
    """
    path = run.path / "error.txt"
    status = run.summary.get("status")
    if not status:
        was_running = read_json(run.path / "status.json").get("status") in ("running", "interrupted")
        status = "failed" if path.is_file() else "running" if was_running else "no summary.json"
    if status == "running":
        return "interrupted"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    return f"{status}: {lines[0][:100]}" if lines else str(status)


def damage_notes(damaged: Mapping[Path, str], runs: list[Run]) -> list[str]:
    """Return a line for each damaged run: its path and what is damaged.

    Args:
        damaged: What is damaged in each unreadable run, by its path, from `fedbench.report.runs.readable`.
        runs: The readable runs, whose clients.csv may be damaged.
    """
    lines = [f"damaged, left out: {path}: {reason}" for path, reason in damaged.items()]
    return lines + [f"damaged, without its clients: {r.path}: {r.clients_error}" for r in runs if r.clients_error]
