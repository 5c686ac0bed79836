"""Stochastic ternary quantization: values are rounded without bias to -s, 0 or s, where s is the largest magnitude.

Wen et al., NeurIPS 2017 (TernGrad), with its gradient clipping.  Five values are coded in a byte, as 3^5 = 243, which
takes 1.6 bits per value.
Departs from the paper: one scale for the whole row instead of one per layer; clients do not share scales.
"""

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import divided, l2_norm, over, total
from fedbench.compression.base import FLOAT, Compressor, Direction, Encoded, Message
from fedbench.core.options import Positive
from fedbench.core.rng import RowRandom

TRITS, BYTE = 5, 8  # a byte has 8 bits, and stores 5 values -1, 0 or 1 (3^5 < 256)


class Ternary(Compressor):
    """Stochastic ternary quantization.

    Args:
        clip: Values are first clipped to this number of standard deviations of the row (the paper: 2.5), which makes
            the result biased; None does not clip.
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    def __init__(self, clip: Positive | None = None, error_feedback: bool = False, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self.clip, self.unbiased = clip, clip is None

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Round each row at random to -scale, 0 or scale, after clipping by the option clip.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers of each row.
            message: Description of what is sent, such as the size n of its rows; not the content.

        Returns:
            Codes "scale", the largest magnitude [k, 1], and "trit" [k, n] int8: the sign of x, -1 or 1, with
            probability |x| / scale, else 0.
        """
        x = x if self.clip is None else _clipped(x, self.clip)
        scale = x.abs().amax(1, keepdim=True)
        is_nonzero = draws.uniform(message.size) < over(x, scale)  # with probability |x| / scale
        return Encoded(x[:, :0], {"scale": scale, "trit": (is_nonzero * x.sign()).to(torch.int8)})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows: the codes "scale" [k, 1] times "trit" [k, n], which is -1, 0 or 1.  # [k, n]"""
        return encoded.codes["scale"] * encoded.codes["trit"]

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row: 32 for the scale, and 8 for every five values, rounded up.  # [k] int64"""
        bits = FLOAT + BYTE * -(-message.size // TRITS)
        return torch.full((len(encoded.values),), bits, device=encoded.values.device)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write one row (k = 1) to `out`: the scale as 32 bits, and a byte for every five values.

        The values -1, 0 and 1 are the digits 0, 1 and 2 of a number in base 3.  The first value is the highest digit.
        `message` is unused.
        """
        out.floats(encoded.codes["scale"][0])
        digits = [trit + 1 for trit in encoded.codes["trit"][0].tolist()]  # 0, 1 or 2
        digits += [1] * (-len(digits) % TRITS)  # zeros, whose digit is 1, fill the last group of TRITS = 5
        for a in range(0, len(digits), TRITS):
            byte = 0
            for digit in digits[a : a + TRITS]:
                byte = 3 * byte + digit  # the first value is the highest digit
            out.fixed(byte, BYTE)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read one row that `write` wrote; return {"scale": [1, 1], "trit": the values -1, 0 or 1 [1, n]}.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        scale, trits = stream.floats(1)[None], []
        for _ in range(-(-message.size // TRITS)):  # ceil(n / 5) bytes, of 5 digits in base 3 each
            byte = stream.fixed(BYTE)
            trits += [byte // 3**power % 3 - 1 for power in reversed(range(TRITS))]
        return {"scale": scale, "trit": torch.tensor([trits[: message.size]], dtype=torch.int8)}


def _clipped(x: Tensor, deviations: float) -> Tensor:
    """Clip rows x [k, n] to [-bound, bound] with bound = deviations times the row's standard deviation.  # [k, n]

    Rows of equal values are unchanged.
    """
    mean = divided(total(x.double())[:, None], x.shape[1]).float()
    bound = deviations * divided(l2_norm(x - mean), x.shape[1] ** 0.5)  # [k, 1]
    return torch.where(bound > 0, x.clamp(-bound, bound), x)  # rows of equal values are not clipped
