"""What runs sent: a table of megabytes and what compression made of them, and a metric over megabytes.

MB are 10^6 bytes, of all clients together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.drawing import draw_line, literal, logarithmic, pyplot, tidy, whole_numbers
from fedbench.report.figures import finished, mean_curve
from fedbench.report.runs import Run
from fedbench.report.summary import Group, Options, over_seeds
from fedbench.report.table import Column, Table
from fedbench.report.words import label_columns, lines_of, metric_axis, told

DIRECTIONS = {"bytes": ("down", "up"), "bytes_down": ("down",), "bytes_up": ("up",)}  # what --against takes


def megabytes(run: Run, directions: tuple[str, ...], kind: str = "bytes") -> tuple[np.ndarray, np.ndarray]:
    """Rounds [R], and the MB sent up to and including each of them [R].  kind: "bytes", or "dense", as they would have
    been without compression (the same where there was none).  Both empty for runs without costs.csv."""
    costs = run.costs
    if not {"round", *(f"bytes_{d}" for d in directions)} <= costs.keys():
        return np.empty(0), np.empty(0)
    each = [costs.get(f"{kind}_{d}", costs[f"bytes_{d}"]) for d in directions]
    return costs["round"], np.sum(each, axis=0).cumsum() / 1e6


def sent_until(run: Run, round: float, directions: tuple[str, ...]) -> float:
    """The MB sent up to and including a round; NaN for NaN."""
    rounds, sent = megabytes(run, directions)
    at_round = sent[rounds == round]
    return float(at_round[0]) if len(at_round) else float("nan")


def is_compressed(run: Run) -> bool:
    """Whether its messages were compressed."""
    return "dense_up" in run.costs


def sent_table(groups: list[Group], options: Options) -> Table | None:
    """A row per group, in the order of the results: the metric, and the MB sent in all, of what they would have been,
    and until the target was reached.  None where nothing was compressed."""
    if not any(is_compressed(run) for group in groups for run in group.runs):
        return None
    fraction = scores.is_fraction(options.metric)
    scale, digits = (100, 2) if fraction else (1, 4)
    target = f"{options.target * scale:g}" + ("%" if fraction else "")
    labels = list(dict.fromkeys(k for g in groups for k in g.labels))
    columns = [
        *label_columns(labels, groups[0].conf),
        Column("n", "n"),
        Column("last", "last", digits, scale),
        *(Column(f"mb_{d}", f"MB {d}", 2) for d in ("up", "down")),
        *(Column(f"part_{d}", f"{d} (% of dense)", 2, 100) for d in ("up", "down")),
        Column("mb_to_target", f"MB to {target}", 2, none="never"),
    ]
    rows = [g.labels | {"tuned": g.tuned} | _row(g, options) for g in groups]
    return told(Table("what was sent, by all clients together", columns, rows), labels)


def _row(group: Group, options: Options) -> dict[str, Any]:
    runs, metric = group.runs, options.metric
    to_target = [scores.rounds_to(run, metric, options.target) for run in runs]
    row: dict[str, Any] = {"n": len(runs)}
    row["last"] = over_seeds(scores.value_at(r, metric, scores.selected_round(r, metric, "last")) for r in runs)
    for d in ("up", "down"):
        in_all = [(_total(run, d, "bytes"), _total(run, d, "dense")) for run in runs]
        row[f"mb_{d}"] = over_seeds(sent for sent, _ in in_all)
        row[f"part_{d}"] = over_seeds(sent / dense if dense else None for sent, dense in in_all)
    row["mb_to_target"] = over_seeds(sent_until(r, t, DIRECTIONS["bytes"]) for r, t in zip(runs, to_target))
    return row


def _total(run: Run, direction: str, kind: str) -> float:
    _, sent = megabytes(run, (direction,), kind)
    return float(sent[-1]) if len(sent) else float("nan")


def draw_sizes(groups: list[Group], path: Path, title: str) -> Path:
    """MB sent so far over rounds, up and down, and below what a round took of its dense size (pFedNet, Figures 8 and
    12); means over seeds with a band of one population std, a line per group.  Only of groups that compressed
    something, and of the dense one."""
    figure, panels = pyplot().subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    least = [100.0, 100.0]  # of a round's share, up and down
    names, shared = lines_of([group.within for group in groups], [group.tuned for group in groups], groups[0].conf)
    for i, group in enumerate(groups):
        for column, direction in enumerate(("up", "down")):
            rounds, sent = _sizes(group, direction, "bytes")
            _, dense = _sizes(group, direction, "dense")
            if not sent.size or not sent[:, -1].any():
                continue
            of_round, of_dense = np.diff(sent, prepend=0), np.diff(dense, prepend=0)  # [seeds, R]
            share = 100 * np.divide(of_round, of_dense, out=np.full_like(of_dense, np.nan), where=of_dense > 0)
            for axes, values in zip(panels[:, column], (sent, share)):
                std = values.std(0) if len(values) > 1 else None
                draw_line(axes, i, rounds, values.mean(0), std, f"{names[i]} (n={len(values)})")
            least[column] = min(least[column], float(np.nanmin(share)))
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


def _sizes(group: Group, direction: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds [R] and the MB up to and including each [seeds, R], of the rounds that all seeds have."""
    curves = [megabytes(run, (direction,), kind) for run in group.runs]
    least = min(len(rounds) for rounds, _ in curves)
    return curves[0][0][:least], np.array([sent[:least] for _, sent in curves])


def draw_over_bytes(groups: list[Group], options: Options, key: str, path: Path) -> Path:
    """The metric over the MB sent so far, a line per group, with a band of one population std over seeds.

    key: "bytes", "bytes_up" or "bytes_down".  MB are the mean over seeds, too.
    """
    plt = pyplot()
    scale = 100 if scores.is_fraction(options.metric) else 1
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    drawn: list[np.ndarray] = []
    conf = groups[0].conf if groups else None
    names, shared = lines_of([group.labels for group in groups], [group.tuned for group in groups], conf)
    for i, group in enumerate(groups):
        rounds, mean, std = mean_curve(group, options.metric)
        sent = np.array([[sent_until(run, r, DIRECTIONS[key]) for r in rounds] for run in group.runs])  # [seeds, R]
        if not len(rounds) or np.isnan(sent).any():
            continue
        spread = scale * std if len(group.runs) > 1 else None
        draw_line(axes, i, sent.mean(0), scale * mean, spread, f"{names[i]} (n={len(group.runs)})", group.tuned)
        drawn.append(sent.mean(0))
    require(any(sent.any() for sent in drawn), f"--against {key}: no run has sent anything")
    words = {"bytes": "down and up", "bytes_down": "down", "bytes_up": "up"}[key]
    axes.set(xlabel=f"MB sent {words}, all clients together", ylabel=metric_axis(options.metric))
    logarithmic(axes, "x", np.concatenate(drawn))
    axes.set_title(literal(shared))
    return finished(figure, axes, path, any(group.tuned for group in groups))
