"""APPLE's cores between server and clients: who holds which version of whose core, and what is downloaded next."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbench.engine.cohort import Cohort


class CoreExchange:
    """Unlimited: a client downloads the newest core of every other client in each of its rounds.

    State: cores [V, P], all versions in use; newest [N], the version of c_j in cores.
    """

    def __init__(self, cores: Tensor):
        self.cores, self.newest = cores, torch.arange(len(cores), device=cores.device)

    def download(self, cohort: Cohort, d: Tensor) -> Tensor:
        """Others' cores for clients with relationship vectors d [K, N]; returns the version of every core that each
        client now holds.  # [K, N]"""
        cohort.fetch(~itself(cohort), cores=self.cores)
        return self.newest.repeat(len(cohort), 1)

    def publish(self, cohort: Cohort, versions: Tensor, core: Tensor) -> None:
        """The cohort's cores [K, P] replace theirs.  versions [K, N]: as `download` returned them."""
        self.cores = self.cores.index_copy(0, cohort.index, core)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state_dict`."""
        for name in self.state_dict():
            setattr(self, name, state[name].to(self.cores.device))


class LimitedCoreExchange(CoreExchange):
    """A client downloads all cores in its first round, then `bandwidth` of the others' (M) in each of its rounds, and
    keeps the versions of the rest that it has.

    selection="intended": those that it never chose before come first, then large |d_ij|, more strongly in later rounds;
    "uniform": any.  State also: held [N, N], the versions that client i last downloaded, and of its own core the one
    before its last upload (-1: none yet); seen [N, N], whether it ever chose them.
    """

    def __init__(self, cores: Tensor, bandwidth: int, selection: str):
        super().__init__(cores)
        n = len(cores)
        self.bandwidth, self.selection = min(bandwidth, n - 1), selection
        self.held = torch.full((n, n), -1, device=cores.device)
        self.seen = torch.zeros(n, n, dtype=torch.bool, device=cores.device)

    def download(self, cohort: Cohort, d: Tensor) -> Tensor:
        """As above; what is not downloaded stays as it is held."""
        is_new = self.held[cohort.index, :1] < 0  # in its first round  [K, 1]
        chosen = self.choose(cohort, d) & ~is_new  # a first download, of everything, is no choice
        self.seen = self.seen.index_copy(0, cohort.index, self.seen[cohort.index] | chosen)
        which = torch.where(is_new, ~itself(cohort), chosen)
        cohort.fetch(which, cores=self.cores)
        return torch.where(which | itself(cohort), self.newest, self.held[cohort.index])

    def choose(self, cohort: Cohort, d: Tensor) -> Tensor:
        """M of the others' cores for each client, for any round but its first.  # [K, N] bool"""
        is_self, seen, n = itself(cohort), self.seen[cohort.index], cohort.num_clients  # [K, N]
        # the M largest of log p_j + Gumbel noise are M draws without replacement with probabilities p_j
        score = -(-cohort.random("apple").uniform(n).log()).log()  # [K, N]
        turn = 2 * is_self.int()  # last: a client does not choose itself
        if self.selection == "intended":
            base = max(1.5, cohort.round * self.bandwidth / n)
            score = score + seen * d.abs() * math.log(base)  # p_j proportional to base^|d_ij|
            turn = turn + seen.int()  # after those never chosen
        return torch.zeros_like(is_self).scatter_(1, by_turn(turn, score)[:, : self.bandwidth], True)

    def publish(self, cohort: Cohort, versions: Tensor, core: Tensor) -> None:
        """The cohort's cores stand beside the versions that someone still holds; the rest are dropped."""
        held = self.held.index_copy(0, cohort.index, versions)
        added = torch.arange(len(cohort), device=core.device) + len(self.cores)
        newest = self.newest.index_copy(0, cohort.index, added)
        used = torch.cat([held[held >= 0], newest]).unique()  # ascending
        self.cores = torch.cat([self.cores, core])[used]
        self.newest = torch.searchsorted(used, newest)
        self.held = torch.where(held >= 0, torch.searchsorted(used, held), held)


def by_turn(turn: Tensor, score: Tensor) -> Tensor:
    """Numbers j by turn [K, N], the lowest first, and those of one turn by score [K, N], the highest.  # [K, N]"""
    best = score.argsort(1, descending=True)
    return best.gather(1, turn.gather(1, best).argsort(dim=1, stable=True))  # stable: in one turn still by score


def itself(cohort: Cohort) -> Tensor:
    """Where client j is client i.  # [K, N] bool"""
    return cohort.index[:, None] == torch.arange(cohort.num_clients, device=cohort.device)
