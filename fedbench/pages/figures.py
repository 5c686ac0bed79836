"""The figures that page.json asks for, drawn as SVG from a page's CSV files.

    curves    a metric over rounds, a line for each group with a band of one population std over seeds
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
from fedbench.pages.groups import Group, groups_of
from fedbench.pages.store import Page, Row, check_keys
from fedbench.pages.tables import curve_at
from fedbench.report.figures import COLOURS, LINES, literal, pyplot
from fedbench.report.table import Spread

HAND = 1  # goes up when the code below draws the same data in another way
DRAWN_OF = re.compile(r"data sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Series:
    """A line (or a panel of bars) of a figure: ``low`` and ``high`` bound its spread where it has one."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


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
    check_keys(spec, (*keys, "alt", "title"), f"{page.folder}: figure {name}")
    drawing = make(page, spec)
    require(bool(drawing.series), f"{page.folder}: figure {name}: there is nothing to draw: page.json asks in vain")
    return drawing


def is_of(path: Path, drawing: Drawing) -> bool:
    """Whether a file is there and was drawn of this data."""
    found = DRAWN_OF.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found is not None and found.group(1) == drawing.digest


def curves(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A metric over rounds, at the rounds that all seeds of a group have."""
    part = spec.get("part", page.parts[0])
    metric = spec.get("metric", page.about["metric"])
    scale = 100 if page.about["percent"] and "loss" not in metric else 1
    series = []
    for group in _chosen(page, part, spec):
        found = [(float(t), curve_at(page, group, metric, t)) for t in _rounds(page, group, metric)]
        if found:
            series.append(_line(_named(group, page.labels(part)), found, scale))
    target = page.about["target"] * scale
    reached = [y for line in series for y in line.y if y > target / 2]
    level = target if metric == page.about["metric"] and reached else None
    return Drawing("lines", spec.get("title", ""), "round", _axis(metric, scale), series, level)


def against(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A score over a label; the other labels name the lines. Values far apart are laid out by their logarithm."""
    part = spec.get("part", page.parts[0])
    key, score = spec["key"], spec.get("score", page.about["select"])
    scale = 100 if page.about["percent"] else 1
    lines: dict[str, list[tuple[float, Spread]]] = {}
    others = [name for name in page.labels(part) if name != key]
    for group in _chosen(page, part, spec):
        x, value = group.labels.get(key), group.value(score)
        if not isinstance(x, int | float):
            raise ConfigError(f"{page.folder}: a figure against {key}: {group.labels} has no number there")
        if isinstance(value, Spread) and value.count:
            lines.setdefault(_named(group, others), []).append((float(x), value))
    series = [_line(name, sorted(found, key=lambda f: f[0]), scale) for name, found in sorted(lines.items())]
    positive = [x for line in series for x in line.x if x > 0]
    apart = bool(positive) and max(positive) > 100 * min(positive)
    words = _axis(page.about["metric"], scale)
    return Drawing("points", spec.get("title", ""), spec.get("xlabel", key), words, series, None, apart)


def gains(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """A panel for each method: a bar for each client."""
    scale = 100 if page.about["percent"] else 1
    rows: dict[str, list[Row]] = {}
    for row in page.gains:
        if row["part"] == spec.get("part", page.parts[0]):
            rows.setdefault(row["group"], []).append(row)
    series = [Series(name, [float(r["client"]) for r in found], [scale * float(r["gain"]) for r in found])
              for name, found in rows.items()]  # fmt: skip
    unit = ", percentage points" if scale == 100 else ""
    return Drawing(
        "panels", spec.get("title", ""), "client", f"gain over Local of {page.about['metric']}{unit}", series
    )


def _chosen(page: Page, part: str, spec: Mapping[str, Any]) -> list[Group]:
    return groups_of(page, part, spec.get("where"))


def _rounds(page: Page, group: Group, metric: str) -> list[int]:
    """The rounds of which all of a group's runs have a value, in order."""
    curves_of = [page.curve_of.get(row["run"], {}) for row in group.rows]
    return [t for t in sorted(curves_of[0]) if all(c.get(t, {}).get(metric) is not None for c in curves_of)]


def _named(group: Group, labels: list[str]) -> str:
    values = {name: group.labels.get(name) for name in labels if group.labels.get(name) is not None}
    words = [str(v) if k in ("method", "name") else f"{k.rpartition('.')[2]}={v}" for k, v in values.items()]
    return f"{' '.join(words)} (n={group.n})"


def _line(name: str, found: list[tuple[float, Spread]], scale: float) -> Series:
    mean = [scale * s.mean for _, s in found]
    std = [scale * (s.std or 0.0) for _, s in found]
    low, high = ([m + sign * d for m, d in zip(mean, std)] for sign in (-1, 1))
    return Series(name, [x for x, _ in found], mean, low, high)


def _axis(metric: str, scale: float) -> str:
    return metric + (" (%)" if scale == 100 else "")


KINDS: dict[str, tuple[Callable[[Page, Mapping[str, Any]], Drawing], tuple[str, ...]]] = {
    "curves": (curves, ("part", "metric", "where")),
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
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}
        few = "o" if drawing.form == "points" or len(line.x) < 3 else None  # a line through one point is invisible
        axes.plot(line.x, line.y, label=literal(line.name), marker=few, gid=f"series_{i}", **look)
        if line.low is not None and line.high is not None:
            if drawing.form == "points":
                axes.vlines(line.x, line.low, line.high, color=look["color"])
            else:
                axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.15, lw=0)
    if drawing.level is not None:
        axes.axhline(drawing.level, color="0.4", linestyle=":", lw=1)
    if drawing.logarithmic:
        least = min(x for line in drawing.series for x in line.x if x > 0)
        axes.set_xscale("symlog", linthresh=least)
        places = sorted({x for line in drawing.series for x in line.x})
        axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.set(xlabel=drawing.xlabel, ylabel=drawing.ylabel, title=literal(drawing.title))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _panels(plt: Any, drawing: Drawing) -> Any:
    count = len(drawing.series)
    figure, panels = plt.subplots(count, 1, figsize=(8, 0.6 + 1.4 * count), sharex=True, sharey=True, squeeze=False,
                                  layout="constrained")  # fmt: skip
    for axes, bars in zip(panels[:, 0], drawing.series):
        known = [y for y in bars.y if not math.isnan(y)]
        axes.bar(bars.x, bars.y, color=[COLOURS[0 if y >= 0 else 1] for y in bars.y], width=0.8)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_title(f"{literal(bars.name)}: mean {sum(known) / len(known):+.2f}", fontsize=9, loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(drawing.xlabel)
    panels[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(literal(f"{drawing.ylabel}; {drawing.title}" if drawing.title else drawing.ylabel), fontsize=10)
    return figure
