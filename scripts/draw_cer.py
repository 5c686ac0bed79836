"""Draw pFedNet's Figure 5: a noisy signal of four levels, compressed by CER with four penalties.

    python scripts/draw_cer.py cer.png

Above are the signal and the received values, below the bits of both.  The signal is that of the released code: d = 100,
levels of -1, 0, 1, 0 and standard normal noise.  `--solver smoothing` computes what the released code computes.
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
ETA = 0.01  # step size of the released code, whose penalty is gamma * eta
GAMMAS = (50.0, 100.0, 500.0, 1000.0)


def signal(seed: int = 1) -> np.ndarray:
    """Return the noisy signal.  # [100] float32"""
    level = np.concatenate([np.full(length, height) for length, height in STEPS])
    return (level + np.random.default_rng(seed).standard_normal(len(level))).astype(np.float32)


def compressed(row: np.ndarray, gamma: float, solver: str = "exact") -> tuple[np.ndarray, int]:
    """Compress a row by CER, and return the received values [d] and the number of transmitted bits.

    Args:
        row: The row.  # [d] float32
        gamma: The penalty of the paper's Figure 5; for the exact solver, it is multiplied by eta.
        solver: "exact" or "smoothing".
    """
    options = {"eta": ETA, "gamma": gamma} if solver == "smoothing" else {"gamma": ETA * gamma}
    compressor = CER(gamma_rel=None, solver=solver, **options)  # type: ignore[arg-type]
    message = Message("g", len(row), np.arange(1))
    received, bits = compressor(torch.from_numpy(row)[None], RowRandom(torch.zeros(1, dtype=torch.int64)), message)
    return received[0].numpy(), int(bits[0])


def draw(path: Path, solver: str) -> None:
    """Draw the figure, with one column per penalty."""
    row = signal()
    figure, grid = pyplot().subplots(2, len(GAMMAS), figsize=(3 * len(GAMMAS), 4.6), sharex="row", layout="constrained")
    for (above, below), gamma in zip(grid.T, GAMMAS):
        received, bits = compressed(row, gamma, solver)
        pieces = 1 + int((received[1:] != received[:-1]).sum())
        above.plot(row, color="0.7", lw=0.8, label="g")
        above.plot(received, color=COLOURS[1], lw=1.4, label="CER")
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
