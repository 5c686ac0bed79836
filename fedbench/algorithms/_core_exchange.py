"""Exchange of APPLE's core models c_j, one trained by each client j: who has which version, who downloads which."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbench.engine.cohort import Cohort


class CoreExchange:
    """Exchange of all cores in each round.  cores [V, P]: the cores in use; newest [N]: row of the newest c_j.

    State:
        cores: All versions of all cores that are in use, [V, P].
        newest: Index into `cores` of the newest version of c_j, [N].
    """

    def __init__(self, cores: Tensor):
        self.cores, self.newest = cores, torch.arange(len(cores), device=cores.device)

    def download(self, cohort: Cohort, d: Tensor) -> Tensor:
        """Download other clients' cores to the cohort.

        Args:
            cohort: The downloading clients.
            d: Their relationship vectors, unused here, where clients download all cores.  # [K, N]

        Returns:
            Index into `cores` of the version of c_j that each client then has.  # [K, N]
        """
        # itself(cohort): True where core j is the client's own; fetch counts the bytes of all others
        cohort.fetch(~itself(cohort), cores=self.cores)
        return self.newest.repeat(len(cohort), 1)  # newest: index into `cores` of each core's newest version  [N]

    def publish(self, cohort: Cohort, versions: Tensor, core: Tensor) -> None:
        """Store the cores that the cohort uploaded.

        Args:
            cohort: The uploading clients.
            versions: Output of `download`; unused here, where only the newest versions are stored.  # [K, N]
            core: The uploaded cores.  # [K, P]
        """
        # without older versions, row j of `cores` is c_j; cohort.index: the clients' ids as a tensor  [K]
        self.cores = self.cores.index_copy(0, cohort.index, core)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors that are attributes of this exchange, by attribute name, for a checkpoint."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the attributes to the tensors of a dict that `state_dict` returned; each attribute must have an entry."""
        for name in self.state_dict():
            setattr(self, name, state[name].to(self.cores.device))


class LimitedCoreExchange(CoreExchange):
    """Exchange of M cores per round.  held [N, N]: version of c_j that client i has; seen [N, N]: whether it chose c_j.

    A client downloads all cores in its first round, and M in each later one.  It keeps its old versions of the others.

    Args:
        cores: Initial cores.  # [N, P]
        bandwidth: Number M of cores that a client downloads in each later round.
        selection: "intended" prefers cores that the client never chose, then large |d_ij|, increasingly so over the
            rounds.  "uniform" selects at random.

    State, besides that of the base class:
        held: Index into `cores` of the versions that client i last downloaded, and of its own core the version before
            its last upload; -1 before the first round, [N, N].
        seen: Whether client i ever chose c_j, [N, N] bool.
    """

    def __init__(self, cores: Tensor, bandwidth: int, selection: str):
        super().__init__(cores)
        n = len(cores)
        self.bandwidth, self.selection = min(bandwidth, n - 1), selection
        self.held = torch.full((n, n), -1, device=cores.device)
        self.seen = torch.zeros(n, n, dtype=torch.bool, device=cores.device)

    def download(self, cohort: Cohort, d: Tensor) -> Tensor:
        """Download M selected cores to each client (M: bandwidth), or the cores of all others in its first round.

        Args:
            cohort: The downloading clients.
            d: Their relationship vectors: d_ij is the weight of c_j in client i's model.  # [K, N]

        Returns:
            Index into `cores` of the version of c_j that each client then has.  # [K, N]
        """
        # held[i, j]: index into `cores` of client i's version of c_j; -1 before its first round
        is_new = self.held[cohort.index, :1] < 0  # [K, 1]
        chosen = self.choose(cohort, d) & ~is_new  # the first download, of all cores, does not count as a choice
        # seen: which cores a client has chosen before; newest: the index in `cores` of each core's newest version
        self.seen = self.seen.index_copy(0, cohort.index, self.seen[cohort.index] | chosen)
        downloads = torch.where(is_new, ~itself(cohort), chosen)  # [K, N] bool
        cohort.fetch(downloads, cores=self.cores)  # counts the bytes of the downloads
        # new versions where downloaded, else the old ones
        return torch.where(downloads | itself(cohort), self.newest, self.held[cohort.index])

    def choose(self, cohort: Cohort, d: Tensor) -> Tensor:
        """Select the M cores that each client downloads (M: bandwidth).

        With selection="uniform" they are random.  With "intended", cores that the client never chose come first, then
        those with large |d_ij|.

        Args:
            cohort: The downloading clients.
            d: Their relationship vectors: d_ij is the weight of c_j in client i's model.  # [K, N]

        Returns:
            True where client i downloads core j; a client never selects its own core.  # [K, N] bool
        """
        # whether core j is the client's own, and whether the client chose it before  [K, N] each
        is_self, was_chosen, n = itself(cohort), self.seen[cohort.index], cohort.num_clients
        # the M largest of log p_j + Gumbel noise are M draws without replacement with probabilities p_j
        score = -(-cohort.random("apple").uniform(n).log()).log()  # [K, N]
        turn = 2 * is_self.int()  # cores of a lower turn are selected first; a client's own core comes last
        if self.selection == "intended":
            # grows over the rounds, so large |d_ij| are preferred more and more; > 1, so that its logarithm is positive
            base = max(1.5, cohort.round * self.bandwidth / n)
            score = score + was_chosen * d.abs() * math.log(base)  # p_j proportional to base^|d_ij|
            turn = turn + was_chosen.int()  # cores that the client never chose come first
        selected = by_turn(turn, score)[:, : self.bandwidth]  # cores of lower turns first, then of higher scores
        return torch.zeros_like(is_self).scatter_(1, selected, value=True)

    def publish(self, cohort: Cohort, versions: Tensor, core: Tensor) -> None:
        """Add the cohort's cores, and drop the versions that no client has any more.

        Args:
            cohort: The uploading clients.
            versions: Output of `download`, which becomes `held` of these clients.  # [K, N]
            core: The uploaded cores.  # [K, P]
        """
        # which versions all clients have; -1 before a client's first round  [N, N]
        all_versions = self.held.index_copy(0, cohort.index, versions)
        # indices of the uploaded cores, which are appended to all stored versions  [K]
        added = torch.arange(len(cohort), device=core.device) + len(self.cores)
        newest = self.newest.index_copy(0, cohort.index, added)
        used = torch.cat([all_versions[all_versions >= 0], newest]).unique()  # ascending
        self.cores = torch.cat([self.cores, core])[used]
        self.newest = torch.searchsorted(used, newest)  # a version's new index is its position in `used`
        self.held = torch.where(all_versions >= 0, torch.searchsorted(used, all_versions), all_versions)


def by_turn(turn: Tensor, score: Tensor) -> Tensor:
    """Return the order of each row's entries: by ascending turn, and within a turn by descending score.

    Args:
        turn: Entries of a lower turn come first.  # [K, N] int
        score: Rank within a turn; the largest comes first.  # [K, N]

    Returns:
        Indices that sort each row.  # [K, N]
    """
    best = score.argsort(1, descending=True)
    return best.gather(1, turn.gather(1, best).argsort(dim=1, stable=True))  # stable: equal turns stay sorted by score


def itself(cohort: Cohort) -> Tensor:
    """Return a mask [K, N] of K sampled and all N clients: [k, j] is True if sampled client k is client j.  # bool"""
    return cohort.index[:, None] == torch.arange(cohort.num_clients, device=cohort.device)
