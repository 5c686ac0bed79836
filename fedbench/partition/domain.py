"""Natural silos: one client per domain (hospital, user, style), or several that share a domain.

Sources: Office-Home in PGFed, Office-Caltech10 and DomainNet in pFedMoAP and FedOTP: Dir(alpha) over the
classes inside each domain, clients in domain order.  PGFed's generator draws without the size cap and asks
for 20 / 0.15 expected samples (``cap: false, min_size: 134``; it rounds each class's counts where we floor);
the prompt papers cap and ask for 2 train and 2 test samples.
"""

import numpy as np

from fedbench.core.options import ConfigError, Count, Positive, require
from fedbench.core.split import Ragged
from fedbench.data.base import Arrays
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.iid import IID


class Domain:
    """clients_per_domain: 1 makes every silo a client.  The rest says how several share a silo.

    alpha: None deals a silo's samples out evenly, else Dir(alpha); min_size, min_test, cap: see Dirichlet.
     num_clients may be null: it is the number of silos times clients_per_domain.
    """

    def __init__(
        self,
        clients_per_domain: Count = 1,
        alpha: Positive | None = None,
        min_size: Count = 2,
        min_test: Count = 1,
        cap: bool = True,
    ):
        self.clients_per_domain = clients_per_domain
        self.inside = IID() if alpha is None else Dirichlet(alpha, min_size, min_test, cap)

    def count(self, num_domains: int) -> int:
        """N for a data set of so many natural silos."""
        require(
            num_domains > 0,
            "partition=domain needs a data set with natural silos: an image folder of domain/class folders, "
            "an npz with a client array, or a table with a client column (dataset.columns.client)",
        )
        return num_domains * self.clients_per_domain

    def client_names(self, arrays: Arrays) -> list[str] | None:
        """Return the names of the silos if every silo is a client."""
        names = arrays.domain_names if self.clients_per_domain == 1 else None
        return None if names is None else names[: arrays.num_domains]

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where the silos do not make num_clients clients."""
        silo = np.empty(0, np.int64) if domain is None else domain  # [n]
        num_domains = int(silo.max(initial=-1)) + 1
        wanted = self.count(num_domains)
        require(
            num_clients == wanted,
            f"partition.num_clients={num_clients:,}, but {num_domains:,} natural silos of "
            f"{self.clients_per_domain} client(s) each make {wanted:,}: set it to that or to null",
        )
        if self.clients_per_domain == 1:
            return [Ragged.from_owners(pool, silo[pool], num_clients) for pool in pools]
        inside = [self._divide(labels, [p[silo[p] == d] for p in pools], d, rng) for d in range(num_domains)]
        return [_chain([lists[i] for lists in inside]) for i in range(len(pools))]

    def _divide(self, labels: np.ndarray, pools: list[np.ndarray], d: int, rng: np.random.RandomState) -> list[Ragged]:
        try:
            return self.inside.assign(labels, pools, self.clients_per_domain, rng)
        except ConfigError as error:
            raise ConfigError(f"natural silo {d}: {error}") from error


def _chain(parts: list[Ragged]) -> Ragged:
    """All clients of the first part, then of the second, and so on."""
    return Ragged.from_sizes(
        np.concatenate([part.indices for part in parts]), np.concatenate([part.sizes for part in parts])
    )
