"""Bit packing: code j of a row is bits [j*bits, (j+1)*bits) of it, least significant bit first.

A row is padded with zero bits to whole bytes: `sizes.packed_bytes(n, bits)`. Eight codes always fill `bits` bytes, so
groups of eight are the unit below. Source: specification, Packing, resolved as the dense LSB-first stream.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.terms import MAX_BITS, packed_bytes


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes below 2**bits: (..., n) -> (..., ceil(n*bits/8)).

    A code of 2**bits or more would spill into its neighbour: a `ValueError`.
    """
    assert 1 <= bits <= MAX_BITS
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {codes.max()} does not fit {bits} bits")
    columns = np.ascontiguousarray(np.moveaxis(codes, -1, 0))
    return np.ascontiguousarray(np.moveaxis(pack_columns(columns, bits), 0, -1))


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Return the first `count` codes of each row: (..., ceil(count*bits/8)) -> (..., count)."""
    assert 1 <= bits <= MAX_BITS
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ValueError(f"{packed.shape[-1]} bytes cannot hold {count} codes of {bits} bits")
    columns = np.ascontiguousarray(np.moveaxis(packed, -1, 0))
    return np.ascontiguousarray(np.moveaxis(unpack_columns(columns, bits, count), 0, -1))


def group_sizes(bits: int) -> tuple[int, int]:
    """Return the fewest (codes, bytes) after which the pattern of bits within bytes repeats."""
    common = gcd(8, bits)
    return 8 // common, bits // common


def pack_columns(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """`pack` along axis 0, for blocks whose vectors are columns: (n, ...) -> (ceil(n*bits/8), ...)."""
    group_codes, group_bytes = group_sizes(bits)
    count = len(codes)
    whole = -(-count // group_codes) * group_codes
    if whole != count:
        codes = np.concatenate([codes, np.zeros((whole - count, *codes.shape[1:]), np.uint8)])
    groups = codes.reshape(-1, group_codes, *codes.shape[1:])
    packed = np.zeros((len(groups), group_bytes, *codes.shape[1:]), np.uint8)
    for j in range(group_codes):
        byte, shift = divmod(j * bits, 8)
        packed[:, byte] |= groups[:, j] << np.uint8(shift)
        if shift + bits > 8:
            packed[:, byte + 1] |= groups[:, j] >> np.uint8(8 - shift)
    return packed.reshape(-1, *codes.shape[1:])[: packed_bytes(count, bits)]


def unpack_columns(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """`unpack` along axis 0: (ceil(count*bits/8), ...) -> (count, ...)."""
    group_codes, group_bytes = group_sizes(bits)
    whole = -(-count // group_codes) * group_bytes
    if whole != len(packed):
        packed = np.concatenate([packed, np.zeros((whole - len(packed), *packed.shape[1:]), np.uint8)])
    groups = packed.reshape(-1, group_bytes, *packed.shape[1:])
    codes = np.empty((len(groups), group_codes, *packed.shape[1:]), np.uint8)
    for j in range(group_codes):
        byte, shift = divmod(j * bits, 8)
        np.right_shift(groups[:, byte], np.uint8(shift), out=codes[:, j])
        if shift + bits > 8:
            codes[:, j] |= groups[:, byte + 1] << np.uint8(8 - shift)
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(-1, *packed.shape[1:])[:count]
