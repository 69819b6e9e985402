"""Latent attention in a dump (DeepSeek V2 and V3): what the cache holds of a layer, and the weights that expand it.

A token's key of head h is kv_b[h, :nope] @ latent, followed by the rotary key that all heads share; its value is
kv_b[h, nope:] @ latent. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.datafiles import open_arrays
from tqtool.dumps.manifest import AttentionClaims, Manifest
from tqtool.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class LatentArrays:
    """What one layer keeps of a token, and its expansion."""

    latent: ArraySource  # (1, tokens, rank)
    rope_key: ArraySource  # (1, tokens, rotary dim), after the rotary embedding
    kv_b: ArraySource  # (heads, nope + value dim, rank)


def open_latents(manifest: Manifest, dtype: str | None) -> Mapping[int, LatentArrays]:
    """Open the latent layers that a manifest names. Raises: `InputError` for files that are missing or do not fit."""
    found = {}
    for number, names in manifest.latents.items():
        assert manifest.path is not None
        opened = {part: open_arrays(Path(manifest.path).parent / name, dtype=dtype)[0] for part, name in names.items()}
        found[number] = LatentArrays(**opened)
    return found


def check_latent(where: str, arrays: LatentArrays, q: ArraySource | None, claims: AttentionClaims, path: str) -> None:
    """Raises: `InputError` unless the arrays of a latent layer and its queries (heads, queries, dim) fit each other."""
    if q is None:
        hint = "capture the queries too: latents are read by nothing else"
        raise InputError(f"{where} is latent and has no queries", code="no-queries", hint=hint, path=path)
    latent, rope, kv_b = arrays.latent.shape, arrays.rope_key.shape, arrays.kv_b.shape
    fits = len(latent) == len(rope) == len(kv_b) == len(q.shape) == 3 and latent[0] == rope[0] == 1
    fits = fits and latent[1] == rope[1] and kv_b[0] == q.shape[0] and kv_b[2] == latent[2]
    nope = q.dim - rope[-1]
    if not fits or not 0 < nope < kv_b[1]:
        shapes = f"latent {latent}, rotary key {rope}, kv_b {kv_b} and q {q.shape}"
        raise InputError(f"{where}: {shapes} do not fit each other", code="shape-mismatch", path=path)
    found = {"heads": q.shape[0], "kv_heads": 1, "key_dim": q.dim, "value_dim": kv_b[1] - nope}
    for key, there in found.items():
        told = getattr(claims, key)
        if told is not None and told != there:
            text = f"{where}: the manifest says {key} {told}, the arrays have {there}"
            raise InputError(text, code="manifest", path=path)
