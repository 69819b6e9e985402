"""Positions at either end of the token axis that hold no token: unused slots of a preallocated cache, padding.

They are zeros, or copies of one vector. Attention over them is not the model's, and what they say is too good: KL came
out 45 % too low on a cache filled to a third. Where they begin is told by the data, what they are is not: they are
refused until the user, or the manifest, says which positions count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.dump import DumpLayer
from tqtool.errors import InputError

End = Literal["first", "last"]
FEWEST_ALIKE = 2  # one zero vector is enough; others need a neighbour to be alike
FIRST_LOOK = 8  # positions read at an end before more are


@dataclass(frozen=True, slots=True)
class Span:
    """Which keys and queries of a layer are measured, and the position of the first key; None: it is not known."""

    keys: range
    queries: range
    first_token: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """How many positions at an end are alike in every head."""

    zero: int
    alike: int


def refuse_empty_slots(name: str, layers: Sequence[DumpLayer]) -> None:
    """Raises: `InputError` (code `empty-slots`) if positions at an end of a layer hold no token."""
    runs = {end: {layer.number: _layer_run(layer, end, len(layers)) for layer in layers} for end in ("first", "last")}
    for layer in layers:
        found: dict[str, int] = {}
        for end, by_layer in runs.items():
            # Before rotary embedding equal tokens are alike in a model's first layer, never in all of them.
            same = [by_layer[each.number].alike for each in layers if each.tokens == layer.tokens]
            alike = min(same) if min(same) >= FEWEST_ALIKE else 0
            found[end] = max(by_layer[layer.number].zero, alike)
        if any(0 < count < layer.tokens for count in found.values()):
            zero = max(by_layer[layer.number].zero for by_layer in runs.values()) == max(found.values())
            raise _refusal(name, layer, found, "zero" if zero else "one repeated vector")


def _refusal(name: str, layer: DumpLayer, found: dict[str, int], what: str) -> InputError:
    start, stop = found["first"], layer.tokens - found["last"]
    ends = " and ".join(f"the {end} {count}" for end, count in found.items() if count)
    return InputError(
        f"{name}: layer {layer.number}: {ends} of {layer.tokens} positions are {what} in every head: "
        "unused slots or padding, which no query of the model reads",
        code="empty-slots",
        hint=f"--tokens {start}:{stop} measures the others, --tokens 0:{layer.tokens} all of them",
        path=name,
    )


def _layer_run(layer: DumpLayer, end: End, layers: int) -> Run:
    keys, values = (_run(source, end) for source in (layer.k, layer.v))
    alone = layers == 1 and layer.number == 0  # a first layer alone: equal tokens have equal values
    alike = min(keys.alike, values.alike) if alone else max(keys.alike, values.alike)
    return Run(max(keys.zero, values.zero), alike)


def _run(source: ArraySource, end: End) -> Run:
    tokens, look = source.shape[-2], FIRST_LOOK
    while True:
        count = min(look, tokens)
        rows = _end(source, end, count)
        run = Run(_leading((rows == 0).all(axis=(1, 2))), _leading((rows == rows[0]).all(axis=(1, 2))))
        if count == tokens or max(run.zero, run.alike) < count:
            return run
        look *= 8


def _end(source: ArraySource, end: End, count: int) -> NDArray[Any]:
    """Read `count` positions at an end of every head, the outermost first: (positions, heads, dim)."""
    tokens, lead = source.shape[-2], [range(size) for size in source.shape[:-2]]
    places = range(count) if end == "first" else range(tokens - count, tokens)
    rows = source.box((*lead, places, range(source.dim)))
    rows = rows.reshape(-1, count, source.dim).transpose(1, 0, 2)
    return rows if end == "first" else rows[::-1]


def _leading(true: NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(true) if true.all() else int(np.argmin(true))
