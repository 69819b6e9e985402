"""Arrays on disk, read and written in boxes: a range of indices on every axis.

An array is never mapped or held whole. Whatever the order of its axes in the file (C, Fortran, a transposed layout),
a box is a set of contiguous runs, each read or written by position; so any thread may take any box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import ml_dtypes
import numpy as np

from tqtool.dtypes import AnyArray
from tqtool.dumps.inputs import Opener
from tqtool.rawfiles import WholeFile

Box = tuple[range, ...]

BLOCK_BYTES = 4 << 20  # of float32 values: the unit in which data are read, encoded and written (slow/throughput.py)
FLOAT_TYPES = {
    "f16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """An array's place in a file: C order over `shape`, from `offset` on."""

    file: Opener | WholeFile  # to read; a file to write
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]  # in the file's byte order

    def read(self, box: Box) -> AnyArray:
        """Return the values of a box, C order, in the file's byte order; `InputError`."""
        assert callable(self.file)
        values = np.empty([len(indices) for indices in box], self.dtype)
        view = values.reshape(-1).view(np.uint8).data
        with self.file() as file:
            taken = 0
            for start, count in self._runs(box):
                file.read_at(view[taken : taken + count], start)
                taken += count
        return values

    def write(self, box: Box, values: AnyArray) -> None:
        """Write the values of a box, given in its shape."""
        assert isinstance(self.file, WholeFile)
        view = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        taken = 0
        for start, count in self._runs(box):
            self.file.write_at(view[taken : taken + count], start)
            taken += count

    def _runs(self, box: Box) -> Iterator[tuple[int, int]]:
        """Yield (position, byte count) of the contiguous runs of a box, in C order."""
        if not all(box):
            return
        inner = len(box)  # the axes from here on are one run, together with the range on the axis before
        while inner > 0 and len(box[inner - 1]) == self.shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        strides = [self.dtype.itemsize * prod(self.shape[axis + 1 :]) for axis in range(len(box))]
        count = self.dtype.itemsize * prod(len(indices) for indices in box[inner:])
        first = self.offset + sum(r.start * s for r, s in zip(box[inner:], strides[inner:], strict=True))
        outer = [len(indices) for indices in box[:inner]]
        for index in np.ndindex(*outer):
            steps = zip(index, box, strides, strict=False)
            yield first + sum((r.start + i) * s for i, r, s in steps), count


@dataclass(frozen=True, slots=True, eq=False)
class ArraySource:
    """An array in a file, seen with the vector axis last; nothing is read before it is asked for."""

    path: str  # as the user gave it
    name: str  # the member's or tensor's name, else the file's stem
    dtype: str  # f16, bf16, f32, f64; other types are only ever copied
    store: Store
    axes: tuple[int, ...]  # axis i of this array is axis axes[i] of the store
    origin: Opener  # opens the whole file, which may be an archive
    fixed: tuple[tuple[int, int], ...] = ()  # (axis of the store, index): one layer out of a stack
    hidden_file: bool = False  # the name is that of the file, so messages leave it out

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, (..., dim)."""
        return tuple(self.store.shape[axis] for axis in self.axes)

    @property
    def big_endian(self) -> bool:
        """Whether the file holds its values most significant byte first."""
        return self.store.dtype.newbyteorder("<") != self.store.dtype

    @property
    def dim(self) -> int:
        """The length of a vector."""
        return self.shape[-1]

    @property
    def count(self) -> int:
        """The number of vectors."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.store.dtype.itemsize

    @property
    def label(self) -> str:
        """What messages call this array: the file, and the member where there are several."""
        return self.path if self.hidden_file else f"{self.path}: {self.name}"

    @property
    def in_file_order(self) -> bool:
        """Whether the array's C order is the order of its bytes in the file, all of them."""
        return not self.fixed and self.axes == tuple(range(len(self.store.shape)))

    def stored_pieces(self) -> Iterator[memoryview]:
        """Yield the array's bytes as they lie in the file, little-endian, a piece at a time; no part of a stack."""
        assert not self.fixed
        whole = replace(self, axes=tuple(range(len(self.store.shape))))
        for piece in whole.pieces():
            yield np.ascontiguousarray(whole.box(piece)).reshape(-1).view(np.uint8).data

    def transposed(self, order: tuple[int, ...]) -> ArraySource:
        """Return this array with its axes in another order."""
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def take(self, axis: int, index: int) -> ArraySource:
        """Return one index of an axis, which disappears."""
        fixed = (*self.fixed, (self.axes[axis], index))
        return replace(self, axes=self.axes[:axis] + self.axes[axis + 1 :], fixed=fixed)

    def box(self, box: Box) -> AnyArray:
        """Return the values of a box over all axes: native byte order, any strides."""
        whole = [range(0)] * len(self.store.shape)
        for axis, index in self.fixed:
            whole[axis] = range(index, index + 1)
        for axis, indices in zip(self.axes, box, strict=True):
            whole[axis] = indices
        values = self.store.read(tuple(whole))
        kept = [axis for axis in range(len(whole)) if axis in self.axes]
        values = values.reshape([len(whole[axis]) for axis in kept])
        values = values.transpose([kept.index(axis) for axis in self.axes])
        if self.dtype == "bf16":
            return values.astype(values.dtype.newbyteorder("="), copy=False).view(ml_dtypes.bfloat16)
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def read(self) -> AnyArray:
        """Return the whole array."""
        return self.box(tuple(range(size) for size in self.shape))

    def boxes(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
        """Yield boxes over the leading axes that cover the array once, in the order of the file.

        A box holds at most `block_bytes` as float32, and is as long in the file as that allows.
        """
        yield from boxes_over(self.shape[:-1], self.axes[:-1], max(block_bytes // (4 * max(self.dim, 1)), 1))

    def pieces(self) -> Iterator[Box]:
        """Yield boxes over all axes that cover the array once; for copying."""
        yield from boxes_over(self.shape, self.axes, BLOCK_BYTES // 8)


def boxes_over(shape: tuple[int, ...], speeds: tuple[int, ...], budget: int) -> Iterator[Box]:
    """Yield boxes of at most `budget` indices; an axis of higher speed lies closer together in the file."""
    if not all(shape):
        return
    steps = [1] * len(shape)
    for axis in sorted(range(len(shape)), key=speeds.__getitem__, reverse=True):
        steps[axis] = min(shape[axis], budget)
        budget //= steps[axis]
        if steps[axis] < shape[axis]:
            break
    slowest_first = sorted(range(len(shape)), key=speeds.__getitem__)
    counts = [-(-shape[axis] // steps[axis]) for axis in slowest_first]
    for index in np.ndindex(*counts):
        ranges = {
            axis: range(i * steps[axis], min((i + 1) * steps[axis], shape[axis]))
            for axis, i in zip(slowest_first, index, strict=True)
        }
        yield tuple(ranges[axis] for axis in range(len(shape)))
