"""Vectors that are encoded already, to a container and back: nothing is decoded on the way.

The file is a container like any other: `inspect` reads it, `decompress` restores its vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.codec import MAX_SCALE
from tqtool.codec.rotation import sign_bits
from tqtool.codec.spec import PART_TYPES, Encoded
from tqtool.container.compression import Writing
from tqtool.container.decompression import check_damage, select
from tqtool.container.format import Container, open_container, plan
from tqtool.container.manifest import Compressed, Copied, Entry, TensorKind, signs_name, table_names
from tqtool.dtypes import AnyArray
from tqtool.dumps.safetensors import stored_type
from tqtool.errors import IntegrityError
from tqtool.files import FilePath, write_atomically


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTensor:
    """Encoded vectors, and what they are of."""

    encoded: Encoded
    kind: TensorKind
    dtype: str  # of the vectors before: f16, bf16, f32


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a container of encoded vectors holds, by the tensors' names."""

    tensors: Mapping[str, EncodedTensor]
    copied: Mapping[str, tuple[str, AnyArray]]  # stored type, as f32, bf16, i64, and values
    metadata: Mapping[str, str]


def save_encoded(path: FilePath, contents: Contents, *, force: bool = False) -> None:
    """Write a container, whole or not at all. Raises: `OutputError`; `InputError` ("name")."""
    entries: list[Entry] = []
    for name, tensor in contents.tensors.items():
        shape = tensor.encoded.shape
        entries.append(Compressed(name, tensor.dtype, shape, len(shape) - 1, tensor.kind, tensor.encoded.spec))
    entries += [Copied(name, dtype, values.shape) for name, (dtype, values) in contents.copied.items()]
    placement = plan(entries, "safetensors", contents.metadata)
    with write_atomically(path, force=force, size=placement.size) as file:
        writing = Writing.begin(file, placement)
        for entry in entries:
            if isinstance(entry, Compressed):
                for part, values in contents.tensors[entry.name].encoded.arrays.items():
                    writing.write(entry.part_names[part], values)
        for name, (dtype, values) in contents.copied.items():
            writing.write(name, values.astype(stored_type(dtype), copy=False))
        writing.write_tables()
        writing.seal(entries)


def load_encoded(path: FilePath) -> Contents:
    """Read a container without decoding it.

    Raises: `InputError` ("not-found", "not-container"), `IntegrityError` for damage, and for codes of other tables
    than this version's ("feature"): only `decompress` reads those.
    """
    container = open_container(path)
    check_damage(container, select(container, (), None))
    tensors, copied = {}, {}
    for entry in container.entries:
        if isinstance(entry, Compressed):
            _check_tables(container, entry)
            arrays: dict[str, NDArray[Any]] = {
                name: _array(container, entry.part_names[name], PART_TYPES[part.dtype])
                for name, part in entry.spec.parts.items()
            }
            encoded = Encoded(entry.spec, **arrays)
            _check_scales(container, entry, encoded)
            tensors[entry.name] = EncodedTensor(encoded, entry.kind, entry.dtype)
        else:
            copied[entry.name] = (entry.dtype, _array(container, entry.name, stored_type(entry.dtype)))
    return Contents(tensors, copied, container.metadata)


def _array(container: Container, name: str, dtype: np.dtype[np.generic]) -> NDArray[Any]:
    values = np.frombuffer(bytearray(container.whole(name)), dtype)
    return values.reshape(container.tensor(name).shape)


def _check_tables(container: Container, entry: Compressed) -> None:
    spec = entry.spec
    tables = zip(table_names(spec), (spec.boundaries, spec.centroids), strict=True)
    own = all(np.array_equal(_array(container, name, np.dtype("<f4")), table) for name, table in tables)
    signs = _array(container, signs_name(spec), np.dtype(np.uint8))
    if not own or not np.array_equal(signs, sign_bits(spec.seed, spec.dim)):
        raise IntegrityError(
            f"{container.path}: tensor {entry.name!r} was encoded with other tables than this version's",
            code="feature",
            hint="decompress restores it",
            path=container.path,
        )


def _check_scales(container: Container, entry: Compressed, encoded: Encoded) -> None:
    with np.errstate(invalid="ignore"):  # NaN is what is looked for
        possible = ((encoded.scales >= 0) & (encoded.scales <= MAX_SCALE)).all()
    if not possible:
        text = f"{container.path}: tensor {entry.name!r}: a scale is negative, not finite or beyond 2^126"
        raise IntegrityError(text, code="metadata", path=container.path)
