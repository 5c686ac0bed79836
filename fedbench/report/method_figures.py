"""What the papers draw of a method: who learned to use whom, how new clients adapt, how each client fares.

APPLE's directed relationships (heat maps beside the label distribution), the change in PGFed's A with its two
regressions, new clients' bars and curves, each client's accuracy at the best round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.files import read_json
from fedbench.core.options import require
from fedbench.data._files import read_npz
from fedbench.report import scores
from fedbench.report.drawing import (
    COLOURS,
    TUNED_HERE,
    draw_line,
    legend,
    literal,
    look,
    pyplot,
    save,
    tidy,
    whole_numbers,
)
from fedbench.report.runs import Run, read_table
from fedbench.report.summary import Group
from fedbench.report.words import line_of, metric_axis, of_each_client

MATRICES, MEASURED, NEW_CLIENTS = "matrices.npz", "measured.npz", "new_clients.csv"
MOST_LABELS = 20  # classes told apart by colour; more are drawn as a heat map
WIDEST = 40  # clients whose bars are numbered one by one


@dataclass(frozen=True)
class Line:
    """A least-squares line y = slope x + intercept, and Pearson's r; NaN where all x are equal."""

    slope: float
    intercept: float
    r: float

    def __str__(self) -> str:
        return f"slope {self.slope:.3g}, r {self.r:.3f}"


def regression(x: np.ndarray, y: np.ndarray) -> Line:
    """The line through the points x [n], y [n]."""
    dx, dy = x - x.mean(), y - y.mean()
    xx, yy, xy = float(dx @ dx), float(dy @ dy), float(dx @ dy)
    slope = xy / xx if xx else float("nan")
    return Line(slope, float(y.mean()) - slope * float(x.mean()), xy / (xx * yy) ** 0.5 if xx * yy else float("nan"))


def matrices(run: Run) -> dict[str, np.ndarray]:
    """What matrices.npz holds: rounds [R] and each matrix [R, N, N]; {} without the file."""
    path = run.path / MATRICES
    return read_npz(path) if path.is_file() else {}


def measured(run: Run) -> dict[str, np.ndarray]:
    """What measured.npz holds: client [K] and what was measured of each [K, ...]; {} without the file."""
    path = run.path / MEASURED
    return read_npz(path) if path.is_file() else {}


def partition(run: Run) -> dict[str, Any]:
    """partition.json: train [N], label_counts [N, C], class_names ..."""
    return read_json(run.path / "partition.json")


# -- relationships ---------------------------------------------------------------------------------------
def chosen_rounds(rounds: np.ndarray, wanted: list[int] | None) -> list[int]:
    """Positions of the wanted rounds (default: the first, one in the middle, the last); the nearest recorded."""
    if wanted is None:
        wanted = [int(rounds[0]), int(rounds[len(rounds) // 2]), int(rounds[-1])]
    return list(dict.fromkeys(int(np.abs(rounds - r).argmin()) for r in wanted))


def draw_relationships(run: Run, path: Path, wanted: list[int] | None = None, name: str = "d") -> Path:
    """Heat maps of d_ij (row: the client that uses, column: whose core) beside each client's training labels."""
    plt = pyplot()
    stored = matrices(run)
    rounds, values = stored["rounds"], stored[name]  # [R], [R, N, N]
    places = chosen_rounds(rounds, wanted)
    counts, classes = labels_of(run)
    wide = len(places) + (counts is not None)
    figure, row = plt.subplots(1, wide, figsize=(3.4 * wide + 0.8, 3.8), squeeze=False, layout="constrained")
    extent = float(np.abs(values[places]).max()) or 1.0
    shown = None
    for axes, at in zip(row[0], places):
        shown = axes.imshow(values[at], cmap="RdBu_r", vmin=-extent, vmax=extent, interpolation="nearest")
        axes.set(title="initial" if rounds[at] == 0 else f"round {rounds[at]}", xlabel="Client $j$")
        whole_numbers(axes)
    row[0, 0].set_ylabel("Client $i$")
    figure.colorbar(shown, ax=row[0, : len(places)].tolist(), shrink=0.8, label=f"${name}_{{ij}}$")
    if counts is not None:
        stacked(row[0, -1], counts, classes, across=False)
        clients = values.shape[1]
        row[0, -1].set(title="training labels", xlabel="Images", ylabel="Client", ylim=(clients - 0.5, -0.5))
        row[0, -1].set_box_aspect(1)  # row i beside row i of the heat maps
    figure.suptitle(title_of(run), fontsize=10)
    return save(figure, path)


def draw_sdwd(run: Run, path: Path, wanted: list[int] | None = None) -> Path:
    """Histograms of how far clients' personal parts are apart, over coordinates (pFedNet, Figures 7 and 11)."""
    stored = matrices(run)
    rounds, values = stored["rounds"], stored["sdwd"]  # [R], [R, M]
    figure, axes = pyplot().subplots(figsize=(5.2, 3.4), layout="constrained")
    places = chosen_rounds(rounds, wanted)
    bins = np.linspace(0, float(values[places].max()) or 1.0, 41)
    for k, at in enumerate(places):
        if rounds[at] == 0 and len(places) > 1 and not values[at].any():
            continue  # all clients begin with one model
        label = f"round {rounds[at]}, mean {values[at].mean():.3g}"
        axes.hist(values[at], bins, histtype="step", color=COLOURS[k % len(COLOURS)], label=label)
    axes.set(xlabel="Standard deviation over clients of a coordinate", ylabel="Coordinates")
    axes.set_title(title_of(run), fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return save(figure, path)


def draw_paths(run: Run, path: Path, client: int = 0, name: str = "d") -> Path:
    """|d_1j| of one client and |d_jj| of every client over the recorded rounds."""
    plt = pyplot()
    stored = matrices(run)
    rounds, values = stored["rounds"], np.abs(stored[name])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for j in range(values.shape[1]):
        left.plot(rounds, values[:, client, j], label=f"{j}", lw=1.2, **look(j))
        right.plot(rounds, values[:, j, j], lw=1.2, **look(j))
    left.set(title=f"client {client}: how much it uses every client $j$", ylabel=f"$|{name}_{{ij}}|$", xlabel="Round")
    right.set(title="how much each client uses its own", ylabel=f"$|{name}_{{jj}}|$", xlabel="Round")
    if values.shape[1] <= WIDEST:
        figure.legend(title="client $j$", loc="outside right upper", fontsize=8, frameon=False)
    for axes in (left, right):
        whole_numbers(axes, both=False)
        tidy(axes)
    return save(figure, path)


def draw_labels(run: Run, path: Path) -> Path:
    """Training images per client by class, and per class by client."""
    plt = pyplot()
    counts, classes = labels_of(run)
    require(counts is not None, f"{run.path} has no label counts in its partition.json")
    assert counts is not None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    stacked(left, counts, classes)
    stacked(right, counts.T, [str(i) for i in range(len(counts))])
    left.set(title="by class", xlabel="Client", ylabel="Training images")
    right.set(title="by client", xlabel="Class", ylabel="Training images")
    return save(figure, path)


def labels_of(run: Run) -> tuple[np.ndarray | None, list[str]]:
    """Training images of each class at every client [N, C] (None if not recorded), and the classes' names."""
    facts = partition(run)
    counts = facts.get("label_counts")
    if counts is None:
        return None, []
    table = np.array(counts)
    return table, [str(name) for name in facts.get("class_names") or range(table.shape[1])]


def stacked(axes: Any, counts: np.ndarray, names: list[str], across: bool = True) -> None:
    """Bars (across: upright) of counts [bars, parts], one colour per part."""
    if counts.shape[1] > MOST_LABELS:
        axes.imshow(counts.T if across else counts, aspect="auto", cmap="Blues", interpolation="nearest")
        whole_numbers(axes)
        return
    place, base = np.arange(len(counts)), np.zeros(len(counts))
    colours = pyplot().get_cmap("tab20" if counts.shape[1] > 10 else "tab10").colors
    for k, name in enumerate(names):
        size = counts[:, k]
        bar = axes.bar(place, size, 0.85, base) if across else axes.barh(place, size, 0.85, base)
        for patch in bar:
            patch.set(facecolor=colours[k % len(colours)])
        bar.set_label(name)
        base = base + size
    whole_numbers(axes)
    axes.set(**{"xlim" if across else "ylim": (-0.6, len(counts) - 0.4)})
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) <= MOST_LABELS:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=7, frameon=False, handlelength=0.8)


# -- the change in A -------------------------------------------------------------------------------------
def change(run: Run, name: str = "A") -> tuple[np.ndarray, np.ndarray]:
    """(the last minus the first recorded matrix [N, N], training images n [N])."""
    stored, sizes = matrices(run), np.array(partition(run).get("train", []), np.float64)
    change = stored[name][-1].astype(np.float64) - stored[name][0]
    require(len(sizes) >= len(change), f"{run.path} has no sizes of clients in its partition.json")
    return change, sizes[: len(change)]  # new clients come last


def regressions(run: Run, name: str = "A") -> tuple[Line, Line]:
    """Of the column means (how others' weight of client j changed) and of the row means (how client i's weights
    of others changed), both against the clients' numbers of training images."""
    delta, sizes = change(run, name)
    return regression(sizes, delta.mean(0)), regression(sizes, delta.mean(1))


def draw_change(run: Run, path: Path, name: str = "A") -> Path:
    """The change as a heat map, and its column and row means against n with their lines."""
    plt = pyplot()
    delta, sizes = change(run, name)
    extent = float(np.abs(delta).max()) or 1.0
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.8), layout="constrained")
    shown = left.imshow(delta, cmap="RdBu_r", vmin=-extent, vmax=extent, interpolation="nearest")
    figure.colorbar(shown, ax=left, shrink=0.85)
    left.set(title=f"$\\Delta {name}$", xlabel="Client $j$", ylabel="Client $i$")
    whole_numbers(left)
    panels = (
        (middle, delta.mean(0), "j", f"Column means of $\\Delta {name}$"),
        (right, delta.mean(1), "i", f"Row means of $\\Delta {name}$"),
    )
    for axes, means, letter, what in panels:
        line = regression(sizes, means)
        axes.scatter(sizes, means, s=18, color=COLOURS[0])
        if np.isfinite(line.slope):
            ends = np.array([sizes.min(), sizes.max()])
            axes.plot(ends, line.slope * ends + line.intercept, color=COLOURS[1])
        axes.set(title=str(line), ylabel=what, xlabel=f"Training images $n_{letter}$")
        tidy(axes)
    figure.suptitle(title_of(run), fontsize=10)
    return save(figure, path)


# -- experts ---------------------------------------------------------------------------------------------
def experts(run: Run, name: str = "experts") -> np.ndarray:
    """The weights [1 + others] of every client that has experts, the local one first; none without the file."""
    values = measured(run).get(name, np.empty((0, 1)))
    return values[np.isfinite(values).all(1)]


def draw_experts(run: Run, path: Path) -> Path:
    """pFedMoAP's mean weight of the local expert and of the others, in descending order; a dot for each client."""
    plt, values = pyplot(), experts(run)
    figure, axes = plt.subplots(figsize=(max(4.0, 0.45 * values.shape[1] + 1.5), 3.6), layout="constrained")
    place = np.arange(values.shape[1])
    bars = axes.bar(place, values.mean(0), 0.75, color=[COLOURS[1], *[COLOURS[0]] * (len(place) - 1)])
    axes.bar_label(bars, fmt="%.3f", label_type="center", rotation=90, fontsize=8, color="white")
    for own in values:
        axes.plot(place, own, ".", color="black", ms=3, alpha=0.5)
    axes.set_xticks(place, ["local", *map(str, place[1:])])
    axes.set(xlabel="Expert (others by weight)", ylabel="Mean weight", title=title_of(run))
    tidy(axes)
    return save(figure, path)


# -- new clients -----------------------------------------------------------------------------------------
def adaptation(run: Run) -> np.ndarray:
    """Mean score of the new clients after 0, 1, 2 ... epochs, [epochs + 1]; empty without new clients."""
    table = read_table(run.path / NEW_CLIENTS)
    return table.groupby("epoch")[run.primary.partition("/")[2]].mean().to_numpy() if len(table) else np.empty(0)


def draw_new_clients(groups: list[Group], path: Path, title: str = "") -> Path:
    """A bar per method (its best epoch, mean and std over seeds; a line at epoch 0), and the curves over epochs."""
    plt = pyplot()
    metric = groups[0].runs[0].primary
    scale = scores.scale_of(metric)
    found = [(g.name, scale * np.stack([adaptation(run) for run in g.runs])) for g in groups]  # [seeds, epochs + 1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for i, (name, curves) in enumerate(found):
        best, several = scores.best_of(curves.T, metric), len(curves) > 1
        bar = left.bar(i, best.mean(), 0.7, yerr=best.std() if several else None, color=look(i)["color"], capsize=3)
        left.bar_label(bar, fmt="%.1f" if scale == 100 else "%.3g", fontsize=8, padding=2)
        left.hlines(curves[:, 0].mean(), i - 0.35, i + 0.35, color="black", lw=1.2)
        std = curves.std(0) if several else None
        draw_line(right, i, np.arange(curves.shape[1]), curves.mean(0), std, f"{name} (n={len(curves)})")
    left.set_xticks(range(len(found)), [literal(name) for name, _ in found], rotation=30, ha="right", fontsize=8)
    left.set(
        title="best epoch (line: before the first)", ylabel=metric_axis(metric).replace("clients", "new clients", 1)
    )
    right.set(title="over epochs of their own", xlabel="Epoch")
    whole_numbers(right, both=False)
    legend(figure, right)
    for axes in (left, right):
        tidy(axes)
    figure.suptitle(literal(title), fontsize=10)
    return save(figure, path)


def inside_rounds(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The rounds [R] and the mean over clients of their loss at the first and last local step [R, 2], where the
    method recorded both; none of round 0, before which nobody trains."""
    stored = matrices(run)
    if not {"rounds", "first_loss", "last_loss"} <= stored.keys():
        return np.empty(0, int), np.empty((0, 2))
    losses = np.stack([stored[name].mean(1) for name in ("first_loss", "last_loss")], 1)  # [R, 2]
    trained = stored["rounds"] > 0
    return stored["rounds"][trained], losses[trained]


def draw_inside_rounds(groups: list[Group], path: Path, title: str = "") -> Path:
    """The training loss from each round's first local step to its last, mean over clients and seeds with a band of one
    population std over seeds: the step from one round's last to the next one's first is what aggregation did (FedPIA,
    Figure 4)."""
    figure, axes = pyplot().subplots(figsize=(8, 4), layout="constrained")
    for i, group in enumerate(groups):
        found = [inside_rounds(run) for run in group.runs]
        rounds = found[0][0][: min(len(r) for r, _ in found)]  # [R]
        losses = np.array([each[: len(rounds)] for _, each in found])  # [seeds, R, 2]
        mean, std = losses.mean(0), losses.std(0)  # [R, 2] each
        follows = np.diff(rounds) == 1  # a run that is not evaluated in every round recorded some of them
        steps = (mean[1:, 0] - mean[:-1, 1])[follows]
        label = f"{group.name} (n={len(found)})" + (f", mean step {steps.mean():+.3g}" if len(steps) else "")
        gaps = 1 + np.flatnonzero(~follows)
        when = np.insert(np.stack([rounds - 1.0, rounds], 1), gaps, np.nan, 0)  # a round lasts from r - 1 to r
        mean, std = (np.insert(values, gaps, np.nan, 0).ravel() for values in (mean, std))
        draw_line(axes, i, when.ravel(), mean, std if len(found) > 1 else None, label, lw=1.2)
    axes.set(xlabel="Round", ylabel="Training loss", title=literal(title))
    legend(figure, axes)
    tidy(axes)
    return save(figure, path)


# -- one run ---------------------------------------------------------------------------------------------
def draw_run(run: Run, path: Path, metric: str = "personal/accuracy") -> Path:
    """The metric and the training loss over rounds, and each client's value at the best round."""
    plt = pyplot()
    values, loss = scores.curve(run, metric), scores.curve(run, "train/loss")
    scale = scores.scale_of(metric)
    best = scores.selected_round(run, metric, "best")
    figure = plt.figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    left, right = top.subplots(1, 2)
    draw_line(left, 0, values.index, scale * values, None, "", run.tuned)
    left.set(ylabel=metric_axis(metric), xlabel="Round", title=f"open marker: {TUNED_HERE}" if run.tuned else "")
    draw_line(right, 2, loss.index, loss, None, "")
    right.set(ylabel=metric_axis("train/loss"), xlabel="Round")
    client_bars(bottom.subplots(), run, metric, best)
    for axes in (left, right):
        tidy(axes)
    figure.suptitle(title_of(run), fontsize=10)
    return save(figure, path)


def client_bars(axes: Any, run: Run, metric: str, round: float | None) -> None:
    """A bar per client at a round, and their mean."""
    values = run.clients(metric)
    require(round in values.index, f"{run.path} has no {metric} per client")
    scale = scores.scale_of(metric)
    own = scale * values.loc[round]
    ids, mean = own.index, own.mean()
    axes.bar(ids, own, 0.85, color=COLOURS[0])
    axes.axhline(mean, color=COLOURS[1], lw=1.2)
    axes.set_xlim(ids.min() - 0.6, ids.max() + 0.6)
    axes.set(title=f"each client at the best round, {round:.0f} (line: mean {mean:.2f})", xlabel="Client")
    axes.set_ylabel(of_each_client(metric) + (" (%)" if scale == 100 else ""))
    whole_numbers(axes, both=False)
    if run.client_names and len(ids) <= WIDEST:
        names = [literal(run.client_names[int(i)]) for i in ids]
        axes.set_xticks(ids, names, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=7)
    tidy(axes)


# -- looks -----------------------------------------------------------------------------------------------
def title_of(run: Run) -> str:
    """The title of a run's figure: method, data set, partition, seed."""
    name = line_of({"method": run.method}, run.tuned, run.conf)
    return literal(f"{name}, {run.choice('dataset')}, {run.choice('partition')} partition, seed {run.seed}")
