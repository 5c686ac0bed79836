"""Output of commands as JSON (``--json``): one object on standard output, whose key ``schema`` names its keys.

    print_json("compare", {"metric": "personal/accuracy", "pairs": [...]})     # {"schema": "fedbench/compare/1", ...}

The keys of each kind are described by ``fedbench/schemas/<kind>.json`` (docs/json.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

JSON_FLAG = "--json"
VERSION = 1  # of all kinds; it changes when a key is removed or gets another meaning


def json_text(kind: str, data: Mapping[str, Any]) -> str:
    """Return data as one line of text, a JSON object and a newline.

    Args:
        kind: The kind of the object, such as "report": the name of its schema in ``fedbench/schemas``.
        data: The keys and values.  NaN and infinite numbers become null, paths text, and arrays lists.
    """
    from pydantic_core import to_json

    values = {"schema": f"fedbench/{kind}/{VERSION}", **data}
    return to_json(values, inf_nan_mode="null", fallback=_from_numpy).decode() + "\n"


def print_json(kind: str, data: Mapping[str, Any]) -> None:
    """Print data as one JSON object.

    Args:
        kind: The kind of the object, such as "report".
        data: The keys and values.
    """
    print(json_text(kind, data), end="", flush=True)


def print_error(error: BaseException, message: str, exit_code: int) -> None:
    """Print the JSON object of a command that failed.

    Args:
        error: The exception.
        message: One sentence about it.
        exit_code: The exit status of the command.
    """
    print_json("error", {"error": {"type": type(error).__name__, "message": message}, "exit_code": exit_code})


@contextmanager
def output_on_stderr() -> Iterator[None]:
    """Send what the block and the processes that it starts print to standard error instead of standard output."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1)  # 1 and 2: the descriptors of standard output and standard error
    os.dup2(2, 1)  # for processes of a launcher, and libraries in C
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _from_numpy(value: Any) -> Any:
    """Return a NumPy array as nested lists, and a NumPy scalar as a number.  AttributeError for other values."""
    return value.tolist()
