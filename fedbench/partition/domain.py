"""Client sites: each domain (hospital, user, style) of the data set is one client or several.

Sources: Office-Home in PGFed, Office-Caltech10 and DomainNet in pFedMoAP and FedOTP: Dir(alpha) over the classes of
each domain, clients in the order of domains.  PGFed's generator has no size cap and requires 20 / 0.15 expected samples
(``cap: false, min_size: 134``).  It rounds the counts of each class, which are rounded down here.  The prompt papers
cap the size, and require 2 training and 2 test samples.
"""

import numpy as np

from fedbench.core.options import Count, Positive, error_prefix, require
from fedbench.core.split import Ragged
from fedbench.data.base import Arrays
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.iid import IID


class Domain:
    """One or several clients for each client site.

    Args:
        clients_per_domain: Number of clients of each site.
        alpha: Concentration of the Dirichlet partition of a site among its clients.  None: divide it evenly (IID).
        min_size: Minimum samples of each client, as in Dirichlet; used only with alpha.
        min_test: Minimum test samples of each client, as in Dirichlet; used only with alpha.
        cap: Whether to cap the sizes of clients, as in Dirichlet; used only with alpha.
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
        self.site_partition = IID() if alpha is None else Dirichlet(alpha, min_size, min_test, cap)

    def default_num_clients(self, num_domains: int) -> int:
        """Return the number of clients if partition.num_clients is null: clients_per_domain for each client site.

        Args:
            num_domains: The number of client sites of the data set, 0 if it has none.

        Raises:
            ConfigError: The data set has no client sites.
        """
        require(
            num_domains > 0,
            "partition=domain needs a data set with client sites, but this one has none: use an image folder of "
            "site/class folders, an npz with a client array, or a table with a client column (dataset.columns.client)",
        )
        return num_domains * self.clients_per_domain

    def client_names(self, arrays: Arrays) -> list[str] | None:
        """Return the names of the clients, which are those of their client sites (hospitals, users).

        Returns:
            A name for each client.  None: the sites have no names, or several clients each.
        """
        names = arrays.domain_names if self.clients_per_domain == 1 else None
        return None if names is None else names[: arrays.num_domains]  # without names of sites after the last one used

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign samples by their client site, in every pool (set of samples).

        Each site is one client, or is divided among as many clients as the option clients_per_domain says.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: The client site of each sample of the data set, [n] int64, or None.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        site = np.empty(0, np.int64) if domain is None else domain  # [n]
        num_sites = int(site.max(initial=-1)) + 1
        expected = self.default_num_clients(num_sites)
        require(
            num_clients == expected,
            f"partition.num_clients={num_clients:,}, but {num_sites:,} client sites with "
            f"{self.clients_per_domain} client(s) each give {expected:,}: set partition.num_clients to that, or to "
            "null",
        )
        if self.clients_per_domain == 1:
            return [Ragged.from_owners(pool, site[pool], num_clients) for pool in pools]
        # by_site[d][i] are the clients of site d in pool i
        by_site = [self._divide_site(labels, [p[site[p] == d] for p in pools], d, rng) for d in range(num_sites)]
        return [_concatenate([lists[i] for lists in by_site]) for i in range(len(pools))]

    def _divide_site(
        self, labels: np.ndarray, pools: list[np.ndarray], site: int, rng: np.random.RandomState
    ) -> list[Ragged]:
        """Divide the samples of one client site among its clients.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: The samples of the site in each pool.
            site: The index of the site, for messages.
            rng: Random numbers.

        Returns:
            For each pool, the sample indices of each client of the site.
        """
        with error_prefix(f"client site {site}"):  # in front of the messages of errors
            return self.site_partition.assign(labels, pools, self.clients_per_domain, rng)  # evenly or by Dirichlet


def _concatenate(by_site: list[Ragged]) -> Ragged:
    """Join the clients of all client sites.

    Args:
        by_site: For each site, the sample indices of its clients.

    Returns:
        The sample indices of all clients, first those of site 0, then those of site 1, and so on.
    """
    indices = np.concatenate([lists.indices for lists in by_site])
    return Ragged.from_sizes(indices, np.concatenate([lists.sizes for lists in by_site]))
