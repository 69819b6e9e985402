"""Rotary position embedding: pair i of a vector's coordinates turns by position * theta**(-2i/dim).

`half` pairs coordinate i with i + dim/2 (rotate-half: Hugging Face, GPT-NeoX); `interleaved` pairs 2i with
2i + 1 (the paper's own). Keys are cached after it. Source: Su et al. 2021, arXiv:2104.09864, eq. 15 and 34.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tqtool.dtypes import FloatArray
from tqtool.errors import InputError, UsageError

Pairing = Literal["half", "interleaved"]

THETA = 10000.0


def rope(
    q: FloatArray,
    k: FloatArray,
    start_pos: int = 0,
    *,
    pairing: Pairing = "half",
    theta: float = THETA,
    freqs: NDArray[np.float64] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return q and k (batch, seq, heads, head_dim), turned for positions start_pos, start_pos + 1, ...

    `freqs` from `rope_freqs` saves the angles' computation; the result does not change.
    Raises: `InputError` for shapes, `UsageError` for positions that `freqs` does not hold.
    """
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            raise InputError(f"{name} is {x.ndim}-D, need (batch, seq, heads, head_dim)", code="shape")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q is {q.shape}, k is {k.shape}: head_dim differs", code="shape-mismatch")
    if start_pos < 0:
        raise UsageError(f"start_pos is {start_pos}, at least 0 is needed", code="usage")
    end = start_pos + max(q.shape[1], k.shape[1])
    if freqs is None:
        freqs = _angles(np.arange(start_pos, end), q.shape[3], theta)
    else:
        if freqs.ndim != 3 or freqs.shape[::2] != (2, q.shape[3] // 2):
            raise InputError(f"freqs is {freqs.shape}, need (2, positions, {q.shape[3] // 2})", code="shape-mismatch")
        if end > freqs.shape[1]:
            raise UsageError(f"position {end - 1} is beyond the {freqs.shape[1]} of freqs", code="usage")
        freqs = freqs[:, start_pos:]
    return _turn(q, freqs, pairing), _turn(k, freqs, pairing)


def rope_freqs(max_seq_len: int, head_dim: int, *, theta: float = THETA) -> NDArray[np.float64]:
    """Return cosines and sines of every position and pair, (2, max_seq_len, head_dim / 2).

    In float64: at position 131,072 an angle in float32 is off by 0.007.
    """
    return _angles(np.arange(max_seq_len), head_dim, theta)


def _angles(positions: NDArray[np.int64], head_dim: int, theta: float) -> NDArray[np.float64]:
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"head_dim is {head_dim}, rotary pairs need an even one", code="dim")
    if not 0 < theta < np.inf:
        raise UsageError(f"theta is {theta}, a positive number is needed", code="usage")
    angles = np.outer(positions, theta ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.stack([np.cos(angles), np.sin(angles)])


def _turn(x: FloatArray, freqs: NDArray[np.float64], pairing: Pairing) -> FloatArray:
    dtype = np.result_type(x, np.float32)
    cos, sin = freqs[:, : x.shape[1], None].astype(dtype)  # (seq, 1, dim/2)
    out = np.empty(x.shape, dtype)
    one, two = _pairs(x, pairing)
    out_one, out_two = _pairs(out, pairing)
    out_one[...] = one * cos - two * sin
    out_two[...] = one * sin + two * cos
    return out


def _pairs(x: FloatArray, pairing: Pairing) -> tuple[FloatArray, FloatArray]:
    """Views of the first and the second coordinate of every pair."""
    match pairing:
        case "half":
            middle = x.shape[-1] // 2
            return x[..., :middle], x[..., middle:]
        case "interleaved":
            return x[..., ::2], x[..., 1::2]
    raise UsageError(f"pairing {pairing!r} is none of {', '.join(get_args(Pairing))}", code="usage")
