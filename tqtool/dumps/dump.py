"""Dumps of keys, values and queries: files in, named float arrays and paired layers out.

Everything that is inferred (kind, layer, layout) is in `Dump.notes`; what cannot be inferred is refused with the
candidates.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.datafiles import folder_files, listed, open_arrays
from tqtool.dumps.inputs import Input, InputFile
from tqtool.dumps.layouts import by_layer, check_layout, infer_layout
from tqtool.dumps.names import Kind, Manifest, find_manifest, meaning
from tqtool.errors import InputError, UsageError
from tqtool.files import STREAM, FilePath
from tqtool.rawfiles import COPY_BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class DumpLayer:
    """One layer: sources with axes ([batch,] [heads,] tokens, dim)."""

    number: int
    k: ArraySource
    v: ArraySource
    q: ArraySource | None

    @property
    def dim(self) -> int:
        """The length of a key; layers may differ."""
        return self.k.dim

    def arrays(self) -> tuple[NDArray[np.float32] | None, NDArray[np.float32], NDArray[np.float32]]:
        """Read (q, k, v), each (heads, tokens, dim) float32; the sequences of a batch count as more heads."""
        return (None if self.q is None else _whole(self.q), _whole(self.k), _whole(self.v))


def _whole(source: ArraySource) -> NDArray[np.float32]:
    values = source.read().astype(np.float32)
    return values.reshape(-1, *values.shape[-2:])


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """Keys and values by layer, queries where there are any."""

    name: str
    layers: tuple[DumpLayer, ...]  # ascending by number; layers without keys and values are absent
    manifest: Manifest
    q_tail: int | None  # queries are of the last so many positions; None: of all, or there are none
    notes: tuple[str, ...]  # what was taken for what, what was ignored
    sources: tuple[ArraySource, ...]

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return _heads(self.layers[0].k)

    @property
    def query_heads(self) -> int:
        """Query heads of a layer; without queries what the manifest says, else the KV heads."""
        q = self.layers[0].q
        return _heads(q) if q is not None else self.manifest.query_heads or self.kv_heads

    @property
    def dim(self) -> int:
        """The length of the first layer's keys."""
        return self.layers[0].dim

    @property
    def scaling(self) -> float | None:
        """The factor of the scores, if the manifest tells it."""
        return self.manifest.scaling

    def inputs(self) -> tuple[Input, ...]:
        """Return every array with the SHA-256 of its file, which is read for it."""
        origins = {source.path: source.origin for source in self.sources}
        hashes = {}
        for path, origin in origins.items():
            with origin() as file:
                file.seek(0)
                hashes[path] = _digest(file)
        return tuple(Input(s.path, hashes[s.path], s.shape, s.dtype) for s in self.sources)


def _digest(file: InputFile) -> str:
    digest = hashlib.sha256()
    while block := file.read(COPY_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def sample_dump_path() -> Path:
    """Return the folder of the sample dump that ships with the package."""
    return Path(str(package_files("tqtool") / "data" / "sample"))


def load_dump(
    paths: FilePath | Sequence[FilePath] = (),
    *,
    k: FilePath | None = None,
    v: FilePath | None = None,
    q: FilePath | None = None,
    layout: str | None = None,
    dtype: str | None = None,
) -> Dump:
    """Open a dump: a folder of one file a layer and kind, files, archives, or `k`, `v` and `q` by name.

    Raises: `InputError` if something is missing, does not fit or can be read in two ways; `UsageError`.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    given: dict[Kind, FilePath | None] = {"k": k, "v": v, "q": q}
    if STREAM in [str(path) for path in (*paths, *given.values())]:
        raise UsageError("a dump is read more than once and cannot come from standard input", code="usage")
    if layout is not None:
        check_layout(layout)
    if any(given.values()):
        if paths or k is None or v is None:
            hint = "give --k and --v, --q if there are queries, and no other dump"
            raise UsageError("separate files need both keys and values", code="usage", hint=hint)
        named = {kind: path for kind, path in given.items() if path is not None}
        found = [(replace(_only(path, dtype), name=kind), kind) for kind, path in named.items()]
        notes: list[str] = []
        manifest, name = find_manifest(Path(k).parent), str(k)
        entries = [_Entry(source, kind, None, meaning(Path(source.path).stem).tail) for source, kind in found]
    else:
        if not paths:
            raise UsageError("no dump given", code="usage")
        sources, notes = _gather(paths, dtype)
        first = Path(paths[0])
        manifest, name = find_manifest(first if first.is_dir() else first.parent), ", ".join(map(str, paths))
        entries = _identify(sources, notes, name)
    return _assemble(name, entries, manifest, notes, layout)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A source and what its name says."""

    source: ArraySource
    kind: Kind
    layer: int | None
    tail: int | None


def _only(path: FilePath, dtype: str | None) -> ArraySource:
    sources = open_arrays(path, dtype=dtype)
    if len(sources) > 1:
        names = ", ".join(source.name for source in sources[:8])
        raise InputError(
            f"{path}: holds {len(sources)} arrays: {names}",
            code="ambiguous",
            hint="give the file as a dump, without --k, --v and --q",
            path=str(path),
        )
    return sources[0]


def _gather(paths: Sequence[FilePath], dtype: str | None) -> tuple[list[ArraySource], list[str]]:
    """Open the files and folders; a folder's other files are noted."""
    sources: list[ArraySource] = []
    notes: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            sources.extend(open_arrays(path, dtype=dtype))
            continue
        chosen, ignored = folder_files(Path(path))
        if ignored:
            notes.append(f"{path}: ignored {listed(ignored)}")
        for member in chosen:
            sources.extend(open_arrays(member, dtype=dtype))
    return sources, notes


def _identify(sources: list[ArraySource], notes: list[str], name: str) -> list[_Entry]:
    """Give every source its kind and layer by its name; `InputError` if two claim the same place."""
    entries: list[_Entry] = []
    other: list[str] = []
    for source in sources:
        said = meaning(source.name)
        if said.kind is None:
            other.append(source.name)
            continue
        entries.append(_Entry(source, said.kind, said.layer, said.tail))
    if other:
        notes.append(f"names that tell no kind, ignored: {listed(other)}")
    if not entries:
        raise InputError(
            f"{name}: no keys and values among {listed(other)}",
            code="no-tensors",
            hint="name them like layer07_k and layer07_v, or give --k FILE --v FILE",
            path=name,
        )
    places: dict[tuple[Kind, int | None], _Entry] = {}
    for entry in entries:
        twin = places.setdefault((entry.kind, entry.layer), entry)
        if twin is not entry:
            raise InputError(
                f"{name}: {twin.source.name} and {entry.source.name} both are the {_PLURAL[entry.kind]}"
                f"{'' if entry.layer is None else f' of layer {entry.layer}'}",
                code="ambiguous",
                hint="move one of them away, or give the files by name",
                path=name,
            )
    if len({entry.layer is None for entry in entries}) > 1:
        without = listed([entry.source.name for entry in entries if entry.layer is None])
        raise InputError(
            f"{name}: some names tell a layer, these do not: {without}",
            code="ambiguous",
            hint="give one kind of dump: one file a layer, or stacked layers",
            path=name,
        )
    return entries


_PLURAL: dict[Kind, str] = {"k": "keys", "v": "values", "q": "queries"}


def _assemble(name: str, entries: list[_Entry], manifest: Manifest, notes: list[str], layout: str | None) -> Dump:
    by_number: dict[int, dict[Kind, ArraySource]] = {}
    layouts: dict[str, None] = {}  # an ordered set
    readings: dict[int | None, str] = {}
    # keys first: their reading of the axes serves the others
    for entry in sorted(entries, key=lambda entry: "kvq".index(entry.kind)):
        source, numbered = entry.source, entry.layer is not None
        heads = manifest.heads(entry.kind)
        reading = layout or readings.get(entry.layer) or infer_layout(source, heads=heads, numbered=numbered)
        readings.setdefault(entry.layer, reading)
        layouts[reading] = None
        for number, layer in enumerate(by_layer(source, reading)):
            kinds = by_number.setdefault(entry.layer if entry.layer is not None else number, {})
            kinds[entry.kind] = layer
    layers = tuple(_layer(name, number, kinds) for number, kinds in sorted(by_number.items()))
    kinds_found = [_PLURAL[kind] for kind in _PLURAL if any(entry.kind == kind for entry in entries)]
    count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    notes.insert(0, f"{', '.join(kinds_found)} of {count}, axes {', '.join(layouts)}")
    if manifest.path:
        notes.insert(1, f"{manifest.path}: read")
    tails = {entry.tail for entry in entries if entry.kind == "q"}
    if len(tails) > 1:
        raise InputError(f"{name}: queries of different tails: {tails}", code="shape-mismatch", path=name)
    tail = manifest.q_tail if manifest.q_tail is not None else (tails.pop() if tails else None)
    return Dump(name, layers, manifest, tail, tuple(notes), tuple(entry.source for entry in entries))


def _layer(name: str, number: int, kinds: dict[Kind, ArraySource]) -> DumpLayer:
    for kind in ("k", "v"):
        if kind not in kinds:
            raise InputError(
                f"{name}: layer {number} has {' and '.join(_PLURAL[kind] for kind in kinds)} but no {_PLURAL[kind]}",
                code="unpaired",
                hint="give both sides, or remove that layer",
                path=name,
            )
    k, v, q = kinds["k"], kinds["v"], kinds.get("q")
    where = f"{name}: layer {number}: "
    for kind, source in kinds.items():
        if 0 in source.shape:
            text = f"{where}{kind} is {source.shape}, which holds no values"
            raise InputError(text, code="shape", hint="was the capture interrupted?", path=name)
    if k.shape != v.shape:
        raise InputError(f"{where}k is {k.shape}, v is {v.shape}", code="shape-mismatch", path=name)
    if q is not None:
        if q.dim != k.dim or len(q.shape) != len(k.shape) or q.shape[:-3] != k.shape[:-3]:
            raise InputError(f"{where}q is {q.shape}, k is {k.shape}", code="shape-mismatch", path=name)
        if _heads(q) % _heads(k):
            raise InputError(
                f"{where}{_heads(q)} query heads cannot share {_heads(k)} key heads",
                code="gqa",
                hint="if heads and tokens are exchanged, say --layout htd or thd",
                path=name,
            )
    return DumpLayer(number, k, v, q)


def _heads(source: ArraySource) -> int:
    heads = 1
    for size in source.shape[:-2]:
        heads *= size
    return heads
