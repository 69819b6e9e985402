"""The safetensors layout: an 8-byte length, a JSON header, then the tensors' bytes without holes.

The header is read here and not by the package, because that maps the whole file; and it is written here, because the
package cannot write what does not fit in memory. Nothing in a header is believed before it is checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tqtool.dumps.arrays import FLOAT_TYPES, ArraySource, Store
from tqtool.dumps.inputs import InputFile, Opener
from tqtool.errors import InputError, IntegrityError
from tqtool.escapes import parser_reason

MAX_HEADER = 100 << 20  # a longer header is damage or an attack
MAX_VALUES = 1 << 60  # of one tensor: beyond any file, and products of it fit in 64 bits
MAX_AXES = 32
DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
STORED = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "C64": "<c8",
    "BOOL": "?",
    **{f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), "u1"),  # only ever copied
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place: `start` to `stop` in bytes from the beginning of the data."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in the order of their data, and where the data begin in the file."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    raw: bytes  # length and text
    label: str

    @property
    def data(self) -> int:
        """Position of the first data byte."""
        return len(self.raw)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor occupies."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def is_header(start: bytes) -> bool:
    """Return whether a file that begins with these bytes (9 or more) can be safetensors."""
    return len(start) >= 9 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


def read_header(file: InputFile, label: str) -> Header:
    """Read and check the header at the beginning of a file; `IntegrityError`: `header` or `truncated`."""
    size = file.size
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise _truncated(label, size, 8)
    if length > MAX_HEADER:
        raise IntegrityError(f"{label}: header of {length} bytes, the limit is {MAX_HEADER}", code="header", path=label)
    if size < 8 + length:
        raise _truncated(label, size, 8 + length)
    text = file.read(length)
    tensors, metadata = _parse(text, label)
    needs = 8 + length + (tensors[-1].stop if tensors else 0)
    if size < needs:
        raise _truncated(label, size, needs)
    if size > needs:
        raise damaged(label, f"{size - needs} bytes follow the last tensor")
    return Header(tensors, metadata, prefix + text, label)


def header_bytes(tensors: list[Tensor], metadata: dict[str, str], *, align: int) -> bytes:
    """Return length and header text, padded with spaces so that the data begin at a multiple of `align`."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.stop],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def stored_type(name: str) -> np.dtype[np.generic]:
    """Return how values of a short type name (f16, i64, f8_e4m3) are written: little-endian."""
    return FLOAT_TYPES.get(name) or np.dtype(STORED[name.upper()])


def array_sources(header: Header, opener: Opener, path: str, *, as_bf16: bool = False) -> tuple[ArraySource, ...]:
    """Return the tensors of a file as arrays; with `as_bf16`, I16 and U16 tensors are taken for bfloat16."""
    return tuple(_source(header, tensor, opener, path, as_bf16) for tensor in header.tensors)


def _source(header: Header, tensor: Tensor, opener: Opener, path: str, as_bf16: bool) -> ArraySource:
    if tensor.dtype not in STORED:
        raise InputError(
            f"{path}: {tensor.name}: {tensor.dtype} values are smaller than a byte and not supported",
            code="dtype-unsupported",
            hint="convert them to float16, with their scales applied",
            path=path,
        )
    kind = "bf16" if as_bf16 and tensor.dtype in ("I16", "U16") else tensor.dtype.lower()
    store = Store(opener, header.data + tensor.start, tensor.shape, np.dtype(STORED[tensor.dtype]))
    return ArraySource(path, tensor.name, kind, store, tuple(range(len(tensor.shape))), opener)


def damaged(label: str, what: str) -> IntegrityError:
    """Return the error for a header that cannot be right."""
    return IntegrityError(f"{label}: damaged header: {what}", code="header", hint="copy it again", path=label)


def _truncated(label: str, size: int, needs: int) -> IntegrityError:
    return IntegrityError(
        f"{label}: holds {size} bytes, header promises {needs}",
        code="truncated",
        hint="copy it again",
        path=label,
    )


def _parse(text: bytes, label: str) -> tuple[tuple[Tensor, ...], dict[str, str]]:
    try:
        entries = load_json(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(label, parser_reason(error)) from error
    if not isinstance(entries, dict):
        raise damaged(label, "not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(label, "__metadata__ is not an object of strings")
    tensors = sorted((_tensor(name, entry, label) for name, entry in entries.items()), key=lambda t: (t.start, t.stop))
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps" if tensor.start < position else "leaves a hole before"
            raise damaged(label, f"tensor {tensor.name!r} {what} its place {position}")
        position = tensor.stop
    return tuple(tensors), metadata


def _tensor(name: str, entry: Any, label: str) -> Tensor:
    if not name.isprintable() or not name or len(name) > 1000:
        raise damaged(label, f"tensor name {name[:50]!r}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged(label, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (_counts(shape) and len(shape) <= MAX_AXES and _counts(offsets) and len(offsets) == 2):
        raise damaged(label, f"tensor {name!r} has an impossible shape or place")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise damaged(label, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if prod(shape) > MAX_VALUES or offsets[1] - offsets[0] != tensor_bytes(dtype, tuple(shape)):
        raise damaged(label, f"tensor {name!r}: {dtype} {shape} does not fill bytes {offsets[0]} to {offsets[1]}")
    return Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def load_json(text: str) -> Any:
    """Read JSON of a file that nobody vouches for; `ValueError` for duplicate keys and for NaN, too."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_VALUES for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
