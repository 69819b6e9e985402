"""The command lines that a report holds: the one that measures the same again, and the one to try next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqtool.report.model import Finding, Report

SHOWN_ONLY = {"--json", "-f", "--force", "-q", "--quiet", "-v", "-vv", "--verbose", "--no-progress"}
SHOWN_VALUES = {"--threads", "--color", "--format"}


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


def next_command(report: Report, found: Sequence[Finding]) -> str:
    """Return one command to copy, fitted to what was found, or ""."""
    from tqtool.validation.diagnosis import BOUNDARY

    dumps = [source for source in report.sources if source.kind == "dump"]
    if not dumps or not report.command:
        return ""
    source = dumps[0]
    if source.query_source == "proxy":
        return f"{report.command} --q QUERIES.npy"
    if source.name == "sample":
        return "tqtool validate FOLDER   # with layer07_k.npy, layer07_v.npy, layer07_q.npy, one of each a layer"
    if all(row.kind == "control" for row in report.rows):
        return without_config(report.command)
    if any(one.rule == "key_offset" and one.source == source.name for one in found):
        return f"{report.command} --center-keys"
    if any(one.rule == "boundary_layers" and one.source == source.name for one in found):
        return f"{report.command} --protect-layers first{BOUNDARY},last{BOUNDARY}"
    if report.gate.name != "none":
        return "" if report.gate.passed or report.recommendations else f"{report.command} --recommend"
    good = [row for row in report.rows if row.source == source.name and row.level in ("balanced", "strict")]
    good = [row for row in good if row.kind == "turboquant"]
    if not good:
        return "" if report.recommendations else f"{report.command} --recommend"
    best = min(good, key=lambda row: row.bits_per_value)
    return f"{without_config(report.command)} -c {best.config} --gate balanced"


def without_config(command: str) -> str:
    """Return the command without its -c or --config."""
    kept = []
    remaining = iter(shlex.split(command))
    for word in remaining:
        if word in ("-c", "--config"):
            next(remaining, None)
        elif not word.startswith("--config="):
            kept.append(word)
    return shlex.join(kept)
