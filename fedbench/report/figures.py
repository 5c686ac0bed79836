"""Figures of a report about groups (runs that differ only in the seed), and of gains over Local (no sharing)."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import require
from fedbench.report import drawing, scores
from fedbench.report.display import client_metric_title, key_title, legend_name, legend_names, metric_axis_label
from fedbench.report.drawing import Drawing, FigureFiles, Series
from fedbench.report.paper import KEYS, Cell
from fedbench.report.runs import Run
from fedbench.report.scores import Options
from fedbench.report.summary import SETTING, Group
from fedbench.report.table import DAGGER, DataFrame, pandas

# Values of --against that are sums of bytes: their directions, and the label of the axis.
BYTES = {
    "bytes": (("down", "up"), "MB sent down and up, all clients together"),
    "bytes_down": (("down",), "MB sent down, all clients together"),
    "bytes_up": (("up",), "MB sent up, all clients together"),
}


def draw_report(
    groups: list[Group], runs: list[Run], options: Options, files: FigureFiles, against: str | None = None
) -> list[Path]:
    """Draw the figures of ``fedbench report`` and return their paths.

    Args:
        groups: Groups of runs that differ only in the seed.
        runs: The runs among which the runs of Local are searched.
        options: Metric, selected round, target and grouping of the report.
        files: The folder, prefix and format of the figures.
        against: What to draw the metric over: a config key, "bytes", "bytes_up" or "bytes_down"; None: no such figure.
    """
    paths = draw_settings(groups, runs, options, files)
    for setting, members in by_setting(groups).items():
        if any(scores.is_compressed(run) for group in members for run in group.runs):
            paths.append(draw_sizes(members, files.path(f"sizes_{file_name(setting)}"), setting))
    if against is not None:
        path = files.path(f"against_{file_name(against, options.metric)}")
        draw = draw_over_bytes if against in BYTES else draw_against
        paths.append(draw(groups, options, against, path))
    return paths


def draw_settings(groups: list[Group], runs: list[Run], options: Options, files: FigureFiles) -> list[Path]:
    """Draw the metric over rounds and the gains of clients over Local for each setting, and return the paths.

    A setting is a data set, a partition, a model and the other config values outside of the method.

    Args:
        groups: Groups of runs that differ only in the seed.
        runs: The runs among which the runs of Local are searched.
        options: Metric, selected round, target and grouping of the report.
        files: The folder, prefix and format of the figures.
    """
    paths = []
    for setting, members in by_setting(groups).items():
        suffix = file_name(setting, options.metric)
        paths.append(draw_curves(members, options, files.path(f"curves_{suffix}"), setting))
        gains = {group.name: client_gains(group, runs, options) for group in members}
        gains = {name: values for name, values in gains.items() if len(values)}  # none without a run of Local
        if gains:
            paths.append(draw_gains(gains, options, files.path(f"gains_{suffix}"), setting))
    return paths


def by_setting(groups: list[Group]) -> dict[str, list[Group]]:
    """Return a dict from setting, described as "mnist, dirichlet, cnn, alpha 0.1", to its groups of runs.

    Data set, partition and model, the keys `SETTING`, are described by their values alone.
    """
    settings: dict[str, list[Group]] = {}
    for group in groups:
        parts = [str(value) if name in SETTING else f"{name} {value}" for name, value in group.setting.items()]
        settings.setdefault(", ".join(parts), []).append(group)
    return settings


def file_name(*texts: str) -> str:
    """Return a name for a file, such as "fedavg_mnist_alpha_0.1" for the texts "fedavg", "mnist" and "alpha=0.1".

    The texts that are not empty are joined.  Characters other than letters, digits, "_", "." and "-" become "_".
    """
    return re.sub(r"[^\w.-]+", "_", ", ".join(filter(None, texts)))


def mean_curve(group: Group, metric: str) -> DataFrame:
    """Return a metric's mean and population standard deviation over seeds at the rounds that all seeds evaluated.

    Args:
        group: Runs that differ only in the seed.
        metric: A column of metrics.csv.

    Returns:
        A DataFrame [R, 2] with the columns mean and std; empty if no seed has the metric.
    """
    curves = [curve for run in group.runs if len(curve := scores.curve(run, metric))]
    values = pandas().concat(curves, axis=1, join="inner") if curves else pandas().DataFrame(dtype=float)
    std = values.std(axis=1, ddof=0, skipna=False)
    return pandas().DataFrame({"mean": values.mean(axis=1, skipna=False), "std": std})


def _series(group: Group, name: str, x: Any, curve: DataFrame, scale: float = 1) -> Series:
    """Return the line of a group, without deviations if it has only one run.

    A tuned group, which fine-tunes after the last round only, has an open marker for its last value.

    Args:
        group: Runs that differ only in the seed.
        name: The legend entry, to which the number of runs is added.
        x: The positions [R], such as rounds.
        curve: The columns mean and std [R, 2].
        scale: A factor for the values and their deviations.
    """
    std = list(scale * curve["std"]) if len(group.runs) > 1 else None
    return Series(f"{name} (n={len(group.runs)})", list(x), list(scale * curve["mean"]), std, group.tuned)


def draw_curves(groups: list[Group], options: Options, path: Path, title: str) -> Path:
    """Draw the metric over rounds, a line per group, and return the path.

    The target is a dotted line.  It is left out of figures in which no value exceeds half of it, and of metrics that
    are not fractions.

    Args:
        groups: The groups of one setting (data set, partition, model and so on).
        options: The metric and the target.
        path: The file.
        title: The description of the setting.
    """
    scale = scores.scale_of(options.metric)
    # tuned: the method fine-tunes after the last round only; common: labels of all groups, for the title
    names, common = legend_names([g.method_labels for g in groups], [g.tuned for g in groups], groups[0].conf)
    series = []
    for group, name in zip(groups, names):
        curve = mean_curve(group, options.metric)
        series.append(_series(group, name, curve.index, curve, scale))
    target = scale * options.target
    is_near = scale == 100 and any(y > target / 2 for line in series for y in line.y)  # 100: a fraction, in percent
    title = ", ".join(filter(None, (title, common)))
    ylabel = metric_axis_label(options.metric)
    level = target if is_near else None  # of the dotted line
    data = Drawing("lines", title, xlabel="Round", ylabel=ylabel, series=series, level=level)
    return drawing.save(drawing.draw_axes(data), path)


def draw_over_bytes(groups: list[Group], options: Options, key: str, path: Path) -> Path:
    """Draw the metric over communication, a line per group, and return the path.

    Args:
        groups: Groups of runs that differ only in the seed.
        options: The options of the report, of which only the metric is used.
        key: The directions of communication: "bytes" for both, "bytes_up" or "bytes_down".
        path: The file.

    Raises:
        ConfigError: No run sent anything.
    """
    directions, xlabel = BYTES[key]
    conf = groups[0].conf if groups else None
    # tuned: the method fine-tunes after the last round only; common: labels of all groups, for the title
    names, common = legend_names([group.labels for group in groups], [group.tuned for group in groups], conf)
    series = []
    for group, name in zip(groups, names):
        curve = mean_curve(group, options.metric)
        sizes = [scores.megabytes(run, directions).reindex(curve.index) for run in group.runs]  # [R] each
        if any(size.isna().any() for size in sizes):  # a run without costs.csv: the line of its group is empty
            curve, sizes = curve.iloc[:0], [size.iloc[:0] for size in sizes]
        series.append(_series(group, name, np.mean(sizes, axis=0), curve, scores.scale_of(options.metric)))
    require(any(any(line.x) for line in series), f"--against {key}: no run has sent anything: leave it out")
    ylabel = metric_axis_label(options.metric)
    return drawing.save(drawing.draw_axes(Drawing("lines", common, xlabel, ylabel, series, logarithmic=True)), path)


def draw_sizes(groups: list[Group], path: Path, title: str) -> Path:
    """Draw cumulative MB over rounds, and below them the percentage of the uncompressed size per round.

    The left panels are uploads, the right ones downloads.

    Args:
        groups: The groups of one setting (data set, partition, model and so on).
        path: The file, which is returned.
        title: The description of the setting.

    References:
        pFedNet, Figures 8 and 12.
    """
    figure, panels = drawing.pyplot().subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    # tuned: the method fine-tunes after the last round only; common: labels of all groups, for the title
    names, common = legend_names([g.method_labels for g in groups], [g.tuned for g in groups], groups[0].conf)
    for column, direction in enumerate(("up", "down")):
        smallest_percent = 100.0  # determines the lower limit of the y axis
        for i, (group, name) in enumerate(zip(groups, names)):
            transmitted, dense = (_megabytes(group, direction, kind) for kind in ("bytes", "dense"))  # [R, seeds]
            if transmitted.empty or not transmitted.iloc[-1].any():  # nothing was sent in this direction
                continue
            # differences of successive rounds; the first round has no predecessor and keeps its value
            transmitted_per_round, dense_per_round = (sizes.diff().fillna(sizes) for sizes in (transmitted, dense))
            percent = 100 * (transmitted_per_round / dense_per_round.where(dense_per_round > 0))
            smallest_percent = min(smallest_percent, float(percent.min().min()))
            label = f"{name} (n={len(group.runs)})"
            for axes, values in zip(panels[:, column], (transmitted, percent)):
                std = values.std(axis=1, ddof=0) if len(group.runs) > 1 else None
                drawing.draw_line(axes, i, Series(label, transmitted.index, values.mean(axis=1), std))
        for axes in panels[:, column]:
            if axes.lines:
                drawing.set_log_scale(axes, "y", np.concatenate([line.get_ydata() for line in axes.lines]))
            drawing.style_axes(axes)
        panels[0, column].set(ylabel=f"MB {direction} so far")
        panels[1, column].set(xlabel="Round", ylabel=f"Bytes {direction} in a round (% of dense)")
        drawing.set_integer_ticks(panels[1, column], "x")
        panels[1, column].set_ylim(smallest_percent / 1.5, 150)
    figure.suptitle(drawing.escape_mathtext(", ".join(filter(None, (title, common)))), fontsize=10)
    drawing.add_legend(figure, panels[0, 0])
    return drawing.save(figure, path)


def _megabytes(group: Group, direction: str, kind: str) -> DataFrame:
    """Return the cumulative MB at the rounds that all runs of a group have [R, seeds].

    Args:
        group: Runs that differ only in the seed.
        direction: "up" or "down".
        kind: "bytes" for sent bytes, "dense" for the bytes without compression.
    """
    sizes = [scores.megabytes(run, (direction,), kind) for run in group.runs]
    return pandas().concat(sizes, axis=1, join="inner", ignore_index=True)


def values_by_key(groups: list[Group], options: Options, key: str) -> dict[str, dict[float, np.ndarray]]:
    """Return the metric at the selected round, for each line of a figure and each value of a numeric config key.

    Args:
        groups: Groups of runs that differ only in the seed.
        options: The metric, and the round at which it is taken: last, best or best_val.
        key: The config key.  Runs without a number under it are left out.

    Returns:
        For each legend entry, a dict from the value of the key to the metric of each seed [S].

    Raises:
        ConfigError: There are fewer than two values of the key.
    """
    lines: dict[str, dict[float, np.ndarray]] = {}
    for group in groups:
        x = group.runs[0].flat_config.get(key)
        if not isinstance(x, int | float) or isinstance(x, bool):
            continue
        # the legend omits the key, whose column may have only its last part as a title ("mu" for "algorithm.mu")
        labels = {k: v for k, v in group.labels.items() if k not in (key, key.rpartition(".")[2])}
        rounds = [scores.selected_round(run, options.metric, options.select) for run in group.runs]
        values = [scores.value_at(run, options.metric, round) for run, round in zip(group.runs, rounds)]
        lines.setdefault(legend_name(labels, group.tuned, group.conf), {})[float(x)] = np.array(values)
    distinct = {x for line in lines.values() for x in line}
    require(
        len(distinct) > 1,
        f"--against {key} needs runs with at least two numbers as {key}, and these have none or one: name another key",
    )
    return lines


def draw_against(groups: list[Group], options: Options, key: str, path: Path) -> Path:
    """Draw the metric over a numeric config key and return the path.

    Mean and standard deviation are drawn as points, or as bars if the values of the key span more than two powers of
    ten.

    Args:
        groups: Groups of runs that differ only in the seed.
        options: The metric, and the round at which it is taken: last, best or best_val.
        key: The config key.
        path: The file.
    """
    scale = scores.scale_of(options.metric)
    series = []
    for name, line in sorted(values_by_key(groups, options, key).items()):
        xs = sorted(line)
        n = " or ".join(map(str, sorted({len(line[x]) for x in xs})))
        mean, std = ([scale * function(line[x]) for x in xs] for function in (np.mean, np.std))
        series.append(Series(f"{name} (n={n})", xs, mean, std))
    magnitudes = [abs(x) for line in series for x in line.x if x]  # of the key's values except 0
    kind_of_marks = "bars" if max(magnitudes) > 100 * min(magnitudes) else "points"
    ylabel = metric_axis_label(options.metric)
    data = Drawing(kind_of_marks, title="", xlabel=key_title(key), ylabel=ylabel, series=series)
    return drawing.save(drawing.draw_axes(data, figsize=(7, 4.5)), path)


def client_gains(group: Group, runs: list[Run], options: Options) -> np.ndarray:
    """Return each client's gain over Local, its score minus its score under Local with the same seed.

    Seeds whose partition differs from that of the first seed are left out, because their clients are not the same.

    Args:
        group: The runs of a method.
        runs: The runs among which the runs of Local are searched.
        options: The metric, and the selection of rounds.  With "best", each client is compared at its own best round
            in either run, as papers do; else at the last round.

    Returns:
        The gains [S, N]; [0, 0] if there is no run of Local or no score of clients.
    """
    own_best = options.select == "best"
    gains = []
    for run in group.runs:
        local = scores.local_of(run, runs)  # the run itself if it is one of Local; None if there is none
        has_same_partition = run.summary.get("partition_hash") == group.runs[0].summary.get("partition_hash")
        if has_same_partition and local is not run:
            gains.append(scores.gains(run, local, options.metric, own_best))  # empty without a run of Local
    gains = [gain for gain in gains if len(gain)]
    return np.array(gains) if gains else np.empty((0, 0))


def draw_gains(gains: dict[str, np.ndarray], options: Options, path: Path, title: str) -> Path:
    """Draw the gains of clients over Local, a panel per method, and return the path.

    Args:
        gains: From the name of a method to its gains, for S seeds and N clients [S, N].
        options: The metric, and the round at which it is taken: last, best or best_val.
        path: The file.
        title: The description of the setting (data set, partition, model and so on).
    """
    scale = scores.scale_of(options.metric)
    series, titles = [], []
    for name, values in gains.items():
        std = list(scale * values.std(0)) if len(values) > 1 else None
        series.append(Series(name, list(range(values.shape[1])), list(scale * values.mean(0)), std))
        titles.append(f"{name}: mean {scale * np.nanmean(values):+.2f} (n={len(values)})")
    heading = gains_title(options.metric, options.select, any(bars.std for bars in series))
    # a dagger marks methods that fine-tune after the last round only
    tuned = drawing.TUNED_LEGEND if any(DAGGER in name for name in gains) else ""
    heading = "\n".join(filter(None, (heading, drawing.escape_mathtext(title), tuned)))
    data = Drawing("panels", title="", xlabel="Client", ylabel=gains_ylabel(scale), series=series)
    return drawing.save(drawing.draw_panels(data, titles, heading), path)


def gains_title(metric: str, select: str, has_std: bool) -> str:
    """Return the title of a figure of gains.

    Args:
        metric: A column of clients.csv, such as "personal/accuracy".
        select: The selection of rounds; "best" for each client's own best round, else the last round.
        has_std: Whether the bars have lines for the standard deviation.
    """
    round = "own best round" if select == "best" else "last round"
    return f"{client_metric_title(metric)}, {round}{f' (lines: {drawing.SPREAD})' if has_std else ''}"


def gains_ylabel(scale: float) -> str:
    """Return "Gain over Local", with " (percentage points)" if ``scale``, the factor for display, is 100."""
    return "Gain over Local" + (" (percentage points)" if scale == 100 else "")


def draw_paper(cells: list[Cell], path: Path) -> Path:
    """Draw a printed table beside our values and return the path.

    There is a panel per column of the table, with the printed value (hollow) and ours (filled) of each method.

    Args:
        cells: The cells of the table, at least one.
        path: The file.
    """
    panels: dict[Any, list[Cell]] = {}
    for cell in cells:  # key: values of KEYS, the column of the table; overrides: how our runs depart from it
        panels.setdefault((cell.key, cell.overrides), []).append(cell)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)  # rounded up
    size = (4.6 * columns, rows * (1 + 0.28 * max(map(len, panels.values()))))  # inches; 0.28 for each method
    figure, grid = drawing.pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    # The title of a panel has the metric, and the other KEYS in which the panels differ.
    varying = [i for i, name in enumerate(KEYS) if name == "metric" or len({cell.key[i] for cell in cells}) > 1]
    for axes, ((key, overrides), members) in zip(grid.flat, panels.items()):
        _draw_values(axes, members)
        lines = [textwrap.shorten(f"{KEYS[i]} {key[i]}", width=60) for i in varying]
        axes.set_title("\n".join(filter(None, [*lines, overrides])), fontsize=8)
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=2, frameon=False)
    return drawing.save(figure, path)


def _draw_values(axes: Any, cells: list[Cell]) -> None:
    """Draw printed and our values of a printed table's column: one line of the panel per cell, the first on top.

    A cell that was not run has the mean NaN, for which matplotlib draws no mark.
    """
    positions = -np.arange(len(cells))
    styles = {"printed": {"color": "0.25", "marker": "o", "mfc": "white"},
              "ours": {"color": drawing.COLOURS[0], "marker": "D", "ms": 5}}  # fmt: skip
    values = {"printed": [cell.reported for cell in cells], "ours": [cell.ours for cell in cells]}
    for shift, (name, style) in zip((0.12, -0.12), styles.items()):  # printed above ours, on a line of height 1
        spreads = values[name]
        means, stds = [spread.mean for spread in spreads], [spread.std or 0 for spread in spreads]
        axes.errorbar(means, positions + shift, xerr=stds, ls="", label=name, capsize=2, **style)
    names = [cell.row["method"] + (f" (n={cell.ours.count})" if cell.ours.count else "") for cell in cells]
    axes.set_yticks(positions, [drawing.escape_mathtext(name) for name in names], fontsize=8)
    drawing.style_axes(axes)
