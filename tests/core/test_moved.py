"""Names that modules had before are found, and hashes are taken over the first of them."""

from __future__ import annotations

import importlib

import pytest

from fedbench.core import moved


@pytest.mark.parametrize("old, new", moved.MOVED.items())
def test_an_old_name_imports_the_module_at_the_new_one(old: str, new: str) -> None:
    assert importlib.import_module(f"fedbench.{old}") is importlib.import_module(f"fedbench.{new}")


def test_users_methods_find_what_local_had() -> None:
    from fedbench.engine import batch, step

    for name in ("fedbench.local", "fedbench.engine.local"):
        old = importlib.import_module(name)
        assert (old.Batch, old.Step) == (batch.Batch, step.Step)


def test_targets_have_one_text_under_all_their_names() -> None:
    first = "fedbench.local.Step"
    for path in (first, "fedbench.engine.local.Step", "fedbench.engine.step.Step"):
        assert moved.original(path) == first and moved.current(path) == "fedbench.engine.step.Step"
    assert moved.original("fedbench.engine.optim.SGD") == "fedbench.optim.SGD"
    assert moved.current("mine.local.Step") == moved.original("mine.local.Step") == "mine.local.Step"
