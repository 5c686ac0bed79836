"""What all figures share: their looks, names as matplotlib shows them, and the file that a figure becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.destination import check_folder
from fedbench.core.options import ConfigError, require
from fedbench.report.table import DAGGER, one_line

# Okabe and Ito's colours, told apart with any colour vision; then again with another line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
LINES = (("-", "--"), (":", "-."))  # by turns; dashes lie above, so that of two lines that coincide both are seen
SUFFIXES = (".png", ".pdf", ".svg")
SPREAD = "± std over seeds"
TUNED_HERE = f"{DAGGER} after fine-tuning at the end"


def pyplot() -> Any:
    """matplotlib.pyplot without a window; ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"pdf.fonttype": 42, "svg.fonttype": "none"}  # text that can be searched and edited
    import matplotlib.pyplot as plt

    return plt


@dataclass(frozen=True)
class Place:
    """Where figures go: a folder, what their names begin with, and the suffix that says what they are."""

    folder: Path
    begin: str = ""
    suffix: str = ".png"

    def file(self, name: str) -> Path:
        """The path of a figure."""
        return self.folder / f"{self.begin}{name}{self.suffix}"


def place_of(flag: str, path: Path) -> Place:
    """A folder, for PNG files, or ``folder/name.pdf``: PDF files whose names begin with name; ConfigError for another
    suffix and for a folder that cannot be written into.  A folder that is there may have a point in its name."""
    is_file = bool(path.suffix) and not path.is_dir()
    require(
        not is_file or path.suffix in SUFFIXES,
        f"{flag} {path}: a figure's name ends in {', '.join(SUFFIXES)}; without an end it is a folder for .png",
    )
    check_folder(flag, path.parent if is_file else path)
    return Place(path.parent, f"{path.stem}_", path.suffix) if is_file else Place(path)


def literal(text: str) -> str:
    """A name as matplotlib shows it: no formula between dollars, and in a legend even where it begins with _."""
    return (" " if text.startswith("_") else "") + one_line(text).replace("$", r"\$")


def look(i: int) -> dict[str, Any]:
    """Colour and kind of the i-th line; of each kind, later ones lie below."""
    kinds = LINES[i // len(COLOURS) % len(LINES)]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": kinds[i % 2], "zorder": 2.2 + 0.5 * (i % 2) - i / 1000}


def draw_line(axes: Any, i: int, x: Any, mean: Any, std: Any, label: str, tuned: bool = False, **more: Any) -> None:
    """The i-th line with a band of one std around it (None: one run); tuned: the last point, after fine-tuning at the
    end, stands apart as an open marker."""
    x, mean = np.asarray(x, float), np.asarray(mean, float)
    std = None if std is None else np.asarray(std, float)
    end = len(x) - 1 if tuned else len(x)
    few = {"marker": "o"} if end < 3 else {}  # a line through one point is invisible
    axes.plot(x[:end], mean[:end], label=literal(label), **few, **look(i), **more)
    if std is not None:
        band = slice(0, end)
        axes.fill_between(x[band], (mean - std)[band], (mean + std)[band], color=look(i)["color"], alpha=0.15, lw=0)
    if tuned:
        axes.errorbar(x[end:], mean[end:], None if std is None else std[end:], marker="o", mfc="white", capsize=3,
                      color=look(i)["color"], zorder=3)  # fmt: skip


def legend(figure: Any, axes: Any, tuned: bool = False, marked: bool = True) -> None:
    """What the lines are and their spread, beside the axes; tuned: and what the dagger (marked: and the open marker)
    means."""
    from matplotlib.collections import PolyCollection
    from matplotlib.container import ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, names = axes.get_legend_handles_labels()
    has_bands = any(isinstance(part, PolyCollection) for part in axes.collections)
    if has_bands or any(isinstance(part, ErrorbarContainer) and part.has_yerr for part in axes.containers):
        bar = Line2D([], [], color="0.3", ls="", marker="|", ms=10)
        handles.append(Patch(color="0.3", alpha=0.15, lw=0) if has_bands else bar)
        names.append(SPREAD)
    if tuned:
        handles.append(Line2D([], [], color="0.3", ls="", marker="o" if marked else "", mfc="white"))
        names.append(TUNED_HERE)
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)


def tidy(axes: Any) -> None:
    """Draw a light grid, and no frame on the right and above."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def whole_numbers(axes: Any, both: bool = True) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def logarithmic(axes: Any, which: str, values: Any) -> None:
    """A logarithmic axis, x or y, for values >= 0 with plain numbers at its ticks; linear near 0 where one is 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, SymmetricalLogLocator

    values = np.asarray(values, float)
    least = values[values > 0].min()
    subs = (1,) if values.max() > 30 * least else (1, 2, 5)
    axis, scale = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}scale")
    if values.min() > 0:
        scale("log")
        axis.set_major_locator(LogLocator(subs=subs))
    else:
        decade = 10 ** np.floor(np.log10(least))
        scale("symlog", linthresh=decade)
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=decade, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path) -> Path:
    """Write a figure as its suffix says and close it; ConfigError for another suffix.  Returns its path."""
    require(path.suffix in SUFFIXES, f"{path}: a figure's name ends in {', '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
    return path
