"""The demonstration of pFedNet's Figure 5: a noisy signal of four steps, and what CER makes of it under four penalties.

    python scripts/draw_cer.py cer.png

Above, the signal and its compressed form; below, the bits of the compressed form as a share of the dense ones.  The
released code's signal: d = 100, steps of -1, 0, 1, 0 and noise of N(0, 1); `--solver smoothing` is what it computes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from fedbench.compression.base import FLOAT, Message
from fedbench.compression.cer import CER
from fedbench.core.rng import RowRandom
from fedbench.report.drawing import COLOURS, pyplot

STEPS = ((30, -1.0), (20, 0.0), (40, 1.0), (10, 0.0))  # length and level
ETA = 0.01  # the released demonstration's step size: its penalties are gamma eta of ours
GAMMAS = (50.0, 100.0, 500.0, 1000.0)


def signal(seed: int = 1) -> np.ndarray:
    """Steps and noise.  # [100] float32"""
    level = np.concatenate([np.full(length, height) for length, height in STEPS])
    return (level + np.random.default_rng(seed).standard_normal(len(level))).astype(np.float32)


def compressed(row: np.ndarray, gamma: float, solver: str = "exact") -> tuple[np.ndarray, int]:
    """What is seen of a row [d], and the bits it takes."""
    own = {"eta": ETA, "gamma": gamma} if solver == "smoothing" else {"gamma": ETA * gamma}
    operator = CER(gamma_rel=None, solver=solver, **own)  # type: ignore[arg-type]
    message = Message("g", len(row), np.arange(1))
    seen, bits = operator(torch.from_numpy(row)[None], RowRandom(torch.zeros(1, dtype=torch.int64)), message)
    return seen[0].numpy(), int(bits[0])


def draw(path: Path, solver: str) -> None:
    """Four columns, one for each penalty."""
    row = signal()
    figure, grid = pyplot().subplots(2, len(GAMMAS), figsize=(3 * len(GAMMAS), 4.6), sharex="row", layout="constrained")
    for (above, below), gamma in zip(grid.T, GAMMAS):
        seen, bits = compressed(row, gamma, solver)
        pieces = 1 + int((seen[1:] != seen[:-1]).sum())
        above.plot(row, color="0.7", lw=0.8, label="g")
        above.plot(seen, color=COLOURS[1], lw=1.4, label="CER")
        above.set(title=f"$\\gamma$ = {gamma:g}: {pieces} pieces", xlabel="coordinate")
        below.barh(["dense", "CER"], [FLOAT * len(row), bits], color=["0.7", COLOURS[1]])
        below.set(xlabel=f"bits ({100 * bits / (FLOAT * len(row)):.1f}% of dense)")
    grid[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)
    print(f"figure: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--solver", choices=["exact", "admm", "smoothing"], default="exact")
    args = parser.parse_args()
    draw(args.out, args.solver)
