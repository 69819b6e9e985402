"""What the compressed cache costs and saves in one decoding step: time and bytes beside the float32 cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from tqtool.attention.cache import KVCache, TurboQuantCache, plain_attention
from tqtool.attention.plain import AttentionConfig
from tqtool.codec.rotation import hadamard_order
from tqtool.codec.sizes import KVConfig

DISTINCT = 2048  # tokens drawn; longer caches repeat them: time does not depend on the values


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """One decoding step of one layer over a cache of `tokens` tokens; times are the fastest of several."""

    config: KVConfig
    dim: int
    tokens: int
    float32_seconds: float  # attention of one query over the float32 cache
    fused_seconds: float  # the same over the compressed cache, from packed codes
    write_seconds: float  # the call that rotates, quantizes and packs the new token's keys and values
    work_seconds: float  # the same a token where many are stored by one call: without Python's share
    agreement: float  # relative difference of the fused output from restoring every vector first
    float32_bytes: int
    packed_bytes: int

    @property
    def operations(self) -> dict[str, int]:
        """Operations of each part of the step for one head.

        Additions of the transform, comparisons of the binary search, shifts of the packing, multiply-adds of the
        attention. Source: the specification, Performance Budget; a length of m * 2^k has m additions a coordinate more.
        """
        order = hadamard_order(self.dim)
        rotation = self.dim * ((self.dim // order).bit_length() - 1 + (order if order > 1 else 0))
        return {
            "rotate K": rotation,
            "rotate V": rotation,
            "quantize K": self.dim * self.config.key_bits,
            "quantize V": self.dim * self.config.value_bits,
            "pack K": self.dim,
            "pack V": self.dim,
            "rotate Q": rotation,
            "attend": 2 * self.tokens * self.dim,
            "rotate back": rotation,
        }

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Decoding steps of one layer in a second, float32 and compressed: storing and attention alone."""
        return 1 / self.float32_seconds, 1 / (self.fused_seconds + self.work_seconds)

    @property
    def speedup(self) -> float:
        """How many times faster the compressed cache's attention is."""
        return self.float32_seconds / self.fused_seconds

    @property
    def overhead(self) -> float:
        """Time to store a token as a share of the attention's time; the specification's budget is 0.05."""
        return self.work_seconds / self.fused_seconds

    @property
    def call_overhead(self) -> float:
        """The same share for one call from Python for one token."""
        return self.write_seconds / self.fused_seconds


def attention_speed(
    tokens: int,
    config: KVConfig,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    seconds: float = 0.2,
    threads: int | None = None,
) -> AttentionSpeed:
    """Measure one decoding step; every time is the fastest within about `seconds`."""
    rng = np.random.default_rng(0)
    shape = (1, min(tokens, DISTINCT), kv_heads, dim)
    k, v = rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)
    q = rng.standard_normal((1, 1, heads, dim), dtype=np.float32)
    exact = KVCache(layers=1, kv_heads=kv_heads, head_dim=dim, max_seq_len=tokens)
    packed = TurboQuantCache(config, layers=1, kv_heads=kv_heads, head_dim=dim, max_seq_len=tokens, threads=threads)
    caches: tuple[KVCache | TurboQuantCache, ...] = (exact, packed)
    for start in range(0, tokens, DISTINCT):
        count = min(DISTINCT, tokens - start)
        for cache in caches:
            cache.append(0, k[:, :count], v[:, :count])
    rules, last = AttentionConfig(heads, dim, kv_heads, causal=True), tokens - 1
    restored = plain_attention(q, packed, 0, last, rules)
    difference = packed.attention(q, 0, last, rules) - restored
    return AttentionSpeed(
        config=config,
        dim=dim,
        tokens=tokens,
        float32_seconds=_fastest(lambda: exact.attention(q, 0, last, rules), seconds),
        fused_seconds=_fastest(lambda: packed.attention(q, 0, last, rules), seconds),
        write_seconds=_fastest(lambda: packed.write(0, last, k[:, :1], v[:, :1]), seconds / 4),
        work_seconds=_fastest(lambda: packed.write(0, 0, k, v), seconds / 4) / k.shape[1],
        agreement=float(np.linalg.norm(difference) / np.linalg.norm(restored)),
        float32_bytes=exact.nbytes,
        packed_bytes=packed.nbytes,
    )


def _fastest(step: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of at least three runs."""
    step()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = perf_counter()
        step()
        times.append(perf_counter() - start)
    return min(times)
