"""Metrics of one query as plain double loops over Python floats: the referee of `tqtool.validation.metrics`."""

from __future__ import annotations

import math


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / math.fsum(weights) for w in weights]


def mix(p: list[float], v: list[list[float]]) -> list[float]:
    return [math.fsum(p[j] * v[j][c] for j in range(len(p))) for c in range(len(v[0]))]


def kl(p: list[float], other: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, other, strict=True))


def sigma_a(p: list[float], scores: list[float], other: list[float]) -> float:
    delta = [b - a for a, b in zip(scores, other, strict=True)]
    mean = math.fsum(w * d for w, d in zip(p, delta, strict=True))
    return math.sqrt(math.fsum(w * (d - mean) ** 2 for w, d in zip(p, delta, strict=True)))


def tv(p: list[float], other: list[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(p, other, strict=True)) / 2


def n_eff(p: list[float]) -> float:
    return math.exp(-math.fsum(w * math.log(w) for w in p))


def top(x: list[float], count: int) -> list[int]:
    return sorted(range(len(x)), key=lambda j: -x[j])[:count]


def mass_8(p: list[float], other: list[float]) -> float:
    return math.fsum(p[j] for j in top(other, 8)) / math.fsum(p[j] for j in top(p, 8))


def renormalised(p: list[float], first: int) -> list[float]:
    total = math.fsum(p[first:])
    return [w / total for w in p[first:]]


def norm(x: list[float]) -> float:
    return math.sqrt(math.fsum(a * a for a in x))


def cosine(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / (norm(x) * norm(y))


def rel_err(x: list[float], y: list[float]) -> float:
    return norm([b - a for a, b in zip(x, y, strict=True)]) / norm(x)


def score_noise(p: list[float], q: list[float], k: list[list[float]]) -> float:
    return norm(q) ** 2 * math.fsum(w * (1 - w) * norm(row) ** 2 for w, row in zip(p, k, strict=True))


def readout_noise(p: list[float], v: list[list[float]]) -> float:
    return math.sqrt(math.fsum(w * w * norm(row) ** 2 for w, row in zip(p, v, strict=True))) / norm(mix(p, v))


def scores_of_query(
    q: list[float],
    keys: dict[int, list[float]],
    position: int,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    slope: float = 0.0,
) -> dict[int, float]:
    """Scores by position of the keys that a query at a position sees; `keys` are all that the model had."""
    found = {}
    for place, key in keys.items():
        hidden = causal and place > position
        hidden |= window is not None and position - place >= window
        hidden |= chunk is not None and place // chunk != position // chunk
        if not hidden:
            score = scale * math.fsum(a * b for a, b in zip(q, key, strict=True))
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            found[place] = score - slope * (position - place)
    return found
