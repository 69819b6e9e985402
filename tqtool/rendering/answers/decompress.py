"""What decompress says, as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqtool.container.decompression import Restored


def decompress_json(path: str, target: str, written: int, chosen: Sequence[Restored]) -> dict[str, Any]:
    """Return the JSON of one restored file."""
    tensors = [{"name": each.entry.name, "shape": list(each.entry.shape), "dtype": each.dtype} for each in chosen]
    return {"input": path, "output": target, "bytes": written, "tensors": tensors}
