"""The words in which constructors and the config schema state what an option may be.

``def __init__(self, mu: NonNegative = 0.01)`` is at once documentation, type and range: the config
checker (config.py) reads these annotations from the source, without importing torch, and refuses a
value in one sentence.  At run time they are plain ``float``, ``int`` and so on.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

NonNegative = Annotated[float, ">= 0"]
Positive = Annotated[float, "> 0"]
Unbounded = Annotated[float, "> 0 or inf"]
Fraction = Annotated[float, "in (0, 1]"]
Share = Annotated[float, "in [0, 1)"]
Probability = Annotated[float, "in [0, 1]"]
Interior = Annotated[float, "in (0, 1)"]
Count = Annotated[int, ">= 1"]
Natural = Annotated[int, ">= 0"]
Pair = Annotated[int, ">= 2"]
Seed = Annotated[int, "from 0 to 4294967295"]  # of NumPy's RandomState
Device = Annotated[str, "that is auto, cpu, cuda, cuda:1 (any number) or mps"]
Folder = Annotated[str, "that names a folder"]
Name = Annotated[str, "of one line that does not begin with = + - or @"]

LARGEST = 2**63 - 1  # what an int64 holds
RANGES = {
    ">= 0": lambda v: 0 <= v <= LARGEST if isinstance(v, int) else 0 <= v < math.inf,
    "> 0": lambda v: 0 < v <= LARGEST if isinstance(v, int) else 0 < v < math.inf,
    "> 0 or inf": lambda v: v > 0,
    "in (0, 1]": lambda v: 0 < v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in (0, 1)": lambda v: 0 < v < 1,
    ">= 1": lambda v: 1 <= v <= LARGEST,
    ">= 2": lambda v: 2 <= v <= LARGEST,
    "from 0 to 4294967295": lambda v: 0 <= v < 2**32,
    "that names a folder": lambda v: v.strip() != "",
    "of one line that does not begin with = + - or @":  # which a spreadsheet would compute
    lambda v: v.isprintable() and not v.startswith(("=", "+", "-", "@")),
    "that is auto, cpu, cuda, cuda:1 (any number) or mps": re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch,
}


class ConfigError(ValueError):
    """A mistake of the user's: its text is the one sentence that is printed, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """IPython's: the lines that a notebook shows."""
        return [f"fedbench: {self}"]


class MissingColumns(ConfigError):
    """A method asks for a column group that the model does not declare: columns."""

    def __init__(self, sentence: str, columns: str):
        super().__init__(sentence)
        self.columns = columns


class RunError(ConfigError):
    """A run that cannot go on: the loss is not finite, a single client does not fit in memory."""


class PeerLost(RunError):
    """Another process of a run has ended without a word."""


def refused(error: OSError) -> str:
    """What the system said of a file, in one sentence."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def require(condition: bool, sentence: str) -> None:
    """Raise ConfigError(sentence) unless condition holds."""
    if not condition:
        raise ConfigError(sentence)


def check_each(key: str, values: Any, num_clients: int, what: str = "rates") -> None:
    """Refuse a list of another length than there are clients."""
    listed = len(values) if isinstance(values, Sequence) else num_clients
    require(
        listed == num_clients,
        f"{key} lists {listed:,} {what}, and there are {num_clients:,} clients to train: one "
        "each, or a single number for all",
    )


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in a sentence: "a, b, c", of more than `most` the first ones and how many there are."""
    names = list(names)
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, ... ({len(names)} in all)"


def require_distinct(names: Iterable[str], what: str) -> None:
    """Refuse a list with duplicate names, which would assign values to the wrong name."""
    names = list(names)
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    require(twice is None, f"{what} hold {twice} twice: {listed(names)}")
