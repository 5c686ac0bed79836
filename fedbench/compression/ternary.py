"""Stochastic ternary numbers: -s, 0 or s, where s is the largest magnitude, right on average.

Wen et al., NeurIPS 2017 (TernGrad), with its gradient clipping.  Departs from the paper: one scale for the whole row,
in place of one for each layer, and clients do not share it.  Five numbers are a byte, as 3^5 = 243: 1.6 bits each, 1 %
above log2 3.
"""

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import divided, l2_norm, over, total
from fedbench.compression.base import FLOAT, Direction, Message, Operator, Sent
from fedbench.core.options import Positive
from fedbench.core.rng import RowRandom

TRITS, BYTE = 5, 8


class Ternary(Operator):
    """clip: magnitudes are cut at so many standard deviations of the row first (the paper: 2.5), which is no longer
    right on average; null: they are not."""

    def __init__(self, clip: Positive | None = None, error_feedback: bool = False, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self.clip, self.unbiased = clip, clip is None

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The scale [k, 1], and -1, 0 or 1 for each number [k, n] int8."""
        x = x if self.clip is None else _clipped(x, self.clip)
        scale = x.abs().amax(1, keepdim=True)
        chosen = draws.uniform(message.size) < over(x, scale)
        return Sent(x[:, :0], {"scale": scale, "trit": (chosen * x.sign()).to(torch.int8)})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """Multiples of the scale.  # [k, n]"""
        return sent.codes["scale"] * sent.codes["trit"]

    def count(self, sent: Sent, message: Message) -> Tensor:
        """32 + 8 ceil(n / 5).  # [k]"""
        bits = FLOAT + BYTE * -(-message.size // TRITS)
        return torch.full((len(sent.numbers),), bits, device=sent.numbers.device)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """The scale, and a byte for each five numbers, the first of which counts most; zeros fill up the last one."""
        out.floats(sent.codes["scale"][0])
        digits = [trit + 1 for trit in sent.codes["trit"][0].tolist()]
        digits += [1] * (-len(digits) % TRITS)
        for a in range(0, len(digits), TRITS):
            byte = 0
            for digit in digits[a : a + TRITS]:
                byte = 3 * byte + digit
            out.fixed(byte, BYTE)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The scale, and the numbers."""
        scale, trits = stream.floats(1)[None], []
        for _ in range(-(-message.size // TRITS)):
            byte = stream.fixed(BYTE)
            trits += [byte // 3**power % 3 - 1 for power in reversed(range(TRITS))]
        return {"scale": scale, "trit": torch.tensor([trits[: message.size]], dtype=torch.int8)}


def _clipped(x: Tensor, deviations: float) -> Tensor:
    """x [k, n] with magnitudes cut at so many standard deviations."""
    mean = divided(total(x.double())[:, None], x.shape[1]).float()
    bound = deviations * divided(l2_norm(x - mean), x.shape[1] ** 0.5)  # [k, 1]
    return torch.where(bound > 0, x.clamp(-bound, bound), x)  # numbers that are all equal stay
