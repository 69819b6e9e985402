"""Golden vectors: inputs and the bits that the reference makes of them, for tests of other programs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tqtool.codec import reference
from tqtool.codec.rotation import hadamard, signs, splitmix64
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import SCALE_RULES

FLOAT_MAX_NORM = np.float32(2.0**120)  # the longest vector that is not refused


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """What the reference makes of the golden rows of one length at one width."""

    dim: int
    bits: int
    codes: NDArray[np.uint8]  # (rows, code_bytes)
    scales: NDArray[np.float32]  # (rows, 4), in the order of SCALE_RULES
    norms: NDArray[np.float32]  # (rows,)
    decoded_crc32: NDArray[np.uint32]  # (rows,) of the little-endian float32 vector, rule `match`


def golden_rows(dim: int, boundaries: NDArray[np.float32], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return one named row (dim,) for each fault class.

    `boundaries` are those of a table: one row comes out exactly on one of them.
    """
    integers = (splitmix64(dim, 8 * dim) >> np.uint64(40)).astype(np.int64) - (1 << 23)
    random = (integers / 2.0**21).astype(np.float32).reshape(8, dim)
    index = np.arange(dim)
    first, last = (index == 0).astype(np.float32), (index == dim - 1).astype(np.float32)
    signed = signs(seed, dim)
    rows = {
        "random": random[0],
        "random, another": random[1],
        "cubed": random[2] ** 3,
        "one outlying channel": random[3] + 1000 * (index == dim // 2),
        "common offset": random[4] + 20,
        "growing": random[5] * np.exp2(index % 40),
        "whole numbers": np.round(random[6]),
        "zero": 0 * first,
        "negative zero": -0.0 * first,
        "constant": np.full(dim, 3.0),
        "constant after the signs": signed,
        "first coordinate only": first,
        "last coordinate only, negative": -2 * last,
        "alternating": np.where(index % 2, -1.0, 1.0) * signed,
        "on the middle boundary": first + (index == 1),
        "on another boundary": on_boundary(dim, boundaries, seed),
        "1e-42": random[0] * np.float32(2.0**-143),
        "smallest subnormal": np.float32(2.0**-149) * first,
        "1e-30": random[1] * np.float32(1e-30),
        "1e+30": random[2] * np.float32(1e30),
        "norm 2^120": FLOAT_MAX_NORM * last,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def on_boundary(dim: int, boundaries: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Return a row of two non-zero coordinates that the rotation takes exactly onto a boundary other than 0.

    Its rotated coordinates are plus and minus two values, the sum and the difference of both coordinates; their ratio
    is searched among neighbouring floats. The boundary nearest to 1.2 standard deviations is a sum that rounding
    reaches, where there is one.
    """
    others = boundaries[boundaries != 0] if len(boundaries) > 1 else boundaries
    wanted = others[np.abs(others * np.sqrt(dim) - 1.2).argmin()]
    angle = np.arcsin(np.clip(wanted * np.sqrt(dim / 2), -1, 1)) - np.pi / 4
    columns = np.zeros((dim, 4001), np.float32)
    columns[0] = np.cos(angle)
    start = np.float32(np.sin(angle))
    columns[1] = start + np.arange(-2000, 2001, dtype=np.float32) * np.spacing(start)
    rotated = columns.copy()
    reference.normalize(rotated, reference.column_norms(rotated), seed)
    hadamard(rotated)
    hits = np.flatnonzero((rotated == wanted).any(axis=0))
    return columns[:, hits[0] if len(hits) else 2000]


def golden(rows: NDArray[np.float32], spec: CodecSpec) -> Golden:
    """Return what the reference makes of rows (n, dim) under each scale rule; the spec's own rule plays no part."""
    of_rule = {rule: replace(spec, scale_rule=rule, meta="range").zeros((len(rows),)) for rule in SCALE_RULES}
    for encoded in of_rule.values():
        refused = reference.encode_rows(rows, encoded)
        assert refused == -1
    matched = of_rule["match"]
    codes, norms = matched.codes, matched.meta[:, 1].astype(np.float32)
    scales = np.stack([encoded.scales for encoded in of_rule.values()], axis=1)
    decoded = np.empty(rows.shape, np.float32)
    reference.decode_rows(matched, decoded)
    crcs = [zlib.crc32(row.astype("<f4").tobytes()) for row in decoded]
    return Golden(spec.dim, spec.bits, codes, scales, norms, np.array(crcs, np.uint32))
