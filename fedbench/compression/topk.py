"""Top-k: the values of largest magnitude, and their positions.

Stich, Cordonnier and Jaggi, NeurIPS 2018 (Sparsified SGD with Memory).
Departs from the paper: k is a fraction of the row, and positions are coded (_positions.py).
"""

from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Compressor, Direction, Encoded, Message
from fedbench.core.options import Fraction
from fedbench.core.rng import RowRandom


class TopK(Compressor):
    """Sparsification to the largest magnitudes.  Ties select the first values.

    Args:
        share: Fraction of values that is transmitted, rounded up to m of n; 1 transmits the row unchanged.
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    contractive = True
    has_values = True
    selects_positions = True

    def __init__(self, share: Fraction = 0.01, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self.share, self.exact = share, share == 1

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Select the m values of largest magnitude of each row.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Unused, because nothing is random.
            message: Description of what is sent, such as the size n of its rows; not the content.

        Returns:
            The selected values [k, m], with the code "positions", their ascending positions [k, m].
        """
        where = positions.largest(x.abs(), self.num_values(message))
        return Encoded(x.gather(1, where), {"positions": where})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return rows with encoded.values [k, m] at the positions in encoded.codes, and zeros elsewhere.  # [k, n]"""
        return positions.scatter(encoded.values, encoded.codes["positions"], message.size)

    def num_values(self, message: Message) -> int:
        """Return m, the number of selected values of a row of n = message.size values: ceil(share * n), at least 1.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return positions.num_selected(self.share, message.size)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's positions, as `write` codes them, without its float32 values.  # [k] int64"""
        return positions.count(encoded.codes["positions"], message.size)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the positions of one row (k = 1) to `out`: a bitmap or coded gaps, whichever is shorter.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        positions.write(encoded.codes["positions"][0], message.size, out)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote; return {"positions": the m selected positions [1, m]}.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return {"positions": positions.read(stream, self.num_values(message), message.size)}
