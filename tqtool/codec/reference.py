"""The executable definition of the codec: encode and decode blocks of vectors with NumPy, bit for bit.

Inside, a vector is a column: every step then runs over whole rows of the block, and a sum over coordinates is a loop
in index order, the only order that gives the same bits everywhere. Products that feed a sum are float32 x float32 in
float64, hence exact; an inexact product stands alone. `np.sum`, `np.linalg.norm`, `einsum` and `@` promise no order
and have no place here. The C runtime does the same steps and must agree on every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.packing import pack_columns, unpack_columns
from tqtool.codec.rotation import hadamard, hadamard_inverse, rotate, signs, unrotate
from tqtool.codec.spec import Encoded

MAX_NORM = 2.0**120  # beyond it a scale could overflow float32
BLOCK_BYTES = 1 << 20  # of float32: the fastest measured (benchmarks/reference_blocks.py), half a second-level cache
QUANTIZE_ROWS = 16  # coordinates compared at a time, so that their codes stay in the first-level cache
MOST_COMPARED = 31  # boundaries up to 5 bits are compared one by one; from 6 bits a search is faster


def encode_rows(rows: NDArray[np.floating], out: Encoded) -> int:
    """Encode rows (n, dim) into out of lead (n,).

    Returns -1, or the index of the first row whose norm is not finite or exceeds 2^120; its block is not written then.
    Source: Zandieh et al. 2025, arXiv:2504.19874, Algorithm 1; steps 1 to 5 of `docs/codec.md`.
    """
    spec = out.spec
    for part in _blocks(len(rows), spec.dim):
        columns = np.array(
            rows[part].T, dtype=np.float32, order="C"
        )  # (dim, n), always a copy: it is worked on in place
        norm = column_norms(columns)
        bad = ~(norm <= MAX_NORM)
        if bad.any():
            return int(part.start + bad.argmax())
        normalize(columns, norm, spec.seed)
        hadamard(columns)
        indices = quantize(columns, spec.boundaries)
        scales = scale_factors(spec.scale_rule, norm, columns, indices, spec.centroids)
        out.codes[part] = pack_columns(indices, spec.bits).T
        out[part].set_meta(scales, norm.astype(np.float32))
    return -1


def decode_rows(encoded: Encoded, out: NDArray[np.float32]) -> None:
    """Decode vectors of lead (n,) into out (n, dim): the inverse of `encode_rows`."""
    spec = encoded.spec
    decode_with(encoded.codes, encoded.scales, spec.centroids, signs(spec.seed, spec.dim), out)


def scores(q: NDArray[np.float32], keys: Encoded) -> NDArray[np.float32]:
    """Return the products of queries (m, dim) and keys of lead (n,), shape (m, n): float arithmetic, not bit-specified.

    A stored vector is scale * R^-1 c, so q . x = scale * (R q) . c: no key is un-rotated.
    Source: the specification, Fused dequant-dot.
    """
    turned = rotate(q, keys.spec.seed)
    out = np.empty((len(q), len(keys.codes)), np.float32)
    for part in _blocks(len(keys.codes), keys.spec.dim):
        np.matmul(turned, _centroid_columns(keys[part]), out=out[:, part])
    out *= keys.scales
    return out


def mix(weights: NDArray[np.float32], values: Encoded) -> NDArray[np.float32]:
    """Return the sums (m, dim) of values of lead (n,), weighted by weights (m, n); un-rotated once, at the end."""
    total = np.zeros((len(weights), values.spec.dim))
    scaled = weights * values.scales
    for part in _blocks(len(values.codes), values.spec.dim):
        total += scaled[:, part] @ _centroid_columns(values[part]).T
    return unrotate(total.astype(np.float32), values.spec.seed)


def _blocks(count: int, dim: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (4 * dim))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _centroid_columns(encoded: Encoded) -> NDArray[np.float32]:
    """Vectors of lead (n,) as columns of centroids (dim, n), neither scaled nor un-rotated."""
    spec = encoded.spec
    codes = unpack_columns(np.ascontiguousarray(encoded.codes.T), spec.bits, spec.dim)
    columns: NDArray[np.float32] = spec.centroids.take(codes)
    return columns


def decode_with(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    centroids: NDArray[np.float32],
    signed: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Decode with tables from elsewhere (a file's own): centroids (2**bits,) and signs (dim,)."""
    dim, bits = len(signed), len(centroids).bit_length() - 1
    for part in _blocks(len(codes), dim):
        indices = unpack_columns(np.ascontiguousarray(codes[part].T), bits, dim)
        columns = centroids.take(indices)  # (dim, n)
        hadamard_inverse(columns)
        _scale_rows(columns, scales[part].astype(np.float64) / sqrt(dim), signed)
        out[part] = columns.T


def column_norms(columns: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the L2 norm of each column: squares added in index order, in float64."""
    total = np.zeros(columns.shape[1])
    for row in columns:
        wide = row.astype(np.float64)
        total += np.multiply(wide, wide, out=wide)
    return np.sqrt(total, out=total)


def normalize(columns: NDArray[np.float32], norm: NDArray[np.float64], seed: int) -> None:
    """Divide each column by norm * sqrt(dim) and apply the signs, in place; zero columns stay zero."""
    inverse = np.divide(1.0, norm * sqrt(len(columns)), out=np.zeros_like(norm), where=norm > 0)
    _scale_rows(columns, inverse, signs(seed, len(columns)))


def _scale_rows(columns: NDArray[np.float32], factors: NDArray[np.float64], signed: NDArray[np.float32]) -> None:
    """Multiply column n by factors[n] and row j by its sign, one rounding to float32 each, in place."""
    of_sign = {1.0: factors, -1.0: -factors}  # negation is exact: it may precede the rounding
    wide = np.empty_like(factors)
    for row, sign in zip(columns, signed.tolist(), strict=True):
        row[:] = np.multiply(row, of_sign[sign], out=wide)


def quantize(columns: NDArray[np.float32], boundaries: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the index of each value's cell: the number of boundaries <= value. Same shape, uint8."""
    if len(boundaries) > MOST_COMPARED:
        return boundaries.searchsorted(columns, side="right").astype(np.uint8)
    indices = np.zeros(columns.shape, np.uint8)
    for start in range(0, len(columns), QUANTIZE_ROWS):
        values, counts = columns[start : start + QUANTIZE_ROWS], indices[start : start + QUANTIZE_ROWS]
        above = np.empty(values.shape, bool)
        for boundary in boundaries:
            counts += np.greater_equal(values, boundary, out=above).view(np.uint8)
    return indices


def scale_factors(
    rule: str,
    norm: NDArray[np.float64],
    columns: NDArray[np.float32],
    indices: NDArray[np.uint8],
    centroids: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the number that decoding multiplies each vector by, shape (n,), rounded once to float32.

    C = sum of c^2 is taken from a float32 table, which makes it exact in float64 whatever the order.
    """
    if rule == "norm":
        return norm.astype(np.float32)
    energy = np.zeros_like(norm)  # C
    product = np.zeros_like(norm)  # sum of y * c
    wide_centroids = centroids.astype(np.float64)
    squares = (wide_centroids**2).astype(np.float32).astype(np.float64)
    for row, index in zip(columns, indices, strict=True):
        if rule != "unbiased":
            energy += squares.take(index)
        if rule != "match":
            product += row * wide_centroids.take(index)
    if rule == "match":
        return (norm / np.sqrt(energy)).astype(np.float32)
    if rule == "lsq":
        return (norm * product / energy).astype(np.float32)
    assert rule == "unbiased"
    safe = np.where(norm > 0, product, 1.0)  # a zero vector has the product of zeros
    return (norm / safe).astype(np.float32)
