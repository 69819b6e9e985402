"""Inputs that fail in one clear line, and that can be read anywhere: pipes become files without a name."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from tqtool.errors import InputError, OutputError
from tqtool.files import STREAM, FilePath, copy_bytes, unnamed_temporary

Opened = contextlib.AbstractContextManager[BinaryIO]
Opener = Callable[[], Opened]


@dataclass(frozen=True, slots=True)
class Input:
    """One array that was read, and the file that held it."""

    path: str  # as the user named it
    sha256: str  # of the file
    shape: tuple[int, ...]
    dtype: str


def open_input(path: FilePath) -> BinaryIO:
    """Open an input for seekable, unbuffered reading; `-` and pipes go through an unnamed temporary.

    Raises: `InputError` with code `not-found`, `is-directory`, `empty-file` or `unreadable`.
    """
    if str(path) == STREAM:
        return _spooled(sys.stdin.buffer, shown_name(path))
    try:
        if Path(path).is_dir():
            hint = f"try {Path(path) / '*.npy'}"
            raise InputError(f"{path}: is a directory", code="is-directory", hint=hint, path=str(path))
        if stat.S_IFMT(os.stat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):  # noqa: PTH116 (its mode alone)
            hint = "copy what it holds to a file, or pipe it in as -"
            raise InputError(
                f"{path}: is a device, which may have no end", code="unreadable", hint=hint, path=str(path)
            )
        file = cast(BinaryIO, Path(path).open("rb", buffering=0))  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError:
        if Path(path).is_symlink():
            message = f"{path}: is a link to {Path(path).readlink()}, which does not exist"
            raise InputError(message, code="not-found", path=str(path)) from None
        raise InputError(f"{path}: no such file", code="not-found", hint=_nearest(path), path=str(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: {reason}", code="unreadable", path=str(path)) from error
    if not file.seekable() or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with file:
            return _spooled(file, str(path))
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise _empty(str(path))
    return file


class KeptOpen:
    """An opener that hands out one file again and again, and closes it when nobody can ask any more."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __call__(self) -> Opened:
        """Return the file for a `with` block, which leaves it open."""
        return contextlib.nullcontext(self._file)

    def __del__(self) -> None:
        self._file.close()


def reopening(
    path: FilePath, file: BinaryIO | None = None
) -> tuple[Opener, contextlib.AbstractContextManager[BinaryIO]]:
    """Return what opens an input again and again, and the input opened now, for a `with` block.

    A path is opened each time: a thousand files need no thousand descriptors. `file` is the input if it is open.
    """
    if file is None:
        file = open_input(path)
    if str(path) != STREAM and Path(path).is_file():
        return functools.partial(open_input, path), file
    kept = KeptOpen(file)
    return kept, kept()


def shown_name(path: FilePath) -> str:
    """Return what messages call an input."""
    return "stdin" if str(path) == STREAM else str(path)


def _spooled(source: IO[bytes], name: str) -> BinaryIO:
    file = unnamed_temporary()
    try:
        if not copy_bytes(source, file):
            raise _empty(name)
    except OSError as error:
        file.close()
        raise OutputError(f"{name}: no room for a temporary copy: {error.strerror}", code="write") from error
    file.seek(0)
    return file


def _empty(name: str) -> InputError:
    hint = "was the program that writes it interrupted?"
    return InputError(f"{name}: file is empty (0 bytes)", code="empty-file", hint=hint, path=name)


def _nearest(path: FilePath) -> str | None:
    """Return a hint that names the file somebody may have meant: at most two edits away, and less than half of it."""
    target = Path(path)
    with contextlib.suppress(OSError):
        most = min(2, (len(target.name) - 1) // 2)
        names = [near.name for near in target.parent.iterdir() if _edits(near.name, target.name) <= most]
        best = difflib.get_close_matches(target.name, names, n=1, cutoff=0.0)
        return f"did you mean {target.parent / best[0]}?" if best else None
    return None


def _edits(a: str, b: str) -> int:
    """Return the edit distance of two names."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
