"""The keys of the JSON objects that commands print with --json, read from the schemas in fedbench/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class SchemaKey:
    """A key of a JSON object.

    Attributes:
        name: The path of the key: ``a.b`` is a key of the object ``a``, ``a[].b`` one of each entry of the list ``a``.
        type: The JSON type in words.
        meaning: The description, with the allowed values if they are limited.
    """

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class Schema:
    """The schema of one kind of JSON object.

    Attributes:
        kind: The name of its file, such as ``run``.
        title: What the object is.
        keys: Its keys, outer keys before those inside of them.
    """

    kind: str
    title: str
    keys: list[SchemaKey]


def read_schemas() -> list[Schema]:
    """Return all schemas of fedbench/schemas, sorted by kind."""
    schemas = []
    for path in sorted((files("fedbench") / "schemas").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            kind = path.name.removesuffix(".json")
            schema = json.loads(path.read_text(encoding="utf-8"))
            schemas.append(Schema(kind, schema["title"], list(_keys(schema))))
    return schemas


def _keys(schema: dict[str, Any], prefix: str = "") -> Iterator[SchemaKey]:
    """Yield the keys of an object, and those inside of it."""
    for name, part in schema.get("properties", {}).items():
        items = part.get("items", {})
        meaning = part["description"]
        if "const" in part:
            meaning += f": `{part['const']}`"
        if "enum" in part:
            meaning += ". One of " + ", ".join(f"`{value}`" for value in part["enum"])
        yield SchemaKey(f"{prefix}{name}", _type(part), meaning)
        yield from _keys(part, f"{prefix}{name}.")
        if "each has the keys" not in meaning:  # the runs of a sweep have the keys of a run
            yield from _keys(items, f"{prefix}{name}[].")


def _type(part: dict[str, Any]) -> str:
    """Return the type of a value in words, such as "array of strings"."""
    if "const" in part:
        return "string"
    types = part.get("type", "any")
    text = types if isinstance(types, str) else " or ".join(types)
    items = part.get("items", {}).get("type")
    return f"{text} of {items}s" if items else text
