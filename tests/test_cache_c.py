"""The compressed cache of the C runtime, the one that engines get, is the Python cache bit for bit."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from tqtool.attention.cache import TurboQuantCache, attention_cached
from tqtool.attention.plain import AttentionConfig
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec
from tqtool.runtime import binding as runtime

pytestmark = pytest.mark.skipif(not runtime.available(), reason="the C runtime was not compiled: no C compiler")

LAYERS, HEADS, DIM, SLOTS, SEED = 2, 3, 64, 12, 42
FLOAT32 = 1e-5


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class CCache:
    """The specification's calls, through the runtime's own header."""

    def __init__(self, key_bits: int, value_bits: int) -> None:
        self.ffi, self.lib = runtime.ffi, runtime.lib
        self.state = runtime._state(CodecSpec(DIM, key_bits, seed=SEED), CodecSpec(DIM, value_bits, seed=SEED))
        cache = self.lib.fa_tq_cache_new(self.state, LAYERS, HEADS, SLOTS)
        self.cache = self.ffi.gc(cache, self.lib.fa_tq_cache_free)

    def floats(self, array: NDArray[np.float32]) -> Any:
        return self.ffi.from_buffer("float[]", array)

    def quantize(self, layer: int, pos: int, vec: NDArray[np.float32], is_key: bool) -> int:
        return int(self.lib.fa_tq_quantize(self.state, self.cache, layer, pos, self.floats(vec), is_key))

    def dequantize(self, layer: int, start: int, count: int, is_key: bool) -> NDArray[np.float32]:
        out = np.zeros((1, count, HEADS, DIM), np.float32)
        self.lib.fa_tq_dequantize(self.state, self.cache, layer, start, count, is_key, self.floats(out))
        return out

    def step(self, layer: int, pos: int, q: Any, k: Any, v: Any, scale: float) -> NDArray[np.float32]:
        heads, out = q.shape[2], np.zeros_like(q)
        scratch = np.zeros(self.lib.fa_tq_attention_scratch(self.cache, heads, 1), np.float32)
        arrays = [self.floats(np.ascontiguousarray(x)) for x in (q, k, v)]
        step = self.ffi.new("fa_tq_step *", (layer, pos, 1, heads, *arrays, scale))
        error = self.lib.fa_tq_attention_step(self.cache, step, self.floats(scratch), self.floats(out))
        assert error == 0
        return out


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (3, 2), (2, 4), (3, 3)])
def test_both_caches_hold_the_same_through_steps_ring_eviction_and_clear(key_bits: int, value_bits: int) -> None:
    theirs = CCache(key_bits, value_bits)
    sizes = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "max_seq_len": SLOTS}
    ours = TurboQuantCache(KVConfig(key_bits, value_bits), **sizes, seed=SEED)
    config = AttentionConfig(6, DIM, HEADS, causal=True)
    assert theirs.lib.fa_tq_cache_bytes(theirs.cache) == ours.nbytes

    def same() -> None:
        assert theirs.lib.fa_tq_cache_seq_len(theirs.cache) == ours.seq_len
        for layer in range(LAYERS):
            for is_key, side in ((True, ours.keys(layer)), (False, ours.values(layer))):
                assert_array_equal(theirs.dequantize(layer, 0, ours.seq_len, is_key), side)

    def steps(slots: range, seed: int) -> None:
        for pos in slots:
            for layer in range(LAYERS):
                q = draw(seed + pos, 1, 1, 6, DIM)
                k, v = (draw(seed + pos + 1000 * (layer + side), 1, 1, HEADS, DIM) for side in (1, 5))
                got = theirs.step(layer, pos, q, k, v, config.score_scale)
                expected = attention_cached(q, k, v, ours, layer, pos, config)
                assert np.linalg.norm(got - expected) < FLOAT32 * np.linalg.norm(expected)

    steps(range(9), seed=1)
    same()
    assert theirs.lib.fa_tq_cache_evict(theirs.cache, 4) == 0
    ours.evict(4)
    same()
    steps(range(5, 12), seed=2)
    steps(range(3), seed=3)  # round the ring
    same()
    theirs.lib.fa_tq_cache_clear(theirs.cache)
    ours.clear()
    same()
    steps(range(4), seed=4)
    same()


def test_both_caches_refuse_the_same_calls() -> None:
    theirs = CCache(4, 2)
    vec = draw(5, HEADS * DIM)
    for layer, pos in ((LAYERS, 0), (-1, 0), (0, SLOTS), (0, -1)):
        assert theirs.quantize(layer, pos, vec, True) == theirs.lib.FA_TQ_ERR_POSITION
    vec[3] = np.nan
    assert theirs.quantize(0, 0, vec, True) == theirs.lib.FA_TQ_ERR_VALUE
    assert theirs.lib.fa_tq_cache_seq_len(theirs.cache) == 0
    assert theirs.lib.fa_tq_cache_evict(theirs.cache, 1) != 0
