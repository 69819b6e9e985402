"""The rotation: its generator, its matrices, its order of operations."""

from __future__ import annotations

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tqtool.codec.rotation import (
    hadamard,
    hadamard_inverse,
    hadamard_order,
    paley,
    rotate,
    sign_bits,
    signs,
    splitmix64,
    supported_dims,
    unrotate,
)
from tqtool.errors import InputError


def test_splitmix64_gives_the_published_words() -> None:
    assert [f"{int(w):016x}" for w in splitmix64(0, 3)] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]
    assert [f"{int(w):016x}" for w in splitmix64(42, 2)] == ["bdd732262feb6e95", "28efe333b266f103"]


@given(seed=st.integers(0, 2**64 - 1), dim=st.sampled_from(supported_dims()))
def test_signs_are_the_bits_of_the_words(seed: int, dim: int) -> None:
    assert signs(seed, dim).tolist() == naive.signs(seed, dim)


def test_sign_bits_hold_one_bit_a_coordinate_and_zero_padding() -> None:
    bits = sign_bits(0, 20)
    assert bits.tobytes() == bytes.fromhex("afcd0d")  # 20 bits of e220a8397b1dcdaf, the last four bits cleared


def test_orders_are_those_of_the_design() -> None:
    expected = {64: 1, 96: 12, 80: 20, 160: 20, 112: 28, 72: 36, 144: 36, 576: 36, 104: 104, 60: 60, 192: 12, 200: 200}
    assert {dim: hadamard_order(dim) for dim in expected} == expected


def test_every_supported_dim_has_the_smallest_order() -> None:
    assert [hadamard_order(dim) for dim in supported_dims()] == [naive.paley_order(dim) for dim in supported_dims()]


def test_multiples_of_eight_without_an_order_are_the_known_ones() -> None:
    missing = [dim for dim in range(16, 577, 8) if dim not in supported_dims()]
    assert missing == [184, 232, 344, 376, 472, 520, 536]


@pytest.mark.parametrize("order", sorted({hadamard_order(dim) for dim in supported_dims()} - {1}))
def test_paley_matrices_are_hadamard(order: int) -> None:
    matrix = paley(order).astype(np.float64)  # integers below 2^53: BLAS is exact on them
    assert set(np.unique(matrix)) == {-1, 1}
    assert_array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize("order", [12, 20, 28, 36, 60])
def test_paley_matrices_follow_the_construction(order: int) -> None:
    assert paley(order).tolist() == naive.paley(order)


# Every Paley matrix is proven above; the product with Walsh is one loop, so the largest orders (a million NumPy calls
# a transform) need no proof of their own beyond three.
@pytest.mark.parametrize("dim", [d for d in supported_dims() if hadamard_order(d) <= 200] + [908, 1000, 1020])
def test_hadamard_is_paley_times_walsh_and_exactly_orthogonal(dim: int) -> None:
    order = hadamard_order(dim)
    walsh = np.ones((1, 1))
    while len(walsh) < dim // order:
        walsh = np.block([[walsh, walsh], [walsh, -walsh]])
    x = np.random.default_rng(dim).choice([-1, 1], (dim, 3)).astype(np.float32)  # all sums below 2^24: exact
    paley_part = paley(order) if order > 1 else np.ones((1, 1))
    expected = np.einsum("ij,rs,jsn->irn", paley_part, walsh, x.reshape(order, -1, 3), optimize=True)
    turned = x.copy()
    hadamard(turned)
    assert_array_equal(turned, expected.reshape(dim, 3))
    hadamard_inverse(turned)
    assert_array_equal(turned, dim * x)


@pytest.mark.parametrize("dim", [16, 20, 28, 64, 72, 80, 96, 104, 112, 160])
@pytest.mark.parametrize("inverse", [False, True])
def test_hadamard_rounds_in_the_published_order(dim: int, inverse: bool) -> None:
    x = np.random.default_rng(dim).standard_normal((dim, 3)).astype(np.float32)
    expected = np.array([naive.hadamard(list(column), inverse=inverse) for column in x.T]).T
    (hadamard_inverse if inverse else hadamard)(x)
    assert_array_equal(x, expected)


@given(dim=st.sampled_from([16, 64, 80, 96, 112, 128, 160, 576]), seed=st.integers(0, 2**64 - 1))
def test_unrotate_inverts_rotate_and_lengths_are_kept(dim: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, dim)).astype(np.float32)
    turned = rotate(x, seed)
    assert np.allclose(unrotate(turned, seed), x, atol=2e-6 * np.abs(x).max())
    assert np.allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rotation_is_not_its_own_inverse() -> None:
    x = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)
    assert np.linalg.norm(rotate(rotate(x)) - x) > np.linalg.norm(x)


def test_a_constant_vector_does_not_collapse_into_one_coordinate() -> None:
    turned = rotate(np.ones((1, 128), np.float32))  # signs behind the Hadamard would give a one-hot
    assert np.abs(turned).max() < 0.5 * np.sqrt(128)


def test_rotate_keeps_the_leading_shape() -> None:
    x = np.random.default_rng(2).standard_normal((2, 3, 5, 64)).astype(np.float32)
    assert_array_equal(rotate(x)[1, 2, 4], rotate(x[1, 2, 4][None])[0])
    assert unrotate(x).shape == x.shape


@pytest.mark.parametrize(
    ("dim", "nearest"), [(90, "88, 96"), (184, "180, 192"), (15, "16"), (1, "16"), (0, "16"), (1025, "1024")]
)
def test_other_lengths_are_refused_with_the_nearest(dim: int, nearest: str) -> None:
    with pytest.raises(InputError, match=f"vector length {dim}: no Hadamard matrix") as caught:
        hadamard_order(dim)
    assert caught.value.code == "dim"
    assert caught.value.hint == f"nearest supported: {nearest}"


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (1, 1, 64)])
def test_inputs_are_never_changed(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    before = x.copy()
    rotate(x)
    unrotate(x)
    assert_array_equal(x, before)
