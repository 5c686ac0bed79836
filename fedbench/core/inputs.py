"""Inputs of a model: one tensor, or a dict of named tensors.

The two forms are told apart here.  Other modules ask for the dict, or map a function over the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEFAULT_NAME = "inputs"  # name of the input of a data set that gives one array and no name


def wrap_inputs(inputs: Any) -> dict[str, Any]:
    """Return the inputs of a model as a dict by name: a dict unchanged, and one tensor as {DEFAULT_NAME: tensor}."""
    return inputs if isinstance(inputs, dict) else {DEFAULT_NAME: inputs}


def unwrap_inputs(named: dict[str, Any], given: Any) -> Any:
    """Undo `wrap_inputs`, which puts a single tensor into a dict.

    Args:
        named: Inputs by name, such as processed results of `wrap_inputs`.
        given: The inputs that `wrap_inputs` was given.  Only its form matters.

    Returns:
        named if given is a dict, else the one tensor in named.
    """
    return named if isinstance(given, dict) else named[DEFAULT_NAME]


def map_inputs(function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
    """Apply a function to the tensor, or to each tensor of the dict.

    Args:
        function: Called with a tensor of ``inputs``, followed by the tensors of that name in ``others``.
        inputs: A tensor, or a dict of tensors by name.
        others: Further inputs of the same form.

    Returns:
        The results, in the form of the inputs.
    """
    if isinstance(inputs, dict):
        return {name: function(value, *(other[name] for other in others)) for name, value in inputs.items()}
    return function(inputs, *others)
