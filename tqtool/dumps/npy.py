"""The .npy format: header in, place of the values out. The values are read later, in boxes, never through pickle."""

from __future__ import annotations

import re
import warnings
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from tqtool.dumps.arrays import FLOAT_TYPES, ArraySource, Store
from tqtool.dumps.inputs import Opener
from tqtool.errors import InputError

MAGIC = b"\x93NUMPY"
MAX_AXES = 32  # of every NumPy that is served
MAX_BYTES = 1 << 62  # beyond any file, and offsets within it fit in 64 bits
MAX_MESSAGE = 400  # letters: a hostile header may hold a thousand axes


def read_npy(
    file: BinaryIO,
    opener: Opener,
    path: str,
    *,
    name: str | None = None,
    origin: Opener | None = None,
    size: int,
    dtype: str | None = None,
) -> ArraySource:
    """Read the header at the beginning of a .npy of `size` bytes and return the array, of any dtype but objects.

    `opener` opens it again for its values; `name` is that of the archive's member, if it is one, and `origin` opens
    the archive. `dtype` "bf16" takes 2-byte data for bfloat16. Raises: `InputError`.
    """
    label = path if name is None else f"{path}: {name}"
    shape, fortran, stored = _read_header(file, label, path)
    header = file.tell()
    if stored.hasobject:
        raise InputError(
            f"{label}: object arrays need pickle, which can run code; refused",
            code="object-array",
            hint="np.save(path, np.asarray(x, dtype=np.float32)); arrays of several shapes: one name each",
            path=path,
        )
    needs = header + stored.itemsize * prod(shape)
    if size < needs:
        raise InputError(
            f"{label}: holds {size} bytes, header promises {needs}",
            code="npy-truncated",
            hint="the copy or the program that wrote it was cut short; copy or save it again",
            path=path,
        )
    span = stored.itemsize * prod(max(size, 1) for size in shape)  # NumPy refuses it also where another size is 0
    if stored.itemsize == 0 or stored.subdtype or len(shape) > MAX_AXES or span > MAX_BYTES:
        raise InputError(
            f"{label}: damaged NumPy header: no array has type {stored} and shape {shape}"[:MAX_MESSAGE],
            code="not-npy",
            hint="save the array again",
            path=path,
        )
    if size > needs:
        raise InputError(
            f"{label}: {size - needs} bytes follow the array {shape}",
            code="npy-trailing",
            hint="np.save to a handle that stays open appends: load the arrays one by one, join them, save the whole",
            path=path,
        )
    axes = tuple(range(len(shape)))
    if fortran:
        shape, axes = shape[::-1], axes[::-1]
    kind = type_name(stored, as_bf16=dtype == "bf16")
    if kind == "bf16":
        stored = np.dtype(np.uint16).newbyteorder(stored.byteorder if stored.kind in "iu" else "<")
    store = Store(opener, header, shape, stored)
    shown = printable(Path(path).stem if name is None else name)
    return ArraySource(path, shown, kind, store, axes, origin or opener, hidden_file=name is None)


def printable(name: str) -> str:
    """Return a name that every file and terminal can hold: control characters and undecodable bytes become `_`."""
    return "".join(letter if letter.isprintable() else "_" for letter in name) or "_"


def type_name(stored: np.dtype[np.generic], *, as_bf16: bool = False) -> str:
    """Return the short name of a NumPy type: f16, i64, bool; NumPy's own name where there is no short one."""
    if as_bf16 and stored.itemsize == 2 and stored.fields is None and stored.kind in "iuV":
        return "bf16"
    if stored.kind in "fiu" and stored.itemsize <= 8:
        return f"{stored.kind}{8 * stored.itemsize}"
    if stored.kind == "b":
        return "bool"
    return "c64" if stored == np.complex64 else str(stored)


def check_float(source: ArraySource, *, as_bf16: bool = False) -> None:
    """Raise `InputError` unless the array's values are floats that the codec takes."""
    label, path = source.label, source.path
    if as_bf16 and source.dtype != "bf16":
        raise InputError(
            f"{label}: dtype {source.dtype} is not 2-byte bits; --dtype bf16 does not apply",
            code="dtype",
            hint="leave --dtype out",
            path=path,
        )
    if source.dtype in FLOAT_TYPES:
        return
    if source.dtype in ("|V2", ">V2", "<V2"):
        raise InputError(
            f"{label}: 2-byte raw dtype; probably bfloat16",
            code="dtype-ambiguous",
            hint="add --dtype bf16",
            path=path,
        )
    if is_eight_bit(source.dtype):
        raise _eight_bit(label, path)
    if source.dtype.startswith("float"):
        message = f"{label}: dtype {source.dtype} is not supported"
        raise InputError(message, code="dtype-unsupported", hint="convert it to float32", path=path)
    hint = "convert it: np.save(path, x.astype(np.float32))"
    if source.dtype in ("i16", "u16"):
        hint = "if these are bfloat16 bits, add --dtype bf16"
    raise InputError(
        f"{label}: dtype {_spelled(source.dtype)} is not floating point", code="dtype", hint=hint, path=path
    )


def is_eight_bit(kind: str) -> bool:
    """Return whether a type's name is that of 8-bit floats, or of the raw bytes that NumPy writes for them."""
    return kind == "|V1" or kind.startswith("f8_")


def pickled(path: str, *, torch: bool) -> InputError:
    """Return the error for a pickle, with the way out of it."""
    if not torch:
        hint = "save its arrays where it was made: np.savez(path, k=k, v=v)"
        return InputError(f"{path}: Python pickle; not loaded", code="pickle", hint=hint, path=path)
    hint = (
        "convert it where it was made:\n"
        "import torch, safetensors.torch\n"
        f"tensors = torch.load({Path(path).name!r}, weights_only=True)  # a dict of tensors\n"
        f"safetensors.torch.save_file(tensors, {Path(path).stem + '.safetensors'!r})"
    )
    return InputError(f"{path}: PyTorch pickle; not loaded", code="pickle", hint=hint, path=path)


def _spelled(name: str) -> str:
    """Return a short type name as NumPy spells it: i64 as int64."""
    words = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
    return words.get(name[:1], "") + name[1:] if name[1:].isdecimal() and name[:1] in words else name


def _read_header(file: BinaryIO, label: str, path: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2
            version = npy_format.read_magic(file)
            # 3.0 differs from 2.0 in the encoding of field names only, and floats have no fields
            read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
            shape, fortran, stored = read(file)
        if version[0] not in (1, 2, 3) or any(isinstance(n, bool) or n < 0 for n in shape):
            raise ValueError(f"version {version}, shape {shape}")
    except OSError:
        raise
    except Exception as error:  # NumPy's parser raises anything on hostile bytes
        file.seek(0)
        if re.search(rb"'descr': *'[<|>=]f1'", file.read(200)):
            raise _eight_bit(label, path) from error
        file.seek(0)
        found = ascii(file.read(80)[10:].split(b"\n")[0].decode("latin-1"))
        raise InputError(
            f"{label}: damaged NumPy header: no dtype, order and shape in {found}",
            code="not-npy",
            hint="save the array again",
            path=path,
        ) from error
    return shape, fortran, stored


def _eight_bit(label: str, path: str) -> InputError:
    return InputError(
        f"{label}: 8-bit float payloads are not supported",
        code="dtype-unsupported",
        hint="convert it to float16, with its scales applied",
        path=path,
    )
