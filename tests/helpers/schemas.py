"""The JSON Schemas of fedbench/schemas: reading them, and validation of outputs."""

import json
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
