"""The compressed file, format 1.0: a safetensors file with a profile, described in `docs/container.md`.

Tensors lie by element size, largest first, so that each starts aligned and no holes remain; within a size the tool's
own (`tq.*`) by name, then the input's order; `tq.sha256` is last. For every compressed tensor there are
`<name>.codes` and `<name>.meta`; all others are copied. Every byte is covered: `tq.crc32` has a CRC of every MiB of
every tensor, `tq.sha256` the hashes of the header and of the CRCs. The header's length is fixed before any data
are known: its late facts (measured error, hash of the source) have a fixed width.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tqtool.container.manifest import FORMAT, OWN, VERSION, Compressed, Entry, file_metadata, parse_manifest
from tqtool.dumps.datafiles import DUMP_FORMATS, DumpFormat
from tqtool.dumps.inputs import InputFile, Opener, reopening, shown_name
from tqtool.dumps.names import CONTAINER_SUFFIX
from tqtool.dumps.safetensors import Header, Tensor, damaged, header_bytes, is_header, read_header, tensor_bytes
from tqtool.errors import InputError, IntegrityError, UsageError
from tqtool.files import FilePath
from tqtool.parallel import ordered_map
from tqtool.rawfiles import WholeFile

MAJOR = int(VERSION.partition(".")[0])
CHUNK = 1 << 20  # bytes under one CRC
ALIGN = 64
HASHES = "tq.sha256"
CRCS = "tq.crc32"
HASH_BYTES = 64
KNOWN_METADATA = {"format", "tq_version", "tq_requires", "tq_producer", "tq_manifest"}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of a container lies, before there is any data."""

    entries: tuple[Entry, ...]  # in the source's order
    source: DumpFormat
    metadata: dict[str, str]  # the source's own
    tensors: tuple[Tensor, ...]

    def header(self, entries: Sequence[Entry]) -> bytes:
        """Return length and header with the late facts of `entries`; every call gives the same length."""
        return header_bytes(list(self.tensors), file_metadata(entries, self.source, self.metadata), align=ALIGN)

    @property
    def data(self) -> int:
        """Position of the first data byte."""
        return len(self.header(self.entries))

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data + self.tensors[-1].stop


def plan(entries: Sequence[Entry], source: DumpFormat, metadata: Mapping[str, str]) -> Placement:
    """Lay out a container.

    Raises: `InputError`, code `name`, if a tensor has a name that the format needs for itself; `UsageError` if vectors
    of one length have two seeds, whose signs would share a name, or if the format is none that can be restored.
    """
    if source not in DUMP_FORMATS:
        raise UsageError(f"source format {source!r} is none of {', '.join(DUMP_FORMATS)}", code="usage")
    _check_seeds(entries)
    own: dict[str, tuple[str, tuple[int, ...]]] = {}
    others: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in entries:
        if entry.name.startswith(OWN):
            raise InputError(f"tensor {entry.name!r}: names that begin with {OWN} are the format's own", code="name")
        for name, place in entry.tensors().items():
            if name in others:
                raise InputError(f"tensor {entry.name!r}: another tensor needs the name {name!r}", code="name")
            (own if name.startswith(OWN) else others)[name] = place
    chunks = sum(-(-tensor_bytes(*place) // CHUNK) for place in (own | others).values())
    own[CRCS] = ("U32", (chunks,))
    ordered = {name: own[name] for name in sorted(own)} | others
    by_size = sorted(ordered.items(), key=lambda item: -_element_bytes(item[1][0]))
    tensors: list[Tensor] = []
    position = 0
    for name, (dtype, shape) in [*by_size, (HASHES, ("U8", (HASH_BYTES,)))]:
        tensors.append(Tensor(name, dtype, shape, position, position + tensor_bytes(dtype, shape)))
        position = tensors[-1].stop
    return Placement(tuple(entries), source, dict(metadata), tuple(tensors))


def _check_seeds(entries: Sequence[Entry]) -> None:
    first: dict[int, Compressed] = {}
    for entry in entries:
        if isinstance(entry, Compressed):
            dim, seed = entry.spec.dim, entry.spec.seed
            known = first.setdefault(dim, entry)
            if seed != known.spec.seed:
                raise UsageError(
                    f"tensor {entry.name!r}: seed {seed} for vectors of {dim} coordinates; "
                    f"{known.name!r} has {known.spec.seed}, and a file holds one for each length",
                    code="usage",
                    hint="give both the same seed, or write two files",
                )


def _element_bytes(dtype: str) -> int:
    return tensor_bytes(dtype, (1,))


def chunks_of(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Yield (tensor, start, stop) of every piece of the data that has a CRC, in the order of the CRCs."""
    for tensor in tensors:
        if tensor.name not in (CRCS, HASHES):
            for start in range(tensor.start, tensor.stop, CHUNK):
                yield tensor, start, min(start + CHUNK, tensor.stop)


def chunk_crcs(file: WholeFile, data: int, tensors: Sequence[Tensor], threads: int | None = None) -> NDArray[np.uint32]:
    """Return the CRC of every chunk of the data, which begin at position `data`."""

    def crc(piece: tuple[Tensor, int, int]) -> int:
        _, start, stop = piece
        content = bytearray(stop - start)
        file.read_at(memoryview(content), data + start)
        return zlib.crc32(content)

    return np.fromiter(ordered_map(crc, chunks_of(tensors), threads=threads), "<u4")


def hashes(header: bytes, crcs: bytes) -> bytes:
    """Return the contents of `tq.sha256`."""
    return hashlib.sha256(header).digest() + hashlib.sha256(crcs).digest()


@dataclass(frozen=True, slots=True)
class Damage:
    """A piece of the data whose CRC does not match."""

    tensor: str
    chunk: int  # from 0
    chunks: int
    rows: tuple[int, int] | None  # first and last vector it touches, of codes and metadata

    def __str__(self) -> str:
        rows = f" (vectors {self.rows[0]} to {self.rows[1]})" if self.rows else ""
        return f"tensor {self.tensor!r}, chunk {self.chunk + 1} of {self.chunks}{rows}: CRC mismatch"


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """An opened container: its header is whole and checked, its data are not read yet."""

    path: str
    nbytes: int  # of the file
    opener: Opener
    header: Header
    places: dict[str, Tensor]
    entries: tuple[Entry, ...]
    source: DumpFormat
    metadata: dict[str, str]
    unknown: tuple[str, ...]  # metadata keys that this version does not know

    @property
    def version(self) -> str:
        """The format's version that the file was written in."""
        return self.header.metadata["tq_version"]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor's place."""
        return self.places[name]

    def read(self, tensor: Tensor, start: int, stop: int) -> bytes:
        """Return bytes start to stop of the data."""
        with self.opener() as file:
            return file.bytes_at(self.header.data + start, self.header.data + stop)

    def whole(self, name: str) -> bytes:
        """Return all bytes of a small tensor."""
        tensor = self.tensor(name)
        return self.read(tensor, tensor.start, tensor.stop)

    def damage(self, names: Set[str] | None = None, *, threads: int | None = None) -> Iterator[Damage]:
        """Yield what does not match its CRC, of the named tensors or of all; `IntegrityError` if the CRCs do not."""
        crcs = self.whole(CRCS)
        if hashlib.sha256(crcs).digest() != self.whole(HASHES)[32:]:
            raise IntegrityError(
                f"{self.path}: tensor {CRCS!r}: hash mismatch; the checksums themselves are damaged",
                code="checksum",
                hint="--no-verify reads the file without them",
                path=self.path,
            )
        expected = np.frombuffer(crcs, "<u4").tolist()
        pieces = list(zip(chunks_of(self.header.tensors), expected, strict=True))
        wanted = [piece for piece in pieces if names is None or piece[0][0].name in names]

        def matches(piece: tuple[tuple[Tensor, int, int], int]) -> bool:
            return zlib.crc32(self.read(*piece[0])) == piece[1]

        for ((tensor, start, stop), _), good in zip(wanted, ordered_map(matches, wanted, threads=threads), strict=True):
            if not good:
                yield self._damage(tensor, start - tensor.start, stop - tensor.start)

    def _damage(self, tensor: Tensor, start: int, stop: int) -> Damage:
        rows = None
        for entry in self.entries:
            if isinstance(entry, Compressed) and tensor.name in entry.part_names.values():
                width = tensor.nbytes // max(prod(entry.lead), 1)
                rows = (start // width, (stop - 1) // width)
        return Damage(tensor.name, start // CHUNK, -(-tensor.nbytes // CHUNK), rows)


def is_container(file: InputFile, path: FilePath) -> bool:
    """Return whether an opened file is a container, as far as its first bytes or its name tell."""
    file.seek(0)
    start = file.read(9)
    if str(path).endswith(CONTAINER_SUFFIX) or not is_header(start):
        return str(path).endswith(CONTAINER_SUFFIX)
    return read_header(file, shown_name(path)).metadata.get("format") == FORMAT


def open_container(path: FilePath, *, file: InputFile | None = None) -> Container:
    """Open a container and check its header; its data stay where they are.

    `file` is the same file where it is open already. Raises: `IntegrityError` with code `header`, `truncated`,
    `format-newer` or `feature`; `InputError`, code `not-container`, for any other file.
    """
    shown = shown_name(path)
    opener, opened = reopening(path, file)
    with opened as file:
        file.seek(0)
        start = file.read(9)
        if not is_header(start) and not shown.endswith(".safetensors"):
            plain = start.startswith((b"\x93NUMPY", b"PK"))
            what = "already a plain array" if plain else "not a compressed file"
            hint = "did you mean compress?" if plain else None
            raise InputError(f"{shown}: {what}", code="not-container", hint=hint, path=shown)
        header = read_header(file, shown)
        if header.metadata.get("format") != FORMAT:
            hint = "did you mean compress?"
            raise InputError(f"{shown}: already plain tensors", code="not-container", hint=hint, path=shown)
        _check_version(header)
        size, place = file.size, file.size - HASH_BYTES
        hashed = file.bytes_at(place, place + 32) if place >= header.data else b""
    if hashed != hashlib.sha256(header.raw).digest():
        raise damaged(shown, "hash mismatch")
    _check_sums(header)
    manifest = parse_manifest(header)
    unknown = tuple(sorted(set(header.metadata) - KNOWN_METADATA))
    return Container(shown, size, opener, header, {each.name: each for each in header.tensors}, *manifest, unknown)


def _check_sums(header: Header) -> None:
    """See that there is a CRC for every chunk, and that the hashes are where they were read."""
    chunks = sum(1 for _ in chunks_of(header.tensors))
    there = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    if there.get(CRCS) != ("U32", (chunks,)) or there.get(HASHES) != ("U8", (HASH_BYTES,)):
        raise damaged(header.label, f"{chunks} chunks need as many checksums in {CRCS!r}, and {HASHES!r}")
    if header.tensors[-1].name != HASHES:
        raise damaged(header.label, f"{HASHES!r} is not last")


def _check_version(header: Header) -> None:
    """Refuse what a later version wrote: its checks may be others than ours."""
    version = header.metadata.get("tq_version", "")
    major, _, minor = version.partition(".")
    if not (major.isdecimal() and minor.isdecimal()) or int(major) < 1:
        raise damaged(header.label, f"version {version!r}")
    if int(major) > MAJOR:
        raise IntegrityError(
            f"{header.label}: written by format {version}; this tqtool reads {MAJOR}.x",
            code="format-newer",
            hint="upgrade tqtool",
            path=header.label,
        )
    features = [name for name in header.metadata.get("tq_requires", "").split(",") if name]
    if features:
        raise IntegrityError(
            f"{header.label}: needs feature {features[0]!r}, which this tqtool does not know",
            code="feature",
            hint="upgrade tqtool",
            path=header.label,
        )
