"""A Llama-style engine's cache, [n_kv_head, max_seq, head_dim] with a circular buffer, on the compressed cache.

    python examples/llama_ring.py [DUMP] [CONFIG]

The engine keeps one float array a layer and writes position pos at `pos % max_seq`. The adapter below has the two
calls that such an engine makes, store and attend, and a third that restores a range in the engine's own layout, for
engines that keep their attention loop. Both caches are run over more tokens than they hold, on a dump's real keys,
values and queries, and are held against the engine's own float32 loop.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache
from tqtool.attention.plain import AttentionConfig
from tqtool.codec.sizes import KVConfig
from tqtool.dumps.dump import load_dump, sample_dump_path

Array = NDArray[np.float32]


class LlamaCache:
    """The engine's view of a cache: one sequence, absolute positions, vectors [head, head_dim]."""

    def __init__(self, cache: KVCache | TurboQuantCache, max_seq: int, config: AttentionConfig) -> None:
        self.cache, self.max_seq, self.config = cache, max_seq, config

    def store(self, layer: int, pos: int, k: Array, v: Array) -> None:
        """Take the place of the engine's two memcpy: k and v are [n_kv_head, head_dim], after RoPE."""
        self.cache.write(layer, pos % self.max_seq, k[None, None], v[None, None])

    def attend(self, layer: int, pos: int, q: Array) -> Array:
        """Return [n_head, head_dim] for the token at `pos`, which must be stored."""
        out: Array = self.cache.attention(q[None, None], layer, pos % self.max_seq, self.config)[0, 0]
        return out

    def restored(self, layer: int) -> tuple[Array, Array]:
        """Return keys and values as the engine lays them out, [n_kv_head, filled slots, head_dim]."""
        return self.cache.keys(layer)[0].transpose(1, 0, 2), self.cache.values(layer)[0].transpose(1, 0, 2)


def engine_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """The engine's own loop over heads: q [n_head, head_dim], k and v [n_kv_head, filled slots, head_dim]."""
    out = np.empty_like(q)
    for head in range(len(q)):
        group = head // (len(q) // len(k))
        scores = k[group] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[group] / weights.sum()
    return out


def cosine(a: Array, b: Array) -> float:
    """Mean cosine of the heads' outputs."""
    return float(np.mean(np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))))


def main(folder: str | None = None, name: str = "K4/V2") -> None:
    """Run both caches round the ring and print how they compare with the engine's float32 arrays."""
    dump = load_dump(sample_dump_path() if folder is None else folder)
    layer = dump.layers[-1]
    q, k, v = layer.arrays()  # (heads, tokens, dim)
    assert q is not None
    kv_heads, tokens, dim = k.shape
    max_seq, queries = tokens // 4, q.shape[1]
    config = AttentionConfig(len(q), dim, kv_heads, causal=True, scale=layer.claims.scaling)
    sizes: dict[str, Any] = {"layers": 1, "kv_heads": kv_heads, "head_dim": dim, "max_seq_len": max_seq}
    exact = LlamaCache(KVCache(**sizes), max_seq, config)
    packed = LlamaCache(TurboQuantCache(KVConfig.parse(name), **sizes), max_seq, config)
    k_ring, v_ring = np.zeros((2, kv_heads, max_seq, dim), np.float32)  # what the engine has today

    worst, cosines, drop_in = 0.0, [], 0.0
    for pos in range(tokens):
        k_ring[:, pos % max_seq], v_ring[:, pos % max_seq] = k[:, pos], v[:, pos]
        for cache in (exact, packed):
            cache.store(0, pos, k[:, pos], v[:, pos])
        if pos < tokens - queries:
            continue
        query = q[:, pos - (tokens - queries)]
        expected = engine_attention(query, k_ring, v_ring, config.score_scale)
        got = packed.attend(0, pos, query)
        looped = engine_attention(query, *packed.restored(0), config.score_scale)
        worst = max(worst, float(np.abs(exact.attend(0, pos, query) - expected).max() / np.abs(expected).max()))
        drop_in = max(drop_in, float(np.linalg.norm(got - looped) / np.linalg.norm(looped)))
        cosines.append(cosine(expected, got))
    print(f"{tokens} tokens round a ring of {max_seq}, {config}")
    print(f"float32 cache against the engine's loop: largest difference {worst:.1e}")
    print(f"{name} cache, fused, against its restored arrays in the engine's loop: {drop_in:.1e}")
    print(f"{name} cache against float32: output cosine {np.mean(cosines):.4f} over {queries} queries")
    print(f"bytes: {exact.cache.nbytes:,} float32, {packed.cache.nbytes:,} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
