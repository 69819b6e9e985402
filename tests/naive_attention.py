"""Plain-loop referees for attention and rotary embedding: Python floats, one loop an index."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    sees: Callable[[int, int], bool] = lambda query, key: True,
    softcap: float | None = None,
    mask: Array | None = None,
) -> NDArray[np.float64]:
    """Attention by its definition; `sees(position of query, position of key)` is the mask rule."""
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = np.zeros((batch, q_len, heads, v.shape[3]))
    for b in range(batch):
        for i in range(q_len):
            for h in range(heads):
                g = h // (heads // kv_heads)
                row = {}
                for j in range(kv_len):
                    if not sees(kv_len - q_len + i, j):
                        continue
                    score = scale * math.fsum(float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, g], strict=True))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if mask is not None:
                        score += float(mask[b % len(mask), h % mask.shape[1], i, j])
                    if score != -math.inf:
                        row[j] = score
                if not row:
                    continue
                top = max(row.values())
                weights = {j: math.exp(score - top) for j, score in row.items()}
                total = math.fsum(weights.values())
                for c in range(v.shape[3]):
                    out[b, i, h, c] = math.fsum(w * float(v[b, j, g, c]) for j, w in weights.items()) / total
    return out


def rope(x: Array, *, start_pos: int, theta: float, pairing: str) -> NDArray[np.float64]:
    """Turn each pair of coordinates of x (batch, seq, heads, dim) by position * theta**(-2i/dim)."""
    batch, seq, heads, dim = x.shape
    out = np.zeros(x.shape)
    for b in range(batch):
        for t in range(seq):
            for h in range(heads):
                for i in range(dim // 2):
                    one, two = (i, i + dim // 2) if pairing == "half" else (2 * i, 2 * i + 1)
                    angle = (start_pos + t) * theta ** (-2 * i / dim)
                    a, c = float(x[b, t, h, one]), float(x[b, t, h, two])
                    out[b, t, h, one] = a * math.cos(angle) - c * math.sin(angle)
                    out[b, t, h, two] = a * math.sin(angle) + c * math.cos(angle)
    return out
