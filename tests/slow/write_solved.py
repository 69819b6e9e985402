"""Solve the common codebooks and write them to tqtool/data, where `codec.solved` reads them.

python tests/slow/write_solved.py        after a change of the solver; a test compares the file with the solver
"""

from pathlib import Path

import numpy as np

import tqtool
from tqtool.codec.codebook import solve
from tqtool.codec.solved import DIMS, FILE
from tqtool.codec.terms import LAWS, MAX_BITS


def main() -> None:
    """Write the file."""
    rows = [
        [np.concatenate([solve(dim, bits, law).packed() for bits in range(1, MAX_BITS + 1)]) for law in LAWS]
        for dim in DIMS
    ]
    np.save(Path(tqtool.__file__).parent / "data" / FILE, np.array(rows))


if __name__ == "__main__":
    main()
