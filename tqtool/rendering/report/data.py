"""The data line of a source: what was measured, ranges where layers differ, and which layers differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tqtool.escapes import visible
from tqtool.rendering.report.figures import count, plural, ranges
from tqtool.report.layer_facts import LayerFacts
from tqtool.report.model import Source


def data_parts(source: Source) -> list[str]:
    """Return what was measured: sizes, queries, mask, score scale, what attention has beside, its sharpness."""
    facts = source.layer_facts or (_first_layer(source),)  # earlier reports tell of the first layer only
    of_model = source.model_layers is not None and source.model_layers > len(source.layers)
    layers = f"{len(source.layers)} of {plural(source.model_layers or 0, 'layer')}"
    keys, values = [f.key_dim for f in facts], [f.value_dim for f in facts]
    sizes = (
        layers if of_model else plural(len(source.layers), "layer"),
        _span((f.kv_heads for f in facts), "KV head"),
        _span((f.tokens for f in facts), "token"),
        f"dim {_span(keys)}" if keys == values else f"key dim {_span(keys)}, value dim {_span(values)}",
    )
    shown = f"{_span((f.query_heads for f in facts), 'query head')} × {plural(source.queries, 'query')}"
    return [
        *([visible(source.model)] if source.model else []),
        " × ".join(sizes),
        "no queries: keys stand in for them" if source.query_source == "proxy" else shown,
        _mask(facts),
        f"scale {_between([f'{f.scale:.4g}' for f in sorted(facts, key=lambda f: f.scale)])}",
        *_attention(facts),
        f"n_eff {source.n_eff_low:.3g}–{source.n_eff_high:.3g}",
    ]


def _first_layer(source: Source) -> LayerFacts:
    return LayerFacts(
        layer=source.layers[0] if source.layers else 0,
        kv_heads=source.kv_heads,
        query_heads=source.query_heads,
        tokens=source.tokens,
        queries=source.queries,
        key_dim=source.dim,
        value_dim=source.dim,
        scale=source.scale,
        causal=source.causal,
    )


def _span(values: Iterable[int], noun: str = "") -> str:
    """Return the one number of all layers, or the smallest and the largest: "2–8 KV heads"."""
    found = sorted(set(values))
    text = _between([count(number) for number in found])
    return text + plural(found[-1], noun).removeprefix(count(found[-1])) if noun else text


def _between(shown: Sequence[str]) -> str:
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]}–{shown[-1]}"


def _mask(facts: Sequence[LayerFacts]) -> str:
    free = [f.layer for f in facts if not f.causal]
    if not free:
        return "causal"
    return "not causal" if len(free) == len(facts) else f"causal but in {_layers(free)}"


def _attention(facts: Sequence[LayerFacts]) -> list[str]:
    """Return what attention has beside the plain softmax, and which layers have it where not all do."""
    found = []
    for words, of_layer in (
        ("window", {f.layer: f.window for f in facts}),
        ("chunks of", {f.layer: f.chunk for f in facts}),
        ("soft cap", {f.layer: f.softcap for f in facts}),
        ("learned sinks", {f.layer: len(f.sinks) or None for f in facts}),
        ("ALiBi", {f.layer: len(f.alibi_slopes) or None for f in facts}),
        ("oldest keys dropped", {f.layer: f.first_token or None for f in facts}),
    ):
        has = {layer: value for layer, value in of_layer.items() if value is not None}
        if has:
            numbers = "" if words in ("learned sinks", "ALiBi", "oldest keys dropped") else f" {_numbers(has.values())}"
            found.append(f"{words}{numbers}{'' if len(has) == len(facts) else f' in {_layers(list(has))}'}")
    return found


def _numbers(values: Iterable[float]) -> str:
    return _between([f"{value:,.6g}" for value in sorted(values)])


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"
