"""Sparse ternary compression: positions and signs of the largest magnitudes, and their mean magnitude.

Sattler et al., IEEE TNNLS 2020.  The m = ceil(share n) values of largest magnitude are transmitted as sign(x) mu, where
mu is their mean magnitude; the residual is added to the next upload.  As in the paper, a row is compressed as a whole.
Departs from the paper: ties select the first values, so there are always m; a selected 0 counts as positive.
Departs from the released code: it compresses tensor by tensor, and selects all values as large as the m-th, with the
mean of m of them.  If fewer than m values are nonzero, it sets every 0 to -mu.
variant=pfednet is the STC of pFedNet's released code.  It selects the positive values of at least the (1 - share)
quantile of max(x, 0) over the row, interpolated as by torch.quantile.  Negative values are selected in the same way.
Each sign has its own mean.  The positions are a bitmap, because up to two thirds of the values are selected.  That code
has no error feedback.  It makes zeros positive in a row with few values of one sign; here they stay 0.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import mean_magnitude, total
from fedbench.compression.base import FLOAT, Compressor, Direction, Encoded, Message
from fedbench.core.options import Fraction
from fedbench.core.rng import RowRandom


class STC(Compressor):
    """Sparse ternary compression.  variant: "sattler", one mean of all selected values, or "pfednet", one of each sign.

    Args:
        share: Fraction p of values that is selected, in (0, 1] (variant="pfednet": of each sign).
        variant: "sattler" or "pfednet".
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.
    """

    contractive = True
    selects_positions = True

    def __init__(
        self,
        share: Fraction = 0.01,
        variant: Literal["sattler", "pfednet"] = "sattler",
        error_feedback: bool = True,
        direction: Direction = "up",
    ):
        super().__init__(error_feedback, direction)
        self.share, self.variant = share, variant

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Select the values of largest magnitude of rows x [k, n], and encode their signs and mean magnitude.

        Codes with variant="sattler": "mean" [k, 1], "positions" [k, m] and "negative" [k, m] bool.  With "pfednet":
        "mean" of both signs [k, 2], and "trit", -1, 0 or 1 for each value [k, n] int8.  `draws` is unused, because
        nothing is random.
        """
        if self.variant == "pfednet":
            return self._by_sign(x)
        where = positions.largest(x.abs(), self._num_selected(message))  # [k, m]
        selected = x.gather(1, where)
        # x[:, :0]: no float32 values
        return Encoded(x[:, :0], {"mean": mean_magnitude(selected), "positions": where, "negative": selected < 0})

    def _num_selected(self, message: Message) -> int:
        """With variant="sattler", return m, the number of selected values of n = message.size: ceil(share * n) >= 1."""
        return positions.num_selected(self.share, message.size)

    def _by_sign(self, x: Tensor) -> Encoded:
        """Encode rows with variant="pfednet", which selects the values of each sign by a quantile of their magnitudes.

        Args:
            x: The rows to send, one per client.  # [k, n]

        Returns:
            Codes "mean", mean magnitudes of selected positive and negative values [k, 2], and "trit", -1 to 1 [k, n].
        """
        means, trit = [], torch.zeros_like(x, dtype=torch.int8)
        for sign in (1, -1):  # positive values first
            magnitudes = (sign * x).clamp_min(0)  # of the values of this sign, else 0
            threshold = quantile(magnitudes, 1 - self.share)  # the share of largest magnitudes is at least this  [k, 1]
            selected = (magnitudes > 0) & (magnitudes >= threshold)
            count = selected.sum(1, keepdim=True).double()
            # sum of the selected magnitudes  [k, 1]
            sums = total(torch.where(selected, magnitudes, 0).double())[:, None]
            means.append(torch.where(count > 0, sums / count.clamp_min(1), 0).float())
            trit += sign * selected.to(torch.int8)
        return Encoded(x[:, :0], {"mean": torch.cat(means, 1), "trit": trit})  # x[:, :0]: no float32 values

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return rows with the mean magnitude or minus it at the selected positions, and zeros elsewhere.

        With variant="pfednet", positive and negative values have a mean magnitude each.

        Args:
            encoded: The codes of `compress`.
            message: Description of what is sent, such as the size n of its rows; not the content.

        Returns:
            The rows that the receiver gets.  # [k, n]
        """
        mean = encoded.codes["mean"]
        if self.variant == "pfednet":  # one mean of the positive and one of the negative values
            trit = encoded.codes["trit"]
            return torch.where(trit > 0, mean[:, :1], torch.where(trit < 0, -mean[:, 1:], 0))
        values = torch.where(encoded.codes["negative"], -mean, mean)  # [k, m]
        return positions.scatter(values, encoded.codes["positions"], message.size)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row.  # [k] int64

        sattler: 32 for the mean, the code of m positions, and m signs.
        pfednet: 64 for two means, n bits that tell which values are selected, and a sign for each of these.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if self.variant == "pfednet":
            return 2 * FLOAT + message.size + (encoded.codes["trit"] != 0).sum(1)
        where = encoded.codes["positions"]
        return FLOAT + where.shape[1] + positions.count(where, message.size)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the codes of one row (k = 1) to `out`: the mean magnitudes as 32 bits each, then positions and signs.

        With variant="pfednet" these are one bit per value, and a sign after it if the value is selected.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        out.floats(encoded.codes["mean"][0])
        if self.variant == "pfednet":
            for trit in encoded.codes["trit"][0].tolist():
                out.fixed(int(trit != 0), 1)  # 1: the value is selected
                if trit:
                    out.fixed(int(trit < 0), 1)  # 1: it is negative
            return
        positions.write(encoded.codes["positions"][0], message.size, out)
        for negative in encoded.codes["negative"][0].tolist():
            out.fixed(int(negative), 1)  # the sign

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote.

        They are "mean", "positions" and "negative", or with variant="pfednet" "mean" and "trit", as in `compress`.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if self.variant == "pfednet":
            mean = stream.floats(2)[None]  # of the selected positive values, and of the negative ones
            # a bit is 0 for the value 0; else a second one is the sign, 1 for -1
            trits = [(-1 if stream.fixed(1) else 1) if stream.fixed(1) else 0 for _ in range(message.size)]
            return {"mean": mean, "trit": torch.tensor([trits], dtype=torch.int8)}
        mean, m = stream.floats(1)[None], self._num_selected(message)  # m: number of selected values
        where = positions.read(stream, m, message.size)
        return {"mean": mean, "positions": where, "negative": torch.tensor([[bool(stream.fixed(1)) for _ in range(m)]])}


def quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile of each row, interpolated linearly as by torch.quantile.

    Args:
        values: The rows.  # [k, n]
        share: Which quantile, from 0 (the minimum) to 1 (the maximum).

    Returns:
        The quantiles.  # [k, 1]
    """
    n = values.shape[1]
    rank = round(share * (n - 1), 6)  # position of the quantile among sorted values; 0.9 * 10 may be 9.000000000000002
    below = int(rank)
    # the two sorted values around it  [k, 1] each
    low, high = (values.kthvalue(min(k, n), dim=1, keepdim=True).values for k in (below + 1, below + 2))
    return low.lerp(high, rank - below)
