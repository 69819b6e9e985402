"""The JSON Schema of a report, made from the dataclasses that define it.

`python -m tqtool.rendering.report.schema > tqtool/data/report.schema.json` refreshes the shipped
file; a test compares them.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal

from tqtool.report.model import SCHEMA, Report

NAMES: Mapping[Any, str] = {str: "string", int: "integer", bool: "boolean"}


def report_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12: every key of today is described, keys that are added later are allowed."""
    definitions: dict[str, Any] = {}
    root = _object(Report, definitions)
    root["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tqtool validate report",
        "description": "Keys are only ever added within one schema number. A number that was not measured is null.",
        **root,
        "$defs": definitions,
    }


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {
        "type": "object",
        "properties": {f.name: _schema(hints[f.name], definitions) for f in fields(kind)},
        "required": [f.name for f in fields(kind) if f.default is MISSING],
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}  # holds the place against a type that contains itself
            definitions[name] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if origin is types.UnionType:
        return {"anyOf": [_schema(args[0], definitions), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(args)}
    return {"type": ["number", "null"]} if kind is float else {"type": NAMES[kind]}


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=1))
