"""Codebooks that were solved beforehand: the common lengths, every width and law, as `codebook.solve` gave them.

The file holds float64 numbers only, so that no solver, and no SciPy, has to be loaded for a table that everybody uses.
`python tests/slow/write_solved.py` writes it; a test holds every book of it against the solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.terms import LAWS, MAX_BITS, Law

DIMS = (64, 72, 80, 96, 112, 128, 144, 160, 192, 256, 512, 576)
FILE = "codebooks.npy"  # in tqtool/data: (DIMS, LAWS, a book of each width from 1 bit on, one after another)


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """What solving a codebook gives, and nothing that its law, length and width say anyway."""

    means: NDArray[np.float64]  # (2**(bits-1),) the levels above zero
    edges: NDArray[np.float64]  # (2**(bits-1) - 1,) the boundaries above zero
    mse: float
    entropy: float
    distortion: float
    residual: float
    lloyd_steps: int
    newton_steps: int

    def packed(self) -> NDArray[np.float64]:
        """Return the solution as one row of numbers, `length(bits)` of them."""
        facts = [self.mse, self.entropy, self.distortion, self.residual, self.lloyd_steps, self.newton_steps]
        return np.concatenate([self.means, self.edges, facts])

    @classmethod
    def unpacked(cls, row: NDArray[np.float64], bits: int) -> Solution:
        """Return the solution that `packed` gave."""
        half = 2 ** (bits - 1)
        mse, entropy, distortion, residual, lloyd, newton = row[2 * half - 1 :].tolist()
        means, edges = row[:half], row[half : 2 * half - 1]
        return cls(means, edges, mse, entropy, distortion, residual, int(lloyd), int(newton))


def length(bits: int) -> int:
    """Return how many numbers a packed solution has."""
    return (1 << bits) + 5


def solved(dim: int, bits: int, law: Law) -> Solution | None:
    """Return the stored solution, None where there is none."""
    if dim not in DIMS:
        return None
    row = _rows()[DIMS.index(dim), LAWS.index(law)]
    start = sum(length(narrower) for narrower in range(1, bits))
    return Solution.unpacked(row[start : start + length(bits)], bits)


@cache
def _rows() -> NDArray[np.float64]:
    with (resources.files("tqtool") / "data" / FILE).open("rb") as file:
        rows: NDArray[np.float64] = np.load(file)
    assert rows.shape == (len(DIMS), len(LAWS), sum(length(bits) for bits in range(1, MAX_BITS + 1)))
    return rows
