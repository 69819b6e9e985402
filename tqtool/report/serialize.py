"""The Report as JSON: `report_to_json` and `report_from_json` are exact inverses.

The keys are the field names of the dataclasses, in their order. NaN is written as null, and null in the place
of a float is read as NaN.
"""

import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

from tqtool.errors import InputError, IntegrityError, UsageError
from tqtool.escapes import parser_reason
from tqtool.report.model import SCHEMA, Report

T = TypeVar("T")
Leaf = TypeVar("Leaf")

DIGITS = 9
MAX_FLOAT = sys.float_info.max


def report_to_json(report: Report) -> str:
    """Return the report as JSON text: the schema, then the keys in the order of the dataclasses; NaN as null."""
    plain = {"schema": report.schema, **to_plain(report)}  # first, so that a reader of the file sees what it is
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def report_from_json(text: str, path: str = "report") -> Report:
    """Return the report that `report_to_json` wrote; keys it does not know are ignored.

    Raises InputError (code `report`) for anything that is not such a report, IntegrityError (code `format-newer`)
    for one of a later schema.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {parser_reason(error)}", code="report", path=path) from error
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if isinstance(schema, str) and _is_newer(schema):
        message = f"{path}: written as {schema}; this tqtool reads {SCHEMA}"
        raise IntegrityError(message, code="format-newer", path=path, hint="upgrade tqtool")
    if schema != SCHEMA:
        raise InputError(f"{path}: schema is {schema!r}, expected {SCHEMA!r}", code="report", path=path)
    try:
        return cast(Report, _from_plain(Report, plain, "report"))
    except (ValueError, UsageError) as error:  # options that no measurement can have had are no report's
        raise InputError(f"{path}: {error}", code="report", path=path) from error


def rounded(part: T) -> T:
    """Return the report, or a part of it, with every float to DIGITS significant digits.

    For metrics: the digits left out are far below any interval, and would be a quarter of a report. Bytes and bits
    are left as they are: they are exact.
    """
    return mapped(part, float, lambda value: float(f"{value:.{DIGITS}g}"))


def mapped(part: T, kind: type[Leaf], function: Callable[[Leaf], Leaf]) -> T:
    """Return the report, or a part of it, with `function` applied to every value and key of a type."""
    if isinstance(part, kind):
        return cast(T, function(part))
    if isinstance(part, tuple):
        return cast(T, tuple(mapped(item, kind, function) for item in part))
    if isinstance(part, Mapping):
        return cast(T, {mapped(k, kind, function): mapped(item, kind, function) for k, item in part.items()})
    if is_dataclass(part) and not isinstance(part, type):
        return cast(T, replace(part, **{f.name: mapped(getattr(part, f.name), kind, function) for f in fields(part)}))
    return part


def _is_newer(schema: str) -> bool:
    name, _, version = schema.rpartition("/")
    ours, _, known = SCHEMA.rpartition("/")
    return name == ours and version.isascii() and version.isdigit() and int(version[:9]) > int(known)


def to_plain(value: Any) -> Any:
    """Return dataclasses, mappings and tuples as the dicts and lists of JSON, NaN as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        assert not math.isinf(value)
        return None if math.isnan(value) else value
    return value


def _from_plain(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object")
        hints = typing.get_type_hints(kind)
        known = {}
        for f in fields(kind):
            if f.name in value:
                known[f.name] = _from_plain(hints[f.name], value[f.name], f"{where}.{f.name}")
            elif f.default is MISSING:  # a key added later has a default, so older reports stay readable
                raise ValueError(f"{where}: {f.name!r} is missing")
        return kind(**known)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list")
        return tuple(_from_plain(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object")
        return {_text(key, where): _from_plain(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is types.UnionType:  # X | None; a float | None is never NaN
        return None if value is None else _from_plain(args[0], value, where)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: {value!r} is none of {', '.join(map(str, args))}")
        return value
    if kind is float:
        if value is None:
            return math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_FLOAT <= value <= MAX_FLOAT:
            return float(value)
    elif kind is str and isinstance(value, str):
        return _text(value, where)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{where}: expected {kind.__name__}, found {value!r}")


def _text(value: str, where: str) -> str:
    """Return the string; half a surrogate pair is valid JSON, but no text that could be printed or written."""
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    raise ValueError(f"{where}: {value!r} is not valid text")
