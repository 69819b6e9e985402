"""Which keys a query of a layer sees, and whether they are all stored: masks, windows, chunks, evicted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.plain import sees
from tqtool.errors import InputError
from tqtool.report.layer_facts import LayerFacts

Index = NDArray[np.intp]


def query_positions(facts: LayerFacts) -> Index:
    """Return where each query of a layer sits, counted from the first stored key: the last positions.

    Without a causal mask every query sees all keys, as one past the last does. A query may sit before the first
    stored key.
    """
    if not facts.causal:
        return np.full(facts.queries, facts.tokens - 1)
    return np.arange(facts.tokens - facts.queries, facts.tokens)


def complete(facts: LayerFacts, positions: Index) -> NDArray[np.bool_]:
    """Return for which queries every key they see is stored: others would be measured with another attention."""
    if not facts.causal or facts.first_token == 0:
        return np.ones(len(positions), bool)
    places = positions + facts.first_token
    first = np.zeros_like(places)
    if facts.window is not None:
        first = np.maximum(first, places - facts.window + 1)
    if facts.chunk is not None:
        first = np.maximum(first, places // facts.chunk * facts.chunk)
    return first >= facts.first_token


def left_out(facts: LayerFacts) -> int:
    """Return how many queries of each query head are not measured, since not all of their keys are stored."""
    return int(np.count_nonzero(~complete(facts, query_positions(facts))))


def seen_keys(facts: LayerFacts, positions: Index, stop: int) -> NDArray[np.bool_] | None:
    """Return which of the first `stop` keys each query sees, (queries, stop); None where each sees all of them."""
    if not facts.causal:
        return None
    keys = np.arange(stop)
    seen = sees(positions, keys, causal=True, window=facts.window)
    if facts.chunk is not None:
        chunks, own = ((x + facts.first_token) // facts.chunk for x in (keys, positions))
        seen &= chunks == own[:, None]
    return seen


def check_visibility(name: str, layers: Sequence[LayerFacts]) -> None:
    """Raises: `InputError` where a layer has no query all of whose keys are stored, or a mask without positions."""
    for facts in layers:
        where = f"{name}: layer {facts.layer}"
        if not facts.causal and (facts.window or facts.chunk or facts.alibi_slopes):
            what = "a window" if facts.window else "chunks" if facts.chunk else "ALiBi"
            hint = f"leave out --no-causal, or {what} for that layer"
            raise InputError(f"{where}: {what} needs a causal mask", code="attention", hint=hint)
        if facts.causal and facts.queries > facts.first_token + facts.tokens:
            raise InputError(
                f"{where}: {facts.queries} queries but {facts.tokens} keys: the first would see no key",
                code="shape-mismatch",
                hint="--no-causal lets every query see all keys, as in cross-attention",
            )
        if facts.queries and not complete(facts, query_positions(facts)).any():
            raise InputError(
                f"{where}: {_missing(facts)}", code="keys-missing", hint="capture the keys before eviction"
            )


def _missing(facts: LayerFacts) -> str:
    stored = f"the keys of positions {facts.first_token} to {facts.first_token + facts.tokens - 1} are stored"
    if facts.window is None and facts.chunk is None:
        return f"{stored}, and its queries see all from 0 on"
    reach = f"a window of {facts.window}" if facts.window is not None else f"chunks of {facts.chunk}"
    return f"{stored}, and with {reach} every query sees some that are not"
