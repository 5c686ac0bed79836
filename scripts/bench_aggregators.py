"""Seconds of each aggregation rule for one round, and their ratio to the mean, in one thread on a CPU.

    uv run python scripts/bench_aggregators.py                       # 100 uploads of 878,538 numbers
    uv run python scripts/bench_aggregators.py --clients 20 --size 4810

Weights differ between clients, as with client_weights=samples.  Seconds are of CPU time, and the best of three calls
counts.
The first line compares `cohort.mean` of a run with aggregator=mean with a plain product of weights and uploads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedbench.aggregators.base import Aggregator
from fedbench.channel.aggregate import mean
from fedbench.config.conf_tree import group_options, read_option
from fedbench.core.round_context import RoundContext
from fedbench.simulation.instantiate import make

PAIRS = 31  # of calls, to compare the mean with a plain product


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of the fastest of three calls."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def overhead(rows: torch.Tensor, weights: torch.Tensor) -> float:
    """Return the ratio of CPU seconds of the mean in a run with aggregator=mean to those of the product weights @ rows.

    It is the median over pairs of calls in alternating order.

    Args:
        rows: The uploads of K clients.  # [K, P]
        weights: The client weights.  # [K]
    """
    n = len(rows)
    context = RoundContext(
        ids=np.arange(n), num_samples=np.ones(n, np.int64), client_weights=weights.double().numpy(), num_clients=n,
        round=0, mode="round", seed=0, device=rows.device,
    )  # fmt: skip
    ratios = []
    for _ in range(PAIRS):
        times = []
        for work in (lambda: mean(context, rows), lambda: weights @ rows):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def main() -> None:
    """Print the seconds of each rule without and with each pre-aggregation, and their ratio to a plain product."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=878_538)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(args.clients, args.size, generator=generator)
    weights = torch.rand(args.clients, generator=generator) + 0.5
    weights, order, center = weights / weights.sum(), torch.arange(args.clients), torch.zeros(args.size)
    product = seconds(lambda: weights @ rows)
    print(f"{args.clients} clients, {args.size:,} numbers each; a plain product takes {product:.4f} s")
    print(f"aggregator=mean takes {overhead(rows, weights):.3f} times as long")
    print(f"{'aggregator':<20}{'pre':<12}{'seconds':>9}{'ratio':>8}")
    for name in group_options("aggregator"):
        if name == "mean":
            continue
        for pre in ("none", "nnm", "bucketing"):
            rule: Aggregator = make({**read_option(f"aggregator/{name}"), "pre": pre}, key="aggregator")
            taken = seconds(lambda rule=rule: rule.aggregate(rows, weights, center, order))
            print(f"{name:<20}{pre:<12}{taken:>9.3f}{taken / product:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
