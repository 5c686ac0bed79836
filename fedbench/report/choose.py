"""``fedbench report --choose KEY``: for each client, the value of an option with the best validation score.

    python -m fedbench -m algorithm=pgfed algorithm.mu=0.05,0.5,2 seed=0,1,2 dataset.val_fraction=0.2 sweep_dir=sweep
    python -m fedbench report sweep --choose algorithm.mu
    python -m fedbench algorithm=pgfed dataset.val_fraction=0.2 'algorithm.mu=[2,0.05,2,...]'      # from the report

With cross-validation, each value is run on all folds, and folds are treated like seeds:

    python -m fedbench -m algorithm=ditto algorithm.lam=0.1,1 folds=5 fold=0,1,2,3,4 sweep_dir=sweep
    python -m fedbench report sweep --choose algorithm.lam
    python -m fedbench algorithm=ditto algorithm.lam=1        # on all training samples, from the report

The score of a client under a value is its validation metric at the last evaluated round, averaged over seeds and folds.
If several values are equally good for a client, or if it has no validation score, it gets the one of them that is best
on average over clients.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.output import report_damage, runs_of
from fedbench.report.runs import Run
from fedbench.report.summary import differing, over_seeds
from fedbench.report.table import Column, DataFrame, Series, Table, pandas


@dataclass
class Sweep:
    """Scores of each client in runs that differ in the value of a config key.

    Attributes:
        key: The config key.
        values: Its values, ascending.
        scores: The clients' scores: columns val and test, indexed by value (its index in ``values``), seed (with
            fold) and client.
        folds: The number of folds of cross-validation; None without.
    """

    key: str
    values: list[float]
    scores: DataFrame
    folds: int | None = None


def choose_command(args: argparse.Namespace) -> list[Table]:
    """Return a list of one table: the scores with each client's best value of the config key ``--choose KEY``.

    Args:
        args: The parsed flags of ``fedbench report``.  ``args.choose`` is the key, such as "finetune.epochs".
    """
    runs, damaged = runs_of(args)
    report_damage(damaged, [], [], "csv")  # "csv": on standard error, instead of in tables
    return [choose(runs, args.choose, args.metric or scores.primary_metric(runs))]


def choose(runs: list[Run], key: str, metric: str = "personal/accuracy") -> Table:
    """Return a table that compares the values of a config key, for all clients together and for each client.

    Args:
        runs: Runs that differ only in the key, the seed and the fold of cross-validation.
        key: A config key with numbers as values, such as algorithm.mu.
        metric: A metric of test samples, personal/...  The same metric of validation samples is compared.

    Returns:
        A row per value, with the number of clients for which it is best, and its validation and test scores: means over
        clients, then mean and spread over seeds.  In the last row, each client is scored under its own best value.
        The notes contain the best values as an override to paste.

    Raises:
        ConfigError: The runs lack validation metrics or clients, or differ in other keys or in their partition.
    """
    sweep = read_sweep(runs, key, metric)  # sweep.scores: columns val and test, indexed by value, seed and client
    lower_is_better = scores.lower_is_better(metric)
    # In the index of sweep.scores, "value" is a position in sweep.values, and "seed" is a pair of seed and fold.
    val = sweep.scores["val"].unstack("client")  # [values and seeds, N]
    chosen, tied = best_values(val.groupby("value").mean(), lower_is_better)  # chosen [N]: indices of sweep.values
    rows = [_row(repr(sweep.values[position]), int((chosen == position).sum()), scores_of_value)
            for position, scores_of_value in sweep.scores.groupby("value")]  # fmt: skip
    index = sweep.scores.index
    is_chosen = index.get_level_values("value") == chosen.loc[index.get_level_values("client")].to_numpy()
    rows.append(_row("each its own", len(chosen), sweep.scores[is_chosen].sort_index(level="client")))
    percent = scores.is_fraction(metric)
    digits, scale = (2, 100) if percent else (4, 1)
    columns = [Column("value", key), Column("clients", "clients"), Column("val", "validation", digits, scale),
               Column("test", "test", digits, scale)]  # fmt: skip
    seeds = len(val) // len(sweep.values)
    unit = "fold" if sweep.folds == seeds else "seed"  # "fold" for cross-validation with a single seed
    title = (f"{metric}{' (%)' if percent else ''}: {key} by each client's own validation part, "
             f"{seeds} {unit}{'s' if seeds != 1 else ''}")  # fmt: skip
    notes = [
        f"{tied} of {len(chosen)} clients had several best values: they take the one that is best on average.",
        "each its own: the scores of clients in these runs under their best values. The validation score is a maximum, "
        "and therefore too high. For a run with these values, paste the override:",
        override(key, [sweep.values[position] for position in chosen]),
    ]
    if sweep.folds:
        mean = sweep.scores["val"].groupby("value").mean()
        best = sweep.values[mean.idxmin() if lower_is_better else mean.idxmax()]
        notes.insert(0, f"One for all, by {sweep.folds}-fold cross-validation: {key}={best!r}, with folds=null on all "
                        "training samples.")  # fmt: skip
    return Table(title, columns, rows, notes, name="values")


def _row(value: str, clients: int, client_scores: DataFrame) -> dict[str, Any]:
    """Return a row of the table, with mean and standard deviation over seeds of the mean over clients.

    Args:
        value: The value of the key, as text.
        clients: The number of clients for which the value is best.
        client_scores: The validation and test scores (columns val and test), a row per seed and client.
    """
    means = client_scores.groupby("seed").mean()
    return {"value": value, "clients": clients, "val": over_seeds(means["val"]), "test": over_seeds(means["test"])}


def best_values(val: DataFrame, lower_is_better: bool = False) -> tuple[Series, int]:
    """Return the best value of each client, and how many clients have several best values.

    Args:
        val: Validation scores [values, N].
        lower_is_better: Whether lower scores are better.

    Returns:
        The index of the best row of ``val`` for each client [N], and the number of clients with several best rows.
        Among several, and for a client without scores, it is the row with the best average over clients.
    """
    val = -val if lower_is_better else val
    # Equal scores may differ by rounding.  For a client without scores, all values count as best.
    is_best = (val >= val.max() - 1e-12) | val.isna().all()  # [values, N]
    average = val.mean(axis=1)  # [values]
    best = is_best.mul(1.0).where(is_best).mul(average, axis=0).idxmax()  # the average where best, else NaN
    return best, int((is_best.sum() > 1).sum())


def override(key: str, values: list[float]) -> str:
    """Return the override for a run in which each client has its own value, such as ``'algorithm.mu=[2,0.5]'``.

    Args:
        key: The config key.
        values: The values by client [N].
    """
    return f"'{key}=[{','.join(map(repr, values))}]'"


def read_sweep(runs: list[Run], key: str, metric: str) -> Sweep:
    """Return the clients' last validation and test scores, for each value of the key, seed and fold.

    Runs that are not finished, or have no number under the key, are left out.  Of several runs with the same value,
    seed and fold, the one that finished last is used.

    Args:
        runs: The runs.
        key: The config key.
        metric: A metric of test samples, personal/...

    Raises:
        ConfigError: The metric is unknown or not personal/..., the runs differ in other keys or in their partition,
            or a run or its scores of clients are missing.
    """
    scores.check_metric(metric, target=0, runs=runs)  # 0: a valid target, which is not used here
    require(
        metric.startswith("personal/"),
        f"--choose {key} compares validation scores of clients, which exist for personal metrics only: "
        f"--metric must be personal/..., got {metric}",
    )
    runs = [run for run in runs if run.finished and _is_number(run.flat_config.get(key))]
    runs.sort(key=lambda run: str(run.summary.get("finished")))  # by the time at which they finished
    _check_comparable(runs, key)
    folds = runs[0].flat_config.get("folds")  # number of folds of cross-validation or None, the same in all runs
    run_of = {(run.flat_config[key], run.seed, run.flat_config.get("fold")): run for run in runs}
    values = sorted({value for value, _, _ in run_of})
    seeds_and_folds = {(seed, fold) for _, seed, fold in run_of}
    if folds is not None:  # every seed needs all folds
        seeds_and_folds = {(seed, fold) for seed, _ in seeds_and_folds for fold in range(folds)}
    expected = [(value, seed, fold) for value in values for seed, fold in sorted(seeds_and_folds)]
    missing = [f"{key}={value!r} seed={seed}" + (f" fold={fold}" if folds else "")
               for value, seed, fold in expected if (value, seed, fold) not in run_of]  # fmt: skip
    require(
        not missing,
        f"--choose {key}: there is no finished run of {', '.join(missing[:3])}: every value must have the same seeds "
        "and folds, so run it, or leave out the folders of this value",
    )
    columns = {"test": metric, "val": metric.replace("personal/", "val/", 1)}
    tables = {}  # by position of the value, and seed with fold: columns test and val, a row per client
    for value, seed, fold in expected:
        run = run_of[value, seed, fold]
        last = {name: _last_scores(run, column, key) for name, column in columns.items()}
        tables[values.index(value), str((seed, fold))] = pandas().DataFrame(last)
    return Sweep(key, values, pandas().concat(tables, names=["value", "seed", "client"]), folds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_comparable(runs: list[Run], key: str) -> None:
    """Check that the runs differ in the key, and in nothing else but the seed and the fold of cross-validation.

    Args:
        runs: Finished runs, each with a number under the key.
        key: A dotted config key, such as "algorithm.mu".

    Raises:
        ConfigError: They have fewer than two values of the key, differ in other keys, or have several partitions (of
            one fold, with cross-validation).
    """
    values = {run.flat_config[key] for run in runs}
    problem = (
        f"all {len(runs)} finished runs have {key}={next(iter(values), None)}" if values else "no such run was found"
    )
    require(
        len(values) > 1,
        f"--choose {key} needs finished runs with at least two numbers for {key}, but {problem}: add runs with another "
        "value, or name another key",
    )
    # differing() ignores the seed.  Options of config groups are stored under keys such as choices.algorithm.
    others = [k.removeprefix("choices.") for k in differing(runs) if k not in (key, "fold")]
    require(
        not others,
        f"--choose {key}: the runs differ in {', '.join(others[:4])} too; give folders whose runs "
        f"differ in {key} and the seed only",
    )
    partitions = {(run.flat_config.get("fold"), run.summary.get("partition_hash")) for run in runs}
    require(  # one partition for each fold
        len(partitions) == len({fold for fold, _ in partitions}),
        f"--choose {key}: the runs have {len(partitions)} different partitions (partition_hash in summary.json), so "
        "that their clients are not the same: give folders of runs with one partition",
    )


def _last_scores(run: Run, metric: str, key: str) -> Series:
    """Return a metric of all clients at the last evaluated round [N].

    Args:
        run: The run.
        metric: A column of clients.csv.
        key: The config key of ``--choose``, for error messages.

    Raises:
        ConfigError: clients.csv is damaged, or it lacks the metric or some clients.
    """
    values = run.clients(metric)  # [rounds, N]
    require(run.clients_error is None, f"--choose {key}: {run.path}: {run.clients_error}")
    remedy = (
        f"set dataset.val_fraction, e.g. 0.2, and run again: clients choose by their own validation "
        f"{metric.partition('/')[2]}" if metric.startswith("val/") else "choose by a metric that the runs have"
    )  # fmt: skip
    require(len(values) > 0, f"--choose {key}: {run.path / 'clients.csv'} has no column {metric}; {remedy}")
    total = int(run.summary["num_clients"])
    require(
        values.shape[1] == total,
        f"--choose {key}: {run.path} evaluated {values.shape[1]} of its {total} clients; run with eval.clients=null",
    )
    last = values.iloc[-1]
    is_defined = run.flat_config.get("folds") is not None or last.notna().any()  # one fold may have no samples
    require(is_defined, f"--choose {key}: no client of {run.path} has a {metric}; choose another --metric")
    return last
