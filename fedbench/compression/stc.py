"""Sparse ternary compression: the positions and signs of the largest magnitudes, and one mean magnitude.

Sattler et al., IEEE TNNLS 2020.  m = ceil(share n) numbers are kept, and each is sent as sign(x) mu, mu being their
mean magnitude; the residual is kept for the next upload.  A row is compressed as a whole, as in the paper, and not
tensor by tensor, as in its code.
Departs from the paper: of equal magnitudes the first are kept, so that there are always m; a 0 among them counts as
positive.  The released code keeps all numbers as large as the m-th, of both signs, with the mean of m of them.  If
fewer than m numbers are not 0, it sets every 0 to -mu.
variant=pfednet is what pFedNet's released code calls STC: of the positive numbers those of at least the
(1 - share) quantile of max(x, 0) over the row, interpolated as torch.quantile does, and the same for the negative
numbers, each sign with its own mean.  Its rows are sent as a map, because up to two thirds of the numbers are kept.
That code has no error feedback.  It makes zeros positive in a row with few numbers of one sign; here they stay 0.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import mean_magnitude, total
from fedbench.compression.base import FLOAT, Direction, Message, Operator, Sent
from fedbench.core.options import Fraction
from fedbench.core.rng import RowRandom


class STC(Operator):
    """share: p, of the numbers that are kept (variant=pfednet: of each sign).  variant: sattler or pfednet."""

    contracts = True
    chooses = True

    def __init__(
        self,
        share: Fraction = 0.01,
        variant: Literal["sattler", "pfednet"] = "sattler",
        error_feedback: bool = True,
        direction: Direction = "up",
    ):
        super().__init__(error_feedback, direction)
        self.share, self.variant = share, variant

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """sattler: mu [k, 1], positions [k, m], and whether they are negative [k, m]; pfednet: two means [k, 2], and
        -1, 0 or 1 for each number [k, n] int8."""
        if self.variant == "pfednet":
            return self._by_sign(x)
        where = positions.largest(x.abs(), self._kept(message))
        chosen = x.gather(1, where)
        return Sent(x[:, :0], {"mean": mean_magnitude(chosen), "positions": where, "negative": chosen < 0})

    def _kept(self, message: Message) -> int:
        return positions.kept(self.share, message.size)

    def _by_sign(self, x: Tensor) -> Sent:
        means, trit = [], torch.zeros_like(x, dtype=torch.int8)
        for sign in (1, -1):
            part = (sign * x).clamp_min(0)
            least = quantile(part, 1 - self.share)
            chosen = (part > 0) & (part >= least)
            count = chosen.sum(1, keepdim=True).double()
            sums = total(torch.where(chosen, part, 0).double())[:, None]
            means.append(torch.where(count > 0, sums / count.clamp_min(1), 0).float())
            trit += sign * chosen.to(torch.int8)
        return Sent(x[:, :0], {"mean": torch.cat(means, 1), "trit": trit})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """mu or -mu where numbers were kept.  # [k, n]"""
        mean = sent.codes["mean"]
        if self.variant == "pfednet":
            trit = sent.codes["trit"]
            return torch.where(trit > 0, mean[:, :1], torch.where(trit < 0, -mean[:, 1:], 0))
        return positions.put(torch.where(sent.codes["negative"], -mean, mean), sent.codes["positions"], message.size)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """sattler: 32, the code of the positions and m; pfednet: 64, a map of n, and a sign for each kept.  # [k]"""
        if self.variant == "pfednet":
            return 2 * FLOAT + message.size + (sent.codes["trit"] != 0).sum(1)
        where = sent.codes["positions"]
        return FLOAT + where.shape[1] + positions.count(where, message.size)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """The means; then positions and signs, or for each number a bit, and its sign if it is kept."""
        out.floats(sent.codes["mean"][0])
        if self.variant == "pfednet":
            for trit in sent.codes["trit"][0].tolist():
                out.fixed(int(trit != 0), 1)
                if trit:
                    out.fixed(int(trit < 0), 1)
            return
        positions.write(sent.codes["positions"][0], message.size, out)
        for negative in sent.codes["negative"][0].tolist():
            out.fixed(int(negative), 1)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """What `write` wrote."""
        if self.variant == "pfednet":
            mean = stream.floats(2)[None]
            trits = [(-1 if stream.fixed(1) else 1) if stream.fixed(1) else 0 for _ in range(message.size)]
            return {"mean": mean, "trit": torch.tensor([trits], dtype=torch.int8)}
        mean, m = stream.floats(1)[None], self._kept(message)
        where = positions.read(stream, m, message.size)
        return {"mean": mean, "positions": where, "negative": torch.tensor([[bool(stream.fixed(1)) for _ in range(m)]])}


def quantile(values: Tensor, share: float) -> Tensor:
    """The quantile of each row [k, n], interpolated between the two numbers next to rank share (n - 1).  # [k, 1]"""
    n = values.shape[1]
    rank = round(share * (n - 1), 6)  # 0.9 * 10 may be 9.000000000000002
    below = int(rank)
    low, high = (values.kthvalue(min(k, n), dim=1, keepdim=True).values for k in (below + 1, below + 2))
    return low.lerp(high, rank - below)
