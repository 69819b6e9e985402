"""The checksums that a C header of ours carries, held against the tables beside them: an edit by hand shows."""

from __future__ import annotations

import re
import struct
import zlib

import numpy as np

_SUM = re.compile(r"#define FA_TQ_CODEBOOKS_CRC32_(UNIT|CENTERED) UINT32_C\(0x([0-9a-f]{8})\)")
_DIMS = re.compile(r"\bfa_tq_codebook_dims\[\w+\] = \{([^}]*)\}")
_TABLE = re.compile(r"\{\s*(\d+),\s*(\d+),\s*\{([^}]*)\},\s*\{([^}]*)\}\s*\}")


def edited_domains(text: str) -> tuple[str, ...]:
    """Return the domains ("unit", "centered") whose tables are not those that the header's CRC-32 is of.

    () for a text that is no header of ours, and for one that is whole.
    """
    sums = {name.lower(): int(value, 16) for name, value in _SUM.findall(text)}
    dims = _numbers(found[1]) if (found := _DIMS.search(text)) else []
    return tuple(name for name, value in sums.items() if _crc32(text, name, dims) != value)


def _crc32(text: str, domain: str, dims: list[float]) -> int | None:
    """Return the CRC-32 of a domain's rows as `export.header` takes it, None where they cannot be read."""
    begun = text.find(f"fa_tq_codebooks_{domain}[")
    rows = _TABLE.findall(text[begun : text.find("\n};", begun)]) if begun >= 0 else []
    if not dims or not rows or len(rows) % len(dims):
        return None
    widths = len(rows) // len(dims)
    payload = b""
    for place, (bits, levels, boundaries, centroids) in enumerate(rows):
        payload += struct.pack("<3i", int(dims[place // widths]), int(bits), int(levels))
        payload += np.array(_numbers(boundaries) + _numbers(centroids), "<f4").tobytes()
    return zlib.crc32(payload)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"[-+]?[0-9.]+(?:e[-+]?\d+)?", text)]
