"""The arrays of a dump: found in folders, files and archives, and given a kind and a layer by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.datafiles import ARCHIVES, folder_files, has_dump_files, listed, open_arrays
from tqtool.dumps.inputs import is_folder, naming
from tqtool.dumps.names import Kind, bare_numbers, meaning
from tqtool.errors import InputError, UsageError
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
    """Return the one array of a file; `InputError` (code `ambiguous`) if it has several."""
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


def gather(
    paths: Sequence[FilePath], dtype: str | None, expected: Collection[str] = ()
) -> tuple[list[ArraySource], list[str], list[str]]:
    """Open the files and folders; a folder's other files are noted but for those that the manifest names.

    Returns the arrays, the notes, and the names of the other files.
    """
    sources: list[ArraySource] = []
    notes: list[str] = []
    others: list[str] = []
    for path in paths:
        if not is_folder(path):
            sources.extend(open_arrays(path, dtype=dtype))
            continue
        chosen, ignored = folder_files(Path(path))
        if ignored := [other for other in ignored if other not in expected]:
            notes.append(f"{path}: ignored {listed(ignored)}")
            others += ignored
        for member in chosen:
            if member.name not in expected:
                sources.extend(open_arrays(member, dtype=dtype))
    return sources, notes, others


def split(paths: Sequence[FilePath], dtype: str | None) -> list[tuple[FilePath, ...]]:
    """Return the paths of each dump: one of them all, or several where two of them hold the same layer.

    Several are a folder each, or the files of a folder each, or a file each. A folder without dump files stands for
    the folders in it. Raises: as `gather`; `UsageError` for a path that is given twice.
    """
    paths = [place for path in paths for place in _with_inner_folders(path)]
    twice = next((path for i, path in enumerate(paths) if path in paths[:i]), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice", code="usage")
    if len(paths) == 1 and is_folder(paths[0]):
        members: list[FilePath] = list(folder_files(Path(paths[0]))[0])
        return [(member,) for member in members] if _is_archive_each(members, dtype) else [tuple(paths)]
    if len(paths) < 2 or not _collide(paths, dtype):
        return [tuple(paths)]
    folders: dict[str, list[FilePath]] = {}
    for path in paths:
        folders.setdefault(str(path if is_folder(path) else Path(path).parent), []).append(path)
    if len(folders) > 1 and not any(_collide(group, dtype) for group in folders.values()):
        return [tuple(group) for group in folders.values()]
    return [(path,) for path in paths]


def _with_inner_folders(path: FilePath) -> list[FilePath]:
    """Return a folder's folders where they hold the dumps and it holds none itself; else the path."""
    if not is_folder(path):
        return [path]
    with naming(path):
        inner = sorted(entry for entry in Path(path).iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if has_dump_files(Path(path)):
        return [path]
    return [place for place in inner if has_dump_files(place)] or [path]


def _is_archive_each(members: Sequence[FilePath], dtype: str | None) -> bool:
    """Whether the files of a folder are dumps of their own: archives that hold the same layers."""
    return len(members) > 1 and all(str(path).endswith(ARCHIVES) for path in members) and _collide(members, dtype)


def _collide(paths: Sequence[FilePath], dtype: str | None) -> bool:
    """Whether two arrays of the paths are the same kind of the same layer."""
    entries = _numbered_by_what_varies(_entries(gather(paths, dtype)[0])[0])
    return len({(entry.kind, entry.layer) for entry in entries}) < len(entries)


def identify(sources: list[ArraySource], notes: list[str], name: str) -> list[Entry]:
    """Give every source its kind and layer by its name; `InputError` if two claim the same place."""
    entries, other = _entries(sources)
    if other:
        notes.append(f"names that tell no kind, ignored: {listed(other)}")
    if not entries:
        raise InputError(
            f"{name}: no keys and values among {listed(other)}",
            code="no-tensors",
            hint="name them like layer07_k and layer07_v, or give --k FILE --v FILE",
            path=name,
        )
    entries = _numbered_by_what_varies(entries)
    places: dict[tuple[Kind, int | None], Entry] = {}
    for entry in entries:
        twin = places.setdefault((entry.kind, entry.layer), entry)
        if twin is not entry:
            raise InputError(
                f"{twin.source.label} and {entry.source.label} both are the {PLURAL[entry.kind]}"
                f"{'' if entry.layer is None else f' of layer {entry.layer}'}",
                code="ambiguous",
                hint="give each prompt or model a folder or file of its own; or move one of the two away",
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


def _entries(sources: Sequence[ArraySource]) -> tuple[list[Entry], list[str]]:
    """Return what the names of arrays say, and the names that tell no kind."""
    of_file = Counter(source.path for source in sources)
    said = [(source, _entry(source, alone=of_file[source.path] == 1)) for source in sources]
    return [entry for _, entry in said if entry], [source.name for source, entry in said if entry is None]


def _entry(source: ArraySource, *, alone: bool) -> Entry | None:
    """Return what the name of an array says, None if it tells no kind.

    The file's name fills the gaps of a member's: one archive a layer names its members alike. The kind it tells only
    for the one member of an archive.
    """
    said = meaning(source.name)
    if not source.hidden_file:
        file = meaning(Path(source.path).stem)
        layer = file.layer if said.layer is None else said.layer
        said = replace(said, kind=said.kind or (file.kind if alone else None), layer=layer, tail=said.tail or file.tail)
    return None if said.kind is None else Entry(source, said.kind, said.layer, said.tail)


def _numbered_by_what_varies(entries: list[Entry]) -> list[Entry]:
    """Take the number that differs among the names of one kind for the layer, where no name tells one outright."""
    if any(entry.layer is not None for entry in entries):
        return entries
    numbers = [bare_numbers(entry.source.name) for entry in entries]
    if len({len(each) for each in numbers}) != 1:
        return entries
    varying = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1:
        return entries
    return [replace(entry, layer=each[varying[0]]) for entry, each in zip(entries, numbers, strict=True)]
