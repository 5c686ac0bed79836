"""The figures of a report: accuracy over rounds with its spread over seeds, each client's gain over Local."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.drawing import (
    COLOURS,
    SPREAD,
    TUNED_HERE,
    Place,
    draw_line,
    legend,
    literal,
    look,
    pyplot,
    save,
    tidy,
    whole_numbers,
)
from fedbench.report.paper import KEYS, Cell
from fedbench.report.runs import Run
from fedbench.report.scores import Options
from fedbench.report.summary import SHOWN, Group
from fedbench.report.table import DAGGER, Series, pandas
from fedbench.report.words import in_words, line_of, lines_of, metric_axis, of_each_client


def draw(groups: list[Group], runs: list[Run], options: Options, place: Place) -> list[Path]:
    """Write the figures of every setting (data set, partition, model ...); returns their paths."""
    written = []
    for setting, members in by_setting(groups).items():
        end = file_name(setting, options.metric)
        written.append(draw_curves(members, options, place.file(f"curves_{end}"), setting))
        gains = {g.name: each for g in members if len(each := client_gains(g, runs, options))}
        if gains:
            written.append(draw_gains(gains, options, place.file(f"gains_{end}"), setting))
    return written


def by_setting(groups: list[Group]) -> dict[str, list[Group]]:
    """The groups that may be compared, by data set, partition, model ... in words."""
    settings: dict[str, list[Group]] = {}
    for group in groups:
        words = [str(value) if name in SHOWN else f"{name} {value}" for name, value in group.setting.items()]
        settings.setdefault(", ".join(words), []).append(group)
    return settings


def file_name(*words: str) -> str:
    """Words as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", ", ".join(filter(None, words)))


def draw_curves(groups: list[Group], options: Options, path: Path, title: str) -> Path:
    """The metric over rounds: mean over seeds, a band of one population std, the target as a dotted line."""
    scale = scores.scale_of(options.metric)
    figure, axes = pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    top = []
    names, shared = lines_of([group.within for group in groups], [group.tuned for group in groups], groups[0].conf)
    for i, group in enumerate(groups):
        mean, std = mean_curve(group, options.metric)
        if len(mean):
            spread = scale * std if len(group.runs) > 1 else None
            draw_line(axes, i, mean.index, scale * mean, spread, f"{names[i]} (n={len(group.runs)})", group.tuned)
            top.append(mean.max())
    if top and max(top) > options.target / 2 and scale == 100:
        axes.axhline(
            scale * options.target, color="0.4", linestyle=":", lw=1, label=f"target ({100 * options.target:g}%)"
        )
    title = ", ".join(filter(None, (title, shared)))
    axes.set(xlabel="Round", ylabel=metric_axis(options.metric), title=literal(title))
    whole_numbers(axes, both=False)
    return finished(figure, axes, path, any(group.tuned for group in groups))


def finished(figure: Any, axes: Any, path: Path, tuned: bool = False, marked: bool = True) -> Path:
    """What all figures of curves end with; written to path.  tuned: daggers (marked: open markers) are explained."""
    tidy(axes)
    legend(figure, axes, tuned, marked)
    return save(figure, path)


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
        name = line_of(labels, group.tuned, group.conf)
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
    scale = scores.scale_of(options.metric)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    all_xs = sorted({x for line in lines.values() for x in line})
    positive = [abs(x) for x in all_xs if x]
    bars = max(positive) > 100 * min(positive)
    for i, (name, line) in enumerate(sorted(lines.items())):
        xs = sorted(line)
        mean, std = ([scale * f(line[x]) for x in xs] for f in (np.mean, np.std))
        n = sorted({len(line[x]) for x in xs})
        colour, label = COLOURS[i % len(COLOURS)], literal(f"{name} (n={' or '.join(map(str, n))})")
        if bars:
            width = 0.8 / len(lines)
            places = [all_xs.index(x) + (i - (len(lines) - 1) / 2) * width for x in xs]
            axes.bar(places, mean, width, yerr=std, capsize=2, label=label, color=colour)
        else:
            axes.errorbar(xs, mean, std, marker="o", capsize=2, label=label, **look(i))
    if bars:
        axes.set_xticks(range(len(all_xs)), [f"{x:g}" for x in all_xs])
    axes.set(xlabel=in_words(key), ylabel=metric_axis(options.metric))
    return finished(figure, axes, path, any(group.tuned for group in groups), marked=False)


def draw_gains(gains: dict[str, np.ndarray], options: Options, path: Path, title: str) -> Path:
    """A panel per method, a bar per client: its gain over Local, blue for a gain and orange for a loss; with one
    population std over seeds where there are several.  gains: by method [seeds, N]."""
    plt = pyplot()
    scale = scores.scale_of(options.metric)
    figure, panels = plt.subplots(
        len(gains), 1, figsize=(8, 0.6 + 1.4 * len(gains)), sharex=True, sharey=True, squeeze=False,
        layout="constrained")  # fmt: skip
    for axes, (name, seeds) in zip(panels[:, 0], gains.items()):
        draw_bars(
            axes, np.arange(seeds.shape[1]), scale * seeds.mean(0), scale * seeds.std(0) if len(seeds) > 1 else None
        )
        mean = scale * np.nanmean(seeds)
        axes.set_title(f"{literal(name)}: mean {mean:+.2f} (n={len(seeds)})", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("Client")
    whole_numbers(panels[-1, 0], both=False)
    figure.supylabel("Gain over Local" + (" (percentage points)" if scale == 100 else ""), fontsize=10)
    when = {"last": "last round", "own_best": "own best round"}[convention(options)]
    tuned = TUNED_HERE if any(DAGGER in name for name in gains) else ""
    spread = f" (lines: {SPREAD})" if max(map(len, gains.values())) > 1 else ""
    heads = [f"{of_each_client(options.metric)}, {when}{spread}", literal(title), tuned]
    figure.suptitle("\n".join(filter(None, heads)), fontsize=10)
    return save(figure, path)


def draw_bars(axes: Any, clients: Any, each: Any, std: Any = None) -> None:
    """A bar for each client, blue for a gain and orange for a loss, with its spread where it has one."""
    colours = [COLOURS[0 if value >= 0 else 1] for value in each]
    axes.bar(clients, each, 0.8, yerr=std, color=colours, error_kw={"lw": 0.8, "ecolor": "0.3"})
    axes.axhline(0, color="black", lw=0.8)
    tidy(axes)
    axes.grid(False, axis="x")


def draw_paper(cells: list[Cell], path: Path) -> Path:
    """Dots, a panel per column of a printed table: by method, the paper's number, hollow, and ours, filled."""
    plt = pyplot()
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
    return save(figure, path)


def _dots(axes: Any, column: list[Cell]) -> None:
    place = -np.arange(len(column))
    looks = {"printed": {"color": "0.25", "marker": "o", "mfc": "white"},
             "ours": {"color": COLOURS[0], "marker": "D", "ms": 5}}  # fmt: skip
    for shift, (name, how) in zip((0.12, -0.12), looks.items()):
        numbers = [getattr(cell, name) for cell in column]
        means, stds = [s.mean for s in numbers], [s.std or 0 for s in numbers]
        axes.errorbar(means, place + shift, xerr=stds, ls="", label=name, capsize=2, **how)
    names = [cell.row["method"] + (f" (n={cell.ours.count})" if cell.ours.count else "") for cell in column]
    axes.set_yticks(place, [literal(name) for name in names], fontsize=8)
    tidy(axes)


def panel_title(key: tuple[str, ...], cells: list[Cell]) -> list[str]:
    """Lines that tell a column of a printed table from the others; its metric at least."""
    varying = [i for i, name in enumerate(KEYS) if name == "metric" or len({c.key[i] for c in cells}) > 1]
    return [textwrap.shorten(f"{KEYS[i]} {key[i]}", 60) for i in varying]


def convention(options: Options) -> str:
    """The gain that goes with a selection: the last round, or (the papers' habit) each client's own best."""
    return "own_best" if options.select == "best" else "last"


def client_gains(group: Group, runs: list[Run], options: Options) -> np.ndarray:
    """Return each client's gain over Local [S, N], of the S seeds that share the first one's partition."""
    first = group.runs[0].summary.get("partition_hash")
    pairs = [(run, scores.local_of(run, runs)) for run in group.runs if run.summary.get("partition_hash") == first]
    found = [scores.gains(run, local, options.metric, convention(options)) for run, local in pairs if local is not run]
    found = [gain for gain in found if len(gain)]
    return np.array(found) if found else np.empty((0, 0))


def mean_curve(group: Group, metric: str) -> tuple[Series, Series]:
    """Return the mean and population std over the seeds at the rounds that all seeds evaluated, [R] each."""
    curves = [curve for run in group.runs if len(curve := scores.curve(run, metric))]
    values = pandas().concat(curves, axis=1, join="inner") if curves else pandas().DataFrame(dtype=float)
    return values.mean(axis=1, skipna=False), values.std(axis=1, ddof=0, skipna=False)
