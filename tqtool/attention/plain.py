"""Scaled dot-product attention, written beside its equation; arrays are (batch, seq, heads, head_dim).

Query head h reads key-value head h // (heads / kv_heads). With fewer queries than keys, the queries are the
newest positions: query i sits at position kv_len - q_len + i. Arithmetic is in the widest of float32 and the
inputs' types: float16 and bfloat16 are widened, and whoever measures passes float64 and gets float64.
`scores`, `softmax` and `mix` are the three steps of `attention`; nothing here changes its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.dtypes import FloatArray
from tqtool.errors import InputError, UsageError

SCORE_BLOCK = 1 << 22  # scores held at once; bounds the memory of long prompts


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Heads and rules of one attention layer; `print` it to see them."""

    heads: int
    head_dim: int
    kv_heads: int | None = None  # None: as many as query heads
    causal: bool = False
    scale: float | None = None  # None: 1/sqrt(head_dim)
    window: int | None = None  # a query sees keys less than this many positions away
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    dropout: float = 0.0  # only 0: this is inference

    def __post_init__(self) -> None:
        """Raises: `UsageError` for values no layer can have."""
        for name in ("heads", "head_dim", "kv_heads", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, at least 1 is needed", code="usage")
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}, a positive number is needed", code="usage")
        if self.dropout != 0:
            raise UsageError(f"dropout is {self.dropout}, only 0 is possible in inference", code="usage")
        if self.heads % self.key_heads:
            raise InputError(f"{self.heads} query heads cannot share {self.key_heads} key heads", code="gqa")

    @property
    def key_heads(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def score_scale(self) -> float:
        """The factor of every q.k."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def __str__(self) -> str:
        """One line: `9 heads of 64 over 3 key-value heads, causal, scale 0.125`."""
        parts = [f"{self.heads} heads of {self.head_dim} over {self.key_heads} key-value heads"]
        parts += ["causal" if self.causal else "not causal", f"scale {self.score_scale:.6g}"]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"soft-cap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(parts)


def attention(q: FloatArray, k: FloatArray, v: FloatArray, config: AttentionConfig) -> FloatArray:
    """Return softmax(scale q k^T) v for k and v (batch, kv_len, kv_heads, head_dim); shaped like q.

    A query that sees no key gets zeros. The values' last axis may differ from the keys', and is the result's.
    Raises: `InputError` where the arrays do not fit each other or the configuration.
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 for the grouping.
    """
    return _attend(q, k, v, None, config)


def attention_mask(
    q: FloatArray, k: FloatArray, v: FloatArray, mask: FloatArray, config: AttentionConfig
) -> FloatArray:
    """Return attention with `mask` added to the scores, -inf where a key must not be seen.

    mask is (batch or 1, heads or 1, q_len, kv_len); the configuration's own rules hold as well.
    """
    return _attend(q, k, v, mask, config)


def multi_head(
    x: FloatArray, wq: FloatArray, wk: FloatArray, wv: FloatArray, wo: FloatArray, config: AttentionConfig
) -> FloatArray:
    """Return attention of projected x (batch, seq, embed), projected back by wo (heads*head_dim, embed).

    wq is (embed, heads*head_dim); wk and wv are (embed, kv_heads*head_dim).
    """
    q = _project(x, wq, config.heads, config, "wq")
    k = _project(x, wk, config.key_heads, config, "wk")
    v = _project(x, wv, config.key_heads, config, "wv")
    mixed = attention(q, k, v, config).reshape(*x.shape[:2], -1)  # (batch, seq, heads*head_dim)
    if wo.ndim != 2 or len(wo) != mixed.shape[-1]:
        raise InputError(f"wo is {wo.shape}, need ({mixed.shape[-1]}, embed)", code="shape-mismatch")
    out: FloatArray = mixed @ wo
    return out


def self_attention(x: FloatArray, wqkv: FloatArray, wo: FloatArray, config: AttentionConfig) -> FloatArray:
    """Return `multi_head` for one fused projection, wqkv (embed, (heads + 2*kv_heads)*head_dim): q, k, v."""
    cuts = np.array([config.heads, config.heads + config.key_heads]) * config.head_dim
    total = (config.heads + 2 * config.key_heads) * config.head_dim
    if wqkv.ndim != 2 or wqkv.shape[1] != total:
        raise InputError(f"wqkv is {wqkv.shape}, need (embed, {total})", code="shape-mismatch")
    wq, wk, wv = np.split(wqkv, cuts, axis=1)
    return multi_head(x, wq, wk, wv, wo, config)


def scores(
    q: FloatArray, k: FloatArray, config: AttentionConfig, *, mask: FloatArray | None = None, start: int | None = None
) -> FloatArray:
    """Return the masked scores (batch, kv_heads, heads/kv_heads, q_len, kv_len); -inf is not seen.

    `start` is the position of the first query among the keys, by default kv_len - q_len.
    """
    check_inputs(q, k, config)
    batch, q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    dtype = np.result_type(q, k, np.float32)
    grouped = q.reshape(batch, q_len, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    rows = grouped.reshape(batch, kv_heads, heads // kv_heads * q_len, dim).astype(dtype) * dtype.type(
        config.score_scale
    )
    columns = k.transpose(0, 2, 3, 1).astype(dtype, copy=False)  # (batch, kv_heads, dim, kv_len)
    raw: FloatArray = (rows @ columns).reshape(batch, kv_heads, heads // kv_heads, q_len, kv_len)
    raw = soft_cap(raw, config)
    if mask is not None:
        raw += _grouped_mask(mask, batch, q_len, kv_len, config)
    if config.causal or config.window is not None:
        seen = seen_mask(q_len, kv_len, causal=config.causal, window=config.window, start=start)
        np.copyto(raw, -np.inf, where=~seen)
    return raw


def soft_cap(raw: FloatArray, config: AttentionConfig) -> FloatArray:
    """Return softcap * tanh(raw / softcap), or the scores themselves without a soft-cap."""
    if config.softcap is None:
        return raw
    cap = raw.dtype.type(config.softcap)
    capped: FloatArray = cap * np.tanh(raw / cap)
    return capped


def softmax(scores: FloatArray) -> FloatArray:
    """Return the attention weights along the last axis; a row of -inf alone gives zeros."""
    if scores.shape[-1] == 0:
        return scores.copy()
    weights = np.empty_like(scores)
    total = exponentials(scores, shifted=weights, out=weights)
    weights /= np.where(total == 0, 1, total)
    return weights


def exponentials(scores: FloatArray, *, shifted: FloatArray, out: FloatArray) -> FloatArray:
    """Write scores less the largest of their row, and e to that power; return the sums of the rows, (..., 1).

    All three arrays may be one. Where a row is -inf alone, its sum is 0.
    """
    top = scores.max(axis=-1, keepdims=True)
    np.subtract(scores, np.where(top == -np.inf, scores.dtype.type(0), top), out=shifted)
    np.exp(shifted, out=out)
    total: FloatArray = out.sum(axis=-1, keepdims=True)
    return total


def mix(weights: FloatArray, v: FloatArray) -> FloatArray:
    """Return the weighted sums of values (batch, q_len, heads, dim); weights are shaped like `scores`."""
    batch, kv_heads, group, q_len, kv_len = weights.shape
    columns = v.transpose(0, 2, 1, 3).astype(np.result_type(weights, v), copy=False)
    mixed = weights.reshape(batch, kv_heads, group * q_len, kv_len) @ columns
    mixed = mixed.reshape(batch, kv_heads, group, q_len, v.shape[3]).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(mixed).reshape(batch, q_len, kv_heads * group, v.shape[3])


def seen_mask(
    q_len: int, kv_len: int, *, causal: bool, window: int | None = None, start: int | None = None
) -> NDArray[np.bool_]:
    """Return which keys each query may see, (q_len, kv_len), for positions that count from the first key's."""
    first = kv_len - q_len if start is None else start
    return sees(np.arange(first, first + q_len), np.arange(kv_len), causal=causal, window=window)


def sees(queries: NDArray[np.int64], keys: NDArray[np.int64], *, causal: bool, window: int | None) -> NDArray[np.bool_]:
    """Return whether a query at each position sees a key at each position: (q_len,), (kv_len,) -> (q_len, kv_len).

    The one rule of causal and sliding-window masks.
    """
    ahead = keys - queries[:, None]
    seen = ahead <= 0 if causal else np.ones(ahead.shape, bool)
    return seen if window is None else seen & (np.abs(ahead) < window)


def reach(q_len: int, kv_len: int, config: AttentionConfig, *, start: int) -> slice:
    """Return the keys that any of q_len queries at positions start, start + 1, ... may see: the rest need no work."""
    behind = kv_len if config.window is None else config.window - 1
    ahead = 0 if config.causal else behind
    end = min(kv_len, max(0, start + q_len + ahead))
    return slice(min(max(0, start - behind), end), end)


def causal_mask(seq_len: int) -> NDArray[np.float32]:
    """Return the additive causal mask (1, 1, seq_len, seq_len): 0 where seen, -inf ahead."""
    seen = seen_mask(seq_len, seq_len, causal=True)
    return np.where(seen, np.float32(0), np.float32(-np.inf))[None, None]


def check_inputs(q: FloatArray, k: FloatArray, config: AttentionConfig, v: FloatArray | None = None) -> None:
    """Raises: `InputError` unless the arrays fit each other and the configuration."""
    named = [("q", q, config.heads), ("k", k, config.key_heads)]
    named += [] if v is None else [("v", v, config.key_heads)]
    for name, array, heads in named:
        if array.ndim != 4:
            raise InputError(f"{name} is {array.ndim}-D, need (batch, seq, heads, head_dim)", code="shape")
        if not is_float(array):
            raise InputError(f"{name}: dtype {array.dtype} is not floating point", code="dtype")
        if array.shape[2] != heads:
            text = f"{name} has {array.shape[2]} heads, the configuration {heads}"
            raise InputError(text, code="shape-mismatch")
    if not q.shape[3] == k.shape[3] == config.head_dim:
        text = f"q is {q.shape}, k is {k.shape}, the configuration's head_dim is {config.head_dim}"
        raise InputError(text, code="shape-mismatch")
    if q.shape[0] != k.shape[0]:
        raise InputError(f"q is {q.shape}, k is {k.shape}: the batches differ", code="shape-mismatch")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise InputError(f"k is {k.shape}, v is {v.shape}", code="shape-mismatch")


def _attend(
    q: FloatArray, k: FloatArray, v: FloatArray, mask: FloatArray | None, config: AttentionConfig
) -> FloatArray:
    check_inputs(q, k, config, v)
    batch, q_len, heads, _ = q.shape
    kv_len = k.shape[1]
    if mask is not None:
        _check_mask(mask, (batch, heads, q_len, kv_len))
    out = np.empty((batch, q_len, heads, v.shape[3]), np.result_type(q, k, v, np.float32))
    for part in query_blocks(q_len, batch * heads * kv_len):
        first = kv_len - q_len + part.start
        near = reach(part.stop - part.start, kv_len, config, start=first)
        seen = None if mask is None else mask[:, :, part, near]
        raw = scores(q[:, part], k[:, near], config, mask=seen, start=first - near.start)
        out[:, part] = mix(softmax(raw), v[:, near])
    return out


def query_blocks(q_len: int, scores_per_query: int) -> Iterator[slice]:
    """Yield slices of the queries, so few at a time that their scores stay within `SCORE_BLOCK`."""
    step = max(1, SCORE_BLOCK // max(1, scores_per_query))
    for start in range(0, q_len, step):
        yield slice(start, min(start + step, q_len))


def _grouped_mask(mask: FloatArray, batch: int, q_len: int, kv_len: int, config: AttentionConfig) -> FloatArray:
    """The mask shaped like grouped scores: (batch or 1, kv_heads or 1, group or 1, q_len, kv_len)."""
    _check_mask(mask, (batch, config.heads, q_len, kv_len))
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(len(mask), config.key_heads, -1, q_len, kv_len)


def _check_mask(mask: FloatArray, full: tuple[int, int, int, int]) -> None:
    if not is_float(mask):
        hint = "0 where a key is seen, -inf where not: np.where(seen, 0, -np.inf)"
        raise InputError(f"mask: dtype {mask.dtype}, an additive mask is needed", code="dtype", hint=hint)
    fits = mask.ndim == 4 and mask.shape[0] in (1, full[0]) and mask.shape[1] in (1, full[1])
    if not fits or mask.shape[2:] != full[2:]:
        need = f"({full[0]}, 1, {full[2]}, {full[3]})"
        raise InputError(f"mask is {mask.shape}, need {need}", code="shape-mismatch")
    if not np.all(mask < np.inf):  # false for NaN too
        raise InputError("mask: holds NaN or +inf, which leave no softmax", code="non-finite")


def _project(x: FloatArray, w: FloatArray, heads: int, config: AttentionConfig, name: str) -> FloatArray:
    if x.ndim != 3:
        raise InputError(f"x is {x.ndim}-D, need (batch, seq, embed)", code="shape")
    if w.shape != (x.shape[2], heads * config.head_dim):
        need = f"({x.shape[2]}, {heads * config.head_dim})"
        raise InputError(f"{name} is {w.shape}, need {need}", code="shape-mismatch")
    projected: FloatArray = (x @ w).reshape(*x.shape[:2], heads, config.head_dim)
    return projected


def is_float(array: FloatArray) -> bool:
    """Whether the array is floating point, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
