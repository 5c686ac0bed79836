"""Random-k: values at random positions.  The positions follow from a key, which is transmitted instead of them.

Stich, Cordonnier and Jaggi, NeurIPS 2018; unbiased: Konecny et al., 2016 (Strategies for Improving Communication
Efficiency), random masks.  Positions are drawn without replacement.
"""

import torch
from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Compressor, Direction, Encoded, Message
from fedbench.core.options import Fraction, require
from fedbench.core.rng import RowRandom

KEY = 64  # bits of the random key from which sender and receiver compute the positions


class RandK(Compressor):
    """Random sparsification.

    Args:
        share: Fraction of values that is transmitted, rounded up to m of n; 1 transmits the row unchanged.
        unbiased: Whether received values are multiplied by n / m.  Excludes error feedback.
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    has_values = True
    selects_positions = True

    def __init__(
        self, share: Fraction = 0.01, unbiased: bool = False, error_feedback: bool = True, direction: Direction = "up"
    ):
        super().__init__(error_feedback, direction)
        require(
            not (unbiased and error_feedback),
            "compression.unbiased=true and compression.error_feedback=true exclude each other, because residuals would "
            "grow: set one of them to false",
        )
        self.share, self.unbiased, self.contractive, self.exact = share, unbiased, not unbiased, share == 1

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Select m values of each row at random positions.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers of each row, for its key.
            message: Description of what is sent, such as the size n of its rows; not the content.

        Returns:
            The selected values [k, m] and two codes.  "key" is a random int64 per row [k, 1]; "positions" are the
            ascending positions that follow from it [k, m].
        """
        key = draws.random_bits(1)
        where = self._positions(key, message)
        return Encoded(x.gather(1, where), {"key": key, "positions": where})

    def _positions(self, key: Tensor, message: Message) -> Tensor:
        """Return the m positions that follow from each row's key [k, 1], ascending: those of the largest draws.

        # [k, m]
        """
        return positions.largest(RowRandom(key[:, 0]).random_bits(message.size), self.num_values(message))

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return rows with the received values at their positions, and zeros elsewhere.  # [k, n]

        If the option unbiased is True, the m values are multiplied by n / m.
        """
        scale = message.size / self.num_values(message) if self.unbiased else 1.0
        return positions.scatter(encoded.values * scale, encoded.codes["positions"], message.size)

    def num_values(self, message: Message) -> int:
        """Return m, the number of selected values of a row of n = message.size values: ceil(share * n), at least 1.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return positions.num_selected(self.share, message.size)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's codes: 64 for its key; the positions follow from it.  # [k] int64"""
        return torch.full((len(encoded.values),), KEY, device=encoded.values.device)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the key of one row (k = 1) to `out`, as 64 bits; the positions follow from it.

        `message`, the description of what is sent, is unused.
        """
        out.fixed(int(encoded.codes["key"]) % 2**KEY, KEY)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the key of one row; return {"key": the key [1, 1], "positions": those that follow from it [1, m]}.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        bits = stream.fixed(KEY)  # the key as a number without sign
        key = torch.tensor([[bits - 2**KEY if bits >> (KEY - 1) else bits]])
        return {"key": key, "positions": self._positions(key, message)}
