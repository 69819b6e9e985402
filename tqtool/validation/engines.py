"""KV-cache formats of inference engines as values: what they give back, and exactly what they store.

Sizes are per vector of one head and token, metadata included; what an engine keeps in float16 beside its format
(whole layers, the newest tokens) is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tqtool.codec.terms import FLOAT16_BYTES
from tqtool.dtypes import Float32Array
from tqtool.errors import UsageError
from tqtool.validation.engine_formats import (
    GGML_BLOCK,
    GGML_ROTATION,
    KIVI_GROUP,
    e4m3,
    float16,
    ggml_bytes,
    kivi_bytes,
    kivi_key,
    kivi_key_window,
    kivi_value,
    kivi_value_window,
    q4_0,
    q8_0,
    rotated_q4_0,
    turbo3,
    turbo3_bytes,
    vllm_key,
    vllm_key_bytes,
    vllm_value,
    vllm_value_bytes,
)

VLLM_SKIPPED = 4  # layers of a dense model in the native type: two at each end


def _no_window(tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """How an engine stores keys, or values."""

    name: str
    restore: Callable[[Float32Array], Float32Array]  # (..., tokens, dim) -> what decoding gives, tokens in order
    vector_bytes: Callable[[int], int]  # dim -> stored bytes of a vector, metadata included
    window: Callable[[int], int] = _no_window  # cached tokens -> how many of the newest stay in float16

    def stored_bytes(self, tokens: int, dim: int) -> int:
        """Bytes of so many tokens of one head, the newest in float16 included."""
        exact = self.window(tokens)
        return (tokens - exact) * self.vector_bytes(dim) + exact * FLOAT16_BYTES * dim


@dataclass(frozen=True, slots=True)
class Baseline:
    """One engine's choice for keys and values."""

    name: str
    engine: str
    key: VectorFormat
    value: VectorFormat
    dims: Callable[[int], str | None] = field(default=lambda dim: None)  # why a vector length is not possible
    skipped: int = 0  # layers that stay in float16, at most half of them
    note: str = ""  # what the reader of its row must know

    def pair_bytes(self, dim: int) -> int:
        """Stored bytes of the key and value vector of one head and token."""
        return self.key.vector_bytes(dim) + self.value.vector_bytes(dim)


def baseline(name: str, dim: int | None = None) -> Baseline:
    """Return a baseline by name. Raises: `UsageError` if there is none, or it cannot store vectors of length dim."""
    found = next((each for each in BASELINES if each.name == name), None)
    if found is None:
        known = ", ".join(each.name for each in BASELINES)
        raise UsageError(f"no baseline {name!r}", code="usage", hint=f"one of {known}")
    if dim is not None and (reason := found.dims(dim)):
        raise UsageError(f"{name}: {reason}; the vectors here have {dim} coordinates", code="usage")
    return found


def _multiple(of: int) -> Callable[[int], str | None]:
    return lambda dim: f"needs a multiple of {of}" if dim % of else None


def _power_of_two(dim: int) -> str | None:
    return "needs a power of two" if dim & (dim - 1) else None


def _vllm(name: str, key: VectorFormat, bits: int, dims: Callable[[int], str | None]) -> Baseline:
    value = VectorFormat(f"uniform{bits}", partial(vllm_value, bits=bits), partial(vllm_value_bytes, bits=bits))
    return Baseline(name, "vLLM", key, value, dims, VLLM_SKIPPED)


_FP16 = VectorFormat("fp16", float16, lambda dim: FLOAT16_BYTES * dim)
_FP8 = VectorFormat("fp8_e4m3", e4m3, lambda dim: dim)
_Q8_0 = VectorFormat("q8_0", q8_0, partial(ggml_bytes, block=34))
_Q4_0 = VectorFormat("q4_0", q4_0, partial(ggml_bytes, block=18))
_Q4_0_KEY = VectorFormat("q4_0+H", partial(rotated_q4_0, widest=None), partial(ggml_bytes, block=18))
_Q4_0_VALUE = VectorFormat("q4_0+H64", partial(rotated_q4_0, widest=GGML_ROTATION), partial(ggml_bytes, block=18))
_NC4 = VectorFormat("nc4", partial(vllm_key, bits=4), partial(vllm_key_bytes, bits=4))
_NC3 = VectorFormat("nc3", partial(vllm_key, bits=3), partial(vllm_key_bytes, bits=3))
_TURBO3 = VectorFormat("turbo3", turbo3, turbo3_bytes)

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
        VectorFormat("kivi-2", kivi_key, kivi_bytes, kivi_key_window),
        VectorFormat("kivi-2", kivi_value, kivi_bytes, kivi_value_window),
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
