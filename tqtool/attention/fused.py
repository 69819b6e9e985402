"""Attention straight from packed codes, in the rotated domain.

A stored vector is scale * R^-1 c, so q . x = scale * (R q) . c: queries are rotated once, scored against centroids,
values are summed in the rotated domain, and the sum is un-rotated once. No cached vector is ever un-rotated. The C
runtime does it where it was built; `scores` and `mix` of `codec.reference` say what it computes.
Source: the specification, Fused dequant-dot.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.plain import AttentionConfig, query_blocks, reach, seen_mask, soft_cap, softmax
from tqtool.attention.stored import PARALLEL_WORK, Stored
from tqtool.codec.codec import attends, mix, scores
from tqtool.dtypes import FloatArray
from tqtool.parallel import ordered_map
from tqtool.runtime import binding as runtime


def fused_attention(
    q: FloatArray,
    keys: Stored,
    values: Stored,
    config: AttentionConfig,
    seen: NDArray[np.bool_] | None = None,
    *,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """Return attention of q (batch, q_len, heads, dim) over stored keys and values, in float32.

    The queries are of the last q_len vectors, as the configuration's masks count them; `seen` (1 or kv_heads, q_len, n)
    hides vectors besides.
    """
    batch, q_len, heads, dim = q.shape
    count, kv_heads = keys.row_of.shape
    threads = 1 if batch * kv_heads * count * dim < PARALLEL_WORK else threads
    if config.window is not None and seen is None and q_len == 1:
        near = reach(1, count, config, start=count - 1)
        keys, values, config = keys.part(near), values.part(near), replace(config, window=None)
        count = near.stop - near.start
    if seen is None and config.window is None and config.softcap is None and attends():
        return _attend(q, keys, values, config, causal=config.causal, threads=threads)
    scaled = q.astype(np.float32) * np.float32(config.score_scale)
    out = np.empty(q.shape, np.float32)
    units = list(product(range(batch), range(kv_heads)))
    for part in query_blocks(q_len, batch * heads * count):
        first, length = count - q_len + part.start, part.stop - part.start
        near = reach(length, count, config, start=first)
        start, width = first - near.start, near.stop - near.start
        mask = seen_mask(length, width, causal=config.causal, window=config.window, start=start)[None]
        mask = mask if seen is None else mask & seen[:, part, near]
        attend = partial(_attend_head, scaled[:, part], keys.part(near), values.part(near), config, mask, out[:, part])
        for _ in ordered_map(attend, units, threads=threads):
            pass
    return out


def chosen_attention(
    q: FloatArray,
    keys: Stored,
    values: Stored,
    config: AttentionConfig,
    slots: NDArray[np.int64],
    *,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """Return attention of single queries q (batch, 1, heads, dim) over the slots (1 or kv_heads, n), -1 for none.

    The C runtime reads these slots and no others; it must be the engine in use (`attends`).
    """
    return _attend(q, keys, values, config, choice=slots.astype(np.int32), threads=threads)


def _attend(q: FloatArray, keys: Stored, values: Stored, config: AttentionConfig, **how: Any) -> NDArray[np.float32]:
    """Hand everything over to the C runtime: codes, and the rows that are kept in float32."""
    sides = (
        runtime.Side(side.encoded, np.ascontiguousarray(side.exact), side.row_of[:, 0].astype(np.int32))
        if side.protected
        else runtime.Side(side.encoded)
        for side in (keys, values)
    )
    return runtime.attend(q.astype(np.float32), *sides, scale=config.score_scale, **how)


def _attend_head(
    q: NDArray[np.float32],
    keys: Stored,
    values: Stored,
    config: AttentionConfig,
    seen: NDArray[np.bool_],
    out: NDArray[np.float32],
    unit: tuple[int, int],
) -> None:
    """Attention of one sequence and key-value head: the scaled queries' part of q into the same part of out."""
    sequence, head = unit
    group = q.shape[2] // keys.row_of.shape[1]
    part = np.s_[sequence, :, head * group : (head + 1) * group]  # (q_len, group, dim)
    rows = np.ascontiguousarray(q[part].reshape(-1, q.shape[3]))
    raw = scores(rows, keys.encoded[sequence, :, head])  # (q_len * group, n)
    places, exact = keys.exact_head(*unit)
    raw[:, places] = rows @ exact.T
    raw = soft_cap(raw, config)
    hidden = ~seen[min(head, len(seen) - 1)][:, None]
    np.copyto(raw.reshape(q.shape[1], group, -1), -np.inf, where=hidden)
    weights = softmax(raw)
    places, exact = values.exact_head(*unit)
    added = weights[:, places] @ exact
    weights[:, places] = 0
    out[part] = (mix(weights, values.encoded[sequence, :, head]) + added).reshape(out[part].shape)
