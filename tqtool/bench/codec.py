"""How fast the codec and fused attention are, each beside what it replaces, measured in one process.

A time is the fastest of several rounds; every round measures all rows one after the other, so that a slow moment of
the machine strikes none of them alone. The codec's measure is the fraction of memcpy: bytes of float32 vectors a second
over the bytes that a copy of the same array moves a second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.codec import decode, encode
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.runtime import binding as runtime

Operation = Literal["encode", "decode"]
ROUNDS = 7
ATTENTION_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """One operation on an array of float32 vectors."""

    operation: Operation
    dim: int
    bits: int
    threads: int
    seconds: float
    copy_seconds: float  # memcpy of the same array on one thread
    vectors: int

    @property
    def gb_per_second(self) -> float:
        """Float32 bytes a second, in 1e9."""
        return self.vectors * self.dim * 4 / self.seconds / 1e9

    @property
    def of_memcpy(self) -> float:
        """Speed as a fraction of memcpy's."""
        return self.copy_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class FusedSpeed:
    """One decoding step's attention over packed keys and values, beside NumPy's over float32 ones."""

    config: KVConfig
    dim: int
    tokens: int
    kv_heads: int
    group: int  # query heads a key-value head
    threads: int
    seconds: float
    numpy_seconds: float

    @property
    def times_numpy(self) -> float:
        """How many times faster than NumPy."""
        return self.numpy_seconds / self.seconds


def codec_speeds(
    cases: Sequence[tuple[int, int]], *, threads: Sequence[int], mebibytes: int = 256, rounds: int = ROUNDS
) -> list[CodecSpeed]:
    """Measure encoding and decoding for each (dim, bits) of `cases` and each number of threads."""
    speeds = []
    for dim in dict.fromkeys(dim for dim, _ in cases):
        x = _normal(max(1, (mebibytes << 20) // (4 * dim)), dim)
        out = np.empty_like(x)
        encoded = {bits: encode(x, CodecSpec(dim, bits)) for each, bits in cases if each == dim}
        jobs: dict[Hashable, Callable[[], object]] = {}
        rows: list[tuple[Operation, int, int]] = []
        for bits, packed in encoded.items():
            for count in threads:
                rows += [("encode", bits, count), ("decode", bits, count)]
                jobs[rows[-2]] = _job(encode, x, packed.spec, threads=count)
                jobs[rows[-1]] = _job(decode, packed, out=out, threads=count)
        fastest = _fastest({"copy": _job(np.copyto, out, x), **jobs}, rounds)
        speeds += [
            CodecSpeed(operation, dim, bits, count, fastest[operation, bits, count], fastest["copy"], len(x))
            for operation, bits, count in rows
        ]
    return speeds


def fused_speeds(
    cases: Sequence[tuple[int, int]],
    *,
    threads: Sequence[int],
    config: KVConfig,
    dim: int = 128,
    kv_heads: int = 8,
    rounds: int = ATTENTION_ROUNDS,
) -> list[FusedSpeed]:
    """Measure fused attention for each (tokens, group) of `cases`; needs the compiled runtime."""
    speeds = []
    for tokens, group in cases:
        k, v = (_normal(tokens * kv_heads, dim, seed).reshape(1, tokens, kv_heads, dim) for seed in (1, 2))
        q = _normal(kv_heads * group, dim, 3).reshape(1, 1, kv_heads * group, dim)
        keys, values = encode(k, CodecSpec(dim, config.key_bits)), encode(v, CodecSpec(dim, config.value_bits))
        by_head = [np.ascontiguousarray(side[0].swapaxes(0, 1)) for side in (k, v)]  # the layout BLAS likes best
        grouped = q.reshape(kv_heads, group, dim)
        fastest = _fastest(
            {"numpy": _job(numpy_attention, grouped, *by_head)}
            | {count: _job(_fused, q, keys, values, count) for count in threads},
            rounds,
        )
        speeds += [
            FusedSpeed(config, dim, tokens, kv_heads, group, count, fastest[count], fastest["numpy"])
            for count in threads
        ]
    return speeds


def numpy_attention(q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 attention with BLAS: q (heads, group, dim), k and v (heads, tokens, dim)."""
    scores = np.matmul(q, k.swapaxes(1, 2))
    scores *= np.float32(q.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: NDArray[np.float32] = np.matmul(scores, v)
    return mixed


def _fused(q: NDArray[np.float32], keys: Encoded, values: Encoded, threads: int) -> NDArray[np.float32]:
    sides = runtime.Side(keys), runtime.Side(values)
    return runtime.attend(q, *sides, scale=float(q.shape[-1] ** -0.5), threads=threads)


def _job(function: Callable[..., object], *arguments: object, **options: object) -> Callable[[], object]:
    return lambda: function(*arguments, **options)


def _normal(rows: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)


def _fastest(jobs: Mapping[Hashable, Callable[[], object]], rounds: int) -> dict[Hashable, float]:
    """Return the fewest seconds of each job over the rounds; the first round only warms up."""
    seconds = {key: float("inf") for key in jobs}
    for number in range(rounds + 1):
        for key, job in jobs.items():
            start = perf_counter()
            job()
            if number:
                seconds[key] = min(seconds[key], perf_counter() - start)
    return seconds
