"""The compressed cache of the C runtime, the one that engines get, is the Python cache bit for bit."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from loops import case
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache, attention_cached
from tqtool.attention.plain import AttentionConfig
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import METAS
from tqtool.runtime import binding as runtime

pytestmark = pytest.mark.skipif(not runtime.available(), reason="the C runtime was not compiled")

LAYERS, HEADS, DIM, SLOTS, SEED = 3, 2, 32, 16, 5
GROUP = 3
SCALE = AttentionConfig(GROUP * HEADS, DIM, HEADS).score_scale
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # enum fa_tq_type
SIZES = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "max_seq_len": SLOTS}


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class CCache:
    """The C cache behind the calls of an engine: one sequence, float32 in, float32 out."""

    def __init__(
        self,
        bits: tuple[int, int] = (4, 2),
        *,
        meta: str = "range",
        sinks: int = 0,
        window: int = 0,
        exact: int = FLOAT32,
        slots: int = SLOTS,
        layers: int = LAYERS,
    ) -> None:
        self.ffi, self.lib = runtime.ffi, runtime.lib
        self.state = runtime._state(CodecSpec(DIM, bits[0], seed=SEED), CodecSpec(DIM, bits[1], seed=SEED))
        config = (layers, HEADS, slots, METAS.index(meta), sinks, window, exact)  # type: ignore[arg-type]
        cache = self.lib.fa_tq_cache_new_with(self.state, self.ffi.new("fa_tq_cache_config *", config))
        self.cache = self.ffi.gc(cache, self.lib.fa_tq_cache_free)

    def floats(self, array: NDArray[np.float32]) -> Any:
        return self.ffi.from_buffer("float[]", np.ascontiguousarray(array))

    def quantize(self, layer: int, pos: int, vec: NDArray[np.float32], is_key: bool) -> int:
        return int(self.lib.fa_tq_quantize(self.state, self.cache, layer, pos, self.floats(vec), is_key))

    def dequantize(self, layer: int, start: int, count: int, is_key: bool) -> NDArray[np.float32]:
        out = np.zeros((1, count, HEADS, DIM), np.float32)
        self.lib.fa_tq_dequantize(self.state, self.cache, layer, start, count, is_key, self.floats(out))
        return out

    def step(self, layer: int, pos: int, q: Any, k: Any, v: Any, choice: Any = None, block: int = 1) -> Any:
        """The output, or the error."""
        rows, heads, out = q.shape[1], q.shape[2], np.zeros_like(q)
        scratch = np.zeros(self.lib.fa_tq_attention_scratch(self.cache, heads, rows), np.float32)
        arrays = [self.floats(x) for x in (q, k, v)]
        step = self.ffi.new("fa_tq_step *", (layer, pos, rows, heads, *arrays, SCALE))
        if choice is not None:
            entries = np.ascontiguousarray(choice.T, np.int32)  # (kv_heads, n), or (n,)
            stride = entries.shape[1] if entries.ndim == 2 else 0
            kept = self.ffi.from_buffer("int32_t[]", entries)
            step.choice = (kept, entries.shape[-1], stride, block)
        error = self.lib.fa_tq_attention_step(self.cache, step, self.floats(scratch), self.floats(out))
        return error or out

    def evict(self, count: int, layer: int | None = None) -> int:
        if layer is None:
            return int(self.lib.fa_tq_cache_evict(self.cache, count))
        return int(self.lib.fa_tq_cache_evict_layer(self.cache, layer, count))

    @property
    def lengths(self) -> list[int]:
        return [self.lib.fa_tq_cache_layer_len(self.cache, layer) for layer in range(LAYERS)]


def python_cache(bits: tuple[int, int] = (4, 2), meta: Any = "range", sinks: int = 0, window: int = 0) -> Any:
    return TurboQuantCache(
        KVConfig(*bits), **SIZES, seed=SEED, meta=meta, sink_tokens=sinks, residual_window=window, threads=2
    )


def assert_same(theirs: CCache, ours: TurboQuantCache) -> None:
    assert theirs.lib.fa_tq_cache_seq_len(theirs.cache) == ours.seq_len
    assert theirs.lengths == [ours.slots.length(layer) for layer in range(LAYERS)]
    for layer, is_key in product(range(LAYERS), (True, False)):
        side = ours.keys(layer) if is_key else ours.values(layer)
        assert_array_equal(theirs.dequantize(layer, 0, side.shape[1], is_key), side, f"{layer=} {is_key=}")


def vectors(seed: int, rows: int = 1) -> tuple[NDArray[np.float32], ...]:
    return tuple(draw(seed + i, 1, rows, heads, DIM) for i, heads in enumerate((GROUP * HEADS, HEADS, HEADS)))


FORMS = pytest.mark.parametrize(
    ("bits", "meta", "sinks", "window"),
    [
        ((4, 2), "range", 0, 0),
        ((3, 2), "f32", 0, 0),
        ((2, 4), "bf16", 0, 0),
        ((8, 5), "bf16", 2, 0),
        ((4, 2), "bf16", 0, 5),
        ((3, 3), "range", 3, 4),
        ((4, 2), "f32", 1, 40),
    ],
)


@FORMS
def test_both_caches_hold_and_give_the_same_bits(
    bits: tuple[int, int], meta: str, sinks: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, a prompt, eviction of all layers and of one, a ring that comes round, clearing."""
    monkeypatch.setenv("TQTOOL_ENGINE", "runtime")
    theirs = CCache(bits, meta=meta, sinks=sinks, window=window)
    ours = python_cache(bits, meta, sinks, window)
    config = AttentionConfig(GROUP * HEADS, DIM, HEADS, causal=True)
    assert theirs.lib.fa_tq_cache_bytes(theirs.cache) == ours.nbytes

    def steps(slots: range, seed: int, rows: int = 1) -> None:
        for pos, layer in product(slots, range(LAYERS)):
            q, k, v = vectors(1000 * seed + 10 * pos + 100 * layer, rows)
            got = theirs.step(layer, pos, q, k, v)
            assert_array_equal(got, attention_cached(q, k, v, ours, layer, pos, config), f"{layer=} {pos=}")

    steps(range(1), seed=1, rows=6)
    steps(range(6, 11), seed=2)
    assert_same(theirs, ours)
    assert theirs.evict(4) == 0
    ours.evict(4)
    assert_same(theirs, ours)
    assert theirs.evict(3, layer=1) == 0
    ours.evict(3, layer=1)
    assert_same(theirs, ours)
    for layer in range(LAYERS):  # every layer goes on where it is, up to its end and round
        for turn in range(SLOTS):
            with case(layer=layer, turn=turn):
                pos = (theirs.lengths[layer] if theirs.lengths[layer] < SLOTS else turn) % SLOTS
                q, k, v = vectors(7000 + 100 * layer + 10 * turn)
                assert_array_equal(
                    theirs.step(layer, pos, q, k, v), attention_cached(q, k, v, ours, layer, pos, config)
                )
    assert_same(theirs, ours)
    theirs.lib.fa_tq_cache_clear(theirs.cache)
    ours.clear()
    assert_same(theirs, ours)
    steps(range(4), seed=4)
    assert_same(theirs, ours)


@FORMS
def test_one_side_at_a_time_is_the_same_too(bits: tuple[int, int], meta: str, sinks: int, window: int) -> None:
    """The keys of more tokens than there are values: each side has its own newest tokens."""
    theirs = CCache(bits, meta=meta, sinks=sinks, window=window)
    ours = python_cache(bits, meta, sinks, window)
    for pos in range(9):
        for is_key in (True, False) if pos % 3 else (True,):
            with case(pos=pos, is_key=is_key):
                vec = draw(pos + 50 * is_key, HEADS * DIM)
                assert theirs.quantize(1, pos, vec, is_key) == 0
                ours.quantize(1, pos, vec[None], is_key)
    assert_same(theirs, ours)
    q, k, v = vectors(3)
    config = AttentionConfig(GROUP * HEADS, DIM, HEADS, causal=True)
    assert_array_equal(theirs.step(1, 9, q, k, v), attention_cached(q, k, v, ours, 1, 9, config))


@FORMS
def test_chosen_slots_give_the_bits_of_the_python_cache(
    bits: tuple[int, int], meta: str, sinks: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list, a list a head, none, twice the same, and blocks that the last token cuts."""
    monkeypatch.setenv("TQTOOL_ENGINE", "runtime")
    config = AttentionConfig(GROUP * HEADS, DIM, HEADS, causal=True)
    choices = [
        (np.array([0, 3, 4, 9, 13]), 1, None),
        (np.array([[13, 0], [2, -1], [5, 13], [-1, 7]]), 1, None),
        (np.array([[6, 6], [6, 1]]), 1, None),
        (np.array([[0, 1], [3, 3]]), 4, np.array([[0, 4], [1, 5], [2, 6], [3, 7], [12, 12], [13, 13]])),
        (np.array([-1, -1]), 1, None),
    ]
    for number, (choice, block, as_slots) in enumerate(choices):
        with case(number=number, block=block, as_slots=as_slots):
            theirs = CCache(bits, meta=meta, sinks=sinks, window=window)
            ours = python_cache(bits, meta, sinks, window)
            _, k, v = vectors(8, 13)
            ours.write(2, 0, k, v)
            assert theirs.lib.fa_tq_cache_write(theirs.cache, 2, 0, 13, theirs.floats(k), theirs.floats(v)) == 0
            q, k, v = vectors(9)
            ours.write(2, 13, k, v)
            expected = ours.attention(q, 2, 13, config, choice if as_slots is None else as_slots)
            assert_array_equal(theirs.step(2, 13, q, k, v, choice, block), expected, f"choice {number}")


def test_a_long_prompt_in_one_step_is_the_prompt_in_blocks() -> None:
    """150 rows: two whole blocks and a part; bounded scratch; the same as row by row, in a cache without a window."""
    whole, single = CCache(slots=160, layers=1), CCache(slots=160, layers=1)
    q, k, v = vectors(21, 150)
    out = whole.step(0, 0, q, k, v)
    for row in range(150):
        part = np.s_[:, row : row + 1]
        assert_array_equal(out[part], single.step(0, row, q[part], k[part], v[part]), f"{row=}")
    scratch = whole.lib.fa_tq_attention_scratch
    assert scratch(whole.cache, 6, 64) == scratch(whole.cache, 6, 5000)
    assert_array_equal(whole.dequantize(0, 0, 150, True), single.dequantize(0, 0, 150, True))


def test_many_rows_in_a_ring_that_has_come_round_are_single_steps() -> None:
    one, many = CCache(window=3), CCache(window=3)
    _, k, v = vectors(5, SLOTS)
    for cache in (one, many):
        cache.lib.fa_tq_cache_write(cache.cache, 0, 0, SLOTS, cache.floats(k), cache.floats(v))
    q, k, v = vectors(6, 5)
    out = many.step(0, 2, q, k, v)
    for row in range(5):
        part = np.s_[:, row : row + 1]
        assert_array_equal(out[part], one.step(0, 2 + row, q[part], k[part], v[part]), f"{row=}")


@pytest.mark.parametrize("form", [FLOAT16, BFLOAT16])
def test_exact_tokens_in_sixteen_bits_are_the_rounded_vectors(form: int) -> None:
    import ml_dtypes

    cache = CCache(sinks=1, window=3, exact=form)
    plain, full = CCache(), CCache(sinks=1, window=3)
    spread = (2.0 ** np.random.default_rng(1).integers(-30, 10, (9, HEADS, DIM))).astype(np.float32)
    k, v = draw(1, 9, HEADS, DIM) * spread, draw(2, 9, HEADS, DIM)
    for each in (cache, plain, full):
        with case(each=each):
            assert each.lib.fa_tq_cache_write(each.cache, 0, 0, 9, each.floats(k), each.floats(v)) == 0
    rounded = k.astype(np.float16 if form == FLOAT16 else ml_dtypes.bfloat16).astype(np.float32)
    exact = np.isin(np.arange(9), [0, 6, 7, 8])
    assert_array_equal(cache.dequantize(0, 0, 9, True)[0, exact], rounded[exact])
    assert_array_equal(cache.dequantize(0, 0, 9, True)[0, ~exact], plain.dequantize(0, 0, 9, True)[0, ~exact])
    size = cache.lib.fa_tq_cache_bytes
    assert size(cache.cache) - size(plain.cache) == LAYERS * 2 * 4 * HEADS * DIM * 2
    q, k, v = vectors(4)
    near, right = cache.step(0, 9, q, k, v), full.step(0, 9, q, k, v)
    assert 0 < np.linalg.norm(near - right) < 0.01 * np.linalg.norm(right)


def test_a_value_beyond_float16_is_refused_only_where_it_would_be_kept_so() -> None:
    k = np.full((1, 1, HEADS, DIM), 1.0, np.float32)
    k[0, 0, 1, 3] = 65520  # rounds to infinity; 65519 does not
    q, _, v = vectors(1)
    assert CCache(window=2).step(0, 0, q, k, v).shape == q.shape
    half = CCache(window=2, exact=FLOAT16)
    assert half.step(0, 0, q, k, v) == half.lib.FA_TQ_ERR_EXACT
    assert half.step(0, 0, q, v, k) == half.lib.FA_TQ_ERR_EXACT
    assert half.lengths == [0] * LAYERS
    k[0, 0, 1, 3] = 65519
    assert half.step(0, 0, q, k, v).shape == q.shape
    assert half.dequantize(0, 0, 1, True)[0, 0, 1, 3] == 65504


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("way", ["all layers", "each layer"])
def test_an_engine_that_evicts_keeps_the_right_tokens(way: str, sinks: int) -> None:
    """4 layers of 16 slots, 40 tokens, counted by the engine: evicted between tokens, or inside each block."""
    layers, tokens, gone = 4, 40, 5
    sizes = {"layers": layers, "kv_heads": HEADS, "head_dim": DIM, "max_seq_len": SLOTS}
    theirs = CCache((8, 8), sinks=sinks, layers=layers)
    caches: list[KVCache | TurboQuantCache] = [
        TurboQuantCache(KVConfig(8, 8), **sizes, seed=SEED, sink_tokens=sinks),
        *([] if sinks else [KVCache(**sizes)]),
    ]
    held: list[list[int]] = [[] for _ in range(layers)]  # the plain model: which tokens each layer holds
    counter = [0] * layers  # the engine's own
    x = [[draw(100 * token + layer, 1, 1, HEADS, DIM) for token in range(tokens)] for layer in range(layers)]
    for token in range(tokens):
        with case(token=token):
            if way == "all layers" and counter[0] == SLOTS:
                assert theirs.evict(gone) == 0
                for cache in caches:
                    cache.evict(gone)
                counter = [count - gone for count in counter]
                held = [own[:sinks] + own[sinks + gone :] for own in held]
            for layer in range(layers):
                with case(layer=layer):
                    if counter[layer] == SLOTS:
                        assert theirs.evict(gone, layer) == 0
                        for cache in caches:
                            cache.evict(gone, layer)
                        counter[layer] -= gone
                        held[layer] = held[layer][:sinks] + held[layer][sinks + gone :]
                    k = x[layer][token]
                    q = np.zeros((1, 1, HEADS, DIM), np.float32)
                    assert not isinstance(theirs.step(layer, counter[layer], q, k, -k), int)
                    for cache in caches:
                        cache.write(layer, counter[layer], k, -k)
                    counter[layer] += 1
                    held[layer].append(token)
    for layer in range(layers):
        with case(layer=layer):
            assert theirs.lib.fa_tq_cache_layer_len(theirs.cache, layer) == len(held[layer]) == counter[layer]
            right = np.concatenate([x[layer][token] for token in held[layer]], axis=1)
            for cache in caches:
                assert_array_equal(np.abs(cache.keys(layer) - right) < 0.1, True, f"{layer=}")
            assert_array_equal(theirs.dequantize(layer, 0, counter[layer], True), caches[0].keys(layer))
            assert_array_equal(theirs.dequantize(layer, 0, counter[layer], False), caches[0].values(layer))


def test_both_caches_refuse_the_same_calls() -> None:
    theirs = CCache()
    lib, vec = theirs.lib, draw(5, HEADS * DIM)
    for layer, pos in ((LAYERS, 0), (-1, 0), (0, SLOTS), (0, -1)):
        with case(layer=layer, pos=pos):
            assert theirs.quantize(layer, pos, vec, True) == lib.FA_TQ_ERR_POSITION
    vec[3] = np.nan
    assert theirs.quantize(0, 0, vec, True) == lib.FA_TQ_ERR_VALUE
    assert lib.fa_tq_cache_seq_len(theirs.cache) == 0
    assert theirs.evict(1) == theirs.evict(-1) == theirs.evict(1, 0) == theirs.evict(-1, 0) == lib.FA_TQ_ERR_ARGUMENT
    assert theirs.evict(0, LAYERS) == theirs.evict(0, -1) == lib.FA_TQ_ERR_POSITION
    assert lib.fa_tq_cache_layer_len(theirs.cache, LAYERS) == lib.FA_TQ_ERR_POSITION
    assert lib.fa_tq_cache_packed(theirs.cache, -1, True).codes == theirs.ffi.NULL


@pytest.mark.parametrize("bad", ["k", "v"])
@pytest.mark.parametrize("row", [0, 70])
def test_a_step_with_a_bad_vector_changes_nothing(bad: str, row: int) -> None:
    cache = CCache(slots=100, layers=1, sinks=1, window=2)
    cache.step(0, 0, *vectors(1, 3))
    before = [cache.dequantize(0, 0, 100, side).tobytes() for side in (True, False)]
    q, k, v = vectors(2, 71)
    (k if bad == "k" else v)[0, row, HEADS - 1, DIM - 1] = np.inf
    assert cache.step(0, 2, q, k, v) == cache.lib.FA_TQ_ERR_VALUE
    assert [cache.dequantize(0, 0, 100, side).tobytes() for side in (True, False)] == before
    assert cache.lib.fa_tq_cache_layer_len(cache.cache, 0) == 3


def test_what_a_step_refuses() -> None:
    cache, (q, k, v) = CCache(), vectors(1)
    position, argument = cache.lib.FA_TQ_ERR_POSITION, cache.lib.FA_TQ_ERR_ARGUMENT
    assert cache.step(0, SLOTS - 1, *vectors(1, 2)) == position
    assert cache.step(0, 0, q[:, :, :5], k, v) == argument  # 5 query heads on 2
    assert cache.step(0, 0, q, k, v, np.array([1])) == position  # only slot 0 is filled
    assert cache.step(0, 0, q, k, v, np.array([-2])) == position
    assert cache.step(0, 0, q, k, v, np.array([[0, 0], [0, 1]])) == position
    assert cache.step(0, 0, q, k, v, np.array([1]), block=4) == position
    assert cache.step(0, 0, *vectors(1, 2), np.array([0])) == argument  # a choice is one row's
    assert cache.lengths == [0, 0, 0]
    assert not isinstance(cache.step(0, 0, q, k, v, np.array([0]), block=4), int)


@pytest.mark.parametrize(
    "config",
    [
        (0, 1, 1, 0, 0, 0, 0),
        (1, 0, 1, 0, 0, 0, 0),
        (1, 1, 0, 0, 0, 0, 0),
        (1, 1, 4, 3, 0, 0, 0),
        (1, 1, 4, -1, 0, 0, 0),
        (1, 1, 4, 0, 5, 0, 0),
        (1, 1, 4, 0, -1, 0, 0),
        (1, 1, 4, 0, 0, -1, 0),
        (1, 1, 4, 0, 0, 0, 3),
        (2**30, 2**30, 2**30, 0, 0, 0, 0),
    ],
)
def test_a_cache_that_cannot_be_is_not_made(config: tuple[int, ...]) -> None:
    cache = CCache()
    made = cache.lib.fa_tq_cache_new_with(cache.state, cache.ffi.new("fa_tq_cache_config *", config))
    assert made == cache.ffi.NULL
