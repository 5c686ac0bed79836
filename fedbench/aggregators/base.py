"""Base class of aggregation rules.

A method averages uploads by `cohort.mean`.  A rule replaces this mean by an estimate that a few wrong uploads cannot
move far.  Before the rule, nearest-neighbour mixing (NNM) or bucketing may replace uploads by means of several uploads.

Letters: n clients whose uploads are combined, m rows that the rule receives, p values of an upload.

References:
    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, AISTATS 2023 (NNM).
    Karimireddy, He and Jaggi, ICLR 2022 (bucketing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.aggregators._columns import weighted_median
from fedbench.aggregators._mixing import bucket_means, mix_nearest
from fedbench.core.options import Count, NonNegative, require

PreAggregation = Literal["none", "nnm", "bucketing"]


@dataclass(frozen=True)
class Uploads:
    """What a rule combines: uploads as rows, and their weights.

    Attributes:
        rows: The uploads, or their means after `pre`.  # [m, p]
        weights: Weights of the rows, with sum 1.  # [m]
        f: Assumed number of wrong rows, at most `max_f(m)`.
        center: The value that the server sent and that the result replaces.  None: there is none.  # [p]
    """

    rows: Tensor
    weights: Tensor
    f: int
    center: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """The mean of the rows, weighted by `weights`.  # [p]"""
        return self.weights @ self.rows

    @property
    def start(self) -> Tensor:
        """A first guess of the result: the center, or the coordinate-wise weighted median of the rows if it is None.

        # [p]
        """
        return weighted_median(self.rows, self.weights) if self.center is None else self.center


class Aggregator:
    """Base class of aggregation rules.  f: assumed number or fraction of wrong uploads; pre: none, nnm or bucketing.

    Args:
        f: Assumed number of wrong uploads among those that are combined, or a fraction of them below 0.5.  A fraction
            is rounded up.
        pre: What replaces the uploads before the rule: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.

    Attributes:
        uses_weights: Whether the rule uses the clients' weights.  If not, it treats all clients equally.
        uses_f: Whether the rule reads f.  If not, only pre="nnm" does, and a fraction fits any number of clients.
        scale_free: Whether the estimate is multiplied by a number if all uploads and the server's value are.
    """

    uses_weights = True
    uses_f = True
    scale_free = True

    def __init__(self, f: NonNegative = 0.1, pre: PreAggregation = "none", bucket_size: Count = 2):
        require(
            f < 0.5 or f == int(f),
            f"aggregator.f={f} must be a whole number of clients, or a fraction of them below 0.5: set it "
            "to 1 or 0.1, for example",
        )
        self.f, self.pre, self.bucket_size = f, pre, bucket_size

    def combine(self, u: Uploads) -> Tensor:
        """Return the rule's estimate of the mean of the correct rows.  Subclasses must implement it.

        Args:
            u: The rows, their weights, the assumed number f of wrong rows, and the value that the result replaces.

        Returns:
            The estimate.  # [p]
        """
        raise NotImplementedError

    def max_f(self, m: int) -> int:
        """Return the largest number of wrong rows among m that the rule allows.  By default, it is below m / 2."""
        return max((m - 1) // 2, 0)

    def num_wrong(self, n: int) -> int:
        """Return how many of n uploads are assumed to be wrong: the option f, or f n rounded up if f is below 1."""
        return math.ceil(self.f * n - 1e-9) if self.f < 1 else int(self.f)  # 0.1 * 30 is more than 3

    def check(self, num_clients: int) -> None:
        """Check f against the number of clients in a round.

        Args:
            num_clients: The number of clients.

        Raises:
            ConfigError: f is too large for the rule.
        """
        # f has no effect, and is a fraction such as the default; a number that the user set is checked nevertheless
        if not self.uses_f and self.pre == "none" and self.f < 1:
            return
        # number of rows that the rule receives: one per client or per bucket
        m = math.ceil(num_clients / self.bucket_size) if self.pre == "bucketing" else num_clients
        buckets = f" in {m} buckets" if self.pre == "bucketing" else ""
        wrong = self.num_wrong(num_clients)
        require(
            wrong <= self.max_f(m),
            f"aggregator.f={self.f} assumes {wrong} wrong upload{'s' * (wrong != 1)}, but with {num_clients} clients a "
            f"round{buckets} this rule allows at most {self.max_f(m)}: lower aggregator.f, or raise clients_per_round",
        )

    def aggregate(self, rows: Tensor, weights: Tensor, center: Tensor | None, order: Tensor) -> Tensor:
        """Combine the uploads: `pre`, then the rule.

        The assumed number f of wrong uploads is limited to `max_f`, the rule's largest, because a cluster, or
        a round with dropouts, may have few clients.  A rule with uses_weights=False treats all uploads equally.

        Args:
            rows: The uploads.  # [n, p]
            weights: Their weights, positive, with sum 1.  # [n]
            center: The value that the result replaces, or None.  # [p]
            order: A random permutation of the uploads, for buckets.  # [n] int64

        Returns:
            The combined upload.  # [p]
        """
        n = len(rows)
        f = min(self.num_wrong(n), (n - 1) // 2)
        if not self.uses_weights:
            weights = torch.full_like(weights, 1 / n)
        if self.pre == "nnm":
            rows = mix_nearest(rows, weights, f)
        elif self.pre == "bucketing":
            rows, weights = bucket_means(rows[order], weights[order], self.bucket_size)
        return self.combine(Uploads(rows, weights, min(f, self.max_f(len(rows))), center))
