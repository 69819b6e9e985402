"""From what was measured to the rows and layers of the report: one place that knows which metric comes from where."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tqtool.codec.terms import FLOAT16_BYTES, FLOAT32_BYTES, Law
from tqtool.dtypes import Float64Array
from tqtool.report.aggregate import Clusters, absent, head_means, summarize
from tqtool.report.model import METRICS, Bucket, LayerValues, Row, Summary
from tqtool.validation.coders import Configuration
from tqtool.validation.dataset import Dataset
from tqtool.validation.measure import HeadResult, Pair, Plan
from tqtool.validation.metrics import mean, sigma_pred

SPECIFICATION = {  # output cosines that the specification prints for its two synthetic columns
    "gaussian": {"K4/V2": "~0.94", "K4/V3": "~0.98", "K4/V4": "~0.99"},
    "correlated": {"K4/V2": "~0.975", "K4/V4": "~0.99"},
}
BUCKET_METRICS = ("cos", "rel_err", "kl", "v_readout_err")
FIRST_BUCKET = 4  # tokens; later buckets double


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The results of one dataset: for each rotation seed every head, in order."""

    data: Dataset
    plan: Plan
    configurations: tuple[Configuration, ...]
    seeds: tuple[tuple[HeadResult, ...], ...]
    where: Clusters
    law: Law
    thinned_to: int | None  # queries of each head, where memory asked for fewer


def rows_of(measured: Measured) -> list[Row]:
    """Return the rows with every metric; level, status, verdict and pareto are still to be judged."""
    return [_row(measured, configuration) for configuration in measurable(measured)]


def overflowed(measured: Measured) -> list[str]:
    """Return the names of the configurations that gave back what is not finite, somewhere."""
    bad = frozenset[str]().union(*(result.overflow for results in measured.seeds for result in results))
    return [one.name for one in measured.configurations if bad.intersection(one.pair)]


def measurable(measured: Measured) -> list[Configuration]:
    """Return the configurations whose numbers mean something."""
    bad = overflowed(measured)
    return [one for one in measured.configurations if one.name not in bad]


def _row(measured: Measured, configuration: Configuration) -> Row:
    data = measured.data
    key_bytes = value_bytes = values_stored = tokens = 0
    for result in measured.seeds[0]:
        n, dim = int(result.facts["tokens"]), int(result.facts["dim"])
        k, v = configuration.side_bytes(n, dim, result.layer)
        key_bytes, value_bytes = key_bytes + k, value_bytes + v
        values_stored, tokens = values_stored + n * dim, tokens + n
    total = key_bytes + value_bytes
    return Row(
        source=data.name,
        config=configuration.name,
        kind=configuration.kind,
        bits_per_value=8 * total / (2 * values_stored),
        key_bits_per_value=8 * key_bytes / values_stored,
        value_bits_per_value=8 * value_bytes / values_stored,
        pair_bytes=total / tokens,
        ratio_fp32=2 * FLOAT32_BYTES * values_stored / total,
        ratio_fp16=2 * FLOAT16_BYTES * values_stored / total,
        shared_bytes=configuration.shared_bytes(data.dim),
        level="none",
        status="pass" if _engaged(measured, configuration) else "error",
        verdict="",
        misses=(),
        pareto=False,
        metrics=_summaries(measured, configuration),
        predicted=_predictions(measured, configuration),
        published=_published(data, configuration),
        buckets=_buckets(measured, configuration),
        note=configuration.note,
    )


def _published(data: Dataset, configuration: Configuration) -> dict[str, str]:
    figure = SPECIFICATION.get(data.name, {}).get(configuration.name) if data.kind == "synthetic" else None
    return {"cos": figure} if figure else {}


def _engaged(measured: Measured, configuration: Configuration) -> bool:
    """Whether every side that should be quantized was changed somewhere."""
    key, value = configuration.pair
    sides = (("k_rel_mse", (key, "")), ("v_rel_mse", ("", value)))
    return all(
        any(result.storage[pair][metric] > 0 for result in measured.seeds[0])
        for quantized, (metric, pair) in zip(configuration.quantized, sides, strict=True)
        if quantized
    )


def _per_query(result: HeadResult, pair: Pair, metric: str) -> Float64Array | None:
    """Return the per-query (or one-value) array of a metric of a configuration on one head, None if it has none."""
    key, value = pair
    for place in ((key, value), (key, ""), ("", value), ("", "")):
        found = result.queries.get(place, {}).get(metric)
        if found is not None:
            return found
    for place in ((key, ""), ("", value)):
        stored = result.storage.get(place, {}).get(metric)
        if stored is not None:
            return np.array([stored])
    return None


def _summaries(measured: Measured, configuration: Configuration) -> dict[str, Summary]:
    found: dict[str, Summary] = {}
    for metric in METRICS:
        if metric == "distortion_ratio":
            continue
        seeds = [[_values(measured, r, configuration.pair, metric) for r in results] for results in measured.seeds]
        found[metric] = summarize(metric, seeds, measured.where)
    for metric in ("k_distortion_ratio", "v_distortion_ratio"):
        if np.isnan(found[metric].mean):
            found[metric] = absent("theory expects no error here: the side is untouched, or of another engine's format")
    sides = [found[f"{side}_distortion_ratio"] for side in "kv"]
    known = [side for side in sides if not np.isnan(side.mean)]
    larger = max(known, key=lambda side: side.mean) if known else sides[0]
    return {metric: found.get(metric, larger) for metric in METRICS}


def _values(measured: Measured, result: HeadResult, pair: Pair, metric: str) -> Float64Array:
    if metric == "sigma_rms":
        return np.array([np.sqrt(np.mean(np.square(result.queries[pair[0], ""]["sigma_a"])))])
    if metric == "sigma_pred":
        noise = float(np.mean(result.queries["", ""]["score_noise"]))
        dim = int(result.facts["dim"])
        distortion = measured.plan.key_coders[pair[0]].distortion
        known = np.nan if distortion is None else distortion(dim)
        return np.array([sigma_pred(noise, known, measured.plan.scale, dim)])
    found = _per_query(result, pair, metric)
    assert found is not None, metric
    return found


def _predictions(measured: Measured, configuration: Configuration) -> dict[str, float]:
    """What theory expects of the row: KL and value read-out error from D_b, output cosine on `gaussian`."""
    key, value = configuration.pair
    results, dim = measured.seeds[0], measured.data.dim
    by_key, by_value = measured.plan.key_coders[key].distortion, measured.plan.value_coders[value].distortion
    if by_key is None or by_value is None:
        return {}
    key_d, value_d = by_key(dim), by_value(dim)
    noise = [float(np.mean(r.queries["", ""]["score_noise"])) for r in results]
    readout = np.array([mean(r.queries["", ""]["readout_noise"]) for r in results])
    predicted = {
        "kl": float(np.mean([sigma_pred(n, key_d, measured.plan.scale, dim) ** 2 / 2 for n in noise])),
        "v_readout_err": float(np.sqrt(value_d)) * mean(readout),
        "k_cos": float(np.sqrt(1 - key_d)),
        "v_cos": float(np.sqrt(1 - value_d)),
    }
    if measured.data.kind == "synthetic" and measured.data.name == "gaussian":
        predicted["cos"] = float(np.sqrt((1 - value_d) / (1 + key_d)))  # scores have standard deviation 1
    return predicted


def _buckets(measured: Measured, configuration: Configuration) -> tuple[Bucket, ...]:
    """Means by position of the query: the first 4 tokens, then doubling; none where position has no meaning."""
    results = [r for seed in measured.seeds for r in seed]
    if not measured.plan.causal:
        return ()
    positions = np.concatenate([r.positions for r in results])
    edges = [0, FIRST_BUCKET]
    while edges[-1] <= positions.max():
        edges.append(edges[-1] * 2)
    columns = {
        metric: np.concatenate([_values(measured, r, configuration.pair, metric) for r in results])
        for metric in BUCKET_METRICS
    }
    found = []
    for first, stop in pairwise(edges):
        inside = (positions >= first) & (positions < stop)
        if count := int(np.count_nonzero(inside)):
            values = {m: mean(column[inside]) for m, column in columns.items()}
            found.append(Bucket(first, stop - 1, count // len(measured.seeds), values))
    return tuple(found)


def layers_of(measured: Measured) -> list[LayerValues]:
    """Return the means of every layer and head of every row, over the seeds."""
    found = []
    for configuration in measurable(measured):
        by_metric = {
            metric: np.mean(
                [
                    head_means(metric, [_values(measured, r, configuration.pair, metric) for r in results])
                    for results in measured.seeds
                ],
                axis=0,
            )
            for metric in METRICS
            if metric != "distortion_ratio"
        }
        for layer in dict.fromkeys(measured.where.layers):
            inside = np.array(measured.where.layers) == layer
            found.append(
                LayerValues(
                    source=measured.data.name,
                    config=configuration.name,
                    layer=layer,
                    values={m: mean(means[inside]) for m, means in by_metric.items()},
                    heads={m: tuple(map(float, means[inside])) for m, means in by_metric.items()},
                )
            )
    return found
