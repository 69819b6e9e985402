"""Gate files: limits in TOML or JSON."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import cast

from tqtool.errors import InputError
from tqtool.escapes import parser_reason
from tqtool.report.gates import LEVELS, Limit, Relation, known_metric
from tqtool.report.model import Level

MAX_GATE_FILE = 1 << 20  # bytes; a device may have no end


def load_limits(path: Path) -> tuple[Level, tuple[Limit, ...]]:
    """Read a gate file, TOML or JSON: `level = "balanced"` and tables `min` and `max` of metric = number."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_GATE_FILE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}", code="gate-config", path=str(path)) from error
    try:
        plain = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: neither TOML nor JSON: {parser_reason(error)}", code="gate-config", path=str(path)
        ) from error
    level = plain.pop("level", "none")
    limits: list[Limit] = []
    tables: tuple[tuple[str, Relation], ...] = (("min", ">="), ("max", "<="))
    for key, relation in tables:
        table = plain.pop(key, {})
        if not isinstance(table, dict) or not all(_is_number(value) for value in table.values()):
            raise InputError(f"{path}: {key} must be a table of numbers", code="gate-config", path=str(path))
        limits += [Limit(known_metric(metric), relation, float(value)) for metric, value in table.items()]
    if not plain and level == "none" and not limits:
        hint = 'write level = "balanced", or conditions under [min] and [max]'
        raise InputError(f"{path}: holds no limits", code="gate-config", hint=hint, path=str(path))
    if plain or level not in (*LEVELS, "none"):
        unknown = next(iter(plain)) if plain else f"level {level!r}"
        hint = "a gate file has level, [min] and [max]"
        raise InputError(f"{path}: {unknown} is not known", code="gate-config", hint=hint, path=str(path))
    return cast(Level, level), tuple(limits)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
