"""The tensors of a compressed file as its manifest describes them, to JSON and back.

The JSON of an entry has the same length before and after its late facts (measured error, hash of the source) are
known, so that a header can be written last into a place kept for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Literal, TypeVar, get_args

from tqtool import __version__
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import LAWS, METAS, SCALE_RULES, packed_bytes
from tqtool.dumps.arrays import FLOAT_TYPES
from tqtool.dumps.datafiles import DUMP_FORMATS, DumpFormat
from tqtool.dumps.layouts import MAX_AXES, MIN_AXES
from tqtool.dumps.safetensors import Header, damaged, load_json
from tqtool.errors import TqError
from tqtool.escapes import parser_reason

FORMAT = "tqtool"
VERSION = "1.0"
LAYOUT = "lsb-dense"
ROTATION = "hadamard-signs"
TENSOR_TYPES = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}  # safetensors' names of the types of parts
OWN = "tq."  # begins the names of the format's own tensors
ERROR_WIDTH = 14  # of "%.8e"
JSON_TYPES = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "an object"}

TensorKind = Literal["k", "v", "generic"]
TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A tensor of the source that is stored as codes."""

    name: str
    dtype: str  # of the source: f16, bf16, f32, f64
    shape: tuple[int, ...]  # of the source
    axis: int  # of the source's axes, the one that vectors lie along
    kind: TensorKind
    spec: CodecSpec
    source_sha256: str | None = None  # of the source's bytes of this tensor; None: not computed
    error: float | None = None  # relative squared error, measured; None: not measured
    big_endian: bool = False  # the source's byte order, to be restored

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape without the vector axis: that of the codes, but for their last axis."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def count(self) -> int:
        """The number of vectors."""
        return prod(self.lead)

    @property
    def part_names(self) -> dict[str, str]:
        """The names of the tensors that hold its parts, by those of `CodecSpec.parts`."""
        return {part: f"{self.name}.{part}" for part in self.spec.parts}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type and shape of every tensor that decoding needs, by name."""
        spec = self.spec
        return {
            **{name: ("F32", (count,)) for name, count in zip(table_names(spec), _table_sizes(spec), strict=True)},
            signs_name(spec): ("U8", (packed_bytes(spec.dim, 1),)),
            **{
                self.part_names[name]: (TENSOR_TYPES[part.dtype], (*self.lead, *part.shape))
                for name, part in reversed(spec.parts.items())
            },
        }


def table_names(spec: CodecSpec) -> tuple[str, str]:
    """Return the names of the tensors of boundaries and centroids."""
    book = f"{spec.law}.{spec.dim}.{spec.bits}"
    return f"{OWN}boundaries.{book}", f"{OWN}centroids.{book}"


def signs_name(spec: CodecSpec) -> str:
    """Return the name of the tensor of sign bits."""
    return f"{OWN}signs.{spec.dim}"


def _table_sizes(spec: CodecSpec) -> tuple[int, int]:
    return 2**spec.bits - 1, 2**spec.bits


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor of the source that is stored as it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    big_endian: bool = False  # the source's byte order, to be restored

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return its type and shape, by name."""
        return {self.name: (self.dtype.upper(), self.shape)}


Entry = Compressed | Copied


def file_metadata(entries: Sequence[Entry], source: DumpFormat, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the `__metadata__` of a container."""
    manifest = {"source": source, "metadata": metadata} if metadata else {"source": source}
    described = ",".join(f"{_json(entry.name)}:{_describe(entry)}" for entry in entries)
    return {
        "format": FORMAT,
        "tq_version": VERSION,
        "tq_requires": "",
        "tq_producer": f"tqtool {__version__}",
        "tq_manifest": f'{_json(manifest)[:-1]},"tensors":{{{described}}}}}',
    }


def _describe(entry: Entry) -> str:
    """Return the manifest's JSON for an entry, of the same length whatever its late facts."""
    order = {"byte_order": "big"} if entry.big_endian else {}  # absent in files of little-endian sources
    if isinstance(entry, Copied):
        return _json({"shape": entry.shape, "dtype": entry.dtype, "copied": True} | order)
    spec = entry.spec
    known = {
        "shape": entry.shape,
        "dtype": entry.dtype,
        "axis": entry.axis,
        "kind": entry.kind,
        "bits": spec.bits,
        "law": spec.law,
        "scale_rule": spec.scale_rule,
        "meta": spec.meta,
        "seed": spec.seed,
        "rotation": ROTATION,
        "layout": LAYOUT,
    } | order
    # Inside the header the manifest is a string: two quotes become four characters.
    sha256 = "null" + 64 * " " if entry.source_sha256 is None else _json(entry.source_sha256)
    error = "null" if entry.error is None else f"{entry.error:.8e}"
    if len(error) > ERROR_WIDTH:  # below 1e-99
        error = f"{entry.error:.7e}"
    return f'{_json(known)[:-1]},"source_sha256":{sha256},"error":{error.ljust(ERROR_WIDTH)}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parse_manifest(header: Header) -> tuple[tuple[Entry, ...], DumpFormat, dict[str, str]]:
    """Return a container's entries, its source's format and metadata; `IntegrityError` if anything does not fit."""
    label = header.label
    try:
        manifest = _object(load_json(header.metadata.get("tq_manifest", "")))
        source, metadata = _one_of(manifest, "source", DUMP_FORMATS), _object(manifest.get("metadata", {}))
        for key, value in metadata.items():
            if not isinstance(value, str):
                raise ValueError(f"metadata {key!r} is {value!r}, not text")
        described = _fact(manifest, "tensors", dict)
    except (ValueError, RecursionError) as error:
        raise damaged(label, f"manifest: {parser_reason(error)}") from error
    entries = tuple(_named_entry(label, name, facts) for name, facts in described.items())
    promised: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in entries:
        promised |= entry.tensors()
    there = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for name, place in promised.items():
        if there.get(name) != place:
            raise damaged(label, f"tensor {name!r} should be {place[0]} {place[1]}")
    return entries, source, metadata


def _named_entry(label: str, name: str, facts: Any) -> Entry:
    try:
        return _entry(name, _object(facts))
    except (ValueError, TqError) as error:  # of the codec: a width or length that it does not have
        raise damaged(label, f"manifest: tensor {name!r}: {parser_reason(error)}") from error


def _entry(name: str, facts: dict[str, Any]) -> Entry:
    shape, dtype = tuple(_fact(facts, "shape", list)), _fact(facts, "dtype", str)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape is {list(shape)!r}, not a list of sizes")
    big_endian = "byte_order" in facts and _one_of(facts, "byte_order", ("big",)) == "big"
    if facts.get("copied") is True:
        return Copied(name, dtype, shape, big_endian)
    _one_of(facts, "dtype", tuple(FLOAT_TYPES))
    _one_of(facts, "rotation", (ROTATION,))
    _one_of(facts, "layout", (LAYOUT,))
    axis, bits, seed = (_fact(facts, key, int) for key in ("axis", "bits", "seed"))
    if not (MIN_AXES <= len(shape) <= MAX_AXES and 0 <= axis < len(shape)):
        raise ValueError(f"axis {axis} of an array of shape {shape}; {MIN_AXES} to {MAX_AXES} axes are possible")
    sha256 = _fact(facts, "source_sha256", str, type(None))
    if sha256 is not None and len(sha256) != 64:
        raise ValueError(f"source_sha256 is {sha256!r}, not 64 digits")
    error = _fact(facts, "error", float, type(None))
    if error is not None and not isfinite(error):
        raise ValueError(f"error is {error!r}, not a number")
    spec = CodecSpec(
        shape[axis],
        bits,
        _one_of(facts, "law", LAWS),
        _one_of(facts, "scale_rule", SCALE_RULES),
        _one_of(facts, "meta", METAS),
        seed,
    )
    return Compressed(name, dtype, shape, axis, _one_of(facts, "kind", TENSOR_KINDS), spec, sha256, error, big_endian)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    return value


def _fact(facts: Mapping[str, Any], key: str, *types: type) -> Any:
    """Return a fact of one of the types; `ValueError`, in words, if it is missing or of another type."""
    if key not in facts:
        raise ValueError(f"{key} is missing")
    if type(facts[key]) not in types:
        raise ValueError(f"{key} is {facts[key]!r}, not {JSON_TYPES[types[0]]}")
    return facts[key]


def _one_of(facts: Mapping[str, Any], key: str, words: tuple[Word, ...]) -> Word:
    """Return a fact that is one of the words; `ValueError` if it is missing or none of them."""
    value = _fact(facts, key, str)
    if value not in words:
        raise ValueError(f"{key} {value!r} is none of {', '.join(words)}")
    return words[words.index(value)]
