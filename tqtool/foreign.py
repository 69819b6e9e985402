"""Quantizer tables written by others: lists of numbers found in source text, JSON, arrays or on the command line.

A list counts as a table if it ascends or descends strictly and has 2^b numbers (levels), 2^(b-1) positive ones (the
upper half of a symmetric table), or 2^b - 1 (boundaries). Nothing is executed and no type is believed: C, C++, Rust,
Python and shader sources all write such lists in braces or brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.codebook import LAWS, Law
from tqtool.errors import InputError
from tqtool.files import FilePath, open_input
from tqtool.rotation import MAX_DIM, MIN_DIM

Array = NDArray[np.float64]

MAX_TEXT = 4 << 20  # bytes; 700 tables in C take less than 1 MiB, and a dump taken for one should fail at once
MAX_LEVELS = 256
NAME_DEPTH = 8  # how far up a list looks for a name
SMALLEST = 1e-9  # of a table's largest level: below, squares would vanish
PADDING = 1e6  # an unused boundary of a fixed-size struct is FLT_MAX or infinity; no level is so large

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|#[ \t][^\n]*", re.DOTALL)  # `#define` stays: it may hold a table
_TOKEN = re.compile(
    r"""(?P<number>[-+]?\s*(?:0[xX][0-9a-fA-F]*\.?[0-9a-fA-F]*[pP][-+]?\d+
                           |(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))(?:_?f(?:16|32|64)|[fFlLhHuU])?(?![\w.])
      |(?P<name>[A-Za-z_]\w*|"[^"\n]*"|'[^'\n]*')
      |(?P<mark>\S)""",
    re.VERBOSE,
)
_BOUNDARY_NAME = re.compile(r"bound|thresh|midpoint|edge|decision", re.IGNORECASE)
_LEVEL_NAME = re.compile(r"centroid|level|code|lloyd|recon|table|value", re.IGNORECASE)
_DIM_NAME = re.compile(r"(?:^|[^a-z])(?:d|dim|head_dim|hd)[_=]?(\d{2,4})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTable:
    """Levels as somebody wrote them, ascending, with what the file says about them."""

    name: str
    levels: Array  # (2**bits,)
    boundaries: Array | None  # (2**bits - 1,), None where the file has none: then midpoints
    rounding: Array  # (2**bits,) half a unit of each level's last printed digit; 0 for binary files
    dim: int | None
    law: Law | None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return len(self.levels).bit_length() - 1


@dataclass(slots=True)
class _List:
    """A list or record as read: its numbers, and the one it stands in."""

    own_name: str  # empty where it is an item of its parent
    parent: _List | None = None
    index: int = 0  # in the parent
    texts: list[str] = field(default_factory=list)
    children: int = 0
    plain: bool = True  # nothing but numbers between commas
    dim: int | None = None

    @property
    def name(self) -> str:
        """Its name, or that of a list around it with the indices that lead here."""
        indices, outer = "", self
        for _ in range(NAME_DEPTH):
            if outer.own_name or outer.parent is None:
                break
            indices, outer = f"[{outer.index}]{indices}", outer.parent
        return (outer.own_name or "list") + indices


def read_tables(path: FilePath) -> list[ForeignTable]:
    """Return the tables of a file, which may be source text, JSON, .npy or .npz; `-` is standard input.

    Raises: `InputError`, code `no-tables` if there is none.
    """
    with open_input(path) as file:
        start = file.read(8)
        if start.startswith((b"PK\x03\x04", b"\x93NUMPY")):
            return _require(list(_from_arrays(path)), path)
        raw = start + file.read(MAX_TEXT)
    shown = "stdin" if str(path) == "-" else str(path)
    text = raw.decode("utf-8-sig", "replace")  # a comment in Latin-1 is no reason to refuse
    if "\0" in text or len(raw) > MAX_TEXT:
        raise InputError(f"{shown}: not a C header, JSON or npz of tables", code="no-tables", path=shown)
    return _require(parse_tables(text), path)


def parse_tables(text: str) -> list[ForeignTable]:
    """Return the tables of a text: JSON, a bare list of levels, or source code."""
    law = _law_of(text) if "tqtool" in text else None  # our own files name their law; in others the word is chance
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            document = json.loads(stripped, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
            return _tables(list(_json_lists(document, "", None)), law)
        except (ValueError, RecursionError):
            pass  # a list in another notation
    if numbers := bare_list(stripped):
        return _tables([_List("levels", texts=numbers)], law)
    return _tables(list(_source_lists(text)), law)


def bare_list(text: str) -> list[str] | None:
    """Return the numbers of a text that holds nothing but numbers, commas and spaces, None for any other text."""
    parts = [part for part in re.split(r"[,;\s]+", text.strip("[](){} \t\n")) if part]
    try:
        [float(part) for part in parts]
    except ValueError:
        return None
    return parts or None


def _require(tables: list[ForeignTable], path: FilePath) -> list[ForeignTable]:
    if not tables:
        raise InputError(
            f"{path}: holds no table of levels: no list of 2, 4, 8 ... 256 numbers that ascend",
            code="no-tables",
            hint="or give the levels: tqtool check-codebooks --dim 128 -0.13,-0.04,0.04,0.13",
            path=str(path),
        )
    return tables


class _Number(str):
    """A number of a JSON document, as written."""

    __slots__ = ()


def _json_lists(value: Any, name: str, dim: int | None) -> Iterator[_List]:
    if isinstance(value, dict):
        known = [value[key] for key in ("dim", "head_dim", "d") if isinstance(value.get(key), _Number)]
        dim = _as_dim(known[0]) if known else dim
        record = _List(name)
        for key, inner in value.items():
            for found in _json_lists(inner, f"{name}.{key}" if name else key, _as_dim(key) or dim):
                found.parent = found.parent or record
                yield found
    elif isinstance(value, list):
        if value and all(isinstance(item, _Number) for item in value):
            yield _List(name, texts=list(value), dim=dim)
        else:
            for index, inner in enumerate(value):
                yield from _json_lists(inner, f"{name}[{index}]", dim)


def _as_dim(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 5 and int(text) >= MIN_DIM else None


def _source_lists(text: str) -> list[_List]:
    """Return the innermost lists of numbers of source text; rows of records get the dim that a list of dims gives."""
    dims: list[int] = []
    lists: list[_List] = []
    for found in _bracketed(_COMMENT.sub(" ", text)):
        if "dim" in found.name.lower() and all(_as_dim(number) for number in found.texts):
            dims = [int(number) for number in found.texts]
        else:
            lists.append(found)
    for found in lists:
        record = found.parent
        if dims and record and record.parent and record.parent.children % len(dims) == 0:
            found.dim = dims[record.index * len(dims) // record.parent.children]
            found.own_name = record.name
    return lists


def _bracketed(text: str) -> Iterator[_List]:
    """Yield every list that holds numbers and nothing else."""
    stack: list[_List] = []
    subscripts = 0  # `[` after a name declares a size or picks an item: its numbers belong to no list
    name, previous = "", ""
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup, token.group()
        inside = stack[-1] if stack else None
        if subscripts:
            subscripts += (word == "[") - (word == "]")
        elif word == "[" and previous in ("name", "]", ">"):
            subscripts = 1
        elif word in ("{", "["):
            index = inside.children if inside else 0
            nested = inside and previous in ("{", "[", ",")
            stack.append(_List("" if nested else name, inside, index))
            if inside:
                inside.children += 1
        elif word in ("}", "]"):
            if inside:
                stack.pop()
                if inside.plain and inside.texts and not inside.children:
                    yield inside
        elif kind == "name":
            name = word.strip("\"'")
            if inside and name in ("FLT_MAX", "INFINITY", "HUGE_VALF"):
                inside.texts.append("inf")
            elif inside:
                inside.plain = False
        elif inside and kind == "number" and previous != "number":
            inside.texts.append(token["number"].replace(" ", ""))
        elif inside and word not in (",", "\\"):
            inside.plain = False
        previous = kind if kind in ("name", "number") else word


def _from_arrays(path: FilePath) -> Iterator[ForeignTable]:
    from tqtool.datafiles import open_arrays

    lists: list[_List] = []
    for source in open_arrays(path):
        if source.shape and source.count <= MAX_DIM and source.dim <= MAX_LEVELS:
            values = source.read().astype(np.float64).reshape(-1, source.dim)
            names = [source.name] if len(values) == 1 else [f"{source.name}[{row}]" for row in range(len(values))]
            lists += [_List(name, texts=[repr(float(x)) for x in row]) for name, row in zip(names, values, strict=True)]
    for table in _tables(lists, None):
        yield ForeignTable(
            table.name, table.levels, table.boundaries, np.zeros_like(table.levels), table.dim, table.law
        )


def _tables(lists: Sequence[_List], law: Law | None) -> list[ForeignTable]:
    """Make tables of the lists that can be levels, each with the boundaries nearest to it that fit."""
    levels: list[tuple[int, _List, Array, Array]] = []
    boundaries: list[tuple[int, _List, Array]] = []
    for place, found in enumerate(lists):
        values, rounding = _ascending(found.texts)
        count = len(values)
        if not np.all(np.isfinite(values)) or not np.all(np.diff(values) > 0):
            continue
        if np.max(np.abs(values), initial=0) < SMALLEST and count > 1:
            continue
        if len(lists) > 1 and not any(re.search(r"[.eEpP]", text) for text in found.texts):
            continue  # whole numbers: sizes, dims, indices
        if count == 2 and values[0] <= 0 != values.sum() and not _LEVEL_NAME.search(found.name):
            continue  # a range, more likely than a table of one bit
        if 2 <= count <= MAX_LEVELS and _is_power(count) and not _BOUNDARY_NAME.search(found.name):
            if values[0] > 0 and not 0.4 < values.mean() < 0.6:  # the upper half of a symmetric table
                values, rounding = np.append(-values[::-1], values), np.append(rounding[::-1], rounding)
            levels.append((place, found, values, rounding))
        elif _is_power(count + 1):
            boundaries.append((place, found, values))
        elif _is_power(count - 1):  # boundaries with the ends of the line
            boundaries.append((place, found, values[1:-1]))
    tables = []
    for place, found, values, rounding in levels:
        fitting = [
            (found.parent is None or found.parent is not other.parent, abs(place - at), cuts)
            for at, other, cuts in boundaries
            if len(cuts) == len(values) - 1 and (found.parent is other.parent is not None or _interleave(values, cuts))
        ]
        best = min(fitting, key=lambda item: item[:2], default=None)
        dim = found.dim or (_as_dim(named[1]) if (named := _DIM_NAME.search(found.name)) else None)
        cuts = best[2] if best else None
        tables.append(ForeignTable(found.name, values, cuts, rounding, dim, _law_of(found.name) or law))
    return tables


def _is_power(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def _ascending(texts: Sequence[str]) -> tuple[Array, Array]:
    """Return the numbers of a list and their rounding, ascending, without the padding of a fixed-size struct."""
    pairs = [_number(text) for text in texts]
    while pairs and not abs(pairs[-1][0]) < PADDING:
        pairs.pop()
    while len(pairs) > 1 and pairs[-1][0] == 0 <= pairs[-2][0]:
        pairs.pop()
    values = np.array([value for value, _ in pairs], np.float64)
    rounding = np.array([half for _, half in pairs], np.float64)
    descends = len(values) > 1 and values[0] > values[-1]
    return (values[::-1], rounding[::-1]) if descends else (values, rounding)


def _number(text: str) -> tuple[float, float]:
    """Return a literal's value and half a unit of its last digit."""
    if "x" in text.lower():
        return float.fromhex(text), 0.0
    mantissa, _, exponent = text.lower().partition("e")
    try:
        return float(text), 0.5 * 10.0 ** (int(exponent or "0") - len(mantissa.partition(".")[2]))
    except (ValueError, OverflowError):  # an exponent of a thousand digits
        return float(text), 0.0


def _interleave(levels: Array, cuts: Array) -> bool:
    return bool(np.all((levels[:-1] < cuts) & (cuts < levels[1:])))


def _law_of(text: str) -> Law | None:
    """Return the law that a header's command line, a JSON document or the name of an array states."""
    found = re.search(r"(?:--law |\"law\": \")(\w+)", text) or re.match(r"([a-z]+)_d\d", text)
    return next((law for law in LAWS if found and law == found[1]), None)
