"""Summaries: macro means, worst cases by name, tails and their counts, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tqtool.report.aggregate import clusters, summarize

LAYERS, HEADS = (0, 0, 7, 7), (0, 1, 0, 1)


def values(*means: float, count: int = 200, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [mean + 0.01 * rng.standard_normal(count) for mean in means]


def test_the_mean_is_macro_and_the_worst_is_named_in_the_metrics_direction() -> None:
    heads = values(0.9, 0.8, 0.95, 0.6)
    heads[0] = heads[0][:50]  # fewer queries weigh no less
    cos = summarize("cos", [heads], clusters(LAYERS, HEADS, 100))
    assert_allclose(cos.mean, np.mean([h.mean() for h in heads]), rtol=1e-14)
    assert (cos.worst_head, cos.worst_layer_name) == ("L07.H1", "L07")
    assert_allclose([cos.worst, cos.worst_layer], [heads[3].mean(), (heads[2].mean() + heads[3].mean()) / 2])
    kl = summarize("kl", [heads], clusters(LAYERS, HEADS, 100))
    assert (kl.worst_head, kl.worst_layer_name) == ("L07.H0", "L00")
    assert cos.count == kl.count == 650
    assert (cos.min, cos.max) == (min(map(np.min, heads)), max(map(np.max, heads)))


def test_tails_are_1_percent_from_500_queries_on_and_5_percent_below() -> None:
    where = clusters(LAYERS, HEADS, 10)
    heads = values(0, 0, 0, 0, count=125)
    full = summarize("kl", [heads], where)
    assert full.tail_percent == 1
    assert_allclose([full.low, full.high], np.quantile(np.concatenate(heads), [0.01, 0.99]))
    heads[3] = heads[3][:-1]
    few = summarize("kl", [heads], where)
    assert few.tail_percent == 5
    assert_allclose([few.low, few.high], np.quantile(np.concatenate(heads), [0.05, 0.95]))


def test_the_interval_resamples_heads_not_queries() -> None:
    """Heads that differ, each measured exactly: the spread between heads is all that is uncertain."""
    rng = np.random.default_rng(1)
    means = rng.standard_normal(40)
    heads = [np.full(1000, mean) for mean in means]
    found = summarize("kl", [heads], clusters([0] * 40, list(range(40)), 4000))
    assert found.ci_method == "cluster bootstrap"
    half = 1.96 * means.std() / math.sqrt(40)
    assert_allclose([found.ci_low, found.ci_high], [means.mean() - half, means.mean() + half], atol=0.15 * half)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        heads = [np.full(5, x) for x in rng.standard_normal(30)]
        found = summarize("kl", [heads], clusters([0] * 30, list(range(30)), 400))
        covered += found.ci_low <= 0 <= found.ci_high
    assert 0.87 <= covered / 200 <= 0.99


def test_below_8_clusters_the_interval_is_from_the_queries_and_says_so() -> None:
    heads = values(0.1, 0.1, 0.1, 0.1)
    found = summarize("kl", [heads], clusters(LAYERS, HEADS, 100))
    assert found.ci_method == "per-query SE"
    half = 1.96 * math.sqrt(sum(h.var(ddof=1) / len(h) for h in heads)) / 4
    assert_allclose([found.ci_low, found.ci_high], [found.mean - half, found.mean + half], rtol=1e-12)
    single = summarize("kl", [[np.array([1.0])] * 4], clusters(LAYERS, HEADS, 100))
    assert math.isnan(single.ci_low)
    assert single.ci_method == ""


def test_heads_without_a_value_are_left_out_and_none_leaves_a_reason() -> None:
    where = clusters(LAYERS, HEADS, 100)
    decisive = [np.full(30, 1.0), np.full(30, np.nan), np.r_[np.full(19, 0.0), np.full(11, np.nan)], np.full(30, 0.5)]
    found = summarize("top1_decisive", [decisive], where)
    assert found.mean == 0.75  # the third head has 19 decisive queries, 20 are needed
    nothing = summarize("top1_decisive", [[np.full(30, np.nan)] * 4], where)
    assert math.isnan(nothing.mean)
    assert nothing.reason == "not defined for any query"
    few = summarize("top1_decisive", [[np.full(3, 1.0)] * 4], where)
    assert (few.count, few.reason) == (12, "12 queries are too few")


@pytest.mark.parametrize(("metric", "worse"), [("cos", min), ("kl", max)])
def test_of_several_seeds_the_worst_counts(metric: str, worse: object) -> None:
    where = clusters(LAYERS, HEADS, 100)
    one, other = values(0.5, 0.5, 0.5, 0.5), values(0.6, 0.4, 0.6, 0.6, seed=1)
    singles = [summarize(metric, [seed], where) for seed in (one, other)]
    joint = summarize(metric, [one, other], where)
    assert joint.worst == worse(s.worst for s in singles)  # type: ignore[operator]
    assert joint.worst_head == next(s.worst_head for s in singles if s.worst == joint.worst)
    assert (joint.low, joint.high) == (min(s.low for s in singles), max(s.high for s in singles))
    assert (joint.seed_low, joint.seed_high) == tuple(sorted(s.mean for s in singles))
