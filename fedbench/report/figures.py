"""The figures of a report: accuracy over rounds with its spread over seeds, each client's gain over Local."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.report import scores
from fedbench.report.paper import KEYS, Cell
from fedbench.report.runs import Run
from fedbench.report.summary import SHOWN, Group, Options
from fedbench.report.table import one_line

# Okabe and Ito's colours, told apart with any colour vision; then again with another line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
LINES = ("-", "--", ":", "-.")


def pyplot() -> Any:
    """matplotlib.pyplot without a window; ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install 'fedbench[report]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(groups: list[Group], runs: list[Run], options: Options, folder: Path) -> list[Path]:
    """Write the figures of every setting (data set, partition, model ...) into folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for setting, members in by_setting(groups).items():
        end = file_name(setting, options.metric)
        written.append(draw_curves(members, options, folder / f"curves_{end}.png", setting))
        gains = {g.name: each for g in members if (each := client_gains(g, runs, options)) is not None}
        if gains:
            written.append(draw_gains(gains, options, folder / f"gains_{end}.png", setting))
    return written


def by_setting(groups: list[Group]) -> dict[str, list[Group]]:
    """The groups that may be compared, by data set, partition, model ... in words."""
    settings: dict[str, list[Group]] = {}
    for group in groups:
        words = [str(value) if name in SHOWN else f"{name} {value}" for name, value in group.setting.items()]
        settings.setdefault(", ".join(words), []).append(group)
    return settings


def literal(text: str) -> str:
    """A name as matplotlib shows it: no formula between dollars, and in a legend even where it begins with _."""
    return (" " if text.startswith("_") else "") + one_line(text).replace("$", r"\$")


def file_name(*words: str) -> str:
    """Words as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", ", ".join(filter(None, words)))


def draw_curves(groups: list[Group], options: Options, path: Path, title: str) -> Path:
    """The metric over rounds: mean over seeds, a band of one population std, the target as a dotted line."""
    plt = pyplot()
    scale = 100 if scores.is_fraction(options.metric) else 1
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    top = []
    for i, group in enumerate(groups):
        rounds, mean, std = mean_curve(group, options.metric)
        if not len(rounds):
            continue
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}
        few = "o" if len(rounds) < 3 else None  # a line through one point is invisible
        axes.plot(rounds, scale * mean, label=literal(f"{group.name} (n={len(group.runs)})"), marker=few, **look)
        axes.fill_between(rounds, scale * (mean - std), scale * (mean + std), color=look["color"], alpha=0.15, lw=0)
        top.append(np.nanmax(mean))
    if top and max(top) > options.target / 2 and scale == 100:
        axes.axhline(scale * options.target, color="0.4", linestyle=":", lw=1)
    axes.set(xlabel="round", ylabel=options.metric + (" (%)" if scale == 100 else ""), title=literal(title))
    return finished(figure, axes, path)


def finished(figure: Any, axes: Any, path: Path) -> Path:
    """What all figures of curves end with; written to path."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
    return path


def against(groups: list[Group], options: Options, key: str) -> dict[str, dict[float, np.ndarray]]:
    """Method -> number under a config key -> the metric at the selected round, one value a seed.

    Runs whose value is no number (null) are left out; ConfigError where no two numbers are left.
    """
    lines: dict[str, dict[float, np.ndarray]] = {}
    for group in groups:
        x = group.runs[0].flat_config.get(key)
        if not isinstance(x, int | float) or isinstance(x, bool):
            continue
        labels = {k: v for k, v in group.labels.items() if k not in (key, key.rpartition(".")[2])}
        name = " ".join(str(v) if k in ("method", "name") else f"{k}={v}" for k, v in labels.items())
        rounds = [scores.selected_round(run, options.metric, options.select) for run in group.runs]
        values = [scores.value_at(run, options.metric, at) for run, at in zip(group.runs, rounds)]
        lines.setdefault(name, {})[float(x)] = np.array(values)
    values_of_key = {x for line in lines.values() for x in line}
    require(len(values_of_key) > 1, f"--against {key}: there are no runs with two different numbers under that key")
    return lines


def draw_against(groups: list[Group], options: Options, key: str, path: Path) -> Path:
    """The metric over a config key, with one population std over seeds: a line per method, or, where the numbers span
    more than two powers of ten, bars at even distances."""
    lines = against(groups, options, key)
    plt = pyplot()
    scale = 100 if scores.is_fraction(options.metric) else 1
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    all_xs = sorted({x for line in lines.values() for x in line})
    positive = [abs(x) for x in all_xs if x]
    bars = max(positive) > 100 * min(positive)
    for i, (name, line) in enumerate(sorted(lines.items())):
        xs = sorted(line)
        mean, std = ([scale * f(line[x]) for x in xs] for f in (np.mean, np.std))
        colour, label = COLOURS[i % len(COLOURS)], literal(f"{name} (n={min(map(len, line.values()))})")
        if bars:
            width = 0.8 / len(lines)
            places = [all_xs.index(x) + (i - (len(lines) - 1) / 2) * width for x in xs]
            axes.bar(places, mean, width, yerr=std, capsize=2, label=label, color=colour)
        else:
            style = LINES[i // len(COLOURS) % len(LINES)]
            axes.errorbar(xs, mean, std, marker="o", capsize=2, label=label, color=colour, linestyle=style)
    if bars:
        axes.set_xticks(range(len(all_xs)), [f"{x:g}" for x in all_xs])
    axes.set(xlabel=key, ylabel=options.metric + (" (%)" if scale == 100 else ""))
    return finished(figure, axes, path)


def draw_gains(gains: dict[str, np.ndarray], options: Options, path: Path, title: str) -> Path:
    """A panel per method, a bar per client: its gain over Local, blue for a gain and orange for a loss."""
    plt = pyplot()
    scale = 100 if scores.is_fraction(options.metric) else 1
    figure, panels = plt.subplots(
        len(gains), 1, figsize=(8, 0.6 + 1.4 * len(gains)), sharex=True, sharey=True, squeeze=False,
        layout="constrained")  # fmt: skip
    for axes, (name, each) in zip(panels[:, 0], gains.items()):
        colours = np.where(each >= 0, COLOURS[0], COLOURS[1])
        axes.bar(np.arange(len(each)), scale * each, color=colours, width=0.8)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_title(f"{literal(name)}: mean {scale * np.nanmean(each):+.2f}", fontsize=9, loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("client")
    panels[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    unit = ", percentage points" if scale == 100 else ""
    figure.suptitle(f"gain over Local of {options.metric}@{convention(options)}{unit}; {literal(title)}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_paper(cells: list[Cell], path: Path) -> Path:
    """Dots, a panel per column of a printed table: by method, the paper's number, hollow, and ours, filled."""
    plt = pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = dict.fromkeys((c.key, c.overrides) for c in cells)
    panels = {key: [c for c in cells if (c.key, c.overrides) == key] for key in shown}
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    size = (4.6 * across, down * (1 + 0.28 * max(map(len, panels.values()))))
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, ((key, changed), column) in zip(grid.flat, panels.items()):
        _dots(axes, column)
        axes.set_title("\n".join(filter(None, [*panel_title(key, cells), changed])), fontsize=8)
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _dots(axes: Any, column: list[Cell]) -> None:
    place = -np.arange(len(column))
    looks = {"printed": {"color": "0.25", "marker": "o", "mfc": "white"},
             "ours": {"color": COLOURS[0], "marker": "D", "ms": 5}}  # fmt: skip
    for shift, (name, look) in zip((0.12, -0.12), looks.items()):
        numbers = [getattr(cell, name) for cell in column]
        means, stds = [s.mean for s in numbers], [s.std or 0 for s in numbers]
        axes.errorbar(means, place + shift, xerr=stds, ls="", label=name, capsize=2, **look)
    axes.set_yticks(place, [cell.row["method"] for cell in column], fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def panel_title(key: tuple[str, ...], cells: list[Cell]) -> list[str]:
    """Lines that tell a column of a printed table from the others; its metric at least."""
    varying = [i for i, name in enumerate(KEYS) if name == "metric" or len({c.key[i] for c in cells}) > 1]
    return [textwrap.shorten(f"{KEYS[i]} {key[i]}", 60) for i in varying]


def convention(options: Options) -> str:
    """The gain that goes with a selection: the last round, or (the papers' habit) each client's own best."""
    return "own_best" if options.select == "best" else "last"


def client_gains(group: Group, runs: list[Run], options: Options) -> np.ndarray | None:
    """Each client's gain over Local, [N], averaged over the seeds that share the first one's partition."""
    first = group.runs[0].summary.get("partition_hash")
    gains = []
    for run in group.runs:
        local = scores.local_of(run, runs)
        if local is not None and local is not run and run.summary.get("partition_hash") == first:
            gain = scores.gains(run, local, options.metric).get(convention(options))
            gains += [gain.each] if gain is not None else []
    return np.mean(gains, axis=0) if gains else None


def mean_curve(group: Group, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rounds, mean, population std) over the seeds, [R] each, at the rounds that all seeds evaluated."""
    curves = [scores.curve(run, metric) for run in group.runs]
    curves = [(rounds, values) for rounds, values in curves if len(values)]
    if not curves:
        return np.empty(0), np.empty(0), np.empty(0)
    common = curves[0][0]
    for rounds, _ in curves[1:]:
        common = np.intersect1d(common, rounds)
    values = np.stack([values[np.isin(rounds, common)] for rounds, values in curves])  # [seeds, R]
    return common, values.mean(0), values.std(0)
