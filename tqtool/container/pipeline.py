"""Arrays to codes and metadata, in blocks that are read, encoded, measured and written each on its own.

A block is a box of vectors; it goes to its place by position, so blocks may finish in any order and the bytes do not
depend on how many threads there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.codec import decode, encode_if_possible, expected_error
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.dtypes import AnyArray
from tqtool.dumps.arrays import BLOCK_BYTES, ArraySource, Box, Store
from tqtool.health import quiet, refusal_of

Stats = Literal["sample", "all", "none"]
SAMPLE = 1 << 14  # vectors that `sample` measures at most, and that the 1 % quantile comes from
HASHED_BYTES = 64 << 20  # `sample` hashes sources up to this size
MEASURED_AT_ONCE = 1024  # vectors: 1 MiB of float64 at 128 coordinates, which the second-level cache holds
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples are even over any period of the data
MIN_BLOCK_BYTES = 1 << 20  # a smaller block costs more in calls than it gains
BLOCKS = 8  # an array has at least so many, unless they became too small

Cosines = NDArray[np.float64]
NO_COSINES: Cosines = np.empty(0)


@dataclass(frozen=True, slots=True)
class Quality:
    """How far the restored vectors are from the source's."""

    vectors: int
    zero_vectors: int  # restored exactly; they have no cosine
    replaced: int  # values that were not finite and were set to 0
    measured: int  # vectors, of which `error` and the cosines are; 0: not measured
    error: float  # relative squared error
    expected: float  # by theory, for this width and scale rule
    cos_mean: float
    cos_p1: float
    cos_min: float

    @property
    def rel_error(self) -> float:
        """Relative error, the root of the squared one."""
        return sqrt(self.error)

    @property
    def ratio(self) -> float:
        """The squared error over the one that theory expects."""
        return self.error / self.expected


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What a block adds to its array's total."""

    values: AnyArray | None  # for the source's hash, where blocks lie in the file's order
    nbytes: int
    vectors: int
    zero_vectors: int
    replaced: int
    error: float  # squared, summed
    energy: float  # of the source, summed
    cosines: Cosines  # of the measured vectors that are not zero
    measured: int
    sampled: Cosines  # those of the sample


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One array's way into the container."""

    source: ArraySource
    spec: CodecSpec
    parts: Mapping[str, Store]  # by the names of `CodecSpec.parts`
    stats: Stats
    nan_to_zero: bool

    @property
    def hashed(self) -> bool:
        """Whether the source's hash is recorded: hashing costs as much as encoding, and runs on one core only."""
        return self.stats == "all" or (self.stats == "sample" and self.source.nbytes <= HASHED_BYTES)

    def boxes(self) -> Iterator[Box]:
        """Yield the array's blocks: small enough that a small array, too, has some for every core."""
        whole = 4 * self.source.count * self.source.dim
        yield from self.source.boxes(min(BLOCK_BYTES, max(MIN_BLOCK_BYTES, whole // BLOCKS)))

    def run(self, box: Box) -> Block:
        """Read, encode, write and measure one block. Raises `InputError` with the place in the whole array."""
        values = self.source.box((*box, range(self.source.dim)))
        clean, replaced = _without_nan(values) if self.nan_to_zero else (values, 0)
        encoded = encode_if_possible(clean, self.spec, threads=1)
        if encoded is None:
            raise refusal_of(self.source, nan_to_zero=self.nan_to_zero)
        for name, part in self.spec.parts.items():
            self.parts[name].write((*box, *map(range, part.shape)), encoded.arrays[name])
        flat = clean.reshape(-1, self.spec.dim)
        kept = values if self.hashed and self.source.in_file_order else None
        zero = int(np.count_nonzero(encoded.scales == 0))
        sums = self._measure(box, flat, encoded) if self.stats != "none" else (0.0, 0.0, NO_COSINES, 0, NO_COSINES)
        return Block(kept, values.nbytes, len(flat), zero, replaced, *sums)

    def _measure(self, box: Box, rows: AnyArray, encoded: Encoded) -> tuple[float, float, Cosines, int, Cosines]:
        """Return error, energy, cosines, the number of vectors measured, and the cosines of the sample."""
        error = energy = 0.0
        cosines, in_sample = [np.empty(0)], [np.empty(0)]
        sampled = _in_sample(_positions(box, self.source.shape[:-1]), self.source.count)
        chosen = np.arange(len(rows)) if self.stats == "all" else np.flatnonzero(sampled)
        vectors = encoded.reshape(-1)
        for start in range(0, len(chosen), MEASURED_AT_ONCE):
            part = chosen[start : start + MEASURED_AT_ONCE]
            x = rows[part].astype(np.float64)
            y = decode(vectors[part], threads=1).astype(np.float64)
            squares = np.einsum("nd,nd->n", x, x)
            lengths = np.sqrt(squares * np.einsum("nd,nd->n", y, y))
            positive = lengths > 0
            cosine = np.einsum("nd,nd->n", x, y)[positive] / lengths[positive]
            y -= x
            error += float(np.einsum("nd,nd->", y, y))
            energy += float(squares.sum())
            cosines.append(cosine)
            in_sample.append(cosine[sampled[part][positive]])
        return error, energy, np.concatenate(cosines), len(chosen), np.concatenate(in_sample)


_expected = cache(expected_error)


class Total:
    """The sums over an array's blocks, added in their order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._digest = hashlib.sha256()
        self._vectors = self._zero_vectors = self._replaced = self._measured = self._cosines = 0
        self._error = self._energy = self._cos_sum = 0.0
        self._cos_min = 1.0
        self._sampled = [NO_COSINES]

    def add(self, block: Block) -> None:
        """Add the next block."""
        if block.values is not None:
            self._digest.update(np.ascontiguousarray(block.values).view(np.uint8).data)
        self._vectors += block.vectors
        self._zero_vectors += block.zero_vectors
        self._replaced += block.replaced
        self._measured += block.measured
        self._error += block.error
        self._energy += block.energy
        self._cosines += len(block.cosines)
        self._cos_sum += float(block.cosines.sum())
        self._cos_min = min(self._cos_min, float(block.cosines.min(initial=1.0)))
        self._sampled.append(block.sampled)

    def sha256(self) -> str | None:
        """Return the hash of the source's bytes as they lie in the file, None if it is not recorded."""
        if not self._pipeline.hashed:
            return None
        if not self._pipeline.source.in_file_order:
            for piece in self._pipeline.source.stored_pieces():
                self._digest.update(piece)
        return self._digest.hexdigest()

    def quality(self) -> Quality:
        """Return the result; nothing to measure counts as exact."""
        sampled = np.concatenate(self._sampled)
        return Quality(
            self._vectors,
            self._zero_vectors,
            self._replaced,
            self._measured,
            self._error / self._energy if self._energy else 0.0,
            _expected(self._pipeline.spec),
            self._cos_sum / self._cosines if self._cosines else 1.0,
            float(np.quantile(sampled, 0.01)) if len(sampled) else 1.0,
            self._cos_min,
        )


@quiet
def _without_nan(values: AnyArray) -> tuple[AnyArray, int]:
    """Return the values with 0 for every NaN and infinity, and how many there were."""
    bad = ~np.isfinite(values)
    count = int(np.count_nonzero(bad))
    return (np.where(bad, values.dtype.type(0), values), count) if count else (values, 0)


def _positions(box: Box, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return the index of each vector of a box, counted in C order over `shape`."""
    positions = np.zeros(1, np.uint64)
    for axis, indices in enumerate(box):
        steps = np.arange(indices.start, indices.stop, dtype=np.uint64) * np.uint64(prod(shape[axis + 1 :]))
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def _in_sample(positions: NDArray[np.uint64], count: int) -> NDArray[np.bool_]:
    """Return which vectors are measured: about SAMPLE of `count`, evenly spread over every period."""
    if count <= SAMPLE:
        return np.ones(len(positions), bool)
    return positions * np.uint64(GOLDEN) < np.uint64(SAMPLE * 2**64 // count)
