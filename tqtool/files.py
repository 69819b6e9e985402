"""Files that appear whole or not at all.

An output is written to a temporary in its own folder, flushed to the disk and published under its name in one
step that replaces nothing unless asked to. Where the system can (Linux), the temporary has no name: nothing is
left behind even after kill -9.
"""

import contextlib
import errno
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from tqtool.errors import OutputError, UsageError

FilePath = str | os.PathLike[str]

Advance = Callable[[float], None]  # told how many bytes more are done

STREAM = "-"  # as a path: standard input or standard output
COPY_BLOCK = 1 << 20
_PROC_FD = "/proc/self/fd"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EACCES}


@contextlib.contextmanager
def write_atomically(path: FilePath, *, force: bool = False, size: int = 0) -> Iterator[BinaryIO]:
    """Yield a readable, seekable file that becomes `path` if the block ends well, and vanishes if not.

    `size` is the number of bytes to come, if known: the free space is checked before the first is written.
    Raises: `OutputError` with code `exists` or `write`.
    """
    check_output(path, force=force)
    check_space(path, size)
    target = Path(os.path.realpath(path))
    with _reporting(path, size):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            with contextlib.ExitStack() as undo:
                file, temporary = _open_temporary(target.name, folder)
                undo.callback(file.close)
                if temporary:
                    undo.callback(_unlink, temporary, folder)
                yield file
                file.flush()
                os.fsync(file.fileno())
                _publish(file, temporary, target.name, folder, force=force)
                os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def output_file(path: FilePath, *, force: bool = False, size: int = 0) -> Iterator[BinaryIO]:
    """Like `write_atomically`, and for `-` an unnamed temporary that goes to standard output at the end."""
    if str(path) != STREAM:
        with write_atomically(path, force=force, size=size) as file:
            yield file
        return
    with unnamed_temporary() as file:
        with _reporting("the temporary copy of the output", 0):
            yield file
        file.seek(0)
        try:
            copy_bytes(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise OutputError(f"standard output: {error.strerror}", code="write") from error


def write_text(path: FilePath, text: str, *, force: bool = False) -> None:
    """Write UTF-8 text atomically; raises as `write_atomically` does."""
    data = text.encode()
    with write_atomically(path, force=force, size=len(data)) as file:
        file.write(data)


def check_output(path: FilePath, *, force: bool = False) -> None:
    """Refuse an output that cannot be published, before any work is done; `OutputError`."""
    target = Path(path)
    if not Path(os.path.realpath(target)).parent.is_dir():
        raise OutputError(f"{path}: no such directory: {target.parent}", code="write", path=str(path))
    if target.is_dir():
        raise OutputError(f"{path}: is a directory", code="write", path=str(path), hint="give a file name")
    if target.exists() and not target.is_file():
        raise OutputError(
            f"{path}: is not a regular file",
            code="write",
            path=str(path),
            hint="for standard output use -o -",
        )
    if os.path.lexists(target) and not force:
        raise OutputError(f"{path}: already exists", code="exists", path=str(path), hint="add --force to replace it")


def check_space(path: FilePath, size: int) -> None:
    """Refuse an output of `size` bytes that its file system has no room for; `OutputError`, code `write`."""
    with _reporting(path, size):
        free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if size > free:
        raise _no_space(path, size, free)


def check_not_input(output: FilePath, inputs: list[str]) -> None:
    """Refuse an output that is one of the inputs, under whatever name; `UsageError`, code `same-file`."""
    target = Path(output)
    for name in inputs:
        if name != STREAM and target.exists() and Path(name).exists() and target.samefile(name):
            raise UsageError(
                f"{output}: is the input; inputs are never overwritten", code="same-file", path=str(output)
            )


def unnamed_temporary() -> BinaryIO:
    """Return a readable and writable file without a name, gone when it is closed or the process ends."""
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="tqtool-"))


def copy_bytes(source: IO[bytes], target: IO[bytes], count: int | None = None) -> int:
    """Copy `count` bytes (all, if None) in small blocks and return how many there were."""
    copied = 0
    while count is None or copied < count:
        block = source.read(COPY_BLOCK if count is None else min(COPY_BLOCK, count - copied))
        if not block:
            break
        write_all(target, block)
        copied += len(block)
    return copied


def write_all(target: IO[bytes], data: bytes | memoryview) -> None:
    """Write every byte of `data`: an unbuffered file may take a part at a time."""
    view = memoryview(data).cast("B")
    while view:
        view = view[target.write(view) :]


def file_size(file: BinaryIO) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def binary_size(count: int) -> str:
    """Return a number of bytes as people read it: "12 bytes", "3.5 KiB", "66 MiB"."""
    if count < 1024:
        return f"{count} bytes"
    value, unit = float(count), 0
    while value >= 1023.5 and unit < 5:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def _open_temporary(name: str, folder: int) -> tuple[BinaryIO, str | None]:
    """Return a new file in `folder` and its temporary name, None where it needs none."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed and Path(_PROC_FD).is_dir():  # the way to give it a name later leads through /proc
        with contextlib.suppress(OSError):
            # 0o666: the umask decides, as for every new file
            descriptor = os.open(".", unnamed | os.O_RDWR, 0o666, dir_fd=folder)
            return cast(BinaryIO, os.fdopen(descriptor, "w+b", buffering=0)), None
    temporary = _temporary_name(name)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    return cast(BinaryIO, os.fdopen(descriptor, "w+b", buffering=0)), temporary


def _publish(file: BinaryIO, temporary: str | None, name: str, folder: int, *, force: bool) -> None:
    """Give the finished file its name; `FileExistsError` if another has it and `force` is off."""
    if not force:
        try:
            _link(file, temporary, name, folder)
            return
        except OSError as error:
            if temporary is None or error.errno not in _NO_LINKS:
                raise
        # No hard links here (FAT, some network drives): hold the name with an empty file, replace that.
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder))
    if temporary is None:
        temporary = _temporary_name(name)
        _link(file, None, temporary, folder)
    try:
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(temporary, folder)
        raise


def _link(file: BinaryIO, temporary: str | None, name: str, folder: int) -> None:
    # With a directory descriptor Python calls linkat and follows the link in /proc; without one it would not.
    source = temporary or f"{_PROC_FD}/{file.fileno()}"
    os.link(source, name, src_dir_fd=folder, dst_dir_fd=folder)


def _temporary_name(name: str) -> str:
    return f".{name[:200]}.{secrets.token_hex(6)}.tmp"


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _reporting(path: FilePath, size: int) -> Iterator[None]:
    """Turn the system's errors about an output into ours."""
    try:
        yield
    except FileExistsError as error:  # another process was faster
        hint = "add --force to replace it"
        raise OutputError(f"{path}: already exists", code="exists", path=str(path), hint=hint) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
            raise _no_space(path, size, free) from error
        raise OutputError(f"{path}: {error.strerror or error}", code="write", path=str(path)) from error


def _no_space(path: FilePath, size: int, free: int) -> OutputError:
    needs = f"needs {binary_size(size)}, " if size else ""
    message = f"{path}: No space left on device ({needs}{binary_size(free)} free)"
    return OutputError(message, code="write", path=str(path))
