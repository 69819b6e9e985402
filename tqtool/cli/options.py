"""Options of `validate` that are small languages: lists, layers, scale rules; and the command that repeats a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.codec.terms import ScaleRule

SHOWN_ONLY = {"--json", "-f", "--force", "-q", "--quiet", "-v", "-vv", "--verbose", "--no-progress"}
SHOWN_VALUES = {"--threads", "--color", "--format"}


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read a comma list of unsigned 64-bit numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text!r}: need numbers separated by commas", code="usage")
    if any(len(part) > 20 or int(part) >= 2**64 for part in parts):
        raise UsageError(f"{option} {text!r}: need 64-bit unsigned numbers", code="usage")
    numbers = tuple(map(int, parts))
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text!r}: a number stands there twice", code="usage")
    return numbers


def parse_layers(text: str, layers: Sequence[int]) -> tuple[int, ...]:
    """Read layer numbers, ranges (`0-3`), `firstN` and `lastN` of the data's layers."""
    found: set[int] = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        match = re.fullmatch(r"(?:(first|last)(\d{1,4})|(\d{1,6})(?:-(\d{1,6}))?)", part, re.ASCII)
        if match is None:
            raise UsageError(f"--protect-layers {part!r}: need a number, 3-5, first2 or last2", code="usage")
        end, count, low, high = match.groups()
        there = f"there are {', '.join(map(str, layers)) or 'none'}"
        if end and int(count) > len(layers):
            raise UsageError(f"--protect-layers {part!r}: more than all layers; {there}", code="usage")
        if end == "first":
            chosen = set(layers[: int(count)])
        elif end == "last":
            chosen = set(layers[len(layers) - int(count) :])
        else:
            chosen = {layer for layer in layers if int(low) <= layer <= int(high or low)}
        if not chosen:
            raise UsageError(f"--protect-layers {part!r}: no such layer; {there}", code="usage")
        found |= chosen
    return tuple(sorted(found))


def parse_rules(text: str) -> tuple[ScaleRule, ScaleRule]:
    """Read one scale rule for both sides, or two for keys and values."""
    from tqtool.codec.terms import SCALE_RULES

    parts = [part.strip() for part in text.split(",")]
    known = [rule for part in parts for rule in SCALE_RULES if rule == part]
    if len(known) != len(parts) or len(parts) > 2:
        raise UsageError(
            f"--scale-rule {text!r}: need one or two of {', '.join(SCALE_RULES)}",
            code="usage",
            hint="two rules are for keys and values, as in match,unbiased",
        )
    return known[0], known[-1]


def positive(value: float, option: str) -> float:
    """Return a number above zero."""
    if not 0 < value < float("inf"):
        raise UsageError(f"{option} {value}: need a number above 0", code="usage")
    return value


def reproduce(arguments: Sequence[str]) -> str:
    """Return the command that measures the same: options that only change what is shown or how fast are left out."""
    kept = []
    remaining = iter(arguments)
    for argument in remaining:
        option = argument.partition("=")[0]
        if option in SHOWN_VALUES or option.endswith("-out"):
            if "=" not in argument:
                next(remaining, None)
        elif option not in SHOWN_ONLY:
            kept.append(argument)
    return shlex.join(["tqtool", *kept])
