"""Named synthetic data sets: each shows one thing, none says anything about a model.

`gaussian` and `correlated` are the two columns of the specification's table; the other five are stress sets. All
come from one PCG64 seed; `RECIPE` is recorded in every report and is raised when a definition changes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.dtypes import Float32Array
from tqtool.errors import UsageError

RECIPE = 1
DIM = 128
HEADS = 8
TOKENS = 256
QUERIES = 64  # of each head


PURPOSE: dict[str, str] = {
    "gaussian": "Q, K, V independent N(0, 1): the codec's theory in closed form",
    "correlated": "12 % of the energy of K and V in one direction per head; queries 2 N(0, 1)",
    "peaky": "scores with standard deviation 4: sharp attention",
    "key-bias": "one offset of norm 60 on all keys, queries 2 N(0, 1): Qwen2-like projection biases",
    "value-mean": "a 5 sigma offset on all values, sharp attention: output cosine is blind here",
    "sink": "one dominant key with a small value: an attention sink",
    "outlier": "3 channels of the keys times 20: outlier channels",
}
DEFAULT = ("gaussian", "correlated")


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSet:
    """Queries (heads, queries, dim), keys and values (heads, tokens, dim), not causal."""

    name: str
    q: Float32Array
    k: Float32Array
    v: Float32Array


def synthetic_set(name: str, seed: int = 1) -> SyntheticSet:
    """Return the named set; every set draws its own numbers. Raises `UsageError` for an unknown name."""
    if name not in PURPOSE:
        raise UsageError(f"no synthetic set {name!r}; there are {', '.join(PURPOSE)}", code="usage")
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])  # by name: the order of names is no input
    q = rng.standard_normal((HEADS, QUERIES, DIM))
    k = rng.standard_normal((HEADS, TOKENS, DIM))
    v = rng.standard_normal((HEADS, TOKENS, DIM))
    match name:
        case "correlated":
            q *= 2
            k = np.sqrt(0.88) * k + np.sqrt(0.12 * DIM) * _directions(rng)
            v = np.sqrt(0.88) * v + np.sqrt(0.12 * DIM) * _directions(rng)
        case "peaky":
            q *= 4
        case "key-bias":
            q *= 2
            k += 60 * _directions(rng)
        case "value-mean":
            q *= 3
            v += 5 * np.sqrt(DIM) * _directions(rng)
        case "sink":
            towards = _directions(rng)
            q += np.sqrt(DIM) * towards
            k[:, :1] = 6.5 * towards  # about 6.5 above the other scores, whose spread is 1
            v[:, :1] *= 0.1
        case "outlier":
            k[..., :3] *= 20
    return SyntheticSet(name, *(part.astype(np.float32) for part in (q, k, v)))


def _directions(rng: np.random.Generator) -> NDArray[np.float64]:
    """One random unit vector per head, (heads, 1, dim)."""
    vectors = rng.standard_normal((HEADS, 1, DIM))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
