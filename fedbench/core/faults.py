"""A fault in code that is not ours, told in one sentence: what was raised, in which layer, in which line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import hydra
import torch

import fedbench

# Whose lines say nothing about where the user's mistake is.
ASIDE = tuple(str(Path(str(package.__file__)).parent) for package in (torch, hydra, fedbench))


def told(error: BaseException, module: Any = None) -> str:
    """Type and whole message, newlines joined, and the place; module: the model in which it was raised."""
    said = " ".join(str(error).split())
    where = "; ".join(part for part in (_layer(error, module), _line(error)) if part)
    return f"{type(error).__name__}{f': {said}' if said else ''}{f' ({where})' if where else ''}"


def _line(error: BaseException) -> str:
    """The innermost line outside of torch, Hydra and this package; '' where there is none."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if not name.startswith((*ASIDE, "<"))]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else ""


def _layer(error: BaseException, module: Any) -> str:
    """The innermost layer of the module that was being computed; '' where that is the module itself."""
    names = {id(m): (name, type(m).__name__) for name, m in module.named_modules()} if module is not None else {}
    met = [id(f.f_locals.get("self")) for f, _ in traceback.walk_tb(error.__traceback__)]
    name, kind = next((names[one] for one in reversed(met) if one in names), ("", ""))
    return f"in {name}, a {kind}" if name else ""
