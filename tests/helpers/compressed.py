"""Every method of conf/algorithm under every compressor of conf/compression, in both directions, on tiny models.

A seeded thirtieth of the pairs is tested by default, all of them with `-m "slow or not slow"`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from cases import METHODS, Case, case
from torch import Tensor

from fedbench.config.conf_tree import group_options
from fedbench.simulation.run_state import Simulation

OPERATORS = [*(name for name in group_options("compression") if name != "none"), "lowrank warm_start=true"]
ON_CLIP = ("fedotp", "pfedmoap", "pfedprompt", "zero_shot")  # a process that imports open_clip needs 6 s longer
TWO = 2  # for fedbench.channel.compression.TINY: a head has 27 numbers here


def sampled(pairs: list[tuple[str, str]], slow_methods: Collection[str] = ()) -> list[Any]:
    """A thirtieth of them, drawn once and for all, but of slow_methods; the others are marked as slow."""
    order = np.random.default_rng(16).permutation(len(pairs)).tolist()
    chosen = [i for i in order if pairs[i][0] not in slow_methods][: -(-len(pairs) // 30)]
    return [pytest.param(*p, marks=() if i in chosen else pytest.mark.slow) for i, p in enumerate(pairs)]


def all_pairs() -> list[tuple[str, str]]:
    """Every method under every compressor."""
    return [(method, compressor) for method in METHODS for compressor in OPERATORS]


@functools.cache
def compressed(method: str, words: str) -> Case:
    """A method under "topk share=1", or, under "", without compression."""
    if not words:
        return case(method)
    name, *options = words.split()
    share = ["compression.share=0.2"] if name in ("topk", "randk") else []
    more = [f"compression={name}", "compression.direction=both", *share, *(f"compression.{o}" for o in options)]
    return case(method).on([*case(method).overrides, *more])


def simulated(method: str, words: str, **values: Any) -> Simulation:
    """A new run of it; skips a method that cannot run here."""
    if reason := case(method).reason:
        pytest.skip(reason)
    return compressed(method, words).simulation(**values)


def without_compression(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`everything` but memories and references, of which FedFomo's are its own: what the server saw of each client."""
    return {name: t for name, t in state.items() if "compression/" not in name and name != "/rows/uploaded"}
