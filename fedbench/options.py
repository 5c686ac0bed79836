"""The words in which constructors and the config schema state what an option may be.

``def __init__(self, mu: NonNegative = 0.01)`` is at once documentation, type and range: the config
checker (config.py) reads these annotations from the source, without importing torch, and refuses a
value in one sentence.  At run time they are plain ``float``, ``int`` and so on.
"""

import re
from typing import Annotated

NonNegative = Annotated[float, ">= 0"]
Positive = Annotated[float, "> 0"]
Fraction = Annotated[float, "in (0, 1]"]
Share = Annotated[float, "in [0, 1)"]
Probability = Annotated[float, "in [0, 1]"]
Interior = Annotated[float, "in (0, 1)"]
Count = Annotated[int, ">= 1"]
Natural = Annotated[int, ">= 0"]
Pair = Annotated[int, ">= 2"]
Device = Annotated[str, "that is auto, cpu, cuda, cuda:1 (any number) or mps"]
Folder = Annotated[str, "that names a folder"]
Name = Annotated[str, "of one line that does not begin with = + - or @"]

RANGES = {
    ">= 0": lambda v: v >= 0,
    "> 0": lambda v: v > 0,
    "in (0, 1]": lambda v: 0 < v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in (0, 1)": lambda v: 0 < v < 1,
    ">= 1": lambda v: v >= 1,
    ">= 2": lambda v: v >= 2,
    "that names a folder": lambda v: v.strip() != "",
    "of one line that does not begin with = + - or @":  # which a spreadsheet would compute
        lambda v: v.isprintable() and not v.startswith(("=", "+", "-", "@")),
    "that is auto, cpu, cuda, cuda:1 (any number) or mps": re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch,
}


class ConfigError(ValueError):
    """A mistake of the user's: its text is the one sentence that is printed, without a traceback."""


class RunError(ConfigError):
    """A run that cannot go on: the loss is not finite, a single client does not fit in memory."""


def require(condition: bool, sentence: str) -> None:
    """Raise ConfigError(sentence) unless condition holds."""
    if not condition:
        raise ConfigError(sentence)
