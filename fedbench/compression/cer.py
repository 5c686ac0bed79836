"""CER: total variation denoising makes neighbouring values equal, and every segment of equal values is sent once.

"Medical Federated Model with Mixture of Personalized and Shared Components" (pFedNet).  Its regularized step is total
variation denoising of the row, followed by a 0; the step size and the current point cancel (_total_variation.py).  The
result is piecewise constant, and each segment is encoded by its length and value.
Departs from the paper: its threshold (5) is correct for rho = 1 only, and is corrected here.  Its code splits rows into
blocks of 3,000, each followed by a 0 (block).  It starts from 0 and stops early, which gives a linear smoothing that
makes no values equal (solver=smoothing).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.compression import _total_variation as tv
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import FLOAT, Compressor, Direction, Encoded, Message
from fedbench.core.options import Count, NonNegative, Probability, require
from fedbench.core.rng import RowRandom

ETA = 1e-3  # step size of the released code's smoothing


class CER(Compressor):
    """CER, computed on the host.  send="all" (has_values): rows are sent as float32 values; else their segments are.

    Args:
        gamma: Penalty in the units of the row; None uses gamma_rel.
        gamma_rel: Penalty relative to the smallest one that makes all values 0; None uses gamma.
        solver: "exact", or "smoothing" as in the released code, with its step size and 20 iterations.
        block: Number of values that are denoised together; None is the whole row.
        send: "segments" encodes segments; "all" transmits all values, for another compressor after it in a chain.
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    contractive = True

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
            f"compression.gamma={'null' if gamma is None else gamma} and "
            f"compression.gamma_rel={'null' if gamma_rel is None else gamma_rel} are two units of the same penalty: "
            "set exactly one of them to a number >= 0, and the other to null",
        )
        self.gamma, self.gamma_rel, self.solver, self.block = gamma, gamma_rel, solver, block
        self.has_values = send == "all"
        self.exact = not gamma and not gamma_rel

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Denoise rows, and encode them.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Unused.
            message: Description of what is sent; unused.

        Returns:
            With send="all" the denoised rows as values.  Else codes: "row", the denoised rows, and "begins", True at
            the first value of each segment of equal values.  # [k, n] each
        """
        rows = x.detach().cpu().double().numpy()
        v = torch.from_numpy(np.stack([self.denoised(row) for row in rows]) if len(rows) else rows).float().to(x.device)
        if self.has_values:  # send="all": the rows are sent as float32 values
            return Encoded(v)
        begins = torch.ones_like(v, dtype=torch.bool)  # True where a segment of equal values begins
        begins[:, 1:] = v[:, 1:] != v[:, :-1]
        return Encoded(v[:, :0], {"row": v, "begins": begins})  # v[:, :0]: no float32 values

    def denoised(self, row: np.ndarray) -> np.ndarray:
        """Return a row [n] with each block of `self.block` values denoised by itself (total variation).  # [n] float64

        The last block may be shorter.  If `self.block` is None, the whole row is one block.
        """
        size = self.block or len(row)  # None: the whole row is one block
        return np.concatenate([self._block_of(row[a : a + size]) for a in range(0, len(row), size)])

    def _block_of(self, g: np.ndarray) -> np.ndarray:
        """Return a block g [d] of a row after total variation denoising.  # [d] float64

        The options gamma or gamma_rel set the weight of the total variation.
        """
        # weight of the penalty, absolute or relative to the smallest one for which the whole block becomes 0
        gamma = self.gamma if self.gamma_rel is None else self.gamma_rel * tv.largest_gamma(g)
        assert gamma is not None  # for type checkers: one of both options is set
        # the other solver is that of pFedNet's released code, 20 smoothing steps of size ETA = 0.001
        return tv.exact(g, gamma) if self.solver == "exact" else tv.smoothed(g, ETA * gamma, times=20)

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows: all n values of each, where the values of a segment are equal.  # [k, n]

        The encoding contains these rows: as its float32 values with send="all", else as its code "row".
        """
        return encoded.values if self.has_values else encoded.codes["row"]

    def num_values(self, message: Message) -> int:
        """Return the number of float32 values in a row's encoding: n = message.size with send="all", else 0.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return message.size if self.has_values else 0

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's codes: for each segment 32 for its value, and a gamma code of its length.

        With send="all" there are no segments, because the values themselves are sent, and the number is 0.

        Args:
            encoded: The code "begins" [k, n], True at the first value of each segment.
            message: Description of what is sent; unused.

        Returns:
            The numbers of bits.  # [k] int64
        """
        if self.has_values:  # send="all"
            return torch.zeros(len(encoded.values), dtype=torch.int64, device=encoded.values.device)
        begins = encoded.codes["begins"]
        segment = begins.cumsum(1) - 1  # index of the segment of each value  [k, n]
        # values in each segment, 0 for unused indices  [k, n]
        lengths = torch.zeros_like(segment).scatter_add_(1, segment, torch.ones_like(segment))
        exponent = torch.frexp(lengths.clamp_min(1).double()).exponent - 1  # floor(log2)
        return torch.where(lengths > 0, FLOAT + 2 * exponent + 1, 0).sum(1)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write each segment of one row: its length in gamma code, its value as 32 bits.  send="all" writes nothing.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if self.has_values:  # send="all"
            return
        starts = torch.nonzero(encoded.codes["begins"][0])[:, 0].tolist()  # position of each segment
        for a, b in zip(starts, [*starts[1:], message.size]):
            out.gamma(b - a)  # length
            out.floats(encoded.codes["row"][0, a : a + 1])

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote, its segments, and return {"row": the row [1, n]}.

        With send="all" there are no codes, because the row is sent as float32 values.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if self.has_values:  # send="all"
            return {}
        segments, length = [], 0
        while length < message.size:
            segments.append(torch.empty(stream.gamma()))  # the length of a segment, in Elias's gamma code
            segments[-1][:] = stream.floats(1)  # its value
            length += len(segments[-1])
        return {"row": torch.cat(segments)[None]}
