"""The server takes the mean of the uploads, as in FedAvg."""

from torch import Tensor

from fedbench.server.base import ServerRule, ServerStep


class Average(ServerRule):
    """The mean of the uploads."""

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Return the weighted mean of the uploads, the server's new parameters; ``state`` is not used.  # [p]"""
        return s.mean
