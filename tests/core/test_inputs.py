"""Inputs of a model: one tensor or several by name."""

from __future__ import annotations

from typing import Any

import pytest

from fedbench.core.inputs import map_inputs, unwrap_inputs, wrap_inputs


def test_a_function_is_mapped_over_one_or_several() -> None:
    assert map_inputs(len, "ab") == 2
    assert map_inputs(len, {"x": "a", "y": "bcd"}) == {"x": 1, "y": 3}
    assert map_inputs(max, 1, 3, 2) == 3
    assert map_inputs(max, {"x": 1, "y": 2}, {"y": 1, "x": 3}) == {"x": 3, "y": 2}


@pytest.mark.parametrize("inputs", [1, {"image": 1, "text": 2}, {"inputs": 1}])
def test_unwrapping_gives_the_form_back(inputs: Any) -> None:
    named = wrap_inputs(inputs)
    assert isinstance(named, dict)
    assert unwrap_inputs(named, inputs) == inputs


def test_one_input_has_the_name_that_shared_inputs_use() -> None:
    assert wrap_inputs(1) == {"inputs": 1}
