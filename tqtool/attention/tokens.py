"""What may enter a cache: the shape of its tokens, and vectors of that shape, finite and of a floating-point type."""

from __future__ import annotations

import numpy as np

from tqtool.attention.plain import is_float
from tqtool.codec.refusals import refusal
from tqtool.dtypes import Float32Array, FloatArray
from tqtool.errors import InputError, UsageError


def token_shape(batch: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the shape of a token of all sequences; `UsageError` for sizes below 1."""
    for name, value in (("batch", batch), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise UsageError(f"{name} is {value}, at least 1 is needed", code="usage")
    return batch, kv_heads, head_dim


def check_tokens(k: FloatArray, v: FloatArray, token_shape: tuple[int, int, int]) -> None:
    """Raises: `InputError` unless k and v are (batch, n, kv_heads, head_dim) of one n."""
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != token_shape:
            batch, kv_heads, dim = token_shape
            text = f"{name} is {x.shape}, need ({batch}, tokens, {kv_heads}, {dim})"
            raise InputError(text, code="shape-mismatch")
    if k.shape != v.shape:
        raise InputError(f"k is {k.shape}, v is {v.shape}", code="shape-mismatch")


def finite(x: FloatArray) -> Float32Array:
    """Return x in float32; `InputError` for other types, NaN and what float32 cannot hold."""
    if not is_float(x):
        raise InputError(f"dtype {x.dtype} is not floating point", code="dtype")
    with np.errstate(over="ignore"):  # becomes infinite, and is refused
        rows = x.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        raise refusal(x)
    return rows
