"""Types that state in annotations what an option may be, and the errors of a user's mistake.

``def __init__(self, mu: NonNegative = 0.01)`` states documentation, type and range at once.
``fedbench.config`` checks a configuration against these annotations with pydantic.
At run time the values are plain ``float``, ``int`` and so on.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, Predicate, doc

LARGEST = 2**63 - 1  # what an int64 holds
_FINITE = Lt(math.inf)


def _is_folder(text: str) -> bool:
    return text.strip() != ""


def _is_name(text: str) -> bool:
    return text.isprintable() and not text.startswith(("=", "+", "-", "@"))  # a spreadsheet would compute these


def _is_device(text: str) -> bool:
    return re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text) is not None


NonNegative = Annotated[float, Ge(0), _FINITE, doc(">= 0")]
Positive = Annotated[float, Gt(0), _FINITE, doc("> 0")]
Unbounded = Annotated[float, Gt(0), doc("> 0 or inf")]
Fraction = Annotated[float, Gt(0), Le(1), doc("in (0, 1]")]
Share = Annotated[float, Ge(0), Lt(1), doc("in [0, 1)")]
Probability = Annotated[float, Ge(0), Le(1), doc("in [0, 1]")]
Interior = Annotated[float, Gt(0), Lt(1), doc("in (0, 1)")]
Count = Annotated[int, Ge(1), Le(LARGEST), doc(">= 1")]
Natural = Annotated[int, Ge(0), Le(LARGEST), doc(">= 0")]
Pair = Annotated[int, Ge(2), Le(LARGEST), doc(">= 2")]
Seed = Annotated[int, Ge(0), Lt(2**32), doc("from 0 to 4294967295")]  # of NumPy's RandomState
Device = Annotated[str, Predicate(_is_device), doc("that is auto, cpu, cuda, cuda:1 (any number) or mps")]
Folder = Annotated[str, Predicate(_is_folder), doc("that names a folder")]
Name = Annotated[str, Predicate(_is_name), doc("of one line that does not begin with = + - or @")]


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
