"""Describe exceptions of users' code in one sentence: type, message, layer and line."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import nn

import fedbench

FEDBENCH = Path(str(fedbench.__file__)).parent
# Beginnings of the paths of packages whose lines are omitted: the mistake is in a line of the user's code.
# They also cover torchvision and hydra_plugins, but no folder of the user such as fedbench_plugins.
PACKAGES = (*(str(Path(str(package.__file__)).parent) for package in (torch, hydra)), f"{FEDBENCH}{os.sep}")


def describe_error(error: BaseException, module: Any = None) -> str:
    """Return type, message and position of an exception in one line.

    Args:
        error: The exception.
        module: The model that was running, to name its layer.
    """
    message = " ".join(str(error).split())
    where = "; ".join(text for text in (_layer_in(error, module), _line_of(error)) if text)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f' ({where})' if where else ''}"


def running_layer(error: BaseException, module: Any = None) -> tuple[str, nn.Module] | None:
    """Return the innermost layer that was running when an exception was raised.

    Args:
        error: The exception.
        module: The model.  None: the outermost module that was running.

    Returns:
        The layer's name in the module ("" for the module itself) and the layer; None if no layer was running.
    """
    frames = traceback.walk_tb(error.__traceback__)
    # a layer was running if the traceback has a frame of one of its methods, whose local variable self is the layer
    running: list[Any] = [f.f_locals["self"] for f, _ in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    if not running:
        return None
    names = {id(m): name for name, m in (module or running[0]).named_modules()}
    return next(((names[id(m)], m) for m in reversed(running) if id(m) in names), None)


def is_raised_here(error: BaseException, within: str | Path = FEDBENCH) -> bool:
    """Return whether the line that raised an exception is in a given file or package.

    Args:
        error: The exception.
        within: The path of the file, or of the folder of the package.  Default: fedbench.
    """
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(within)


def is_raised_outside_layers(error: BaseException) -> bool:
    """Return whether an exception is a bug of fedbench: a line of fedbench raised it while no layer was running.

    False: the exception comes from the user's model or from a library.
    """
    return is_raised_here(error) and running_layer(error) is None


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that was running, as in "model.py, line 3"; "" if there is none.

    It is the innermost line of the traceback outside of PACKAGES: torch, Hydra and fedbench.
    """
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    # "<": code without a file, such as "<frozen importlib>"
    outside = [(name, line) for name, line in frames if not name.startswith((*PACKAGES, "<"))]
    return f"{Path(outside[-1][0]).name}, line {outside[-1][1]}" if outside else ""


def _layer_in(error: BaseException, module: Any) -> str:
    """Describe the layer that was running, as in "in body.0, a Linear".

    Return "" if the module itself or no layer was running, or if the module is None.
    """
    name, layer = (running_layer(error, module) if module is not None else None) or ("", None)
    return f"in {name}, a {type(layer).__name__}" if name else ""
