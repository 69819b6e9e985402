"""The codec against the plain-loop referee, its laws, and its refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_array_equal

from tqtool.codec import blocks, reference
from tqtool.codec.blocks import row_blocks
from tqtool.codec.codec import decode, encode
from tqtool.codec.rotation import unrotate
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.codec.terms import SCALE_RULES
from tqtool.errors import InputError, IntegrityError, UsageError


@pytest.fixture(autouse=True)
def reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests hold the definition itself; test_runtime holds the C side against it."""
    monkeypatch.setenv("TQTOOL_ENGINE", "reference")


def special_vectors(dim: int, spec: CodecSpec) -> np.ndarray:
    """One vector of each class that has broken a codec somewhere."""
    boundaries = spec.boundaries
    on_boundary = unrotate(boundaries.repeat(-(-dim // len(boundaries)))[:dim][None] * np.float32(1), spec.seed)[0]
    one_hot = np.zeros(dim)
    one_hot[dim // 3] = -2.5
    alternating = np.where(np.arange(dim) % 2, -3.0, 3.0)
    rng = np.random.default_rng(dim)
    vectors = [
        np.zeros(dim),
        -np.zeros(dim),
        np.ones(dim),
        one_hot,
        alternating,
        on_boundary,
        rng.standard_normal(dim),
        1e-42 * rng.standard_normal(dim),
        1e-30 * rng.standard_normal(dim),
        1e30 * rng.standard_normal(dim),
        rng.standard_normal(dim) + 40 * one_hot,
    ]
    return np.array(vectors).astype(np.float32)


@pytest.mark.parametrize(
    ("dim", "bits", "law", "rule", "seed"),
    [
        (64, 4, "beta", "match", 0),
        (64, 3, "beta", "norm", 42),
        (64, 1, "sphere", "lsq", 7),
        (80, 2, "gaussian", "unbiased", 3),
        (96, 5, "beta", "match", 2**64 - 1),
        (16, 8, "beta", "lsq", 0),
        (20, 7, "beta", "unbiased", 1),
        (28, 6, "sphere", "match", 9),
        (104, 2, "beta", "unbiased", 0),
    ],
)
def test_encode_and_decode_follow_the_definition_bit_for_bit(
    dim: int, bits: int, law: Any, rule: Any, seed: int
) -> None:
    spec = CodecSpec(dim, bits, law, rule, "range", seed)
    x = special_vectors(dim, spec)
    encoded = encode(x, spec)
    restored = decode(encoded)
    boundaries, centroids = spec.book.tables
    for i, vector in enumerate(x):
        with case(i=i):
            codes, scale, norm = naive.encode(vector, bits, boundaries, centroids, seed=seed, rule=rule)
            assert encoded.codes[i].tobytes() == codes
            assert_array_equal(encoded.meta[i], [scale, norm])
            assert_array_equal(restored[i], naive.decode(codes, scale, dim, bits, centroids, seed=seed))


@given(
    dim=st.sampled_from([16, 64, 80, 96, 128, 576]),
    bits=st.integers(1, 8),
    rule=st.sampled_from(SCALE_RULES),
    lead=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_shapes_are_kept_and_each_vector_stands_alone(
    dim: int, bits: int, rule: Any, lead: tuple[int, ...], seed: int
) -> None:
    spec = CodecSpec(dim, bits, "gaussian", rule)
    x = np.random.default_rng(seed).standard_normal((*lead, dim)).astype(np.float32)
    before = x.copy()
    encoded = encode(x, spec)
    assert_array_equal(x, before)
    restored = decode(encoded)
    assert encoded.shape == restored.shape == x.shape
    assert encoded.nbytes == spec.vector_bytes * (x.size // dim)
    for i in np.ndindex(*lead):
        with case(i=i):
            alone = encode(x[i][None], spec)
            assert_array_equal(alone.codes[0], encoded.codes[i])
            assert_array_equal(decode(alone)[0], restored[i])


@pytest.mark.parametrize("view", ["transposed", "fortran", "strided", "reversed", "broadcast", "big-endian"])
@pytest.mark.parametrize("threads", [1, 2])
def test_strides_byte_order_blocks_and_threads_do_not_change_a_byte(
    view: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(5).standard_normal((3, 40, 2, 64)).astype(np.float32)
    seen = {
        "transposed": lambda: x.transpose(2, 0, 1, 3),
        "fortran": lambda: np.asfortranarray(x),
        "strided": lambda: x[:, ::3, :, :],
        "reversed": lambda: x[::-1, ::-1],
        "broadcast": lambda: np.broadcast_to(x[:, :1], x.shape),
        "big-endian": lambda: x.astype(">f4"),
    }[view]()
    spec = CodecSpec(64, 3)
    expected = encode(np.ascontiguousarray(seen, np.float32), spec, threads=1)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 * 4 * 7)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 64 * 4 * 3)
    actual = encode(seen, spec, threads=threads)
    assert_array_equal(actual.codes, expected.codes)
    assert_array_equal(actual.meta, expected.meta)
    assert_array_equal(decode(actual, threads=threads), decode(expected, threads=1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_equal_their_float32_values(dtype: Any) -> None:
    x = np.random.default_rng(6).standard_normal((50, 96)).astype(dtype)
    spec = CodecSpec(96, 4)
    expected = encode(x.astype(np.float32), spec)
    actual = encode(x, spec)
    assert_array_equal(actual.codes, expected.codes)
    assert_array_equal(actual.meta, expected.meta)


@pytest.mark.parametrize(("meta", "size"), [("range", 8), ("f32", 4), ("bf16", 2)])
def test_metadata_forms_hold_the_same_scale(meta: Any, size: int) -> None:
    x = np.random.default_rng(7).standard_normal((2, 30, 128)).astype(np.float32)
    full = encode(x, CodecSpec(128, 4))
    encoded = encode(x, CodecSpec(128, 4, meta=meta))
    assert encoded.meta.nbytes == 60 * size
    assert_array_equal(encoded.codes, full.codes)
    expected = full.scales.astype(ml_dtypes.bfloat16).astype(np.float32) if meta == "bf16" else full.scales
    assert_array_equal(encoded.scales, expected)
    assert_array_equal(full.meta[..., 1], np.sqrt((x.astype(np.float64) ** 2).sum(-1)).astype(np.float32))


def test_a_bf16_scale_that_underflows_decodes_to_zeros() -> None:
    encoded = encode(np.full((1, 64), 1e-42, np.float32), CodecSpec(64, 4, meta="bf16"))
    assert encoded.scales[0] == 0
    assert_array_equal(decode(encoded), np.zeros((1, 64)))


@given(dim=st.sampled_from([64, 80, 128, 160]), bits=st.integers(2, 8), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_scale_rules_keep_what_they_promise(dim: int, bits: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((8, dim)).astype(np.float32)
    restored = {
        rule: decode(encode(x, CodecSpec(dim, bits, scale_rule=rule))).astype(np.float64) for rule in SCALE_RULES
    }
    wide = x.astype(np.float64)
    square = (wide**2).sum(-1)
    assert np.allclose((restored["match"] ** 2).sum(-1), square, rtol=1e-5)  # the norm
    assert np.allclose((restored["unbiased"] * wide).sum(-1), square, rtol=1e-5)  # the product with the input
    residual = wide - restored["lsq"]
    assert np.all(np.abs((residual * restored["lsq"]).sum(-1)) <= 1e-5 * square)  # least squares: orthogonal
    errors = {rule: ((r - wide) ** 2).sum(-1) for rule, r in restored.items()}
    assert all((errors["lsq"] <= errors[rule] * (1 + 1e-5)).all() for rule in SCALE_RULES)


def test_bits_of_a_seed_matter() -> None:
    x = np.random.default_rng(9).standard_normal((10, 64)).astype(np.float32)
    assert (encode(x, CodecSpec(64, 4, seed=1)).codes != encode(x, CodecSpec(64, 4, seed=2)).codes).any()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((1, 2, 17, 5), np.nan, r"1 NaN; first NaN at \[1, 2, 17, 5\]"),
        ((0, 3, 30, 63), -np.inf, r"1 Inf; first Inf at \[0, 3, 30, 63\]"),
    ],
)
def test_non_finite_values_are_refused_with_their_place(place: Any, value: float, message: str) -> None:
    x = np.random.default_rng(10).standard_normal((2, 4, 32, 64)).astype(np.float32)
    x[place] = value
    with pytest.raises(InputError, match=message) as caught:
        encode(x, CodecSpec(64))
    assert caught.value.code == "non-finite"


def test_norms_beyond_the_limit_are_refused_not_clamped() -> None:
    x = np.ones((2, 4, 64), np.float32)
    x[1, 3] *= 2.0**117  # norm 8 * 2^117 = 2^120 is still allowed
    assert np.isfinite(decode(encode(x, CodecSpec(64, 1, scale_rule="unbiased")))).all()
    x[1, 3] *= np.float32(1.0001)
    with pytest.raises(InputError, match=r"vector \[1, 3\] has norm 1\.3e\+36, the limit is 2\^120") as caught:
        encode(x, CodecSpec(64))
    assert caught.value.code == "norm-range"


def test_a_norm_that_only_rounding_to_float32_takes_beyond_the_limit_is_named() -> None:
    rng = np.random.default_rng(12)
    x = rng.standard_normal((200, 64))
    x *= 2.0**120 * (1 - 1e-10) / np.linalg.norm(x, axis=1, keepdims=True)
    assert (np.linalg.norm(x, axis=1) < 2.0**120).all()
    rounded = np.linalg.norm(x.astype(np.float32).astype(np.float64), axis=1)
    first = int((rounded > 2.0**120).argmax())
    assert first > 0
    with pytest.raises(InputError, match=rf"^vector \[{first}\] has norm 1\.3e\+36, the limit is 2\^120$"):
        encode(x, CodecSpec(64))


def test_float64_beyond_float32_is_refused() -> None:
    x = np.ones((3, 64))
    x[2, 7] = 1e39
    with pytest.raises(InputError, match=r"vector \[2\] has norm 1e\+39, the limit is 2\^120"):
        encode(x, CodecSpec(64))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex64, np.uint16, object])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(InputError, match="is not floating point"):
        encode(np.zeros((2, 64), dtype), CodecSpec(64))


@pytest.mark.parametrize("shape", [(), (63,), (64, 2)])
def test_other_lengths_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"need \(\.\.\., 64\)"):
        encode(np.zeros(shape, np.float32), CodecSpec(64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "0 bits: a code has 1 to 8 bits"),
        ({"bits": 9}, "9 bits"),
        ({"seed": -1}, "seed -1 is not a 64-bit unsigned number"),
        ({"seed": 2**64}, "is not a 64-bit unsigned number"),
        ({"law": "normal"}, "law 'normal' is none of beta, sphere, gaussian"),
        ({"scale_rule": "l2"}, "scale rule 'l2' is none of match, norm, lsq, unbiased"),
        ({"meta": "f16"}, "metadata form 'f16' is none of range, f32, bf16"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CodecSpec(64, **arguments)


@pytest.mark.parametrize("scale", [np.nan, -1.0, np.inf, 1e38])
def test_impossible_scales_are_refused_on_decode(scale: float) -> None:
    spec = CodecSpec(64, 4, meta="f32")
    damaged = Encoded(spec, np.zeros((1, 32), np.uint8), np.array([scale], np.float32))
    with pytest.raises(IntegrityError, match="a scale is negative, not finite or beyond"):
        decode(damaged)


def test_encoded_holds_only_arrays_that_fit_its_spec() -> None:
    with pytest.raises(ValueError, match="codes uint8"):
        Encoded(CodecSpec(64), np.zeros((1, 31), np.uint8), np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="meta float32"):
        Encoded(CodecSpec(64), np.zeros((1, 32), np.uint8), np.zeros((1,), np.float32))


@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda s: (*s, 16)), rows=st.integers(1, 40))
def test_row_blocks_cover_every_vector_once_in_order(shape: tuple[int, ...], rows: int) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    blocks = list(row_blocks(x, rows))
    assert all(len(block) <= rows for _, block in blocks)
    together = np.concatenate([block for _, block in blocks]) if blocks else np.empty((0, 16))
    assert_array_equal(together, x.reshape(-1, 16))
    starts = np.cumsum([0, *(len(block) for _, block in blocks)])[:-1]
    assert [start for start, _ in blocks] == starts.tolist()
