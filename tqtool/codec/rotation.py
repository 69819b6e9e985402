"""The rotation R = H D / sqrt(d): random signs first, then a Hadamard matrix of order d.

The inverse is D H^T / sqrt(d): transposed Hadamard first, then the signs. H is the Kronecker product of a Paley
matrix of order m (1 for powers of two) and the Walsh-Hadamard matrix of order 2^k: coordinate j = i*2^k + r lies in
run i at place r. Every sum below has a fixed order, since the order decides the rounding: it is part of the format.
"""

from __future__ import annotations

from functools import cache
from math import isqrt, sqrt

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import InputError

MIN_DIM = 16
MAX_DIM = 1024
SMALLEST_PALEY = 12  # order 4 is a Sylvester matrix, 8 too: the first order that adds anything is 12


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first `count` outputs of splitmix64 started at `seed`, shape (count,).

    Source: Steele, Lea and Flood 2014, as fixed in `docs/codec.md`.
    """
    state = (np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(
        np.uint64
    )
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sign_bits(seed: int, dim: int) -> NDArray[np.uint8]:
    """Return the sign bits of D packed LSB-first, shape (ceil(dim/8),); a set bit negates its coordinate."""
    octets = splitmix64(seed, -(-dim // 64)).astype("<u8").view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little")[:dim]
    return np.packbits(bits, bitorder="little")


def signs(seed: int, dim: int) -> NDArray[np.float32]:
    """Return the +-1 diagonal D, shape (dim,): bit j mod 64 of word j div 64 of splitmix64(seed)."""
    bits = np.unpackbits(sign_bits(seed, dim), bitorder="little")[:dim]
    return np.where(bits, np.float32(-1), np.float32(1))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, isqrt(n) + 1))


def _has_paley(order: int) -> bool:
    first = order % 4 == 0 and _is_prime(order - 1)  # q = order - 1 is then 3 mod 4
    q = order // 2 - 1
    return first or (order % 4 == 0 and q % 4 == 1 and _is_prime(q))


@cache
def _order(dim: int) -> int | None:
    if dim & (dim - 1) == 0:
        return 1
    order = dim // (dim & -dim)
    while order <= dim:
        if order >= SMALLEST_PALEY and _has_paley(order):
            return order
        order *= 2
    return None


@cache
def supported_dims() -> tuple[int, ...]:
    """Return every vector length that has a rotation, ascending from 16 to 1024."""
    return tuple(dim for dim in range(MIN_DIM, MAX_DIM + 1) if _order(dim) is not None)


def nearest_dims(dim: int) -> tuple[int, ...]:
    """Return the supported lengths next below and next above `dim`, those that exist."""
    below = [other for other in supported_dims() if other < dim]
    above = [other for other in supported_dims() if other > dim]
    return (*below[-1:], *above[:1])


def hadamard_order(dim: int) -> int:
    """Return m of dim = m * 2^k: 1 for a power of two, else the smallest Paley order that fits.

    Raises `InputError` ("dim"), naming the nearest supported lengths.
    """
    order = _order(dim) if MIN_DIM <= dim <= MAX_DIM else None
    if order is None:
        raise InputError(
            f"vector length {dim}: no Hadamard matrix of that order is built (lengths {MIN_DIM} to {MAX_DIM})",
            code="dim",
            hint="nearest supported: " + ", ".join(map(str, nearest_dims(dim))),
        )
    return order


@cache
def paley(order: int) -> NDArray[np.int8]:
    """Return the Hadamard matrix of a Paley order, entries +-1, shape (order, order), read-only.

    The first kind (q = order - 1 prime) is taken where both kinds give the order. Source: Paley 1933.
    """
    q = order - 1 if _is_prime(order - 1) else order // 2 - 1
    character = np.full(q, -1, np.int8)
    character[np.arange(1, q) ** 2 % q] = 1
    character[0] = 0
    jacobsthal = character[(np.arange(q)[None, :] - np.arange(q)[:, None]) % q]
    core = np.ones((q + 1, q + 1), np.int8)
    core[1:, 1:] = jacobsthal
    if q == order - 1:
        core[1:, 0] = -1
        core[1:, 1:] += np.eye(q, dtype=np.int8)
        matrix = core
    else:
        core[0, 0] = 0
        double = np.array([[1, 1], [1, -1]], np.int8)
        diagonal = np.array([[1, -1], [-1, -1]], np.int8)
        matrix = np.kron(core, double) + np.kron(np.eye(q + 1, dtype=np.int8), diagonal)
    matrix.flags.writeable = False
    return matrix


def hadamard(columns: NDArray[np.float32]) -> None:
    """Apply the unscaled H along axis 0, in place; columns: (dim, n), C-contiguous, one vector a column."""
    order = hadamard_order(len(columns))
    _butterflies(columns, len(columns) // order)
    if order > 1:
        _across_runs(columns, paley(order))


def hadamard_inverse(columns: NDArray[np.float32]) -> None:
    """Apply the unscaled transpose of H along axis 0, in place; columns: (dim, n), C-contiguous."""
    order = hadamard_order(len(columns))
    if order > 1:
        _across_runs(columns, paley(order).T)
    _butterflies(columns, len(columns) // order)


def _butterflies(columns: NDArray[np.float32], run: int) -> None:
    """Walsh-Hadamard transform of every run of `run` coordinates, in place; strides ascend 1, 2, 4, ..."""
    assert columns.flags.c_contiguous  # else reshape copies and the result is lost
    source, target = columns, np.empty_like(columns)
    stride = 1
    while stride < run:
        before = source.reshape(-1, 2, stride, columns.shape[1])
        after = target.reshape(before.shape)
        np.add(before[:, 0], before[:, 1], out=after[:, 0])
        np.subtract(before[:, 0], before[:, 1], out=after[:, 1])
        source, target = target, source
        stride *= 2
    if source is not columns:
        columns[:] = source


def _across_runs(columns: NDArray[np.float32], matrix: NDArray[np.int8]) -> None:
    """Multiply the runs by `matrix`, in place; a row's terms are added in index order, from the first on."""
    assert columns.flags.c_contiguous
    runs = columns.reshape(len(matrix), -1)
    mixed = np.empty_like(runs)
    for row, total in zip(matrix, mixed, strict=True):
        np.multiply(runs[0], np.float32(row[0]), out=total)
        for sign, run in zip(row[1:], runs[1:], strict=True):
            (np.add if sign > 0 else np.subtract)(total, run, out=total)
    runs[:] = mixed


def rotate(rows: NDArray[np.float32], seed: int = 0) -> NDArray[np.float32]:
    """Return H D x / sqrt(d) for each row x: (..., dim) -> (..., dim). `unrotate` inverts it."""
    dim = rows.shape[-1]
    hadamard_order(dim)
    factors = signs(seed, dim).astype(np.float64) * (1 / sqrt(dim))
    columns = _columns(rows * factors)
    hadamard(columns)
    return np.ascontiguousarray(columns.T).reshape(rows.shape)


def unrotate(rows: NDArray[np.float32], seed: int = 0) -> NDArray[np.float32]:
    """Return D H^T y / sqrt(d) for each row y: (..., dim) -> (..., dim). `rotate` inverts it."""
    dim = rows.shape[-1]
    hadamard_order(dim)
    factors = signs(seed, dim).astype(np.float64) * (1 / sqrt(dim))
    columns = _columns(rows)
    hadamard_inverse(columns)
    return (columns.T * factors).astype(np.float32).reshape(rows.shape)


def _columns(rows: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.array(rows.reshape(-1, rows.shape[-1]).T, dtype=np.float32, order="C")  # never a view of the input
