"""The cost of a round."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class RoundCost:
    """Computation and communication of a round, and its training loss.

    Attributes:
        steps: Local steps of all clients.
        samples: Samples that all clients trained on.
        bytes_down: Bytes that the server sent.
        bytes_up: Bytes that clients sent.
        dense_down: Bytes that the server would have sent without compression.
        dense_up: Bytes that clients would have sent without compression.
        loss: Mean training loss of the last call of `train`.
        losses: Training loss of each client.  # [K]
        releases: Number of private means and sums (privacy=central).
        takes_means: Whether the server averaged clients by the option `client_weights`.
        takes_aggregates: Whether the server combined uploads by the option `aggregator`.
        takes_uploads: Whether clients uploaded a floating-point tensor.
        takes_server_steps: Whether the server moved its model by the option `server`.
        left_out: Clients whose uploads an aggregation rule left out, because they are not finite.
    """

    steps: int = 0
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    dense_down: int = 0
    dense_up: int = 0
    loss: float = float("nan")
    losses: Tensor | None = None
    releases: int = 0
    takes_means: bool = False
    takes_aggregates: bool = False
    takes_uploads: bool = False
    takes_server_steps: bool = False
    left_out: set[int] = field(default_factory=set)
