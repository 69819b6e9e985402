"""Metrics against plain loops, and the laws they obey."""

from __future__ import annotations

import naive_metrics as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose

from tqtool.validation import metrics

QUERIES, KEYS, DIM = 5, 24, 16


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((QUERIES, DIM)), rng.standard_normal((KEYS, DIM)), rng.standard_normal((KEYS, DIM))
    scores = q @ k.T
    return {"q": q, "k": k, "v": v, "s": scores, "t": scores + 0.3 * rng.standard_normal(scores.shape)}


def test_metrics_of_weights_agree_with_plain_loops(data: dict[str, np.ndarray]) -> None:
    s, t = data["s"], data["t"]
    exact, other = metrics.attention_weights(s.copy()), metrics.attention_weights(t.copy())
    ratio = metrics.log_ratio(exact, other)
    top, other_top = metrics.top_keys(exact, 9), metrics.top_keys(other, 9)
    rest, other_rest = metrics.without_first(top, 1, 8), metrics.without_first(other_top, 1, 8)
    seen = np.full(QUERIES, KEYS)
    for i in range(QUERIES):
        with case(i=i):
            p, o = naive.softmax(s[i].tolist()), naive.softmax(t[i].tolist())
            assert_allclose(exact.p[i], p, rtol=1e-13)
            assert_allclose(metrics.kl(exact, ratio)[i], naive.kl(p, o), rtol=1e-11)
            without = metrics.kl_without(exact, other, ratio, 2)[i]
            assert_allclose(without, naive.kl(naive.renormalised(p, 2), naive.renormalised(o, 2)), rtol=1e-10)
            assert_allclose(
                metrics.sigma_a(exact, ratio)[i], naive.sigma_a(p, s[i].tolist(), t[i].tolist()), rtol=1e-11
            )
            assert_allclose(metrics.tv(exact, other)[i], naive.tv(p, o), rtol=1e-11)
            assert_allclose(metrics.n_eff(exact)[i], naive.n_eff(p), rtol=1e-12)
            assert_allclose(metrics.mass_8(exact, top, other_top, seen)[i], naive.mass_8(p, o), rtol=1e-12)
            assert_allclose(metrics.mass_8(exact, rest, other_rest, seen)[i], naive.mass_8(p[1:], o[1:]), rtol=1e-12)
            noise = metrics.score_noise(exact, data["q"], data["k"])[i]
            assert_allclose(noise, naive.score_noise(p, data["q"][i].tolist(), data["k"].tolist()), rtol=1e-12)
            readout = metrics.readout_noise(exact, data["v"], exact.p @ data["v"])[i]
            assert_allclose(readout, naive.readout_noise(p, data["v"].tolist()), rtol=1e-12)


def test_metrics_of_outputs_agree_with_plain_loops(data: dict[str, np.ndarray]) -> None:
    x, y = data["q"], data["q"] + 0.1 * data["k"][:QUERIES]
    for i in range(QUERIES):
        with case(i=i):
            assert_allclose(metrics.cosine(x, y)[i], naive.cosine(x[i].tolist(), y[i].tolist()), rtol=1e-13)
            assert_allclose(metrics.rel_err(x, y)[i], naive.rel_err(x[i].tolist(), y[i].tolist()), rtol=1e-13)
            assert_allclose(metrics.norm_ratio(x, y)[i], naive.norm(y[i].tolist()) / naive.norm(x[i].tolist()))


def test_unseen_keys_count_for_nothing(data: dict[str, np.ndarray]) -> None:
    seen = np.tri(QUERIES, KEYS, KEYS - QUERIES - 3, dtype=bool)
    exact = metrics.attention_weights(data["s"].copy(), seen)
    other = metrics.attention_weights(data["t"].copy(), seen)
    ratio = metrics.log_ratio(exact, other)
    for i in range(QUERIES):
        with case(i=i):
            p, o = (naive.softmax(x[i, seen[i]].tolist()) for x in (data["s"], data["t"]))
            assert (exact.p[i, ~seen[i]] == 0).all()
            assert_allclose(metrics.kl(exact, ratio)[i], naive.kl(p, o), rtol=1e-11)
            assert_allclose(metrics.tv(exact, other)[i], naive.tv(p, o), rtol=1e-11)
            assert_allclose(metrics.n_eff(exact)[i], naive.n_eff(p), rtol=1e-12)


@given(st.integers(0, 10_000), st.floats(-50, 50))
@settings(max_examples=50, deadline=None)
def test_a_constant_in_the_scores_of_a_query_changes_nothing(seed: int, constant: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((1, 20))
    exact, other = metrics.attention_weights(scores.copy()), metrics.attention_weights(scores + constant)
    ratio = metrics.log_ratio(exact, other)
    assert abs(metrics.kl(exact, ratio)[0]) < 1e-12
    assert metrics.sigma_a(exact, ratio)[0] < 1e-12
    assert metrics.tv(exact, other)[0] < 1e-13


@given(st.integers(0, 10_000), st.floats(1e-3, 0.1))
@settings(max_examples=50, deadline=None)
def test_kl_is_half_the_score_variance_for_small_noise(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((1, 200))
    exact = metrics.attention_weights(scores.copy())
    other = metrics.attention_weights(scores + noise * rng.standard_normal(scores.shape))
    ratio = metrics.log_ratio(exact, other)
    assert_allclose(metrics.kl(exact, ratio), metrics.sigma_a(exact, ratio) ** 2 / 2, rtol=0.15)


def test_kl_stays_finite_where_weights_vanish() -> None:
    exact = metrics.attention_weights(np.array([[0.0, -3000.0, 5.0]]))
    other = metrics.attention_weights(np.array([[-3000.0, 0.0, 5.0]]))
    assert np.isfinite(metrics.kl(exact, metrics.log_ratio(exact, other))).all()


def test_top1_counts_only_decisive_queries() -> None:
    scores = np.log(np.array([[0.62, 0.3, 0.08], [0.59, 0.31, 0.1], [0.1, 0.8, 0.1]]))
    exact = metrics.attention_weights(scores.copy())
    other = metrics.attention_weights(scores[:, ::-1].copy())
    found = metrics.top1_decisive(exact, metrics.top_keys(exact, 9), metrics.top_keys(other, 9))
    assert_allclose(found, [0.0, np.nan, 1.0])  # 0.62 >= 2 * 0.3 is decisive, 0.59 < 2 * 0.31 is not


def test_one_key_is_not_decisive_and_few_keys_have_no_top_8() -> None:
    exact = metrics.attention_weights(np.zeros((1, 1)))
    top = metrics.top_keys(exact, 9)
    assert np.isnan(metrics.top1_decisive(exact, top, top)).all()
    flat = metrics.attention_weights(np.zeros((1, 15)))
    top = metrics.top_keys(flat, 9)
    assert np.isnan(metrics.mass_8(flat, top, top, np.array([15]))).all()
    assert metrics.mass_8(flat, top, top, np.array([16]))[0] == 1


def test_zero_vectors_are_left_out() -> None:
    x, y = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 0.0]])
    assert_allclose(metrics.cosine(x, y), [np.nan, 0.0])
    assert_allclose(metrics.rel_err(x, y), [np.nan, 1.0])
    assert_allclose(metrics.norm_ratio(x, y), [np.nan, 0.0])


def test_outlier_channels_are_measured_about_the_mean() -> None:
    rng = np.random.default_rng(3)
    k = rng.standard_normal((4000, 128))
    assert metrics.outlier_share(k + 5) < 0.05
    k[:, :3] *= 20
    assert_allclose(metrics.outlier_share(k), 3 * 400 / (125 + 3 * 400), atol=0.01)
