"""A container back to arrays, in blocks: each is read, decoded and written to its place on its own."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from tqtool.codec.codec import MAX_SCALE, decode
from tqtool.codec.reference import decode_with
from tqtool.codec.rotation import signs
from tqtool.codec.spec import PART_TYPES, Encoded
from tqtool.container.format import Container
from tqtool.container.manifest import Compressed, Entry, signs_name, table_names
from tqtool.dumps.arrays import BLOCK_BYTES, FLOAT_TYPES, Box, Store, boxes_over
from tqtool.dumps.datafiles import DUMP_FORMATS, DumpFormat
from tqtool.dumps.safetensors import Tensor, header_bytes, stored_type, tensor_bytes
from tqtool.errors import InputError, IntegrityError, UsageError
from tqtool.files import Advance
from tqtool.parallel import ordered_map
from tqtool.rawfiles import WholeFile, copy_bytes, unnamed_temporary

Piece = Callable[[], int]
BLOCK_VALUES = BLOCK_BYTES // 4


@dataclass(frozen=True, slots=True)
class Restored:
    """One tensor as it will be written."""

    entry: Entry
    dtype: str  # as `FLOAT_TYPES` names it, or a copied tensor's own

    def stored(self, form: DumpFormat) -> np.dtype[np.generic]:
        """Return the type of its values in a file; NumPy's formats have bfloat16 as 16-bit integers only."""
        if form == "safetensors":
            return stored_type(self.dtype)
        dtype = np.dtype("<u2") if self.dtype == "bf16" else stored_type(self.dtype)
        return dtype.newbyteorder(">") if self.entry.big_endian else dtype

    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.entry.shape) * stored_type(self.dtype).itemsize


def select(container: Container, names: Sequence[str], dtype: str | None) -> tuple[Restored, ...]:
    """Return the tensors to restore, in the source's order; all without `names`. `InputError`: `no-tensors`."""
    known = {entry.name for entry in container.entries}
    for name in names:
        if name not in known:
            raise InputError(
                f"{container.path}: no tensor {name!r}; found {', '.join(sorted(known)[:8])}",
                code="no-tensors",
                path=container.path,
            )
    return tuple(
        Restored(
            entry, dtype if dtype and entry.dtype in FLOAT_TYPES and isinstance(entry, Compressed) else entry.dtype
        )
        for entry in container.entries
        if not names or entry.name in names
    )


def check_damage(container: Container, chosen: Sequence[Restored], threads: int | None = None) -> None:
    """Raise `IntegrityError` ("checksum") if a chunk that decoding these tensors needs is damaged."""
    needed: set[str] = set()
    for each in chosen:
        needed |= each.entry.tensors().keys()
    found = list(container.damage(needed, threads=threads))
    if not found:
        return
    broken = {damage.tensor for damage in found}
    whole = [entry.name for entry in container.entries if not broken & entry.tensors().keys()]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise IntegrityError(
        f"{container.path}: {found[0]}{more}",
        code="checksum",
        hint=f"undamaged and readable with --name: {', '.join(whole)}" if whole else "copy it again",
        path=container.path,
    )


def restored_size(chosen: Sequence[Restored], form: DumpFormat) -> int:
    """Return the bytes of the output, headers of .npz members at most."""
    return sum(each.nbytes() for each in chosen) + (len(chosen) + 1) * (1 << 10)


def restore(
    container: Container,
    chosen: Sequence[Restored],
    form: DumpFormat,
    file: WholeFile,
    *,
    threads: int | None = None,
    advance: Advance = lambda amount: None,
) -> None:
    """Write the tensors to an empty file. Raises `IntegrityError` for impossible metadata, `InputError` ("range")."""
    if form == "npy":
        if len(chosen) != 1:
            raise UsageError(
                f"{container.path}: holds {len(chosen)} tensors, a .npy file one",
                code="usage",
                hint="pick one with --name, or write -o NAME.npz or -o NAME.safetensors",
                path=container.path,
            )
        _restore_npy(container, chosen[0], file, threads, advance)
    elif form == "npz":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for each in chosen:
                with unnamed_temporary() as member:
                    _restore_npy(container, each, member, threads, advance)
                    size = member.seek(0, 2)
                    member.seek(0)
                    # no clock in an output, and no way out of the folder that somebody unpacks it to
                    place = zipfile.ZipInfo(f"{_inside(each.entry.name)}.npy", (1980, 1, 1, 0, 0, 0))
                    place.file_size = size
                    with archive.open(place, "w", force_zip64=size > 1 << 31) as target:
                        copy_bytes(member, target)
    elif form == "safetensors":
        tensors: list[Tensor] = []
        position = 0
        for each in chosen:
            tag, shape = each.dtype.upper(), each.entry.shape
            tensors.append(Tensor(each.entry.name, tag, shape, position, position + tensor_bytes(tag, shape)))
            position = tensors[-1].stop
        header = header_bytes(tensors, container.metadata, align=8)
        file.truncate(len(header) + position)
        file.write(header)
        stores = [
            Store(file, len(header) + tensor.start, tensor.shape, each.stored(form))
            for each, tensor in zip(chosen, tensors, strict=True)
        ]
        units = (unit for each, store in zip(chosen, stores, strict=True) for unit in _units(container, each, store))
        _run(units, threads, advance)
    else:
        assert_never(form)


def _inside(name: str) -> str:
    return "/".join("_" if part in ("", ".", "..") else part for part in name.replace("\\", "/").split("/"))


def _restore_npy(container: Container, each: Restored, file: WholeFile, threads: int | None, advance: Advance) -> None:
    dtype = each.stored("npy")
    shape = each.entry.shape
    facts = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, facts)
    start = file.tell()
    file.truncate(start + prod(shape) * dtype.itemsize)
    _run(_units(container, each, Store(file, start, shape, dtype)), threads, advance)


def _run(units: Iterator[Piece], threads: int | None, advance: Advance) -> None:
    for count in ordered_map(lambda unit: unit(), units, threads=threads):
        advance(count)


def _units(container: Container, each: Restored, target: Store) -> Iterator[Piece]:
    """Yield the pieces of work that restore one tensor into its place; each returns the bytes it wrote."""
    entry = each.entry
    if isinstance(entry, Compressed):
        decoder = _Decoder(container, entry)
        vectors = max(BLOCK_VALUES // entry.spec.dim, 1)
        boxes = boxes_over(entry.lead, tuple(range(len(entry.lead))), vectors)
        kind = FLOAT_TYPES[each.dtype]
        bits = target.dtype.kind == "u"  # bfloat16 as integers

        def restore_box(box: Box) -> int:
            with np.errstate(over="ignore"):
                values = decoder.decode(box).astype(kind)
            if not np.isfinite(values).all():
                raise InputError(
                    f"{container.path}: tensor {entry.name!r} has values beyond {each.dtype}",
                    code="range",
                    hint="add --dtype f32",
                    path=container.path,
                )
            place = (*box[: entry.axis], range(entry.spec.dim), *box[entry.axis :])
            target.write(place, np.moveaxis(values.view("<u2") if bits else values, -1, entry.axis))
            return values.nbytes

        yield from (partial(restore_box, box) for box in boxes)
    else:
        tensor = container.tensor(entry.name)
        source = Store(container.opener, container.header.data + tensor.start, entry.shape, stored_type(entry.dtype))

        def copy_box(box: Box) -> int:
            values = source.read(box)
            target.write(box, values)
            return values.nbytes

        boxes = boxes_over(entry.shape, tuple(range(len(entry.shape))), BLOCK_VALUES // 2)
        yield from (partial(copy_box, box) for box in boxes)


class _Decoder:
    """Blocks of one compressed tensor, decoded with the tables that lie in the file."""

    def __init__(self, container: Container, entry: Compressed) -> None:
        self._path, self._entry, spec = container.path, entry, entry.spec
        data = container.header.data

        def store(name: str, dtype: np.dtype[np.generic]) -> Store:
            tensor = container.tensor(name)
            return Store(container.opener, data + tensor.start, tensor.shape, dtype)

        self._parts = {
            name: (store(entry.part_names[name], PART_TYPES[part.dtype]), part) for name, part in spec.parts.items()
        }
        boundaries, centroids = (np.frombuffer(container.whole(name), "<f4") for name in table_names(spec))
        bits = np.frombuffer(container.whole(signs_name(spec)), np.uint8)
        self._centroids = centroids
        self._signs = np.where(np.unpackbits(bits, bitorder="little")[: spec.dim], -1, 1).astype(np.float32)
        finite = np.isfinite(centroids).all() and np.isfinite(boundaries).all()
        if not (finite and (np.diff(centroids) > 0).all() and (np.diff(boundaries) > 0).all()):
            raise self._impossible("its table is not ascending")
        # The file's tables count. They are ours, and the fast path serves, unless another release or tool wrote it.
        same_table = np.array_equal(centroids, spec.centroids)
        self._own = same_table and np.array_equal(self._signs, signs(spec.seed, spec.dim))

    def decode(self, box: Box) -> NDArray[np.float32]:
        """Return the restored vectors of a box over the leading axes."""
        spec = self._entry.spec
        parts: dict[str, NDArray[Any]] = {
            name: store.read((*box, *map(range, part.shape))) for name, (store, part) in self._parts.items()
        }
        encoded = Encoded(spec, **parts)
        with np.errstate(invalid="ignore"):  # NaN is what is looked for
            wide = encoded.meta.astype(np.float32)
            possible = bool(((wide >= 0) & (wide <= MAX_SCALE)).all())
        if not possible:
            raise self._impossible("a scale or norm is negative, not finite or beyond 2^126")
        if self._own:
            return decode(encoded, threads=1)
        vectors = encoded.reshape(-1)
        out = np.empty(vectors.shape, np.float32)
        decode_with(vectors.codes, vectors.scales, self._centroids, self._signs, out)
        return out.reshape(encoded.shape)

    def _impossible(self, what: str) -> IntegrityError:
        message = f"{self._path}: tensor {self._entry.name!r}: {what}"
        return IntegrityError(message, code="metadata", path=self._path)


def form_of(path: str | None, container: Container) -> DumpFormat:
    """Return the format to write: by the output's suffix, else the source's."""
    suffix = Path(path).suffix.lstrip(".") if path else ""
    return next((form for form in DUMP_FORMATS if form == suffix), container.source)
