"""The figures of page.json (read as the dict Page.about), drawn as SVG from the CSV files of a page.

    curves    a metric over rounds or communication: a line per group, with a band of one standard deviation over seeds
    against   a score over a numeric label, with its standard deviation over seeds
    gains     each client's gain over Local: a panel per method
    heat      a score by two labels: a heat map per value of a third one

An SVG file contains the hash of its data.  It is redrawn only if the data change, because its bytes depend on the
version of matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedbench.core.options import ConfigError, listed, require
from fedbench.pages.page import Group, Page, groups_of
from fedbench.report import drawing as plots
from fedbench.report.display import key_title, legend_name, legend_names, method_name, metric_axis_label
from fedbench.report.drawing import Drawing, HeatMaps, Series
from fedbench.report.figures import gains_title, gains_ylabel
from fedbench.report.table import DAGGER, Spread

VERSION = 2  # increase it if the code draws the same data in another way
X_AXES = {
    "round": "Round",
    "mb_up": "MB sent up, all clients together",
    "mb_down": "MB sent down, all clients together",
    "train_s": "Seconds of training, the server step included",
}
DIGEST = re.compile(r"data sha256:([0-9a-f]{64})")


def digest(drawing: Drawing) -> str:
    """Return a hash of a figure's content, 64 hexadecimal digits.

    Numbers are rounded to six significant digits.  The constant VERSION counts, which changes with the drawing code.
    """

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list) else value

    return hashlib.sha256(json.dumps([VERSION, rounded(asdict(drawing))]).encode()).hexdigest()


def is_current(path: Path, drawing: Drawing) -> bool:
    """Return whether an SVG file exists and was drawn from this data: it contains the drawing's digest."""
    found = DIGEST.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found is not None and found.group(1) == digest(drawing)


def make_drawing(page: Page, name: str) -> Drawing:
    """Return the data of a figure of page.json.

    Args:
        page: The page.
        name: The name of the figure under the key "figures" of page.json.

    Raises:
        ConfigError: There is no such figure, it has an unknown key, or the page does not have its data.
    """
    spec = dict(page.entry("figures", name))
    kind = spec.pop("kind", "curves")
    at = f"{page.folder}: figure {name}"  # the beginning of error messages
    require(kind in KINDS, f"{at}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    make, keys = KINDS[kind]  # a function of page and entry, and the keys of the entry
    unknown = [key for key in spec if key not in (*keys, "alt", "title")]
    require(
        not unknown,
        f"{at} has unknown keys {', '.join(unknown)}; a figure of kind {kind} has {', '.join(keys)}, alt, title: "
        "correct page.json",
    )
    drawing = make(page, spec)
    require(
        bool(drawing.series),
        f"{at}: there is nothing to draw, because no run matches: change part, where or metric in page.json",
    )
    return drawing


def curves(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """Return the data of a figure of a metric over rounds, MB or seconds, with a line per group of runs.

    A line has the rounds that all seeds of its group recorded.

    Args:
        page: The page.
        spec: The entry of the figure in page.json.  All keys are optional: part (a set of the page's runs), where (the
            values that rows must have, by column), metric, over (the x axis, a key of `X_AXES` such as "round"), title.
    """
    metric, x_key = spec.get("metric", page.about["metric"]), spec.get("over", "round")
    scale = 1 if "loss" in metric else page.scale  # page.scale: 100 for a metric in percent, else 1
    require(
        x_key in X_AXES,
        f"{page.folder / 'page.json'}: the key over of a figure of kind curves must be one of {listed(X_AXES)}, got "
        f"{x_key}",
    )
    groups = [(group, _rounds(page, group, metric)) for group in groups_of(page, spec.get("part"), spec.get("where"))]
    groups = [(group, rounds) for group, rounds in groups if rounds]
    # labels that all groups share are in the title instead of the legend
    # tuned: the method fine-tunes after the last round only, which a dagger marks
    names, common = legend_names([group.labels for group, _ in groups], [group.tuned for group, _ in groups])
    series = []
    for name, (group, rounds) in zip(names, groups):
        x = rounds if x_key == "round" else [group.curve_spread(page, x_key, round).mean for round in rounds]
        spreads = [group.curve_spread(page, metric, round) for round in rounds]
        series.append(_series(f"{name} (n={group.n})", x, spreads, scale, group.tuned))
    target = page.about["target"] * scale
    # the line of the target would squeeze a figure in which no value exceeds half of it
    is_near = metric == page.about["metric"] and any(y > target / 2 for line in series for y in line.y)
    return Drawing(
        "lines",
        title=", ".join(filter(None, (spec.get("title", ""), common))),
        xlabel=X_AXES[x_key],
        ylabel=metric_axis_label(metric),
        series=series,
        level=target if is_near else None,
        logarithmic=x_key.startswith("mb_"),
    )


def against(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """Return the data of a figure of a score over a label that is a number, such as the number of shots.

    Groups that are equal in all other labels form one line.

    Args:
        page: The page.
        spec: The entry of the figure in page.json: key (the label), and, optional, part, where (the values that rows
            must have, by column), score, xlabel and title.

    Raises:
        ConfigError: A group has no number under the label.
    """
    key, score = spec["key"], spec.get("score", page.about["select"])
    points: dict[str, dict[float, Spread]] = {}
    for group in groups_of(page, spec.get("part"), spec.get("where")):
        x = group.labels.get(key)
        if x is None or isinstance(x, str):
            raise ConfigError(
                f"{page.folder}: a figure of kind against needs numbers under its key {key}, but the runs with "
                f"{group.labels} have {x!r}: choose another key, or leave them out with where"
            )
        labels = {name: label for name, label in group.labels.items() if name != key}
        # tuned: the method fine-tunes after the last round only, which a dagger marks
        if (spread := group.spread(score)).count:
            points.setdefault(f"{legend_name(labels, group.tuned)} (n={group.n})", {})[float(x)] = spread
    series = [
        _series(name, sorted(line), [line[x] for x in sorted(line)], page.scale)
        for name, line in sorted(points.items())
    ]
    positive = [x for line in series for x in line.x if x > 0]
    is_wide = bool(positive) and max(positive) > 100 * min(positive)  # then the x axis is logarithmic
    xlabel, ylabel = spec.get("xlabel", key_title(key)), metric_axis_label(page.about["metric"])
    return Drawing("points", spec.get("title", ""), xlabel, ylabel, series, logarithmic=is_wide)


def gains(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """Return the data of a figure of each client's gain over Local (algorithm=local), a panel of bars per method.

    Args:
        page: The page.
        spec: The entry of the figure in page.json: "part", the name of a part of the page's runs (default: the first),
            and "title", both optional.
    """
    rows = page.gains[page.gains["part"] == page.part(spec.get("part"))]
    series = []
    for name, group in rows.groupby("group", sort=False):
        # gain_n: number of seeds that a gain is the mean of; gain_std: their standard deviation
        counts = group["gain_n"].dropna().unique() if "gain_n" in group else []
        label = method_name(str(name)) + (f" (n={int(counts[0])})" if len(counts) == 1 else "")
        has_std = "gain_std" in group and group["gain_std"].notna().all()
        std = (page.scale * group["gain_std"].astype(float)).tolist() if has_std else None
        gain = (page.scale * group["gain"].astype(float)).tolist()
        series.append(Series(label, group["client"].astype(float).tolist(), gain, std))
    heading = gains_title(page.about["metric"], page.about["select"], any(bars.std for bars in series))
    title = "; ".join(filter(None, (heading, spec.get("title", ""))))
    return Drawing("panels", title, xlabel="Client", ylabel=gains_ylabel(page.scale), series=series)


def heat(page: Page, spec: Mapping[str, Any]) -> Drawing:
    """Return the data of heat maps of a score, a panel for each value of a label.

    A cell is the mean over seeds for one group of runs; NaN if there is no such group.  Rows, columns and panels are in
    the order of runs.csv, or in that of a list under "where".

    Args:
        page: The page.
        spec: The entry of the figure in page.json.  "panels", "rows" and "columns" are the labels whose values are
            panels, rows and columns of the heat maps.  Optional are "part" (default: the first one), "where" (for
            columns of runs.csv, the values that runs must have), "score" (default: the page's metric at its selected
            round) and "title".

    Raises:
        ConfigError: Two groups belong to the same cell.
    """
    labels = [spec["panels"], spec["rows"], spec["columns"]]
    cells: dict[tuple[str, str, str], float] = {}  # by values of these labels
    for group in groups_of(page, spec.get("part"), spec.get("where")):
        panel, row, column = (str(group.labels.get(label)) for label in labels)
        require(
            (panel, row, column) not in cells,
            f"{page.folder}: several groups of runs have {panel}, {row} and {column}: add values of other labels to "
            "where in page.json",
        )
        # scores are columns of runs.csv; the page's metric is under the name of the round: last, best or best_val
        cells[panel, row, column] = page.scale * group.spread(spec.get("score", page.about["select"])).mean
    if not cells:
        return Drawing("heat maps", title="", xlabel="", ylabel="", series=[])  # which the caller refuses
    panels, rows, columns = (_ordered(values, spec, label) for values, label in zip(zip(*cells), labels))
    series = [
        Series(method_name(panel), x=[], y=[cells.get((panel, r, c), float("nan")) for r in rows for c in columns])
        for panel in panels
    ]
    return HeatMaps(
        "heat maps",
        title=spec.get("title", ""),
        xlabel=key_title(spec["columns"]),
        ylabel=metric_axis_label(page.about["metric"]),  # of the colours
        series=series,
        rows=rows,
        columns=columns,
    )


def _ordered(names: Iterable[str], spec: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names on an axis of heat maps: the list under "where" for its label, or else the distinct names.

    Args:
        names: The values of the label in the groups of runs, which may be repeated.
        spec: The entry of the figure in page.json.
        key: The label, a column of runs.csv.
    """
    wanted = (spec.get("where") or {}).get(key)
    return tuple(map(str, wanted)) if isinstance(wanted, list) else tuple(dict.fromkeys(names))


def _rounds(page: Page, group: Group, metric: str) -> list[int]:
    """Return the rounds, ascending, for which curves.csv has the metric for each run of a group; [] if none."""
    rows = page.curves[page.curves["run"].isin(group.rows["run"])] if len(page.curves) else page.curves
    if not len(rows) or metric not in rows:
        return []
    counts = rows.dropna(subset=metric).groupby("round")["run"].nunique()
    return [int(round) for round in counts.index[counts == len(group.rows)]]


def _series(name: str, x: list[Any], spreads: list[Spread], scale: float, tuned: bool = False) -> Series:
    """Return a line of a figure, without deviations if no value has one.

    Args:
        name: The legend entry.
        x: The positions [n].
        spreads: Mean and standard deviation at each position [n].
        scale: A factor for the values.
        tuned: Whether the last value is after fine-tuning.
    """
    has_std = any(spread.std is not None for spread in spreads)
    std = [scale * (spread.std or 0.0) for spread in spreads] if has_std else None
    return Series(name, [float(position) for position in x], [scale * spread.mean for spread in spreads], std, tuned)


# By kind of figure: the function that returns its data, and the keys of its entry in page.json besides alt and title.
KINDS: dict[str, tuple[Callable[[Page, Mapping[str, Any]], Drawing], tuple[str, ...]]] = {
    "curves": (curves, ("part", "metric", "where", "over")),
    "against": (against, ("part", "key", "score", "where", "xlabel")),
    "gains": (gains, ("part",)),
    "heat": (heat, ("part", "rows", "columns", "panels", "score", "where")),
}


def as_svg(drawing: Drawing) -> str:
    """Return a figure as the text of an SVG file.  Equal data give equal texts with the same version of matplotlib."""
    plt = plots.pyplot()
    # without a fixed salt and date, matplotlib writes random identifiers and the current time
    settings: Any = {"svg.hashsalt": "fedbench", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
    with plt.rc_context(settings):
        if isinstance(drawing, HeatMaps):
            figure = plots.draw_heat_maps(drawing)
        else:
            figure = _panels(drawing) if drawing.form == "panels" else plots.draw_axes(drawing)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": f"data sha256:{digest(drawing)}"})
        plt.close(figure)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _panels(drawing: Drawing) -> Any:
    """Return a matplotlib figure with a panel of bars for each series, titled by its name and the bars' mean."""
    titles = []
    for bars in drawing.series:
        defined = [y for y in bars.y if y == y]  # without NaN
        titles.append(f"{bars.name}: mean {sum(defined) / len(defined):+.2f}")
    dagger = plots.TUNED_LEGEND if any(DAGGER in bars.name for bars in drawing.series) else ""
    heading = "; ".join(filter(None, (drawing.title, dagger)))
    return plots.draw_panels(drawing, titles, plots.escape_mathtext(heading))
