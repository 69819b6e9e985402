"""Solves every book there is, and solves some again in thirty digits (needs mpmath).

python tests/slow/codebooks.py      (about two minutes)

Prints the worst residual by law and width, then how many published float32 values are not the exact ones rounded.
"""

from __future__ import annotations

from itertools import pairwise

import mpmath as mp
import numpy as np

from tqtool.codec.codebook import Codebook, lloyd_max
from tqtool.codec.rotation import MAX_DIM, MIN_DIM
from tqtool.codec.terms import LAWS

mp.mp.dps = 30
SAMPLE = [(dim, bits) for bits in (2, 3, 4) for dim in (64, 96, 128, 160, 576)] + [
    (d, b) for b in (5, 6) for d in (64, 128)
]


def sweep() -> None:
    for law in LAWS:
        for bits in range(1, 9):
            books = [lloyd_max(dim, bits, law) for dim in range(MIN_DIM, MAX_DIM + 1)]
            residual, newton = max(book.residual for book in books), max(book.newton_steps for book in books)
            print(
                f"{law:9}{bits} bits: {len(books)} books, worst residual {residual:.1e} sigma, Newton at most {newton}"
            )


def exact(book: Codebook) -> tuple[list[mp.mpf], list[mp.mpf]]:
    """(boundaries, centroids) of the positive half of a `beta` or `sphere` book, by Newton's method."""
    a = mp.mpf(book.dim if book.law == "beta" else book.dim - 1) / 2
    peak = 1 / mp.beta(a, mp.mpf(1) / 2)
    b = [mp.mpf(float(t)) for t in book.boundaries[2 ** (book.bits - 1) :]]
    for _ in range(9):
        edges = [mp.mpf(0), *b, mp.mpf(1)]
        mass = [peak * mp.quad(lambda t: (1 - t * t) ** (a - 1), cell) for cell in pairwise(edges)]
        first = [peak * ((1 - s * s) ** a - (1 - t * t) ** a) / (2 * a) for s, t in pairwise(edges)]
        c = [m / p for m, p in zip(first, mass, strict=True)]
        residual = mp.matrix([t - (lo + hi) / 2 for t, (lo, hi) in zip(b, pairwise(c), strict=True)])
        if mp.norm(residual, mp.inf) < mp.mpf(10) ** -24:
            return b, c
        jacobian = mp.matrix(len(b), len(b))
        for i, t in enumerate(b):
            f = peak * (1 - t * t) ** (a - 1) / 2
            below, above = f * (t - c[i]) / mass[i], f * (c[i + 1] - t) / mass[i + 1]
            jacobian[i, i] += 1 - below - above
            if i + 1 < len(b):
                jacobian[i + 1, i] -= above
            if i:
                jacobian[i - 1, i] -= below
        step = mp.lu_solve(jacobian, residual)
        b = [t - step[i] for i, t in enumerate(b)]
    raise RuntimeError("no convergence")


def nearest(value: mp.mpf) -> np.float32:
    """Round once: a double in between would round twice."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-2)), near, np.nextafter(near, np.float32(2))]
    return min(around, key=lambda x: abs(mp.mpf(float(x)) - value))


def compare() -> None:
    for law in ("beta", "sphere"):
        for dim, bits in SAMPLE:
            book = lloyd_max(dim, bits, law)  # type: ignore[arg-type]
            half = 2 ** (bits - 1)
            b, c = exact(book)
            parts = (
                (book.tables[0][half:], b),
                (book.tables[1][half:], c),
                (book.unit_tables[0][half:], [(1 + t) / 2 for t in b]),
                (book.unit_tables[1][half:], [(1 + t) / 2 for t in c]),
            )
            wrong = sum(x != nearest(y) for table, values in parts for x, y in zip(table, values, strict=True))
            off = max(abs(mp.mpf(float(x)) - y) for x, y in zip(book.centroids[half:], c, strict=True))
            print(f"{law} d = {dim}, {bits} bits: {wrong} float32 values differ; centroids off by {mp.nstr(off, 2)}")


if __name__ == "__main__":
    sweep()
    compare()
