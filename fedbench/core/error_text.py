"""An error in code that is not ours, told in one sentence: what was raised, in which layer, in which line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import nn

import fedbench

# Packages whose lines say nothing about where the user's mistake is.
PACKAGES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, hydra, fedbench))


def describe_error(error: BaseException, module: Any = None) -> str:
    """Type and whole message, newlines joined, and the place.  module: the model in which it was raised."""
    message = " ".join(str(error).split())
    where = "; ".join(place for place in (_layer_in(error, module), _line_of(error)) if place)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f' ({where})' if where else ''}"


def running_layer(error: BaseException, module: Any = None) -> tuple[str, nn.Module] | None:
    """The innermost layer of a module whose code was running when the error was raised, and its name in the module,
    "" for the module itself; None where none was.

    module: default the outermost one that was running.
    """
    frames = traceback.walk_tb(error.__traceback__)
    running: list[Any] = [f.f_locals["self"] for f, _ in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    if not running:
        return None
    names = {id(m): name for name, m in (module or running[0]).named_modules()}
    return next(((names[id(m)], m) for m in reversed(running) if id(m) in names), None)


def is_raised_here(error: BaseException, within: str = PACKAGES[-1]) -> bool:
    """Return whether the innermost line is one of fedbench, or of another file or package."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(within)


def is_raised_outside_layers(error: BaseException) -> bool:
    """Return whether the error is a mistake of fedbench: its own line raised it, and no layer was running."""
    return is_raised_here(error) and running_layer(error) is None


def _line_of(error: BaseException) -> str:
    """The innermost line outside of torch, Hydra and this package; '' where there is none."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    outside = [(name, line) for name, line in frames if not name.startswith((*PACKAGES, "<"))]
    return f"{Path(outside[-1][0]).name}, line {outside[-1][1]}" if outside else ""


def _layer_in(error: BaseException, module: Any) -> str:
    """The layer of the module that was running, in words; '' where that is the module itself."""
    name, layer = (running_layer(error, module) if module is not None else None) or ("", None)
    return f"in {name}, a {type(layer).__name__}" if name else ""
