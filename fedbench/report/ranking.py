"""Average ranks of methods over settings (data sets, partitions, models), with Friedman's test, and win rates."""

from __future__ import annotations

from collections.abc import Iterable

from fedbench.report import scores, statistics
from fedbench.report.paired_scores import Setting
from fedbench.report.scores import Options
from fedbench.report.statistics import LEVEL
from fedbench.report.table import Column, DataFrame, Table, pandas

MIN_METHODS = 3  # of Friedman's test
MIN_SETTINGS = 5


def ranks_of(settings: list[Setting], options: Options) -> DataFrame:
    """Return the ranks of the methods [M, K], the best method first, in the settings in which all have scores.

    Args:
        settings: The scores of the methods in each setting (data set, partition, model and so on).
        options: The metric, which determines whether lower is better.

    Returns:
        The ranks of the means over those seeds that all methods have, by description of the setting and method.
    """
    names = list(dict.fromkeys(name for setting in settings for name in setting.groups))
    means = {s.description: s.means.reindex(columns=names).dropna().mean() for s in settings}
    table = pandas().DataFrame(means).T.dropna()  # [M, K]
    values = statistics.ranks(table.to_numpy(), scores.lower_is_better(options.metric))
    ranks = pandas().DataFrame(values, table.index, names)
    return ranks[ranks.mean().sort_values(kind="stable").index]


def win_rates(settings: list[Setting], names: Iterable[str], options: Options) -> DataFrame:
    """Return how often each method is better than each other one, as a fraction of settings and seeds; ties count half.

    Args:
        settings: The scores of the methods in each setting (data set, partition, model and so on).
        names: The methods, in the order of rows and columns.
        options: The metric, which determines whether lower is better.

    Returns:
        A DataFrame [K, K]: rows are the methods, columns those that they are compared with.
    """
    means = pandas().concat([setting.means.reindex(columns=list(names)) for setting in settings])  # [M * S, K]
    better = -1 if scores.lower_is_better(options.metric) else 1
    wins = {}
    for against in names:
        differences = means.sub(means[against], axis=0)  # their signs -1, 0, 1 become 0, 1/2, 1 wins
        wins[against] = ((1 + better * differences.apply(statistics.signs)) / 2).mean()
    return pandas().DataFrame(wins)


def ranks_table(settings: list[Setting], ranks: DataFrame, names: dict[str, str], options: Options) -> Table:
    """Return the table of average ranks and win rates, with a row per method and tests in the notes.

    Args:
        settings: The scores of the methods in each setting (data set, partition, model and so on).
        ranks: The ranks of K methods in M settings [M, K], 1 for the best.
        names: From the name of a method to its displayed name.
        options: The metric, which determines whether lower is better.
    """
    wins = win_rates(settings, ranks.columns, options)
    average = ranks.mean()
    rows = []
    for name in ranks.columns:
        # marked by a dagger: the method fine-tunes after the last round only
        tuned = any(s.groups[name].tuned for s in settings if name in s.groups)
        rates = {f"wins_{other}": wins.loc[name, other] for other in ranks.columns if other != name}
        rows.append({"method": name, "tuned": tuned, "rank": float(average[name])} | rates)
    columns = [
        Column("method", "method", display=names.__getitem__, dagger_key="tuned"),
        Column("rank", "average rank"),
        *(Column(f"wins_{other}", f"against {names[other]}", digits=1, scale=100) for other in ranks.columns),
    ]
    notes = [
        "average rank: 1 is best. Methods are ranked in each setting by their means over the seeds that all have. "
        "against: the part of settings and seeds in which the method is better than that one (%); ties count half.",
    ]
    left_out = [s.description for s in settings if s.description not in ranks.index]
    if left_out:
        notes.append(f"Not in the ranks, because a method has no score there: {'; '.join(left_out)}.")
    title = f"average ranks over {len(ranks)} settings, and win rates (%)"
    return Table(title, columns, rows, [*notes, *friedman_notes(settings, ranks)], name="ranks")


def friedman_notes(settings: list[Setting], ranks: DataFrame) -> list[str]:
    """Return Friedman's test and the critical difference as text, or why there are none.

    Args:
        settings: The scores of the methods in each setting (data set, partition, model and so on).
        ranks: The ranks of K methods in M settings [M, K].
    """
    if (reason := too_few(ranks)) is not None:
        return [f"No test of the ranks: {reason}."]
    count, methods = ranks.shape
    statistic, p = statistics.friedman(ranks.to_numpy())
    difference = statistics.critical_difference(methods, count)
    lines = [
        f"Friedman's test of {methods} methods in {count} settings: chi-squared = {statistic:.2f}, p = {p:.2g}. "
        f"Nemenyi's critical difference at {LEVEL:g} is {difference:.2f}: two methods differ if their average ranks "
        "differ by more (Demsar, 2006)."
    ]
    if p >= LEVEL:
        lines.append("Friedman's test finds no difference, so that no two methods may be called different by ranks.")
    datasets = {group.runs[0].choice("dataset") for s in settings for group in s.groups.values()}
    if len(datasets) < len(settings):
        lines.append(
            f"The test takes settings as independent, but {len(settings)} settings have {len(datasets)} data sets: its "
            "p is too small if settings of one data set are alike."
        )
    return lines


def too_few(ranks: DataFrame) -> str | None:
    """Return why the ranks cannot be tested; None if they can.

    Args:
        ranks: The ranks of K methods in M settings [M, K].
    """
    if len(ranks) >= MIN_SETTINGS and ranks.shape[1] >= MIN_METHODS:
        return None
    return (
        f"it needs at least {MIN_METHODS} methods and {MIN_SETTINGS} settings with scores of all methods, "
        f"got {ranks.shape[1]} and {len(ranks)}"
    )
