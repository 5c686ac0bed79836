"""The attackers of a run, and what they upload in place of their own tensors.

Letters: N clients of the federation, K clients of a round, f attackers among them, p values of an upload.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedbench.aggregators.base import Aggregator
from fedbench.attacks.base import Attack, AttackState, Observed
from fedbench.channel import aggregate
from fedbench.core import rng
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import RowStore


class Attackers:
    """The attackers of a run: the clients `ids`, which upload what `attack` computes.

    Args:
        attack: What they do.
        ids: The attackers, ascending.  # [f]
        rows: Creates the tensors that they remember.
        aggregator: The run's aggregation rule, which they know.  None: the mean.
    """

    def __init__(self, attack: Attack, ids: np.ndarray, rows: RowStore, aggregator: Aggregator | None):
        self.attack, self.ids, self.rows, self.aggregator = attack, ids, rows, aggregator

    def upload(self, context: RoundContext, name: str, value: Tensor, reference: Tensor | None, call: int) -> Tensor:
        """Return the uploads of a round, in which the attackers' rows are replaced.

        Integers and evaluations are unchanged.

        Args:
            context: The clients.
            name: Name of the upload.
            value: The uploads.  # [K, ...]
            reference: What they are differences from: one for all clients, or one for each.  None: 0.
                # [...] or [K, ...]
            call: The number of earlier uploads of this name in the round.

        Returns:
            The uploads.  Rows of honest clients are equal bit for bit.  # [K, ...]
        """
        is_attacker = ~self.are_honest(context.ids)  # [K]
        is_changed = self.attack.changes_uploads and context.changes_state and value.is_floating_point()
        # needs_honest: the attack is computed from the uploads of honest clients, here of none
        if not is_changed or not is_attacker.any() or (is_attacker.all() and self.attack.needs_honest):
            return value
        base = torch.zeros_like(value) if reference is None else reference.expand_as(value)
        base = base.reshape(len(value), -1)  # [K, p]
        change = value.reshape(len(value), -1) - base  # [K, p]
        of_attackers, of_honest = (  # positions in the cohort
            torch.from_numpy(np.flatnonzero(which)).to(value.device) for which in (is_attacker, ~is_attacker)
        )

        def combined(rows: Tensor) -> Tensor:
            """Return the change that the server would compute if the attackers uploaded other changes.

            Args:
                rows: Changes (upload minus reference) of the f attackers in the cohort; others stay honest.  # [f, p]

            Returns:
                The run's aggregation rule, or the mean, of all K changes.  # [p]
            """
            # change: the honest changes of all K clients; of_attackers: positions of the f attackers among them
            return self._aggregate(context, change.index_copy(0, of_attackers, rows))

        path = f"{name}/{call}" if call else name  # of the attack's state and random numbers for this upload
        keys = rng.client_keys(rng.key(context.seed, "attack", path, context.round), context.ids[is_attacker])
        observed = Observed(
            honest=change[of_honest],
            truthful=change[of_attackers],
            honest_ids=context.ids[~is_attacker],
            ids=context.ids[is_attacker],
            random=rng.RowRandom(torch.from_numpy(keys).to(value.device)),
            aggregate=combined,
            state=AttackState(self.rows, f"attack/{path}"),
        )
        wrong = base[of_attackers] + self.attack.corrupt(observed)  # of the f attackers in the cohort  [f, p]
        return value.index_copy(0, of_attackers, wrong.to(value).view(-1, *value.shape[1:]))

    def _aggregate(self, context: RoundContext, change: Tensor) -> Tensor:
        """Return the aggregate of the clients' changes by the run's aggregation rule, or their mean without a rule.

        Args:
            context: The clients, with their weights.
            change: The changes.  A rule that needs a reference gets the change 0.  # [K, p]

        Returns:
            The aggregate.  # [p]
        """
        rows = change.float()  # as the weights
        if self.aggregator is None:
            return aggregate.mean(context, rows).to(change)
        center = torch.zeros_like(rows[0])
        combined = aggregate.robust_mean(context, self.aggregator, rows, "samples", groups=None, center=center)
        return combined.to(change)

    def are_honest(self, ids: np.ndarray) -> np.ndarray:
        """Return for each of the clients ids [K] whether it is honest: True if it is not an attacker.  # [K] bool"""
        return ~np.isin(ids, self.ids)
