"""Mimic: all attackers upload what one honest client uploads: Karimireddy, He and Jaggi, ICLR 2022.

Each upload is that of an honest client, but that client counts several times.  The paper chooses a client that is far
from the others.  In the first `warmup` rounds, Oja's method follows the direction z of largest variance:

    z_t = t/(1+t) z_{t-1} + 1/(1+t) g / |g|,   g = sum_j <d_j - mu_t, z_{t-1}> (d_j - mu_t), over honest clients j

Here mu_t is the running mean of honest changes.  The attackers mimic the client with the largest <d_j, z_t>.  After the
warm-up they always mimic the last such client.
Departs from the paper's code: the client is chosen among those of the round.  Without the chosen client, it is again
the one with the largest <d_j, z>.  If a method has several uploads, each has its own z.
"""

import numpy as np
import torch
from torch import Tensor

from fedbench.attacks.base import Attack, Observed, repeat
from fedbench.core.options import Count, NonNegativeInt, UnitInterval, require


class Mimic(Attack):
    """The upload of one honest client: the option client, or None: chosen in the first `warmup` rounds.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        client: The mimicked client.  The attackers are honest in rounds without it.  None: chosen as in the paper.
        warmup: Rounds with attackers in which z follows the uploads, for client=None.
    """

    needs_honest = True

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        client: NonNegativeInt | None = None,
        warmup: Count = 10,
    ):
        super().__init__(fraction, clients)
        self.client, self.warmup = client, warmup

    def check(self, attackers: np.ndarray, num_clients: int) -> None:
        """Raise ConfigError if the option client is not None and not the id of an honest client."""
        require(
            self.client is None or (self.client < num_clients and self.client not in attackers),
            f"attack.client={self.client} must be an honest training client: choose one of 0 to {num_clients - 1} "
            f"other than the attackers {', '.join(map(str, attackers))}",
        )

    def corrupt(self, o: Observed) -> Tensor:
        """Return the mimicked client's upload for each attacker; if it takes no part, what each would honestly upload.

        # [f, p]
        """
        client = self._choice(o) if self.client is None else self.client
        # repeat: one row per attacker; truthful: what the attackers would upload if they were honest
        return repeat(o.honest[list(o.honest_ids).index(client)], o) if client in o.honest_ids else o.truthful

    def _choice(self, o: Observed) -> int:
        """Return the client to mimic in this round, after an update of z in the warm-up.

        z [p] is the direction in which honest uploads differ most.  In the warm-up, the client with the largest product
        with z is mimicked, and later the last such client, while it takes part.  A round moves z by one power iteration
        for the covariance of the uploads.
        """
        # number of rounds so far, and the client that was chosen last in the warm-up
        progress = o.state.get("progress", torch.tensor([0, -1], device=o.truthful.device))
        z, mean = (o.state.get(name, torch.zeros_like(o.truthful[0])) for name in ("z", "mean"))  # [p] each
        t, chosen = progress.tolist()  # chosen: -1 at first
        if t < self.warmup:
            mean = t / (1 + t) * mean + o.honest.mean(0) / (1 + t)  # over the rounds so far
            centered = o.honest - mean  # [h, p]
            start = o.random.normal(len(z))[0].to(z) if t == 0 else z  # any direction
            z = t / (1 + t) * z + unit((centered @ start) @ centered) / (1 + t)
            z = unit(z)
        if t < self.warmup or chosen not in o.honest_ids:
            current = int(o.honest_ids[int((o.honest @ z).argmax())])
        else:
            current = chosen
        last = current if t < self.warmup else chosen
        for name, value in (("z", z), ("mean", mean), ("progress", torch.tensor([t + 1, last]))):
            o.state.set(name, value)
        return current


def unit(v: Tensor) -> Tensor:
    """Return the vector v [p] divided by its Euclidean norm; a zero vector stays zero.  # [p]"""
    return v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
