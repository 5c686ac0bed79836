"""DAdaQuant: stochastic quantization whose levels grow when the loss stops falling, with more for larger clients.

Hönig, Zhao and Mullins, ICML 2022.  A number is rounded without bias to a random neighbouring multiple of norm / q.
Over time: with G_t the mean training loss of round t and its running mean H_t = psi H_{t-1} + (1 - psi) G_t,
q_t = 2 q_{t-1} where H_{t-1} >= H_{t-phi} and q has not changed since round t - phi, up to q_max.
Over clients: q_{t,i} = round(sqrt(a / b) w_i^{2/3}), a = sum_j w_j^{2/3}, b = sum_j w_j^2 / q_t^2.  w_i is the weight
of client i in the server's mean (by samples, or 1 / K with client_weights=uniform).  This preserves
sum_i w_i^2 / q_{t,i}^2, the variance of the mean.
Levels are coded as runs of zeros and nonzero levels, all in Elias omega codes (_runs.py).
Departs from the paper: phi is an option, where it is a tenth of the rounds; messages of the server have q_t levels
(direction=both); a message contains its q, which clients of the paper know in advance.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.compression._runs import omega_lengths
from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import l2_norm, over, total
from fedbench.compression.base import Direction, Message, Sent
from fedbench.compression.qsgd import QSGD
from fedbench.core.options import Count, Fraction, require
from fedbench.core.rng import RowRandom


class DAdaQuant(QSGD):
    """q_min, q_max: levels at first and at most; psi: of the running loss; phi: rounds without progress.  norm: l2 (the
    paper) or max.

    State: q [1], levels of this round; H [phi] and past [phi], running losses and levels of the last rounds, the latest
    last; seen [1], rounds so far.
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
        require(q_min <= q_max, f"compression.q_min={q_min} is more than compression.q_max={q_max}")
        super().__init__(q_max, norm, "runs", error_feedback, direction)
        self.q_max, self.psi, self.phi = q_max, psi, phi
        self.q = torch.full((1,), float(q_min))
        self.H, self.past = torch.zeros(phi), torch.full((phi,), float(q_min))
        self.seen = torch.zeros(1)

    def observe(self, losses: Tensor) -> None:
        """The running loss, and the levels of the next round."""
        G = losses.float().mean().to(self.q.device)
        H = torch.where(self.seen == 0, G, self.psi * self.H[-1:] + (1 - self.psi) * G)  # [1]
        self.H, self.past = torch.cat([self.H[1:], H]), torch.cat([self.past[1:], self.q])
        self.seen = self.seen + 1
        stalls = (self.H[-1:] >= self.H[:1]) & (self.past[-1:] == self.past[:1]) & (self.seen > self.phi)
        self.q = torch.where(stalls & (2 * self.q <= self.q_max), 2 * self.q, self.q)

    def levels_of(self, message: Message, rows: Tensor) -> Tensor:
        """q_{t,i}; without weights q_t.  # [k, 1] float32"""
        q = self.q.to(rows.device)
        if message.weights is None or message.cohort is None:
            return q.expand(len(rows), 1)
        shares = message.cohort.double()
        a, b = total(shares.pow(2 / 3), 0), total(shares.square(), 0) / q.double() ** 2
        each = (a / b).sqrt() * message.weights.double().pow(2 / 3)
        return each.round().clamp_min(1).float()[:, None]

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The norm [k, 1], the levels there are [k, 1] int32, and signed levels [k, n] int32."""
        scale = l2_norm(x) if self.norm == "l2" else x.abs().amax(1, keepdim=True)
        q = self.levels_of(message, x)
        exact = over(x, scale) * q
        below = exact.floor()
        level = below + (draws.uniform(message.size) < exact - below)
        level = torch.where(x < 0, -level, level).int()
        return Sent(x[:, :0], {"scale": scale, "q": q.int(), "level": level})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """level / q of the norm.  # [k, n]"""
        return sent.codes["scale"] * (sent.codes["level"].float() / sent.codes["q"].float())

    def count(self, sent: Sent, message: Message) -> Tensor:
        """Return the bits of qsgd plus those of q in an Elias omega code.  # [k]"""
        return super().count(sent, message) + omega_lengths(sent.codes["q"][:, 0])

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """q, the norm, and every level."""
        out.omega(int(sent.codes["q"][0, 0]))
        super().write(sent, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """q, the norm, and the levels."""
        q = torch.tensor([[stream.omega()]], dtype=torch.int32)
        return {"q": q, **super().read(stream, message)}
