"""What all figures have in common: colours and line styles, legends, axes, and output files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.destination import check_folder
from fedbench.core.options import ConfigError, require
from fedbench.report.table import DAGGER, escape_control

# The palette of Okabe and Ito, which can be distinguished with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
LINE_STYLES = (("-", "--"), (":", "-."))  # alternating; dashed lines lie above, so that coinciding lines are visible
SUFFIXES = (".png", ".pdf", ".svg")
SPREAD = "± std over seeds"
TUNED_LEGEND = f"{DAGGER} after fine-tuning at the end"


@dataclass(frozen=True)
class Series:
    """A line, the bars of a legend entry, or a panel of bars.

    Attributes:
        name: The legend entry, or the title of the panel.
        x: The positions [n], a list or an array.
        y: The values [n].
        std: The standard deviations over seeds [n]; None if there are none.
        tuned: Whether the last value is after fine-tuning.  It is drawn as an open marker that no line connects with
            the values before.
    """

    name: str
    x: Any
    y: Any
    std: Any = None
    tuned: bool = False


@dataclass(frozen=True)
class Drawing:
    """The data of a figure with axes: its form (lines, points, bars or panels), series of x and y, and labels.

    Attributes:
        form: "lines", "points" (with error bars), "bars" (at equal distances), or "panels" (of bars).
        title: The title.
        xlabel: The label of the x axis.
        ylabel: The label of the y axis.
        series: The lines, legend entries or panels.
        level: The position of a dotted horizontal line for the target; None for no line.
        logarithmic: Whether the x axis is logarithmic.
    """

    form: str
    title: str
    xlabel: str
    ylabel: str
    series: list[Series]
    level: float | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class HeatMaps(Drawing):
    """The data of a figure of heat maps: a panel per series, whose values are in row-major order.

    Attributes:
        rows: The names of the rows of each panel.
        columns: The names of its columns.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureFiles:
    """The paths of figures: folder / (prefix + name + suffix), where the suffix is also the format.

    Attributes:
        folder: The folder.
        prefix: The beginning of all file names.
        suffix: The end of all file names, one of `SUFFIXES`, which is also the format.
    """

    folder: Path
    prefix: str = ""
    suffix: str = ".png"

    def path(self, name: str) -> Path:
        """Return the path of a figure's file: folder / (prefix + name + suffix).  A name is for example "curves"."""
        return self.folder / f"{self.prefix}{name}{self.suffix}"


def figure_files(flag: str, path: Path) -> FigureFiles:
    """Return the folder, prefix and suffix of figure files that a path stands for.

    Args:
        flag: The flag of the command that has the path, such as "--figures", for error messages.
        path: A folder for PNG files; or ``folder/name.pdf`` for PDF files whose names begin with ``name``.

    Raises:
        ConfigError: The suffix is unknown, or the folder is not writable.
    """
    if path.is_dir() or not path.suffix:  # an existing folder may have a point in its name
        check_folder(flag, path)
        return FigureFiles(path)
    require(
        path.suffix in SUFFIXES,
        f"{flag} {path}: the name of a figure must end in {', '.join(SUFFIXES)}; a name without suffix is a folder",
    )
    check_folder(flag, path.parent)
    return FigureFiles(path.parent, f"{path.stem}_", path.suffix)


def pyplot() -> Any:
    """Return the module matplotlib.pyplot with a backend that opens no windows.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"pdf.fonttype": 42, "svg.fonttype": "none"}  # text that can be searched and edited
    import matplotlib.pyplot as plt

    return plt


def escape_mathtext(text: str) -> str:
    """Return a text that matplotlib displays literally: dollars are escaped, as is an underscore at the beginning."""
    return (" " if text.startswith("_") else "") + escape_control(text).replace("$", r"\$")


def line_style(i: int) -> dict[str, Any]:
    """Return color, linestyle and zorder of the line number ``i`` (from 0), a dict of arguments of ``axes.plot``."""
    styles = LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)]  # other styles when the colours begin again
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": styles[i % 2], "zorder": 2.2 + 0.5 * (i % 2) - i / 1000}


def draw_line(axes: Any, i: int, series: Series, **options: Any) -> None:
    """Draw a line with a band of one standard deviation.

    Args:
        axes: The axes.
        i: The index of the line, which determines its colour.
        series: The line.  If it is tuned, its last point is after fine-tuning: the line ends before it, and the point
            is an open marker.
        **options: Options of ``axes.plot``.
    """
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    std = None if series.std is None else np.asarray(series.std, float)
    end = len(x) - 1 if series.tuned else len(x)
    marker = {"marker": "o"} if end < 3 else {}  # a line through one point would be invisible
    style = line_style(i)
    axes.plot(x[:end], y[:end], label=escape_mathtext(series.name), **marker, **style, **options)
    if std is not None:
        axes.fill_between(x[:end], (y - std)[:end], (y + std)[:end], color=style["color"], alpha=0.15, lw=0)
    if series.tuned:
        axes.errorbar(x[end:], y[end:], None if std is None else std[end:], marker="o", mfc="white", capsize=3,
                      color=style["color"], zorder=3)  # fmt: skip


def draw_axes(drawing: Drawing, figsize: tuple[float, float] = (8, 4.5)) -> Any:
    """Return a figure of lines, points or bars with its legend.

    Args:
        drawing: The data; its form is "lines", "points" or "bars".
        figsize: Width and height in inches.
    """
    figure, axes = pyplot().subplots(figsize=figsize, layout="constrained")
    positions = sorted({x for series in drawing.series for x in series.x})
    for i, series in enumerate(drawing.series):
        label = escape_mathtext(series.name)
        if drawing.form == "bars":
            width = 0.8 / len(drawing.series)
            shift = (i - (len(drawing.series) - 1) / 2) * width  # bars of one position stand side by side, centred
            x = [positions.index(x) + shift for x in series.x]
            axes.bar(x, series.y, width, yerr=series.std, capsize=2, label=label, color=COLOURS[i % len(COLOURS)])
        elif drawing.form == "points":
            axes.errorbar(series.x, series.y, series.std, marker="o", capsize=2, label=label, **line_style(i))
        elif series.x:
            draw_line(axes, i, series, gid=f"series_{i}")
    if drawing.level is not None:  # the target of the metric
        unit = "%" if "(%)" in drawing.ylabel else ""
        axes.axhline(drawing.level, color="0.4", linestyle=":", lw=1, label=f"target ({drawing.level:g}{unit})")
    if drawing.form == "bars":
        axes.set_xticks(range(len(positions)), [f"{x:g}" for x in positions])
    elif drawing.logarithmic and drawing.form == "lines":
        set_log_scale(axes, "x", positions)
    elif drawing.logarithmic:  # linear below the smallest positive value, so that 0 can be shown
        axes.set_xscale("symlog", linthresh=min(x for x in positions if x > 0))
        axes.set_xticks(positions, [f"{x:g}" for x in positions])
    elif all(x == int(x) for x in positions):
        set_integer_ticks(axes, "x")
    axes.set(xlabel=drawing.xlabel, ylabel=drawing.ylabel, title=escape_mathtext(drawing.title))
    style_axes(axes)
    # a dagger marks methods that fine-tune after the last round only
    tuned = any(series.tuned or DAGGER in series.name for series in drawing.series)
    add_legend(figure, axes, tuned, has_marker=drawing.form == "lines")
    return figure


def draw_panels(drawing: Drawing, titles: Sequence[str], heading: str) -> Any:
    """Return a figure with a panel of bars per series: blue for values >= 0, orange for others.

    Args:
        drawing: The data of the figure.
        titles: The title of each panel, which may be longer than the name of its series.
        heading: The title of the figure.
    """
    count = len(drawing.series)
    figure, panels = pyplot().subplots(count, 1, figsize=(8, 0.6 + 1.4 * count), sharex=True, sharey=True,
                                       squeeze=False, layout="constrained")  # fmt: skip
    for axes, bars, title in zip(panels[:, 0], drawing.series, titles):
        colours = [COLOURS[0 if value >= 0 else 1] for value in bars.y]
        axes.bar(bars.x, bars.y, 0.8, yerr=bars.std, color=colours, error_kw={"lw": 0.8, "ecolor": "0.3"})
        axes.axhline(0, color="black", lw=0.8)
        style_axes(axes)
        axes.grid(False, axis="x")
        axes.set_title(escape_mathtext(title), fontsize=9, loc="left")
    panels[-1, 0].set_xlabel(drawing.xlabel)
    set_integer_ticks(panels[-1, 0], "x")
    figure.supylabel(drawing.ylabel, fontsize=10)
    figure.suptitle(heading, fontsize=10)
    return figure


def draw_heat_maps(drawing: HeatMaps) -> Any:
    """Return a figure of heat maps with the same colours, two in a row.  Each cell shows its value, "-" for NaN.

    Args:
        drawing: The data of the figure.
    """
    rows, columns, count = drawing.rows, drawing.columns, len(drawing.series)
    wide = min(count, 2)  # panels in a row
    tall = -(-count // wide)  # rows of panels, rounded up
    size = (1.5 + wide * (0.8 + 0.62 * len(columns)), 1.2 + tall * (0.7 + 0.34 * len(rows)))
    figure, panels = pyplot().subplots(tall, wide, figsize=size, squeeze=False, layout="constrained")
    values = np.array([series.y for series in drawing.series], float).reshape(count, len(rows), len(columns))
    lowest, highest = np.nanmin(values), np.nanmax(values)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    for axes, series, cells in zip(panels.flat, drawing.series, values):
        image = axes.imshow(cells, cmap="viridis", vmin=lowest, vmax=highest, aspect="auto")
        axes.set_xticks(range(len(columns)), map(escape_mathtext, columns), rotation=30, ha="right", fontsize=9)
        axes.set_yticks(range(len(rows)), map(escape_mathtext, rows), fontsize=9)
        axes.set_title(escape_mathtext(series.name), fontsize=10)
        for (i, j), value in np.ndenumerate(cells):
            is_dark = value < (lowest + highest) / 2
            text = "-" if np.isnan(value) else f"{value:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black")
    figure.colorbar(image, ax=panels, label=drawing.ylabel, shrink=0.6)
    figure.supxlabel(drawing.xlabel, fontsize=10)
    figure.suptitle(escape_mathtext(drawing.title), fontsize=10)
    return figure


def add_legend(figure: Any, axes: Any, tuned: bool = False, has_marker: bool = True) -> None:
    """Add the legend of lines, points or bars at the upper right outside of the axes.

    Bands and error bars get an entry that says that they are standard deviations over seeds.

    Args:
        figure: The figure.
        axes: The axes.
        tuned: Whether to add an entry that explains the dagger of methods that fine-tune after the last round only.
        has_marker: Whether this entry shows the open marker of values after fine-tuning.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.container import ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, names = axes.get_legend_handles_labels()
    has_bands = any(isinstance(artist, PolyCollection) for artist in axes.collections)
    if has_bands or any(isinstance(c, ErrorbarContainer) and c.has_yerr for c in axes.containers):
        bar = Line2D([], [], color="0.3", ls="", marker="|", ms=10)
        handles.append(Patch(color="0.3", alpha=0.15, lw=0) if has_bands else bar)
        names.append(SPREAD)
    if tuned:
        handles.append(Line2D([], [], color="0.3", ls="", marker="o" if has_marker else "", mfc="white"))
        names.append(TUNED_LEGEND)
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)


def style_axes(axes: Any) -> None:
    """Draw a light grid, and remove the frame on the right and at the top."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def set_integer_ticks(axes: Any, which: str = "xy") -> None:
    """Set ticks at integers only, on the axis "x" or "y", or on both ("xy")."""
    from matplotlib.ticker import MaxNLocator

    for letter in which:
        axis = getattr(axes, f"{letter}axis")
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def set_log_scale(axes: Any, which: str, values: Any) -> None:
    """Set a logarithmic scale, linear near 0 if a value is 0, with ticks written as plain numbers.

    Args:
        axes: The axes.
        which: "x" or "y".
        values: The displayed values, >= 0.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, SymmetricalLogLocator

    values = np.asarray(values, float)
    smallest = values[values > 0].min()
    # ticks at 1, 10, ... or, for a short axis, at 1, 2, 5, 10, ...
    subs = (1,) if values.max() > 30 * smallest else (1, 2, 5)
    axis = getattr(axes, f"{which}axis")
    set_scale = getattr(axes, f"set_{which}scale")
    if values.min() > 0:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=subs))
    else:
        threshold = 10 ** math.floor(math.log10(smallest))
        set_scale("symlog", linthresh=threshold)
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure in the format of the path's suffix, close it, and return the path.

    Raises:
        ConfigError: The suffix is not one of `SUFFIXES`.
    """
    require(path.suffix in SUFFIXES, f"{path}: the name of a figure must end in {', '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
    return path
