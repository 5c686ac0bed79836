"""The critical-difference diagram: average ranks of methods, and which of them do not differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbench.report import drawing
from fedbench.report.statistics import not_different


def draw_critical_difference(names: list[str], average_ranks: np.ndarray, difference: float, path: Path) -> Path:
    """Draw average ranks on an axis with the best rank on the right, and return the path.

    A thick line connects methods whose average ranks differ by at most the critical difference.

    Args:
        names: The names of the methods, the best first [K].
        average_ranks: Their average ranks, ascending [K].
        difference: The critical difference.
        path: The file.

    References:
        Demsar, JMLR 2006, Figure 1.
    """
    count = len(names)
    # The best half of the methods have their names at the right end of the axis, the others at the left end.
    left, right = count - count // 2, count // 2
    sets = not_different(average_ranks, difference)  # (position of the first method, position of the last) of each set
    # x is the rank.  y: 0 is the axis, above are its ticks, below first the lines of the sets, then the names.
    lowest = 0.4 * len(sets) + max(left, right)
    figure, axes = drawing.pyplot().subplots(figsize=(7, 0.8 + 0.32 * lowest), layout="constrained")
    axes.plot([1, count], [0, 0], color="black", lw=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.2], color="black", lw=1)
        axes.text(tick, 0.3, tick, ha="center", va="bottom", fontsize=9)
    axes.plot([count, count - difference], [1.3, 1.3], color="black", lw=1, marker="|")
    axes.text(
        count - difference / 2, 1.4, f"critical difference {difference:.2f}", ha="center", va="bottom", fontsize=9
    )
    for row, (first, last) in enumerate(sets):
        height = -0.4 * (row + 1)  # the line is 0.03 ranks longer at both ends, so that it covers its methods
        axes.plot(average_ranks[[first, last]] + [-0.03, 0.03], [height, height], color="black", lw=3,
                  solid_capstyle="butt")  # fmt: skip
    for i, (name, rank) in enumerate(zip(names, average_ranks)):
        is_right = i < right
        depth = -(0.4 * len(sets) + 1 + (i if is_right else count - 1 - i))
        end = 1 if is_right else count
        colour = drawing.line_style(i)["color"]
        axes.plot([rank, rank, end], [0, depth, depth], color=colour, lw=1)
        label = drawing.escape_mathtext(f" {name} ({rank:.2f}) ")
        axes.text(end, depth, label, ha="left" if is_right else "right", va="center", fontsize=9)
    axes.set(xlim=(max(count, 1 + difference) + 0.05, 0.95), ylim=(-lowest - 0.6, 2.2))
    axes.axis("off")
    return drawing.save(figure, path)
