"""The vocabulary of the codec: what decides the bytes of a vector, which parts it is stored in, and vectors so stored.

Everything that allocates, stores or slices encoded vectors loops over `CodecSpec.parts`; a new part is added there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tqtool.codec.codebook import Codebook, lloyd_max
from tqtool.codec.rotation import hadamard_order
from tqtool.codec.terms import LAWS, MAX_BITS, META_PARTS, METAS, SCALE_RULES, Law, Meta, Part, ScaleRule, packed_bytes
from tqtool.errors import UsageError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_TYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))  # of vectors
PART_TYPES = {"uint8": np.dtype(np.uint8), "float32": np.dtype(np.float32), "bfloat16": BFLOAT16}  # by `Part.dtype`


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """Everything that decides the bytes of an encoded vector. Raises `UsageError` or `InputError` ("dim")."""

    dim: int
    bits: int = 4
    law: Law = "beta"
    scale_rule: ScaleRule = "match"
    meta: Meta = "range"
    seed: int = 0

    def __post_init__(self) -> None:
        hadamard_order(self.dim)
        if not 1 <= self.bits <= MAX_BITS:
            raise UsageError(f"{self.bits} bits: a code has 1 to {MAX_BITS} bits", code="usage")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed {self.seed} is not a 64-bit unsigned number", code="usage")
        for value, allowed, what in (
            (self.law, LAWS, "law"),
            (self.scale_rule, SCALE_RULES, "scale rule"),
            (self.meta, METAS, "metadata form"),
        ):
            if value not in allowed:
                raise UsageError(f"{what} {value!r} is none of {', '.join(allowed)}", code="usage")

    @property
    def book(self) -> Codebook:
        """The codebook of this law, length and width."""
        return lloyd_max(self.dim, self.bits, self.law)

    @property
    def boundaries(self) -> NDArray[np.float32]:
        """Boundaries (2**bits - 1,) between the cells of a rotated unit vector's coordinates."""
        return self.book.tables[0]

    @property
    def centroids(self) -> NDArray[np.float32]:
        """Levels (2**bits,) that the codes stand for."""
        return self.book.tables[1]

    @property
    def code_bytes(self) -> int:
        """Bytes of one vector's codes."""
        return packed_bytes(self.dim, self.bits)

    @property
    def parts(self) -> dict[str, Part]:
        """What a vector is stored in, by the names of `Encoded`'s arrays."""
        return _parts(self.code_bytes, self.meta)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector, metadata included."""
        return sum(part.nbytes for part in self.parts.values())

    def zeros(self, lead: tuple[int, ...]) -> Encoded:
        """Return room for vectors of shape (*lead, dim); as they stand they decode to zeros."""
        return Encoded(
            self, **{name: np.zeros((*lead, *part.shape), PART_TYPES[part.dtype]) for name, part in self.parts.items()}
        )


@cache
def _parts(code_bytes: int, meta: Meta) -> dict[str, Part]:
    return {"codes": Part((code_bytes,), "uint8"), "meta": META_PARTS[meta]}


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoded vectors of one spec: what `decode` needs, and nothing else."""

    spec: CodecSpec
    codes: NDArray[np.uint8]  # (..., code_bytes)
    meta: NDArray[np.generic]  # range: (..., 2) float32 [scale, norm]; f32: (...) float32; bf16: (...) bfloat16

    def __post_init__(self) -> None:
        lead = self.codes.shape[:-1]
        for name, part in self.spec.parts.items():
            array: NDArray[Any] = getattr(self, name)
            if array.dtype != PART_TYPES[part.dtype] or array.shape != (*lead, *part.shape):
                expected = f"expected {part.dtype} {(*lead, *part.shape)}"
                raise ValueError(f"{name} {array.dtype} {array.shape} do not fit {self.spec}: {expected}")

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by the names of `CodecSpec.parts`."""
        return {name: getattr(self, name) for name in self.spec.parts}

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape without the vector axis."""
        return self.codes.shape[:-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        return (*self.lead, self.spec.dim)

    @property
    def scales(self) -> NDArray[np.float32]:
        """The number that decoding multiplies each vector by, shape (...)."""
        scales = self.meta[..., 0] if META_PARTS[self.spec.meta].shape else self.meta
        return scales.astype(np.float32, copy=False)

    def set_meta(self, scales: NDArray[np.float32], norms: NDArray[np.float32]) -> None:
        """Store scale and norm of each vector, (...) each, as far as the form has a place for them."""
        form = META_PARTS[self.spec.meta].shape
        self.meta[...] = np.stack([scales, norms], axis=-1) if form else scales

    @property
    def nbytes(self) -> int:
        """Stored bytes, metadata included."""
        return sum(int(array.nbytes) for array in self.arrays.values())

    def __getitem__(self, index: Any) -> Encoded:
        """Return some of the vectors: NumPy's indexing over the axes of `lead`; slices give views."""
        return Encoded(self.spec, **{name: array[index] for name, array in self.arrays.items()})

    def __setitem__(self, index: Any, other: Encoded) -> None:
        """Store vectors of the same spec in some of the places."""
        for name, array in other.arrays.items():
            self.arrays[name][index] = array

    def reshape(self, *lead: int) -> Encoded:
        """Return the same vectors under another shape of the leading axes; -1 is worked out."""
        parts = self.spec.parts
        return Encoded(
            self.spec, **{name: array.reshape(*lead, *parts[name].shape) for name, array in self.arrays.items()}
        )
