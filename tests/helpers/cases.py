"""All methods of conf/algorithm on the federation of fedbench.testing, with the smallest suitable model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from omegaconf import DictConfig

from fedbench.config.conf_tree import group_options
from fedbench.testing._cases import (
    ARRAYS,
    COHORTS,
    SPLIT,
    Case,
    assert_same,
    case_of,
    run_rounds,
    set_up,
    state_of,
    tensors,
    without_learning,
)

__all__ = [
    "ARRAYS",
    "COHORTS",
    "METHODS",
    "SPLIT",
    "Case",
    "assert_same",
    "case",
    "config",
    "run_rounds",
    "set_up",
    "state_of",
    "tensors",
    "without_learning",
]
METHODS = group_options("algorithm")
FAST = (
    "fedavg",
    "fedper",
    "fedrep",
    "ditto",
    "apfl",
    "pgfed",
    "apple",
    "fedfomo",
    "scaffold",
    "feddyn",
    "fedbn",
    "pfednet",
)
# for tests that run every method with an option: others than FAST run with  -m slow
METHODS_BY_SPEED = [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
case = functools.cache(case_of)  # by option


def config(name: str, *overrides: str, **values: Any) -> DictConfig:
    """Return the configuration of a method with further values by dotted key."""
    return Case(name, list(overrides)).config(**values)
