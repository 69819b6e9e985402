"""One array to codes and metadata, in blocks that are read, encoded, measured and written each on its own.

A block is a box of vectors; it goes to its place by position, so blocks may finish in any order and the bytes do not
depend on how many threads there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.arrays import Array, ArraySource, Box, Store
from tqtool.codec import CodecSpec, Encoded, decode, encode, expected_error
from tqtool.errors import InputError
from tqtool.health import refusal
from tqtool.units import ordered_map

Stats = Literal["sample", "all", "none"]
SAMPLE = 1 << 14  # vectors that `sample` measures at most, and that the 1 % quantile comes from
HASHED_BYTES = 64 << 20  # `sample` hashes sources up to this size
MEASURED_AT_ONCE = 1024  # vectors: 1 MiB of float64 at 128 coordinates, which the second-level cache holds
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples are even over any period of the data

Advance = Callable[[float], None]
Cosines = NDArray[np.float64]


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
class _Block:
    """What a block adds to the result."""

    values: Array | None  # for the source's hash, where blocks lie in the file's order
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
    """One tensor's way into the container."""

    source: ArraySource
    spec: CodecSpec
    codes: Store
    meta: Store
    stats: Stats
    nan_to_zero: bool

    @property
    def hashed(self) -> bool:
        """Whether the source's hash is recorded: hashing costs as much as encoding, and runs on one core only."""
        return self.stats == "all" or (self.stats == "sample" and self.source.nbytes <= HASHED_BYTES)

    def run(self, threads: int | None, advance: Advance) -> tuple[Quality, str | None]:
        """Encode every block; returns the quality, and the SHA-256 of the source, if it is hashed."""
        digest = hashlib.sha256()
        boxes = self.source.boxes()
        total = _Total()
        try:
            for block in ordered_map(self._encode, boxes, threads=threads):
                if block.values is not None:
                    digest.update(np.ascontiguousarray(block.values).view(np.uint8).data)
                advance(block.nbytes)
                total.add(block)
        except InputError as error:
            if error.code in ("non-finite", "norm-range"):  # which know their place in the block only
                raise refusal(self.source) from error
            raise
        if not self.hashed:
            return total.quality(self.spec), None
        if not self.source.in_file_order:
            for piece in self.source.stored_pieces():
                digest.update(piece)
        return total.quality(self.spec), digest.hexdigest()

    def _encode(self, box: Box) -> _Block:
        values = self.source.box((*box, range(self.source.dim)))
        clean, replaced = _without_nan(values) if self.nan_to_zero else (values, 0)
        encoded = encode(clean, self.spec, threads=1)
        self.codes.write((*box, range(self.spec.code_bytes)), encoded.codes)
        self.meta.write((*box, range(2)) if self.spec.meta == "range" else box, encoded.meta)
        flat = clean.reshape(-1, self.spec.dim)
        kept = values if self.hashed and self.source.in_file_order else None
        sums = self._measure(box, flat, encoded)
        zero = int(np.count_nonzero(encoded.scales == 0))
        return _Block(kept, values.nbytes, len(flat), zero, replaced, *sums)

    def _measure(self, box: Box, rows: Array, encoded: Encoded) -> tuple[float, float, Cosines, int, Cosines]:
        """Return error, energy, cosines, the number of vectors measured, and the cosines of the sample."""
        error = energy = 0.0
        cosines, in_sample = [np.empty(0)], [np.empty(0)]
        sampled = _in_sample(_positions(box, self.source.shape[:-1]), self.source.count)
        chosen = np.arange(len(rows)) if self.stats == "all" else np.flatnonzero(sampled)
        if self.stats == "none":
            chosen = chosen[:0]
        codes = encoded.codes.reshape(-1, self.spec.code_bytes)
        meta = encoded.meta.reshape(len(rows), *encoded.meta.shape[len(box) :])
        for start in range(0, len(chosen), MEASURED_AT_ONCE):
            part = chosen[start : start + MEASURED_AT_ONCE]
            x = rows[part].astype(np.float64)
            y = decode(Encoded(self.spec, codes[part], meta[part]), threads=1).astype(np.float64)
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


class _Total:
    """Sums over the blocks, added in their order."""

    def __init__(self) -> None:
        self.vectors = self.zero_vectors = self.replaced = self.measured = self.cosines = 0
        self.error = self.energy = self.cos_sum = 0.0
        self.cos_min = 1.0
        self.sampled: list[NDArray[np.float64]] = []

    def add(self, block: _Block) -> None:
        """Add a block."""
        self.vectors += block.vectors
        self.zero_vectors += block.zero_vectors
        self.replaced += block.replaced
        self.measured += block.measured
        self.error += block.error
        self.energy += block.energy
        self.cosines += len(block.cosines)
        self.cos_sum += float(block.cosines.sum())
        self.cos_min = min(self.cos_min, float(block.cosines.min(initial=1.0)))
        self.sampled.append(block.sampled)

    def quality(self, spec: CodecSpec) -> Quality:
        """Return the result; nothing to measure counts as exact."""
        sampled = np.concatenate([*self.sampled, np.empty(0)])
        return Quality(
            self.vectors,
            self.zero_vectors,
            self.replaced,
            self.measured,
            self.error / self.energy if self.energy else 0.0,
            expected_error(spec),
            self.cos_sum / self.cosines if self.cosines else 1.0,
            float(np.quantile(sampled, 0.01)) if len(sampled) else 1.0,
            self.cos_min,
        )


def _without_nan(values: Array) -> tuple[Array, int]:
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
