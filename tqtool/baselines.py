"""KV-cache formats that inference engines ship, simulated: what they give back, and exactly what they store.

Each follows its engine's arithmetic: stored scales are rounded as stored, codes are chosen with the scales the engine
chooses them with. Restored values return to the coordinates they came from; an engine that rotates queries
instead sees the same scores. Sizes are per vector of one head and token, metadata included; what an engine keeps
in float16 beside its format (whole layers, the newest tokens) is counted apart.

Sources: vllm-project/vllm (turboquant), ggml-org/llama.cpp (q8_0, q4_0 and the rotation of #21038), jy-yuan/KIVI,
TheTom/llama-cpp-turboquant (turbo3); formats only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tqtool.codebook import rounded
from tqtool.errors import UsageError
from tqtool.rotation import hadamard, signs
from tqtool.sizes import FLOAT16_BYTES, packed_bytes

Array32 = NDArray[np.float32]

GGML_BLOCK = 32  # channels that share a scale
GGML_ROTATION = 64  # head dims that are multiples of this are rotated before they are quantized
VLLM_SKIPPED = 4  # layers of a dense model in the native type: two at each end
KIVI_GROUP = 32  # tokens (keys) or channels (values) that share scale and minimum
KIVI_WINDOW = 128  # newest tokens in float16
TURBO_BLOCK = 128
TURBO3_LEVELS = (0.021460, 0.065717, 0.117832, 0.190685)  # the positive half as shipped, for dim 128
E4M3_MAX = 448.0


def _no_window(tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Format:
    """How an engine stores keys, or values."""

    name: str
    restore: Callable[[Array32], Array32]  # (..., tokens, dim) -> what decoding gives, tokens in order
    vector_bytes: Callable[[int], int]  # dim -> stored bytes of a vector, metadata included
    window: Callable[[int], int] = _no_window  # cached tokens -> how many of the newest stay in float16

    def stored_bytes(self, tokens: int, dim: int) -> int:
        """Bytes of so many tokens of one head, the newest in float16 included."""
        exact = self.window(tokens)
        return (tokens - exact) * self.vector_bytes(dim) + exact * FLOAT16_BYTES * dim

    def window_surcharge(self, tokens: int, dim: int) -> int:
        """The part of `stored_bytes` that the newest tokens cost beyond the format."""
        return self.window(tokens) * (FLOAT16_BYTES * dim - self.vector_bytes(dim))


@dataclass(frozen=True, slots=True)
class Baseline:
    """One engine's choice for keys and values."""

    name: str
    engine: str
    key: Format
    value: Format
    dims: Callable[[int], str | None] = field(default=lambda dim: None)  # why a vector length is not possible
    skipped: int = 0  # layers that stay in float16, at most half of them
    note: str = ""  # what the reader of its row must know

    def pair_bytes(self, dim: int) -> int:
        """Stored bytes of the key and value vector of one head and token."""
        return self.key.vector_bytes(dim) + self.value.vector_bytes(dim)

    def skip_surcharge(self, layers: int, dim: int) -> float:
        """Bytes by which the layers left in float16 raise the mean of `pair_bytes` over a model."""
        skipped = min(self.skipped, layers // 2)
        return skipped * (2 * FLOAT16_BYTES * dim - self.pair_bytes(dim)) / layers


def baseline(name: str, dim: int | None = None) -> Baseline:
    """Return a baseline by name. Raises: `UsageError` if there is none, or it cannot store vectors of length dim."""
    found = next((each for each in BASELINES if each.name == name), None)
    if found is None:
        known = ", ".join(each.name for each in BASELINES)
        raise UsageError(f"no baseline {name!r}", code="usage", hint=f"one of {known}")
    if dim is not None and (reason := found.dims(dim)):
        raise UsageError(f"{name}: {reason}; the vectors here have {dim} coordinates", code="usage")
    return found


# What the formats share


def _half(x: Array32) -> Array32:
    """Round through float16, as stored; too large becomes infinite, as in the engines."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _round_half_away(x: Array32) -> Array32:
    wide = x.astype(np.float64)  # adding 0.5 in float32 would round up the number just below 0.5
    return np.asarray(np.trunc(wide + np.copysign(0.5, wide)), np.float32)


def _blocks(x: Array32, size: int) -> Array32:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _reciprocal(x: Array32) -> Array32:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / x
    return np.where(np.isfinite(inverse), inverse, np.float32(0))  # such a scale is stored as 0 anyway


def _hadamard(x: Array32, size: int) -> Array32:
    """Multiply runs of `size` channels by the orthonormal Sylvester matrix, which is its own inverse."""
    columns = np.ascontiguousarray(x.reshape(-1, size).T, np.float32)
    hadamard(columns)
    columns *= np.float32(1 / math.sqrt(size))
    return np.ascontiguousarray(columns.T).reshape(x.shape)


def _nearest(values: Array32, levels: Array32) -> Array32:
    """The level of each value: as many thresholds, half way between levels, as are <= it."""
    thresholds = (levels[:-1] + levels[1:]) / 2
    return np.asarray(levels[np.searchsorted(thresholds, values, side="right")])


# llama.cpp


def _q8_0(x: Array32) -> Array32:
    blocks = _blocks(x, GGML_BLOCK)
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / np.float32(127)
    restored = _round_half_away(blocks * _reciprocal(scale)) * _half(scale)
    return np.reshape(restored, x.shape)


def _q4_0(x: Array32) -> Array32:
    blocks = _blocks(x, GGML_BLOCK)
    largest = np.argmax(np.abs(blocks), axis=-1, keepdims=True)  # the first, if several are as large
    scale = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-8)  # it becomes code 0, whatever its sign
    codes = np.minimum(np.trunc(blocks * _reciprocal(scale) + np.float32(8.5)), np.float32(15))
    return np.reshape((codes - 8) * _half(scale), x.shape)


def _rotated_q4_0(x: Array32, *, widest: int | None) -> Array32:
    dim = x.shape[-1]
    size = min(dim & -dim, widest or dim)  # the largest power of two that divides dim
    return _hadamard(_q4_0(_hadamard(x, size)), size)


def _ggml_bytes(dim: int, *, block: int) -> int:
    return dim // GGML_BLOCK * block


# fp8


def _e4m3(x: Array32) -> Array32:
    saturated = np.clip(x, -E4M3_MAX, E4M3_MAX)  # the type has no infinity, only a NaN
    return saturated.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


# vLLM


@functools.cache
def vllm_levels(bits: int) -> Array32:
    """vLLM's own levels for N(0, 1), (2**bits,): its Lloyd iteration, with its start, stop and trapezoids."""
    levels = np.linspace(-3.5, 3.5, 2**bits)
    trapezoids = np.ones((201, 1))
    trapezoids[[0, -1]] = 0.5
    for _ in range(200):
        edges = np.concatenate([[-10.5], (levels[:-1] + levels[1:]) / 2, [10.5]])
        t = np.linspace(edges[:-1], edges[1:], len(trapezoids))
        moved = np.average(t, axis=0, weights=np.exp(-t * t / 2) * trapezoids)
        done = np.max(np.abs(moved - levels)) < 1e-10
        levels = moved
        if done:
            break
    return rounded(levels)


def _vllm_key(x: Array32, *, bits: int) -> Array32:
    dim = x.shape[-1]
    levels = vllm_levels(bits) / np.float32(math.sqrt(dim))
    norms = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    c = _nearest(_hadamard(x / (norms + np.float32(1e-8)), dim), levels)
    corrected = c / np.sqrt(np.sum(c * c, axis=-1, keepdims=True) + np.float32(1e-16))
    return _hadamard(corrected * _half(norms), dim)


def _vllm_key_bytes(dim: int, *, bits: int) -> int:
    return packed_bytes(dim, bits) + FLOAT16_BYTES


def _vllm_value(x: Array32, *, bits: int) -> Array32:
    low = np.min(x, axis=-1, keepdims=True)
    top = np.float32(2**bits - 1)
    scale = np.maximum((np.max(x, axis=-1, keepdims=True) - low) / top, np.float32(1e-8))
    codes = np.clip(np.trunc((x - low) / scale + np.float32(0.5)), 0, top)
    return np.asarray(codes * _half(scale) + _half(low))


def _vllm_value_bytes(dim: int, *, bits: int) -> int:
    return packed_bytes(dim, bits) + 2 * FLOAT16_BYTES


# KIVI


def _affine2(groups: Array32) -> Array32:
    """Two bits between the minimum and maximum of groups along the last axis, both stored as float16."""
    low = _half(np.min(groups, axis=-1, keepdims=True))
    scale = _half((np.max(groups, axis=-1, keepdims=True) - low) / np.float32(3))
    codes = np.clip(np.rint((groups - low) * _reciprocal(scale)), 0, 3)  # half to even
    return np.asarray(codes * scale + low)


def _kivi_key(x: Array32) -> Array32:
    exact = _kivi_key_window(x.shape[-2])
    coded = x[..., : x.shape[-2] - exact, :]
    channels = np.swapaxes(coded, -1, -2)  # (..., dim, tokens)
    restored = _affine2(_blocks(channels, KIVI_GROUP)).reshape(channels.shape)
    return np.concatenate([np.swapaxes(restored, -1, -2), _half(x[..., x.shape[-2] - exact :, :])], axis=-2)


def _kivi_key_window(tokens: int) -> int:
    return tokens % KIVI_WINDOW


def _kivi_value(x: Array32) -> Array32:
    coded = x.shape[-2] - _kivi_value_window(x.shape[-2])
    restored = _affine2(_blocks(x[..., :coded, :], KIVI_GROUP)).reshape(*x.shape[:-2], coded, x.shape[-1])
    return np.concatenate([restored, _half(x[..., coded:, :])], axis=-2)


def _kivi_value_window(tokens: int) -> int:
    return min(tokens, KIVI_WINDOW)


def _kivi_bytes(dim: int) -> int:
    return packed_bytes(dim, 2) + dim // KIVI_GROUP * 2 * FLOAT16_BYTES


# turbo3


def _turbo3(x: Array32) -> Array32:
    dim = x.shape[-1]
    padding = -dim % TURBO_BLOCK
    blocks = _blocks(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]), TURBO_BLOCK)
    first, second = signs(0, TURBO_BLOCK), signs(1, TURBO_BLOCK)  # any two: the engine's are tables of its own
    upper = np.array(TURBO3_LEVELS, np.float32)
    norms = np.sqrt(np.sum(blocks * blocks, axis=-1, keepdims=True))
    c = _nearest(second * _hadamard(first * (blocks * _reciprocal(norms)), TURBO_BLOCK), np.append(-upper[::-1], upper))
    scale = _half(norms / np.sqrt(np.sum(c * c, axis=-1, keepdims=True)))
    restored = first * _hadamard(second * (c * scale), TURBO_BLOCK)
    return restored.reshape(*x.shape[:-1], dim + padding)[..., :dim]


def _turbo3_bytes(dim: int) -> int:
    return -(-dim // TURBO_BLOCK) * (packed_bytes(TURBO_BLOCK, 3) + FLOAT16_BYTES)


def _multiple(of: int) -> Callable[[int], str | None]:
    return lambda dim: f"needs a multiple of {of}" if dim % of else None


def _power_of_two(dim: int) -> str | None:
    return "needs a power of two" if dim & (dim - 1) else None


def _vllm(name: str, key: Format, bits: int, dims: Callable[[int], str | None]) -> Baseline:
    value = Format(f"uniform{bits}", partial(_vllm_value, bits=bits), partial(_vllm_value_bytes, bits=bits))
    return Baseline(name, "vLLM", key, value, dims, VLLM_SKIPPED)


_FP16 = Format("fp16", _half, lambda dim: FLOAT16_BYTES * dim)
_FP8 = Format("fp8_e4m3", _e4m3, lambda dim: dim)
_Q8_0 = Format("q8_0", _q8_0, partial(_ggml_bytes, block=34))
_Q4_0 = Format("q4_0", _q4_0, partial(_ggml_bytes, block=18))
_Q4_0_KEY = Format("q4_0+H", partial(_rotated_q4_0, widest=None), partial(_ggml_bytes, block=18))
_Q4_0_VALUE = Format("q4_0+H64", partial(_rotated_q4_0, widest=GGML_ROTATION), partial(_ggml_bytes, block=18))
_NC4 = Format("nc4", partial(_vllm_key, bits=4), partial(_vllm_key_bytes, bits=4))
_NC3 = Format("nc3", partial(_vllm_key, bits=3), partial(_vllm_key_bytes, bits=3))
_TURBO3 = Format("turbo3", _turbo3, _turbo3_bytes)

BASELINES = (
    Baseline("fp16", "any", _FP16, _FP16),
    Baseline("q8_0", "llama.cpp", _Q8_0, _Q8_0, _multiple(GGML_BLOCK), note="without the Hadamard rotation"),
    Baseline("q4_0", "llama.cpp", _Q4_0, _Q4_0, _multiple(GGML_BLOCK), note="without the Hadamard rotation"),
    Baseline(
        "q4_0+H",
        "llama.cpp",
        _Q4_0_KEY,
        _Q4_0_VALUE,
        _multiple(GGML_ROTATION),
        note="as llama.cpp does by default where head_dim is a multiple of 64",
    ),
    Baseline("fp8_e4m3", "vLLM, SGLang", _FP8, _FP8, note="scale 1"),
    _vllm("turboquant_k8v4", _FP8, 4, lambda dim: None),
    _vllm("turboquant_4bit_nc", _NC4, 4, _power_of_two),
    _vllm("turboquant_k3v4_nc", _NC3, 4, _power_of_two),
    _vllm("turboquant_3bit_nc", _NC3, 3, _power_of_two),
    Baseline(
        "kivi-2",
        "KIVI",
        Format("kivi-2", _kivi_key, _kivi_bytes, _kivi_key_window),
        Format("kivi-2", _kivi_value, _kivi_bytes, _kivi_value_window),
        _multiple(KIVI_GROUP),
        note="groups of 32; the newest 128 values and up to 127 keys in float16",
    ),
    Baseline(
        "turbo3",
        "llama-cpp-turboquant",
        _TURBO3,
        _TURBO3,
        note="six-digit table as shipped; the engine stores keys as q8_0 instead from 6 query heads per KV head on",
    ),
)
