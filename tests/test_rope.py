"""Rotary embedding against plain loops, its laws, and what it refuses."""

import math

import naive_attention as naive
import numpy as np
import pytest
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from tqtool.attention.rope import Pairing, rope, rope_freqs
from tqtool.errors import InputError, UsageError

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("start_pos", "theta"), [(0, 10000.0), (17, 10000.0), (5, 500000.0)])
def test_rope_is_the_plain_loop(pairing: Pairing, start_pos: int, theta: float) -> None:
    q, k = draw(1, 2, 4, 3, 16), draw(2, 2, 4, 1, 16)
    before = q.tobytes()
    got = rope(q, k, start_pos, pairing=pairing, theta=theta)
    for side, turned, x in zip("qk", got, (q, k), strict=True):
        with case(side=side):
            expected = naive.rope(x, start_pos=start_pos, theta=theta, pairing=pairing)
            assert turned.dtype == np.float32
            assert_allclose(turned, expected, atol=1e-6)
    assert q.tobytes() == before


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_depend_on_the_distance_alone(pairing: Pairing) -> None:
    q, k = draw(1, 1, 1, 1, 64).astype(np.float64), draw(2, 1, 1, 1, 64).astype(np.float64)

    def score(query_pos: int, key_pos: int) -> float:
        turned_q, _ = rope(q, q, query_pos, pairing=pairing)
        turned_k, _ = rope(k, k, key_pos, pairing=pairing)
        return float(np.sum(turned_q * turned_k))

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-10)
    assert score(0, 0) == pytest.approx(float(np.sum(q * k)), abs=1e-12)


def test_the_pairings_are_one_permutation_apart() -> None:
    x = draw(3, 1, 6, 2, 32)
    order = np.concatenate([np.arange(0, 32, 2), np.arange(1, 32, 2)])
    interleaved, _ = rope(x, x, 3, pairing="interleaved")
    half, _ = rope(x[..., order], x, 3, pairing="half")
    assert_array_equal(interleaved[..., order], half)


def test_rope_keeps_lengths_and_position_zero() -> None:
    x = draw(4, 1, 5, 2, 16)
    turned, _ = rope(x, x)
    assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    assert_array_equal(turned[:, 0], x[:, 0])


def test_precomputed_frequencies_change_nothing() -> None:
    q, k = draw(5, 1, 3, 2, 16), draw(6, 1, 3, 2, 16)
    freqs = rope_freqs(20, 16)
    assert freqs.shape == (2, 20, 8)
    assert freqs[0, 3, 1] == pytest.approx(math.cos(3 * 10000 ** (-2 / 16)), abs=1e-15)
    assert freqs[1, 3, 1] == pytest.approx(math.sin(3 * 10000 ** (-2 / 16)), abs=1e-15)
    for side, with_freqs, without in zip("qk", rope(q, k, 11, freqs=freqs), rope(q, k, 11), strict=True):
        with case(side=side):
            assert_array_equal(with_freqs, without)


def test_what_rope_refuses() -> None:
    x = draw(7, 1, 3, 2, 16)
    with pytest.raises(UsageError, match="position 20 is beyond the 20 of freqs"):
        rope(x, x, 18, freqs=rope_freqs(20, 16))
    with pytest.raises(UsageError, match="start_pos is -1"):
        rope(x, x, -1)
    with pytest.raises(UsageError, match="pairing 'neox' is none of half, interleaved"):
        rope(x, x, pairing="neox")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="theta is 0"):
        rope_freqs(4, 16, theta=0)
    with pytest.raises(InputError, match="head_dim is 15, rotary pairs need an even one"):
        rope_freqs(4, 15)
    with pytest.raises(InputError, match="q is 3-D"):
        rope(x[0], x)
    with pytest.raises(InputError, match="head_dim differs"):
        rope(x, x[..., :8])
    with pytest.raises(InputError, match=r"freqs is \(2, 9, 4\), need \(2, positions, 8\)"):
        rope(x, x, freqs=rope_freqs(9, 8))
