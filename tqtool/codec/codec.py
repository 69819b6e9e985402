"""Encode and decode arrays of vectors: the one place that picks the C runtime or the NumPy reference.

Both write the same bits. Arrays are cut into blocks of rows that share nothing, so any number of threads gives the
same bytes, and an array of any strides is gathered one block at a time.
"""

from __future__ import annotations

import os
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.codec import reference
from tqtool.codec.blocks import block_rows, row_blocks
from tqtool.codec.refusals import refusal
from tqtool.codec.spec import FLOAT_TYPES, CodecSpec, Encoded
from tqtool.codec.theory import expected_errors
from tqtool.dtypes import AnyArray
from tqtool.errors import InputError, IntegrityError
from tqtool.parallel import ordered_map
from tqtool.runtime import binding as runtime

MAX_SCALE = 2.0**126  # no encoder writes more: 40.1 * 2^120


def engine() -> Literal["runtime", "reference"]:
    """Return which implementation runs: the C runtime unless it was not built or `TQTOOL_ENGINE=reference`."""
    wanted = os.environ.get("TQTOOL_ENGINE", "runtime")
    return "runtime" if wanted != "reference" and runtime.available() else "reference"


def encode(x: AnyArray, spec: CodecSpec, *, threads: int | None = None) -> Encoded:
    """Encode the vectors along the last axis of x (..., dim): float16, bfloat16, float32 or float64.

    Float64 is rounded to float32 first. Raises `InputError`: "dtype", "shape", "non-finite" or "norm-range", the last
    two with positions.
    """
    encoded = encode_if_possible(x, spec, threads=threads)
    if encoded is None:
        raise refusal(x)
    return encoded


def encode_if_possible(x: AnyArray, spec: CodecSpec, *, threads: int | None = None) -> Encoded | None:
    """Encode as `encode` does; None if a vector is not finite or too long: the caller knows better where it lies."""
    if x.dtype.newbyteorder("=") not in FLOAT_TYPES:
        raise InputError(
            f"dtype {x.dtype} is not floating point",
            code="dtype",
            hint="convert the array with .astype(np.float32)",
        )
    if x.ndim == 0 or x.shape[-1] != spec.dim:
        raise InputError(f"array of shape {x.shape}; need (..., {spec.dim})", code="shape")
    encode_rows = runtime.encode_rows if engine() == "runtime" else reference.encode_rows
    out = spec.zeros((prod(x.shape[:-1]),))

    def encode_block(block: tuple[int, AnyArray]) -> bool:
        start, rows = block
        with np.errstate(invalid="ignore"):  # a signalling NaN would warn before it is refused
            return encode_rows(_native(rows), out[start : start + len(rows)]) < 0

    possible = all(ordered_map(encode_block, row_blocks(x, block_rows(spec.dim)), threads=threads))
    return out.reshape(*x.shape[:-1]) if possible else None


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
    vectors, rows = encoded.reshape(-1), out.reshape(-1, spec.dim)
    step = block_rows(spec.dim)

    def decode_block(start: int) -> None:
        part = slice(start, start + step)
        scales = vectors[part].scales
        if not ((scales >= 0) & (scales <= MAX_SCALE)).all():
            raise IntegrityError("a scale is negative, not finite or beyond 2^126", code="metadata")
        decode_rows(vectors[part], rows[part])

    for _ in ordered_map(decode_block, range(0, len(rows), step), threads=threads):
        pass
    return out


def scores(q: NDArray[np.float32], keys: Encoded) -> NDArray[np.float32]:
    """Return the products of queries (m, dim) and encoded keys of lead (n,), shape (m, n), in the rotated domain."""
    return runtime.scores(q, keys) if engine() == "runtime" else reference.scores(q, keys)


def mix(weights: NDArray[np.float32], values: Encoded) -> NDArray[np.float32]:
    """Return the sums (m, dim) of encoded values of lead (n,), weighted by weights (m, n)."""
    return runtime.mix(weights, values) if engine() == "runtime" else reference.mix(weights, values)


def attends() -> bool:
    """Return whether the engine in use has all of attention in one call, `runtime.attend`."""
    return engine() == "runtime"


def expected_error(spec: CodecSpec) -> float:
    """Return the expected relative squared error of a vector, mean over rotations, for the spec's scale rule."""
    return expected_errors(spec.dim, spec.bits, spec.law)[spec.scale_rule]


def _native(rows: AnyArray) -> NDArray[np.floating]:
    """Return the rows in a type that both engines read, contiguous; float64 is rounded to float32."""
    dtype = rows.dtype.newbyteorder("=")
    if dtype == np.float64:
        with np.errstate(over="ignore"):  # becomes infinite, and is then refused with its position
            return np.ascontiguousarray(rows, np.float32)
    return np.ascontiguousarray(rows, dtype)
