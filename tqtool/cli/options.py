"""The options that commands share, and the small languages in them: lists, layers, scale rules.

No NumPy here: the help of every command loads this module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from tqtool.codec.terms import META_PARTS, SCALE_RULES, Law, Meta, ScaleRule
from tqtool.errors import UsageError

TensorType = Literal["bf16"]
ReportFormat = Literal["auto", "text", "tsv", "json", "markdown", "html", "junit"]

META_BYTES = [str(part.nbytes) for part in META_PARTS.values()]
MOST = 10**9  # of a number in a list, unless it is said; beyond any length, width or count

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
    typer.Option("--name", metavar="TENSOR", help="Only this tensor; may be repeated.", show_default=False),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="Axes in order, as htd: heads, tokens, dim; also nd, bhtd, lhtd, hdt …",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    TensorType | None, typer.Option("--dtype", help="Take 2-byte data for bfloat16.", show_default=False)
]
DimsOption = Annotated[str, typer.Option("--dims", metavar="LIST", help="Vector lengths, comma list.")]
BitsOption = Annotated[
    str, typer.Option("--bits", metavar="LIST", help="Bits a coordinate, comma list; C tables take 1 to 4.")
]
LawOption = Annotated[
    Law,
    typer.Option("--law", help="Law of a coordinate: Beta(d/2), the exact sphere marginal, or the normal limit."),
]
ScaleRuleOption = Annotated[
    str,
    typer.Option(
        "--scale-rule",
        metavar="RULE[,RULE]",
        help=f"{', '.join(SCALE_RULES[:-1])} or {SCALE_RULES[-1]}; or two, keys then values: match,unbiased",
    ),
]
MetaOption = Annotated[
    Meta,
    typer.Option("--meta", help=f"Metadata a vector: {', '.join(META_BYTES[:-1])} or {META_BYTES[-1]} bytes."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the rotation's signs.")]

# Of the model that `capture` and `eval` load.
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda:0 …; auto: a GPU if there is one.")]
TorchDtypeOption = Annotated[
    Literal["auto", "f32", "f16", "bf16"],
    typer.Option(help="What the model computes in; auto: as its weights say."),
]
DeviceMapOption = Annotated[
    str | None, typer.Option(metavar="MAP", help="Spread the model by accelerate, as auto.", show_default=False)
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)]
GgufOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="A GGUF file of the folder or repository.", show_default=False)
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Contact no hub; its local cache serves.")]
RemoteCodeOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that came with the model.")]

FormatOption = Annotated[
    ReportFormat, typer.Option("--format", help="What to print: auto is a table on a terminal, plain text off one.")
]
ReportJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; the same as --format json.")]
JsonOut = Annotated[Path | None, typer.Option("--json-out", metavar="FILE", help="Also write JSON.")]
MarkdownOut = Annotated[
    Path | None,
    typer.Option(
        "--markdown-out", metavar="FILE", help="Also write Markdown; $GITHUB_STEP_SUMMARY is added to, not replaced."
    ),
]
HtmlOut = Annotated[Path | None, typer.Option("--html-out", metavar="FILE", help="Also write one HTML page.")]
JunitOut = Annotated[Path | None, typer.Option("--junit-out", metavar="FILE", help="Also write JUnit XML.")]
TsvOut = Annotated[Path | None, typer.Option("--tsv-out", metavar="FILE", help="Also write tab-separated values.")]


def integers(option: str, text: str, *, least: int = 0, most: int = MOST) -> tuple[int, ...]:
    """Return the numbers of a comma list, from `least` to `most`; each may stand there once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text!r}: not a comma list of whole numbers", code="usage")
    if longest := next((part for part in parts if len(part) > len(str(most)) or int(part) > most), None):
        raise UsageError(f"{option} {text!r}: {longest} is above {most}", code="usage")
    numbers = tuple(map(int, parts))
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


def parse_span(option: str, text: str | None) -> tuple[int, int] | None:
    """Read A:B, the first number and one past the last."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text.strip(), re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option} {text!r}: need A:B with A below B, as in 0:300", code="usage")
    return int(match[1]), int(match[2])


def parse_rules(text: str) -> tuple[ScaleRule, ScaleRule]:
    """Read one scale rule for both sides, or two for keys and values."""
    parts = [part.strip() for part in text.split(",")]
    known = [rule for part in parts for rule in SCALE_RULES if rule == part]
    if len(known) != len(parts) or len(parts) > 2:
        raise UsageError(
            f"--scale-rule {text!r}: need one or two of {', '.join(SCALE_RULES)}",
            code="usage",
            hint="two rules are for keys and values, as in match,unbiased",
        )
    return known[0], known[-1]
