"""DAdaQuant: stochastic quantization that adapts the number of levels over time and to the clients' weights.

Hönig, Zhao and Mullins, ICML 2022.  A value is rounded without bias to a random neighbouring multiple of norm / q.
Over time: with G_t the mean training loss of round t and its running mean H_t = psi H_{t-1} + (1 - psi) G_t,
q_t = 2 q_{t-1} if H_{t-1} >= H_{t-phi} and q has not changed since round t - phi, up to q_max.
Over clients: q_{t,i} = round(sqrt(a / b) w_i^{2/3}), a = sum_j w_j^{2/3}, b = sum_j w_j^2 / q_t^2.  w_i is the weight
of client i in the server's mean (by samples, or 1 / K with client_weights=uniform).  This preserves
sum_i w_i^2 / q_{t,i}^2, the variance of the mean.
Levels are coded as runs of zeros and nonzero levels, all in Elias omega codes (_runs.py).
Departs from the paper: phi is an option, there a tenth of the rounds; messages of the server have q_t levels
(direction=both); a message includes its q, which the paper's clients have in advance.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.compression._runs import omega_lengths
from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import l2_norm, over, total
from fedbench.compression.base import Direction, Encoded, Message
from fedbench.compression.qsgd import QSGD
from fedbench.core.options import Count, Fraction, require
from fedbench.core.rng import RowRandom


class DAdaQuant(QSGD):
    """DAdaQuant.  q [1]: number of levels; H [phi]: running losses of the last phi rounds; past [phi]: their levels.

    Args:
        q_min: Initial number of levels.
        q_max: Maximum number of levels.
        psi: Weight of the previous running loss in its update, in (0, 1].
        phi: Number of rounds without progress after which the levels double.
        norm: Value of the highest level: "l2" (the paper) or "max".
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.

    State:
        q: Levels of this round, [1].
        H: Running losses of the last rounds, oldest first, [phi].
        past: Levels of the last rounds, oldest first, [phi].
        seen: Number of past rounds, [1].
    """

    def __init__(
        self,
        q_min: Count = 1,
        q_max: Count = 16,
        psi: Fraction = 0.9,
        phi: Count = 10,
        norm: Literal["l2", "max"] = "l2",
        error_feedback: bool = False,
        direction: Direction = "up",
    ):
        require(
            q_min <= q_max,
            f"compression.q_min={q_min} is more than compression.q_max={q_max}, the largest number of levels: lower "
            "q_min, or raise q_max",
        )
        super().__init__(q_max, norm, "runs", error_feedback, direction)
        self.q_max, self.psi, self.phi = q_max, psi, phi
        self.q = torch.full((1,), float(q_min))
        self.H, self.past = torch.zeros(phi), torch.full((phi,), float(q_min))
        self.seen = torch.zeros(1)

    def observe(self, losses: Tensor) -> None:
        """Update the running loss by the clients' training losses [K]; if it stopped falling, double the levels q.

        psi is the weight of earlier rounds in the running loss.  It stopped falling if it is not below that of phi
        rounds ago.  q stays at most q_max.
        """
        G = losses.float().mean().to(self.q.device)  # mean training loss of this round
        # running mean, from G in the first round
        H = torch.where(self.seen == 0, G, self.psi * self.H[-1:] + (1 - self.psi) * G)  # [1]
        # the running losses and the levels of the last phi rounds, oldest first  [phi] each
        self.H, self.past = torch.cat([self.H[1:], H]), torch.cat([self.past[1:], self.q])
        self.seen = self.seen + 1  # number of rounds so far
        # no progress in phi rounds, in which q did not change
        stalls = (self.H[-1:] >= self.H[:1]) & (self.past[-1:] == self.past[:1]) & (self.seen > self.phi)
        self.q = torch.where(stalls & (2 * self.q <= self.q_max), 2 * self.q, self.q)

    def levels_of(self, message: Message, rows: Tensor) -> Tensor:
        """Return the number of levels q_i of each client, more for clients with a larger weight w_i in the mean.

        q_i = round(sqrt(a / b) w_i^(2/3)) with a = sum_j w_j^(2/3) and b = sum_j w_j^2 / q^2 preserves the variance of
        the mean.  If the message has no client weights, all have q.

        Args:
            message: Description of what is sent, with the weights of the clients in the server's mean.
            rows: The rows, for their number and device.  # [k, n]

        Returns:
            Whole numbers >= 1.  # [k, 1] float32
        """
        q = self.q.to(rows.device)
        if message.weights is None or message.cohort is None:
            return q.expand(len(rows), 1)
        shares = message.cohort.double()  # weights of all clients of the round; total: a sum in a fixed order  [K]
        a, b = total(shares.pow(2 / 3), 0), total(shares.square(), 0) / q.double() ** 2
        each = (a / b).sqrt() * message.weights.double().pow(2 / 3)
        return each.round().clamp_min(1).float()[:, None]

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Quantize rows to multiples of norm / q.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            Codes "scale", the norm [k, 1]; "q", the number of levels [k, 1]; and "level", signed levels [k, n].
        """
        scale = l2_norm(x) if self.norm == "l2" else x.abs().amax(1, keepdim=True)
        q = self.levels_of(message, x)
        exact = over(x, scale) * q  # |x| in units of norm / q
        below = exact.floor()  # the level below
        # up with probability exact - below, so the mean is exact
        level = below + (draws.uniform(message.size) < exact - below)
        level = torch.where(x < 0, -level, level).int()
        return Encoded(x[:, :0], {"scale": scale, "q": q.int(), "level": level})  # x[:, :0]: no float32 values

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows, norm * level / q.

        Args:
            encoded: Codes "scale", the norm of each row [k, 1]; "q", its number of levels [k, 1]; "level", its levels
                from -q to q [k, n].
            message: Description of what is sent; unused.

        Returns:
            The quantized rows.  # [k, n]
        """
        return encoded.codes["scale"] * (encoded.codes["level"].float() / encoded.codes["q"].float())

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row: norm and levels as in QSGD, and q in the Elias omega code.  # [k] int64"""
        return super().count(encoded, message) + omega_lengths(encoded.codes["q"][:, 0])

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write one row (k = 1) to `out`: q, its number of levels, then its norm and signed levels as QSGD does.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        out.omega(int(encoded.codes["q"][0, 0]))
        super().write(encoded, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row; return {"q": number of levels, "scale": norm, "level": signed levels}.


        `message` describes what is sent (name, size n, clients), without its content.
        # [1, 1], [1, 1], [1, n]"""
        q = torch.tensor([[stream.omega()]], dtype=torch.int32)
        return {"q": q, **super().read(stream, message)}
