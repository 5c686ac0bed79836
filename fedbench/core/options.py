"""Types for annotations of options, with their ranges, and the errors for mistakes of users.

``def __init__(self, mu: NonNegative = 0.01)`` declares type and range of the option ``mu``.  ``fedbench.config`` checks
a configuration against such annotations by pydantic.  At run time, values are plain ``float``, ``int`` and so on.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, Predicate, doc

LARGEST = 2**63 - 1  # the largest int64
_FINITE = Lt(math.inf)


def _is_folder(text: str) -> bool:
    return text.strip() != ""


def _is_name(text: str) -> bool:
    return text.isprintable() and not text.startswith(("=", "+", "-", "@"))  # formulas in spreadsheets


def _is_device(text: str) -> bool:
    return re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text) is not None


NonNegative = Annotated[float, Ge(0), _FINITE, doc(">= 0")]
Positive = Annotated[float, Gt(0), _FINITE, doc("> 0")]
PositiveOrInf = Annotated[float, Gt(0), doc("> 0 or inf")]
Fraction = Annotated[float, Gt(0), Le(1), doc("in (0, 1]")]
UnitInterval = Annotated[float, Ge(0), Lt(1), doc("in [0, 1)")]
Probability = Annotated[float, Ge(0), Le(1), doc("in [0, 1]")]
OpenUnit = Annotated[float, Gt(0), Lt(1), doc("in (0, 1)")]
Count = Annotated[int, Ge(1), Le(LARGEST), doc(">= 1")]
NonNegativeInt = Annotated[int, Ge(0), Le(LARGEST), doc(">= 0")]
AtLeast2 = Annotated[int, Ge(2), Le(LARGEST), doc(">= 2")]
Seed = Annotated[int, Ge(0), Lt(2**32), doc("from 0 to 4294967295")]  # the range of NumPy's RandomState
Device = Annotated[str, Predicate(_is_device), doc("that is auto, cpu, cuda, cuda:1 (any number) or mps")]
Folder = Annotated[str, Predicate(_is_folder), doc("that names a folder")]
Name = Annotated[str, Predicate(_is_name), doc("of one line that does not begin with = + - or @")]


class ConfigError(ValueError):
    """A mistake of the user, for example in an option.  Commands print its message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback: a list with the message."""
        return [f"fedbench: {self}"]


class MissingColumns(ConfigError):
    """A method needs a column group that the model does not have.

    Args:
        sentence: The message.
        columns: The name of the column group.
    """

    def __init__(self, sentence: str, columns: str):
        super().__init__(sentence)
        self.columns = columns


class RunError(ConfigError):
    """A run cannot continue, for example because the loss is not finite or a client does not fit in memory."""


class PeerLost(RunError):
    """Another process of the run died."""


def refused(error: OSError) -> str:
    """Return the file and the system's message of an OSError, as in "data.csv: Permission denied".

    Return the error's own text if it names no file.
    """
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def require(condition: bool, sentence: str) -> None:
    """Raise a ConfigError with a message unless a condition is true.

    Args:
        condition: The condition.
        sentence: The message.
    """
    if not condition:
        raise ConfigError(sentence)


@contextmanager
def error_prefix(source: str) -> Iterator[None]:
    """Put the option or file at fault in front of a ConfigError of the block: "<source>: <message>".

    Args:
        source: The option or file, such as "dataset.path=data.npz".
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def check_each(key: str, values: Any, num_clients: int, what: str = "rates") -> None:
    """Check that an option is one value or a list with one value per client.

    Args:
        key: The option, for the message.
        values: The value of the option: a list, or anything else for one value.
        num_clients: The number of training clients.
        what: What the list consists of, in the plural, for the message.

    Raises:
        ConfigError: The list has another length.
    """
    count = len(values) if isinstance(values, Sequence) else num_clients
    require(
        count == num_clients,
        f"{key} lists {count:,} {what}, and there are {num_clients:,} clients to train: list one per client, or give "
        "one value for all",
    )


def listed(names: Iterable[str], most: int = 12) -> str:
    """Join names by commas: "a, b, c", or "a, b, ... (20 in total)" if there are too many.

    Args:
        names: The names.
        most: The largest number of names to list.
    """
    names = list(names)
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, ... ({len(names)} in total)"


def require_distinct(names: Iterable[str], what: str) -> None:
    """Check that names are distinct, so that no value is assigned to the wrong one.

    Args:
        names: The names.
        what: What the names are, for the message, such as "the class names".

    Raises:
        ConfigError: A name occurs twice.
    """
    names = list(names)
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    require(twice is None, f"{what} must be distinct, but {twice} occurs twice in {listed(names)}: rename one of them")
