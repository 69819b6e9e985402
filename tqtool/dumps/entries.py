"""The arrays of a dump by what their names say: which of them are keys, values and queries, and of which layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.datafiles import folder_files, listed, open_arrays
from tqtool.dumps.inputs import is_folder
from tqtool.dumps.names import Kind, meaning
from tqtool.errors import InputError
from tqtool.files import FilePath

PLURAL: dict[Kind, str] = {"k": "keys", "v": "values", "q": "queries"}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A source and what its name says."""

    source: ArraySource
    kind: Kind
    layer: int | None
    tail: int | None


def only_array(path: FilePath, dtype: str | None) -> ArraySource:
    """Open a file that holds one array; `InputError` if it holds several."""
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


def gather(paths: Sequence[FilePath], dtype: str | None, expected: set[str]) -> tuple[list[ArraySource], list[str]]:
    """Open the files and folders; a folder's other files are noted but for those that the manifest names."""
    sources: list[ArraySource] = []
    notes: list[str] = []
    for path in paths:
        if not is_folder(path):
            sources.extend(open_arrays(path, dtype=dtype))
            continue
        chosen, ignored = folder_files(Path(path))
        if ignored := [other for other in ignored if other not in expected]:
            notes.append(f"{path}: ignored {listed(ignored)}")
        for member in chosen:
            if member.name not in expected:
                sources.extend(open_arrays(member, dtype=dtype))
    return sources, notes


def identify(sources: list[ArraySource], notes: list[str], name: str) -> list[Entry]:
    """Give every source its kind and layer by its name; `InputError` if two claim the same place."""
    entries: list[Entry] = []
    other: list[str] = []
    for source in sources:
        said = meaning(source.name)
        if said.kind is None:
            other.append(source.name)
            continue
        entries.append(Entry(source, said.kind, said.layer, said.tail))
    if other:
        notes.append(f"names that tell no kind, ignored: {listed(other)}")
    if not entries:
        raise InputError(
            f"{name}: no keys and values among {listed(other)}",
            code="no-tensors",
            hint="name them like layer07_k and layer07_v, or give --k FILE --v FILE",
            path=name,
        )
    places: dict[tuple[Kind, int | None], Entry] = {}
    for entry in entries:
        twin = places.setdefault((entry.kind, entry.layer), entry)
        if twin is not entry:
            raise InputError(
                f"{name}: {twin.source.name} and {entry.source.name} both are the {PLURAL[entry.kind]}"
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
