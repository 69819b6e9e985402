"""Attention against plain loops, its laws, and what it refuses."""

from typing import Any

import ml_dtypes
import naive_attention as naive
import numpy as np
import pytest
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from tqtool.attention import plain as module
from tqtool.attention.plain import (
    AttentionConfig,
    attention,
    attention_mask,
    causal_mask,
    mix,
    multi_head,
    scores,
    seen_mask,
    self_attention,
    softmax,
)
from tqtool.errors import InputError, TqError, UsageError

Array = NDArray[Any]
FLOAT32 = 2e-6  # relative to the largest output: sums of tens of float32 products


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def qkv(q_len: int, kv_len: int, heads: int, kv_heads: int, batch: int = 2) -> tuple[Array, Array, Array]:
    keys = (batch, kv_len, kv_heads, 16)
    return draw(1, batch, q_len, heads, 16), draw(2, *keys), draw(3, *keys)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 7), (1, 1), (7, 4)])
def test_attention_is_the_plain_loop(kv_heads: int, causal: bool, lengths: tuple[int, int]) -> None:
    q, k, v = qkv(*lengths, 6, kv_heads)
    got = attention(q, k, v, AttentionConfig(6, 16, kv_heads, causal=causal))
    expected = naive.attention(q, k, v, scale=0.25, sees=lambda i, j: not causal or j <= i)
    assert got.dtype == np.float32
    assert_allclose(got, expected, atol=FLOAT32 * np.abs(expected).max())


def test_float64_inputs_are_measured_in_float64() -> None:
    q, k, v = (x.astype(np.float64) for x in qkv(3, 9, 4, 2))
    got = attention(q, k, v, AttentionConfig(4, 16, 2, causal=True))
    assert got.dtype == np.float64
    assert_allclose(got, naive.attention(q, k, v, scale=0.25, sees=lambda i, j: j <= i), atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened_first(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in qkv(3, 5, 2, 2))
    config = AttentionConfig(2, 16)
    wide = attention(*(x.astype(np.float32) for x in (q, k, v)), config)
    assert_array_equal(attention(q, k, v, config), wide)


@pytest.mark.parametrize(("causal", "window"), [(True, 1), (True, 3), (False, 2), (True, 100)])
def test_a_window_hides_keys_that_far_away(causal: bool, window: int) -> None:
    q, k, v = qkv(6, 8, 2, 1)
    got = attention(q, k, v, AttentionConfig(2, 16, 1, causal=causal, window=window))
    expected = naive.attention(q, k, v, scale=0.25, sees=lambda i, j: abs(i - j) < window and (j <= i or not causal))
    assert_allclose(got, expected, atol=FLOAT32 * 5)


def test_softcap_bounds_scores_before_the_mask() -> None:
    q, k, v = qkv(4, 4, 2, 2)
    config = AttentionConfig(2, 16, causal=True, softcap=1.5, scale=2.0)
    expected = naive.attention(q, k, v, scale=2.0, softcap=1.5, sees=lambda i, j: j <= i)
    assert_allclose(attention(q, k, v, config), expected, atol=FLOAT32 * 5)
    finite = scores(q, k, config)
    assert np.abs(finite[np.isfinite(finite)]).max() <= 1.5


@pytest.mark.parametrize("mask_heads", [1, 4])
def test_an_explicit_mask_is_added(mask_heads: int) -> None:
    q, k, v = qkv(3, 5, 4, 2)
    mask = np.where(draw(4, 2, mask_heads, 3, 5) > 0.8, -np.inf, draw(5, 2, mask_heads, 3, 5)).astype(np.float32)
    expected = naive.attention(q, k, v, scale=0.25, mask=mask)
    assert_allclose(attention_mask(q, k, v, mask, AttentionConfig(4, 16, 2)), expected, atol=FLOAT32 * 5)


def test_one_mask_serves_every_batch() -> None:
    q, k, v = qkv(3, 3, 2, 2)
    mask = np.where(np.eye(3, dtype=bool), 0.0, -np.inf).astype(np.float32)[None, None]
    assert_allclose(attention_mask(q, k, v, mask, AttentionConfig(2, 16)), v, atol=1e-7)


def test_the_causal_mask_is_the_causal_rule() -> None:
    q, k, v = qkv(5, 5, 2, 1)
    masked = attention_mask(q, k, v, causal_mask(5), AttentionConfig(2, 16, 1))
    assert_array_equal(masked, attention(q, k, v, AttentionConfig(2, 16, 1, causal=True)))
    assert causal_mask(5).shape == (1, 1, 5, 5)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = qkv(4, 4, 2, 2)
    mask = np.zeros((2, 1, 4, 4), np.float32)
    mask[:, :, 1] = -np.inf
    got = attention_mask(q, k, v, mask, AttentionConfig(2, 16))
    assert_array_equal(got[:, 1], 0)
    assert np.all(got[:, [0, 2, 3]] != 0)
    empty = attention(q, k[:, :0], v[:, :0], AttentionConfig(2, 16))
    assert_array_equal(empty, np.zeros_like(q))


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_scores_of_ten_thousand_are_stable(size: float) -> None:
    q, k, v = np.full((1, 1, 1, 16), size / 4, np.float32), draw(2, 1, 6, 1, 16), draw(3, 1, 6, 1, 16)
    k[..., 1:] = 0
    k[0, :, 0, 0] = [1, 0.9999, 0.5, 0, -0.5, -1]
    expected = naive.attention(q, k, v, scale=4.0)
    got = attention(q, k, v, AttentionConfig(1, 16, scale=4.0))
    assert_allclose(got, expected, atol=1e-3)  # a float32 score of 1e4 is known to 5e-4
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)), AttentionConfig(1, 16, scale=4.0))
    assert_allclose(exact, expected, atol=1e-12)


def test_long_prompts_are_computed_in_blocks_of_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(9, 12, 4, 2)
    mask = draw(6, 2, 1, 9, 12)
    config = AttentionConfig(4, 16, 2, causal=True, window=5)
    whole = attention_mask(q, k, v, mask, config)
    monkeypatch.setattr(module, "SCORE_BLOCK", 2 * 4 * 12 * 2)  # two queries at a time
    assert_allclose(attention_mask(q, k, v, mask, config), whole, atol=1e-6)


def test_attention_is_its_three_steps_and_leaves_inputs_alone() -> None:
    q, k, v = qkv(3, 5, 6, 3)
    before = [x.tobytes() for x in (q, k, v)]
    config = AttentionConfig(6, 16, 3, causal=True)
    raw = scores(q, k, config)
    assert raw.shape == (2, 3, 2, 3, 5)
    weights = softmax(raw)
    assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert_array_equal(mix(weights, v), attention(q, k, v, config))
    assert [x.tobytes() for x in (q, k, v)] == before


def test_views_of_dumps_are_accepted() -> None:
    """Dumps are (heads, tokens, dim); a transposed view is attention's shape."""
    q, k, v = draw(1, 4, 6, 16), draw(2, 2, 6, 16), draw(3, 2, 6, 16)
    views = [x.transpose(1, 0, 2)[None] for x in (q, k, v)]
    config = AttentionConfig(4, 16, 2, causal=True)
    assert_array_equal(attention(*views, config), attention(*(np.ascontiguousarray(x) for x in views), config))


def test_values_that_are_constant_come_back_exactly_grouped() -> None:
    q, k, v = qkv(4, 7, 8, 2, batch=1)
    v[:] = v[:, :1]
    got = attention(q, k, v, AttentionConfig(8, 16, 2))
    for head in range(8):
        with case(head=head):
            assert_allclose(got[0, :, head], np.broadcast_to(v[0, 0, head // 4], (4, 16)), rtol=1e-5)


def test_values_may_be_narrower_than_keys() -> None:
    q, k, _ = qkv(2, 3, 2, 2)
    v = draw(3, 2, 3, 2, 5)
    assert_allclose(attention(q, k, v, AttentionConfig(2, 16)), naive.attention(q, k, v, scale=0.25), atol=FLOAT32 * 5)


def test_multi_head_is_projection_attention_projection() -> None:
    x, embed = draw(1, 2, 5, 24), 24
    wq, wk, wv, wo = draw(2, embed, 64), draw(3, embed, 32), draw(4, embed, 32), draw(5, 64, embed)
    config = AttentionConfig(4, 16, 2, causal=True)
    q = np.array([[[[row @ wq[:, h * 16 + c] for c in range(16)] for h in range(4)] for row in b] for b in x])
    k, v = (
        np.array([[[[row @ w[:, h * 16 + c] for c in range(16)] for h in range(2)] for row in b] for b in x])
        for w in (wk, wv)
    )
    heads = naive.attention(q, k, v, scale=0.25, sees=lambda i, j: j <= i)
    expected = heads.reshape(2, 5, 64) @ wo.astype(np.float64)
    got = multi_head(x, wq, wk, wv, wo, config)
    assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
    fused = self_attention(x, np.concatenate([wq, wk, wv], axis=1), wo, config)
    assert_allclose(fused, got, atol=1e-5 * np.abs(expected).max())


def test_visible_counts_what_each_query_sees() -> None:
    assert_array_equal(seen_mask(3, 5, causal=True).sum(-1), [3, 4, 5])
    assert_array_equal(seen_mask(3, 5, causal=True, start=0).sum(-1), [1, 2, 3])
    assert_array_equal(seen_mask(3, 5, causal=True, window=2).sum(-1), [2, 2, 2])
    assert seen_mask(3, 5, causal=False).all()


def test_the_configuration_prints_as_one_line() -> None:
    text = str(AttentionConfig(9, 64, 3, causal=True, window=128, softcap=50))
    assert text == "9 heads of 64 over 3 key-value heads, causal, scale 0.125, window 128, soft-cap 50"
    assert str(AttentionConfig(8, 64)) == "8 heads of 64 over 8 key-value heads, not causal, scale 0.125"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout is 0.1, only 0 is possible in inference"),
        ({"heads": 0}, "heads is 0, at least 1 is needed"),
        ({"window": 0}, "window is 0, at least 1 is needed"),
        ({"scale": 0.0}, "scale is 0.0, a positive number is needed"),
        ({"scale": float("nan")}, "scale is nan, a positive number is needed"),
        ({"softcap": -1.0}, "softcap is -1.0, a positive number is needed"),
        ({"heads": 12, "kv_heads": 5}, "12 query heads cannot share 5 key heads"),
    ],
)
def test_configurations_no_layer_can_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TqError) as caught:
        AttentionConfig(**{"heads": 8, "head_dim": 16, **options})
    assert str(caught.value) == message
    assert caught.value.code == ("gqa" if "share" in message else "usage")
    assert isinstance(caught.value, InputError if "share" in message else UsageError)


CONFIG = AttentionConfig(4, 16, 2)
GOOD = {"q": draw(1, 2, 3, 4, 16), "k": draw(2, 2, 5, 2, 16), "v": draw(3, 2, 5, 2, 16)}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"q": draw(1, 3, 4, 16)}, "shape", "q is 3-D, need (batch, seq, heads, head_dim)"),
        ({"q": draw(1, 2, 3, 5, 16)}, "shape-mismatch", "q has 5 heads, the configuration 4"),
        ({"k": draw(1, 2, 5, 4, 16)}, "shape-mismatch", "k has 4 heads, the configuration 2"),
        ({"q": GOOD["q"].astype(np.int32)}, "dtype", "q: dtype int32 is not floating point"),
        ({"v": draw(1, 2, 4, 2, 16)}, "shape-mismatch", "k is (2, 5, 2, 16), v is (2, 4, 2, 16)"),
        ({"q": draw(1, 1, 3, 4, 16)}, "shape-mismatch", "the batches differ"),
        ({"k": draw(1, 2, 5, 2, 8)}, "shape-mismatch", "the configuration's head_dim is 16"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Array], code: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        attention(**{**GOOD, **change}, config=CONFIG)
    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "code", "message"),
    [
        (np.zeros((3, 5), np.float32), "shape-mismatch", "mask is (3, 5), need (2, 1, 3, 5)"),
        (np.zeros((2, 2, 3, 5), np.float32), "shape-mismatch", "mask is (2, 2, 3, 5), need (2, 1, 3, 5)"),
        (np.zeros((2, 1, 5, 3), np.float32), "shape-mismatch", "mask is (2, 1, 5, 3), need (2, 1, 3, 5)"),
        (np.ones((2, 1, 3, 5), bool), "dtype", "mask: dtype bool, an additive mask is needed"),
        (np.full((2, 1, 3, 5), np.nan), "non-finite", "mask: holds NaN or +inf, which leave no softmax"),
        (np.full((2, 1, 3, 5), np.inf), "non-finite", "mask: holds NaN or +inf, which leave no softmax"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Array, code: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        attention_mask(**GOOD, mask=mask, config=CONFIG)
    assert (caught.value.code, str(caught.value)) == (code, message)


def test_projections_that_do_not_fit_are_refused() -> None:
    x, w, wo = draw(1, 1, 3, 8), draw(2, 8, 64), draw(3, 64, 8)
    narrow = draw(4, 8, 32)
    with pytest.raises(InputError, match=r"wk is \(8, 64\), need \(8, 32\)"):
        multi_head(x, w, w, narrow, wo, CONFIG)
    with pytest.raises(InputError, match=r"wo is \(32, 8\), need \(64, embed\)"):
        multi_head(x, w, narrow, narrow, wo[:32], CONFIG)
    with pytest.raises(InputError, match=r"wqkv is \(8, 64\), need \(embed, 128\)"):
        self_attention(x, w, wo, CONFIG)
    with pytest.raises(InputError, match="x is 2-D"):
        multi_head(x[0], w, narrow, narrow, wo, CONFIG)
