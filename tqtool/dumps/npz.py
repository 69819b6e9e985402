"""The .npz format: a zip of .npy members. A member is unpacked when it is first read, to a file without a name.

Memory stays bounded whatever a member claims to hold, and the disk is asked for room before it is used.
"""

from __future__ import annotations

import errno
import io
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from tqtool.dumps import npy
from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.inputs import InputFile, Opened, Opener, spooled
from tqtool.errors import InputError, OutputError
from tqtool.files import binary_size, naming_temporary
from tqtool.rawfiles import COPY_BLOCK

MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
HEADER_WINDOW = 1 << 14  # NumPy takes no header beyond 10,000 bytes
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


def read_npz(
    file: InputFile, opener: Opener, label: str, *, dtype: str | None
) -> tuple[tuple[ArraySource, ...], tuple[str, ...]]:
    """Return the archive's arrays of any dtype but objects, and the names of its other members.

    `dtype` "bf16" takes 2-byte integers for bfloat16. Raises: `InputError`.
    """
    arrays: list[ArraySource] = []
    others: list[str] = []
    unpacked, end = _Unpacked(opener, label), 0
    with _reporting(label), zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if any(name.endswith("data.pkl") for name in names):
            raise npy.pickled(label, torch=True)
        if len(set(names)) < len(names):
            raise zipfile.BadZipFile("two members of one name")
        for member in members:
            if not member.filename.endswith(".npy"):
                others.append(member.filename)
                continue
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                start = io.BytesIO(stream.read(HEADER_WINDOW))
            if not start.getvalue().startswith(npy.MAGIC):
                others.append(member.filename)
                continue
            size = member.file_size
            place = _Member(unpacked, member.filename, end)
            found = npy.read_npy(start, place, label, name=name, origin=opener, size=size, dtype=dtype)
            arrays.append(replace(found, store=replace(found.store, offset=end + found.store.offset)))
            end += size
    return tuple(arrays), tuple(others)


class _Unpacked:
    """The unpacked members of an archive, side by side in one file without a name: one descriptor for all of them."""

    def __init__(self, opener: Opener, label: str) -> None:
        self.opener, self.label = opener, label
        self._lock = threading.Lock()
        self._file: InputFile | None = None

    def file(self) -> InputFile:
        """Return the file, made when it is first asked for."""
        with self._lock:
            if self._file is None:
                self._file = spooled(lambda target: None, self.label)
            return self._file


class _Member:
    """A member of an archive, ready to be read by position; opening it the first time unpacks and checks it."""

    def __init__(self, unpacked: _Unpacked, name: str, start: int) -> None:
        self._unpacked, self._name, self._start = unpacked, name, start
        self._lock = threading.Lock()
        self._is_there = False

    def __call__(self) -> Opened:
        file = self._unpacked.file()
        with self._lock:
            if not self._is_there:
                self._copy_to(file)
                self._is_there = True
        return nullcontext(file)

    def _copy_to(self, target: InputFile) -> None:
        label = self._unpacked.label
        with _reporting(label), self._unpacked.opener() as file, zipfile.ZipFile(file) as archive:
            member = archive.getinfo(self._name)
            with naming_temporary(label):
                free = shutil.disk_usage(tempfile.gettempdir()).free
            if member.file_size > free:
                raise OutputError(
                    f"{label}: no room to unpack {self._name!r} (needs {binary_size(member.file_size)}, "
                    f"{binary_size(free)} free)",
                    code="write",
                    hint="point TMPDIR to a larger disk",
                    path=label,
                )
            copied = 0
            with archive.open(member) as stream:
                while copied <= member.file_size and (block := stream.read(COPY_BLOCK)):
                    with naming_temporary(label):
                        target.write_at(memoryview(block), self._start + copied)
                    copied += len(block)
            if copied != member.file_size:
                raise zipfile.BadZipFile(f"{self._name!r} holds {copied} of {member.file_size} bytes")


@contextmanager
def _reporting(label: str) -> Iterator[None]:
    """Turn the errors of zipfile into ours."""
    try:
        yield
    except (*_ZIP_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a place before the file's start
            raise
        raise InputError(
            f"{label}: damaged zip archive: {' '.join(str(error).split())[:120]}",
            code="npz-damaged",
            hint="copy or save it again",
            path=label,
        ) from error
