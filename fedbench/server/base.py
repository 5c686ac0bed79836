"""Base class of server rules, which compute the server's new model from the clients' uploads.

A method averages uploads by `cohort.mean(up.theta, updates="w")`, where w is the name of the tensor that it broadcast.
The rule then computes the new value of w from the
old one and from this mean.  Running statistics of batch norm are averaged, whatever the rule.

Letters: K clients of the cohort, p trained parameters of a server row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ServerStep:
    """What a rule may use in one round: the server's old parameters w [p], the uploads [K, p] and their mean [p].

    Attributes:
        w: The server's parameters before the round.  # [p]
        mean: Weighted mean of the uploaded parameters.  # [p]
        uploads: The uploaded parameters.  # [K, p]
        weights: Weights of the mean.  # [K]
        round: The round, from 0.
    """

    w: Tensor
    mean: Tensor
    uploads: Tensor
    weights: Tensor
    round: int

    @property
    def delta(self) -> Tensor:
        """The weighted mean of the clients' parameters minus the server's: Delta = mean - w.  # [p]"""
        return self.mean - self.w


class ServerRule:
    """Base class of server rules.  [p]: the trained parameters that the server averages.

    Attributes:
        states: Names of the tensors [p] that the server keeps between rounds, with their initial values.
    """

    states: dict[str, float] = {}

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Compute the server's new parameters.  Subclasses must implement it.

        Args:
            s: The old parameters w [p], the uploads [K, p], their weights [K], and their weighted mean [p].
            state: The tensors in `states`, by name.  The rule replaces them: state["v"] = ...  # [p] each

        Returns:
            The new parameters.  # [p]
        """
        raise NotImplementedError
