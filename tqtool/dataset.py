"""What `validate` measures: layers of queries, keys and values, loaded one layer at a time.

A dump, a synthetic set and arrays at hand all become a `Dataset`. Where queries are missing, keys stand in for them
(proxy queries): key i then reads the keys 0..i-1, since its product with itself would hide every error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import PurePath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.dumps import Dump
from tqtool.errors import InputError
from tqtool.health import refusal
from tqtool.report import Input
from tqtool.synthetic import SyntheticSet

Array = NDArray[np.float32]
Arrays = tuple[Array | None, Array, Array]  # q (query heads, n, dim) or None; k, v (kv heads, tokens, dim)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Layers of one model (or one synthetic set); `load(i)` returns the arrays of layers[i]."""

    name: str
    kind: Literal["dump", "synthetic"]
    layers: tuple[int, ...]
    load: Callable[[int], Arrays]
    kv_heads: int
    query_heads: int  # kv_heads where queries are missing
    tokens: int
    queries: int  # of each query head; 0 = missing
    dim: int
    causal: bool
    scale: float
    notes: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    blame: Callable[[int, str], InputError] | None = None  # (layer index, "k") -> what is not finite, and where

    @property
    def proxies(self) -> bool:
        """Whether keys stand in for missing queries."""
        return self.queries == 0


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One KV head of one layer with the queries that read it: a unit of work."""

    layer: int
    head: int
    q: Array  # (queries, dim), position by position, the query heads of the group side by side
    positions: NDArray[np.intp]  # (queries,) where each query sits among the keys, ascending
    k: Array  # (tokens, dim)
    v: Array


def from_arrays(
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    q: NDArray[np.floating] | None = None,
    *,
    name: str = "arrays",
    causal: bool | None = None,
    scale: float | None = None,
) -> Dataset:
    """Return a dataset of one layer: k, v (kv heads, tokens, dim), q (query heads, queries, dim).

    `causal` None: causal if there are no more queries than keys. Raises `InputError` for shapes that do not fit.
    """
    heads = k.shape[0]
    check_shapes(None if q is None else q.shape, k.shape, v.shape)
    arrays: Arrays = (None if q is None else _float32(q), _float32(k), _float32(v))
    queries = 0 if q is None else q.shape[1]
    return Dataset(
        name=name,
        kind="dump",
        layers=(0,),
        load=lambda index: arrays,
        kv_heads=heads,
        query_heads=heads if q is None else q.shape[0],
        tokens=k.shape[1],
        queries=queries,
        dim=k.shape[2],
        causal=queries <= k.shape[1] if causal is None else causal,
        scale=1 / sqrt(k.shape[2]) if scale is None else scale,
    )


def from_synthetic(made: SyntheticSet) -> Dataset:
    """Return a synthetic set as a dataset; synthetic sets are never causal."""
    heads, tokens, dim = made.k.shape
    return Dataset(
        name=made.name,
        kind="synthetic",
        layers=(0,),
        load=lambda index: (made.q, made.k, made.v),
        kv_heads=heads,
        query_heads=heads,
        tokens=tokens,
        queries=made.q.shape[1],
        dim=dim,
        causal=False,
        scale=1 / sqrt(dim),
    )


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


def heads_of(data: Dataset, index: int, max_queries: int | None = None) -> list[Head]:
    """Return the units of layers[index]; at most `max_queries` evenly spaced queries of each query head.

    Query head h reads KV head h // (query heads / KV heads). Raises `InputError` for a layer that does not fit.
    """
    q, k, v = data.load(index)
    check_shapes(None if q is None else q.shape, k.shape, v.shape)
    kv_heads, tokens, dim = k.shape
    if q is None:
        if tokens < 2:
            raise InputError(f"{data.name}: one key has no earlier keys to read", code="shape")
        q, positions = k[:, 1:], np.arange(tokens - 1)
    else:
        # Without a causal mask every query sees all keys, as one past the last does.
        positions = np.arange(tokens - q.shape[1], tokens) if data.causal else np.full(q.shape[1], tokens - 1)
    if positions[0] < 0:
        raise InputError(
            f"{data.name}: {q.shape[1]} queries but {tokens} keys: the first would see no key",
            code="shape-mismatch",
            hint="--no-causal lets every query see all keys",
        )
    chosen = evenly(len(positions), max_queries)
    group = q.shape[0] // kv_heads
    grouped = q.reshape(kv_heads, group, -1, dim)[:, :, chosen].transpose(0, 2, 1, 3)  # (kv heads, n, group, dim)
    where = np.repeat(positions[chosen], group)
    return [Head(data.layers[index], h, grouped[h].reshape(-1, dim), where, k[h], v[h]) for h in range(kv_heads)]


def evenly(count: int, limit: int | None) -> NDArray[np.intp]:
    """Return at most `limit` evenly spaced indices below `count`, the last one among them."""
    if limit is None or limit >= count:
        return np.arange(count)
    return count - 1 - (np.arange(limit) * count // limit)[::-1]


def _float32(x: NDArray[np.floating]) -> Array:
    return np.ascontiguousarray(x, np.float32)


def from_dump(
    dump: Dump, *, name: str | None = None, causal: bool | None = None, scale: float | None = None
) -> Dataset:
    """Return a dump as a dataset; fewer queries than keys are those of the last positions.

    `name` replaces the dump's own, in the inputs too: a report should not tell where a package is installed.
    """
    first = dump.layers[0]
    k, q = first.k.shape, None if first.q is None else first.q.shape
    shown = dump.name if name is None else name
    queries = 0 if q is None else q[-2]
    inputs = tuple(
        Input(i.path if name is None else f"{name}/{PurePath(i.path).name}", i.sha256, i.shape, i.dtype)
        for i in dump.inputs()
    )
    return Dataset(
        name=shown,
        kind="dump",
        layers=tuple(layer.number for layer in dump.layers),
        load=lambda index: dump.layers[index].arrays(),
        kv_heads=dump.kv_heads,
        query_heads=dump.kv_heads if q is None else dump.query_heads,
        tokens=k[-2],
        queries=queries,
        dim=dump.dim,
        causal=queries <= k[-2] if causal is None else causal,
        scale=dump.scaling or 1 / sqrt(dump.dim),
        notes=dump.notes if name is None else (),
        inputs=inputs,
        blame=lambda index, kind: refusal(getattr(dump.layers[index], kind)),
    )
