"""Former names of modules are translated, and hashes are taken over the first of them."""

from __future__ import annotations

import importlib.util

import pytest

from fedbench.config.find_target import find_target
from fedbench.core import moved


@pytest.mark.parametrize("new", moved.MOVED.values())
def test_the_new_names_are_those_of_modules(new: str) -> None:
    assert importlib.util.find_spec(f"fedbench.{new}") is not None


def test_targets_have_one_text_under_all_their_names() -> None:
    first = "fedbench.local.Step"
    for path in (first, "fedbench.engine.local.Step", "fedbench.engine.step.Step"):
        assert moved.original(path) == first and moved.current(path) == "fedbench.engine.step.Step"
    assert moved.original("fedbench.engine.optim.SGD") == "fedbench.optim.SGD"
    assert moved.current("mine.local.Step") == moved.original("mine.local.Step") == "mine.local.Step"


@pytest.mark.parametrize("old", ["cifar.CIFAR10", "table_csv.TableCsv", "tumours.Tumours", "vqa_rad.VQARad", "npz.Npz"])
def test_stored_names_of_data_sets_are_those_of_hashes(old: str) -> None:
    new = moved.current(f"fedbench.data.{old}")
    assert new != f"fedbench.data.{old}" == moved.original(new)
    assert callable(find_target(new, "dataset._target_"))
