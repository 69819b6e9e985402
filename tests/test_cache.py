"""Both caches: one interface, bytes of the specification, eviction, rings, protected tokens, and refusals."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import naive_attention as naive
import numpy as np
import pytest
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache, attention_cached, plain_attention
from tqtool.attention.plain import AttentionConfig, attention
from tqtool.codec.codec import decode, encode
from tqtool.codec.sizes import AttentionLayer, KVConfig, cache_size
from tqtool.codec.spec import CodecSpec
from tqtool.errors import InputError, TqError, UsageError

Array = NDArray[Any]
Cache = KVCache | TurboQuantCache

LAYERS, KV_HEADS, DIM, SLOTS = 2, 2, 32, 24
FUSED = 1e-5  # of the output's norm: the promise of the specification's drop-in
EXACT = 1e-6  # float32 sums of tens of terms


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def float32_cache(**options: int) -> KVCache:
    return KVCache(**{"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": DIM, "max_seq_len": SLOTS, **options})


def compressed(name: str = "K4/V2", **options: Any) -> TurboQuantCache:
    sizes = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": DIM, "max_seq_len": SLOTS}
    return TurboQuantCache(KVConfig.parse(name), **{**sizes, **options})


MAKERS: dict[str, Callable[..., Cache]] = {
    "float32": float32_cache,
    "K4-V2": compressed,
    "K3-V8-bf16": lambda **o: compressed("K3/V8", meta="bf16", **o),
    "protected": lambda **o: compressed(sink_tokens=2, residual_window=3, **o),
}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def tokens(seed: int, count: int, batch: int = 1) -> tuple[Array, Array]:
    return draw(seed, batch, count, KV_HEADS, DIM), draw(seed + 1000, batch, count, KV_HEADS, DIM)


def relative(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def contents(cache: Cache) -> list[bytes]:
    return [side(layer).tobytes() for layer in range(LAYERS) for side in (cache.keys, cache.values)] + [
        str(cache.seq_len).encode()
    ]


# What is stored


def test_the_compressed_cache_holds_what_the_codec_writes() -> None:
    k, v = tokens(1, 7, batch=3)
    cache = compressed(
        "K3/V2", batch=3, law="sphere", key_scale_rule="lsq", value_scale_rule="unbiased", meta="f32", seed=9
    )
    cache.write(1, 4, k, v)
    key_spec = CodecSpec(DIM, 3, "sphere", "lsq", "f32", 9)
    value_spec = CodecSpec(DIM, 2, "sphere", "unbiased", "f32", 9)
    assert_array_equal(cache.keys(1)[:, 4:], decode(encode(k, key_spec)))
    assert_array_equal(cache.values(1)[:, 4:], decode(encode(v, value_spec)))
    assert_array_equal(cache.keys(1)[:, :4], 0)
    assert (cache.seq_len, cache.keys(0).shape[1]) == (11, 0)


@both
def test_a_cache_filled_token_by_token_equals_one_filled_at_once(make: Callable[..., Cache]) -> None:
    k, v = tokens(2, 11)
    one, many = make(), make()
    for layer in range(LAYERS):
        one.write(layer, 0, k, v)
        for t in range(11):
            many.append(layer, k[:, t : t + 1], v[:, t : t + 1])
    assert contents(one) == contents(many)


def test_quantize_and_dequantize_are_the_specifications_calls() -> None:
    k, v = tokens(3, 5)
    cache, written = compressed(), compressed()
    for t in range(5):
        cache.quantize(1, t, v[0, t].ravel(), False)  # the order of the two sides does not matter
        cache.quantize(1, t, k[0, t].ravel(), True)
    written.write(1, 0, k, v)
    assert contents(cache) == contents(written)
    assert_array_equal(cache.dequantize(1, 2, 3, True), written.keys(1)[:, 2:5])
    assert_array_equal(cache.dequantize(1, 0, 1, False), written.values(1)[:, :1])
    assert cache.dequantize(1, 5, 0, True).shape == (1, 0, KV_HEADS, DIM)


@pytest.mark.parametrize("meta", ["range", "f32", "bf16"])
@pytest.mark.parametrize("name", ["K4/V2", "K3/V2", "K8/V5"])
def test_bytes_are_those_of_the_size_calculator(name: str, meta: Any) -> None:
    cache = TurboQuantCache(KVConfig.parse(name), layers=3, kv_heads=5, head_dim=96, max_seq_len=7, meta=meta)
    sized = cache_size(KVConfig.parse(name), [AttentionLayer(5, 96)] * 3, tokens=7, meta=meta)
    assert cache.nbytes == sized.total
    assert KVCache(layers=3, kv_heads=5, head_dim=96, max_seq_len=7).nbytes == sized.float32


def test_bytes_of_the_specifications_models() -> None:
    """RWKV-X 0.2B: 3.5 MiB a layer, 14 MiB in all; 1792 bytes a token and layer."""
    sizes = {"layers": 4, "kv_heads": 16, "head_dim": 128, "max_seq_len": 2048}
    assert TurboQuantCache(KVConfig(4, 2), **sizes).nbytes == 14 << 20
    assert KVCache(**sizes).nbytes == 128 << 20
    assert TurboQuantCache(KVConfig(4, 2), layers=1, kv_heads=16, head_dim=128, max_seq_len=1).nbytes == 1792


def test_protected_tokens_are_counted() -> None:
    plain, protected = compressed(), compressed(sink_tokens=4, residual_window=16)
    assert protected.nbytes - plain.nbytes == LAYERS * KV_HEADS * 20 * 2 * DIM * 4


# Attention


@both
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_cached_attention_is_attention_over_what_the_cache_holds(make: Callable[..., Cache], group: int) -> None:
    cache = make(batch=2)
    config = AttentionConfig(group * KV_HEADS, DIM, KV_HEADS, causal=True)
    k, v = tokens(4, 13, batch=2)
    q = draw(5, 2, 13, group * KV_HEADS, DIM)
    outs = [attention_cached(q[:, :8], k[:, :8], v[:, :8], cache, 1, 0, config)]
    outs += [attention_cached(*(x[:, t : t + 1] for x in (q, k, v)), cache, 1, t, config) for t in range(8, 13)]
    if isinstance(cache, KVCache):
        expected = attention(q, k, v, config)
        assert_allclose(np.concatenate(outs, axis=1), expected, atol=EXACT)
    last = attention(q[:, 12:], cache.keys(1), cache.values(1), config)
    assert relative(outs[-1], last) < FUSED


@pytest.mark.parametrize("engine", ["runtime", "reference"])
@pytest.mark.parametrize("name", ["K4/V2", "K2/V2", "K3/V3", "K8/V8", "K1/V5"])
@pytest.mark.parametrize("meta", ["range", "f32", "bf16"])
@pytest.mark.parametrize("protect", [(0, 0), (3, 0), (0, 5), (2, 4)])
def test_fused_attention_agrees_with_restored_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, engine: str, name: str, meta: str, protect: tuple[int, int]
) -> None:
    monkeypatch.setenv("TQTOOL_ENGINE", engine)
    cache = compressed(name, meta=meta, sink_tokens=protect[0], residual_window=protect[1], seed=3)
    k, v = tokens(6, 20)
    cache.write(0, 0, k, v)
    q = draw(7, 1, 4, 6, DIM)
    for options in ({}, {"window": 5}, {"softcap": 2.0}, {"scale": 1.5, "causal": False}):
        with case(options=options):
            config = AttentionConfig(6, DIM, KV_HEADS, **{"causal": True, **options})
            got = cache.attention(q, 0, 16, config)
            assert got.dtype == np.float32
            assert relative(got, plain_attention(q, cache, 0, 16, config)) < FUSED


@pytest.mark.parametrize("dim", [16, 80, 96, 112, 144, 256, 576, 1024])
@pytest.mark.parametrize("bits", range(1, 9))
def test_both_engines_agree_in_every_dimension_and_width(monkeypatch: pytest.MonkeyPatch, dim: int, bits: int) -> None:
    cache = compressed(f"K{bits}/V{9 - bits}", head_dim=dim, sink_tokens=bits % 2, max_seq_len=40)
    k, v = draw(90, 1, 37, KV_HEADS, dim), draw(91, 1, 37, KV_HEADS, dim)
    cache.write(0, 0, k, v)
    q = draw(92, 1, 3, 6, dim)
    for config in (AttentionConfig(6, dim, KV_HEADS, causal=True), AttentionConfig(6, dim, KV_HEADS, softcap=3.0)):
        with case(config=config):
            outs = []
            for engine in ("runtime", "reference"):
                monkeypatch.setenv("TQTOOL_ENGINE", engine)
                outs.append(cache.attention(q, 0, 34, config))
            assert relative(*outs) < FUSED
            assert relative(outs[0], plain_attention(q, cache, 0, 34, config)) < FUSED


def test_plain_and_fused_are_one_option_apart() -> None:
    k, v = tokens(8, 9)
    q = draw(9, 1, 9, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    fused = attention_cached(q, k, v, compressed(), 0, 0, config)
    plain = attention_cached(q, k, v, compressed(), 0, 0, config, plain=True)
    assert relative(fused, plain) < FUSED
    assert not np.array_equal(fused, plain)


def test_cached_attention_is_the_plain_loop_with_window_and_softcap() -> None:
    k, v = tokens(10, 9)
    q = draw(11, 1, 9, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=4, softcap=3.0)
    got = attention_cached(q, k, v, float32_cache(), 0, 0, config)
    expected = naive.attention(q, k, v, scale=DIM**-0.5, softcap=3.0, sees=lambda i, j: j <= i and i - j < 4)
    assert_allclose(got, expected, atol=EXACT * 5)


def test_a_prompt_longer_than_a_block_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = tokens(12, 12)
    q = draw(13, 1, 12, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    whole = attention_cached(q, k, v, compressed(), 0, 0, config)
    monkeypatch.setattr("tqtool.attention.plain.SCORE_BLOCK", 4 * 12 * 5)
    for plain in (False, True):
        with case(plain=plain):
            assert relative(attention_cached(q, k, v, compressed(), 0, 0, config, plain=plain), whole) < FUSED


def test_long_caches_are_read_in_blocks_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = tokens(14, 24)
    cache = compressed("K3/V2")
    cache.write(0, 0, k, v)
    q = draw(15, 1, 1, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    whole = cache.attention(q, 0, 23, config)
    monkeypatch.setattr("tqtool.codec.reference.BLOCK_BYTES", 4 * DIM * 5)
    monkeypatch.setattr("tqtool.attention.fused.PARALLEL_WORK", 1)
    assert relative(cache.attention(q, 0, 23, config), whole) < FUSED


@both
def test_chosen_slots_are_attention_over_these_tokens_alone(make: Callable[..., Cache]) -> None:
    cache = make()
    cache.write(0, 0, *tokens(16, 20))
    q = draw(17, 1, 1, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    choice = np.array([19, 3, 4, 0, 11])
    expected = attention(q, cache.keys(0)[:, choice], cache.values(0)[:, choice], AttentionConfig(4, DIM, KV_HEADS))
    assert relative(cache.attention(q, 0, 19, config, slots=choice), expected) < FUSED
    per_head = np.array([[19, 19], [3, 7], [-1, 12]])  # the first head reads two slots, the second three
    got = cache.attention(q, 0, 19, config, slots=per_head)
    for head, slots in enumerate(([19, 3], [19, 7, 12])):
        with case(head=head, slots=slots):
            rows = np.s_[:, slots, head : head + 1]
            part = np.s_[:, :, 2 * head : 2 * head + 2]
            alone = attention(q[part], cache.keys(0)[rows], cache.values(0)[rows], AttentionConfig(2, DIM, 1))
            assert relative(got[part], alone) < FUSED


# Eviction, ring, clear


@both
def test_eviction_moves_packed_tokens_down_unchanged(make: Callable[..., Cache]) -> None:
    cache = make(batch=2)
    spared = 2 if make is MAKERS["protected"] else 0
    for layer in range(LAYERS):
        cache.write(layer, 0, *tokens(20 + layer, 15, batch=2))
    kept = [*range(spared), *range(spared + 6, 15)]
    before = [cache.keys(1)[:, kept], cache.values(1)[:, kept], cache.keys(0)[:, kept]]
    cache.evict(6)
    assert cache.seq_len == 9
    after = [cache.keys(1), cache.values(1), cache.keys(0)]
    for what, was, now in zip(("keys of 1", "values of 1", "keys of 0"), before, after, strict=True):
        with case(what=what):
            assert_array_equal(was, now)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=4)
    k, v = tokens(30, 1, batch=2)
    q = draw(31, 2, 1, 4, DIM)
    got = attention_cached(q, k, v, cache, 1, 9, config)
    expected = attention(q, cache.keys(1)[:, 6:], cache.values(1)[:, 6:], AttentionConfig(4, DIM, KV_HEADS))
    assert relative(got, expected) < FUSED


@both
def test_a_ring_needs_no_reordering(make: Callable[..., Cache]) -> None:
    cache = make(max_seq_len=8)
    k, v = tokens(40, 21)
    q = draw(41, 1, 21, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=5)
    for t in range(21):
        got = attention_cached(*(x[:, t : t + 1] for x in (q, k, v)), cache, 0, t % 8, config)
    assert cache.seq_len == 8
    newest = np.arange(21 - 5, 21) % 8
    free = AttentionConfig(4, DIM, KV_HEADS)
    expected = attention(q[:, 20:], cache.keys(0)[:, newest], cache.values(0)[:, newest], free)
    assert relative(got, expected) < FUSED
    if isinstance(cache, KVCache):
        assert_array_equal(cache.keys(0)[:, np.arange(13, 21) % 8], k[:, 13:])
    with pytest.raises(UsageError, match="used as a ring: the oldest token of layer 0 is in slot 5") as caught:
        cache.evict(1)
    assert "overwriting" in str(caught.value.hint)


@both
def test_a_cleared_cache_is_as_good_as_a_new_one(make: Callable[..., Cache]) -> None:
    used, fresh = make(), make()
    used.write(0, 0, *tokens(50, 20))
    used.clear()
    assert (used.seq_len, used.keys(0).shape[1]) == (0, 0)
    for cache in (used, fresh):
        cache.write(0, 3, *tokens(51, 4))
    assert contents(used) == contents(fresh)
    q = draw(52, 1, 4, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    assert_array_equal(used.attention(q, 0, 3, config), fresh.attention(q, 0, 3, config))


@both
def test_a_rejected_draft_leaves_no_trace(make: Callable[..., Cache]) -> None:
    drafted, straight = make(), make()
    k, v = tokens(53, 6)
    for cache in (drafted, straight):
        cache.append(0, k, v)
    drafted.append(0, *tokens(54, 2))
    drafted.truncate(6)
    assert_array_equal(drafted.keys(0)[:, :3], straight.keys(0)[:, :3])
    k, v = tokens(55, 1)
    q = draw(56, 1, 1, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    got = attention_cached(q, k, v, drafted, 0, 6, config)
    assert drafted.seq_len == 7
    assert relative(got, plain_attention(q, drafted, 0, 6, config)) < FUSED


@both
def test_empty_slots_are_not_seen(make: Callable[..., Cache]) -> None:
    cache = make()
    k, v = tokens(57, 3)
    q = draw(58, 1, 3, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    got = attention_cached(q, k, v, cache, 0, 5, config)
    assert cache.seq_len == 8
    expected = attention(q, cache.keys(0)[:, 5:], cache.values(0)[:, 5:], config)
    assert relative(got, expected) < FUSED


# Protected tokens


def test_first_and_newest_tokens_are_exact_and_the_others_are_not() -> None:
    cache = compressed(sink_tokens=3, residual_window=4)
    k, v = tokens(60, 15)
    cache.write(0, 0, k[:, :9], v[:, :9])
    for t in range(9, 15):
        cache.append(0, k[:, t : t + 1], v[:, t : t + 1])
    exact = [0, 1, 2, 11, 12, 13, 14]
    for side, got, given in (("keys", cache.keys(0), k), ("values", cache.values(0), v)):
        with case(side=side):
            same = (got == given).all(axis=(0, 2, 3))
            assert_array_equal(np.flatnonzero(same), exact)


def test_the_window_follows_evictions_and_rings() -> None:
    cache = compressed(sink_tokens=2, residual_window=4)
    k, v = tokens(61, 15)
    cache.write(0, 0, k, v)
    cache.evict(10)
    assert_array_equal(np.flatnonzero((cache.keys(0) == k[:, [0, 1, 12, 13, 14]]).all(axis=(0, 2, 3))), range(5))
    cache.evict(3)
    assert_array_equal(cache.keys(0), k[:, :2])
    ring = compressed(residual_window=3, max_seq_len=5)
    for t in range(12):
        ring.write(0, t % 5, k[:, t : t + 1], v[:, t : t + 1])
    held = k[:, [10, 11, 7, 8, 9]]
    assert_array_equal(np.flatnonzero((ring.keys(0) == held).all(axis=(0, 2, 3))), [0, 1, 4])


def test_the_window_survives_a_rejected_draft() -> None:
    cache = compressed(sink_tokens=1, residual_window=4)
    k, v = tokens(64, 12)
    cache.write(0, 0, k[:, :8], v[:, :8])
    for draft in range(3):
        with case(draft=draft):
            cache.append(0, *tokens(65, 2))
            cache.truncate(8)
            assert_array_equal(np.flatnonzero((cache.keys(0) == k[:, :8]).all(axis=(0, 2, 3))), [0, 6, 7])
    cache.append(0, k[:, 8:], v[:, 8:])
    assert_array_equal(np.flatnonzero((cache.keys(0) == k).all(axis=(0, 2, 3))), [0, 8, 9, 10, 11])


@both
def test_distances_do_not_count_a_rejected_draft(make: Callable[..., Cache]) -> None:
    cache = make()
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=3)
    cache.append(0, *tokens(66, 6))
    cache.append(0, *tokens(67, 4))
    cache.truncate(6)
    cache.append(0, *tokens(68, 1))
    q = draw(69, 1, 1, 4, DIM)
    expected = attention(q, cache.keys(0)[:, 4:], cache.values(0)[:, 4:], AttentionConfig(4, DIM, KV_HEADS))
    assert relative(cache.attention(q, 0, 6, config), expected) < FUSED
    assert relative(cache.attention(q, 0, 6, config, slots=np.arange(7)), expected) < FUSED


@both
def test_a_rewritten_slot_is_the_newest_and_stays_so(make: Callable[..., Cache]) -> None:
    cache = make()
    cache.append(0, *tokens(100, 6))
    cache.write(0, 1, *tokens(101, 1))
    cache.truncate(5)
    cache.append(0, *tokens(102, 1))
    q = draw(103, 1, 1, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=2)
    newest = [1, 5]
    expected = attention(q, cache.keys(0)[:, newest], cache.values(0)[:, newest], AttentionConfig(4, DIM, KV_HEADS))
    assert relative(cache.attention(q, 0, 5, config), expected) < FUSED


def test_a_window_as_long_as_the_cache_is_the_float32_cache() -> None:
    k, v = tokens(62, 10)
    q = draw(63, 1, 10, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    got = attention_cached(q, k, v, compressed(residual_window=10), 0, 0, config)
    assert_allclose(got, attention_cached(q, k, v, float32_cache(), 0, 0, config), atol=EXACT)


# Misuse: a clear error, and nothing changed


BAD_WRITES: dict[str, tuple[tuple[int, int], tuple[int, ...], str, str]] = {
    "layer": ((2, 0), (1, 1, KV_HEADS, DIM), "usage", "layer 2: the cache has layers 0 to 1"),
    "negative layer": ((-1, 0), (1, 1, KV_HEADS, DIM), "usage", "layer -1: the cache has layers 0 to 1"),
    "slot": ((0, 24), (1, 1, KV_HEADS, DIM), "usage", "slot 24: the cache has slots 0 to 23"),
    "negative slot": ((0, -1), (1, 1, KV_HEADS, DIM), "usage", "slot -1: the cache has slots 0 to 23"),
    "capacity": ((0, 22), (1, 3, KV_HEADS, DIM), "usage", "slot 22 to 24: the cache has slots 0 to 23"),
    "heads": ((0, 0), (1, 1, 3, DIM), "shape-mismatch", "k is (1, 1, 3, 32), need (1, tokens, 2, 32)"),
    "dim": ((0, 0), (1, 1, KV_HEADS, 16), "shape-mismatch", "k is (1, 1, 2, 16), need (1, tokens, 2, 32)"),
    "batch": ((0, 0), (2, 1, KV_HEADS, DIM), "shape-mismatch", "k is (2, 1, 2, 32), need (1, tokens, 2, 32)"),
    "axes": ((0, 0), (1, KV_HEADS, DIM), "shape-mismatch", "k is (1, 2, 32), need (1, tokens, 2, 32)"),
}


@both
@pytest.mark.parametrize(("where", "shape", "code", "message"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_a_wrong_write_is_refused_and_changes_nothing(
    make: Callable[..., Cache], where: tuple[int, int], shape: tuple[int, ...], code: str, message: str
) -> None:
    cache = make()
    cache.write(0, 0, *tokens(70, 5))
    before = contents(cache)
    with pytest.raises(TqError) as caught:
        cache.write(*where, draw(71, *shape), draw(72, *shape))
    assert (caught.value.code, str(caught.value)) == (code, message)
    assert contents(cache) == before


@both
def test_values_that_cannot_be_stored_change_nothing(make: Callable[..., Cache]) -> None:
    cache = make()
    cache.write(0, 0, *tokens(73, 5))
    before = contents(cache)
    k, v = tokens(74, 2)
    for bad, code in ((np.nan, "non-finite"), (np.inf, "non-finite"), (1e39, "norm-range")):
        with case(bad=bad, code=code):
            wrong = v.astype(np.float64)
            wrong[0, 1, 1, 3] = bad
            with pytest.raises(InputError) as caught:
                cache.write(0, 5, k, wrong)
            assert caught.value.code == code
    with pytest.raises(InputError, match="dtype int64 is not floating point"):
        cache.write(0, 5, k, v.astype(np.int64))
    with pytest.raises(InputError, match=r"k is \(1, 2, 2, 32\), v is \(1, 1, 2, 32\)"):
        cache.write(0, 5, k, v[:, :1])
    assert contents(cache) == before


@both
def test_wrong_queries_are_refused_before_anything_is_written(make: Callable[..., Cache]) -> None:
    cache = make()
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True)
    k, v = tokens(75, 2)
    before = contents(cache)
    with pytest.raises(InputError, match="q has 6 heads, the configuration 4"):
        attention_cached(draw(1, 1, 2, 6, DIM), k, v, cache, 0, 0, config)
    with pytest.raises(InputError, match="they are of the same tokens"):
        attention_cached(draw(1, 1, 1, 4, DIM), k, v, cache, 0, 0, config)
    with pytest.raises(UsageError, match="slot 23 to 24"):
        attention_cached(draw(1, 1, 2, 4, DIM), k, v, cache, 0, 23, config)
    assert contents(cache) == before
    with pytest.raises(UsageError, match="slot 0: layer 0 holds no token there"):
        cache.attention(draw(1, 1, 1, 4, DIM), 0, 0, config)
    cache.write(0, 0, k, v)
    with pytest.raises(InputError, match="k has 2 heads, the configuration 4"):
        cache.attention(draw(1, 1, 1, 4, DIM), 0, 0, AttentionConfig(4, DIM))
    for wrong in (np.array([2]), np.array([-2]), np.array([[0, 1, 1]]), np.array([0.5])):
        with case(wrong=wrong), pytest.raises(UsageError, match="slots"):
            cache.attention(draw(1, 1, 1, 4, DIM), 0, 0, config, slots=wrong)


@both
def test_more_than_there_is_cannot_be_evicted_or_truncated(make: Callable[..., Cache]) -> None:
    cache = make()
    cache.write(0, 0, *tokens(76, 5))
    before = contents(cache)
    for count in (6, -1):
        with case(count=count):
            with pytest.raises(UsageError, match=rf"cannot evict {count} of"):
                cache.evict(count)
            with pytest.raises(UsageError, match=rf"cannot truncate 5 tokens to {count}"):
                cache.truncate(count)
    assert contents(cache) == before


def test_calls_of_the_compressed_cache_that_are_refused() -> None:
    cache = compressed()
    cache.quantize(0, 0, draw(1, KV_HEADS * DIM), True)
    before = contents(cache)
    with pytest.raises(InputError, match=r"vec is \(63,\), need \(1, 2, 32\) or as many values"):
        cache.quantize(0, 1, draw(1, 63), True)
    with pytest.raises(UsageError, match="slot 24"):
        cache.quantize(0, 24, draw(1, 64), False)
    with pytest.raises(InputError, match="1 NaN"):
        cache.quantize(0, 0, np.append(draw(1, 63), np.float32(np.nan)), True)
    with pytest.raises(UsageError, match="slots 0 to 1: layer 0 holds 1 tokens"):
        cache.dequantize(0, 0, 2, True)
    assert contents(cache) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers is 0, at least 1 is needed"),
        ({"max_seq_len": 0}, "max_seq_len is 0, at least 1 is needed"),
        ({"kv_heads": 0}, "kv_heads is 0, at least 1 is needed"),
        ({"batch": 0}, "batch is 0, at least 1 is needed"),
        ({"name": "K16/V2"}, "K16/V2: a compressed cache has 1 to 8 bits a side"),
        ({"head_dim": 90}, "vector length 90: no Hadamard matrix of that order is built"),
        ({"sink_tokens": 25}, "25 sink tokens in a cache of 24"),
        ({"residual_window": -1}, "residual_window is -1, at least 0 is needed"),
    ],
)
def test_caches_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TqError) as caught:
        compressed(**options)
    assert str(caught.value).startswith(message)


# Anything at all


@both
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_leaves_what_a_plain_table_holds(make: Callable[..., Cache], seed: int) -> None:
    """Writes anywhere, evictions, truncations: slots as a table of (position, k, v), attention as a plain loop."""
    rng, cache = np.random.default_rng(seed), make()
    sinks = 2 if make is MAKERS["protected"] else 0
    table: dict[int, tuple[int, Array, Array]] = {}
    position = 0
    for call in range(40):
        with case(call=call):
            length = max(table, default=-1) + 1
            action = rng.choice(["append", "append", "append", "rewrite", "evict", "truncate"])
            if action == "evict" and length > sinks:
                count = int(rng.integers(0, length - sinks + 1))
                order = [table[slot][0] for slot in sorted(table) if slot >= sinks]
                if order != sorted(order):
                    with pytest.raises(UsageError, match="ring"):
                        cache.evict(count)
                    continue
                cache.evict(count)
                table = {s if s < sinks else s - count: t for s, t in table.items() if s < sinks or s >= sinks + count}
            elif action == "truncate":
                keep = int(rng.integers(length // 2, length + 1))
                cache.truncate(keep)
                table = {slot: token for slot, token in table.items() if slot < keep}
                position = max((token[0] for token in table.values()), default=-1) + 1
            else:
                count = int(rng.integers(1, 5))
                slot = length if action == "append" else int(rng.integers(0, length + 1))
                slot = min(slot, SLOTS - count)
                k, v = tokens(int(rng.integers(1 << 30)), count)
                cache.write(0, slot, k, v)
                for t in range(count):
                    table[slot + t] = (position, k[0, t], v[0, t])
                    position += 1
            filled = max(table, default=-1) + 1
            assert cache.seq_len == filled
    if not table:
        return
    for side, index in ((cache.keys(0), 1), (cache.values(0), 2)):
        with case(index=index):
            given = np.stack(
                [table[s][index] if s in table else np.zeros((KV_HEADS, DIM), np.float32) for s in range(filled)]
            )
            assert np.abs(side[0] - given).max() < (1e-6 if isinstance(cache, KVCache) else 4)
            assert not side[0][[s for s in range(filled) if s not in table]].any()
    newest = max(table, key=lambda slot: table[slot][0])
    q = draw(seed, 1, 1, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, window=9)
    seen = [slot for slot in table if table[slot][0] > table[newest][0] - 9]
    expected = attention(q, cache.keys(0)[:, seen], cache.values(0)[:, seen], AttentionConfig(4, DIM, KV_HEADS))
    assert relative(cache.attention(q, 0, newest, config), expected) < FUSED


@both
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_tokens_are_widened(make: Callable[..., Cache], dtype: Any) -> None:
    k, v = (x.astype(dtype) for x in tokens(80, 4))
    half, wide = make(), make()
    half.write(0, 0, k, v)
    wide.write(0, 0, k.astype(np.float32), v.astype(np.float32))
    assert contents(half) == contents(wide)


@both
@pytest.mark.parametrize("engine", ["runtime", "reference"])
def test_huge_scores_and_zero_vectors_stay_finite(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Cache], engine: str
) -> None:
    monkeypatch.setenv("TQTOOL_ENGINE", engine)
    k, v = tokens(81, 12)
    k[:, 3:5], v[:, 4:6] = 0, 0
    q = draw(82, 1, 12, 4, DIM)
    config = AttentionConfig(4, DIM, KV_HEADS, causal=True, scale=500.0)  # scores of about 1e4
    cache = make()
    got = attention_cached(q, k, v, cache, 0, 0, config)
    exact = attention(*(x.astype(np.float64) for x in (q, cache.keys(0), cache.values(0))), config)
    assert np.isfinite(got).all()
    assert_allclose(got, exact, atol=0.02)  # a float32 score of 1e4 is known to 1e-3, and so is a weight
    empty = make()
    zero = np.zeros_like(k)
    assert_array_equal(attention_cached(q, zero, zero, empty, 0, 0, config), np.zeros_like(q))


@both
@pytest.mark.parametrize(
    ("count", "layer", "message"),
    [
        (1, LAYERS, f"layer {LAYERS}: the cache has layers 0 to {LAYERS - 1}"),
        (1, -1, f"layer -1: the cache has layers 0 to {LAYERS - 1}"),
        (-1, 0, "cannot evict -1 of "),
        (9, 0, "cannot evict 9 of "),
        (1, 1, "cannot evict 1 of 0 tokens"),
    ],
)
def test_an_eviction_of_one_layer_that_cannot_be_is_refused(
    make: Callable[..., Cache], count: int, layer: int, message: str
) -> None:
    cache = make()
    cache.write(0, 0, *tokens(31, 8))
    before = contents(cache)
    with pytest.raises(UsageError) as failure:
        cache.evict(count, layer)
    assert str(failure.value).startswith(message)
    assert contents(cache) == before
