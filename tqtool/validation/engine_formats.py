"""The arithmetic of KV-cache formats that inference engines ship, one function a format.

Each takes keys or values (..., tokens, dim) and returns what decoding gives, with stored scales rounded as stored and
codes chosen with the scales the engine chooses them with. Restored values are in the coordinates they came from; an
engine that rotates queries instead sees the same scores.

Sources: vllm-project/vllm (turboquant), ggml-org/llama.cpp (q8_0, q4_0 and the rotation of #21038), jy-yuan/KIVI,
TheTom/llama-cpp-turboquant (turbo3); formats only.
"""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

from tqtool.codec.codebook import rounded
from tqtool.codec.rotation import hadamard, signs
from tqtool.codec.terms import FLOAT16_BYTES, packed_bytes
from tqtool.dtypes import Float32Array

GGML_BLOCK = 32  # channels that share a scale
GGML_ROTATION = 64  # head dims that are multiples of this are rotated before they are quantized
KIVI_GROUP = 32  # tokens (keys) or channels (values) that share scale and minimum
KIVI_WINDOW = 128  # newest tokens in float16
TURBO_BLOCK = 128
TURBO3_LEVELS = (0.021460, 0.065717, 0.117832, 0.190685)  # the positive half as shipped, for dim 128
E4M3_MAX = 448.0


def float16(x: Float32Array) -> Float32Array:
    """Round through float16, as stored; too large becomes infinite, as in the engines."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _round_half_away(x: Float32Array) -> Float32Array:
    wide = x.astype(np.float64)  # adding 0.5 in float32 would round up the number just below 0.5
    return np.asarray(np.trunc(wide + np.copysign(0.5, wide)), np.float32)


def _blocks(x: Float32Array, size: int) -> Float32Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _reciprocal(x: Float32Array) -> Float32Array:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / x
    return np.where(np.isfinite(inverse), inverse, np.float32(0))  # such a scale is stored as 0 anyway


def _hadamard(x: Float32Array, size: int) -> Float32Array:
    """Multiply runs of `size` channels by the orthonormal Sylvester matrix, which is its own inverse."""
    columns = np.ascontiguousarray(x.reshape(-1, size).T, np.float32)
    hadamard(columns)
    columns *= np.float32(1 / math.sqrt(size))
    return np.ascontiguousarray(columns.T).reshape(x.shape)


def _nearest(values: Float32Array, levels: Float32Array) -> Float32Array:
    """The level of each value: as many thresholds, half way between levels, as are <= it."""
    thresholds = (levels[:-1] + levels[1:]) / 2
    return np.asarray(levels[np.searchsorted(thresholds, values, side="right")])


# llama.cpp


def q8_0(x: Float32Array) -> Float32Array:
    """32 channels share a scale that maps the largest magnitude to 127."""
    blocks = _blocks(x, GGML_BLOCK)
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / np.float32(127)
    restored = _round_half_away(blocks * _reciprocal(scale)) * float16(scale)
    return np.reshape(restored, x.shape)


def q4_0(x: Float32Array) -> Float32Array:
    """32 channels share a signed scale that maps the value of largest magnitude to code 0 of 16."""
    blocks = _blocks(x, GGML_BLOCK)
    largest = np.argmax(np.abs(blocks), axis=-1, keepdims=True)  # the first, if several are as large
    scale = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-8)  # it becomes code 0, whatever its sign
    codes = np.minimum(np.trunc(blocks * _reciprocal(scale) + np.float32(8.5)), np.float32(15))
    return np.reshape((codes - 8) * float16(scale), x.shape)


def rotated_q4_0(x: Float32Array, *, widest: int | None) -> Float32Array:
    """q4_0 between Hadamard transforms over runs of the largest power of two, at most `widest`."""
    dim = x.shape[-1]
    size = min(dim & -dim, widest or dim)  # the largest power of two that divides dim
    return _hadamard(q4_0(_hadamard(x, size)), size)


def ggml_bytes(dim: int, *, block: int) -> int:
    """Bytes of a vector in blocks of 32 channels that take `block` bytes each."""
    return dim // GGML_BLOCK * block


# fp8


def e4m3(x: Float32Array) -> Float32Array:
    """The nearest 8-bit float of 4 exponent and 3 mantissa bits, at scale 1; ties to even, saturating."""
    saturated = np.clip(x, -E4M3_MAX, E4M3_MAX)  # the type has no infinity, only a NaN
    return saturated.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


# vLLM


@functools.cache
def vllm_levels(bits: int) -> Float32Array:
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


def vllm_key(x: Float32Array, *, bits: int) -> Float32Array:
    """turboquant_*_nc: unit norm, Hadamard without signs, Gaussian levels, norm correction when decoding."""
    dim = x.shape[-1]
    levels = vllm_levels(bits) / np.float32(math.sqrt(dim))
    norms = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    c = _nearest(_hadamard(x / (norms + np.float32(1e-8)), dim), levels)
    corrected = c / np.sqrt(np.sum(c * c, axis=-1, keepdims=True) + np.float32(1e-16))
    return _hadamard(corrected * float16(norms), dim)


def vllm_key_bytes(dim: int, *, bits: int) -> int:
    """Codes and the norm in float16."""
    return packed_bytes(dim, bits) + FLOAT16_BYTES


def vllm_value(x: Float32Array, *, bits: int) -> Float32Array:
    """2**bits even steps between a vector's minimum and maximum, without rotation."""
    low = np.min(x, axis=-1, keepdims=True)
    top = np.float32(2**bits - 1)
    scale = np.maximum((np.max(x, axis=-1, keepdims=True) - low) / top, np.float32(1e-8))
    codes = np.clip(np.trunc((x - low) / scale + np.float32(0.5)), 0, top)
    return np.asarray(codes * float16(scale) + float16(low))


def vllm_value_bytes(dim: int, *, bits: int) -> int:
    """Codes, and scale and minimum in float16."""
    return packed_bytes(dim, bits) + 2 * FLOAT16_BYTES


# KIVI


def _affine2(groups: Float32Array) -> Float32Array:
    """Two bits between the minimum and maximum of groups along the last axis, both stored as float16."""
    low = float16(np.min(groups, axis=-1, keepdims=True))
    scale = float16((np.max(groups, axis=-1, keepdims=True) - low) / np.float32(3))
    codes = np.clip(np.rint((groups - low) * _reciprocal(scale)), 0, 3)  # half to even
    return np.asarray(codes * scale + low)


def kivi_key(x: Float32Array) -> Float32Array:
    """Two bits a channel over groups of 32 tokens; the tokens beyond a multiple of 128 in float16."""
    exact = kivi_key_window(x.shape[-2])
    coded = x[..., : x.shape[-2] - exact, :]
    channels = np.swapaxes(coded, -1, -2)  # (..., dim, tokens)
    restored = _affine2(_blocks(channels, KIVI_GROUP)).reshape(channels.shape)
    return np.concatenate([np.swapaxes(restored, -1, -2), float16(x[..., x.shape[-2] - exact :, :])], axis=-2)


def kivi_key_window(tokens: int) -> int:
    """How many of the newest keys are in float16."""
    return tokens % KIVI_WINDOW


def kivi_value(x: Float32Array) -> Float32Array:
    """Two bits a token over groups of 32 channels; the newest 128 tokens in float16."""
    coded = x.shape[-2] - kivi_value_window(x.shape[-2])
    restored = _affine2(_blocks(x[..., :coded, :], KIVI_GROUP)).reshape(*x.shape[:-2], coded, x.shape[-1])
    return np.concatenate([restored, float16(x[..., coded:, :])], axis=-2)


def kivi_value_window(tokens: int) -> int:
    """How many of the newest values are in float16."""
    return min(tokens, KIVI_WINDOW)


def kivi_bytes(dim: int) -> int:
    """Codes, and scale and minimum in float16 a group."""
    return packed_bytes(dim, 2) + dim // KIVI_GROUP * 2 * FLOAT16_BYTES


# turbo3


def turbo3(x: Float32Array) -> Float32Array:
    """Blocks of 128 channels, padded: unit norm, signs, Hadamard, signs, three bits, norm corrected when encoding."""
    dim = x.shape[-1]
    padding = -dim % TURBO_BLOCK
    blocks = _blocks(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]), TURBO_BLOCK)
    first, second = signs(0, TURBO_BLOCK), signs(1, TURBO_BLOCK)  # any two: the engine's are tables of its own
    upper = np.array(TURBO3_LEVELS, np.float32)
    norms = np.sqrt(np.sum(blocks * blocks, axis=-1, keepdims=True))
    c = _nearest(second * _hadamard(first * (blocks * _reciprocal(norms)), TURBO_BLOCK), np.append(-upper[::-1], upper))
    scale = float16(norms / np.sqrt(np.sum(c * c, axis=-1, keepdims=True)))
    restored = first * _hadamard(second * (c * scale), TURBO_BLOCK)
    return restored.reshape(*x.shape[:-1], dim + padding)[..., :dim]


def turbo3_bytes(dim: int) -> int:
    """Codes and a float16 scale a block."""
    return -(-dim // TURBO_BLOCK) * (packed_bytes(TURBO_BLOCK, 3) + FLOAT16_BYTES)
