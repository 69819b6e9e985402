"""The named synthetic sets are what `docs/metrics.md` says they are."""

from __future__ import annotations

import numpy as np
import pytest
from loops import case
from numpy.testing import assert_allclose

from tqtool.errors import UsageError
from tqtool.validation.synthetic import DIM, HEADS, PURPOSE, QUERIES, TOKENS, synthetic_set


@pytest.mark.parametrize("name", PURPOSE)
def test_a_set_is_the_same_every_time_and_another_seed_is_another_set(name: str) -> None:
    one, again, other = synthetic_set(name), synthetic_set(name), synthetic_set(name, seed=2)
    for field in ("q", "k", "v"):
        with case(field=field):
            assert (getattr(one, field) == getattr(again, field)).all()
            assert (getattr(one, field) != getattr(other, field)).any()
    assert one.k.shape == one.v.shape == (HEADS, TOKENS, DIM)
    assert one.q.shape == (HEADS, QUERIES, DIM)
    assert one.k.dtype == np.float32


def scores(name: str) -> np.ndarray:
    made = synthetic_set(name)
    return np.einsum("hqd,hkd->hqk", made.q, made.k) / np.sqrt(DIM)


def test_the_sets_have_the_stated_moments() -> None:
    gaussian, correlated = synthetic_set("gaussian"), synthetic_set("correlated")
    assert_allclose(scores("gaussian").std(), 1, rtol=0.03)
    assert_allclose(scores("peaky").std(), 4, rtol=0.03)
    for x in (gaussian.k, correlated.k, correlated.v):
        with case(x=x):
            assert_allclose(np.mean(np.sum(x * x, axis=-1)), DIM, rtol=0.03)  # the total energy is unchanged
    mean = correlated.k.mean(axis=1)
    assert_allclose(np.sum(mean * mean, axis=-1), 0.12 * DIM, rtol=0.3)
    offset = synthetic_set("key-bias").k.mean(axis=1)
    assert_allclose(np.linalg.norm(offset, axis=-1), 60, rtol=0.02)
    values = synthetic_set("value-mean").v.mean(axis=1)
    assert_allclose(np.linalg.norm(values, axis=-1), 5 * np.sqrt(DIM), rtol=0.02)
    outlier = synthetic_set("outlier").k.std(axis=(0, 1))
    assert_allclose(outlier[:3] / outlier[3:].mean(), 20, rtol=0.1)


def test_the_sink_draws_half_of_the_attention_and_carries_little() -> None:
    made = synthetic_set("sink")
    weights = np.exp(scores("sink"))
    share = (weights[..., 0] / weights.sum(axis=-1)).mean()
    assert 0.35 < share < 0.65
    assert np.linalg.norm(made.v[:, 0]) < 0.15 * np.linalg.norm(made.v[:, 1])


def test_an_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match="gaussian, correlated"):
        synthetic_set("realistic")
