"""QSGD: stochastic quantization, which rounds values without bias to multiples of norm / levels.

Alistarh et al., NeurIPS 2017, section 3.1.  code=runs is the paper's code for few levels of the l2 norm: Elias omega
codes (IEEE Trans. Inf. Theory 1975) of the nonzero levels and of the distances between them.
Departs from the paper: one norm for the whole row instead of one per bucket; with code=elias every level has an Elias
gamma code, and zeros take one bit.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.compression import _runs as runs
from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import divided, l2_norm, over
from fedbench.compression.base import FLOAT, Compressor, Direction, Encoded, Message
from fedbench.core.options import Count, require
from fedbench.core.rng import RowRandom

MAX_LEVELS = 1 << 16  # float32 has 24 bits of precision, some of which the rounding needs


class QSGD(Compressor):
    """Stochastic quantization of a row to multiples of norm / levels.  code: how the levels are written.

    Args:
        levels: Number s of levels of |x| above 0; None is full precision.
        norm: Value of level s: "l2" (the paper) or "max", max |x|.
        code: "elias" (short for small levels), "runs" (short if most levels are 0) or "fixed" (equal widths).
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    unbiased = True

    def __init__(
        self,
        levels: Count | None = 16,
        norm: Literal["l2", "max"] = "max",
        code: Literal["elias", "runs", "fixed"] = "elias",
        error_feedback: bool = False,
        direction: Direction = "up",
    ):
        super().__init__(error_feedback, direction)
        require(
            levels is None or levels <= MAX_LEVELS,
            f"compression.levels={levels} must be at most {MAX_LEVELS:,}: lower it, or set compression.levels=null for "
            "full precision",
        )
        self.levels, self.norm, self.code = levels or 0, norm, code
        self.exact = levels is None

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Quantize rows to multiples of norm / levels.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            Codes "scale", the norm [k, 1], and "level", signed levels [k, n] int32.
        """
        scale = l2_norm(x) if self.norm == "l2" else x.abs().amax(1, keepdim=True)
        exact = over(x, scale) * self.levels  # |x| in units of norm / levels
        below = exact.floor()  # the level below
        # up with probability exact - below, so the mean is exact
        level = below + (draws.uniform(message.size) < exact - below)
        # x[:, :0]: no float32 values
        return Encoded(x[:, :0], {"scale": scale, "level": torch.where(x < 0, -level, level).int()})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows, norm * level / s for s levels.

        Args:
            encoded: Codes "scale", the norm of each row [k, 1], and "level", its signed levels from -s to s [k, n].
            message: Description of what is sent; unused.

        Returns:
            The quantized rows.  # [k, n]
        """
        return encoded.codes["scale"] * divided(encoded.codes["level"].float(), self.levels)

    @property
    def width(self) -> int:
        """Number of bits of one signed level, from -s to s, with code="fixed": enough for 2 s + 1 values."""
        return (2 * self.levels).bit_length()

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of the norm and the levels.  # [k]

        code="fixed": each level has the same width.  "runs": run lengths of zeros, and other levels.  "elias": level l
        has 2 floor(log2(l + 1)) + 1 bits, and a sign unless it is 0.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if self.code == "runs":
            return FLOAT + runs.count(encoded.codes["level"])
        level = encoded.codes["level"].abs()
        if self.code == "fixed":
            return torch.full((len(level),), FLOAT + message.size * self.width, device=level.device)
        exponent = torch.frexp((level + 1).float()).exponent - 1  # floor(log2), exact below 2^24
        return FLOAT + (2 * exponent + 1 + (level > 0)).sum(1)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write one row (k = 1) to `out`: the norm as 32 bits, then its signed levels in the code `self.code`.

        `message`, the description of what is sent, is unused.
        """
        out.floats(encoded.codes["scale"][0])
        if self.code == "runs":
            runs.write(encoded.codes["level"][0], out)
            return
        for level in encoded.codes["level"][0].tolist():
            if self.code == "fixed":
                out.fixed(level + self.levels, self.width)  # from -levels ... levels to 0 ... 2 levels
                continue
            out.gamma(abs(level) + 1)  # Elias gamma code: 1 bit for level 0
            if level:
                out.fixed(int(level < 0), 1)  # the sign

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read one row that `write` wrote; return {"scale": the norm [1, 1], "level": signed levels [1, n] int32}.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        scale = stream.floats(1)[None]
        if self.code == "runs":
            levels = runs.read(stream, message.size)  # run lengths of zeros, and other levels
        else:
            # "fixed": integers of equal width; "elias": an Elias gamma code and a sign for each level
            read_level = self._fixed if self.code == "fixed" else _elias
            levels = [read_level(stream) for _ in range(message.size)]
        return {"scale": scale, "level": torch.tensor([levels], dtype=torch.int32)}

    def _fixed(self, stream: Reader) -> int:
        """Read one signed level, from -s to s, that was written with code="fixed": `self.width` bits for level + s."""
        return stream.fixed(self.width) - self.levels


def _elias(stream: Reader) -> int:
    """Read one signed level of code="elias": the gamma code of |level| + 1, and a sign bit unless the level is 0."""
    level = stream.gamma() - 1
    return -level if level and stream.fixed(1) else level
