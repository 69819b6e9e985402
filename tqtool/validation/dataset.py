"""What `validate` measures: layers of queries, keys and values, loaded one KV head at a time.

A dump, a synthetic set and arrays at hand all become a `Dataset`. Where queries are missing, keys stand in for them
(proxy queries): key i then reads the keys 0..i-1, since its product with itself would hide every error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import health
from tqtool.codec.refusals import refusal
from tqtool.dtypes import Float32Array
from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.dump import Dump
from tqtool.dumps.inputs import Input
from tqtool.errors import InputError
from tqtool.validation.synthetic import SyntheticSet

Arrays = tuple[
    Float32Array | None, Float32Array, Float32Array
]  # of a KV head: q (query heads of its group, n, dim) or None; k, v (tokens, dim)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Layers of one model (or one synthetic set); `load(i, h)` returns the arrays of KV head h of layers[i]."""

    name: str
    kind: Literal["dump", "synthetic"]
    layers: tuple[int, ...]
    load: Callable[[int, int], Arrays]
    heads: tuple[int, ...]  # KV heads of each layer
    group: int  # query heads that share a KV head; 1 where queries are missing
    tokens: int
    queries: int  # of each query head; 0 = missing
    dim: int
    causal: bool
    scale: float
    notes: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    blame: Callable[[int, str], InputError] | None = None  # (layer index, "k") -> what is not finite, and where

    @property
    def units(self) -> int:
        """How many KV heads there are in all layers."""
        return sum(self.heads)

    @property
    def proxies(self) -> bool:
        """Whether keys stand in for missing queries."""
        return self.queries == 0


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One KV head of one layer with the queries that read it: a unit of work."""

    layer: int
    head: int
    q: Float32Array  # (queries, dim), position by position, the query heads of the group side by side
    positions: NDArray[np.intp]  # (queries,) where each query sits among the keys, ascending
    k: Float32Array  # (tokens, dim)
    v: Float32Array


def from_arrays(
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    q: NDArray[np.floating] | None = None,
    *,
    name: str = "arrays",
    kind: Literal["dump", "synthetic"] = "dump",
    causal: bool | None = None,
    scale: float | None = None,
) -> Dataset:
    """Return a dataset of one layer: k, v (kv heads, tokens, dim), q (query heads, queries, dim).

    `causal` None: causal if there are no more queries than keys. Raises `InputError` for shapes that do not fit.
    """
    check_shapes(None if q is None else q.shape, k.shape, v.shape)
    heads, tokens, dim = k.shape
    group = 1 if q is None else q.shape[0] // heads
    queries = 0 if q is None else q.shape[1]

    def load(index: int, head: int) -> Arrays:
        mine = None if q is None else _float32(q[head * group : (head + 1) * group])
        return mine, _float32(k[head]), _float32(v[head])

    return Dataset(
        name=name,
        kind=kind,
        layers=(0,),
        load=load,
        heads=(heads,),
        group=group,
        tokens=tokens,
        queries=queries,
        dim=dim,
        causal=queries <= tokens if causal is None else causal,
        scale=1 / sqrt(dim) if scale is None else scale,
    )


def from_synthetic(made: SyntheticSet) -> Dataset:
    """Return a synthetic set as a dataset; synthetic sets are never causal."""
    return from_arrays(made.k, made.v, made.q, name=made.name, kind="synthetic", causal=False)


def check_shapes(q: tuple[int, ...] | None, k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raises: `InputError` unless keys, values and queries (heads, length, dim) fit each other."""
    if len(k) != 3 or 0 in k:
        raise InputError(f"k is {k}, need (heads, tokens, dim)", code="shape")
    if k != v:
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

    Raises: `InputError` for values that are not finite, and for queries that would see no key.
    """
    q, k, v = data.load(index, head)
    for name, x in (("k", k), ("v", v), ("q", q)):
        if x is not None and not np.isfinite(x).all():
            raise _not_finite(data, index, head, name, x)
    tokens = len(k)
    if q is None:
        if tokens < 2:
            raise InputError(f"{data.name}: one key has no earlier keys to read", code="shape")
        q, positions = k[None, 1:], np.arange(tokens - 1)
    else:
        # Without a causal mask every query sees all keys, as one past the last does.
        count = q.shape[1]
        positions = np.arange(tokens - count, tokens) if data.causal else np.full(count, tokens - 1)
    if positions[0] < 0:
        raise InputError(
            f"{data.name}: {q.shape[1]} queries but {tokens} keys: the first would see no key",
            code="shape-mismatch",
            hint="--no-causal lets every query see all keys",
        )
    chosen = evenly(len(positions), max_queries)
    rows = q[:, chosen].transpose(1, 0, 2).reshape(-1, q.shape[2])  # position by position
    return Head(data.layers[index], head, rows, np.repeat(positions[chosen], len(q)), k, v)


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
def _float32(x: NDArray[Any]) -> Float32Array:
    return np.ascontiguousarray(x, np.float32)


def from_dump(
    dump: Dump, *, name: str | None = None, causal: bool | None = None, scale: float | None = None
) -> Dataset:
    """Return a dump as a dataset; fewer queries than keys are those of the last positions.

    `name` replaces the dump's own, in the inputs too: a report should not tell where a package is installed.
    """
    shown = dump.name if name is None else name
    first = dump.layers[0]
    without = [layer.number for layer in dump.layers if layer.q is None]
    if 0 < len(without) < len(dump.layers):
        raise InputError(
            f"{shown}: layers {', '.join(map(str, without))} have no queries, the others have",
            code="no-queries",
            hint="capture the queries of every layer, or of none",
        )
    group = 1 if first.q is None else dump.query_heads // dump.kv_heads
    lengths = [(0 if layer.q is None else layer.q.shape[-2], layer.k.shape[-2]) for layer in dump.layers]
    inputs = tuple(
        Input(i.path if name is None else f"{name}/{PurePath(i.path).name}", i.sha256, i.shape, i.dtype)
        for i in dump.inputs()
    )

    def load(index: int, head: int) -> Arrays:
        layer = dump.layers[index]
        q = None if layer.q is None else _some_heads(layer.q, head * group, group)
        return q, _some_heads(layer.k, head, 1)[0], _some_heads(layer.v, head, 1)[0]

    return Dataset(
        name=shown,
        kind="dump",
        layers=tuple(layer.number for layer in dump.layers),
        load=load,
        heads=tuple(prod(layer.k.shape[:-2]) for layer in dump.layers),
        group=group,
        tokens=lengths[0][1],
        queries=lengths[0][0],
        dim=dump.dim,
        causal=all(queries <= tokens for queries, tokens in lengths) if causal is None else causal,
        scale=dump.scaling or 1 / sqrt(dump.dim),
        notes=dump.notes if name is None else (),
        inputs=inputs,
        blame=lambda index, kind: health.refusal_of(getattr(dump.layers[index], kind)),
    )


def _some_heads(source: ArraySource, start: int, count: int) -> Float32Array:
    """Read heads start … start + count - 1 of ([batch,] [heads,] tokens, dim) as (count, tokens, dim).

    The sequences of a batch count as more heads; a group of query heads never spans two of them.
    """
    lead, tail = source.shape[:-2], [range(size) for size in source.shape[-2:]]
    outer = np.unravel_index(start, lead) if lead else ()
    box = [range(int(i), int(i) + 1) for i in outer[:-1]]
    box += [range(int(i), int(i) + count) for i in outer[-1:]]
    return _float32(source.box((*box, *tail))).reshape(count, *source.shape[-2:])
