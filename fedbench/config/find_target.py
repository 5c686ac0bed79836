"""Import the class or function that a ``_target_`` names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fedbench.config.conf_tree import nearest
from fedbench.core.options import ConfigError, listed, require


def find_target(target: str, key: str) -> Callable[..., Any]:
    """Import a class or function by its dotted path.

    Args:
        target: The path, ``package.module.Class``; or that of a function or a classmethod.
        key: The option, for messages, such as "model._target_".

    Raises:
        ConfigError: There is no such module or name, or the module cannot be imported.
    """
    parts = target.split(".")
    # the longest part of the path that is a module; none if two points follow each other
    for depth in range(len(parts) - 1 if all(parts) else 0, 0, -1):
        module = _import(".".join(parts[:depth]), key)
        # a module without origin is a folder without Python files, which Python imports as a namespace package
        if module is not None and getattr(module.__spec__, "origin", "") is not None:
            return _member(module, parts[depth:], key)
    raise ConfigError(
        f"{key}: there is no module for {target!r}: write package.module.Class; your own module must be importable "
        "from the working directory"
    )


def _member(module: ModuleType, names: list[str], key: str) -> Callable[..., Any]:
    """Return a member of a module, given by nested names.

    Args:
        module: The module.
        names: ["Net"] for a class, or ["Net", "small"] for its classmethod.
        key: The option, for messages.

    Raises:
        ConfigError: There is no such member, or it is a module or cannot be called.
    """
    path = ".".join([module.__name__, *names])
    modules = [name for _, name, _ in pkgutil.iter_modules(getattr(module, "__path__", ()))]  # inside of a package
    member: Any = module
    for name in names:
        member = getattr(member, name, None)
    if isinstance(member, ModuleType) or (member is None and names[0] in modules):
        raise ConfigError(f"{key}={path} is a module: add the name of a class in it, as in {path}.Class")
    if member is None:
        members = _defined_in(module) + modules
        hint = nearest(names[0], members) or f" it has {listed(members) or 'no classes'}"
        raise ConfigError(f"{key}: {module.__name__} has no {'.'.join(names)};{hint}")
    require(
        callable(member),
        f"{key}={path} is not a class or function, but of type {type(member).__name__}: name a class or function",
    )
    return member


def _import(name: str, key: str) -> ModuleType | None:
    """Import a module and return it; None if there is none of that name.

    Args:
        name: The dotted name of the module.
        key: The option, for messages.

    Raises:
        ConfigError: The module raises an exception when it is imported.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):  # this module or its package
            return None
        reason = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {name} cannot be imported: {type(error).__name__}: {reason} ({_position(error)}); correct this "
            "file, or install what it imports"
        ) from error


def _position(error: BaseException) -> str:
    """Return the path and line of an error's file, as in "/home/me/net.py, line 3".

    For a SyntaxError, it is the line with the wrong syntax; for other errors, the line that raised it.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _defined_in(module: ModuleType) -> list[str]:
    """Return the names of a module's public classes and functions, in the order of its file, without imported ones."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
