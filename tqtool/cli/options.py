"""The options that commands share, and the small languages in them: lists, layers, scale rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.codec.terms import ScaleRule

LawName = Literal["beta", "sphere", "gaussian"]  # codebook.Law, without importing NumPy for --help
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ForceOption = Annotated[bool, typer.Option("-f", "--force", help="Replace existing files.")]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="PATH|DIR|-", help="File, existing folder, or - for stdout.", show_default=False
    ),
]
NameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="TENSOR",
        help="Only this tensor; may be repeated.",
        show_default=False,
    ),
]

ReportFormat = Literal["auto", "text", "tsv", "json", "markdown", "html", "junit"]

FormatOption = Annotated[
    ReportFormat, typer.Option("--format", help="What to print: auto is a table on a terminal, plain text off one.")
]
ReportJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; the same as --format json.")]
JsonOut = Annotated[Path | None, typer.Option("--json-out", metavar="FILE", help="Also write JSON.")]
MarkdownOut = Annotated[
    Path | None, typer.Option("--markdown-out", metavar="FILE", help="Also write Markdown, as for a CI step summary.")
]
HtmlOut = Annotated[Path | None, typer.Option("--html-out", metavar="FILE", help="Also write one HTML page.")]
JunitOut = Annotated[Path | None, typer.Option("--junit-out", metavar="FILE", help="Also write JUnit XML.")]
TsvOut = Annotated[Path | None, typer.Option("--tsv-out", metavar="FILE", help="Also write tab-separated values.")]


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


def integers(option: str, text: str, *, least: int = 0) -> list[int]:
    """Return the numbers of a comma list, none below `least`; each may stand there once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"{option} {text!r}: not a comma list of whole numbers", code="usage")
    numbers = [int(part) for part in parts]
    if min(numbers) < least:
        raise UsageError(f"{option} {text!r}: {min(numbers)} is below {least}", code="usage")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text!r}: a number stands there twice", code="usage")
    return numbers


def check_dims(dims: Sequence[int]) -> None:
    """Refuse lengths that no vector of ours can have, although their table exists."""
    from tqtool.codec.rotation import nearest_dims, supported_dims

    for dim in dims:
        if dim not in supported_dims():
            raise UsageError(
                f"--dims {dim}: no Hadamard matrix of that order is built",
                code="usage",
                hint="nearest supported: " + ", ".join(map(str, nearest_dims(dim))),
            )
