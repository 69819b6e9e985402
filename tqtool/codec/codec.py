"""Encode and decode arrays of vectors: the one place that picks the C runtime or the NumPy reference.

Both write the same bits. Arrays are cut into blocks of rows that share nothing, so any number of threads gives the
same bytes, and an array of any strides is gathered one block at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tqtool.codec import reference
from tqtool.codec.codebook import LAWS, Codebook, Law, lloyd_max
from tqtool.codec.rotation import hadamard_order
from tqtool.codec.sizes import FLOAT32_BYTES, MAX_BITS, META_BYTES, Meta, packed_bytes, vector_bytes
from tqtool.codec.theory import expected_errors
from tqtool.errors import InputError, IntegrityError, UsageError
from tqtool.parallel import ordered_map
from tqtool.runtime import binding as runtime

ScaleRule = Literal["match", "norm", "lsq", "unbiased"]
SCALE_RULES: tuple[ScaleRule, ...] = ("match", "norm", "lsq", "unbiased")  # the order is the C runtime's enum
BLOCK_BYTES = 4 << 20  # of float32: a unit of work for one thread, and all that is gathered at a time
MAX_SCALE = 2.0**126  # no encoder writes more: 40.1 * 2^120
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_TYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """Everything that decides the bytes of an encoded vector. Raises `UsageError` or `InputError` ("dim")."""

    dim: int
    bits: int = 4
    law: Law = "beta"
    scale_rule: ScaleRule = "match"
    meta: Meta = "range"
    seed: int = 0

    def __post_init__(self) -> None:
        hadamard_order(self.dim)
        if not 1 <= self.bits <= MAX_BITS:
            raise UsageError(f"{self.bits} bits: a code has 1 to {MAX_BITS} bits", code="usage")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed {self.seed} is not a 64-bit unsigned number", code="usage")
        for value, allowed, what in (
            (self.law, LAWS, "law"),
            (self.scale_rule, SCALE_RULES, "scale rule"),
            (self.meta, tuple(META_BYTES), "metadata form"),
        ):
            if value not in allowed:
                raise UsageError(f"{what} {value!r} is none of {', '.join(allowed)}", code="usage")

    @property
    def book(self) -> Codebook:
        """The codebook of this law, length and width."""
        return lloyd_max(self.dim, self.bits, self.law)

    @property
    def code_bytes(self) -> int:
        """Bytes of one vector's codes."""
        return packed_bytes(self.dim, self.bits)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector, metadata included."""
        return vector_bytes(self.dim, self.bits, self.meta)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoded vectors of one spec: what `decode` needs, and nothing else."""

    spec: CodecSpec
    codes: NDArray[np.uint8]  # (..., code_bytes)
    meta: NDArray[np.generic]  # range: (..., 2) float32 [scale, norm]; f32: (...) float32; bf16: (...) bfloat16

    def __post_init__(self) -> None:
        lead = self.codes.shape[:-1]
        dtype = BFLOAT16 if self.spec.meta == "bf16" else np.dtype(np.float32)
        expected = (*lead, 2) if self.spec.meta == "range" else lead
        if self.codes.dtype != np.uint8 or self.codes.shape != (*lead, self.spec.code_bytes):
            raise ValueError(f"codes {self.codes.dtype} {self.codes.shape} do not fit {self.spec}")
        if self.meta.dtype != dtype or self.meta.shape != expected:
            raise ValueError(f"metadata {self.meta.dtype} {self.meta.shape}; expected {dtype} {expected}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        return (*self.codes.shape[:-1], self.spec.dim)

    @property
    def scales(self) -> NDArray[np.float32]:
        """The number that decoding multiplies each vector by, shape (...)."""
        scales = self.meta[..., 0] if self.spec.meta == "range" else self.meta
        return scales.astype(np.float32, copy=False)

    @property
    def nbytes(self) -> int:
        """Stored bytes, metadata included."""
        return int(self.codes.nbytes + self.meta.nbytes)


def engine() -> Literal["runtime", "reference"]:
    """Return which implementation runs: the C runtime unless it was not built or `TQTOOL_ENGINE=reference`."""
    wanted = os.environ.get("TQTOOL_ENGINE", "runtime")
    return "runtime" if wanted != "reference" and runtime.available() else "reference"


def encode(x: NDArray[np.generic], spec: CodecSpec, *, threads: int | None = None) -> Encoded:
    """Encode the vectors along the last axis of x (..., dim): float16, bfloat16, float32 or float64.

    Float64 is rounded to float32 first. Raises `InputError`: "dtype", "shape", "non-finite" or "norm-range", the last
    two with positions.
    """
    if x.dtype.newbyteorder("=") not in FLOAT_TYPES:
        raise InputError(
            f"dtype {x.dtype} is not floating point",
            code="dtype",
            hint="convert the array with .astype(np.float32)",
        )
    if x.ndim == 0 or x.shape[-1] != spec.dim:
        raise InputError(f"array of shape {x.shape}; need (..., {spec.dim})", code="shape")
    encode_rows = runtime.encode_rows if engine() == "runtime" else reference.encode_rows
    count = prod(x.shape[:-1])
    codes = np.empty((count, spec.code_bytes), np.uint8)
    meta = np.empty((count, 2) if spec.meta == "range" else (count,), BFLOAT16 if spec.meta == "bf16" else np.float32)

    def encode_block(block: tuple[int, NDArray[np.generic]]) -> None:
        start, rows = block
        part = slice(start, start + len(rows))
        scales, norms = np.empty((2, len(rows)), np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN would warn before it is refused
            bad = encode_rows(_native(rows), spec, codes[part], scales, norms)
            if bad >= 0:
                raise refusal(x)
        if spec.meta == "range":
            meta[part, 0], meta[part, 1] = scales, norms
        else:
            meta[part] = scales

    for _ in ordered_map(encode_block, row_blocks(x, block_rows(spec.dim)), threads=threads):
        pass
    lead = x.shape[:-1]
    return Encoded(spec, codes.reshape(*lead, spec.code_bytes), meta.reshape(*lead, *meta.shape[1:]))


def decode(
    encoded: Encoded, *, out: NDArray[np.float32] | None = None, threads: int | None = None
) -> NDArray[np.float32]:
    """Return the restored vectors, shape (..., dim), float32: `out`, if given, a contiguous array of that shape.

    `IntegrityError` if a scale is impossible.
    """
    spec = encoded.spec
    decode_rows = runtime.decode_rows if engine() == "runtime" else reference.decode_rows
    if out is None:
        out = np.empty(encoded.shape, np.float32)
    elif out.shape != encoded.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out {out.dtype} {out.shape}; need a contiguous float32 array {encoded.shape}")
    codes = np.ascontiguousarray(encoded.codes).reshape(-1, spec.code_bytes)
    scales = (encoded.meta[..., 0] if spec.meta == "range" else encoded.meta).reshape(-1)
    rows = out.reshape(-1, spec.dim)
    step = block_rows(spec.dim)

    def decode_block(start: int) -> None:
        part = slice(start, start + step)
        scale = np.ascontiguousarray(scales[part], np.float32)
        if not ((scale >= 0) & (scale <= MAX_SCALE)).all():
            raise IntegrityError("a scale is negative, not finite or beyond 2^126", code="metadata")
        decode_rows(codes[part], scale, spec, rows[part])

    for _ in ordered_map(decode_block, range(0, len(codes), step), threads=threads):
        pass
    return out


def expected_error(spec: CodecSpec) -> float:
    """Return the expected relative squared error of a vector, mean over rotations, for the spec's scale rule."""
    return expected_errors(spec.dim, spec.bits, spec.law)[spec.scale_rule]


def block_rows(dim: int) -> int:
    """Return how many vectors make a unit of work."""
    return BLOCK_BYTES // (FLOAT32_BYTES * dim)


def row_blocks(x: NDArray[np.generic], rows: int) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """Yield (start, block) over the vectors of x (..., dim) in C order: blocks (n, dim), n <= rows.

    A block is a view where the strides allow it, else a copy of that block alone.
    """
    if x.ndim <= 2:
        flat = x.reshape(-1, x.shape[-1])
        for start in range(0, len(flat), rows):
            yield start, flat[start : start + rows]
        return
    inner = prod(x.shape[1:-1])
    if inner == 0:
        return
    if inner > rows:
        for i, part in enumerate(x):
            for start, block in row_blocks(part, rows):
                yield i * inner + start, block
        return
    step = rows // inner
    for i in range(0, len(x), step):
        yield i * inner, x[i : i + step].reshape(-1, x.shape[-1])


def _native(rows: NDArray[np.generic]) -> NDArray[np.floating]:
    """Return the rows in a type that both engines read, contiguous; float64 is rounded to float32."""
    dtype = rows.dtype.newbyteorder("=")
    if dtype == np.float64:
        with np.errstate(over="ignore"):  # becomes infinite, and is then refused with its position
            return np.ascontiguousarray(rows, np.float32)
    return np.ascontiguousarray(rows, dtype)


def refusal(x: NDArray[np.generic]) -> InputError:
    """Return the error that says where x (..., dim) is not finite or too long. One of the two must hold."""
    counts = []
    places = []
    for name, found in (("NaN", np.isnan(x)), ("Inf", np.isinf(x))):
        if count := int(found.sum()):
            counts.append(f"{count} {name}")
            places.append(f"first {name} at {_place(found)}")
    if counts:
        return InputError(
            f"{', '.join(counts)}; {', '.join(places)}",
            code="non-finite",
            hint="--nan zero sets these values to 0",
        )
    norms = np.zeros(x.shape[:-1])
    for j in range(x.shape[-1]):
        norms = np.hypot(norms, x[..., j].astype(np.float64))
    too_long = norms > reference.MAX_NORM
    if not too_long.any():  # a float64 value beyond float32
        too_long = (np.abs(x) > np.finfo(np.float32).max).any(axis=-1)
    return InputError(
        f"vector {_place(too_long)} has norm {norms[too_long].flat[0]:.2g}, the limit is 2^120",
        code="norm-range",
        hint="rescale the data",
    )


def _place(found: NDArray[np.bool_]) -> list[int]:
    return [int(i) for i in np.unravel_index(int(found.argmax()), found.shape)]
