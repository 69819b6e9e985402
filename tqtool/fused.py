"""Attention straight from packed codes, in the rotated domain.

A stored vector is scale * R^-1 c, so q . x = scale * (R q) . c: queries are rotated once, scored against centroids,
values are summed in the rotated domain, and the sum is un-rotated once. No cached vector is ever un-rotated.
Source: the specification, Fused dequant-dot.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention import Array, AttentionConfig, soft_cap, softmax
from tqtool.codec import CodecSpec
from tqtool.packing import unpack_columns
from tqtool.rotation import rotate, unrotate
from tqtool.stored import PARALLEL_WORK, Stored
from tqtool.units import ordered_map

BLOCK_BYTES = 1 << 20  # of centroids at a time, float32


def fused_attention(
    q: Array, keys: Stored, values: Stored, config: AttentionConfig, seen: NDArray[np.bool_] | None
) -> NDArray[np.float32]:
    """Return attention of q (batch, q_len, heads, dim) over stored keys and values, in float32.

    `seen` is (1 or kv_heads, q_len, n), None if every query sees every vector; the configuration's own mask rules are
    the caller's.
    """
    batch, q_len, heads, dim = q.shape
    count, kv_heads = keys.row_of.shape
    group = heads // kv_heads
    key_spec, value_spec = keys.encoded.spec, values.encoded.spec
    scaled = q.astype(np.float32) * np.float32(config.score_scale)
    turned = rotate(scaled, key_spec.seed)
    mixed = np.empty(q.shape, np.float32)  # rotated
    added = np.zeros(q.shape, np.float32)  # not rotated: the exact values' share

    def attend(unit: tuple[int, int]) -> None:
        sequence, head = unit
        part = np.s_[sequence, :, head * group : (head + 1) * group]  # (q_len, group, dim)
        raw = score_rows(turned[part].reshape(-1, dim), *keys.head(*unit), key_spec)  # (q_len * group, n)
        places, exact = keys.exact_head(*unit)
        raw[:, places] = scaled[part].reshape(-1, dim) @ exact.T
        raw = soft_cap(raw, config)
        if seen is not None:
            hidden = ~seen[min(head, len(seen) - 1)][:, None]
            np.copyto(raw.reshape(q_len, group, count), -np.inf, where=hidden)
        weights = softmax(raw)
        places, exact = values.exact_head(*unit)
        added[part] = (weights[:, places] @ exact).reshape(q_len, group, dim)
        weights[:, places] = 0
        mixed[part] = mix_rows(weights, *values.head(*unit), value_spec).reshape(q_len, group, dim)

    threads = 1 if batch * kv_heads * count * dim < PARALLEL_WORK else None
    for _ in ordered_map(attend, product(range(batch), range(kv_heads)), threads=threads):
        pass
    return unrotate(mixed, value_spec.seed) + added


def score_rows(
    queries: NDArray[np.float32], codes: NDArray[np.uint8], scales: NDArray[Any], spec: CodecSpec
) -> NDArray[np.float32]:
    """Return the products of rotated queries (m, dim) and encoded vectors (n, code_bytes), shape (m, n)."""
    out = np.empty((len(queries), len(codes)), np.float32)
    for part in _blocks(len(codes), spec.dim):
        np.matmul(queries, _centroid_columns(codes[part], spec), out=out[:, part])
    out *= scales.astype(np.float32, copy=False)
    return out


def mix_rows(
    weights: NDArray[np.float32], codes: NDArray[np.uint8], scales: NDArray[Any], spec: CodecSpec
) -> NDArray[np.float32]:
    """Return the rotated weighted sums (m, dim) of encoded vectors (n, code_bytes), for weights (m, n)."""
    out = np.zeros((len(weights), spec.dim))
    scaled = weights * scales.astype(np.float32, copy=False)
    for part in _blocks(len(codes), spec.dim):
        out += scaled[:, part] @ _centroid_columns(codes[part], spec).T
    return out.astype(np.float32)


def _blocks(count: int, dim: int) -> list[slice]:
    step = max(1, BLOCK_BYTES // (4 * dim))
    return [slice(start, start + step) for start in range(0, count, step)]


def _centroid_columns(codes: NDArray[np.uint8], spec: CodecSpec) -> NDArray[np.float32]:
    """Encoded rows (n, code_bytes) as columns of centroids (dim, n)."""
    columns: NDArray[np.float32] = spec.book.tables[1].take(
        unpack_columns(np.ascontiguousarray(codes.T), spec.bits, spec.dim)
    )
    return columns
