"""Files that appear whole or not at all.

An output is written to a temporary in its own folder, flushed to the disk and published under its name in one
step that replaces nothing unless asked to. Where the system can (Linux), the temporary has no name: nothing is
left behind even after kill -9. Where it has one, what removes it is registered before it is made, so that no signal
comes between the two.
"""

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqtool.errors import OutputError, UsageError
from tqtool.rawfiles import (
    PROC_FD,
    WholeFile,
    close,
    copy_bytes,
    open_temporary,
    temporary_name,
    unlink,
    unnamed_temporary,
)

FilePath = str | os.PathLike[str]

Advance = Callable[[float], None]  # told how many bytes more are done

STREAM = "-"  # as a path: standard input or standard output
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EACCES}
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # of a folder, on some network drives


@contextlib.contextmanager
def write_atomically(path: FilePath, *, force: bool = False, size: int = 0) -> Iterator[WholeFile]:
    """Yield a readable, seekable file that becomes `path` if the block ends well, and vanishes if not.

    `size` is the number of bytes to come, if known: the free space is checked before the first is written. A file
    that is replaced leaves its mode and, where the system allows, its owner to the new one.
    Raises: `OutputError` with code `exists` or `write`.
    """
    check_output(path, force=force)
    check_space(path, size)
    target = Path(os.path.realpath(path))
    with contextlib.ExitStack() as undo:
        with _reporting(path, size):
            folder = os.open(target.parent, os.O_RDONLY)
            undo.callback(close, folder)
            old = _status(target) if force else None
            mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o666  # the umask decides on new files
            file, temporary = open_temporary(target.name, folder, undo, mode)
            yield file
            if old is not None:
                _take_after(file, old)
            os.fsync(file.fileno())
            left = _publish(file, temporary, target.name, folder, undo, force=force)
        if left is not None:
            with _reporting_late(path, f"removing {left}"):
                os.unlink(left, dir_fd=folder)
        with _reporting_late(path, "flushing its folder to the disk"):
            _flush_folder(folder)
        with _reporting_late(path, "closing it"):
            file.close()


@contextlib.contextmanager
def output_file(path: FilePath, *, force: bool = False, size: int = 0) -> Iterator[WholeFile]:
    """Like `write_atomically`, and for `-` an unnamed temporary that goes to standard output at the end."""
    if str(path) != STREAM:
        with write_atomically(path, force=force, size=size) as file:
            yield file
        return
    with contextlib.ExitStack() as end:
        with naming_temporary("standard output"):
            file = end.enter_context(unnamed_temporary())
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
    with _reporting(path, 0):
        folder = _status(Path(os.path.realpath(target)).parent)
        there = _status(target)
        linked = there is not None or os.path.lexists(target)
    if folder is None or not stat.S_ISDIR(folder.st_mode):
        raise OutputError(f"{path}: no such directory: {target.parent}", code="write", path=str(path))
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise OutputError(f"{path}: is a directory", code="write", path=str(path), hint="give a file name")
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise OutputError(
            f"{path}: is not a regular file",
            code="write",
            path=str(path),
            hint="for standard output use -o -",
        )
    if linked and not force:
        raise OutputError(f"{path}: already exists", code="exists", path=str(path), hint="add --force to replace it")


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there; the one above it must be. `OutputError`."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise OutputError(f"{folder}: the folder above it does not exist", code="write", path=str(folder)) from None
    except FileExistsError:
        raise OutputError(f"{folder}: is a file, not a folder", code="exists", path=str(folder)) from None
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", code="write", path=str(folder)) from None


def names_folder(path: FilePath) -> bool:
    """Return whether an output is a folder, in which outputs get names of their own; `OutputError`."""
    with _reporting(path, 0):
        there = _status(path)
    return there is not None and stat.S_ISDIR(there.st_mode)


def holds_nothing(path: FilePath) -> bool:
    """Return whether an output is there and empty, so that to replace it loses nothing; `OutputError`."""
    with _reporting(path, 0):
        there = _status(path)
    return there is not None and stat.S_ISREG(there.st_mode) and there.st_size == 0 and not Path(path).is_symlink()


def check_space(path: FilePath, size: int) -> None:
    """Refuse an output of `size` bytes that its file system has no room for; `OutputError`, code `write`."""
    with _reporting(path, size):
        free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if size > free:
        raise _no_space(path, size, free)


def check_not_input(output: FilePath, inputs: list[str]) -> None:
    """Refuse an output that is one of the inputs, under whatever name; `UsageError`, code `same-file`."""
    with _reporting(output, 0):
        there = _status(output)
    for name in inputs if there else ():
        with contextlib.suppress(OSError, ValueError):  # an input that is not there is refused when it is opened
            if name != STREAM and os.path.samestat(there, os.stat(name)):  # type: ignore[arg-type]  # noqa: PTH116
                message = f"{output}: is the input; inputs are never overwritten"
                raise UsageError(message, code="same-file", path=str(output))


def binary_size(count: int) -> str:
    """Return a number of bytes as people read it: "12 bytes", "3.5 KiB", "66 MiB"."""
    if count < 1024:
        return f"{count} bytes"
    value, unit = float(count), 0
    while value >= 1023.5 and unit < 5:
        value, unit = value / 1024, unit + 1
    return f"{value:.{4 if value >= 999.5 else 3}g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def _publish(
    file: WholeFile, temporary: str | None, name: str, folder: int, undo: contextlib.ExitStack, *, force: bool
) -> str | None:
    """Give the finished file its name; `FileExistsError` if another has it and `force` is off.

    Returns the temporary name if it is left, None if there was none or the file has lost it to its own.
    """
    if not force:
        try:
            _link(file, temporary, name, folder)
            return temporary
        except OSError as error:
            if temporary is None or error.errno not in _NO_LINKS:
                raise
        # No hard links here (FAT, some network drives): hold the name with an empty file, replace that.
        with contextlib.ExitStack() as ours:
            ours.callback(_unlink_empty, name, folder)
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder))
            except FileExistsError:
                ours.pop_all()
                raise
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            ours.pop_all()
        return None
    if temporary is None:
        temporary = temporary_name(name)
        undo.callback(unlink, temporary, folder)
        _link(file, None, temporary, folder)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    return None


def _link(file: WholeFile, temporary: str | None, name: str, folder: int) -> None:
    # With a directory descriptor Python calls linkat and follows the link in /proc; without one it would not.
    source = temporary or f"{PROC_FD}/{file.fileno()}"
    os.link(source, name, src_dir_fd=folder, dst_dir_fd=folder)


def _take_after(file: WholeFile, old: os.stat_result) -> None:
    """Give a file the owner, where that is allowed, and the mode of another."""
    new = os.fstat(file.fileno())
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if stat.S_IMODE(new.st_mode) != mode:
        os.fchmod(file.fileno(), mode)


def _status(path: FilePath) -> os.stat_result | None:
    """Return what the system says about a path, None if nothing has that name; `OSError`."""
    try:
        return os.stat(path)  # noqa: PTH116 (follows links)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _flush_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def _unlink_empty(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        if os.stat(name, dir_fd=folder).st_size == 0:
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
        free = None
        if error.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
        if free is not None:
            raise _no_space(path, size, free) from error
        raise OutputError(f"{path}: {error.strerror or error}", code="write", path=str(path)) from error


@contextlib.contextmanager
def _reporting_late(path: FilePath, step: str) -> Iterator[None]:
    """Turn the system's errors about an output that has its name already into ours."""
    try:
        yield
    except OSError as error:
        message = f"{path}: is written whole, but {step} failed: {error.strerror}"
        hint = "it can be used; it may be lost in a power cut"
        raise OutputError(message, code="write", hint=hint, path=str(path)) from error


@contextlib.contextmanager
def naming_temporary(name: str) -> Iterator[None]:
    """Turn the system's errors about a temporary copy of `name` into `OutputError`, code `write`."""
    try:
        yield
    except OSError as error:
        message = f"{name}: its temporary copy cannot be kept: {error.strerror or error}"
        raise OutputError(message, code="write", hint="point TMPDIR to a larger disk") from error


def _no_space(path: FilePath, size: int, free: int) -> OutputError:
    needs = f"needs {binary_size(size)}, " if size else ""
    message = f"{path}: No space left on device ({needs}{binary_size(free)} free)"
    return OutputError(message, code="write", path=str(path))
