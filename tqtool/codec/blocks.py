"""Arrays cut into blocks of vectors: the units of work of the codec."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tqtool.codec.terms import FLOAT32_BYTES
from tqtool.dtypes import AnyArray

BLOCK_BYTES = 4 << 20  # of float32: a unit of work for one thread, and all that is gathered at a time


def block_rows(dim: int) -> int:
    """Return how many vectors make a unit of work."""
    return BLOCK_BYTES // (FLOAT32_BYTES * dim)


def row_blocks(x: AnyArray, rows: int) -> Iterator[tuple[int, AnyArray]]:
    """Yield (start, block) over the vectors of x (..., dim) in C order: blocks (n, dim), n <= rows.

    A block is a view where the strides allow it, else a copy of that block alone.
    """
    if x.ndim <= 2:
        flat = x.reshape(-1, x.shape[-1])
        for start in range(0, len(flat), rows):
            yield start, flat[start : start + rows]
        return
    inner = prod(x.shape[1:-1])
    if inner == 0:
        return
    if inner > rows:
        for i, part in enumerate(x):
            for start, block in row_blocks(part, rows):
                yield i * inner + start, block
        return
    step = rows // inner
    for i in range(0, len(x), step):
        yield i * inner, x[i : i + step].reshape(-1, x.shape[-1])
