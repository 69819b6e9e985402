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


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def head_metrics(
    q: list[list[float]],
    k: list[list[float]],
    v: list[list[float]],
    kh: list[list[float]],
    vh: list[list[float]],
    *,
    distortion: float,
    expected: tuple[float, float],
) -> dict[str, float]:
    """Every metric of a report's row on one causal head of at least 17 keys a query; `kh`, `vh` are restored.

    `distortion` is D of the key width, `expected` the relative squared errors of theory, keys then values.
    """
    scale, mean_v = 1 / math.sqrt(len(q[0])), [mean(list(column)) for column in zip(*v, strict=True)]
    found: dict[str, list[float]] = {}

    def add(metric: str, value: float) -> None:
        found.setdefault(metric, []).append(value)

    def outputs(side: str, out: list[float], other: list[float]) -> None:
        moved, moved_other = ([a - m for a, m in zip(x, mean_v, strict=True)] for x in (out, other))
        add(f"cos{side}", cosine(out, other))
        add(f"rel_err{side}", rel_err(out, other))
        add(f"cos_centered{side}", cosine(moved, moved_other))
        add(f"rel_err_centered{side}", rel_err(moved, moved_other))

    for i, row in enumerate(q):
        seen = len(k) - len(q) + i + 1
        s, t = ([scale * math.fsum(a * b for a, b in zip(row, key, strict=True)) for key in x[:seen]] for x in (k, kh))
        p, o = softmax(s), softmax(t)
        out = mix(p, v[:seen])
        outputs("", out, mix(o, vh[:seen]))
        outputs("_konly", out, mix(o, v[:seen]))
        outputs("_vonly", out, mix(p, vh[:seen]))
        add("v_readout_err", rel_err(out, mix(p, vh[:seen])))
        add("kl", kl(p, o))
        add("kl_nosink", kl(renormalised(p, 1), renormalised(o, 1)))
        add("sigma_a", sigma_a(p, s, t))
        add("tv", tv(p, o))
        add("n_eff", n_eff(p))
        add("mass_8", mass_8(p, o))
        add("mass_8_nosink", mass_8(p[1:], o[1:]))
        add("noise", score_noise(p, row, k[:seen]))
        first, second = top(p, 2)
        if p[first] >= 2 * p[second]:
            add("top1_decisive", float(top(o, 1) == [first]))
    for side, x, y, theory in (("k", k, kh, expected[0]), ("v", v, vh, expected[1])):
        moved = math.fsum(
            norm([b - a for a, b in zip(one, other, strict=True)]) ** 2 for one, other in zip(x, y, strict=True)
        )
        add(f"{side}_rel_mse", moved / math.fsum(norm(one) ** 2 for one in x))
        add(f"{side}_distortion_ratio", found[f"{side}_rel_mse"][0] / theory)
        for one, other in zip(x, y, strict=True):
            add(f"{side}_cos", cosine(one, other))
            add(f"{side}_norm_ratio", norm(other) / norm(one))
    add("distortion_ratio", max(found["k_distortion_ratio"][0], found["v_distortion_ratio"][0]))
    add("sigma_rms", math.sqrt(mean([x * x for x in found["sigma_a"]])))
    add("sigma_pred", scale * math.sqrt(distortion * mean(found.pop("noise")) / len(q[0])))
    return {metric: mean(values) for metric, values in found.items()}


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
