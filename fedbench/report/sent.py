"""Figures of what runs sent: megabytes over rounds, and a metric over megabytes.

MB are 10^6 bytes, of all clients together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbench.core.options import require
from fedbench.report.drawing import draw_line, literal, logarithmic, pyplot, tidy, whole_numbers
from fedbench.report.figures import finished, mean_curve
from fedbench.report.scores import Options, megabytes, scale_of
from fedbench.report.summary import Group
from fedbench.report.table import DataFrame, pandas
from fedbench.report.words import lines_of, metric_axis

DIRECTIONS = {"bytes": ("down", "up"), "bytes_down": ("down",), "bytes_up": ("up",)}  # what --against takes


def draw_sizes(groups: list[Group], path: Path, title: str) -> Path:
    """MB sent so far over rounds, up and down, and below what a round took of its dense size (pFedNet, Figures 8 and
    12); means over seeds with a band of one population std, a line per group.  Only of groups that compressed
    something, and of the dense one."""
    figure, panels = pyplot().subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    least = [100.0, 100.0]  # of a round's share, up and down
    names, shared = lines_of([group.within for group in groups], [group.tuned for group in groups], groups[0].conf)
    for i, group in enumerate(groups):
        for column, direction in enumerate(("up", "down")):
            sent, dense = (_sizes(group, direction, kind) for kind in ("bytes", "dense"))  # [R, seeds]
            if sent.empty or not sent.iloc[-1].any():
                continue
            of_round, of_dense = (sizes.diff().fillna(sizes) for sizes in (sent, dense))
            share = 100 * (of_round / of_dense.where(of_dense > 0))
            for axes, values in zip(panels[:, column], (sent, share)):
                std = values.std(axis=1, ddof=0) if len(group.runs) > 1 else None
                draw_line(axes, i, sent.index, values.mean(axis=1), std, f"{names[i]} (n={len(group.runs)})")
            least[column] = min(least[column], float(share.min().min()))
    for column, direction in enumerate(("up", "down")):
        panels[0, column].set(ylabel=f"MB {direction} so far")
        panels[1, column].set(xlabel="Round", ylabel=f"Bytes {direction} in a round (% of dense)")
        for axes in panels[:, column]:
            drawn = [line.get_ydata() for line in axes.lines]
            if drawn:
                logarithmic(axes, "y", np.concatenate(drawn))
            tidy(axes)
        whole_numbers(panels[1, column], both=False)
        panels[1, column].set_ylim(least[column] / 1.5, 150)
    figure.suptitle(literal(", ".join(filter(None, (title, shared)))), fontsize=10)
    return finished(figure, panels[0, 0], path)


def _sizes(group: Group, direction: str, kind: str) -> DataFrame:
    """Return the MB up to and including each round that all seeds have [R, seeds]."""
    return pandas().concat(
        [megabytes(run, (direction,), kind) for run in group.runs], axis=1, join="inner", ignore_index=True
    )


def draw_over_bytes(groups: list[Group], options: Options, key: str, path: Path) -> Path:
    """The metric over the MB sent so far, a line per group, with a band of one population std over seeds.

    key: "bytes", "bytes_up" or "bytes_down".  MB are the mean over seeds, too.
    """
    scale = scale_of(options.metric)
    figure, axes = pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    drawn: list[np.ndarray] = []
    conf = groups[0].conf if groups else None
    names, shared = lines_of([group.labels for group in groups], [group.tuned for group in groups], conf)
    for i, group in enumerate(groups):
        mean, std = mean_curve(group, options.metric)
        sizes = [megabytes(run, DIRECTIONS[key]).reindex(mean.index) for run in group.runs]
        if mean.empty or any(size.isna().any() for size in sizes):
            continue
        sent = np.mean(sizes, axis=0)  # [R]
        spread = scale * std if len(group.runs) > 1 else None
        draw_line(axes, i, sent, scale * mean, spread, f"{names[i]} (n={len(group.runs)})", group.tuned)
        drawn.append(sent)
    require(any(sent.any() for sent in drawn), f"--against {key}: no run has sent anything")
    words = {"bytes": "down and up", "bytes_down": "down", "bytes_up": "up"}[key]
    axes.set(xlabel=f"MB sent {words}, all clients together", ylabel=metric_axis(options.metric))
    logarithmic(axes, "x", np.concatenate(drawn))
    axes.set_title(literal(shared))
    return finished(figure, axes, path, any(group.tuned for group in groups))
