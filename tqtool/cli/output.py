"""What goes where: the answer to stdout, everything else to stderr.

Commands call `answer`, `note`, `warn` and `progress`; nothing else in the package prints.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from tqtool.errors import OutputError
from tqtool.escapes import visible, visible_page
from tqtool.files import STREAM

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


def prepare_streams() -> None:
    """Make the standard streams usable whatever the caller left of them: closed, or unable to spell a name.

    A closed one becomes the null device under its own number, lest a file of ours take that: of stdin and stderr
    nothing is missed, and writing to stdout fails as it should.
    """
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            file = os.fdopen(number, "wb" if number else "rb", buffering=0, closefd=False)  # keeps nothing back at exit
            setattr(sys, name, io.TextIOWrapper(file, write_through=True))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may hold any bytes


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
    text = visible_page(text, color=stdout_has_color() or stdout_is_terminal())
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:  # a full disk behind a redirection; a closed pipe has ended us before
        raise OutputError(f"standard output: {error.strerror}", code="write") from error


def answer_json(value: Any) -> None:
    """Print one JSON document to stdout; NaN is not JSON and may not be in it."""
    answer(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def result(line: str, target: str) -> None:
    """Print the line about a written file: the answer, unless the data themselves go to stdout."""
    (note if target == STREAM else answer)(line)


def note(text: str, *, level: int = 0) -> None:
    """Print a line to stderr, unless --quiet; level 1 needs -v, level 2 needs -vv."""
    if not _settings.quiet and _settings.verbose >= level:
        print(f"tqtool: {visible(text)}", file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning to stderr, --quiet or not."""
    label = "\x1b[33mwarning\x1b[0m" if _has_color(sys.stderr) else "warning"
    print(f"tqtool: {label}: {visible(text)}", file=sys.stderr)


def print_error(code: str, message: str, hint: str | None) -> None:
    """Print an error in the form of docs/errors.md to stderr."""
    colored = _has_color(sys.stderr)
    label = f"\x1b[31merror[{code}]\x1b[0m" if colored else f"error[{code}]"
    print(f"tqtool: {label}: {visible(message)}", file=sys.stderr)
    if hint:
        print(
            "\n".join(
                f"  {'hint: ' if i == 0 else '      '}{visible(line)}" for i, line in enumerate(hint.split("\n"))
            ),
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
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(visible(description), total=total)
    begun = monotonic()

    def advance(amount: float) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and monotonic() - begun > 1:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
