"""The table of differences between methods in each setting (data set, partition, model), with tests and notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fedbench.report import scores, statistics
from fedbench.report.display import for_readers, label_columns, legend_name
from fedbench.report.method_names import full_name
from fedbench.report.paired_scores import Difference, Setting
from fedbench.report.scores import Options
from fedbench.report.statistics import FLIPS, LEVEL, MIN_SEEDS, RESAMPLES, seeds_needed, smallest_p
from fedbench.report.summary import METHOD_PREFIXES, common_facts, differing, over_seeds
from fedbench.report.table import Column, Table


def differences_table(found: list[Difference], names: dict[str, str], options: Options) -> Table:
    """Return the table of differences, with a row for each setting and pair of methods.

    A dagger marks methods that fine-tune after the last round only.

    Args:
        found: The differences, at least one.
        names: From the name of a method to its displayed name.
        options: The metric, and the round at which it is taken: last, best or best_val.
    """
    lower_is_better = scores.lower_is_better(options.metric)
    rows = []
    for setting in {id(d.setting): d.setting for d in found}.values():  # each setting once, in order
        members = [_row(d, lower_is_better) for d in found if d.setting is setting]
        tested = [row for row in members if row["p"] is not None]  # with enough seeds for a test
        for row, p in zip(tested, statistics.holm(np.array([row["p"] for row in tested]))):
            row["p_holm"] = float(p)
        rows += members
    percent = scores.is_fraction(options.metric)
    scale, digits = (100, 2) if percent else (1, 4)
    columns = [  # each: key in the rows, heading, decimal places, factor
        Column("n", "n"),
        Column("difference", "difference", digits, scale),
        Column("low", "95% low", digits, scale),
        Column("high", "95% high", digits, scale),
        Column("p", "p", digits=5),
        Column("p_holm", "p (Holm)", digits=5),
        *(Column(key, key) for key in ("better", "equal", "worse")),
        Column("effect", "d_z"),  # Cohen's: mean difference / standard deviation of the differences
    ]
    groups = list({id(group): group for d in found for group in d.groups}.values())
    labels = [key for key in groups[0].labels if key in groups[0].setting]  # without those of the method
    methods = [Column(key, key, display=names.__getitem__, dagger_key=f"{key}_tuned") for key in ("method", "against")]
    unit = " (percentage points)" if percent else ""
    title = f"differences of {options.metric}{unit}: {common_facts(groups)}"
    return Table(title, [*label_columns(labels, groups[0].conf), *methods, *columns], rows, name="differences")


def _row(difference: Difference, lower_is_better: bool) -> dict[str, Any]:
    """Return a row of the table of differences as a dict from column to value; the caller adds "p_holm".

    With fewer than `MIN_SEEDS` seeds, p is None and the row has no interval.  If the clients are not the same for all
    seeds, the row does not have the numbers of clients that are better, equal and worse.  A true value under
    "method_tuned" or "against_tuned" marks a method with a dagger: it fine-tunes after the last round only.

    Args:
        difference: The scores of one method minus those of another one, by seed and by client.
        lower_is_better: Whether lower values of the metric are better.
    """
    means = difference.means.to_numpy()  # [S], for each seed the difference of the means over clients
    groups = difference.groups  # (that of the method, that of the method it is compared to)
    row = groups[0].setting | {
        "method": difference.method,
        "against": difference.against,
        "method_tuned": groups[0].tuned,
        "against_tuned": groups[1].tuned,
        "n": len(means),
        "difference": over_seeds(means),
        "p": None,
        "effect": statistics.standardized_mean(means),
    }
    if len(means) >= MIN_SEEDS:
        row["low"], row["high"] = statistics.bootstrap_interval(means)
        # [S, N]; without scores of clients, [S, 1]: the mean of a seed counts as one client
        clients = difference.clients.to_numpy() if difference.clients.size else means[:, None]
        row["p"] = float(statistics.signed_rank_p(clients))
    if difference.has_same_clients:
        signs = statistics.signs(difference.clients.mean().dropna().to_numpy()) * (-1 if lower_is_better else 1)
        row |= {name: int((signs == sign).sum()) for name, sign in (("better", 1), ("equal", 0), ("worse", -1))}
    return row


def differences_for_readers(table: Table) -> Table:
    """Return a table of differences between methods as people read it, rather than programs.

    The columns better, equal and worse (numbers of clients) become one, such as "5 / 0 / 3".  Columns whose cells
    are all equal move to the title (`drop_redundant`).
    """
    counts = ("better", "equal", "worse")
    rows = []
    for row in table.rows:
        numbers = [str(row[key]) for key in counts if key in row]
        rows.append(row | {"clients": " / ".join(numbers) or None})
    columns = [column for column in table.columns if column.key not in counts]
    keys = [column.key for column in columns]
    labels = keys[
        : keys.index("method") + 1
    ]  # without "against": a label whose words occur in the method would be dropped
    shortened = for_readers(replace(table, columns=columns, rows=rows), labels)
    return replace(shortened, columns=[*shortened.columns, Column("clients", " / ".join(counts))])


def explanations(options: Options) -> list[str]:
    """Return the lines that explain the columns of the table of differences.

    Args:
        options: The metric, and the round at which it is taken: last, best or best_val.
    """
    round = "last round" if options.select == "last" else "round with the best validation score"
    direction = "Lower" if scores.lower_is_better(options.metric) else "Higher"
    return [
        f"difference: method minus against, of the mean over clients at the {round} (--select), for the same seed; "
        f"mean ± population standard deviation (ddof=0) over n seeds. {direction} values of {options.metric} are "
        "better.",
        f"95% low, high: percentile bootstrap of the mean over seeds ({RESAMPLES:,} resamples). With few seeds, the "
        "interval is too narrow.",
        "p: two-sided signed-rank test over seeds and clients, clustered by seed: the signs of all clients of a seed "
        "change together (Rosner, Glynn and Lee, 2006). p (Holm): corrected for all pairs of methods in the setting.",
        "better / equal / worse: number of clients, by their mean difference over seeds. d_z: mean difference divided "
        "by the sample standard deviation (ddof=1) of the differences over seeds.",
    ]


def few_seeds_notes(found: list[Difference]) -> list[str]:
    """Return lines about numbers of seeds with which no p can be below LEVEL = 0.05, or with which there is no test.

    A test of n seeds compares all 2^n choices of signs of the differences, or FLIPS random ones if these are
    more.  Another line says so.

    Args:
        found: The differences between pairs of methods, by setting and pair.
    """
    tested = Counter(d.setting.description for d in found if len(d.means) >= MIN_SEEDS)  # pairs with a test, by setting
    lines = []
    # seeds_needed(k): the number of seeds with which a p can be below LEVEL after a correction for k pairs
    for n in sorted({len(d.means) for d in found if len(d.means) < MIN_SEEDS}):
        lines.append(
            f"n = {n}: too few seeds for a test and an interval, which need at least {MIN_SEEDS}: run "
            f"{MIN_SEEDS - n} more, or {seeds_needed(1) - n} more for a p below {LEVEL:g}."
        )
    # (number of seeds, number of tested pairs in the setting)
    cases = {(len(d.means), tested[d.setting.description]) for d in found if len(d.means) >= MIN_SEEDS}
    for n, pairs in sorted(cases):
        if (smallest := smallest_p(n)) > LEVEL:
            lines.append(
                f"n = {n}: no p below {smallest:.4g} is possible; a p below {LEVEL:g} needs {seeds_needed(1)} seeds."
            )
        if pairs > 1 and pairs * smallest > LEVEL:
            lines.append(
                f"n = {n}: no p (Holm) of {pairs} pairs below {min(1, pairs * smallest):.4g} is possible; one below "
                f"{LEVEL:g} needs {seeds_needed(pairs)} seeds."
            )
        if 2**n > FLIPS:
            lines.append(f"n = {n}: p is of {FLIPS:,} random changes of signs instead of all 2^{n}.")
    return lines


def data_notes(
    settings: list[Setting], pairs: list[tuple[str, str]], found: list[Difference], names: dict[str, str]
) -> list[str]:
    """Return lines about seeds without a partner, clients without a score, and further differences of runs.

    Args:
        settings: The scores of the methods in each setting (data set, partition, model and so on).
        pairs: The names of two compared methods each: (method, against).
        found: The differences between pairs of methods, by setting and pair.
        names: From the name of a method to its displayed name.
    """
    by_line: dict[str, list[str]] = {}  # the descriptions of the settings to which a line applies
    for setting in settings:
        lines = [  # explain names that leave out the options of the method
            f"{names[name]} is {legend_name(group.method_labels, conf=group.conf)}"
            for name, group in setting.groups.items()
            if name != full_name(group)
        ]
        for method, against in pairs:
            if {method, against} <= setting.groups.keys():
                lines += _run_notes(setting, method, against, names)
        for difference in found:
            if difference.setting is setting:
                title = f"{names[difference.method]} against {names[difference.against]}"
                lines += [f"{title}: {line}" for line in _client_notes(difference)]
        for line in lines:
            by_line.setdefault(line, []).append(setting.description)
    if len(settings) == 1:
        return [f"{line}." for line in by_line]
    return [f"{line} (in {'; '.join(descriptions)})." for line, descriptions in by_line.items()]


def _run_notes(setting: Setting, method: str, against: str, names: dict[str, str]) -> list[str]:
    """Return lines about seeds that only one of two methods has, and config keys in which their runs differ.

    Args:
        setting: The setting with the runs of both methods.
        method: The name of the first method.
        against: The name of the second method.
        names: From the name of a method to its displayed name.
    """
    lines = []
    scored = setting.means[[method, against]].notna()
    for name, other in ((method, against), (against, method)):
        seeds = scored.index[scored[name] & ~scored[other]]
        if len(seeds):
            numbers = ", ".join(map(str, seeds))
            lines.append(f"Left out: {names[name]} with seed {numbers}, because {names[other]} has no score with it")
    if not scored.all(axis=1).any():
        lines.append(f"Not compared: {names[method]} and {names[against]} have no score with the same seed")
    runs = [setting.groups[name].runs[0] for name in (method, against)]  # METHOD_PREFIXES: keys of the method itself
    keys = [key.removeprefix("choices.") for key in differing(runs) if not key.startswith(METHOD_PREFIXES)]
    if keys:
        lines.append(
            f"{names[method]} and {names[against]} differ in more than the method: {', '.join(keys[:4])}"
        )  # the first four
    return lines


def _client_notes(difference: Difference) -> list[str]:
    """Return the notes of a comparison about scores of single clients; [] if none applies.

    There are four: no scores, so that p is over seeds alone; partitions that differ between seeds; clients without a
    score; and means over different clients, because some have a score with one of the two methods only.
    """
    if not difference.clients.size:
        return ["p is over seeds alone, because there are no scores of single clients"]
    lines = []
    if not difference.has_same_clients:
        lines.append("the partitions of the seeds differ, so that clients are not counted as better or worse")
    count = int(difference.clients.notna().sum(axis=1).min())
    total = difference.groups[0].runs[0].summary.get("num_clients")
    if total is not None and count < total:
        lines.append(f"p is over {count} of {total} clients (undefined scores, or eval.clients)")
    for seed in difference.means.index:
        first, second = (difference.setting.clients[name, seed] for name in (difference.method, difference.against))
        if set(first.dropna().index) != set(second.dropna().index):
            lines.append("the means are over different clients, because some have a score in one of the runs only")
            break
    return lines
