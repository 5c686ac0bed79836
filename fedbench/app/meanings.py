"""Read descriptions of options from the docstrings of their classes, without importing the classes.

So --help needs neither torch nor time.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from pathlib import Path

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*(?:\n|$)|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def of_target(target: str) -> dict[str, str]:
    """Return descriptions of options from the docstring of a class and of its base classes in the same file.

    Args:
        target: The dotted path of the class.

    Returns:
        Descriptions by option; empty if there is no Python file of that module.
    """
    module, _, name = target.rpartition(".")
    path = _source(module)
    tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return _of_class(name, classes)


def of_docstring(docstring: str) -> dict[str, str]:
    """Return {name: description} of the sections Args and Attributes of a docstring; {} without these sections."""
    entries = [entry for section in SECTION.findall(inspect.cleandoc(docstring)) for entry in ENTRY.findall(section)]
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def _of_class(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Return a dict from option to description, from the docstrings of a class and of its base classes.

    Args:
        name: The name of the class.  If it is not in the file, the dict is empty.
        classes: A dict from name to class, for the classes of the file.
    """
    if name not in classes:
        return {}
    bases = [_of_class(base.id, classes) for base in classes[name].bases if isinstance(base, ast.Name)]
    of_bases = {option: text for base in reversed(bases) for option, text in base.items()}
    return {**of_bases, **of_docstring(ast.get_docstring(classes[name]) or "")}


def _source(module: str) -> Path | None:
    """Return the file of a module without importing it; None if it is neither on sys.path nor in the working directory.

    Args:
        module: The dotted name, such as "my_package.my_module".
    """
    name = module.replace(".", "/")
    files = (f"{name}.py", f"{name}/__init__.py")
    paths = (Path(folder, file) for folder in [*sys.path, os.getcwd()] for file in files)
    return next((path for path in paths if path.is_file()), None)
