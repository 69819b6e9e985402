"""Quantizer tables written by others, found in source text, JSON or arrays.

A list counts as a table if it ascends or descends strictly and has 2^b numbers (levels), 2^(b-1) positive ones (the
upper half of a symmetric table), or 2^b - 1 (boundaries).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tqtool.codec.rotation import MAX_DIM
from tqtool.codec.terms import LAWS, MAX_BITS, Law
from tqtool.dtypes import Float64Array
from tqtool.dumps import npy, npz
from tqtool.dumps.datafiles import DataFile, float_arrays, open_file
from tqtool.dumps.inputs import open_input
from tqtool.dumps.safetensors import is_header
from tqtool.errors import InputError
from tqtool.files import FilePath
from tqtool.foreign.listings import NumberList, as_dim, literal, number_lists

MAX_TEXT = 4 << 20  # bytes; 700 tables in C take less than 1 MiB, and a dump taken for one should fail at once
MAX_LEVELS = 2**MAX_BITS
SMALLEST = 1e-9  # of a table's largest level: below, squares would vanish
LARGEST = 1e100  # of the values of any list: squares of larger ones would overflow
PADDING = 1e6  # an unused boundary of a fixed-size struct is FLT_MAX or infinity; no level is so large

_BOUNDARY_NAME = re.compile(r"bound|thresh|midpoint|edge|decision", re.IGNORECASE)
_LEVEL_NAME = re.compile(r"centroid|level|code|lloyd|recon|table|value", re.IGNORECASE)
_DIM_NAME = re.compile(r"(?:^|[^a-z])(?:d|dim|head_dim|hd)[_=]?(\d{2,4})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTable:
    """Levels as somebody wrote them, ascending, with what the file says about them."""

    name: str
    levels: Float64Array  # (2**bits,)
    boundaries: Float64Array | None  # (2**bits - 1,), None where the file has none: then midpoints
    rounding: Float64Array  # (2**bits,) half a unit of each level's last printed digit; 0 for binary files
    dim: int | None
    law: Law | None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return len(self.levels).bit_length() - 1


def read_tables(path: FilePath) -> list[ForeignTable]:
    """Return the tables of a file: source text, JSON, .npy, .npz or .safetensors; `-` is standard input.

    Raises: `InputError`, code `no-tables` if there is none.
    """
    shown = "stdin" if str(path) == "-" else str(path)
    with open_input(path) as file:
        start = file.read(16)
        if start.startswith((npy.MAGIC, *npz.MAGICS)) or is_header(start):
            found = _array_tables(open_file(path, file=file))
        else:
            raw = start + file.read(MAX_TEXT)
            text = raw.decode("utf-8-sig", "replace")  # a comment in Latin-1 is no reason to refuse
            if "\0" in text or len(raw) > MAX_TEXT:
                raise InputError(f"{shown}: not a C header, JSON or npz of tables", code="no-tables", path=shown)
            found = parse_tables(text)
    if not found:
        raise InputError(
            f"{shown}: holds no table of levels: no list of 2, 4, 8 ... {MAX_LEVELS} numbers that ascend",
            code="no-tables",
            hint="or give the levels: tqtool check-codebooks --dim 128 -0.13,-0.04,0.04,0.13",
            path=shown,
        )
    return found


def parse_tables(text: str) -> list[ForeignTable]:
    """Return the tables of a text: JSON, a bare list of levels, or source code."""
    law = _law_of(text) if "tqtool" in text else None  # our own files name their law; in others the word is chance
    return _tables(number_lists(text), law)


def _array_tables(file: DataFile) -> list[ForeignTable]:
    """Return the tables that are rows of arrays: binary numbers, so without rounding."""
    lists: list[NumberList] = []
    for source in float_arrays(file):
        if source.shape and source.dim and source.count <= MAX_DIM and source.dim <= MAX_LEVELS:
            values = source.read().astype(np.float64).reshape(-1, source.dim)
            names = [source.name] if len(values) == 1 else [f"{source.name}[{row}]" for row in range(len(values))]
            rows = zip(names, values.tolist(), strict=True)
            lists += [NumberList(name, texts=[repr(value) for value in row]) for name, row in rows]
    return [replace(table, rounding=np.zeros_like(table.levels)) for table in _tables(lists, None)]


def _tables(lists: Sequence[NumberList], law: Law | None) -> list[ForeignTable]:
    """Make tables of the lists that can be levels, each with the boundaries nearest to it that fit."""
    levels: list[tuple[int, NumberList, Float64Array, Float64Array]] = []
    boundaries: list[tuple[int, NumberList, Float64Array]] = []
    for place, found in enumerate(lists):
        values, rounding = _ascending(found.texts)
        count = len(values)
        if not np.all(np.abs(values) < LARGEST) or not np.all(np.diff(values) > 0):
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
            if len(values) <= MAX_LEVELS:
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
        dim = found.dim or (as_dim(named[1]) if (named := _DIM_NAME.search(found.name)) else None)
        cuts = best[2] if best else None
        tables.append(ForeignTable(found.name, values, cuts, rounding, dim, _law_of(found.name) or law))
    return tables


def _is_power(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def _ascending(texts: Sequence[str]) -> tuple[Float64Array, Float64Array]:
    """Return the numbers of a list and their rounding, ascending, without the padding of a fixed-size struct."""
    pairs = [literal(text) for text in texts]
    while pairs and not abs(pairs[-1][0]) < PADDING:
        pairs.pop()
    while len(pairs) > 1 and pairs[-1][0] == 0 <= pairs[-2][0]:
        pairs.pop()
    values = np.array([value for value, _ in pairs], np.float64)
    rounding = np.array([half for _, half in pairs], np.float64)
    descends = len(values) > 1 and values[0] > values[-1]
    return (values[::-1], rounding[::-1]) if descends else (values, rounding)


def _interleave(levels: Float64Array, cuts: Float64Array) -> bool:
    return bool(np.all((levels[:-1] < cuts) & (cuts < levels[1:])))


def _law_of(text: str) -> Law | None:
    """Return the law that a header's command line, a JSON document or the name of an array states."""
    found = re.search(r"(?:--law |\"law\": \")(\w+)", text) or re.match(r"([a-z]+)_d\d", text)
    return next((law for law in LAWS if found and law == found[1]), None)
