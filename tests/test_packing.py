"""The bit stream: golden bytes, a big-integer referee, and exact inverses."""

from __future__ import annotations

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from loops import case
from numpy.testing import assert_array_equal

from tqtool.codec.packing import pack, unpack
from tqtool.codec.terms import packed_bytes


@pytest.mark.parametrize(
    ("codes", "bits", "expected"),
    [
        ([0, 1, 2, 3], 2, "e4"),
        (range(8), 3, "88c6fa"),
        ([1, 2], 4, "21"),
        ([1, 2, 3, 4, 5, 6, 7, 0], 3, "d1581f"),
        ([255, 0, 1], 8, "ff0001"),
        ([1, 0, 0, 0, 0, 0, 0, 0, 1], 1, "0101"),
        ([31, 0, 31], 5, "1f7c"),
        ([127, 1], 7, "ff00"),
    ],
)
def test_pack_keeps_the_published_bytes(codes: list[int], bits: int, expected: str) -> None:
    assert pack(np.array(codes, np.uint8), bits).tobytes() == bytes.fromhex(expected)


@given(bits=st.integers(1, 8), count=st.integers(1, 70), data=st.data())
def test_pack_is_one_little_endian_number_a_row_and_unpack_inverts_it(
    bits: int, count: int, data: st.DataObject
) -> None:
    codes = data.draw(arrays(np.uint8, (2, 3, count), elements=st.integers(0, 2**bits - 1)))
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, packed_bytes(count, bits))
    for row, octets in zip(codes.reshape(-1, count), packed.reshape(6, -1), strict=True):
        with case(row=row, octets=octets):
            assert octets.tobytes() == naive.pack(row.tolist(), bits)
    assert_array_equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_level_survives_in_every_place(bits: int) -> None:
    codes = np.array([np.roll(np.arange(64) % 2**bits, shift) for shift in range(2**bits)], np.uint8)
    assert_array_equal(unpack(pack(codes, bits), bits, 64), codes)


def test_a_code_too_large_for_its_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="code 4 does not fit 2 bits"):
        pack(np.array([0, 4], np.uint8), 2)


def test_unpack_refuses_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="3 bytes cannot hold 9 codes of 3 bits"):
        unpack(np.zeros(3, np.uint8), 3, 9)
