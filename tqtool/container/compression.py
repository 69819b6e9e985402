"""Files to containers: what is known beforehand laid out, the data streamed, the late facts written last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from tqtool.codec.rotation import sign_bits
from tqtool.codec.spec import PART_TYPES, CodecSpec
from tqtool.container.format import CRCS, HASHES, Placement, chunk_crcs, hashes, plan
from tqtool.container.manifest import Compressed, Entry, signs_name, table_names
from tqtool.container.pipeline import Block, Pipeline, Quality, Stats, Total
from tqtool.dtypes import AnyArray
from tqtool.dumps.arrays import ArraySource, Box, Store
from tqtool.dumps.datafiles import DataFile
from tqtool.dumps.safetensors import Tensor, stored_type
from tqtool.files import Advance, FilePath, output_file
from tqtool.parallel import ordered_map
from tqtool.rawfiles import WholeFile


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one file."""

    path: str
    output: str
    source_bytes: int
    container_bytes: int
    entries: tuple[Entry, ...]
    qualities: tuple[Quality | None, ...]  # of the entries; None for copied ones
    exceeded: tuple[str, ...]  # limits, in words; the file is not written if there are any
    seconds: float

    @property
    def compressed(self) -> tuple[tuple[Compressed, Quality], ...]:
        """The tensors that were encoded, with their quality."""
        pairs = zip(self.entries, self.qualities, strict=True)
        return tuple((entry, quality) for entry, quality in pairs if isinstance(entry, Compressed) and quality)

    @property
    def bits_per_value(self) -> float:
        """Stored bits of a compressed value, metadata counted, tables and header not."""
        values = sum(entry.count * entry.spec.dim for entry, _ in self.compressed)
        return (
            8 * sum(entry.count * entry.spec.vector_bytes for entry, _ in self.compressed) / values if values else 0.0
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a restored file must keep to be written at all."""

    max_rel_error: float | None = None  # of any tensor
    min_cosine: float | None = None  # of any vector

    def exceeded(self, entries: Sequence[Entry], qualities: Sequence[Quality | None]) -> tuple[str, ...]:
        """Return what is beyond a limit, in words."""
        found = []
        for entry, quality in zip(entries, qualities, strict=True):
            if quality is None:
                continue
            if self.max_rel_error is not None and not quality.rel_error <= self.max_rel_error:
                found.append(f"{entry.name}: relative error {quality.rel_error:.4g} > {self.max_rel_error:g}")
            if self.min_cosine is not None and not quality.cos_min >= self.min_cosine:
                found.append(f"{entry.name}: smallest cosine {quality.cos_min:.4g} < {self.min_cosine:g}")
        return tuple(found)

    @property
    def any(self) -> bool:
        """Whether there are limits."""
        return self.max_rel_error is not None or self.min_cosine is not None


class _ExceededError(Exception):
    """Leaves the block that writes the output, which thereby never appears."""


def compress_arrays(
    file: DataFile,
    chosen: Sequence[tuple[Entry, ArraySource]],
    output: FilePath,
    *,
    stats: Stats = "sample",
    nan_to_zero: bool = False,
    limits: Limits = Limits(),
    force: bool = False,
    threads: int | None = None,
    advance: Advance = lambda amount: None,
) -> Result:
    """Write the container of a file (`-`: to standard output) and return what became of it.

    Nothing is written if a limit is exceeded. Raises `InputError` and `OutputError`.
    """
    begun = perf_counter()
    placement = plan([entry for entry, _ in chosen], file.format, file.metadata)
    exceeded: tuple[str, ...] = ()
    qualities: tuple[Quality | None, ...] = ()
    try:
        with output_file(output, force=force, size=placement.size) as target:
            qualities = write_container(
                target,
                placement,
                [source for _, source in chosen],
                stats="all" if limits.any else stats,
                nan_to_zero=nan_to_zero,
                threads=threads,
                advance=advance,
            )
            exceeded = limits.exceeded(placement.entries, qualities)
            if exceeded:
                raise _ExceededError
    except _ExceededError:
        pass
    seconds = perf_counter() - begun
    return Result(file.path, str(output), file.nbytes, placement.size, placement.entries, qualities, exceeded, seconds)


def write_container(
    file: WholeFile,
    placement: Placement,
    sources: Sequence[ArraySource],
    *,
    stats: Stats = "sample",
    nan_to_zero: bool = False,
    threads: int | None = None,
    advance: Advance = lambda amount: None,
) -> tuple[Quality | None, ...]:
    """Fill an empty file with a container; `sources` go with the entries of the placement, vector axis last.

    Returns the quality of each entry, None for copied ones. Raises `InputError` where the source does.
    """
    writing = Writing.begin(file, placement)
    pipelines: dict[int, Pipeline] = {}
    for index, (entry, source) in enumerate(zip(placement.entries, sources, strict=True)):
        if isinstance(entry, Compressed):
            parts = {
                name: writing.store(entry.part_names[name], PART_TYPES[part.dtype])
                for name, part in entry.spec.parts.items()
            }
            pipelines[index] = Pipeline(source, entry.spec, parts, stats, nan_to_zero)
        else:
            for box in source.pieces():
                writing.store(entry.name, stored_type(entry.dtype)).write(box, source.box(box))
            advance(source.nbytes)
    writing.write_tables()
    totals = {index: Total(pipeline) for index, pipeline in pipelines.items()}
    units = ((index, box) for index, pipeline in pipelines.items() for box in pipeline.boxes())

    def run(unit: tuple[int, Box]) -> tuple[int, Block]:
        index, box = unit
        return index, pipelines[index].run(box)

    for index, block in ordered_map(run, units, threads=threads):
        totals[index].add(block)
        advance(block.nbytes)
    qualities = [totals[index].quality() if index in totals else None for index in range(len(placement.entries))]
    done: list[Entry] = []
    for index, (entry, quality) in enumerate(zip(placement.entries, qualities, strict=True)):
        if isinstance(entry, Compressed) and quality is not None:
            error = quality.error if quality.measured else None
            entry = replace(entry, source_sha256=totals[index].sha256(), error=error)
        done.append(entry)
    writing.seal(done, threads=threads)
    return tuple(qualities)


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """A container while it is written: every place is known, tables and checksums follow the data."""

    file: WholeFile
    placement: Placement
    data: int  # position of the first data byte
    places: dict[str, Tensor]

    @classmethod
    def begin(cls, file: WholeFile, placement: Placement) -> Writing:
        """Give an empty file its size."""
        file.truncate(placement.size)
        return cls(file, placement, placement.data, {tensor.name: tensor for tensor in placement.tensors})

    def store(self, name: str, dtype: np.dtype[np.generic]) -> Store:
        """Return the place of a tensor."""
        tensor = self.places[name]
        return Store(self.file, self.data + tensor.start, tensor.shape, dtype)

    def write(self, name: str, values: AnyArray) -> None:
        """Write a whole tensor."""
        self.store(name, values.dtype).write(tuple(map(range, values.shape)), values)

    def write_tables(self) -> None:
        """Write the tables and signs that decoding the entries needs."""
        for spec in {entry.spec: None for entry in self.placement.entries if isinstance(entry, Compressed)}:
            for name, values in _tables(spec).items():
                self.write(name, values)

    def seal(self, entries: Sequence[Entry], *, threads: int | None = None) -> None:
        """Write checksums, hashes and the header, with the late facts of `entries`, when all else is written."""
        crcs = chunk_crcs(self.file, self.data, self.placement.tensors, threads)
        self.write(CRCS, crcs)
        header = self.placement.header(entries)
        assert len(header) == self.data
        start = Store(self.file, 0, (self.data,), np.dtype(np.uint8))
        start.write((range(self.data),), np.frombuffer(header, np.uint8))
        self.write(HASHES, np.frombuffer(hashes(header, crcs.tobytes()), np.uint8))


def _tables(spec: CodecSpec) -> dict[str, AnyArray]:
    """Return the tables that decoding needs, by their names in the file."""
    of_boundaries, of_centroids = table_names(spec)
    return {
        of_boundaries: spec.boundaries,
        of_centroids: spec.centroids,
        signs_name(spec): sign_bits(spec.seed, spec.dim),
    }
