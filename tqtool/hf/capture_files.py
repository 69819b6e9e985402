"""The files of a dump while it is written: arrays that fill up position by position in a folder that appears whole."""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.lib import format as npy

from tqtool.errors import InputError, OutputError

FileFormat = Literal["npy", "safetensors"]
StoredType = Literal["f16", "f32", "bf16"]
TORCH_TYPES = {"f16": torch.float16, "f32": torch.float32, "bf16": torch.bfloat16}
ITEM_BYTES = {"f16": 2, "f32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """One array of a dump, (heads, positions, dim), of which any positions can be written at any time."""

    name: str  # layer07_k
    shape: tuple[int, int, int]
    dtype: StoredType
    format: FileFormat

    @property
    def file_name(self) -> str:
        """The name with its ending."""
        return f"{self.name}.{self.format}"

    @property
    def header(self) -> bytes:
        """What stands before the values."""
        if self.format == "npy":
            head = io.BytesIO()
            descr = {"f16": "<f2", "f32": "<f4"}[self.dtype]
            npy.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": self.shape})
            return head.getvalue()
        size = prod(self.shape) * ITEM_BYTES[self.dtype]
        entry = {"dtype": self.dtype.upper(), "shape": list(self.shape), "data_offsets": [0, size]}
        text = json.dumps({self.name: entry}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + prod(self.shape) * ITEM_BYTES[self.dtype]

    def create(self, folder: Path) -> None:
        """Write the header and give the file its size."""
        with (folder / self.file_name).open("xb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def write(self, folder: Path, at: int, part: torch.Tensor) -> None:
        """Write positions at, at + 1, … of every head; part is (heads, new, dim).

        Raises: `InputError`, code `non-finite` or `range`, that names what is not finite.
        """
        assert part.shape[0] == self.shape[0]
        assert part.shape[2] == self.shape[2]
        stored = self._stored(at, part)
        step = self.shape[2] * ITEM_BYTES[self.dtype]
        with (folder / self.file_name).open("r+b", buffering=0) as file:
            for head, values in enumerate(stored):
                file.seek(len(self.header) + (head * self.shape[1] + at) * step)
                view = memoryview(values.tobytes())
                while view:
                    view = view[file.write(view) :]

    def _stored(self, at: int, part: torch.Tensor) -> Any:
        """Return the values' bytes as (heads, new, bytes)."""
        if not torch.isfinite(part).all():
            place = (~torch.isfinite(part)).nonzero()[0].tolist()
            raise InputError(
                f"{self.name}: head {place[0]}, token {at + place[1]} is {float(part[tuple(place)])}",
                code="non-finite",
                hint="the model itself computes it: try --torch-dtype f32 or bf16, or look at its weights",
            )
        stored = part.detach().to("cpu", TORCH_TYPES[self.dtype]).contiguous()
        if not torch.isfinite(stored).all():
            largest = float(part.abs().max())
            raise InputError(
                f"{self.name}: {largest:.6g} is beyond float16", code="range", hint="store it with --dtype f32"
            )
        return stored.view(torch.uint8).numpy()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that becomes `path` if the block ends well, and vanishes if not.

    Raises: `OutputError` with code `exists` or `write`, the latter for every system error within the block.
    """
    check_absent(path)
    temporary = path.absolute().parent / f".{path.name[:200]}.{secrets.token_hex(6)}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        for member in [*temporary.iterdir(), temporary]:
            _flush(member)
        check_absent(path)
        temporary.rename(path)
        _flush(temporary.parent)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}", code="write", path=str(path)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there is none any more if all went well


def check_absent(path: Path, *, makes_parent: bool = False) -> None:
    """Raise `OutputError` unless a folder of this name can be made; an empty one may stand there.

    With `makes_parent` the folder above it need not exist yet.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if os.path.lexists(path):
        hint = "give another folder, or move this one away"
        raise OutputError(f"{path}: already exists", code="exists", hint=hint, path=str(path))
    parent = path.absolute().parent
    if not (parent.is_dir() or (makes_parent and not os.path.lexists(parent) and parent.parent.is_dir())):
        raise OutputError(f"{path}: no such directory: {path.parent}", code="write", path=str(path))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
