"""``fedbench report --choose``: for each method, the trial (choice of options) with the best mean validation score.

    python -m fedbench -m algorithm=fedavg,fedper optimizer.lr=0.01,0.1 dataset.val_fraction=0.2 seed=0,1,2
    python -m fedbench report sweeps --choose

A trial is one choice of options of a method, run with several seeds.  The trial with the best validation score, as a
mean over seeds, is chosen.  Test scores are read after that, so they cannot influence the choice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.config.override_text import value_text
from fedbench.core.options import require
from fedbench.core.settings import is_matched
from fedbench.report import scores
from fedbench.report.display import label_columns
from fedbench.report.runs import Run
from fedbench.report.summary import DATA_PATHS, SETTING, differing, identity, over_seeds, sort_key
from fedbench.report.table import Column, Spread, Table

# Config keys that a search may change.  All other keys are the setting in which methods are compared.
TUNABLE = (
    *("algorithm.*", "optimizer.*", "local.*", "finetune.*", "server.*", "aggregator.*", "adapter.*", "compression.*"),
    *("choices.optimizer", "choices.server", "choices.aggregator", "choices.adapter", "choices.compression"),
    *("client_weights", "stop.*"),
)
SELECTIONS = ("last", "best_val")


@dataclass
class Trial:
    """Runs of a method with equal options and several seeds.

    Attributes:
        options: The values of the options in which the trials of the method differ, by config key.
        runs: The finished runs by seed and fold of cross-validation (None without).
        begun: The seeds and folds of all its runs, also of paused and failed ones.
    """

    options: dict[str, Any] = field(default_factory=dict)
    runs: dict[tuple[Any, Any], Run] = field(default_factory=dict)
    begun: set[tuple[Any, Any]] = field(default_factory=set)


@dataclass
class Study:
    """The trials (choices of options) of one method in one setting (data set, partition, model and so on).

    Attributes:
        method: The name of the method.
        setting: The values of the config keys in which the settings differ: from title of the column to value.
        trials: The trials, in the order of their options.
        conf: The folders of options in which the method is looked up; None for those of fedbench.
    """

    method: str
    setting: dict[str, Any]
    trials: list[Trial]
    conf: tuple[Path, ...] | None = None


@dataclass
class Choice:
    """The trial of a method with the best mean validation score in a setting.

    Attributes:
        study: The study.
        trial: The chosen trial.
        validation: Its validation score over the seeds (and folds) that all trials have in common.
        compared: These seeds and folds.
        tested: The seeds and folds of its test scores: those of the trial that are not in `compared`, or else all.
        edges: The chosen numbers that are the smallest or largest of the values that were tried, as texts.
        undefined: The number of trials whose validation score is not a number.
        unfinished: The number of trials that did not finish all rounds.
    """

    study: Study
    trial: Trial
    validation: Spread
    compared: list[tuple[Any, Any]]
    tested: list[tuple[Any, Any]]
    edges: list[str]
    undefined: int
    unfinished: int


def choice_table(runs: list[Run], metric: str, select: str) -> Table:
    """Return the table of ``report --choose``: the chosen options of each method, with validation and test scores.

    Args:
        runs: The runs of one or several searches.
        metric: A metric of test samples, personal/...  The same metric of validation samples decides.
        select: The round at which validation scores are compared: "last", or "best_val" for the best one of each run.

    Raises:
        ConfigError: No run is finished, the metric does not begin with personal/, or there are no validation scores.
    """
    scores.check_metric(metric, target=0, runs=runs)  # 0: a valid target, which is not used here
    require(
        metric.startswith("personal/"),
        f"--choose compares validation scores, which exist for personal metrics only: --metric is {metric}, and must "
        "begin with personal/",
    )
    choices = [choice for study in studies(runs) if (choice := choose(study, metric, select)) is not None]
    require(bool(choices), "--choose: no run in these folders is finished; run the sweep to its end first")
    return _table(choices, metric, select)


def studies(runs: list[Run]) -> list[Study]:
    """Return a study per method and setting (data set, partition, model), with its runs grouped by options as trials.

    Of several runs with equal options, seed and fold, the one that finished last is used.

    Args:
        runs: The runs.  Unfinished ones count as trials, but only finished ones can be chosen.  A method without a
            finished run in a setting has no study.
    """
    by_study: dict[tuple[Hashable, Hashable, str], list[Run]] = {}  # by (setting, hash of the data, method)
    runs = sorted(runs, key=lambda run: str(run.summary.get("finished")))  # by the time at which they finished
    with_data = [run for run in runs if run.summary.get("data_hash")]
    without = [run for run in runs if not run.summary.get("data_hash")]  # they failed before the data were read
    for run in with_data:
        by_study.setdefault((_setting_of(run), run.summary["data_hash"], run.method), []).append(run)
    for run in without:  # join the only study of their setting and method, if there is one
        matching_studies = [key for key in by_study if (key[0], key[2]) == (_setting_of(run), run.method)]
        key = matching_studies[0] if len(matching_studies) == 1 else (_setting_of(run), None, run.method)
        by_study.setdefault(key, []).append(run)
    by_study = {key: members for key, members in by_study.items() if any(run.finished for run in members)}
    titles = _setting_titles([members[0] for members in by_study.values()])
    all_studies = []
    for (_, _, method), members in by_study.items():
        values = {**identity(members[0]), **{name: members[0].choice(name) for name in SETTING}}
        setting = {title: values.get(key) for key, title in titles.items()}
        all_studies.append(Study(method, setting, _trials(members), members[0].conf))
    return sorted(all_studies, key=lambda study: (*map(sort_key, study.setting.values()), study.method))


def _setting_of(run: Run) -> Hashable:
    """Return the config entries of a run that must be equal in trials that are compared, such as its data set.

    These are all that affect results but are not in `TUNABLE`.

    Returns:
        A sorted tuple of pairs (key, repr of the value).
    """
    entries = identity(run)
    return tuple(sorted((key, repr(value)) for key, value in entries.items() if _is_setting(key)))


def _is_setting(key: str) -> bool:
    """Return whether a config key belongs to the setting in which methods are compared.

    Keys of the method do not, nor the fold of cross-validation.  Data are compared by their hash, not by their paths.
    """
    return not is_matched(key, TUNABLE) and key not in ("choices.algorithm", "fold", "data", *DATA_PATHS)


def _setting_titles(runs: list[Run]) -> dict[str, str]:
    """Return a dict from config key to column title, for the keys of the setting in which the runs differ.

    The setting is all that affects results and is not searched, such as the data set.  Data set, partition and model
    come first.  A difference in one of them hides the differences in its options.
    """
    varying = [name for name in SETTING if len({run.choice(name) for run in runs}) > 1]
    keys = [key for key in differing(runs) if _is_setting(key) and not key.startswith("choices.")]
    keys = [key for key in keys if key.partition(".")[0] not in varying]
    return {name: name for name in varying} | {key: key for key in keys}


def _trials(runs: list[Run]) -> list[Trial]:
    """Return the runs of a method on one data set, partition and so on as trials, one for each choice of options.

    A trial records the seeds (and folds) of all its runs under ``begun``, and its finished runs under ``runs``.
    """
    # TUNABLE: patterns of the options that a search may vary
    keys = [key for key in differing(runs) if is_matched(key, TUNABLE) and not key.endswith("_target_")]
    trials: dict[tuple[str, ...], Trial] = {}
    for run in runs:
        entries = identity(run)
        options = {key: entries.get(key) for key in keys}
        trial = trials.setdefault(tuple(map(repr, options.values())), Trial(options))
        key = (run.config.get("seed"), run.config.get("fold"))  # fold of cross-validation, None without
        trial.begun.add(key)
        if run.finished:
            trial.runs[key] = run
    return sorted(trials.values(), key=lambda trial: [sort_key(value) for value in trial.options.values()])


def choose(study: Study, metric: str, select: str) -> Choice | None:
    """Choose the trial with the best mean validation score.

    Trials are compared over the seeds and folds that they have in common.  Trials with an unfinished run among these
    are left out.  A trial with a score that is not a number is worse than any other.  Of equal trials the first is
    chosen.

    Args:
        study: The trials of a method.
        metric: A metric of test samples, personal/...
        select: The round of the validation score: "last" or "best_val".

    Returns:
        The choice; None if no trial is finished with all seeds.

    Raises:
        ConfigError: A run has no validation scores, or the trials have no seed in common.
    """
    common = set.intersection(*(trial.begun for trial in study.trials))
    require(
        bool(common),
        f"--choose: the trials of {study.method} have no seed in common, so their scores cannot be compared; run every "
        "value with the same seeds",
    )
    compared = sorted(common, key=str)
    finished = [trial for trial in study.trials if common <= set(trial.runs)]
    if not finished:
        return None
    sign = -1 if scores.lower_is_better(metric) else 1
    spreads = [over_seeds(validation_score(trial.runs[key], metric, select) for key in compared) for trial in finished]
    values = [sign * spread.mean if spread.count == spread.total else -math.inf for spread in spreads]
    best = max(range(len(finished)), key=lambda i: values[i])
    trial = finished[best]
    # seeds that did not take part in the choice give unbiased test scores
    fresh = [key for key in sorted(trial.runs, key=str) if key not in common]
    undefined = sum(spread.count < spread.total for spread in spreads)
    unfinished = len(study.trials) - len(finished)
    return Choice(
        study,
        trial,
        validation=spreads[best],
        compared=compared,
        tested=fresh or compared,
        edges=_edges(study, trial),
        undefined=undefined,
        unfinished=unfinished,
    )


def validation_score(run: Run, metric: str, select: str, until: int | None = None) -> float:
    """Return a validation score of a run.  Test scores are not read.

    Args:
        run: The run.
        metric: A metric of test samples, personal/...  The same metric of validation samples is returned.
        select: "last" for the last evaluated round, or "best_val" for the best one.
        until: The last round to consider; None for all.

    Raises:
        ConfigError: The run has no validation scores.
    """
    name = metric.replace("personal/", "val/", 1)
    values = scores.curve(run, name).loc[:until]
    require(
        len(values) > 0,
        f"--choose: {run.path} has no validation score {name}; set dataset.val_fraction, for example to 0.2, and run "
        "it again",
    )
    if select == "last":
        return float(values.iloc[-1])
    return float(values.min() if scores.lower_is_better(metric) else values.max())


def _edges(study: Study, chosen: Trial) -> list[str]:
    """Return the options of the best trial whose values are the smallest or largest that were tried.

    Args:
        study: All trials of the method.
        chosen: The best of these trials.

    Returns:
        Texts such as "optimizer.lr=0.1 (largest)"; [] if the best value of each numeric option lies between others.
    """
    texts = []
    for key, value in chosen.options.items():
        tried = {trial.options[key] for trial in study.trials if _is_number(trial.options[key])}
        if _is_number(value) and len(tried) > 1 and value in (min(tried), max(tried)):
            texts.append(f"{key}={value!r} ({'largest' if value == max(tried) else 'smallest'})")
    return texts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(study: Study) -> str:
    """Return the method and its setting as text, such as "fedper on mnist, dirichlet"."""
    setting = ", ".join(str(value) for value in study.setting.values())
    return f"{study.method} on {setting}" if setting else study.method


def _table(choices: list[Choice], metric: str, select: str) -> Table:
    """Return the table of the choices, sorted by setting and then by test score.

    Args:
        choices: The chosen trial of each method and setting (data set, partition, model).
        metric: A metric of test samples, personal/...
        select: The round of the test scores that sort the rows: "last" or "best_val".
    """
    sign = 1 if scores.lower_is_better(metric) else -1
    rows = [_row(choice, metric) for choice in choices]
    titles = list(choices[0].study.setting)
    rows.sort(key=lambda row: (*(sort_key(row[t]) for t in titles), not row[select].count, sign * row[select].mean))
    percent = scores.is_fraction(metric)
    digits, scale = (2, 100) if percent else (4, 1)
    conf = choices[0].study.conf
    columns = [
        *label_columns(["method", *titles], conf),
        Column("chosen", "chosen values"),
        Column("trials", "trials"),
        Column("n_val", "seeds"),
        Column("val", "validation", digits, scale),
        Column("n_test", "test seeds"),
        Column("last", "test, last round", digits, scale),
        Column("best_val", "test, best by val", digits, scale),
    ]
    title = f"{metric}{' (%)' if percent else ''}: options chosen by the mean validation score"
    return Table(title, columns, rows, _notes(choices, select), name="choices")


def _row(choice: Choice, metric: str) -> dict[str, Any]:
    """Return a row of the table of choices, as a dict from column to value.

    Args:
        choice: The chosen trial of a method in a setting (data set, partition, model).
        metric: The metric of its test scores, which are read only here, after the choice.  Without test seeds they are
            Spreads of count 0.
    """
    # compared: the seeds and folds of the validation scores; tested: those of the test scores
    runs = [choice.trial.runs[key] for key in choice.tested]
    test = {
        name: over_seeds(scores.value_at(run, metric, scores.selected_round(run, metric, name)) for run in runs)
        for name in SELECTIONS
    }
    return {
        "method": choice.study.method,
        **choice.study.setting,
        "chosen": " ".join(map(override, choice.trial.options.items())),
        "trials": len(choice.study.trials),
        "n_val": len(choice.compared),
        "val": choice.validation,
        "n_test": len(choice.tested),
        **test,
    }


def override(option: tuple[str, Any]) -> str:
    """Return the override for a config key and its value, such as "algorithm.mu=0.1" or "optimizer=adam"."""
    key, value = option
    return f"{key.removeprefix('choices.')}={value_text(value)}"


def _notes(choices: list[Choice], select: str) -> list[str]:
    """Return the lines below the table: what the columns mean, and warnings.

    Args:
        choices: The chosen trial of each method and setting (data set, partition, model).  compared: the seeds by
            which it was chosen; tested: those of its test scores, equal to compared or without a common seed.
        select: The round of the validation scores by which the trials were chosen: "last" or "best_val".
    """
    when = "at the last round" if select == "last" else "at the best round of each run by validation"
    lines = [
        f"validation: the score {when}, by which the values were chosen; a maximum over trials, and so too high. "
        "± is the population standard deviation over seeds.",
    ]
    fresh = [_name(choice.study) for choice in choices if choice.tested != choice.compared]
    if fresh:
        lines.append(f"Test scores are of seeds that had no part in the choice: {', '.join(fresh)}.")
    if len(fresh) < len(choices):
        others = ", ".join(_name(choice.study) for choice in choices if choice.tested == choice.compared)
        lines.append(f"Test scores are of the seeds by which the values were chosen: {others}.")
    counts: dict[tuple[Any, ...], dict[str, int]] = {}
    for choice in choices:
        setting = tuple(map(repr, choice.study.setting.values()))
        counts.setdefault(setting, {})[choice.study.method] = len(choice.study.trials)
    for by_method in counts.values():
        if len(set(by_method.values())) > 1:
            numbers = ", ".join(f"{method} {count}" for method, count in by_method.items())
            lines.append(f"warning: methods had different numbers of trials, which favours those with more: {numbers}")
    edges = [f"{_name(choice.study)} {', '.join(choice.edges)}" for choice in choices if choice.edges]
    if edges:
        lines.append(
            "warning: these chosen values are the smallest or largest that were tried, so that better ones may lie "
            f"beyond them: {'; '.join(edges)}"
        )
    if undefined := [f"{_name(choice.study)} {choice.undefined}" for choice in choices if choice.undefined]:
        lines.append(f"warning: trials whose validation score is not a number: {', '.join(undefined)}")
    unfinished = [f"{_name(c.study)} {c.unfinished} of {len(c.study.trials)}" for c in choices if c.unfinished]
    if unfinished:
        lines.append(f"Trials that did not finish all rounds: {', '.join(unfinished)}.")
    return lines
