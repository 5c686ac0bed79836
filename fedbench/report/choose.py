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

import numpy as np

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.runs import Run
from fedbench.report.summary import differing, over_seeds
from fedbench.report.table import Column, Table

ALONE = ("paper", "select", "target", "group", "figures", "against")  # what --choose does without


@dataclass
class Sweep:
    """What clients reach under each value of ``key``, ascending: val, test [values V, seeds S, clients N]; of
    cross-validation with so many folds (None: none), seeds and folds S."""

    key: str
    values: list[float]
    val: np.ndarray
    test: np.ndarray
    folds: int | None = None


def choose(runs: list[Run], key: str, metric: str = "personal/accuracy") -> Table:
    """How many clients choose each value, how well all do under it and under the choice, and the choice itself.

    metric: of the test parts, personal/...; the same of the validation parts decides.  ConfigError where runs do not
    tell: they lack validation metrics or clients, differ in more than the key and the seed, or in their partition.
    """
    sweep = read(runs, key, metric)
    seeds = sweep.val.shape[1]
    lower = scores.lower_is_better(metric)
    chosen, tied = choice(np.apply_along_axis(_mean, 1, sweep.val), lower)
    clients = np.arange(len(chosen))
    rows = [_row(f"{value!r}", int((chosen == v).sum()), sweep.val[v], sweep.test[v])
            for v, value in enumerate(sweep.values)]  # fmt: skip
    rows.append(_row("each its own", len(chosen), sweep.val[chosen, :, clients].T, sweep.test[chosen, :, clients].T))
    scale, digits = (100, 2) if scores.is_fraction(metric) else (1, 4)
    columns = [Column("value", key), Column("clients", "clients"), Column("val", "validation", digits, scale),
               Column("test", "test", digits, scale)]  # fmt: skip
    unit = " (%)" if scale == 100 else ""
    title = f"{metric}{unit}: {key} by each client's own validation part, {seeds} seed{'s' * (seeds != 1)}"
    title = title.replace(" seed", " fold") if sweep.folds == seeds else title
    return Table(title, columns, rows, [
        *([together(sweep, lower)] if sweep.folds else []),
        f"{tied} of {len(chosen)} clients had several best values: they take the one that is best on average.",
        "each its own: what these runs' clients reached under their choice. Its validation is a maximum, so too high; "
        "and a run in which the values differ by client is another run:",
        override(key, [sweep.values[v] for v in chosen]),
    ])  # fmt: skip


def together(sweep: Sweep, lower: bool) -> str:
    """The value that is best over all clients and folds, each client counting alike, in a sentence."""
    best = choice(np.array([[_mean(val)] for val in sweep.val]), lower)[0][0]
    value = f"{sweep.key}={sweep.values[best]!r}"
    return f"One for all, by {sweep.folds}-fold cross-validation: {value}, with folds=null on all training samples."


def _row(value: str, clients: int, val: np.ndarray, test: np.ndarray) -> dict[str, object]:
    """A line of the table; val, test [S, N]."""
    reached = {"val": over_seeds(map(_mean, val)), "test": over_seeds(map(_mean, test))}
    return {"value": value, "clients": clients, **reached}


def _mean(values: np.ndarray) -> float:
    """Of those that are known; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def choice(val: np.ndarray, lower: bool = False) -> tuple[np.ndarray, int]:
    """Each client's best value by scores val [V, N], as an index [N], and how many had several equally good ones."""
    val = -val if lower else val
    average = np.array([_mean(row) for row in val])  # [V]
    known = ~np.isnan(val).all(0)  # [N]
    best = np.where(known, np.fmax.reduce(val), np.nan)  # [N]
    equal = np.isclose(val, best, rtol=0, atol=1e-12) | ~known  # [V, N]
    return np.where(equal, average[:, None], -np.inf).argmax(0), int((equal.sum(0) > 1).sum())


def override(key: str, values: list[float]) -> str:
    """What to paste into the command of the run in which every client has its own."""
    return f"'{key}=[{','.join(map(repr, values))}]'"


def read(runs: list[Run], key: str, metric: str) -> Sweep:
    """The finished runs with a number under the key; of repeated runs of a value and seed the last counts."""
    scores.check_metric(metric, runs)
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
    test, val = (
        np.array([[_last(cells[v, s], name, key, folds is not None) for s in seeds] for v in values])
        for name in (metric, metric.replace("personal/", "val/", 1))
    )  # [V, S, N]
    return Sweep(key, values, val, test, folds)


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


def _last(run: Run, metric: str, key: str, folded: bool) -> np.ndarray:
    """A metric of all clients at the last evaluated round; folded: of one fold, which may be empty.  [N]"""
    rounds, ids, values = run.clients(metric)  # [R], [N], [R, N]
    require(run.left_out is None, f"--choose {key}: {run.path}: {run.left_out}")
    name = metric.partition("/")[2]
    require(len(rounds) > 0, f"--choose {key}: {run.path / 'clients.csv'} has no column {metric}; "
            + (f"set dataset.val_fraction, e.g. 0.2, and run again: clients choose by their own validation {name}"
               if metric.startswith("val/") else "choose by a metric that the runs have"))  # fmt: skip
    clients = int(run.summary["num_clients"])
    require(
        len(ids) == clients,
        f"--choose {key}: {run.path} evaluated {len(ids)} of its {clients} clients; run with eval.clients=null",
    )
    require(
        folded or not np.isnan(values[-1]).all(),
        f"--choose {key}: no client of {run.path} has a {metric}; choose by another --metric",
    )
    return values[-1]


def check_flags(args: argparse.Namespace, defaults: argparse.ArgumentParser) -> None:
    """Refuse flags that would have no effect."""
    extra = [name for name in ALONE if getattr(args, name) != defaults.get_default(name)]
    flags = ", ".join(f"--{name}" for name in extra)
    require(not extra, f"--choose {args.choose} prints a table of its own: leave out {flags}")
