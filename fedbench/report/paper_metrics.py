"""How each metric of a printed table is computed from a run, in the unit of the paper.

Each metric is taken at one round.  It is the last round if the authors' code takes it (FedBABU, which fine-tunes after
the last round; the tables of pFedMoAP, pFedNet and FedPIA), else the round with the best test score.  The key
``paper.select`` of a run has priority: "last", "best", "best_val" or "last3".  "last3" is the mean and the standard
deviation (ddof 1) over the last three evaluated rounds, as in pFedNet's released analysis.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedbench.report import scores
from fedbench.report.runs import Run
from fedbench.report.table import Series

ACCURACY = "personal/accuracy"
LAST_ROUND_TABLES = ("pfedmoap", "pfednet", "fedpia")  # prefixes of names
NAN = float("nan")


@dataclass(frozen=True)
class PrintedCell:
    """A cell of a table printed in a paper, and what is needed to measure it in a run.

    Attributes:
        table: The name of the table.
        row: The cell's row of the CSV file.
        runs: The runs among which runs of Local are searched.
        target: The accuracy to reach, for metrics of convergence.
    """

    table: str
    row: dict[str, str]
    runs: tuple[Run, ...] = ()
    target: float = 0.7


@dataclass(frozen=True)
class Measurement:
    """The value of one run for a cell of a printed table, in the unit of the paper.

    Attributes:
        value: The value; NaN if the run does not have it.
        std: The standard deviation over clients or rounds, if the paper prints it; else None.
        clients: How many clients the value includes, as "3 of 6"; "" for all.
    """

    value: float
    std: float | None = None
    clients: str = ""


PaperMetric = Callable[[Run, PrintedCell], Measurement]  # measures one run for a cell


def selection(run: Run, cell: PrintedCell) -> str:
    """Return the rounds whose value the table prints: "last", "best", "best_val", or "last3" (mean of the last three).

    Args:
        run: The run; its key ``paper.select`` has priority.
        cell: The cell, whose table determines the selection of other runs.
    """
    # FedBABU fine-tunes after the last round, so only this round has the scores that its paper prints
    is_last = cell.table.startswith(LAST_ROUND_TABLES) or run.choice("algorithm") == "fedbabu"
    return (run.config.get("paper") or {}).get("select") or ("last" if is_last else "best")


def mean(run: Run, cell: PrintedCell, column: str) -> Measurement:
    """Return a metric at the selected round in percent, as the mean over clients.

    Args:
        run: The run.
        cell: The printed cell.  If it is about a domain (such as Art of Office-Home) or a client, the mean is over
            the clients of this domain.
        column: The metric, a column of metrics.csv and clients.csv.

    Returns:
        The mean.  With the selection "last3", the mean and standard deviation over the last three evaluated rounds; for
        a domain, the last round.  NaN if the run has no such round or clients.
    """
    select, domain = selection(run, cell), domain_of(cell.row)
    if select == "last3" and domain is None:
        values = 100 * scores.curve(run, column)[-3:]
        return Measurement(float(values.mean()), std=float(values.std()) if len(values) > 1 else None)
    round = scores.selected_round(run, column, "last" if select == "last3" else select)
    if domain is None:
        value = 100 * scores.value_at(run, column, round)
        return Measurement(value, clients=scores.clients_at(run, column, round))
    values, clients = run.clients(column), clients_of(run, domain)
    if round not in values.index or not clients:
        return Measurement(NAN)
    return _mean_over_clients(values.loc[round].reindex(clients))


def _mean_over_clients(values: Series) -> Measurement:
    """Return the mean in percent over the clients that have a value, and how many these are if not all.

    Args:
        values: A fraction per client [n]; NaN for a client without a value.
    """
    count = int(values.count())
    clients = "" if count in (0, len(values)) else f"{count} of {len(values)}"
    return Measurement(100 * float(values.mean()), clients=clients)


def best_of_client(run: Run, cell: PrintedCell, metric: str, client: int) -> Measurement:
    """Return the metric of one client at its own best round, in percent; NaN if it is not recorded.

    Args:
        run: The run.
        cell: Not used; all functions of `METRICS` take a run and a printed cell.
        metric: A column of clients.csv.
        client: The number of the client, from 1 as papers count.
    """
    values = run.clients(metric)
    return Measurement(100 * scores.best_of(values[client - 1], metric) if client - 1 in values else NAN)


def mean_gain(run: Run, cell: PrintedCell, metric: str) -> Measurement:
    """Return mean and standard deviation over clients of the gain over Local (training alone), in percentage points.

    Args:
        run: The run.
        cell: The cell; the run of Local is searched in its ``runs``.
        metric: A column of clients.csv.  Each client is taken at its own best round in either run.
    """
    gains = _gains(run, cell, metric)
    std = 100 * float(gains.std(ddof=0)) if len(gains) else None
    return replace(_mean_over_clients(gains), std=std)


def gain_of_client(run: Run, cell: PrintedCell, metric: str, client: int) -> Measurement:
    """Return one client's gain over Local (training alone), in percentage points; NaN without a run of Local.

    Args:
        run: The run.
        cell: The cell; the run of Local is searched in its ``runs``.
        metric: A column of clients.csv.  The client is taken at its own best round in either run.
        client: The number of the client, from 1 as papers count.
    """
    return Measurement(100 * float(_gains(run, cell, metric).get(client - 1, NAN)))


def _gains(run: Run, cell: PrintedCell, metric: str) -> Series:
    """Return each client's score at its best round minus its score under Local at its best round there, [N].

    The Series is empty if ``cell.runs`` contains no run of Local.
    """
    return scores.gains(run, scores.local_of(run, list(cell.runs)), metric, own_best=True)


def rounds_to_target(run: Run, cell: PrintedCell) -> Measurement:
    """Measure the first evaluated round whose mean accuracy over clients is at least cell.target; NaN if none is."""
    return Measurement(scores.rounds_to(run, ACCURACY, cell.target))


def summary_value(run: Run, cell: PrintedCell, group: str, key: str, scale: float) -> Measurement:
    """Return a value of summary.json, multiplied by a factor; NaN if it is missing.

    Args:
        run: The run.
        cell: Not used; all functions of `METRICS` take a run and a printed cell.
        group: The key of a mapping in summary.json, such as "cost".
        key: The key of the value in this mapping.
        scale: The factor, 100 for a fraction that the paper prints in percent, else 1.
    """
    value = (run.summary.get(group) or {}).get(key)
    return Measurement(NAN if value is None else scale * float(value))


CLIENT_METRICS: dict[str, PaperMetric] = {  # of FedPIA, whose columns are clients
    **{name: partial(mean, column=f"personal/{name}") for name in ("accuracy", "accuracy_open", "accuracy_closed")},
    "f1": partial(mean, column="personal/micro_f1"),
}
METRICS: dict[str, PaperMetric] = {
    "mean_client_test_accuracy_pct": partial(mean, column=ACCURACY),
    "BMCTA_pct": partial(mean, column=ACCURACY),
    "BTA_pct": partial(mean, column=f"{ACCURACY}_weighted"),
    "mean_accuracy_pct": partial(mean, column=ACCURACY),
    "mean_auc_pct": partial(mean, column="personal/auc"),
    "mean_auc_gain (std over clients)": partial(mean_gain, metric="personal/auc"),
    "individual_gain_over_local_pct_points (std over clients)": partial(mean_gain, metric=ACCURACY),
    "best_mean_client_test_accuracy_pct_on_20_new_clients": partial(
        summary_value, group="new_clients", key="best", scale=100
    ),
    "rounds_to_target": rounds_to_target,
    "images_per_s": partial(summary_value, group="cost", key="images_per_s", scale=1),
    "test_accuracy_percent": partial(mean, column=f"{ACCURACY}_weighted"),
    "iou_percent": partial(mean, column="personal/dice_iou_weighted"),
    "label_iou_percent": partial(mean, column="personal/label_iou_weighted"),
    **CLIENT_METRICS,
    **{f"client{k}_auc_pct": partial(best_of_client, metric="personal/auc", client=k) for k in range(1, 5)},
    **{f"client{k}_auc_gain": partial(gain_of_client, metric="personal/auc", client=k) for k in range(1, 5)},
}
# Metrics that compare methods: the metric to compare, and a function of a method's value and of the values of all
# printed methods, NaN for those without a run.
RELATIVE_METRICS: dict[str, tuple[str, Callable[[float, dict[str, float]], float]]] = {
    "relative_speed_pct": ("images_per_s", lambda value, values: 100 * value / values.get("FedAvg", NAN)),
    "speedup_x_vs_slowest": ("rounds_to_target", lambda value, values: np.max(list(values.values())) / value),
}


def is_measured(metric: str) -> bool:
    """Return whether fedbench can compute a metric of a printed table, such as "BMCTA_pct", from runs."""
    return metric in METRICS or metric in RELATIVE_METRICS


def domain_of(row: dict[str, str]) -> str | None:
    """Return the domain or client that a cell of a printed table is about; None for the mean over all clients.

    It is named in the setting ("domain=Art"), behind a slash in the data set ("Office-Home/Art"), or, for FedPIA, by
    the data set itself.
    """
    match = re.search(r"domain=([^;]+)", row.get("setting", ""))
    name = match.group(1) if match else row["dataset"].partition("/")[2]
    if not name and row["metric"] in CLIENT_METRICS:  # those of FedPIA
        name = row["dataset"]
    letters = normalized(name)
    return None if letters in ("", "all", "allmean", "average", "mean") or letters.endswith("overall") else name


def clients_of(run: Run, domain: str) -> list[int]:
    """Return the indices of the clients of a domain, by the domains in partition.json; empty if none has it.

    Args:
        run: The run.
        domain: The name of a domain, such as Art of Office-Home.  Names such as c3_oct of FedPIA stand for the third
            domain.
    """
    names = run.partition.get("domains")
    names = [normalized(str(name)) for name in names] if isinstance(names, list) else []
    match = re.match(r"c(\d+)_", domain)
    wanted_name = normalized(domain)
    if match:
        distinct = list(dict.fromkeys(names))
        index = int(match[1]) - 1
        wanted_name = distinct[index] if index < len(distinct) else None
    return [client for client, name in enumerate(names) if name == wanted_name]


def normalized(name: str) -> str:
    """Return the letters and digits of a name in lower case, so that "Real World" equals "Real_World"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
