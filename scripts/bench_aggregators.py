"""Seconds of each aggregation rule for one round, and their ratio to the mean, in one thread on a CPU.

    uv run python scripts/bench_aggregators.py                       # 100 uploads of 878,538 numbers
    uv run python scripts/bench_aggregators.py --clients 20 --size 4810

Weights differ between clients, as with client_weights=samples.  The best of three calls counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fedbench.aggregators.base import Aggregator
from fedbench.config.conf_tree import group_options, read_option
from fedbench.simulation.instantiate import make


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of three calls."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=878_538)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(args.clients, args.size, generator=generator)
    weights = torch.rand(args.clients, generator=generator) + 0.5
    weights, order, center = weights / weights.sum(), torch.arange(args.clients), torch.zeros(args.size)
    mean = seconds(lambda: weights @ rows)
    print(f"{args.clients} clients, {args.size:,} numbers each; the mean takes {mean:.4f} s")
    print(f"{'aggregator':<20}{'pre':<12}{'seconds':>9}{'ratio':>8}")
    for name in group_options("aggregator"):
        for pre in ("none",) if name == "mean" else ("none", "nnm", "bucketing"):
            options = {} if name == "mean" else {"pre": pre}
            rule: Aggregator = make({**read_option(f"aggregator/{name}"), **options}, key="aggregator")
            taken = seconds(lambda rule=rule: rule.aggregate(rows, weights, center, order))
            print(f"{name:<20}{pre:<12}{taken:>9.3f}{taken / mean:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
