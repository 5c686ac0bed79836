"""Deflate: lossless compression of rows by zlib.

Deutsch, RFC 1951, by zlib (RFC 1950).  It saves little on trained float32 values, and much on rows with equal or zero
values, so it is useful after another compressor.  pFedNet's released code reports sizes of deflated decimal text
relative to that text.
Limits: the number of bytes depends on the version of zlib; the received rows do not.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Compressor, Direction, Encoded, Message
from fedbench.core.rng import RowRandom

LEVEL = 6  # zlib's default compression level


class Deflate(Compressor):
    """Lossless compression by zlib.

    Args:
        error_feedback: An option of all compressors, without effect here, because there is no residual.
        direction: "up", or "both" to compress downloads too.
    """

    unbiased = True
    contractive = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Return the rows x [k, n] unchanged as the code "row"; only `write` and `count` deflate them."""
        return Encoded(x[:, :0], {"row": x})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the rows that were given to `compress`, because zlib is lossless.  # [k, n]"""
        return encoded.codes["row"]

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row: 8 B for its B deflated bytes, and the Elias gamma code of B.  # [k] int64"""
        sizes = [len(self._deflated(row)) for row in encoded.codes["row"].cpu()]
        bits = [8 * size + 2 * size.bit_length() - 1 for size in sizes]
        return torch.tensor(bits, device=encoded.values.device)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write one row (k = 1) to `out`: the number of its deflated bytes in the Elias gamma code, then the bytes.

        `message`, the description of what is sent, is unused.
        """
        deflated = self._deflated(encoded.codes["row"][0])
        out.gamma(len(deflated))
        for byte in deflated:
            out.fixed(byte, 8)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read one row that `write` wrote; return {"row": its n values [1, n] float32}.  `message` is unused."""
        deflated = bytes(stream.fixed(8) for _ in range(stream.gamma()))
        row = np.frombuffer(zlib.decompress(deflated), "<f4").astype(np.float32)
        return {"row": torch.from_numpy(row)[None]}

    def _deflated(self, row: Tensor) -> bytes:
        """Return a row [n] as deflated bytes of its little-endian float32 values, on every machine."""
        return zlib.compress(row.cpu().numpy().astype("<f4").tobytes(), LEVEL)
