"""The C runtime, where it was compiled: the same two operations as `reference`, the same bits, much faster."""

from __future__ import annotations

from tqtool.reference import decode_rows, encode_rows

__all__ = ["available", "decode_rows", "encode_rows"]


def available() -> bool:
    """Return whether the compiled runtime is loaded."""
    return False
