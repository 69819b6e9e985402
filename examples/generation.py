"""A decoder generates text twice, once over a float32 cache and once over a compressed one.

    python examples/generation.py [DUMP] [CONFIG]

The prompt is real: its keys and values come from a dump, by default the sample that ships with tqtool, one decoder
layer for each of its layers. The decoder's own weights are random, so the tokens mean nothing; what counts is the loop
(one token, one slot, `attention_cached` in every layer) and how far the two caches drift apart. First the dump's own
queries are replayed, then the decoder runs: forced through the same tokens, and free.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache, attention_cached
from tqtool.attention.plain import AttentionConfig, softmax
from tqtool.attention.rope import rope
from tqtool.codec.sizes import KVConfig
from tqtool.dumps.dump import Dump, load_dump, sample_dump_path

Array = NDArray[np.float32]
Cache = KVCache | TurboQuantCache

WIDTH, VOCABULARY, NEW_TOKENS = 192, 256, 32


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer."""

    wq: Array
    wk: Array
    wv: Array
    wo: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class Decoder:
    """A Llama-like decoder."""

    config: AttentionConfig
    embedding: Array
    layers: tuple[Layer, ...]
    head: Array


def random_decoder(config: AttentionConfig, layers: int, seed: int = 1) -> Decoder:
    """Draw weights that keep activations near unit variance."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(rows))

    q_width, kv_width = config.heads * config.head_dim, config.key_heads * config.head_dim
    shapes = [(WIDTH, q_width), (WIDTH, kv_width), (WIDTH, kv_width), (q_width, WIDTH)]
    shapes += [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    drawn = tuple(Layer(*(draw(*shape) for shape in shapes)) for _ in range(layers))
    return Decoder(config, draw(WIDTH, VOCABULARY).T, drawn, draw(WIDTH, VOCABULARY))


def step(decoder: Decoder, token: int, pos: int, cache: Cache) -> Array:
    """Return the logits after one token at position `pos`; its keys and values go into the cache."""
    config = decoder.config
    x = decoder.embedding[token]
    for number, layer in enumerate(decoder.layers):
        normed = normalized(x)
        q = (normed @ layer.wq).reshape(1, 1, config.heads, config.head_dim)
        k = (normed @ layer.wk).reshape(1, 1, config.key_heads, config.head_dim)
        v = (normed @ layer.wv).reshape(k.shape)
        q, k = rope(q, k, pos)
        x = x + attention_cached(q, k, v, cache, number, pos, config).ravel() @ layer.wo
        x = x + np.tanh(normalized(x) @ layer.up) @ layer.down
    logits: Array = 3 * normalized(x) @ decoder.head
    return logits


def normalized(x: Array) -> Array:
    """Return x over its root mean square."""
    scaled: Array = x / np.sqrt(np.mean(x * x))
    return scaled


def prompted(cache: Cache, dump: Dump, tokens: int) -> Cache:
    """Fill the cache with the first tokens of the dump."""
    for number, layer in enumerate(dump.layers):
        _, k, v = layer.arrays()  # (heads, tokens, dim)
        cache.write(number, 0, *(x[None, :, :tokens].transpose(0, 2, 1, 3) for x in (k, v)))
    return cache


def replay(cache: Cache, dump: Dump, config: AttentionConfig, tokens: int) -> Array:
    """Return the attention of the dump's last queries, one step a token: (layers, steps, heads, dim)."""
    outs = []
    for number, layer in enumerate(dump.layers):
        q, k, v = (x[None].transpose(0, 2, 1, 3) for x in layer.arrays() if x is not None)
        steps = range(k.shape[1] - tokens)
        first = q.shape[1] - len(steps)
        outs.append([
            attention_cached(q[:, first + t : first + t + 1], k[:, [tokens + t]], v[:, [tokens + t]],
                             cache, number, tokens + t, config)[0, 0]
            for t in steps
        ])  # fmt: skip
    return np.array(outs)


def generate(decoder: Decoder, cache: Cache, pos: int, forced: list[int] | None = None) -> tuple[list[int], Array]:
    """Return the tokens chosen and the logits, (steps, vocabulary); `forced` tokens are fed instead of the chosen."""
    token, tokens, logits = 0, [], []
    for i in range(NEW_TOKENS):
        logits.append(step(decoder, token, pos + i, cache))
        tokens.append(int(logits[-1].argmax()))
        token = tokens[-1] if forced is None else forced[i]
    return tokens, np.array(logits)


def main(folder: str | None = None, name: str = "K4/V2") -> None:
    """Print how far the compressed cache is from the float32 cache."""
    dump = load_dump(sample_dump_path() if folder is None else folder)
    layer = dump.layers[0]  # the others are alike
    config = AttentionConfig(layer.query_heads, layer.k.dim, layer.kv_heads, causal=True, scale=layer.claims.scaling)
    tokens, queries = layer.tokens, layer.queries
    sizes: dict[str, Any] = {"layers": len(dump.layers), "kv_heads": layer.kv_heads, "head_dim": layer.k.dim}
    sizes["max_seq_len"] = tokens + NEW_TOKENS

    def caches(length: int) -> tuple[Cache, Cache]:
        exact, packed = KVCache(**sizes), TurboQuantCache(KVConfig.parse(name), **sizes)
        return prompted(exact, dump, length), prompted(packed, dump, length)

    exact, packed = caches(tokens)
    print(f"{len(dump.layers)} layers of {config}")
    print(f"float32 cache {exact.nbytes:,} bytes, {name} cache {packed.nbytes:,}: {exact.nbytes / packed.nbytes:.2f}x")

    a, b = (replay(cache, dump, config, tokens - queries) for cache in caches(tokens - queries))
    cosines = np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    errors = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(a, axis=-1)
    figures = f"output cosine {cosines.mean():.4f}, relative error {errors.mean():.3f}"
    print(f"replaying {queries} real queries a layer: {figures}")

    decoder = random_decoder(config, len(dump.layers))
    said, exact_logits = generate(decoder, exact, tokens)
    chosen, logits = generate(decoder, packed, tokens, forced=said)
    p, other = (softmax(x.astype(np.float64)) for x in (exact_logits, logits))
    kl = np.mean(np.sum(p * np.log(p / other), axis=-1))
    same = sum(x == y for x, y in zip(said, chosen, strict=True))
    print(f"forced through {NEW_TOKENS} generated tokens: {same} chosen alike, mean KL of the logits {kl:.2g} nats")

    packed.truncate(tokens)
    free, _ = generate(decoder, packed, tokens)
    alike = next((i for i, (x, y) in enumerate(zip(said, free, strict=True)) if x != y), NEW_TOKENS)
    print(f"running free: the first {alike} of {NEW_TOKENS} tokens are alike")


if __name__ == "__main__":
    main(*sys.argv[1:])
