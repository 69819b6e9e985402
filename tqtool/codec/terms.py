"""The words of the format and what each stands for, free of NumPy: the command line's help reads them too.

A new scale rule is added here, in `reference`, in the C runtime and in `theory`; a new metadata form here and in the
C runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

Law = Literal["beta", "sphere", "gaussian"]  # of a coordinate; `codebook` gives the densities
LAWS: tuple[Law, ...] = get_args(Law)
ScaleRule = Literal["match", "norm", "lsq", "unbiased"]  # what decoding multiplies by; `reference.scale_factors`
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)  # the order is the C runtime's enum
Meta = Literal["range", "f32", "bf16"]  # what is stored beside the codes of a vector

MAX_BITS = 8
UNTOUCHED = 16  # bits of a side that is kept as float16
FLOAT32_BYTES = 4
FLOAT16_BYTES = 2
TYPE_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4}  # of the parts of a vector, by NumPy's names


@dataclass(frozen=True, slots=True)
class Part:
    """One stored piece of a vector: its shape, () for one number, and NumPy's name of its type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a vector."""
        return prod(self.shape) * TYPE_BYTES[self.dtype]


META_PARTS: dict[Meta, Part] = {
    "range": Part((2,), "float32"),  # [scale, norm]
    "f32": Part((), "float32"),  # the scale, as the rest
    "bf16": Part((), "bfloat16"),
}
METAS: tuple[Meta, ...] = tuple(META_PARTS)  # the order is the C runtime's enum


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes of `bits` bits, packed densely."""
    return -(-count * bits // 8)
