"""``fedbench report --compare``: differences between methods, paired over seeds, with their tests.

    python -m fedbench -m algorithm=pgfed,fedavg_local seed=0,1,2,3,4,5,6 sweep_dir=sweep
    python -m fedbench report sweep --compare pgfed fedavg_local
    python -m fedbench report sweep --compare pgfed                     # against every other method

Two runs are a pair if they have the same setting (data set, partition, model and others) and the same seed.  The seeds
are the repetitions: the clients of a seed share initialization and cohorts, and are therefore not independent.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

from fedbench.core.options import require
from fedbench.report import scores, statistics
from fedbench.report.differences import (
    data_notes,
    differences_for_readers,
    differences_table,
    explanations,
    few_seeds_notes,
)
from fedbench.report.display import for_readers
from fedbench.report.figures import by_setting
from fedbench.report.method_names import display_name, find_method, name_methods, set_settings
from fedbench.report.output import report_damage, runs_of
from fedbench.report.paired_scores import differences_of, read_settings
from fedbench.report.ranking import ranks_of, ranks_table, too_few
from fedbench.report.scores import Options
from fedbench.report.summary import Group, group_runs
from fedbench.report.table import MACHINE_FORMATS, OBJECT, DataFrame, Table, pandas


def compare_methods(args: argparse.Namespace, table_format: str) -> tuple[list[Table], list[Path]]:
    """Return the tables of ``fedbench report --compare``, and the path of its figure.

    The tables are the differences, the average ranks if there are several settings, and the notes.  CSV and JSON have
    the differences only.

    Args:
        args: The parsed command line.
        table_format: The format of the tables.

    Raises:
        ConfigError: A method is unknown or ambiguous, runs are not comparable, or a figure is not possible.
    """
    runs, damaged = runs_of(args)
    metric = args.metric or scores.primary_metric(runs)
    options = Options(metric, args.select, group=args.group.split(",") if args.group else None)
    scores.check_metric(metric, target=0, runs=runs)  # 0: a valid target, which is not used here
    groups, repeated = group_runs(runs, options.group)  # repeated: the number of runs that later ones replace
    if options.group is not None:  # the settings are the values of the keys of --group that are not of the method
        set_settings(groups, options.group)
    methods = name_methods(by_setting(groups))  # by name of the method, and then by description of the setting
    pairs = find_pairs(args, methods)
    settings = read_settings({name: methods[name] for pair in pairs for name in pair}, options)
    differences = [difference for setting in settings for difference in differences_of(setting, pairs)]
    require(
        bool(differences),
        f"--compare {' '.join(args.compare)}: no setting has two runs with the same seed and a {metric} at the "
        f"{options.select} round: run the methods with the same seeds"
        + (" and dataset.val_fraction=0.2" if options.select == "best_val" else ""),
    )
    ranks = ranks_of(settings, options) if len(settings) > 1 else pandas().DataFrame()
    names = {name: display_name(name, next(iter(groups.values()))) for name, groups in methods.items()}
    figures = draw(args, ranks, names)
    tables = [differences_table(differences, names, options)]
    if table_format not in MACHINE_FORMATS:  # a table for readers, or OBJECT: one JSON object (--json)
        tables += [ranks_table(settings, ranks, names, options)] if len(settings) > 1 else []
        if table_format != OBJECT:
            tables = [differences_for_readers(tables[0]), *(for_readers(table, ["method"]) for table in tables[1:])]
        lines = [
            *explanations(options),
            *few_seeds_notes(differences),
            *data_notes(settings, pairs, differences, names),
        ]
        if repeated:
            lines.append(f"{repeated} earlier runs are left out: a later run has the same configuration and seed.")
        if unfinished := sum(not run.finished for run in runs):
            lines.append(f"{unfinished} unfinished runs are left out.")
        tables.append(Table("", [], notes=lines))
    report_damage(damaged, runs, tables, table_format)
    return tables, figures


def find_pairs(args: argparse.Namespace, methods: dict[str, dict[str, Group]]) -> list[tuple[str, str]]:
    """Return the pairs of methods to compare: all pairs of the given ones, or the only given one with each other one.

    Args:
        args: The parsed command line.
        methods: From the name of a method, and then from the description of a setting, such as "mnist, dirichlet, cnn",
            to a group of runs.

    Raises:
        ConfigError: A method is unknown, ambiguous or given twice, or there is no other one.
    """
    chosen = [find_method(text, methods) for text in args.compare]
    require(len(set(chosen)) == len(chosen), f"--compare {' '.join(args.compare)} names a method twice: leave one out")
    pairs = [*combinations(chosen, 2)] or [(chosen[0], other) for other in sorted(methods) if other != chosen[0]]
    require(
        bool(pairs), f"--compare {chosen[0]}: there are no finished runs of another method to compare it with: run one"
    )
    return pairs


def draw(args: argparse.Namespace, ranks: DataFrame, names: dict[str, str]) -> list[Path]:
    """Draw the critical-difference diagram if the user gave ``--figures``, and return its path in a list.

    Args:
        args: The parsed command line.
        ranks: The ranks of K methods, the best first, in M settings [M, K]; empty if there is only one setting.
        names: From the name of a method to its displayed name.

    Raises:
        ConfigError: There are too few methods or settings.
    """
    if args.figures is None:
        return []
    reason = too_few(ranks)
    require(reason is None, f"--figures with --compare draws a critical-difference diagram: {reason}; leave it out")
    from fedbench.report.critical_difference import draw_critical_difference
    from fedbench.report.drawing import figure_files

    difference = statistics.critical_difference(ranks.shape[1], len(ranks))
    path = figure_files("--figures", args.figures).path("critical_difference")
    return [draw_critical_difference([names[name] for name in ranks], ranks.mean().to_numpy(), difference, path)]
