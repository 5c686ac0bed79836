"""``fedbench report --clients`` and ``--client``: scores of single clients, and their gains over Local (no sharing)."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import entropy

from fedbench.config.conf_tree import nearest
from fedbench.core.options import require
from fedbench.report import drawing, scores
from fedbench.report.display import (
    client_metric_title,
    for_readers,
    key_title,
    label_columns,
    legend_names,
    method_name,
)
from fedbench.report.drawing import Drawing, FigureFiles, Series, figure_files
from fedbench.report.figures import by_setting, file_name, gains_ylabel
from fedbench.report.output import report_damage, runs_of
from fedbench.report.runs import Run
from fedbench.report.scores import Options
from fedbench.report.summary import Group, group_runs, over_seeds
from fedbench.report.table import MACHINE_FORMATS, OBJECT, Column, DataFrame, Table, pandas
from fedbench.tasks.scores import summarize_clients

NAN = float("nan")


@dataclass
class ClientScores:
    """Scores and gains of the clients of a group, the runs of a method that differ only in the seed.

    Attributes:
        group: The runs, which differ only in the seed.
        frame: A row per client, sorted by gain (by score without one), the best first.  Its columns are client,
            samples (for training), entropy (of labels, in bits), score and gain, both as means over seeds.
        left_out: The number of seeds without scores of clients, or with another partition than the first seed.
    """

    group: Group
    frame: DataFrame
    left_out: int


def clients_command(args: argparse.Namespace, table_format: str) -> tuple[list[Table], list[Path]]:
    """Return the tables of ``--clients`` or ``--client``, and the paths of the figures.

    Args:
        args: The parsed command line.
        table_format: The format of the tables.  CSV and JSON have one table, that of the clients.

    Raises:
        ConfigError: No run has scores of single clients, or there is no such client.
    """
    runs, damaged = runs_of(args)
    metric = args.metric or scores.primary_metric(runs)
    options = Options(metric, args.select, group=args.group.split(",") if args.group else None)
    scores.check_metric(metric, args.target, runs)
    groups, _ = group_runs(runs, options.group)  # and the number of repeated runs, not needed here
    files = None if args.figures is None else figure_files("--figures", args.figures)
    if args.client is None:
        tables, figures = clients(groups, runs, options, table_format, files)
    else:
        tables, figures = client(groups, args.client, options, files)
    report_damage(damaged, runs, tables, table_format)
    return tables, figures


def clients(
    groups: list[Group], runs: list[Run], options: Options, table_format: str, files: FigureFiles | None
) -> tuple[list[Table], list[Path]]:
    """Return the tables of ``--clients``, a summary and the clients of each group, and the paths of the figures.

    Args:
        groups: Groups of runs that differ only in the seed.
        runs: The runs among which the runs of Local are searched.
        options: The metric, and the round at which it is taken: last, best or best_val.
        table_format: The format of the tables.  CSV and JSON have one table, that of the clients of all groups.
        files: Where figures are written; None for no figures.
    """
    of_all_groups = [client_scores(group, runs, options) for group in groups]
    scored = [group_scores for group_scores in of_all_groups if len(group_scores.frame)]  # with a score of any client
    require(
        bool(scored),
        f"no finished run has {options.metric} of single clients at the {options.select} round: choose another "
        "--metric, a column of clients.csv, or --select last",
    )
    figures = [] if files is None else draw_clients(scored, options, files)
    if table_format in (*MACHINE_FORMATS, OBJECT):  # CSV, JSON, or one object of all tables (--json)
        every = clients_table(scored, options)
        return [every] if table_format in MACHINE_FORMATS else [summary_table(scored, options), every], figures
    # for_readers drops columns that are equal in all rows or repeat others
    summary = for_readers(summary_table(scored, options), list(scored[0].group.labels))
    return [summary, *(clients_table([group_scores], options) for group_scores in scored)], figures


def client_scores(group: Group, runs: list[Run], options: Options) -> ClientScores:
    """Return the clients of a group with their scores and gains as means over seeds, the largest gain first.

    The score of a client is that at the selected round of each run.  Its gain is the difference to its score in the
    run of Local (clients that train alone) with the same seed.  A positive gain is better for every metric.

    Args:
        group: Runs that differ only in the seed.
        runs: The runs among which the runs of Local are searched.
        options: The metric, and the round at which it is taken: last, best or best_val.

    Returns:
        The columns client, samples, entropy (of its training labels, in bits), score and gain, a row per client; and
        the number of runs that are left out, without scores of clients or with another partition than the first run.
    """
    pd, sign = pandas(), -1 if scores.lower_is_better(options.metric) else 1
    first, values, gains = group.runs[0], [], []
    for run in group.runs:
        score = scores_at(run, options)
        if score.empty or run.summary.get("partition_hash") != first.summary.get("partition_hash"):
            continue
        local = None if scores.is_local(run) else scores.local_of(run, runs)
        values.append(score)
        # without a run of Local, the gain of every client is NaN
        gains.append(sign * (score - scores_at(local, options)) if local is not None else score * NAN)
    if not values:
        return ClientScores(group, frame=pd.DataFrame(), left_out=len(group.runs))
    frame = pd.DataFrame(
        {"score": pd.concat(values, axis=1).mean(axis=1), "gain": pd.concat(gains, axis=1).mean(axis=1)}
    )
    partition = first.partition
    names = partition.get("names") or []
    frame.insert(0, "client", [names[i] if i < len(names) else str(i) for i in frame.index])
    # _entry: that of the client in a list of partition.json, if it exists
    frame.insert(1, "samples", [_entry(partition.get("train"), i) for i in frame.index])
    counts = [_entry(partition.get("label_counts"), i) for i in frame.index]
    frame.insert(2, "entropy", [NAN if row is None else float(entropy(row, base=2)) for row in counts])
    order = frame.assign(signed=sign * frame["score"]).sort_values(["gain", "signed"], ascending=False, kind="stable")
    return ClientScores(group, frame=order.drop(columns="signed"), left_out=len(group.runs) - len(values))


def scores_at(run: Run, options: Options) -> Any:
    """Return the metric of each client of a run at the selected round, a Series by index of the client.

    Clients without a score are left out.  The Series is empty if the run has no such round or metric.
    """
    table = run.clients(options.metric)
    round = scores.selected_round(run, options.metric, options.select)
    return table.loc[round].dropna() if round in table.index else pandas().Series(dtype=float)


def _entry(values: list[Any] | None, client: int) -> Any:
    """Return ``values[client]``, a client's entry in a list of partition.json; None if list or entry is missing."""
    return values[client] if values is not None and client < len(values) else None


def summary_table(scored: list[ClientScores], options: Options) -> Table:
    """Return a table with a row per group: worst, best, mean and other statistics of its clients' scores.

    A true value under "tuned" marks a method with a dagger: it fine-tunes after the last round only.

    Args:
        scored: The scores and gains of the clients of each group of runs, at least one group.
        options: The metric, and the round at which it is taken: last, best or best_val.
    """
    lower, name = scores.lower_is_better(options.metric), options.metric.rpartition("/")[2]
    rows = []
    for group_scores in scored:
        values, gain = group_scores.frame["score"].to_numpy(float), group_scores.frame["gain"].to_numpy(float)
        over_clients = summarize_clients({name: values}, np.ones(len(values)))  # all clients have equal weights
        has_gain = bool(np.isfinite(gain).any())
        group = group_scores.group
        rows.append(group.labels | {
            "tuned": group.tuned, "clients": len(values), "n": len(group.runs) - group_scores.left_out,
            "worst": float(values.max() if lower else values.min()),
            "best": float(values.min() if lower else values.max()),
            "mean": over_clients[name],
            "std": over_clients[f"{name}_std"],
            "worst_tenth": over_clients[f"{name}_worst"],
            "below_local": int((gain.round(12) < 0).sum()) if has_gain else None,  # not rounding errors
        })  # fmt: skip
    number = _number_format(options)
    columns = [
        *label_columns(scored[0].group.labels, scored[0].group.conf), Column("clients", "clients"), Column("n", "n"),
        *(Column(key, title, **number) for key, title in (
            ("worst", "worst"), ("best", "best"), ("mean", "mean"), ("std", "std"), ("worst_tenth", "worst tenth"))),
        Column("below_local", "below Local"),
    ]  # fmt: skip
    notes = [
        f"Scores are of the {options.select} round, as means over n seeds for each client. worst, best, mean, std "
        "(ddof=0) and worst tenth are over clients. below Local: number of clients with a negative gain.",
        *(f"{method_name(group_scores.group.name)}: {group_scores.left_out} seeds are left out, without scores of "
          "clients or with another partition." for group_scores in scored if group_scores.left_out),
    ]  # fmt: skip
    return Table(f"{_title(options)}, over clients", columns, rows, notes, name="client_summary")


def clients_table(scored: list[ClientScores], options: Options) -> Table:
    """Return a table with a row per client of each group; labels such as the method distinguish several groups.

    A true value under "tuned" marks a method with a dagger: it fine-tunes after the last round only.

    Args:
        scored: The scores and gains of the clients of each group of runs, at least one group.
        options: The metric, and the round at which it is taken: last, best or best_val.
    """
    labels = scored[0].group.labels
    rows = [
        group_scores.group.labels | {"tuned": group_scores.group.tuned} | row
        for group_scores in scored
        for row in group_scores.frame.astype(object).where(group_scores.frame.notna(), None).to_dict("records")
    ]
    number = _number_format(options)
    columns = [
        Column("client", "client"),
        Column("samples", "samples", digits=0),
        Column("entropy", "label entropy (bits)"),
        Column("score", "score", **number),
        Column("gain", "gain", **number),
    ]
    has_one_group = len(scored) == 1
    title = f"{scored[0].group.name}: {_title(options)}" if has_one_group else _title(options)
    return Table(title, columns if has_one_group else [*label_columns(labels, scored[0].group.conf), *columns], rows,
                 name="clients")  # fmt: skip


def _title(options: Options) -> str:
    """Return options.metric, followed by " (%)" if it is displayed in percent, such as "personal/accuracy (%)"."""
    return options.metric + (" (%)" if scores.is_fraction(options.metric) else "")


def _number_format(options: Options) -> dict[str, Any]:
    """Return arguments of a `Column` of scores: {"digits": 2, "scale": 100} for a percentage, else {"digits": 4}."""
    return {"digits": 2, "scale": 100} if scores.is_fraction(options.metric) else {"digits": 4}


def draw_clients(scored: list[ClientScores], options: Options, files: FigureFiles) -> list[Path]:
    """Draw the gains of clients against their numbers of samples, and return the paths.

    There is a figure per setting (data set, partition, model), with a panel per method.

    Args:
        scored: The clients of each group.  Groups without gains or samples have no panel.
        options: The metric, and the round at which it is taken: last, best or best_val.
        files: The folder, prefix and format of the figures.
    """
    paths, scale = [], scores.scale_of(options.metric)
    for setting, members in by_setting([group_scores.group for group_scores in scored]).items():
        frames = {
            group_scores.group.name: group_scores.frame.dropna(subset=["samples", "gain"])
            for group_scores in scored
            if group_scores.group in members
        }
        frames = {name: frame for name, frame in frames.items() if len(frame)}
        if not frames:
            continue
        columns = min(3, len(frames))
        rows = math.ceil(len(frames) / columns)
        size = (3.2 * columns + 1, 2.6 * rows + 0.8)
        figure, panels = drawing.pyplot().subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False,
                                                   layout="constrained")  # fmt: skip
        for axes, (name, frame) in zip(panels.flat, frames.items()):
            axes.scatter(
                frame["samples"].astype(float), scale * frame["gain"], s=18, color=drawing.COLOURS[0], alpha=0.8
            )
            axes.axhline(0, color="black", lw=0.8)
            axes.set_title(drawing.escape_mathtext(name), fontsize=9, loc="left")
            drawing.style_axes(axes)
        for axes in panels.flat[len(frames) :]:
            axes.set_visible(False)
        figure.supxlabel("Training samples of the client", fontsize=10)
        figure.supylabel(gains_ylabel(scale), fontsize=10)
        heading = f"{client_metric_title(options.metric)}, {options.select} round"
        figure.suptitle("\n".join(filter(None, (heading, drawing.escape_mathtext(setting)))), fontsize=10)
        paths.append(drawing.save(figure, files.path(f"clients_{file_name(setting, options.metric)}")))
    return paths


def client(
    groups: list[Group], name: str, options: Options, files: FigureFiles | None
) -> tuple[list[Table], list[Path]]:
    """Return the score of one client over the rounds, with a column per group, and the path of its figure.

    Args:
        groups: Groups of runs that differ only in the seed.
        name: The name or the number of the client.
        options: The metric.
        files: Where the figure is written; None for no figure.

    Raises:
        ConfigError: No run has this client, or its scores.
    """
    curves = {}
    for group in groups:
        index = client_index(group.runs[0], name)
        tables = [run.clients(options.metric) for run in group.runs] if index is not None else []
        of_client = [table[index] for table in tables if index in table]
        if of_client:
            curves[id(group)] = pandas().concat(of_client, axis=1)  # [R, seeds]
    shown = [group for group in groups if id(group) in curves]
    require(bool(shown), _unknown_client(groups, name, options))
    names, common = legend_names([g.labels for g in shown], [g.tuned for g in shown], shown[0].conf)
    rounds = sorted({round for curve in curves.values() for round in curve.index})
    rows = [
        {"round": int(round)}
        | {key: over_seeds(curves[id(g)].loc[round]) for g, key in zip(shown, names) if round in curves[id(g)].index}
        for round in rounds
    ]
    number = _number_format(options)
    columns = [Column("round", "round"), *(Column(key, key, **number) for key in names)]
    suffix = f", {common}" if common else ""
    note = "± is the population standard deviation (ddof=0) over seeds."
    notes = [note] if any(len(group.runs) > 1 for group in shown) else []
    tables = [Table(f"client {name}: {_title(options)}{suffix}", columns, rows, notes, "client")]
    if files is None:
        return tables, []
    scale, series = scores.scale_of(options.metric), []
    for group, key in zip(shown, names):
        curve = scale * curves[id(group)]
        std = list(curve.std(axis=1, ddof=0)) if curve.shape[1] > 1 else None
        label = f"{key} (n={curve.shape[1]})"
        series.append(Series(label, list(curve.index), list(curve.mean(axis=1)), std, group.tuned))
    ylabel = key_title(options.metric.rpartition("/")[2]) + (" (%)" if scale == 100 else "")
    figure = drawing.draw_axes(Drawing("lines", f"client {name}{suffix}", "Round", ylabel, series))
    return tables, [drawing.save(figure, files.path(f"client_{file_name(name, options.metric)}"))]


def client_index(run: Run, name: str) -> int | None:
    """Return the index of the client whose name, or whose index as text, is ``name``; None if there is none."""
    names = client_names(run)
    if name in names:
        return names.index(name)
    return int(name) if name.isdecimal() and int(name) < len(names) else None


def client_names(run: Run) -> list[str]:
    """Return the names of the clients of a run, by index; "0", "1" and so on if its partition has no names."""
    return run.partition.get("names") or [str(i) for i in range(run.summary.get("num_clients") or 0)]


def _unknown_client(groups: list[Group], name: str, options: Options) -> str:
    """Return why no table can be made for ``--client NAME``.

    Either no run has a client with this name (or index as text), or no run has values of options.metric for it.

    Args:
        groups: Groups of runs that differ only in the seed; the first run of each is searched.
        name: The value of ``--client``.
        options: The metric.
    """
    runs = [group.runs[0] for group in groups]
    if any(client_index(run, name) is not None for run in runs):
        return (
            f"--client {name}: no run has {options.metric} of this client; choose a column of clients.csv by --metric"
        )
    named = [client for run in runs for client in run.partition.get("names") or []]
    count = max((len(client_names(run)) for run in runs), default=0)
    # nearest() returns "" or a text that begins with a space
    hint = nearest(name, named) or f" the clients are numbered from 0 to {count - 1}"
    return f"--client {name} is not a client of these runs:{hint}"
