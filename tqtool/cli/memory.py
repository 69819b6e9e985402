"""`tqtool size`: what a cache occupies, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqtool.cli import output
from tqtool.errors import UsageError
from tqtool.sizes import AttentionLayer, KVConfig, Meta, cache_size


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("size")(size)


def size(
    layers: Annotated[int, typer.Option(min=1, help="Attention layers.")] = 1,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key-value heads a layer.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, max=1 << 20, help="Coordinates a vector.")] = 128,
    tokens: Annotated[int, typer.Option(min=0, help="Cached tokens.")] = 1,
    config: Annotated[
        str, typer.Option("-c", "--config", help="K/V bits, comma list.")
    ] = "K4/V4,K4/V3,K4/V2,K3/V3,K3/V2,K2/V2",
    meta: Annotated[Meta, typer.Option(help="Metadata a vector: 8, 4 or 2 bytes.")] = "range",
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json; replaces --layers, --kv-heads and --head-dim."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the memory of a KV cache.

    Prints payload, bytes with metadata, and the ratios to FP32 and FP16.
    """
    from tqtool.model_config import attention_layers
    from tqtool.rendering.memory import size_json, size_text

    shape = attention_layers(model) if model else (AttentionLayer(kv_heads, head_dim),) * layers
    configs = KVConfig.parse_list(config)
    if not configs:
        raise UsageError("--config names no configuration", code="usage", hint="for example -c K4/V2,K3/V2")
    sizes = {each: cache_size(each, shape, tokens=tokens, meta=meta) for each in configs}
    if as_json:
        output.answer_json(size_json(sizes, shape, tokens, meta))
    else:
        output.answer(size_text(sizes, shape, tokens, meta, terminal=output.stdout_is_terminal()))
