"""Files whose reads and writes are whole, and temporary ones that vanish."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COPY_BLOCK = 1 << 20
PROC_FD = "/proc/self/fd"


class WholeFile(io.FileIO):
    """An unbuffered file that reads and writes all it is asked for.

    The system may do a part of it, and on network drives does. Any thread may use the `_at` methods at any time.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, fewer at the end alone; all that are left if `size` is negative."""
        if size is None or size < 0:
            return self.readall()
        parts: list[bytes] = []
        while size and (part := super().read(size)):
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data` and return its length in bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done:])
        return done

    def read_at(self, view: memoryview, position: int) -> None:
        """Fill a view of bytes from `position` on; `OSError` if the file ends before."""
        while view:
            count = os.preadv(self.fileno(), [view], position)
            if count == 0:
                raise OSError(errno.EIO, "became shorter while it was in use")
            view, position = view[count:], position + count

    def write_at(self, view: memoryview, position: int) -> None:
        """Write a view of bytes from `position` on."""
        while view:
            count = os.pwrite(self.fileno(), view, position)
            view, position = view[count:], position + count


def unnamed_temporary() -> WholeFile:
    """Return a readable and writable file without a name, gone when it is closed or the process ends; `OSError`."""
    with contextlib.ExitStack() as undo:
        folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
        undo.callback(close, folder)
        file, temporary = open_temporary("tqtool", folder, undo, 0o600)
        if temporary is not None:
            os.unlink(temporary, dir_fd=folder)
        return WholeFile(os.dup(file.fileno()), "r+b")


def copy_bytes(source: IO[bytes], target: IO[bytes], count: int | None = None) -> int:
    """Copy `count` bytes (all, if None) in small blocks and return how many there were."""
    copied = 0
    while count is None or copied < count:
        block = source.read(COPY_BLOCK if count is None else min(COPY_BLOCK, count - copied))
        if not block:
            break
        target.write(block)
        copied += len(block)
    return copied


def open_temporary(name: str, folder: int, undo: contextlib.ExitStack, mode: int) -> tuple[WholeFile, str | None]:
    """Return a new file in `folder` and its temporary name, None where it needs none; `undo` closes and removes it."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    temporary = None
    descriptor = -1
    if unnamed and Path(PROC_FD).is_dir():  # the way to give it a name later leads through /proc
        with contextlib.suppress(OSError):
            descriptor = os.open(".", unnamed | os.O_RDWR, mode, dir_fd=folder)
    if descriptor < 0:
        temporary = temporary_name(name)
        undo.callback(unlink, temporary, folder)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
    file = WholeFile(descriptor, "r+b")
    undo.callback(_close_file, file)
    return file, temporary


def temporary_name(name: str) -> str:
    """Return a hidden name that nobody has, of a length that file systems take."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}.{secrets.token_hex(6)}.tmp"


def unlink(name: str, folder: int) -> None:
    """Remove a temporary name, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def close(folder: int) -> None:
    """Close a folder, which holds nothing of ours back."""
    with contextlib.suppress(OSError):
        os.close(folder)


def _close_file(file: WholeFile) -> None:
    with contextlib.suppress(OSError):  # it is about to vanish, or was closed before
        file.close()
