"""Write values in the grammar of Hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNQUOTED = re.compile(r"[A-Za-z_./][\w./:@%+-]*", re.ASCII)  # texts that need no quotes ...
OTHER = re.compile(r"(?i)null|true|false|inf|nan|\.\d.*")  # ... except these, which would not be read as text
QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# ~ or ~/... as a value or an item of one.  Quoted text is matched first, so that it is not changed.
HOME = re.compile(QUOTED + r"|(^|(?<!\\)[,\[:]\s*)(~(?:/[^,\[\]{}'\"]*)?)(?=$|[,\]}])")


def value_text(value: Any) -> str:
    """Return a number, text, None, list or dict as text that Hydra parses to the same value, as in {a:1,b:[x,y]}."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{quoted(name)}:{value_text(item)}" for name, item in value.items()) + "}"
    return f"[{','.join(map(value_text, value))}]"


def quoted(text: str) -> str:
    """Return a text as Hydra parses it: in quotes if it has special characters or would be read as a number or null."""
    if UNQUOTED.fullmatch(text) and not OTHER.fullmatch(text):  # OTHER: null, numbers and the like
        return text
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", text)  # backslashes are doubled before quotes only
    ending = re.search(r"\\*$", escaped)  # the backslashes before the closing quote, which are repeated
    return f"'{escaped}{ending[0] if ending else ''}'"


def with_home(text: str) -> str:
    """Return an override such as ``key=~/x`` with the user's home folder in place of each ``~`` that begins a path."""
    key, equals, value = text.partition("=")
    return key + equals + HOME.sub(_expanded, value)


def _expanded(match: re.Match[str]) -> str:
    """Return the text that replaces a match of `HOME`: ``~`` with the home folder, or quoted text unchanged."""
    before, path = match.groups()
    return match[0] if path is None else before + quoted(str(Path(path.rstrip()).expanduser()))
