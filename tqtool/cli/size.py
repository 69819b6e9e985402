"""`tqtool size`: what a cache occupies, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import JsonOption, MetaOption
from tqtool.codec.sizes import AttentionLayer, KVConfig, cache_size
from tqtool.errors import UsageError

MAX_LAYERS = 1 << 14  # far beyond any model, and still counted in a moment
MAX_TOKENS = 1 << 40


HELP = """Compute the memory of a KV cache.

Prints payload, bytes with metadata, and the ratios to FP32 and FP16.
"""


def size(
    layers: Annotated[
        int | None, typer.Option(min=1, max=MAX_LAYERS, help="Attention layers.", show_default="1")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Key-value heads a layer.", show_default="1")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Coordinates a vector.", show_default="128")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Cached tokens.")] = 1,
    config: Annotated[
        str, typer.Option("-c", "--config", help="K/V bits, comma list.")
    ] = "K4/V4,K4/V3,K4/V2,K3/V3,K3/V2,K2/V2",
    meta: MetaOption = "range",
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json, in place of --layers, --kv-heads and --head-dim."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.dumps.model_config import read_model
    from tqtool.rendering.answers.size import size_json, size_text

    if model is not None:
        given = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
        for option in (option for option, value in given.items() if value is not None):
            raise UsageError(f"{option} and --model contradict each other: the model's file says it", code="usage")
        known = read_model(model)
        shape, read = known.layers, known.read
    else:
        read = ()
        shape = (AttentionLayer(kv_heads or 1, head_dim or 128),) * (layers or 1)
    configs = KVConfig.parse_list(config)
    if not configs:
        raise UsageError("--config names no configuration", code="usage", hint="for example -c K4/V2,K3/V2")
    sizes = {each: cache_size(each, shape, tokens=tokens, meta=meta) for each in configs}
    if as_json:
        output.answer_json(size_json(sizes, shape, tokens, meta, read))
    else:
        output.answer(size_text(sizes, shape, tokens, meta, read, terminal=output.stdout_is_terminal()))
