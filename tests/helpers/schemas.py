"""The JSON Schemas of fedbench/schemas: validation of outputs, and their tables in docs/json.md."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = files("fedbench") / "schemas"
KINDS = sorted(path.name.removesuffix(".json") for path in FOLDER.iterdir() if path.name.endswith(".json"))


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind of object."""
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


def validated(text: str, kind: str) -> dict[str, Any]:
    """The one JSON object of a text, after validation by its schema; NaN and Infinity are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read["schema"] == f"fedbench/{kind}/1"
    Draft202012Validator(schema_of(kind)).validate(read)
    return read


def table_of(kind: str) -> str:
    """The Markdown table of the keys of a kind, with dotted keys; [] marks the entries of a list."""
    rows = [f"| `{key}` | {types} | {meaning} |" for key, types, meaning in _keys(schema_of(kind))]
    return "\n".join(["| key | type | meaning |", "| --- | --- | --- |", *rows])


def _keys(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, type and meaning of each property, and of those inside of it."""
    for name, part in schema.get("properties", {}).items():
        types = part.get("type", [])
        text = " or ".join([types] if isinstance(types, str) else types)
        meaning = part["description"]
        if "const" in part:
            text, meaning = "string", f"`{part['const']}`"
        if "enum" in part:
            meaning += ": " + ", ".join(f"`{value}`" for value in part["enum"])
        items = part.get("items", {})
        text += f" of {items['type']}s" if items else ""
        yield f"{prefix}{name}", text or "any", meaning
        if "required" in part:
            yield from _keys(part, f"{prefix}{name}.")
        if "required" in items and "each has the keys" not in meaning:
            yield from _keys(items, f"{prefix}{name}[].")
