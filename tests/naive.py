"""Plain-loop referees: the format's definition once more, one number at a time, written from the text of the design.

Slow on purpose and free of array code, so that a mistake in the vectorised reference cannot hide in them.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

MASK = 2**64 - 1
F32 = np.float32


def splitmix64(seed: int, count: int) -> list[int]:
    words = []
    state = seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(z ^ (z >> 31))
    return words


def signs(seed: int, dim: int) -> list[int]:
    words = splitmix64(seed, (dim + 63) // 64)
    return [-1 if words[j // 64] >> (j % 64) & 1 else 1 for j in range(dim)]


def is_prime(n: int) -> bool:
    return n >= 2 and all(n % p for p in range(2, n))


def paley_order(dim: int) -> int:
    if dim & (dim - 1) == 0:
        return 1
    candidates = []
    for m in range(12, dim + 1):
        power = dim / m
        if dim % m or math.log2(power) != int(math.log2(power)):
            continue
        first = is_prime(m - 1) and (m - 1) % 4 == 3
        second = m % 2 == 0 and is_prime(m // 2 - 1) and (m // 2 - 1) % 4 == 1
        if first or second:
            candidates.append(m)
    return min(candidates)


def character(n: int, q: int) -> int:
    if n % q == 0:
        return 0
    return 1 if any(r * r % q == n % q for r in range(1, q)) else -1


def paley(m: int) -> list[list[int]]:
    if is_prime(m - 1) and (m - 1) % 4 == 3:
        q = m - 1
        return [[1] * m] + [[-1] + [1 if i == j else character(j - i, q) for j in range(1, m)] for i in range(1, m)]
    q = m // 2 - 1
    s = [[0] + [1] * q] + [[1] + [character(j - i, q) for j in range(1, q + 1)] for i in range(1, q + 1)]
    block = {0: [[1, -1], [-1, -1]], 1: [[1, 1], [1, -1]], -1: [[-1, -1], [-1, 1]]}
    return [[block[s[i // 2][j // 2]][i % 2][j % 2] for j in range(m)] for i in range(m)]


def hadamard(y: list[np.float32], *, inverse: bool = False) -> list[np.float32]:
    y = list(y)
    dim = len(y)
    m = paley_order(dim)
    run = dim // m

    def butterflies() -> None:
        for i in range(m):
            stride = 1
            while stride < run:
                for begin in range(i * run, (i + 1) * run, 2 * stride):
                    for j in range(begin, begin + stride):
                        a, b = y[j], y[j + stride]
                        y[j], y[j + stride] = a + b, a - b
                stride *= 2

    def across() -> None:
        matrix = paley(m)
        before = list(y)
        for i in range(m):
            for r in range(run):
                row = [matrix[j][i] if inverse else matrix[i][j] for j in range(m)]
                total = before[r] if row[0] > 0 else -before[r]
                for j in range(1, m):
                    term = before[j * run + r]
                    total = total + term if row[j] > 0 else total - term
                y[i * run + r] = total

    steps = [butterflies] + ([across] if m > 1 else [])
    for step in reversed(steps) if inverse else steps:
        step()
    return y


def pack(codes: list[int], bits: int) -> bytes:
    stream = sum(code << (bits * j) for j, code in enumerate(codes))
    return stream.to_bytes((len(codes) * bits + 7) // 8, "little")


def encode(
    x: np.ndarray, bits: int, boundaries: np.ndarray, centroids: np.ndarray, *, seed: int, rule: str
) -> tuple[bytes, np.float32, np.float32]:
    """One vector -> (packed codes, scale, norm), following the numbered steps of the design."""
    dim = len(x)
    x = [F32(value) for value in x]
    sumsq = 0.0
    for value in x:
        sumsq += float(value) * float(value)
    norm = math.sqrt(sumsq)
    if norm == 0:
        return pack([2 ** (bits - 1)] * dim, bits), F32(0), F32(0)
    inv = 1.0 / (norm * math.sqrt(dim))
    u = [F32(float(value) * inv) * F32(sign) for value, sign in zip(x, signs(seed, dim), strict=True)]
    y = hadamard(u)
    codes = [sum(1 for b in boundaries if b <= value) for value in y]
    energy = Fraction(0)
    product = 0.0
    for value, code in zip(y, codes, strict=True):
        energy += Fraction(float(F32(float(centroids[code]) * float(centroids[code]))))
        product += float(value) * float(centroids[code])
    c = float(energy)
    scale = {
        "match": norm / math.sqrt(c),
        "norm": norm,
        "lsq": norm * product / c,
        "unbiased": norm / product,
    }[rule]
    return pack(codes, bits), F32(scale), F32(norm)


def decode(packed: bytes, scale: np.float32, dim: int, bits: int, centroids: np.ndarray, *, seed: int) -> np.ndarray:
    stream = int.from_bytes(packed, "little")
    y = [F32(centroids[stream >> (bits * j) & (2**bits - 1)]) for j in range(dim)]
    y = hadamard(y, inverse=True)
    factor = float(scale) / math.sqrt(dim)
    return np.array([F32(float(v) * factor) * F32(s) for v, s in zip(y, signs(seed, dim), strict=True)], F32)
