"""Inputs and comparison for the law that runtime and reference agree on every bit; used here and by tests/slow."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tqtool.codec import reference
from tqtool.codec.rotation import unrotate
from tqtool.codec.spec import CodecSpec
from tqtool.runtime import binding as runtime

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def hard_rows(dim: int, bits: int, count: int, seed: int, dtype: np.dtype) -> NDArray[np.generic]:
    """Rows (count, dim): one of each fault class, in random places, among normal ones."""
    boundaries = CodecSpec(dim, bits).boundaries
    rng = np.random.default_rng([dim, bits, count, seed])
    return fault_rows(dim, count, [boundary_row(dim, boundaries, seed)], rng, dtype)


def boundary_row(dim: int, boundaries: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """A row (dim,) whose rotation lies on the boundaries, or a rounding beside them."""
    return unrotate(boundaries[np.random.default_rng(dim).integers(len(boundaries), size=dim)], seed)


def fault_rows(
    dim: int, count: int, own: list[NDArray[np.float32]], rng: np.random.Generator, dtype: np.dtype
) -> NDArray[np.generic]:
    """Rows (count, dim): the faults, of which `own` come first, in random places among normal rows."""
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    index = np.arange(dim)
    special = (
        *own,
        0 * rows[0],
        -0.0 * rows[0],
        np.full(dim, 3.0),
        np.where(index == dim // 3, -2.0, 0.0),
        np.where(index % 2, 1.0, -1.0),  # a Walsh row
        np.where((index & 5) % 3 % 2, 1.0, -1.0),
        np.where(index < 2, 1.0, 0.0),  # half of its rotation lies exactly on the middle boundary
        rows[0] * 1e-42,
        rows[0] * 1e-30,
        rows[0] * 1e30,
        np.where(index == 1, 1e30, 1e-30),
        np.full(dim, -1.17e-38),
    )
    for place, row in zip(rng.permutation(count), special, strict=False):
        rows[place] = row
    if dtype == np.float16:
        rows = np.clip(rows, -60000, 60000)
    return rows.astype(dtype)


def outputs(engine: str, rows: NDArray[np.generic], spec: CodecSpec) -> dict[str, NDArray[np.generic]]:
    """What `engine` ("reference", "plain" or "best") makes of the rows."""
    encoded = spec.zeros((len(rows),))
    decoded = np.empty(rows.shape, np.float32)
    if engine == "reference":
        bad = reference.encode_rows(rows, encoded)
        reference.decode_rows(encoded, decoded)
    else:
        plain = engine == "plain"
        bad = runtime.encode_rows(rows, encoded, plain=plain)
        runtime.decode_rows(encoded, decoded, plain=plain)
    assert bad == -1
    return {**encoded.arrays, "decoded": decoded}


def differences(rows: NDArray[np.generic], spec: CodecSpec, engines: tuple[str, ...] = ("best", "plain")) -> list[str]:
    """One line for each output of an engine that differs from the reference in a bit; [] is the law."""
    expected = outputs("reference", rows, spec)
    found = []
    for engine in engines:
        actual = outputs(engine, rows, spec)
        for name, array in expected.items():
            if array.tobytes() != actual[name].tobytes():
                unequal = (array != actual[name]).reshape(len(rows), -1).any(axis=1)
                found.append(f"{spec} {rows.dtype} n={len(rows)} {engine}: {name} of rows {np.flatnonzero(unequal)}")
    return found
