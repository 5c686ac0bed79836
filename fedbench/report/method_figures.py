"""Figures of papers about one run: relationships between clients, experts, new clients, and scores of clients.

Heat maps of APPLE's relationships, the change in PGFed's A with two regressions, the weights of pFedMoAP's experts,
and the distances of pFedNet's personal parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import require
from fedbench.data._files import read_npz
from fedbench.report import drawing, scores
from fedbench.report.display import client_metric_title, legend_name, metric_axis_label
from fedbench.report.drawing import Series
from fedbench.report.runs import Run, read_table
from fedbench.report.summary import Group
from fedbench.report.table import DataFrame, pandas

MATRICES, MEASURED, NEW_CLIENTS = "matrices.npz", "measured.npz", "new_clients.csv"
MAX_COLOURS = 20  # bars with more parts are drawn as a heat map
MAX_NAMES = 40  # clients whose names are written below their bars


@dataclass(frozen=True)
class Regression:
    """A least-squares line y = slope x + intercept, and Pearson's r; NaN if all x are equal."""

    slope: float
    intercept: float
    r: float

    def __str__(self) -> str:
        return f"slope {self.slope:.3g}, r {self.r:.3f}"


def regression(x: np.ndarray, y: np.ndarray) -> Regression:
    """Return slope, intercept and correlation of the least-squares line of y [n] over x [n].

    All three are NaN if all x are equal.  The correlation is also NaN if all y are equal.
    """
    dx, dy = x - x.mean(), y - y.mean()
    xx, yy, xy = float(dx @ dx), float(dy @ dy), float(dx @ dy)  # sums of squares and of products
    slope = xy / xx if xx else float("nan")
    r = xy / (xx * yy) ** 0.5 if xx * yy else float("nan")
    return Regression(slope, intercept=float(y.mean()) - slope * float(x.mean()), r=r)


def matrices(run: Run) -> dict[str, np.ndarray]:
    """Return the arrays of matrices.npz by name; empty without the file.

    "rounds" [R] are the recorded rounds.  Methods record others: APPLE "d" [R, N, N] and PGFed "A" [R, N, N], the
    weights of other clients for each client, and pFedNet "sdwd" [R, M], the standard deviation of each of M personal
    parameters over clients.
    """
    path = run.path / MATRICES
    return read_npz(path) if path.is_file() else {}


def label_counts(run: Run) -> DataFrame | None:
    """Return the numbers of training samples by client and class [N, C], with class names as columns.

    None if the run's partition.json has no such numbers, as for data without classes.
    """
    counts = run.partition.get("label_counts")
    if counts is None:
        return None
    frame = pandas().DataFrame(counts)
    names = run.partition.get("class_names") or frame.columns
    return frame.set_axis([str(name) for name in names], axis="columns")


def figure_title(run: Run) -> str:
    """Return the title of a run's figures, such as "FedAvg, mnist, dirichlet partition, seed 0"."""
    name = legend_name({"method": run.method}, run.tuned, run.conf)
    return drawing.escape_mathtext(
        f"{name}, {run.choice('dataset')}, {run.choice('partition')} partition, seed {run.seed}"
    )


def recorded_positions(rounds: np.ndarray, asked: list[int] | None) -> list[int]:
    """Return the positions in ``rounds`` of the recorded rounds that are nearest to the asked ones, each one once.

    Args:
        rounds: The recorded rounds [R].
        asked: Rounds; None for the first, the middle and the last recorded round.
    """
    if asked is None:
        asked = [int(rounds[0]), int(rounds[len(rounds) // 2]), int(rounds[-1])]
    return list(dict.fromkeys(int(np.abs(rounds - r).argmin()) for r in asked))


def draw_heat_map(axes: Any, values: np.ndarray, extent: float, title: str) -> Any:
    """Draw a matrix of relationships between clients as a heat map.

    Args:
        axes: The axes.
        values: The matrix [N, N].
        extent: The absolute value of the darkest colours, red for extent and blue for -extent.
        title: The title.

    Returns:
        The image of matplotlib, for a colour bar.
    """
    image = axes.imshow(values, cmap="RdBu_r", vmin=-extent, vmax=extent, interpolation="nearest")
    axes.set(title=title, xlabel="Client $j$")
    drawing.set_integer_ticks(axes)
    return image


def draw_relationships(run: Run, path: Path, rounds: list[int] | None = None) -> Path:
    """Draw heat maps of APPLE's d_ij beside the training labels of each client, and return the path.

    d_ij is the weight with which client i (row) uses the core model of client j (column).

    Args:
        run: A run of APPLE.
        path: The file.
        rounds: The rounds, a heat map each; None for the first, the middle and the last recorded round.
    """
    stored = matrices(run)
    d = stored["d"]  # [R, N, N]
    positions = recorded_positions(stored["rounds"], rounds)
    counts = label_counts(run)
    width = len(positions) + (counts is not None)
    figure, row = drawing.pyplot().subplots(
        1, width, figsize=(3.4 * width + 0.8, 3.8), squeeze=False, layout="constrained"
    )
    extent = float(np.abs(d[positions]).max()) or 1.0
    image = None
    for axes, position in zip(row[0], positions):
        round = stored["rounds"][position]
        image = draw_heat_map(axes, d[position], extent, "initial" if round == 0 else f"round {round}")
    row[0, 0].set_ylabel("Client $i$")
    figure.colorbar(image, ax=row[0, : len(positions)].tolist(), shrink=0.8, label="$d_{ij}$")
    if counts is not None:
        draw_stacked_bars(row[0, -1], counts, horizontal=True)
        row[0, -1].set(title="training labels", xlabel="Images", ylabel="Client", ylim=(d.shape[1] - 0.5, -0.5))
        row[0, -1].set_box_aspect(1)  # so that rows have the same height as in the heat maps
    figure.suptitle(figure_title(run), fontsize=10)
    return drawing.save(figure, path)


def draw_sdwd(run: Run, path: Path, rounds: list[int] | None = None) -> Path:
    """Draw histograms of the standard deviation over clients of each personal parameter, and return the path.

    Args:
        run: A run of pFedNet.
        path: The file.
        rounds: The rounds, a histogram each; None for the first, the middle and the last recorded round.

    References:
        pFedNet, Figures 7 and 11.
    """
    stored = matrices(run)
    deviations = stored["sdwd"]  # [R, M]: recorded rounds, personal parameters
    figure, axes = drawing.pyplot().subplots(figsize=(5.2, 3.4), layout="constrained")
    positions = recorded_positions(stored["rounds"], rounds)
    bins = np.linspace(0, float(deviations[positions].max()) or 1.0, 41)  # the edges of 40 bins
    for k, position in enumerate(positions):
        values = deviations[position]
        round = stored["rounds"][position]
        if round == 0 and len(positions) > 1 and not values.any():
            continue  # all clients have the same initial model
        label = f"round {round}, mean {values.mean():.3g}"
        axes.hist(values, bins, histtype="step", color=drawing.COLOURS[k % len(drawing.COLOURS)], label=label)
    axes.set(xlabel="Standard deviation over clients of a coordinate", ylabel="Coordinates")
    axes.set_title(figure_title(run), fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    drawing.style_axes(axes)
    return drawing.save(figure, path)


def draw_paths(run: Run, path: Path, client: int = 0) -> Path:
    """Draw APPLE's |d_ij| of one client i, and |d_jj| of every client, over the recorded rounds; return the path.

    Args:
        run: A run of APPLE.
        path: The file.
        client: The client i.
    """
    stored = matrices(run)
    rounds, values = stored["rounds"], np.abs(stored["d"])  # [R], [R, N, N]
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for j in range(values.shape[1]):
        left.plot(rounds, values[:, client, j], label=f"{j}", lw=1.2, **drawing.line_style(j))
        right.plot(rounds, values[:, j, j], lw=1.2, **drawing.line_style(j))
    left.set(title=f"client {client}: how much it uses every client $j$", ylabel="$|d_{ij}|$", xlabel="Round")
    right.set(title="how much each client uses its own", ylabel="$|d_{jj}|$", xlabel="Round")
    if values.shape[1] <= MAX_NAMES:
        figure.legend(title="client $j$", loc="outside right upper", fontsize=8, frameon=False)
    for axes in (left, right):
        drawing.set_integer_ticks(axes, "x")
        drawing.style_axes(axes)
    return drawing.save(figure, path)


def draw_labels(run: Run, path: Path) -> Path:
    """Draw the training images of each client by class, and of each class by client, and return the path.

    Raises:
        ConfigError: The run did not record them.
    """
    counts = label_counts(run)
    require(
        counts is not None,
        f"{run.path} has no label counts in its partition.json, which runs on data without classes lack: leave it out",
    )
    assert counts is not None
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_stacked_bars(left, counts)
    draw_stacked_bars(right, counts.T)
    left.set(title="by class", xlabel="Client", ylabel="Training images")
    right.set(title="by client", xlabel="Class", ylabel="Training images")
    return drawing.save(figure, path)


def draw_stacked_bars(axes: Any, counts: DataFrame, horizontal: bool = False) -> None:
    """Draw stacked bars, or a heat map if the bars have more than `MAX_COLOURS` parts.

    Args:
        axes: The axes.
        counts: The sizes [bars, parts]; the columns name the parts, such as classes.
        horizontal: Whether bars are horizontal.
    """
    bars, parts = counts.shape
    values = counts.to_numpy()
    if parts > MAX_COLOURS:
        axes.imshow(values if horizontal else values.T, aspect="auto", cmap="Blues", interpolation="nearest")
        drawing.set_integer_ticks(axes)
        return
    # matplotlib names the option for the position where a bar begins by its direction
    draw, start_option = (axes.barh, "left") if horizontal else (axes.bar, "bottom")
    colours = drawing.pyplot().get_cmap("tab20" if parts > 10 else "tab10").colors
    start = np.zeros(bars)
    for k, name in enumerate(counts.columns):
        colour = colours[k % len(colours)]
        draw(np.arange(bars), values[:, k], 0.85, **{start_option: start}, color=colour, label=str(name))
        start = start + values[:, k]
    drawing.set_integer_ticks(axes)
    axes.set(**{"ylim" if horizontal else "xlim": (-0.6, bars - 0.4)})
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=7, frameon=False, handlelength=0.8)


def change_in_a(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the change in PGFed's A, and the number of training images of each client.

    A_ij is the weight that client i gives to the risk of client j.  Clients that joined after training are left out.

    Returns:
        The last recorded A minus the first one [N, N], and the sizes [N].

    Raises:
        ConfigError: partition.json has no sizes of clients.
    """
    recorded = matrices(run)["A"]  # [R, N, N]
    change = recorded[-1].astype(np.float64) - recorded[0]
    sizes = np.array(run.partition.get("train", []), np.float64)
    require(
        len(sizes) >= len(change),
        f"{run.path} has no sizes of clients in its partition.json: restore this file, or run it again",
    )
    return change, sizes[: len(change)]  # new clients are the last ones


def regressions(run: Run) -> tuple[Regression, Regression]:
    """Return the regressions of the column means and the row means of the change in A on the clients' sizes.

    A [N, N] are PGFed's weights: A[i, j] is the weight that client i gives to the risk of client j.  The mean of
    column j is over the weights that client j receives, and that of row i over the weights that client i gives.
    """
    change, sizes = change_in_a(run)
    return regression(sizes, change.mean(0)), regression(sizes, change.mean(1))


def draw_change(run: Run, path: Path) -> Path:
    """Draw the change in PGFed's A as a heat map, and its column and row means over the clients' training images.

    The means are drawn with their regression lines.  The path is returned.
    """
    change, sizes = change_in_a(run)  # [N, N], and the training images of each client [N]
    figure, (left, middle, right) = drawing.pyplot().subplots(1, 3, figsize=(12.5, 3.8), layout="constrained")
    image = draw_heat_map(left, change, float(np.abs(change).max()) or 1.0, "$\\Delta A$")
    left.set_ylabel("Client $i$")
    figure.colorbar(image, ax=left, shrink=0.85)
    panels = ((middle, change.mean(0), "j", "Column means"), (right, change.mean(1), "i", "Row means"))
    for axes, means, index, label in panels:
        line = regression(sizes, means)
        axes.scatter(sizes, means, s=18, color=drawing.COLOURS[0])
        if np.isfinite(line.slope):
            ends = np.array([sizes.min(), sizes.max()])
            axes.plot(ends, line.slope * ends + line.intercept, color=drawing.COLOURS[1])
        axes.set(title=str(line), ylabel=f"{label} of $\\Delta A$", xlabel=f"Training images $n_{index}$")
        drawing.style_axes(axes)
    figure.suptitle(figure_title(run), fontsize=10)
    return drawing.save(figure, path)


def experts(run: Run) -> np.ndarray:
    """Return the weights that each client of pFedMoAP gives to its experts, the local expert first.

    Returns:
        The weights [clients, experts] of the clients that have experts; [0, 1] if the run measured none.
    """
    path = run.path / MEASURED  # measured.npz, what methods measure besides scores
    values = (read_npz(path) if path.is_file() else {}).get("experts", np.empty((0, 1)))
    return values[np.isfinite(values).all(1)]


def draw_experts(run: Run, path: Path) -> Path:
    """Draw the mean weights of pFedMoAP's experts, with a dot per client, and return the path.

    The local expert is the first bar.  The others are in descending order of their weights.
    """
    values = experts(run)
    count = values.shape[1]
    figure, axes = drawing.pyplot().subplots(figsize=(max(4.0, 0.45 * count + 1.5), 3.6), layout="constrained")
    bars = axes.bar(range(count), values.mean(0), 0.75, color=[drawing.COLOURS[1], *[drawing.COLOURS[0]] * (count - 1)])
    axes.bar_label(bars, fmt="%.3f", label_type="center", rotation=90, fontsize=8, color="white")
    for weights in values:
        axes.plot(range(count), weights, ".", color="black", ms=3, alpha=0.5)
    axes.set_xticks(range(count), ["local", *map(str, range(1, count))])
    axes.set(xlabel="Expert (others by weight)", ylabel="Mean weight", title=figure_title(run))
    drawing.style_axes(axes)
    return drawing.save(figure, path)


def adaptation(run: Run) -> np.ndarray:
    """Return the mean score of new clients, in the run's primary metric, before and after each epoch of adaptation.

    New clients join after training and adapt a model to their own samples.

    Returns:
        The scores [epochs + 1]; empty without new clients.
    """
    table = read_table(run.path / NEW_CLIENTS)  # columns epoch, client and each score, such as accuracy
    return table.groupby("epoch")[run.primary.partition("/")[2]].mean().to_numpy() if len(table) else np.empty(0)


def draw_new_clients(groups: list[Group], path: Path, title: str = "") -> Path:
    """Draw the scores of clients that join after training, and return the path.

    The left panel has a bar per method for its best epoch, with a horizontal line at the score before the first epoch.
    The right panel has curves over epochs.

    Args:
        groups: The groups of one setting (data set, partition, model and so on); all runs have new clients.
        path: The file.
        title: The description of the setting.
    """
    metric = groups[0].runs[0].primary
    scale = scores.scale_of(metric)
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for i, group in enumerate(groups):
        curves = scale * np.stack([adaptation(run) for run in group.runs])  # [seeds, epochs + 1]
        several = len(curves) > 1
        best = curves.min(1) if scores.lower_is_better(metric) else curves.max(1)
        colour = drawing.line_style(i)["color"]
        bar = left.bar(i, best.mean(), 0.7, yerr=best.std() if several else None, color=colour, capsize=3)
        left.bar_label(bar, fmt="%.1f" if scale == 100 else "%.3g", fontsize=8, padding=2)
        left.hlines(curves[:, 0].mean(), i - 0.35, i + 0.35, color="black", lw=1.2)
        epochs = list(range(curves.shape[1]))
        std = curves.std(0) if several else None
        drawing.draw_line(right, i, Series(f"{group.name} (n={len(curves)})", epochs, curves.mean(0), std))
    names = [drawing.escape_mathtext(group.name) for group in groups]
    left.set_xticks(range(len(groups)), names, rotation=30, ha="right", fontsize=8)
    ylabel = metric_axis_label(metric).replace("clients", "new clients", 1)
    left.set(title="best epoch (line: before the first)", ylabel=ylabel)
    right.set(title="over epochs of their own", xlabel="Epoch")
    drawing.set_integer_ticks(right, "x")
    drawing.add_legend(figure, right)
    for axes in (left, right):
        drawing.style_axes(axes)
    figure.suptitle(drawing.escape_mathtext(title), fontsize=10)
    return drawing.save(figure, path)


def losses_inside_rounds(run: Run) -> DataFrame:
    """Return the mean over clients of the training loss at the first and the last local step of each round.

    Returns:
        A DataFrame [R, 2] with the columns first_loss and last_loss, indexed by round (from 1); empty if the method
        does not record them.
    """
    stored = matrices(run)
    names = ("first_loss", "last_loss")
    if not {"rounds", *names} <= stored.keys():
        return pandas().DataFrame()
    losses = pandas().DataFrame({name: stored[name].mean(1) for name in names}, index=stored["rounds"])
    return losses[losses.index > 0]  # the values of round 0 were recorded before training


def draw_inside_rounds(groups: list[Group], path: Path, title: str = "") -> Path:
    """Draw the training loss at the first and at the last local step of each round, and return the path.

    The change from the last loss of a round to the first loss of the next one is the effect of aggregation.

    Args:
        groups: The groups of one setting (data set, partition, model and so on); all runs recorded these losses.
        path: The file.
        title: The description of the setting.

    References:
        FedPIA, Figure 4.
    """
    figure, axes = drawing.pyplot().subplots(figsize=(8, 4), layout="constrained")
    for i, group in enumerate(groups):
        tables = [losses_inside_rounds(run) for run in group.runs]
        count = min(map(len, tables))
        rounds = tables[0].index.to_numpy()[:count]  # [R]
        losses = np.array([table[:count] for table in tables])  # [seeds, R, 2]
        mean, std = losses.mean(0), losses.std(0)  # [R, 2] each
        is_next = np.diff(rounds) == 1  # runs that are not evaluated in every round do not record all rounds
        steps = (mean[1:, 0] - mean[:-1, 1])[is_next]  # effect of aggregation between two successive rounds
        label = f"{group.name} (n={len(tables)})" + (f", mean step {steps.mean():+.3g}" if len(steps) else "")
        gaps = 1 + np.flatnonzero(~is_next)  # a NaN is inserted there, so that no line bridges the gap
        lines = (np.stack([rounds - 1.0, rounds], 1), mean, std)  # a round lasts from r - 1 to r
        x, y, deviation = (np.insert(values, gaps, np.nan, 0).ravel() for values in lines)
        drawing.draw_line(axes, i, Series(label, x, y, deviation if len(tables) > 1 else None), lw=1.2)
    axes.set(xlabel="Round", ylabel="Training loss", title=drawing.escape_mathtext(title))
    drawing.add_legend(figure, axes)
    drawing.style_axes(axes)
    return drawing.save(figure, path)


def draw_run(run: Run, path: Path, metric: str = "personal/accuracy") -> Path:
    """Draw the metric and the training loss over rounds, and each client's value at the best round; return the path.

    Args:
        run: The run.
        path: The file.
        metric: A metric of clients, personal/...
    """
    figure = drawing.pyplot().figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    left, right = top.subplots(1, 2)
    values, loss = scores.curve(run, metric), scores.curve(run, "train/loss")
    line = Series("", values.index, scores.scale_of(metric) * values, std=None, tuned=run.tuned)  # one run, no name
    drawing.draw_line(left, i=0, series=line)
    # tuned: the method fine-tunes after the last round only
    title = f"open marker: {drawing.TUNED_LEGEND}" if run.tuned else ""
    left.set(ylabel=metric_axis_label(metric), xlabel="Round", title=title)
    drawing.draw_line(right, i=2, series=Series("", loss.index, loss))  # i: in another colour
    right.set(ylabel=metric_axis_label("train/loss"), xlabel="Round")
    draw_clients(bottom.subplots(), run, metric, scores.selected_round(run, metric, "best"))
    for axes in (left, right):
        drawing.style_axes(axes)
    figure.suptitle(figure_title(run), fontsize=10)
    return drawing.save(figure, path)


def draw_clients(axes: Any, run: Run, metric: str, round: float | None) -> None:
    """Draw a bar per client for its score at a round, and the mean of the bars as a line.

    Args:
        axes: The axes.
        run: The run.
        metric: A column of clients.csv.
        round: The round; None if the metric has no best round.

    Raises:
        ConfigError: clients.csv has no such round.
    """
    values = run.clients(metric)
    require(
        round in values.index, f"{run.path / 'clients.csv'} has no {metric} at round {round}: choose another --metric"
    )
    scale = scores.scale_of(metric)
    values = scale * values.loc[round]  # [N]
    clients, mean = values.index, values.mean()
    axes.bar(clients, values, 0.85, color=drawing.COLOURS[0])
    axes.axhline(mean, color=drawing.COLOURS[1], lw=1.2)
    axes.set_xlim(clients.min() - 0.6, clients.max() + 0.6)
    axes.set(title=f"each client at the best round, {round:.0f} (line: mean {mean:.2f})", xlabel="Client")
    axes.set_ylabel(client_metric_title(metric) + (" (%)" if scale == 100 else ""))
    drawing.set_integer_ticks(axes, "x")
    if run.partition.get("names") and len(clients) <= MAX_NAMES:
        names = [drawing.escape_mathtext(run.partition["names"][int(client)]) for client in clients]
        axes.set_xticks(clients, names, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=7)
    drawing.style_axes(axes)
