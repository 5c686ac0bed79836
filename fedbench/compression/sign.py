"""Scaled signs: one bit for each number, and their mean magnitude.

Bernstein et al., ICML 2018 (signSGD); with the scale, and the memory without which it need not converge, Karimireddy et
al., ICML 2019 (EF-SignSGD).  A zero counts as positive, so that it is seen as the scale.
"""

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import mean_magnitude
from fedbench.compression.base import FLOAT, Direction, Message, Operator, Sent
from fedbench.core.rng import RowRandom


class Sign(Operator):
    """What is seen of x is mean |x| where x >= 0, and -mean |x| elsewhere."""

    contracts = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The scale [k, 1] and who is negative [k, n]."""
        return Sent(x[:, :0], {"scale": mean_magnitude(x), "negative": x < 0})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """The scale with these signs.  # [k, n]"""
        scale = sent.codes["scale"]
        return torch.where(sent.codes["negative"], -scale, scale)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """32 + n.  # [k]"""
        return torch.full((len(sent.numbers),), FLOAT + message.size, device=sent.numbers.device)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """The scale, and a bit for each number."""
        out.floats(sent.codes["scale"][0])
        for negative in sent.codes["negative"][0].tolist():
            out.fixed(int(negative), 1)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The scale, and the bits."""
        scale = stream.floats(1)[None]
        return {"scale": scale, "negative": torch.tensor([[stream.fixed(1) == 1 for _ in range(message.size)]])}
