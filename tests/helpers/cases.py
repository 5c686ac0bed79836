"""Every method of conf/algorithm on 6 ragged clients, 4 of them a round, with the smallest model that suits it.

The house's own contract tests and those of privacy and of several processes play them by the means of fedbench.testing.
"""

from __future__ import annotations

import functools
from typing import Any

from omegaconf import DictConfig

from fedbench.config.conf_tree import group_options
from fedbench.testing._cases import (
    ARRAYS,
    COHORTS,
    SPLIT,
    Case,
    case_of,
    everything,
    no_learning,
    ready,
    rounds,
    same,
    tensors,
)

__all__ = [
    "ARRAYS",
    "COHORTS",
    "METHODS",
    "SPLIT",
    "Case",
    "case",
    "config",
    "everything",
    "no_learning",
    "ready",
    "rounds",
    "same",
    "tensors",
]
METHODS = group_options("algorithm")
case = functools.cache(case_of)  # of the name of an option


def config(name: str, *overrides: str, **values: Any) -> DictConfig:
    """The method's config with further values by dotted key."""
    return Case(name, list(overrides)).config(**values)
