"""Block-selected attention (MOBA, as RWKV-X uses it) that reads only chosen positions of a compressed cache.

    python examples/block_sparse.py [DUMP] [CONFIG]

The past is cut into blocks. For each token and key-value head the blocks are ranked by q . mean(keys of the block),
and attention reads the best few and the newest block: `slots` of `attention` names the positions, a column a head. The
cache is smaller than the text: when it is full, the oldest blocks are evicted from codes and block means alike. The
same choice is read from a float32 cache for comparison.
Source: Lu et al. 2025, arXiv:2502.13189, section 2.2.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache
from tqtool.attention.plain import AttentionConfig
from tqtool.codec.sizes import KVConfig
from tqtool.dumps.dump import load_dump, sample_dump_path

Array = NDArray[np.float32]

BLOCK = 32  # tokens
TOP = 4  # chosen blocks, beside the newest


@dataclass
class BlockSparse:
    """One layer's cache and the sums of its blocks' keys."""

    cache: KVCache | TurboQuantCache
    max_seq: int
    sums: list[Array] = field(default_factory=list)  # a block each, (kv_heads, dim)

    def append(self, k: Array, v: Array) -> None:
        """Store one token, (kv_heads, dim) each; a full cache first evicts its oldest block."""
        if self.cache.seq_len == self.max_seq:
            self.cache.evict(BLOCK)
            del self.sums[0]
        if self.cache.seq_len % BLOCK == 0:
            self.sums.append(np.zeros_like(k))
        self.sums[-1] += k
        self.cache.append(0, k[None, None], v[None, None])

    def choose(self, q: Array) -> NDArray[np.int64]:
        """Return the slots that each key-value head reads for the newest token's q (heads, dim): (n, kv_heads)."""
        newest = np.arange(BLOCK * (len(self.sums) - 1), self.cache.seq_len)
        means = np.array(self.sums[:-1]) / BLOCK  # (full blocks, kv_heads, dim)
        if len(means) == 0:
            return newest
        groups = q.reshape(means.shape[1], -1, q.shape[-1]).sum(axis=1)  # (kv_heads, dim)
        ranks = np.einsum("bhd,hd->bh", means, groups)
        best = np.argsort(-ranks, axis=0)[:TOP]  # (TOP, kv_heads)
        starts = np.sort(best, axis=0)[:, None] * BLOCK
        slots = (starts + np.arange(BLOCK)[None, :, None]).reshape(-1, means.shape[1])
        return np.concatenate([slots, np.broadcast_to(newest[:, None], (len(newest), means.shape[1]))])

    def attend(self, q: Array, config: AttentionConfig, slots: NDArray[np.int64]) -> Array:
        """Return the newest token's attention over the chosen slots, (heads, dim)."""
        out: Array = self.cache.attention(q[None, None], 0, self.cache.seq_len - 1, config, slots=slots)[0, 0]
        return out


def cosine(a: Array, b: Array) -> float:
    """Mean cosine of the heads' outputs."""
    return float(np.mean(np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))))


def main(folder: str | None = None, name: str = "K4/V2") -> None:
    """Read a dump token by token and print how the compressed cache's output compares with float32."""
    dump = load_dump(sample_dump_path() if folder is None else folder)
    layer = dump.layers[-1]
    q, k, v = layer.arrays()  # (heads, tokens, dim)
    assert q is not None
    kv_heads, tokens, dim = k.shape
    max_seq, queries = tokens // 2 // BLOCK * BLOCK, q.shape[1]
    config = AttentionConfig(len(q), dim, kv_heads, causal=True, scale=layer.claims.scaling)
    sizes: dict[str, Any] = {"layers": 1, "kv_heads": kv_heads, "head_dim": dim, "max_seq_len": max_seq}
    exact = BlockSparse(KVCache(**sizes), max_seq)
    packed = BlockSparse(TurboQuantCache(KVConfig.parse(name), **sizes), max_seq)
    cosines, read, full = [], 0, []
    for pos in range(tokens):
        for sparse in (exact, packed):
            sparse.append(k[:, pos], v[:, pos])
        if pos < tokens - queries:
            continue
        query = q[:, pos - (tokens - queries)]
        slots = packed.choose(query)
        read += len(slots)
        expected = exact.attend(query, config, slots)
        cosines.append(cosine(expected, packed.attend(query, config, slots)))
        everything = exact.cache.attention(query[None, None], 0, exact.cache.seq_len - 1, config)[0, 0]
        full.append(cosine(everything, expected))
    evicted = tokens - packed.cache.seq_len
    print(f"{tokens} tokens through a cache of {max_seq}, {evicted} evicted, {config}")
    print(f"read {read / queries:.0f} of {packed.cache.seq_len} positions a token, blocks of {BLOCK}")
    print(f"{name} against float32, the same blocks: output cosine {np.mean(cosines):.4f} over {queries} queries")
    print(f"chosen blocks against all positions, both float32: {np.mean(full):.4f}")
    print(f"bytes: {exact.cache.nbytes:,} float32, {packed.cache.nbytes:,} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
