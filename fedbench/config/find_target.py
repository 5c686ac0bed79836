"""Import the class or function that a ``_target_`` names."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fedbench.config.conf_tree import nearest
from fedbench.core.options import ConfigError, require


def find_target(target: str, key: str) -> Callable[..., Any]:
    """Import what a dotted path names.

    Args:
        target: ``package.module.Class``, or a function or classmethod.
        key: The key of the path, for sentences.

    Raises:
        ConfigError: There is no such module or name, or the module raises an error.
    """
    parts = target.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = _import(".".join(parts[:depth]), key)
        if module is None or getattr(module.__spec__, "origin", "") is None:  # a folder without __init__.py
            continue
        found: Any = module
        for name in parts[depth:]:
            found = getattr(found, name, None)
        if found is None or isinstance(found, ModuleType):
            known = _defined_in(module)
            name = ".".join(parts[depth:])
            hint = nearest(name, known) or f" it has {', '.join(known) or 'no classes'}"
            raise ConfigError(f"{key}: {module.__name__} has no {name};{hint}")
        require(callable(found), f"{key}={target} is no class or function")
        return found
    raise ConfigError(
        f"{key}: there is no module for {target!r} (write package.module.Class; a module of yours must be "
        "importable from where you start)"
    )


def _import(name: str, key: str) -> ModuleType | None:
    """Import a module; None where there is none of that name."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            return None
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {name} cannot be imported: {type(error).__name__}: {reason} ({_position(error)})"
        ) from error


def _position(error: BaseException) -> str:
    """Return file and line of an error in a module."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _defined_in(module: ModuleType) -> list[str]:
    """Return the names of the classes and functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    ]
