"""Stored bytes: the one place that knows what a compressed vector, pair and cache occupy.

Pure integers, no NumPy. A vector of `dim` coordinates at `bits` bits is `ceil(dim * bits / 8)` bytes of codes and a
few bytes of metadata; `UNTOUCHED` (16) bits mean that a side is kept as float16 and has no metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tqtool.codec.terms import FLOAT16_BYTES, FLOAT32_BYTES, MAX_BITS, META_PARTS, UNTOUCHED, Meta, packed_bytes
from tqtool.errors import UsageError


def payload_bytes(dim: int, bits: int) -> int:
    """Return the bytes of one vector without its metadata."""
    return FLOAT16_BYTES * dim if bits == UNTOUCHED else packed_bytes(dim, bits)


def vector_bytes(dim: int, bits: int, meta: Meta = "range") -> int:
    """Return the stored bytes of one vector, metadata included."""
    return payload_bytes(dim, bits) + (0 if bits == UNTOUCHED else META_PARTS[meta].nbytes)


@dataclass(frozen=True, slots=True, order=True)
class KVConfig:
    """Bits of keys and values: 1 to 8, or 16 for a side that is left untouched. The default prints as `K4/V2`."""

    key_bits: int = 4
    value_bits: int = 2

    def __post_init__(self) -> None:
        for bits in (self.key_bits, self.value_bits):
            if bits != UNTOUCHED and not 1 <= bits <= MAX_BITS:
                raise UsageError(f"{bits} bits: a side has 1 to {MAX_BITS} bits, or 16 for untouched", code="usage")

    @classmethod
    def parse(cls, text: str) -> KVConfig:
        """Read `K4/V2`, `K4V2` or `k4v2`; `UsageError` for anything else."""
        match = re.fullmatch(r"k(\d{1,2})/?v(\d{1,2})", text.strip(), re.IGNORECASE | re.ASCII)
        if match is None:
            raise UsageError(
                f"configuration {text!r} is not of the form K4/V2",
                code="usage",
                hint="write key bits and value bits, as in K4/V2 or k4v2",
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def parse_list(cls, text: str) -> tuple[KVConfig, ...]:
        """Read a comma-separated list; repeated configurations count once."""
        return tuple(dict.fromkeys(cls.parse(part) for part in text.split(",") if part.strip()))

    def __str__(self) -> str:
        return f"K{self.key_bits}/V{self.value_bits}"

    def pair_bytes(self, dim: int, meta: Meta = "range") -> int:
        """Return the bytes of one key and one value vector, metadata included."""
        return vector_bytes(dim, self.key_bits, meta) + vector_bytes(dim, self.value_bits, meta)

    def bits_per_value(self, dim: int, meta: Meta = "range") -> float:
        """Return stored bits per coordinate, metadata included, averaged over keys and values."""
        return 8 * self.pair_bytes(dim, meta) / (2 * dim)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The bytes of a whole cache: payload (codes or floats alone), and with metadata."""

    payload: int
    total: int
    float32: int

    @property
    def float16(self) -> int:
        """Bytes of the same cache in float16."""
        return self.float32 // 2

    @property
    def ratio(self) -> float:
        """How many times smaller than float32, metadata counted."""
        return self.float32 / self.total if self.total else 1.0

    def __add__(self, other: CacheSize) -> CacheSize:
        return CacheSize(self.payload + other.payload, self.total + other.total, self.float32 + other.float32)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one attention layer caches for a token, and for how many tokens at most."""

    kv_heads: int
    head_dim: int  # of a key
    window: int | None = None  # of a sliding-window layer
    value_dim: int | None = None  # None: as long as a key; 0: one latent vector serves as key and value

    @property
    def dims(self) -> tuple[int, int]:
        """Lengths of a key and of a value vector; 0 is a value that is not stored."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


def cache_size(config: KVConfig, layers: Iterable[AttentionLayer], *, tokens: int, meta: Meta = "range") -> CacheSize:
    """Return the exact size of a cache of `tokens` tokens in each of the layers.

    A latent is coded with the bits of the keys. Source: the specification, Memory Layout; per token and layer key
    codes, value codes and the metadata of both.
    """
    total = CacheSize(0, 0, 0)
    for layer in layers:
        pairs = layer.kv_heads * (tokens if layer.window is None else min(tokens, layer.window))
        sides = zip(layer.dims, (config.key_bits, config.value_bits), strict=True)
        stored = [(dim, bits) for dim, bits in sides if dim]
        total += CacheSize(
            payload=pairs * sum(payload_bytes(dim, bits) for dim, bits in stored),
            total=pairs * sum(vector_bytes(dim, bits, meta) for dim, bits in stored),
            float32=pairs * sum(dim for dim, _ in stored) * FLOAT32_BYTES,
        )
    return total
