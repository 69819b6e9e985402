"""What `validate` measures: layers of queries, keys and values, loaded one KV head at a time.

A dump, a synthetic set and arrays at hand all become a `Dataset`. Where queries are missing, keys stand in for them
(proxy queries): key i then reads the keys 0..i-1, since its product with itself would hide every error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import health
from tqtool.codec.refusals import refusal
from tqtool.dtypes import Float32Array
from tqtool.dumps.inputs import Input
from tqtool.errors import InputError
from tqtool.report.layer_facts import LayerFacts
from tqtool.validation.synthetic import SyntheticSet
from tqtool.validation.visibility import complete, query_positions

Arrays = tuple[
    Float32Array | None, Float32Array, Float32Array
]  # of a KV head: q (query heads of its group, n, dim) or None; k, v (tokens, dim)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Layers of one model (or one synthetic set); `load(i, h)` returns the arrays of KV head h of facts[i]."""

    name: str
    kind: Literal["dump", "synthetic"]
    facts: tuple[LayerFacts, ...]
    load: Callable[[int, int], Arrays]
    notes: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    readout: Callable[[int], Float32Array | None] | None = None  # of layers[index]: see `Head.readout`
    blame: Callable[[int, str], InputError] | None = None  # (layer index, "k") -> what is not finite, and where
    model: str = ""  # its name, where a manifest tells it
    model_layers: int | None = None
    model_context: int | None = None  # positions the model is made for

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers."""
        return tuple(facts.layer for facts in self.facts)

    @property
    def units(self) -> int:
        """How many KV heads there are in all layers."""
        return sum(facts.kv_heads for facts in self.facts)

    @property
    def proxies(self) -> bool:
        """Whether keys stand in for missing queries."""
        return all(facts.queries == 0 for facts in self.facts)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One KV head of one layer with the queries that read it: a unit of work."""

    facts: LayerFacts
    head: int
    q: Float32Array  # (queries, dim), position by position, the query heads of the group side by side
    positions: NDArray[np.intp]  # (queries,) where each query sits, counted from the first stored key, ascending
    k: Float32Array  # (tokens, key dim)
    v: Float32Array  # (tokens, value dim)
    sinks: NDArray[np.float64] | None = None  # (queries,) the learned sink of each query's head
    slopes: NDArray[np.float64] | None = None  # (queries,) its ALiBi slope
    readout: Float32Array | None = None  # (query heads, output dim, value dim): what a latent's heads make of outputs

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return self.facts.layer


def from_arrays(
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    q: NDArray[np.floating] | None = None,
    *,
    name: str = "arrays",
    kind: Literal["dump", "synthetic"] = "dump",
    causal: bool | None = None,
    scale: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Dataset:
    """Return a dataset of one layer: k and v (kv heads, tokens, dim), q (query heads, queries, key dim).

    `causal` None: causal if there are no more queries than keys. `facts` sets more fields of `LayerFacts`: window,
    chunk, softcap, sinks, alibi_slopes, first_token, layer. Raises `InputError` for shapes that do not fit.
    """
    check_shapes(None if q is None else q.shape, k.shape, v.shape)
    heads, tokens, dim = k.shape
    group = 1 if q is None else q.shape[0] // heads

    def load(index: int, head: int) -> Arrays:
        mine = None if q is None else as_float32(q[head * group : (head + 1) * group])
        return mine, as_float32(k[head]), as_float32(v[head])

    layer = LayerFacts(
        layer=0,
        kv_heads=heads,
        query_heads=heads * group,
        tokens=tokens,
        queries=0 if q is None else q.shape[1],
        key_dim=dim,
        value_dim=v.shape[2],
        scale=1 / sqrt(dim) if scale is None else scale,
        causal=(q is None or q.shape[1] <= tokens) if causal is None else causal,
    )
    return Dataset(name=name, kind=kind, facts=(replace(layer, **(facts or {})),), load=load)


def from_synthetic(made: SyntheticSet) -> Dataset:
    """Return a synthetic set as a dataset; synthetic sets are never causal."""
    return from_arrays(made.k, made.v, made.q, name=made.name, kind="synthetic", causal=False)


def check_shapes(q: tuple[int, ...] | None, k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raises: `InputError` unless keys, values and queries (heads, length, dim) fit each other."""
    if len(k) != 3 or 0 in k:
        raise InputError(f"k is {k}, need (heads, tokens, dim)", code="shape")
    if k[:2] != v[:2] or len(v) != 3 or 0 in v:
        raise InputError(f"k is {k}, v is {v}", code="shape-mismatch")
    if q is None:
        return
    if len(q) != 3 or 0 in q:
        raise InputError(f"q is {q}, need (heads, queries, dim)", code="shape")
    if q[2] != k[2]:
        raise InputError(f"q is {q}, k is {k}", code="shape-mismatch")
    if q[0] % k[0]:
        raise InputError(
            f"{q[0]} query heads cannot share {k[0]} key heads",
            code="gqa",
            hint="if heads and tokens were read the wrong way round, say so with --layout",
        )


def head_of(data: Dataset, index: int, head: int, max_queries: int | None = None) -> Head:
    """Return one unit: at most `max_queries` evenly spaced queries of each query head.

    Queries some of whose keys are no longer stored are left out. Raises: `InputError` for values that are not finite,
    and where no query is left.
    """
    facts = data.facts[index]
    q, k, v = data.load(index, head)
    for name, x in (("k", k), ("v", v), ("q", q)):
        if x is not None and not np.isfinite(x).all():
            raise _not_finite(data, index, head, name, x)
    if q is None:
        if len(k) < 2:
            raise InputError(f"{data.name}: one key has no earlier keys to read", code="shape")
        q, positions = k[None, 1:], np.arange(len(k) - 1)
        return _unit(replace(facts, sinks=(), alibi_slopes=()), head, q, positions, k, v, max_queries)
    positions = query_positions(facts)
    usable = complete(facts, positions)
    if not usable.all():
        q, positions = q[:, usable], positions[usable]
    unit = _unit(facts, head, q, positions, k, v, max_queries)
    return unit if data.readout is None else replace(unit, readout=data.readout(index))


def _unit(
    facts: LayerFacts,
    head: int,
    q: Float32Array,
    positions: NDArray[np.intp],
    k: Float32Array,
    v: Float32Array,
    max_queries: int | None,
) -> Head:
    """Thin the queries of a group, (query heads, queries, dim), and lay them position by position."""
    chosen = evenly(len(positions), max_queries)
    rows = q[:, chosen].transpose(1, 0, 2).reshape(-1, q.shape[2])

    def of_rows(numbers: tuple[float, ...]) -> NDArray[np.float64] | None:
        return np.tile(numbers[head * len(q) : (head + 1) * len(q)], len(chosen)) if numbers else None

    where = np.repeat(positions[chosen], len(q))
    return Head(facts, head, rows, where, k, v, of_rows(facts.sinks), of_rows(facts.alibi_slopes))


def _not_finite(data: Dataset, index: int, head: int, name: str, x: Float32Array) -> InputError:
    found = data.blame(index, name) if data.blame else refusal(x)
    place = "" if data.blame else f"{data.name}: {name} of layer {data.layers[index]}, head {head}: "
    repair = "a query, key or value that is not finite has no attention; repair the capture"
    hint = repair if found.code == "non-finite" else found.hint
    return InputError(f"{place}{found}", code=found.code, hint=hint, path=found.path)


def evenly(count: int, limit: int | None) -> NDArray[np.intp]:
    """Return at most `limit` evenly spaced indices below `count`, the last one among them."""
    if limit is None or limit >= count:
        return np.arange(count)
    return count - 1 - (np.arange(limit) * count // limit)[::-1]


@health.quiet
def as_float32(x: NDArray[Any]) -> Float32Array:
    """Return the values as contiguous float32."""
    return np.ascontiguousarray(x, np.float32)
