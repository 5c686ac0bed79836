"""The figures that page.json asks for, drawn as SVG from a page's CSV files.

    curves    a metric over rounds, or over what was sent, a line for each group with a band of one std over seeds
    against   a score over a label that is a number, with its spread over seeds
    gains     each client's gain over Local, a panel for each method

Each is first made as data (``Drawing``) and then drawn. A file says in its metadata of which data it is: whether a
figure is that of its files can be told with any version of matplotlib, although the bytes differ from one to the next.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedbench.core.options import ConfigError, listed, require
from fedbench.pages.page import Group, Page, curve_at, groups_of
from fedbench.report.drawing import (
    SPREAD,
    TUNED_HERE,
    draw_line,
    legend,
    literal,
    logarithmic,
    look,
    pyplot,
    tidy,
    whole_numbers,
)
from fedbench.report.figures import draw_bars
from fedbench.report.table import DAGGER, Spread
from fedbench.report.words import in_words, line_of, lines_of, metric_axis, of_each_client, printed

HAND = 2  # goes up when the code below draws the same data in another way
OVER = {"round": "Round", "mb_up": "MB sent up, all clients together", "mb_down": "MB sent down, all clients together",
        "train_s": "Seconds of training, the server step included"}  # fmt: skip
DRAWN_OF = re.compile(r"data sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Series:
    """A line (or a panel of bars) of a figure: ``std`` is its spread where it has one; tuned: its last point is of
    models fine-tuned at the end."""

    name: str
    x: list[float]
    y: list[float]
    std: list[float] | None = None
    tuned: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure as data; ``form`` is lines, points or panels."""

    form: str
    title: str
    xlabel: str
    ylabel: str
    series: list[Series]
    level: float | None = None  # a dotted line across
    logarithmic: bool = False

    @property
    def digest(self) -> str:
        """Of all that is drawn, numbers to six digits."""

        def rounded(value: Any) -> Any:
            if isinstance(value, float):
                return f"{value:.6g}"
            if isinstance(value, dict):
                return {key: rounded(inner) for key, inner in value.items()}
            return [rounded(inner) for inner in value] if isinstance(value, list) else value

        return hashlib.sha256(json.dumps([HAND, rounded(asdict(self))]).encode()).hexdigest()


def make_drawing(page: Page, name: str) -> Drawing:
    """A figure of page.json by its name; ConfigError where there is none, or it asks for what is not there."""
    figures = page.about["figures"]
    require(name in figures, f"{page.folder}: page.json has no figure {name}; there are {listed(figures)}")
    spec = dict(figures[name])
    kind = spec.pop("kind", "curves")
    require(kind in KINDS, f"{page.folder}: figure {name}: kind is {kind!r}; it is one of {', '.join(KINDS)}")
    make, keys = KINDS[kind]
    odd = [key for key in spec if key not in (*keys, "alt", "title")]
    require(not odd, f"{page.folder}: figure {name} has unknown keys {', '.join(odd)}; there are {', '.join(keys)}")
    drawing = make(page, spec)
    require(bool(drawing.series), f"{page.folder}: figure {name}: there is nothing to draw: page.json asks in vain")
    return drawing


def is_of(path: Path, drawing: Drawing) -> bool:
    """Whether a file is there and was drawn of this data."""
    found = DRAWN_OF.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found is not None and found.group(1) == drawing.digest


def curves(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A metric over rounds (``over``: MB sent or seconds so far), at the rounds that all seeds of a group have."""
    metric, over = spec.get("metric", page.about["metric"]), spec.get("over", "round")
    scale = 1 if "loss" in metric else page.scale
    require(over in OVER, f"{page.folder}: a figure of curves is over one of {listed(OVER)}, not {over}")
    groups = [group for group in groups_of(page, spec.get("part"), spec.get("where")) if _rounds(page, group, metric)]
    names, shared = lines_of([group.labels for group in groups], [group.tuned for group in groups])
    series = []
    for name, group in zip(names, groups):
        rounds = _rounds(page, group, metric)
        places = rounds if over == "round" else [curve_at(page, group, over, t).mean for t in rounds]
        found = [(float(x), curve_at(page, group, metric, t)) for x, t in zip(places, rounds)]
        series.append(_line(f"{name} (n={group.n})", found, scale, group.tuned))
    target = page.about["target"] * scale
    reached = metric == page.about["metric"] and any(y > target / 2 for line in series for y in line.y)
    title = ", ".join(filter(None, (spec.get("title", ""), shared)))
    level, is_log = target if reached else None, over.startswith("mb_")
    return Drawing("lines", title, OVER[over], metric_axis(metric), series, level, is_log)


def against(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A score over a label; the other labels name the lines. Values far apart are laid out by their logarithm."""
    key, score = spec["key"], spec.get("score", page.about["select"])
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for group in groups_of(page, spec.get("part"), spec.get("where")):
        x, value = group.labels.get(key), group.spread(score)
        if isinstance(x, str) or x is None:
            raise ConfigError(f"{page.folder}: a figure against {key}: {group.labels} has no number there")
        others = {name: label for name, label in group.labels.items() if name != key and label is not None}
        if value.count:
            name = f"{line_of(others, group.tuned)} (n={group.n})"
            lines.setdefault(name, []).append((float(x), value))
    series = [_line(name, sorted(found, key=lambda f: f[0]), page.scale) for name, found in sorted(lines.items())]
    positive = [x for line in series for x in line.x if x > 0]
    apart = bool(positive) and max(positive) > 100 * min(positive)
    words = metric_axis(page.about["metric"])
    return Drawing("points", spec.get("title", ""), spec.get("xlabel", in_words(key)), words, series, None, apart)


def gains(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A panel for each method: a bar for each client."""
    rows = page.gains[page.gains["part"] == page.part(spec.get("part"))]
    series = []
    for name, found in rows.groupby("group", sort=False):
        counts = found["gain_n"].dropna().unique() if "gain_n" in found else []
        label = printed(str(name)) + (f" (n={int(counts[0])})" if len(counts) == 1 else "")
        several = "gain_std" in found and found["gain_std"].notna().all()
        std = [page.scale * float(value) for value in found["gain_std"]] if several else None
        each = [page.scale * float(value) for value in found["gain"]]
        series.append(Series(label, [float(client) for client in found["client"]], each, std))
    when = "own best round" if page.about["select"] == "best" else "last round"
    spread = f" (lines: {SPREAD})" if any(bars.std for bars in series) else ""
    words = f"{of_each_client(page.about['metric'])}, {when}{spread}"
    title = "; ".join(filter(None, (words, spec.get("title", ""))))
    unit = " (percentage points)" if page.scale == 100 else ""
    return Drawing("panels", title, "Client", f"Gain over Local{unit}", series)


def _rounds(page: Page, group: Group, metric: str) -> list[int]:
    """Return the rounds of which all of a group's runs have a value, in order."""
    rows = page.curves[page.curves["run"].isin(group.rows["run"])] if len(page.curves) else page.curves
    if not len(rows) or metric not in rows:
        return []
    counts = rows[rows[metric].notna()].groupby("round")["run"].nunique()
    return [int(t) for t in counts.index[counts == len(group.rows)]]


def _line(name: str, found: list[tuple[float, Spread]], scale: float, tuned: bool = False) -> Series:
    mean = [scale * s.mean for _, s in found]
    several = any(s.std is not None for _, s in found)
    std = [scale * (s.std or 0.0) for _, s in found] if several else None
    return Series(name, [x for x, _ in found], mean, std, tuned)


KINDS: dict[str, tuple[Callable[[Page, Mapping[str, Any]], Drawing], tuple[str, ...]]] = {
    "curves": (curves, ("part", "metric", "where", "over")),
    "against": (against, ("part", "key", "score", "where", "xlabel")),
    "gains": (gains, ("part",)),
}


def as_svg(drawing: Drawing) -> str:
    """A drawing as SVG, the same text every time with one version of matplotlib."""
    plt = pyplot()
    from matplotlib import rc_context

    settings: Any = {"svg.hashsalt": "fedbench", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
    with rc_context(settings):
        draw = _panels if drawing.form == "panels" else _axes
        figure = draw(plt, drawing)
        out = io.StringIO()
        words = {"Date": None, "Description": f"data sha256:{drawing.digest}"}
        figure.savefig(out, format="svg", metadata=words)
        plt.close(figure)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _axes(plt: Any, drawing: Drawing) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, line in enumerate(drawing.series):
        if drawing.form == "points":
            axes.errorbar(line.x, line.y, line.std, marker="o", capsize=2, label=literal(line.name), **look(i))
        else:
            draw_line(axes, i, line.x, line.y, line.std, line.name, line.tuned, gid=f"series_{i}")
    if drawing.level is not None:
        axes.axhline(
            drawing.level,
            color="0.4",
            linestyle=":",
            lw=1,
            label=f"target ({drawing.level:g}{'%' * ('(%)' in drawing.ylabel)})",
        )
    places = sorted({x for line in drawing.series for x in line.x})
    if drawing.logarithmic and drawing.form == "lines":
        logarithmic(axes, "x", places)
    elif drawing.logarithmic:
        least = min(x for line in drawing.series for x in line.x if x > 0)
        axes.set_xscale("symlog", linthresh=least)
        axes.set_xticks(places, [f"{x:g}" for x in places])
    elif all(x == int(x) for x in places):
        whole_numbers(axes, both=False)
    axes.set(xlabel=drawing.xlabel, ylabel=drawing.ylabel, title=literal(drawing.title))
    tidy(axes)
    daggers = any(DAGGER in line.name for line in drawing.series)
    legend(figure, axes, daggers, drawing.form == "lines")
    return figure


def _panels(plt: Any, drawing: Drawing) -> Any:
    count = len(drawing.series)
    figure, panels = plt.subplots(count, 1, figsize=(8, 0.6 + 1.4 * count), sharex=True, sharey=True, squeeze=False,
                                  layout="constrained")  # fmt: skip
    for axes, bars in zip(panels[:, 0], drawing.series):
        known = [y for y in bars.y if not math.isnan(y)]
        draw_bars(axes, bars.x, bars.y, bars.std)
        axes.set_title(f"{literal(bars.name)}: mean {sum(known) / len(known):+.2f}", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel(drawing.xlabel)
    whole_numbers(panels[-1, 0], both=False)
    figure.supylabel(drawing.ylabel, fontsize=10)
    notes = [drawing.title, TUNED_HERE if any(DAGGER in bars.name for bars in drawing.series) else ""]
    figure.suptitle(literal("; ".join(filter(None, notes))), fontsize=10)
    return figure
