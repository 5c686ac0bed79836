"""Hashes of configurations: over what can change a run's numbers; a key that comes later leaves those before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fedbench.core import settings
from fedbench.core.settings import config_hash

STORED: dict[str, Any] = {
    "data_dir": "data",
    "seed": 0,
    "privacy": None,
    "algorithm": {"_target_": "fedbench.algorithms.heurfedamp.HeurFedAMP", "lam": 0.1},
    "choices": {"algorithm": "heurfedamp"},
}


def with_option(**options: Any) -> dict[str, Any]:
    return {**STORED, "algorithm": {**STORED["algorithm"], **options}}


def placed(key: str, value: Any) -> dict[str, Any]:
    """What was stored, with one more dotted key."""
    values = copy.deepcopy(STORED)
    *groups, name = key.split(".")
    at = values
    for group in groups:
        at = at.setdefault(group, {})
    at[name] = value
    return values


def test_a_neutral_value_leaves_the_hash_as_it_was() -> None:
    """What a run stored before the key came has no such key; the run of today, with its default, is the same one."""
    for key, value in settings.LATER_OPTIONS.items():
        assert config_hash(placed(key, value)) == config_hash(STORED) != config_hash(placed(key, f"not {value}"))


def test_a_key_that_comes_later_is_neutral_at_its_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_hash(STORED)
    assert config_hash(with_option(new=0)) != before
    monkeypatch.setitem(settings.LATER_OPTIONS, "algorithm.new", 0)
    assert config_hash(with_option(new=0)) == before
    assert len({before, config_hash(with_option(new=1)), config_hash(with_option(new=2))}) == 3


def test_another_key_of_that_value_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.LATER_OPTIONS, "algorithm.new", 0)
    assert config_hash(with_option(lam=0)) != config_hash(with_option(lam=0, new=1)) != config_hash(STORED)
    assert config_hash(with_option(other=0)) != config_hash(STORED)
