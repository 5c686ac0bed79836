"""Inputs of models that read a text of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbench.core.options import require


def text_length(input_shape: Any, key: str) -> int:
    """Return T, the number of tokens of a sample, for a data set whose only input is a text of tokens.

    Args:
        input_shape: The shape of a sample, or of each of its inputs by name.
        key: The option and value that select the model, for the message, such as "model=gpt_tiny".

    Raises:
        ConfigError: The data set has other inputs.
    """
    shapes = input_shape if isinstance(input_shape, Mapping) else {"inputs": tuple(input_shape)}
    require(
        shapes.keys() == {"text"} and len(shapes["text"]) == 1,
        f"{key} needs one input, text [T] of tokens, but the data set gives "
        f"{', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())}: choose a data set of texts, such as "
        "dataset=shakespeare_lm",
    )
    return shapes["text"][0]
