"""What goes where: the answer to stdout, everything else to stderr.

Commands call `answer`, `note`, `warn` and `progress`; nothing else in the package prints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from tqtool.errors import OutputError

Color = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The global options."""

    threads: int | None = None  # None: all cores
    quiet: bool = False
    verbose: int = 0
    color: Color = "auto"
    progress: bool = True


_settings = Settings()


def settings() -> Settings:
    """Return the global options of this run."""
    return _settings


def configure(chosen: Settings) -> None:
    """Set the global options; called once, by the application's callback."""
    global _settings
    _settings = chosen


def _has_color(stream: TextIO) -> bool:
    if _settings.color != "auto":
        return _settings.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def stdout_has_color() -> bool:
    """Return whether the answer may be coloured."""
    return _has_color(sys.stdout)


def stdout_is_terminal() -> bool:
    """Return whether a person reads stdout, so that lines and boxes help."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def answer(text: str) -> None:
    """Print the command's answer, or a part of it, to stdout."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:  # a full disk behind a redirection; a closed pipe has ended us before
        raise OutputError(f"standard output: {error.strerror}", code="write") from error


def answer_json(value: Any) -> None:
    """Print one JSON document to stdout; NaN is not JSON and may not be in it."""
    answer(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def note(text: str, *, level: int = 0) -> None:
    """Print a line to stderr, unless --quiet; level 1 needs -v, level 2 needs -vv."""
    if not _settings.quiet and _settings.verbose >= level:
        print(f"tqtool: {text}", file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning to stderr, --quiet or not."""
    label = "\x1b[33mwarning\x1b[0m" if _has_color(sys.stderr) else "warning"
    print(f"tqtool: {label}: {text}", file=sys.stderr)


def print_error(code: str, message: str, hint: str | None) -> None:
    """Print an error in the form of docs/errors.md to stderr."""
    colored = _has_color(sys.stderr)
    label = f"\x1b[31merror[{code}]\x1b[0m" if colored else f"error[{code}]"
    print(f"tqtool: {label}: {message}", file=sys.stderr)
    if hint:
        print(
            "\n".join(f"  {'hint: ' if i == 0 else '      '}{line}" for i, line in enumerate(hint.split("\n"))),
            file=sys.stderr,
        )


@contextmanager
def progress(description: str, total: float | None, *, unit_bytes: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a bar on stderr while the block runs; yields `advance(amount)`.

    Only on a terminal, and only once a second has passed, so short work stays silent. With `unit_bytes` the rate is
    shown in bytes a second.
    """
    shown = _settings.progress and not _settings.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if not shown:
        yield lambda amount: None
        return
    from time import monotonic

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if unit_bytes else (MofNCompleteColumn(),)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(description, total=total)
    begun = monotonic()

    def advance(amount: float) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and monotonic() - begun > 1:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
