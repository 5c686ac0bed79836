"""``--choose KEY``: for every client the value of a swept option that does best on its own validation part.

    python -m fedbench -m algorithm=pgfed algorithm.mu=0.05,0.5,2 seed=0,1,2 dataset.val_fraction=0.2 sweep_dir=sweep
    python -m fedbench report sweep --choose algorithm.mu
    python -m fedbench algorithm=pgfed dataset.val_fraction=0.2 'algorithm.mu=[2,0.05,2,...]'      # as the report says

With cross-validation every value is run on every fold, and a fold counts as a seed does:

    python -m fedbench -m algorithm=ditto algorithm.lam=0.1,1 folds=5 fold=0,1,2,3,4 sweep_dir=sweep
    python -m fedbench report sweep --choose algorithm.lam
    python -m fedbench algorithm=ditto algorithm.lam=1        # on whole training parts, as the report says

A client's score under a value is its validation metric at the last evaluated round, meant over seeds (and folds).  A
tie, frequent where validation parts are small, goes to the value that is best for all clients on average, as does a
client that has no such score.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.runs import Run
from fedbench.report.summary import differing, over_seeds
from fedbench.report.table import Column, DataFrame, Series, Table, pandas

ALONE = ("paper", "select", "target", "group", "figures", "against")  # what --choose does without


@dataclass
class Sweep:
    """The clients' scores under each value of ``key``.

    Attributes:
        values: The values, ascending.
        scores: A row for each value (by position), seed (and fold) and client; columns val and test.
        folds: The number of folds of a cross-validation; None: none.
    """

    key: str
    values: list[float]
    scores: DataFrame
    folds: int | None = None


def choose(runs: list[Run], key: str, metric: str = "personal/accuracy") -> Table:
    """Return how many clients choose each value, how well all do under it and under the choice, and the choice.

    Args:
        runs: Runs that differ in the key and the seed only.
        key: A key of the configuration.
        metric: A metric of the test parts, personal/...; the same one of the validation parts decides.

    Raises:
        ConfigError: The runs lack validation metrics or clients, differ in more, or in their partition.
    """
    sweep = read(runs, key, metric)
    lower = scores.lower_is_better(metric)
    val = sweep.scores["val"].unstack("client")  # [values and seeds, N]
    chosen, tied = choice(val.groupby("value").mean(), lower)
    rows = [_row(repr(sweep.values[value]), int((chosen == value).sum()), under.droplevel("value"))
            for value, under in sweep.scores.groupby("value")]  # fmt: skip
    by_choice = [sweep.scores.xs((value, client), level=("value", "client"), drop_level=False)
                 for client, value in chosen.items()]  # fmt: skip
    rows.append(_row("each its own", len(chosen), pandas().concat(by_choice).droplevel("value")))
    form = scores.Options(metric).form
    columns = [Column("value", key), Column("clients", "clients"), Column("val", "validation", **form),
               Column("test", "test", **form)]  # fmt: skip
    unit = " (%)" if scores.is_fraction(metric) else ""
    seeds = len(val) // len(rows[:-1])
    word = "fold" if sweep.folds == seeds else "seed"
    title = f"{metric}{unit}: {key} by each client's own validation part, {seeds} {word}{'s' * (seeds != 1)}"
    return Table(title, columns, rows, [
        *([together(sweep, lower)] if sweep.folds else []),
        f"{tied} of {len(chosen)} clients had several best values: they take the one that is best on average.",
        "each its own: what these runs' clients reached under their choice. Its validation is a maximum, so too high; "
        "and a run in which the values differ by client is another run:",
        override(key, [sweep.values[value] for value in chosen]),
    ])  # fmt: skip


def together(sweep: Sweep, lower: bool) -> str:
    """Return a sentence with the value that is best over all clients and folds, each client counting alike."""
    mean = sweep.scores["val"].groupby("value").mean()
    value = f"{sweep.key}={sweep.values[mean.idxmin() if lower else mean.idxmax()]!r}"
    return f"One for all, by {sweep.folds}-fold cross-validation: {value}, with folds=null on all training samples."


def _row(value: str, clients: int, under: DataFrame) -> dict[str, Any]:
    """Return a line of the table: the spread over seeds of the mean over clients."""
    means = under.groupby("seed").mean()
    return {"value": value, "clients": clients, "val": over_seeds(means["val"]), "test": over_seeds(means["test"])}


def choice(val: DataFrame, lower: bool = False) -> tuple[Series, int]:
    """Return each client's best value [N] by scores val [V, N], and how many clients had several best ones."""
    val = -val if lower else val
    equal = (val >= val.max() - 1e-12) | val.isna().all()  # [V, N]
    average = val.mean(axis=1)  # [V]
    chosen = equal.mul(1.0).where(equal).mul(average, axis=0).idxmax()
    return chosen, int((equal.sum() > 1).sum())


def override(key: str, values: list[float]) -> str:
    """What to paste into the command of the run in which every client has its own."""
    return f"'{key}=[{','.join(map(repr, values))}]'"


def read(runs: list[Run], key: str, metric: str) -> Sweep:
    """The finished runs with a number under the key; of repeated runs of a value and seed the last counts."""
    scores.check_metric(metric, 0, runs)
    require(
        metric.startswith("personal/"),
        f"--choose {key} compares validation metrics: --metric must be personal/..., got {metric}",
    )
    runs = [run for run in runs if run.finished and is_number(run.flat_config.get(key))]
    runs.sort(key=lambda run: str(run.summary.get("finished")))
    _comparable(runs, key)
    folds = runs[0].flat_config.get("folds")  # _comparable: of all
    cells = {(run.flat_config[key], (run.seed, run.flat_config.get("fold"))): run for run in runs}
    values, seeds = sorted({v for v, _ in cells}), sorted({s for _, s in cells})
    if folds is not None:  # a value is judged by all samples of the training parts
        seeds = [(s, f) for s in sorted({s for s, _ in seeds}) for f in range(folds)]
    missing = [f"{key}={v!r} seed={s}" + (f" fold={f}" if folds else "")
               for v in values for s, f in seeds if (v, (s, f)) not in cells]  # fmt: skip
    require(
        not missing,
        f"--choose {key}: there is no finished run of {', '.join(missing[:3])}: every value must have the same seeds",
    )
    names = {"test": metric, "val": metric.replace("personal/", "val/", 1)}
    tables = {(v, str(seed)): pandas().DataFrame(
        {kind: _last(cells[value, seed], name, key, folds is not None) for kind, name in names.items()}
    ) for v, value in enumerate(values) for seed in seeds}  # fmt: skip
    return Sweep(key, values, pandas().concat(tables, names=["value", "seed", "client"]), folds)


def is_number(value: object) -> bool:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _comparable(runs: list[Run], key: str) -> None:
    """Refuse runs that differ in anything but the key, or meet other clients."""
    values = {run.flat_config[key] for run in runs}
    require(len(values) > 1, f"--choose {key}: there are no finished runs with two different numbers under that key")
    others = [k.removeprefix("choices.") for k in differing(runs) if k not in (key, "fold")]
    require(
        not others,
        f"--choose {key}: the runs differ in {', '.join(others[:4])} too; give folders whose runs "
        f"differ in {key} and the seed only",
    )
    hashes = {(run.flat_config.get("fold"), run.summary.get("partition_hash")) for run in runs}
    folds = {fold for fold, _ in hashes}
    require(
        len(hashes) == len(folds),
        f"--choose {key}: the runs have {len(hashes)} different partitions (partition_hash in "
        "summary.json), so that their clients are not the same",
    )


def _last(run: Run, metric: str, key: str, folded: bool) -> Series:
    """Return a metric of all clients at the last evaluated round [N]; folded: of one fold, which may be empty."""
    values = run.clients(metric)  # [R, N]
    require(run.left_out is None, f"--choose {key}: {run.path}: {run.left_out}")
    name = metric.partition("/")[2]
    require(len(values) > 0, f"--choose {key}: {run.path / 'clients.csv'} has no column {metric}; "
            + (f"set dataset.val_fraction, e.g. 0.2, and run again: clients choose by their own validation {name}"
               if metric.startswith("val/") else "choose by a metric that the runs have"))  # fmt: skip
    clients = int(run.summary["num_clients"])
    require(
        values.shape[1] == clients,
        f"--choose {key}: {run.path} evaluated {values.shape[1]} of its {clients} clients; run with eval.clients=null",
    )
    require(
        folded or values.iloc[-1].notna().any(),
        f"--choose {key}: no client of {run.path} has a {metric}; choose by another --metric",
    )
    return values.iloc[-1]


def check_flags(args: argparse.Namespace, defaults: argparse.ArgumentParser) -> None:
    """Refuse flags that would have no effect."""
    extra = [name for name in ALONE if getattr(args, name) != defaults.get_default(name)]
    flags = ", ".join(f"--{name}" for name in extra)
    require(not extra, f"--choose {args.choose} prints a table of its own: leave out {flags}")
