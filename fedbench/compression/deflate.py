"""Deflate: rows as they are, in the bytes that zlib makes of them.

Deutsch, RFC 1951, by zlib (RFC 1950).  Of float32 that were trained it saves little, of rows with equal or zero numbers
much: it stands behind other operators' numbers, and beside the sizes that pFedNet's released code prints, which are
those of deflated decimal text over the same text.  The bytes depend on zlib's version, what is seen does not.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Direction, Message, Operator, Sent
from fedbench.core.rng import RowRandom

LEVEL = 6  # of zlib, its default


class Deflate(Operator):
    """zlib's bytes.  Nothing is ever lacking, so that error_feedback changes nothing."""

    unbiased = True
    contracts = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The rows."""
        return Sent(x[:, :0], {"row": x})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """The rows.  # [k, n]"""
        return sent.codes["row"]

    def count(self, sent: Sent, message: Message) -> Tensor:
        """8 B + 2 floor(log2 B) + 1 for B bytes.  # [k]"""
        sizes = [len(self._deflated(row)) for row in sent.codes["row"].cpu()]
        bits = [8 * size + 2 * size.bit_length() - 1 for size in sizes]
        return torch.tensor(bits, device=sent.numbers.device)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """How many bytes, and these."""
        deflated = self._deflated(sent.codes["row"][0])
        out.gamma(len(deflated))
        for byte in deflated:
            out.fixed(byte, 8)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The row."""
        deflated = bytes(stream.fixed(8) for _ in range(stream.gamma()))
        row = np.frombuffer(zlib.decompress(deflated), "<f4").astype(np.float32)
        return {"row": torch.from_numpy(row)[None]}

    def _deflated(self, row: Tensor) -> bytes:
        return zlib.compress(row.cpu().numpy().astype("<f4").tobytes(), LEVEL)
