"""CER: numbers that stand next to each other are drawn together until they are equal, and equal ones are sent once.

"Medical Federated Model with Mixture of Personalized and Shared Components" (pFedNet).  Its regularized step is
denoising of the row by total variation, with a 0 behind the last number: the step size and the point drop out
(_total_variation.py).  What is left is constant piece by piece; each piece is its length and its number.
Departs from the paper: its threshold (5) is right for rho = 1 alone, here it is corrected; its code cuts rows into
blocks of 3,000 with a 0 behind each (block), and, as it starts from 0 and stops early, computes a linear
smoothing that makes no numbers equal (solver=smoothing).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.compression import _total_variation as tv
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import FLOAT, Direction, Message, Operator, Sent
from fedbench.core.options import Count, NonNegative, Probability, require
from fedbench.core.rng import RowRandom

ETA = 1e-3  # step size of the released code's smoothing


class CER(Operator):
    """gamma: the penalty, in units of the row; gamma_rel: in multiples of the least one that makes all numbers 0, and
    then gamma is null.  solver: exact, or smoothing, as released (with its step size and 20 iterations).  block: how
    many numbers are denoised together; null: the row.  send: segments, or all, for an operator behind this one in a
    chain.  On the host, whatever the device is."""

    contracts = True

    def __init__(
        self,
        gamma: NonNegative | None = None,
        gamma_rel: Probability | None = 0.01,
        solver: Literal["exact", "smoothing"] = "exact",
        block: Count | None = None,
        send: Literal["segments", "all"] = "segments",
        error_feedback: bool = False,
        direction: Direction = "up",
    ):
        super().__init__(error_feedback, direction)
        require(
            (gamma is None) != (gamma_rel is None),
            f"compression.gamma={gamma} and compression.gamma_rel={gamma_rel}: give one of them, and null for the "
            "other",
        )
        self.gamma, self.gamma_rel, self.solver, self.block = gamma, gamma_rel, solver, block
        self.leaves_numbers = send == "all"
        self.exact = not gamma and not gamma_rel

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The denoised rows: as numbers [k, n], or with the first number of each segment marked [k, n] bool."""
        rows = x.detach().cpu().double().numpy()
        v = torch.from_numpy(np.stack([self.denoised(row) for row in rows]) if len(rows) else rows).float().to(x.device)
        if self.leaves_numbers:
            return Sent(v)
        begins = torch.ones_like(v, dtype=torch.bool)
        begins[:, 1:] = v[:, 1:] != v[:, :-1]
        return Sent(v[:, :0], {"row": v, "begins": begins})

    def denoised(self, row: np.ndarray) -> np.ndarray:
        """A row [n] float64, block by block."""
        size = self.block or len(row)
        return np.concatenate([self._block_of(row[a : a + size]) for a in range(0, len(row), size)])

    def _block_of(self, g: np.ndarray) -> np.ndarray:
        gamma = self.gamma if self.gamma_rel is None else self.gamma_rel * tv.largest_gamma(g)
        assert gamma is not None
        return tv.exact(g, gamma) if self.solver == "exact" else tv.smoothed(g, ETA * gamma, 20)

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """The denoised rows.  # [k, n]"""
        return sent.numbers if self.leaves_numbers else sent.codes["row"]

    def num_numbers(self, message: Message) -> int:
        """All, or none."""
        return message.size if self.leaves_numbers else 0

    def count(self, sent: Sent, message: Message) -> Tensor:
        """For each segment 32 bits and 2 floor(log2 length) + 1.  # [k]"""
        if self.leaves_numbers:
            return torch.zeros(len(sent.numbers), dtype=torch.int64, device=sent.numbers.device)
        begins = sent.codes["begins"]
        number = begins.cumsum(1) - 1  # of the segment that a place is in  [k, n]
        lengths = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number))
        exponent = torch.frexp(lengths.clamp_min(1).double()).exponent - 1  # floor(log2)
        return torch.where(lengths > 0, FLOAT + 2 * exponent + 1, 0).sum(1)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """Of each segment the length and the number; in a chain nothing."""
        if self.leaves_numbers:
            return
        starts = torch.nonzero(sent.codes["begins"][0])[:, 0].tolist()
        for a, b in zip(starts, [*starts[1:], message.size]):
            out.gamma(b - a)
            out.floats(sent.codes["row"][0, a : a + 1])

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Segments, until they are as long as the row."""
        if self.leaves_numbers:
            return {}
        parts, length = [], 0
        while length < message.size:
            parts.append(torch.empty(stream.gamma()))
            parts[-1][:] = stream.floats(1)
            length += len(parts[-1])
        return {"row": torch.cat(parts)[None]}
