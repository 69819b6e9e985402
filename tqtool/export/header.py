"""The C header of codebooks: tables in both domains, their checksums, and functions that look them up."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import __version__
from tqtool.codec.codebook import Codebook, lloyd_max
from tqtool.codec.terms import Law
from tqtool.errors import UsageError
from tqtool.templating import template

HEADER_BITS = 4  # the struct of the specification holds 16 levels
HEADER_LEVELS = 2**HEADER_BITS
HEADER_BOUNDARIES = HEADER_LEVELS - 1
ROW_WORDS = 2 + HEADER_BOUNDARIES + HEADER_LEVELS  # bits, levels, tables; 32 bits each
FLT_MAX = np.finfo(np.float32).max  # as an unused boundary: nothing counts it, and a full count stays valid

METHODS: dict[Law, str] = {
    "beta": "Beta(d/2, d/2), the specification's law (--law beta)",
    "sphere": "Beta((d-1)/2, (d-1)/2), a coordinate of a random unit vector (--law sphere)",
    "gaussian": "the normal law of variance 1/d (--law gaussian)",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """One table as the C struct holds it, padded, with the vector length it is for."""

    dim: int
    bits: int
    levels: int
    boundaries: NDArray[np.float32]  # (15,)
    centroids: NDArray[np.float32]  # (16,)
    distortion: float

    @property
    def payload(self) -> bytes:
        """What the checksums cover."""
        head = struct.pack("<3i", self.dim, self.bits, self.levels)
        return head + self.boundaries.astype("<f4").tobytes() + self.centroids.astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class Tables:
    """All rows of one domain."""

    name: Literal["unit", "centered"]
    rows: tuple[TableRow, ...]

    @property
    def payload(self) -> bytes:
        """The rows' bytes in order."""
        return b"".join(row.payload for row in self.rows)

    @property
    def crc32(self) -> int:
        """CRC-32 (zlib's polynomial) of the payload."""
        return zlib.crc32(self.payload)


def codebook_header(dims: Sequence[int], bits: Sequence[int], law: Law = "beta") -> str:
    """Return the text of tq_codebooks.h for every pair of `dims` and `bits` (1 to 4).

    Raises: `UsageError` if a width does not fit the struct.
    """
    for width in bits:
        if width > HEADER_BITS:
            raise UsageError(
                f"{width} bits do not fit the C header, whose struct holds {HEADER_LEVELS} levels",
                code="usage",
                hint="gen-codebooks --format json or npz writes 5 to 8 bits",
            )
    books = [lloyd_max(dim, width, law) for dim in dims for width in bits]
    unit = Tables("unit", tuple(_row(book, *book.unit_tables) for book in books))
    centered = Tables("centered", tuple(_row(book, *book.tables) for book in books))
    lists = f"--dims {','.join(map(str, dims))} --bits {','.join(map(str, bits))}"
    return template("tq_codebooks.h.j2", {"c_float": c_float})(
        version=__version__,
        command=f"tqtool gen-codebooks {lists} --law {law}",
        method=METHODS[law],
        dims=dims,
        books=books,
        unit=unit,
        centered=centered,
        sha256=hashlib.sha256(unit.payload + centered.payload).hexdigest(),
        max_boundaries=HEADER_BOUNDARIES,
        max_levels=HEADER_LEVELS,
        row_bytes=4 * ROW_WORDS,
    )


def c_float(value: float) -> str:
    """Return a C literal that reads back as exactly float32(value).

    Nine significant digits name every float32; hexadecimal literals are an extension before C++17.
    """
    text = f"{np.float32(value):.9g}"
    return (text if "." in text or "e" in text else text + ".0") + "f"


def _row(book: Codebook, boundaries: NDArray[np.float32], centroids: NDArray[np.float32]) -> TableRow:
    spare = HEADER_LEVELS - len(centroids)
    return TableRow(
        book.dim,
        book.bits,
        len(centroids),
        np.pad(boundaries, (0, spare), constant_values=FLT_MAX),
        np.pad(centroids, (0, spare)),
        book.distortion,
    )
