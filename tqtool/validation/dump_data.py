"""A dump as data to measure: the facts of every layer resolved, positions that are no tokens refused or cut."""

from __future__ import annotations

from math import sqrt
from pathlib import PurePath

import numpy as np

from tqtool import health
from tqtool.dtypes import Float32Array
from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.dump import Dump, DumpLayer
from tqtool.dumps.inputs import Input
from tqtool.dumps.manifest import WITHOUT_CACHE
from tqtool.dumps.slots import Span, refuse_empty_slots
from tqtool.dumps.unread import refuse_unread
from tqtool.errors import InputError
from tqtool.report.layer_facts import LayerFacts
from tqtool.validation.dataset import Arrays, Dataset, as_float32


def from_dump(
    dump: Dump, *, name: str | None = None, causal: bool | None = None, tokens: tuple[int, int] | None = None
) -> Dataset:
    """Return a dump as a dataset; fewer queries than keys are those of the last positions.

    `name` replaces the dump's own, in the inputs too: a report should not tell where a package is installed. `tokens`
    is the range of positions that hold tokens; None: what the manifest says, else all.

    Raises: `InputError` for what cannot be measured as the model does it, naming what is missing.
    """
    shown = dump.name if name is None else name
    without = [layer.number for layer in dump.layers if layer.q is None]
    if 0 < len(without) < len(dump.layers):
        raise InputError(
            f"{shown}: layers {', '.join(map(str, without))} have no queries, the others have",
            code="no-queries",
            hint="capture the queries of every layer, or of none",
        )
    valid = tokens or dump.manifest.valid_tokens
    refuse_unread(shown, dump.unread, dump.manifest, tokens_told=valid is not None)
    if valid is None:
        refuse_empty_slots(shown, dump.layers)
    spans = [_span(shown, layer, valid) for layer in dump.layers]
    masks = [_is_causal(layer, causal) for layer in dump.layers]
    ends = [(span.first_token or 0) + len(span.keys) for span, masked in zip(spans, masks, strict=True) if masked]
    longest = max(ends, default=0) if valid else max([*ends, dump.manifest.tokens or 0])
    facts = tuple(
        _facts(shown, layer, span, masked, longest)
        for layer, span, masked in zip(dump.layers, spans, masks, strict=True)
    )

    def load(index: int, head: int) -> Arrays:
        layer, span, group = dump.layers[index], spans[index], facts[index].group
        if layer.latent is not None:
            return _absorbed(layer, span)
        q = None if layer.q is None else some_heads(layer.q, head * group, group, span.queries)
        k, v = (some_heads(source, head, 1, span.keys)[0] for source in (layer.k, layer.v))
        return q, k, v

    def readout(index: int) -> Float32Array | None:
        layer = dump.layers[index]
        return None if layer.latent is None else _expansion(layer)[1]

    return Dataset(
        name=shown,
        kind="dump",
        facts=facts,
        load=load,
        readout=readout,
        notes=() if name is not None else (*dump.notes, *_notes(dump, valid)),
        inputs=tuple(
            Input(i.path if name is None else f"{name}/{PurePath(i.path).name}", i.sha256, i.shape, i.dtype)
            for i in dump.inputs()
        ),
        blame=lambda index, kind: health.refusal_of(getattr(dump.layers[index], kind)),
        model=dump.manifest.model,
        model_layers=dump.manifest.model_layers,
        model_context=dump.manifest.model_context,
    )


def _is_causal(layer: DumpLayer, asked: bool | None) -> bool:
    """Return whether later keys are masked; keys that stand in for queries read earlier ones only."""
    if layer.q is None:
        return True
    told = layer.claims.causal if layer.claims.causal is not None else layer.claims.kind != "cross"
    return told if asked is None else asked


def _span(name: str, layer: DumpLayer, valid: tuple[int, int] | None) -> Span:
    """Cut a layer to the positions that hold tokens; those are numbered from 0 again, as the model does."""
    tokens, queries, told = layer.tokens, layer.queries, layer.claims.first_token
    if valid is None or layer.claims.kind == "cross":
        return Span(range(tokens), range(queries), told)
    start, stop = valid
    first = told or 0
    keys = range(max(0, start - first), stop - first)
    if not 0 <= keys.start < keys.stop <= tokens:
        stored = f"holds positions {first} to {first + tokens - 1}"
        raise InputError(
            f"{name}: layer {layer.number} {stored}, tokens {start}:{stop} are not among them",
            code="tokens",
            hint="START:STOP counts positions from 0, STOP is one past the last",
        )
    # Queries of every slot are cut like the keys; fewer are those of the last positions that hold tokens.
    end = first + tokens if queries == first + tokens else stop
    if end < queries:
        raise InputError(
            f"{name}: layer {layer.number}: {queries} queries but {end} positions that hold tokens",
            code="shape-mismatch",
            hint="queries are of the last positions that hold tokens, or of every slot",
        )
    kept = range(max(0, start - (end - queries)), min(queries, stop - (end - queries)))
    return Span(keys, kept, None if told is None else max(first, start) - start)


def _facts(name: str, layer: DumpLayer, span: Span, causal: bool, longest: int) -> LayerFacts:
    """Return what attention of a layer is: what the manifest tells, else plain attention over what is stored.

    `longest` is the number of positions of the longest layer: a shorter one has lost keys.
    """
    claims, tokens, queries = layer.claims, len(span.keys), len(span.queries)
    where = f"{name}: layer {layer.number}"
    if causal and queries and span.first_token is None and tokens < longest:
        raise InputError(
            f"{where} holds {tokens} keys, another layer {longest}: which of them its queries saw is not known",
            code="keys-missing",
            hint='a cache with a window drops its oldest keys: tell "window" and "first_token" of each layer in a '
            "manifest (docs/dump.md), or capture all keys; --no-causal where all queries see all keys",
        )
    if layer.latent is not None:
        return _latent_facts(layer, span, causal)
    batch = layer.kv_heads // (layer.k.shape[-3] if len(layer.k.shape) > 2 else 1)
    scale = claims.scaling if claims.scaling is not None else 1 / sqrt(layer.k.dim)
    return LayerFacts(
        layer=layer.number,
        kv_heads=layer.kv_heads,
        query_heads=layer.query_heads if queries else layer.kv_heads,
        tokens=tokens,
        queries=queries,
        key_dim=layer.k.dim,
        value_dim=layer.v.dim,
        scale=scale,
        causal=causal,
        window=claims.window,
        chunk=claims.chunk,
        softcap=claims.softcap,
        sinks=(claims.sinks or ()) * batch,
        alibi_slopes=(claims.alibi_slopes or ()) * batch,
        first_token=span.first_token or 0,
    )


def _latent_facts(layer: DumpLayer, span: Span, causal: bool) -> LayerFacts:
    """Latent attention is that of one KV head whose key is the latent with the rotary key behind it."""
    claims, q = layer.claims, layer.q
    assert q is not None
    return LayerFacts(
        layer=layer.number,
        kv_heads=1,
        query_heads=layer.query_heads,
        tokens=len(span.keys),
        queries=len(span.queries),
        key_dim=layer.k.dim + layer.v.dim,
        value_dim=layer.k.dim,
        scale=claims.scaling if claims.scaling is not None else 1 / sqrt(q.dim),
        causal=causal,
        window=claims.window,
        chunk=claims.chunk,
        softcap=claims.softcap,
        sinks=claims.sinks or (),
        alibi_slopes=claims.alibi_slopes or (),
        first_token=span.first_token or 0,
        latent=True,
    )


def _expansion(layer: DumpLayer) -> tuple[Float32Array, Float32Array]:
    """Return what makes keys, (heads, nope, rank), and values, (heads, value dim, rank), of the latent."""
    assert layer.latent is not None
    assert layer.q is not None
    weights = as_float32(layer.latent.kv_b.read())
    nope = layer.q.dim - layer.v.dim
    return weights[:, :nope], weights[:, nope:]


def _absorbed(layer: DumpLayer, span: Span) -> Arrays:
    """Return queries, keys and values of latent attention as of one KV head: q.(W c) = (W^T q).c."""
    assert layer.q is not None
    keys, _ = _expansion(layer)
    latent, rope = (some_heads(source, 0, 1, span.keys)[0] for source in (layer.k, layer.v))
    q = some_heads(layer.q, 0, layer.query_heads, span.queries)
    nope = keys.shape[1]
    absorbed = np.concatenate([q[:, :, :nope] @ keys, q[:, :, nope:]], axis=2)  # (heads, queries, rank + rotary dim)
    return absorbed, np.concatenate([latent, rope], axis=1), latent


def _notes(dump: Dump, valid: tuple[int, int] | None) -> list[str]:
    """Return what the manifest says that a reader of the figures should know."""
    manifest, found = dump.manifest, []
    if manifest.origin:
        found.append(f"model {manifest.model or 'without a name'} ({manifest.origin})")
    for kind in WITHOUT_CACHE:
        if layers := [number for number, claims in manifest.by_layer.items() if claims.kind == kind]:
            found += [f"{kind} layers keep no keys and values of their own: {', '.join(map(str, layers))}"]
    if valid is not None:
        found.append(f"positions {valid[0]} to {valid[1] - 1} are measured, others hold no tokens")
    if any(layer.q is None and (layer.claims.sinks or layer.claims.alibi_slopes) for layer in dump.layers):
        found.append("learned sinks and ALiBi belong to query heads: without queries they are left out")
    return found


def some_heads(source: ArraySource, start: int, count: int, tokens: range) -> Float32Array:
    """Read heads start … start + count - 1 of ([batch,] [heads,] tokens, dim) as (count, tokens, dim).

    The sequences of a batch count as more heads; a group of query heads never spans two of them.
    """
    lead, dim = source.shape[:-2], source.shape[-1]
    outer = np.unravel_index(start, lead) if lead else ()
    box = [range(int(i), int(i) + 1) for i in outer[:-1]]
    box += [range(int(i), int(i) + count) for i in outer[-1:]]
    return as_float32(source.box((*box, tokens, range(dim)))).reshape(count, len(tokens), dim)
