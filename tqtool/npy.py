"""The .npy format: header in, place of the values out. The values are read later, in boxes, never through pickle."""

from __future__ import annotations

import re
import warnings
from math import prod
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from tqtool.arrays import ArraySource, Opener, Store
from tqtool.errors import InputError

MAGIC = b"\x93NUMPY"
_FLOAT_NAMES = {2: "f16", 4: "f32", 8: "f64"}


def read_npy(
    file: BinaryIO, opener: Opener | BinaryIO, label: str, *, size: int, start: int = 0, dtype: str | None = None
) -> ArraySource:
    """Read the header at the file's position and return the array, with `label` as path and name.

    `start` is where the .npy begins in what `opener` opens, `size` how many bytes it has; `dtype` "bf16" takes 2-byte
    data for bfloat16. Raises: `InputError`.
    """
    begin = file.tell()
    shape, fortran, stored = _read_header(file, label)
    header = file.tell() - begin
    name, stored = float_type(stored, label, dtype)
    needs = header + stored.itemsize * prod(shape)
    if size < needs:
        raise InputError(
            f"{label}: holds {size} bytes, header promises {needs}",
            code="npy-truncated",
            hint="the copy or the program that wrote it was cut short; copy or save it again",
            path=label,
        )
    axes = tuple(range(len(shape)))
    if fortran:
        shape, axes = shape[::-1], axes[::-1]
    return ArraySource(label, label, name, Store(opener, start + header, shape, stored), axes)


def float_type(stored: np.dtype[np.generic], label: str, dtype: str | None = None) -> tuple[str, np.dtype[np.generic]]:
    """Return the float type that stored values are, and the type to read them with; `InputError` if none."""
    bits16 = stored.itemsize == 2 and (stored.kind == "u" or (stored.kind == "V" and stored.fields is None))
    if dtype == "bf16":
        if not bits16:
            hint = "leave --dtype out" if stored.kind == "f" else None
            raise InputError(
                f"{label}: dtype {stored} is not 2-byte bits; --dtype bf16 does not apply",
                code="dtype",
                hint=hint,
                path=label,
            )
        return "bf16", np.dtype(np.uint16).newbyteorder(stored.byteorder if stored.kind == "u" else "<")
    if stored.kind == "f" and stored.itemsize in _FLOAT_NAMES:
        return _FLOAT_NAMES[stored.itemsize], stored
    if stored.hasobject:
        raise InputError(
            f"{label}: object arrays need pickle, which can run code; refused",
            code="object-array",
            hint="np.save(path, np.asarray(x, dtype=np.float32))",
            path=label,
        )
    if stored.kind == "V" and stored.fields is None and bits16:
        raise InputError(
            f"{label}: 2-byte raw dtype; probably bfloat16",
            code="dtype-ambiguous",
            hint="add --dtype bf16",
            path=label,
        )
    if stored.kind == "V" and stored.fields is None and stored.itemsize == 1:
        raise _eight_bit(label)
    hint = "convert it: np.save(path, x.astype(np.float32))"
    if bits16:
        hint = "if these are bfloat16 bits, add --dtype bf16"
    raise InputError(f"{label}: dtype {stored} is not floating point", code="dtype", hint=hint, path=label)


def _read_header(file: BinaryIO, label: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    begin = file.tell()
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
        file.seek(begin)
        if re.search(rb"'descr': *'[<|>=]f1'", file.read(200)):
            raise _eight_bit(label) from error
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"{label}: damaged NumPy header: {reason}", code="not-npy", hint="save the array again", path=label
        ) from error
    return shape, fortran, stored


def _eight_bit(label: str) -> InputError:
    return InputError(
        f"{label}: 8-bit float payloads are not supported",
        code="dtype-unsupported",
        hint="convert it to float16, with its scales applied",
        path=label,
    )
