"""What `capture` writes or has written, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tqtool.files import binary_size

SCHEMA = "tqtool.capture/1"


def dump_text(path: str, manifest: Mapping[str, Any], size: int, *, planned: bool) -> str:
    """Return one dump's lines: how much it is, what every layer is, what is missing and why."""
    layers = manifest["layers"]
    captured = [layer for layer in layers if layer["files"]]
    tail = manifest["query_tail"]
    queries = "queries of all positions" if tail is None else f"queries of the last {tail}"
    lines = [
        f"{path}: {len(captured)} of {len(layers)} layers, {manifest['tokens']:,} tokens, {queries}, "
        f"{binary_size(size)}{' would be written' if planned else ''}"
    ]
    lines += [f"  {_layers(group)}: {words}" for words, group in _grouped(captured, layer_words)]
    missing = [layer for layer in layers if not layer["files"]]
    lines += [f"  not captured: {_layers(group)}: {why}" for why, group in _grouped(missing, _reason)]
    biased = [layer for layer in captured if layer["score_bias"]]
    lines += [
        f"  not measurable: {_layers(group)}: {why}"
        for why, group in _grouped(biased, lambda layer: BIASES.get(layer["score_bias"], layer["score_bias"]))
    ]
    return "\n".join(lines)


BIASES = {
    "mask": "the mask is neither causal nor a window or chunk",
    "unexplained": "the output is not what keys, values, scale, window, soft cap and sinks give",
    "position_bias": "the model adds a position bias to the scores",
}


def capture_json(dumps: Sequence[tuple[str, Mapping[str, Any], int]], *, dry_run: bool) -> dict[str, Any]:
    """Return the document of `capture --json`: path, bytes of the arrays and manifest of every dump."""
    return {
        "schema": SCHEMA,
        "dry_run": dry_run,
        "dumps": [{"path": path, "bytes": size, "manifest": dict(manifest)} for path, manifest, size in dumps],
    }


def layer_words(layer: Mapping[str, Any]) -> str:
    """Return a layer's attention in words: `sliding, window 4096: 32 query / 8 KV heads of 128, scale 0.0884`."""
    limits = [f"{name} {layer[name]}" for name in ("window", "chunk") if layer[name] is not None]
    dims = str(layer["key_dim"])
    if layer["value_dim"] != layer["key_dim"]:
        dims = f"{layer['key_dim']} (values {layer['value_dim']})"
    rest = [f"scale {layer['scaling']:.4g}"]
    rest += [f"soft cap {layer['softcap']:g}"] if layer["softcap"] is not None else []
    rest += ["sinks"] if layer["sinks"] is not None else []
    heads = f"{layer['heads']} query / {layer['kv_heads']} KV heads of {dims}"
    return f"{', '.join([layer['kind'], *limits])}: {heads}, {', '.join(rest)}"


def _reason(layer: Mapping[str, Any]) -> str:
    return {
        "linear": "no keys and values (linear attention, state space or convolution)",
        "shared": "keys and values of an earlier layer are read",
        "cross": "keys and values are of something else than the text",
    }.get(layer["kind"], "not asked for")


def _grouped(layers: Sequence[Mapping[str, Any]], words: Any) -> list[tuple[str, list[int]]]:
    """Return layers of equal words together, in the order of the first of each."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        found.setdefault(words(layer), []).append(layer["layer"])
    return list(found.items())


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) != 1)} {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a reader likes them: `0-3, 5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
