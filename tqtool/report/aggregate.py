"""From values per query and per head to the `Summary` of a row: macro means, tails, worst cases, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tqtool.dtypes import Float64Array
from tqtool.report.model import METRICS, Summary

TAIL_QUERIES = 500  # fewer pooled queries leave nothing of a 1 % tail
MIN_CLUSTERS = 8  # fewer heads cannot be resampled
MIN_DECISIVE = 20  # of top1_decisive, in one head
CONFIDENCE = (2.5, 97.5)


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """The (layer, head) pairs behind a row, in order, and the bootstrap draws over them, shared by all metrics."""

    layers: tuple[int, ...]  # of each cluster
    heads: tuple[int, ...]
    draws: Float64Array  # (draws, clusters) how often each cluster was drawn

    @property
    def names(self) -> list[str]:
        """Names as printed: "L07.H2"."""
        return [f"{layer_name(layer)}.H{head}" for layer, head in zip(self.layers, self.heads, strict=True)]


def layer_name(layer: int) -> str:
    """Return "L07"."""
    return f"L{layer:02d}"


def clusters(layers: Sequence[int], heads: Sequence[int], draws: int) -> Clusters:
    """Return the clusters with `draws` seeded bootstrap draws."""
    count = len(layers)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
    return Clusters(tuple(layers), tuple(heads), drawn)


def head_means(metric: str, values: Sequence[Float64Array]) -> Float64Array:
    """Return the mean of each head over its queries, NaN where there are none (or too few decisive ones)."""
    least = MIN_DECISIVE if metric == "top1_decisive" else 1
    means = np.full(len(values), np.nan)
    for i, one in enumerate(values):
        known = one[~np.isnan(one)]
        if len(known) >= least:
            means[i] = known.mean()
    return means


def summarize(metric: str, seeds: Sequence[Sequence[Float64Array]], where: Clusters) -> Summary:
    """Return the summary of one metric; `seeds` holds, for each rotation seed, the per-query values of each head."""
    found = [_summarize_seed(metric, heads, where) for heads in seeds]
    lower = METRICS[metric].better != "higher"
    worst = max(found, key=lambda s: s.worst) if lower else min(found, key=lambda s: s.worst)
    layer = max(found, key=lambda s: s.worst_layer) if lower else min(found, key=lambda s: s.worst_layer)
    means = np.mean([head_means(metric, heads) for heads in seeds], axis=0)
    ci_low, ci_high, method = _interval(means, seeds[0], where)
    return Summary(
        mean=float(np.mean([s.mean for s in found])),
        low=min(s.low for s in found),
        high=max(s.high for s in found),
        tail_percent=found[0].tail_percent,
        min=min(s.min for s in found),
        max=max(s.max for s in found),
        worst=worst.worst,
        worst_head=worst.worst_head,
        worst_layer=layer.worst_layer,
        worst_layer_name=layer.worst_layer_name,
        ci_low=ci_low,
        ci_high=ci_high,
        ci_method=method,
        seed_low=min(s.mean for s in found),
        seed_high=max(s.mean for s in found),
        count=found[0].count,
        reason=found[0].reason,
    )


def _summarize_seed(metric: str, heads: Sequence[Float64Array], where: Clusters) -> Summary:
    means = head_means(metric, heads)
    pooled = np.concatenate(heads)
    pooled = pooled[~np.isnan(pooled)]
    if np.isnan(means).all():
        reason = "not defined for any query" if len(pooled) == 0 else f"{len(pooled)} queries are too few"
        return absent(reason, len(pooled))
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    by_layer = {layer: means[np.array(where.layers) == layer] for layer in dict.fromkeys(where.layers)}
    layers = {layer: float(np.nanmean(part)) for layer, part in by_layer.items() if not np.isnan(part).all()}
    worst = int(np.nanargmax(sign * means))
    worst_layer = max(layers, key=lambda layer: sign * layers[layer])
    percent = 1 if len(pooled) >= TAIL_QUERIES else 5
    low, high = np.quantile(pooled, [percent / 100, 1 - percent / 100])
    mean = float(np.nanmean(means))
    nan = float("nan")
    return Summary(
        mean=mean,
        low=float(low),
        high=float(high),
        tail_percent=percent,
        min=float(pooled.min()),
        max=float(pooled.max()),
        worst=float(means[worst]),
        worst_head=where.names[worst],
        worst_layer=layers[worst_layer],
        worst_layer_name=layer_name(worst_layer),
        ci_low=nan,
        ci_high=nan,
        ci_method="",
        seed_low=mean,
        seed_high=mean,
        count=len(pooled),
    )


def _interval(means: Float64Array, heads: Sequence[Float64Array], where: Clusters) -> tuple[float, float, str]:
    """95 % interval of the macro mean: cluster bootstrap, or from the queries' spread under 8 clusters."""
    known = ~np.isnan(means)
    if known.sum() >= MIN_CLUSTERS:
        with np.errstate(invalid="ignore"):
            drawn = (where.draws @ np.where(known, means, 0.0)) / (where.draws @ known.astype(np.float64))
        low, high = np.nanpercentile(drawn, CONFIDENCE)
        return float(low), float(high), "cluster bootstrap"
    variance = 0.0
    for one, used in zip(heads, known, strict=True):
        values = one[~np.isnan(one)]
        if used and len(values) > 1:
            variance += float(values.var(ddof=1)) / len(values)
        elif used:
            return float("nan"), float("nan"), ""
    if not known.any():
        return float("nan"), float("nan"), ""
    half = 1.96 * np.sqrt(variance) / known.sum()
    mean = float(means[known].mean())
    return mean - float(half), mean + float(half), "per-query SE"


def absent(reason: str, count: int = 0) -> Summary:
    """Return the summary of a metric that could not be measured."""
    nan = float("nan")
    return Summary(nan, nan, nan, 1, nan, nan, nan, "", nan, "", nan, nan, "", nan, nan, count, reason)
