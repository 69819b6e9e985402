"""Inputs that fail in one clear line, and that can be read anywhere: pipes become files without a name.

An input that is opened again and again is the same file each time, unchanged, or the work stops: no result is made of
two versions of a file.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tqtool.errors import InputError, TqError
from tqtool.files import STREAM, FilePath, naming_temporary
from tqtool.rawfiles import COPY_BLOCK, WholeFile, copy_bytes, unnamed_temporary

Opened = contextlib.AbstractContextManager["InputFile"]
Opener = Callable[[], Opened]
Identity = tuple[int, int, int, int]  # device, inode, bytes, time of the last change in ns
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Input:
    """One array that was read, and the file that held it."""

    path: str  # as the user named it
    sha256: str  # of the file
    shape: tuple[int, ...]
    dtype: str


class InputFile(WholeFile):
    """A file opened for reading. What the system refuses is an `InputError` that names it, code `unreadable`.

    A `with` block that ends while the file is no longer what it was when it was opened is an `InputError`, `changed`.
    """

    def __init__(self, place: FilePath | int, label: str) -> None:
        """Open a path, or take over a descriptor; messages call it `label`. `OSError` if it cannot be opened."""
        self.label = label
        super().__init__(place, "rb")
        with naming(label):
            self.identity = _identity(os.fstat(self.fileno()))

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self.identity[2]

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, fewer at the end alone; all that are left if `size` is negative."""
        with naming(self.label):
            return super().read(size)

    def seek(self, position: int, whence: int = 0, /) -> int:
        """Move to a position; `OSError` for one before the start, which is the caller's mistake."""
        with naming(self.label, but=(errno.EINVAL,)):
            return super().seek(position, whence)

    def tell(self) -> int:
        """Return the position."""
        with naming(self.label):
            return super().tell()

    def read_at(self, view: memoryview, position: int) -> None:
        """Fill a view of bytes from `position` on."""
        with naming(self.label):
            super().read_at(view, position)

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Return the bytes from one position to another."""
        content = bytearray(stop - start)
        self.read_at(memoryview(content), start)
        return bytes(content)

    def close(self) -> None:
        """Close the file."""
        with naming(self.label):
            super().close()

    def expect(self, identity: Identity) -> None:
        """Raise `InputError`, code `changed`, unless this is that file and unchanged."""
        with naming(self.label):
            _compare(self.label, identity, os.fstat(self.fileno()))

    def __del__(self) -> None:
        with contextlib.suppress(InputError):  # one that was kept open: no `with` block ends for it
            self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # what looks damaged may be half written; a reader that the file was lent to may have closed it
            if not self.closed and (error is None or isinstance(error, TqError)):
                self.expect(self.identity)
        finally:
            self.close()


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _compare(label: str, before: Identity, status: os.stat_result) -> None:
    now = _identity(status)
    if now == before:
        return
    what = "it was written to"
    if now[:2] != before[:2]:
        what = "another file has its name now"
    elif now[2] != before[2]:
        what = f"it had {before[2]} bytes and has {now[2]}"
    raise _changed(label, what)


def _changed(label: str, what: str) -> InputError:
    hint = "run it again when nothing writes to it"
    return InputError(f"{label}: changed while it was read: {what}", code="changed", hint=hint, path=label)


@contextlib.contextmanager
def naming(label: FilePath, *, but: tuple[int, ...] = ()) -> Iterator[None]:
    """Turn the system's errors about an input into `InputError`, code `unreadable`; those with an errno `but` pass."""
    try:
        yield
    except OSError as error:
        if error.errno in but:
            raise
        message = f"{label}: {error.strerror or error}"
        raise InputError(message, code="unreadable", path=str(label)) from error


def open_input(path: FilePath) -> InputFile:
    """Open an input for seekable, unbuffered reading; `-` and pipes go through an unnamed temporary.

    Raises: `InputError` with code `not-found`, `is-directory`, `empty-file` or `unreadable`.
    """
    if str(path) == STREAM:
        with naming(shown_name(path)):
            stream = InputFile(os.dup(sys.stdin.fileno()), shown_name(path))
        return _spooled_all(stream)
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 (its mode alone)
        if kind == stat.S_IFDIR:
            hint = f"try {Path(path) / '*.npy'}"
            raise InputError(f"{path}: is a directory", code="is-directory", hint=hint, path=str(path))
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            hint = "copy what it holds to a file, or pipe it in as -"
            raise InputError(
                f"{path}: is a device, which may have no end", code="unreadable", hint=hint, path=str(path)
            )
        file = InputFile(path, str(path))
    except FileNotFoundError:
        if Path(path).is_symlink():
            message = f"{path}: is a link to {Path(path).readlink()}, which does not exist"
            raise InputError(message, code="not-found", path=str(path)) from None
        raise InputError(f"{path}: no such file", code="not-found", hint=_nearest(path), path=str(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: {reason}", code="unreadable", path=str(path)) from error
    if kind != stat.S_IFREG or not file.seekable():
        return _spooled_all(file)
    if file.size == 0:
        with file:
            raise _empty(str(path))
    return file


def kept_open(file: InputFile) -> Opener:
    """Return an opener that hands out one file again and again; it is closed when nobody can ask any more."""
    return lambda: contextlib.nullcontext(file)


@dataclass(frozen=True, slots=True)
class Reopening:
    """An opener that opens a path each time, so that a thousand files need no thousand descriptors.

    Raises: `InputError`, code `changed`, if it is another file, or the file is not what it was.
    """

    path: FilePath
    identity: Identity

    def __call__(self) -> Opened:
        """Return the file for a `with` block, which closes it."""
        label = str(self.path)
        try:
            with naming(label, but=(errno.ENOENT,)):
                _compare(label, self.identity, os.stat(self.path))  # noqa: PTH116 (before it is opened: a pipe would wait)
                file = InputFile(self.path, label)
        except FileNotFoundError:
            raise _changed(label, "no file has its name any more") from None
        file.identity = self.identity
        return file


def reopening(path: FilePath, file: InputFile | None = None) -> tuple[Opener, Opened]:
    """Return what opens an input again and again, and the input opened now, for a `with` block.

    `file` is the input if it is open.
    """
    if file is None:
        file = open_input(path)
    if str(path) != STREAM and is_file(path):
        return Reopening(path, file.identity), file
    kept = kept_open(file)
    return kept, kept()


def is_folder(path: FilePath) -> bool:
    """Return whether a path names a folder; `InputError` if the system refuses to look."""
    return stat.S_ISDIR(mode_of(path))


def is_file(path: FilePath) -> bool:
    """Return whether a path names a regular file; `InputError` if the system refuses to look."""
    return stat.S_ISREG(mode_of(path))


def mode_of(path: FilePath) -> int:
    """Return the kind and mode of what a path names, 0 if that is nothing; `InputError` if the system refuses to look.

    `Path.exists` and its like answer no where the system fails, or raise, by the version of Python.
    """
    try:
        with naming(path, but=_NOTHING_THERE):
            return os.stat(path).st_mode  # noqa: PTH116 (follows links)
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return 0


def shown_name(path: FilePath) -> str:
    """Return what messages call an input."""
    return "stdin" if str(path) == STREAM else str(path)


def spooled(fill: Callable[[IO[bytes]], object], label: str) -> InputFile:
    """Return an input that lies in a temporary without a name; `fill` writes it. `OutputError` if there is no room."""
    with naming_temporary(label), unnamed_temporary() as file:
        fill(file)
        return InputFile(os.dup(file.fileno()), label)


def _spooled_all(source: InputFile) -> InputFile:
    with contextlib.closing(source):
        file = spooled(lambda target: copy_bytes(source, target), source.label)
    if file.size == 0:
        with file:
            raise _empty(source.label)
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


def sha256_of(file: InputFile) -> str:
    """Return the SHA-256 of what is left to read, as hexadecimal digits."""
    digest = hashlib.sha256()
    while block := file.read(COPY_BLOCK):
        digest.update(block)
    return digest.hexdigest()
