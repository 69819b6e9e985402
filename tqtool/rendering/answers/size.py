"""The memory calculator's answer as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqtool.codec.sizes import AttentionLayer, CacheSize, KVConfig
from tqtool.codec.terms import Meta
from tqtool.files import binary_size
from tqtool.rendering.tables import Column, table_text


def shape_text(layers: Sequence[AttentionLayer]) -> str:
    """Return the layers in words; equal ones are counted together."""
    kinds = dict.fromkeys(layers)
    return " + ".join(
        f"{plural(layers.count(kind), 'layer')} x {_vectors(kind)}"
        + (f" (window {kind.window})" if kind.window else "")
        for kind in kinds
    )


def _vectors(layer: AttentionLayer) -> str:
    """Return what a layer keeps of a token: `8 KV heads x 128`; with keys and values of two lengths `x 192/128`."""
    key, value = layer.dims
    if not value:
        return f"{plural(layer.kv_heads, 'latent')} x {key}"
    return f"{plural(layer.kv_heads, 'KV head')} x {key}" + (f"/{value}" if value != key else "")


def plural(count: int, noun: str) -> str:
    """Return "1 layer", "2 layers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(
    sizes: Mapping[KVConfig, CacheSize],
    layers: Sequence[AttentionLayer],
    tokens: int,
    meta: Meta,
    read: Sequence[str],
    *,
    terminal: bool,
) -> str:
    """Return the table of `tqtool size`; `read`: the keys of the model's configuration that it follows from."""
    columns = [Column("config", "left")] + [
        Column(title)
        for title in ("payload", "with metadata", "bytes", "FP32", "vs FP32", "payload vs FP32", "vs FP16")
    ]
    rows = [
        [
            str(config),
            binary_size(size.payload),
            binary_size(size.total),
            str(size.total),
            binary_size(size.float32),
            ratio_text(size.float32, size.total),
            ratio_text(size.float32, size.payload),
            ratio_text(size.float16, size.total),
        ]
        for config, size in sizes.items()
    ]
    title = f"{shape_text(layers)} x {plural(tokens, 'token')}, metadata {meta}"
    table = table_text(columns, rows, terminal=terminal, title=title)
    notes = [f"read: {', '.join(read)}"] if read else []
    if any(not layer.dims[1] for layer in layers):
        notes.append("a latent is key and value of all heads; it is counted once, with the bits of the keys")
    return "\n".join([table, *notes])


def ratio_text(before: int, after: int) -> str:
    """Return before / after as `9.14x`, or a dash where nothing is stored."""
    return f"{before / after:.2f}x" if after else "-"


def size_json(
    sizes: Mapping[KVConfig, CacheSize],
    layers: Sequence[AttentionLayer],
    tokens: int,
    meta: Meta,
    read: Sequence[str],
) -> dict[str, Any]:
    """Return the same values for programs."""
    return {
        "schema": "tqtool.size/1",
        "tokens": tokens,
        "meta": meta,
        "layers": [
            {
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "value_dim": layer.dims[1],
                "window": layer.window,
            }
            for layer in layers
        ],
        "read": list(read),
        "rows": [
            {
                "config": str(config),
                "payload_bytes": size.payload,
                "total_bytes": size.total,
                "float32_bytes": size.float32,
                "float16_bytes": size.float16,
                "ratio_float32": size.float32 / size.total if size.total else None,
                "ratio_float16": size.float16 / size.total if size.total else None,
            }
            for config, size in sizes.items()
        ],
    }
