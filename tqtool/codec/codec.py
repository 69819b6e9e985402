"""Encode and decode arrays of vectors: the one place that picks the C runtime or the NumPy reference.

Both write the same bits. Arrays are cut into blocks of rows that share nothing, so any number of threads gives the
same bytes, and an array of any strides is gathered one block at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.codec import reference
from tqtool.codec.spec import FLOAT_TYPES, CodecSpec, Encoded
from tqtool.codec.terms import FLOAT32_BYTES
from tqtool.codec.theory import expected_errors
from tqtool.errors import InputError, IntegrityError
from tqtool.parallel import ordered_map
from tqtool.runtime import binding as runtime

BLOCK_BYTES = 4 << 20  # of float32: a unit of work for one thread, and all that is gathered at a time
MAX_SCALE = 2.0**126  # no encoder writes more: 40.1 * 2^120


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
    out = spec.zeros((prod(x.shape[:-1]),))

    def encode_block(block: tuple[int, NDArray[np.generic]]) -> None:
        start, rows = block
        with np.errstate(invalid="ignore"):  # a signalling NaN would warn before it is refused
            if encode_rows(_native(rows), out[start : start + len(rows)]) >= 0:
                raise refusal(x)

    for _ in ordered_map(encode_block, row_blocks(x, block_rows(spec.dim)), threads=threads):
        pass
    return out.reshape(*x.shape[:-1])


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
