"""Dumps of keys, values and queries: files in, named float arrays and paired layers out.

Everything that is inferred (kind, layer, layout) is in `Dump.notes`; what cannot be inferred is refused with the
candidates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.claims import check_claims, refuse_unmeasurable
from tqtool.dumps.datafiles import ARRAYS
from tqtool.dumps.entries import PLURAL, Entry, gather, identify, only_array, split
from tqtool.dumps.inputs import Input, is_folder, sha256_of
from tqtool.dumps.latents import LatentArrays, check_latent, open_latents
from tqtool.dumps.layouts import by_layer, check_layout, infer_layout, other_reading
from tqtool.dumps.manifest import AttentionClaims, Manifest, find_manifest
from tqtool.dumps.names import Kind, meaning
from tqtool.errors import InputError, UsageError
from tqtool.files import STREAM, FilePath


@dataclass(frozen=True, slots=True, eq=False)
class DumpLayer:
    """One layer: sources with axes ([batch,] [heads,] tokens, dim), and what the manifest tells of its attention.

    Heads, tokens, dims and attention are facts of a layer: the layers of a model may differ in all of them.
    """

    number: int
    k: ArraySource
    v: ArraySource
    q: ArraySource | None
    claims: AttentionClaims
    latent: LatentArrays | None = None  # of latent attention, where k is its latent and v its rotary key

    @property
    def kv_heads(self) -> int:
        """KV heads; the sequences of a batch count as more heads."""
        return prod(self.k.shape[:-2])

    @property
    def query_heads(self) -> int:
        """Query heads; without queries what the manifest says, else the KV heads."""
        return prod(self.q.shape[:-2]) if self.q is not None else self.claims.heads or self.kv_heads

    @property
    def tokens(self) -> int:
        """Keys of a head."""
        return self.k.shape[-2]

    @property
    def queries(self) -> int:
        """Queries of a query head, 0 where there are none."""
        return 0 if self.q is None else self.q.shape[-2]

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
    notes: tuple[str, ...]  # what was taken for what, what was ignored
    sources: tuple[ArraySource, ...]
    unread: tuple[str, ...]  # names of arrays that tell no kind

    def inputs(self) -> tuple[Input, ...]:
        """Return every array with the SHA-256 of its file, which is read for it."""
        origins = {source.path: source.origin for source in self.sources}
        hashes = {}
        for path, origin in origins.items():
            with origin() as file:
                file.seek(0)
                hashes[path] = sha256_of(file)
        return tuple(Input(s.path, hashes[s.path], s.shape, s.dtype) for s in self.sources)


def sample_dump_path() -> Path:
    """Return the folder of the sample dump that ships with the package."""
    return Path(str(package_files("tqtool") / "data" / "sample"))


def load_dumps(paths: Sequence[FilePath], *, layout: str | None = None, dtype: str | None = None) -> tuple[Dump, ...]:
    """Open the dumps that lie at some paths: one of them all, or one of each folder or file where layers are the same.

    Raises: as `load_dump`.
    """
    if STREAM in map(str, paths):
        return (load_dump(paths, layout=layout, dtype=dtype),)
    groups = split(paths, dtype)
    dumps = [load_dump(group, layout=layout, dtype=dtype) for group in groups]
    if len(dumps) == 1:
        return tuple(dumps)
    names = [str(group[0]) if len(group) == 1 else str(Path(group[0]).parent) for group in groups]
    return tuple(replace(dump, name=name) for dump, name in zip(dumps, names, strict=True))


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
        found = [(replace(only_array(path, dtype), name=kind), kind) for kind, path in named.items()]
        notes: list[str] = []
        unread: tuple[str, ...] = ()
        manifest, name = find_manifest(Path(k).parent), str(k)
        said = [meaning(Path(source.path).stem) for source, _ in found]
        # A manifest by layers is of use only where the name tells the layer; else one file is a layer or a stack.
        entries = [
            Entry(source, kind, each.layer if manifest.by_layer else None, each.tail)
            for (source, kind), each in zip(found, said, strict=True)
        ]
    else:
        if not paths:
            raise UsageError("no dump given", code="usage")
        first = Path(paths[0])
        manifest, name = find_manifest(first if is_folder(first) else first.parent), ", ".join(map(str, paths))
        expected = {file for files in manifest.latents.values() for file in files.values()}
        sources, notes, others = gather(paths, dtype, expected)
        entries = identify(sources, notes, name)
        unread = tuple(source.name for source in sources if meaning(source.name).kind is None)
        unread += tuple(Path(other).stem for other in others if other.endswith(ARRAYS))
    return _assemble(name, entries, manifest, notes, unread, layout, open_latents(manifest, dtype))


def _assemble(
    name: str,
    entries: list[Entry],
    manifest: Manifest,
    notes: list[str],
    unread: tuple[str, ...],
    layout: str | None,
    latents: Mapping[int, LatentArrays],
) -> Dump:
    refuse_unmeasurable(manifest)
    by_number: dict[int, dict[Kind, ArraySource]] = {}
    layouts: dict[str, None] = {}  # an ordered set
    equal: list[str] = []  # readings of arrays with as many tokens as coordinates
    together: dict[int | None, dict[Kind, ArraySource]] = {}
    for entry in entries:
        together.setdefault(entry.layer, {})[entry.kind] = entry.source
    for told, arrays in together.items():
        if told not in latents:  # whose keys and values lie in the latents
            _check_paired(name, "the dump" if told is None else f"layer {told}", arrays)
        reading = layout or infer_layout(arrays, manifest.claims(told), numbered=told is not None)
        layouts[reading] = None
        for kind, source in arrays.items():
            if layout is None and (other := other_reading(source, reading)):
                equal.append(f"{source.label}: {source.shape} is read as {reading}, and could be {other}")
            for number, layer in enumerate(by_layer(source, reading)):
                by_number.setdefault(number if told is None else told, {})[kind] = layer
    if equal:
        more = f" (and {len(equal) - 1} more)" if len(equal) > 1 else ""
        notes.append(f"{equal[0]}{more}: as many tokens as coordinates; --layout says which")
    tails = {entry.layer: entry.tail for entry in entries if entry.kind == "q"}
    layers = tuple(
        _latent_layer(name, number, kinds, manifest, latents[number])
        if number in latents
        else _layer(name, number, kinds, manifest, tails.get(number, tails.get(None)))
        for number, kinds in sorted(by_number.items())
    )
    kinds_found = [PLURAL[kind] for kind in PLURAL if any(entry.kind == kind for entry in entries)]
    count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    notes.insert(0, f"{', '.join(kinds_found)} of {count}, axes {', '.join(layouts)}")
    if manifest.path:
        notes.insert(1, f"{manifest.path}: read")
    sources = [entry.source for entry in entries]
    sources += [source for each in latents.values() for source in (each.latent, each.rope_key, each.kv_b)]
    return Dump(name, layers, manifest, tuple(notes), tuple(sources), unread)


def _latent_layer(
    name: str, number: int, kinds: dict[Kind, ArraySource], manifest: Manifest, arrays: LatentArrays
) -> DumpLayer:
    claims, q = manifest.claims(number), kinds.get("q")
    check_latent(f"{name}: layer {number}", arrays, q, claims, name)
    return DumpLayer(number, arrays.latent, arrays.rope_key, q, claims, arrays)


def _layer(name: str, number: int, kinds: dict[Kind, ArraySource], manifest: Manifest, tail: int | None) -> DumpLayer:
    _check_paired(name, f"layer {number}", kinds)
    k, v, q = kinds["k"], kinds["v"], kinds.get("q")
    where = f"{name}: layer {number}"
    for kind, source in kinds.items():
        if 0 in source.shape:
            text = f"{where}: {kind} is {source.shape}, which holds no values"
            raise InputError(text, code="shape", hint="was the capture interrupted?", path=name)
    if k.shape[:-1] != v.shape[:-1]:
        hint = "keys and values need equal heads and tokens; their last axes may differ"
        raise InputError(f"{where}: k is {k.shape}, v is {v.shape}", code="shape-mismatch", hint=hint, path=name)
    found = {"kv_heads": _heads(k), "key_dim": k.dim, "value_dim": v.dim, "tokens": k.shape[-2]}
    found |= {"heads": 0, "queries": 0} if q is None else {"heads": _heads(q), "queries": q.shape[-2]}
    if q is not None:
        if q.dim != k.dim or len(q.shape) != len(k.shape) or q.shape[:-3] != k.shape[:-3]:
            raise InputError(f"{where}: q is {q.shape}, k is {k.shape}", code="shape-mismatch", path=name)
        if _heads(q) % _heads(k):
            raise InputError(
                f"{where}: {_heads(q)} query heads cannot share {_heads(k)} key heads",
                code="gqa",
                hint="if heads and tokens are exchanged, say --layout htd or thd",
                path=name,
            )
    return DumpLayer(number, k, v, q, check_claims(where, manifest, number, found, tail, name))


def _check_paired(name: str, what: str, kinds: Mapping[Kind, ArraySource]) -> None:
    for kind in ("k", "v"):
        if kind not in kinds:
            raise InputError(
                f"{name}: {what} has {' and '.join(PLURAL[kind] for kind in kinds)} but no {PLURAL[kind]}",
                code="unpaired",
                hint="give both sides, or remove that layer",
                path=name,
            )


def _heads(source: ArraySource) -> int:
    """Heads of one sequence of a batch."""
    return source.shape[-3] if len(source.shape) > 2 else 1
