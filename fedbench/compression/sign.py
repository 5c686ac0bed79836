"""Scaled signs: one bit per value, and their mean magnitude.

Bernstein et al., ICML 2018 (signSGD).  The scale, and error feedback, without which it need not converge, are from
Karimireddy et al., ICML 2019 (EF-SignSGD).  A zero counts as positive.
"""

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import mean_magnitude
from fedbench.compression.base import FLOAT, Compressor, Direction, Encoded, Message
from fedbench.core.rng import RowRandom


class Sign(Compressor):
    """Scaled signs: a row x is received as mean |x| where x >= 0, and -mean |x| elsewhere.

    Args:
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    contractive = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Encode rows x [k, n] as "scale", the mean magnitude [k, 1], and "negative", True for x < 0 [k, n]."""
        return Encoded(x[:, :0], {"scale": mean_magnitude(x), "negative": x < 0})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows: -scale where the code "negative" [k, n] is True, else scale [k, 1].  # [k, n]"""
        scale = encoded.codes["scale"]
        return torch.where(encoded.codes["negative"], -scale, scale)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row: 32 for the scale, and one per value for its sign.  # [k] int64"""
        return torch.full((len(encoded.values),), FLOAT + message.size, device=encoded.values.device)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write one row (k = 1) to `out`: the scale as 32 bits, and one bit per value, 1 for a negative one.

        `message`, the description of what is sent, is unused.
        """
        out.floats(encoded.codes["scale"][0])
        for negative in encoded.codes["negative"][0].tolist():
            out.fixed(int(negative), 1)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read one row that `write` wrote; return {"scale": [1, 1], "negative": True where the value is < 0 [1, n]}.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        scale = stream.floats(1)[None]
        return {"scale": scale, "negative": torch.tensor([[stream.fixed(1) == 1 for _ in range(message.size)]])}
