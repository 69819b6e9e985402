"""From what was measured to the rows and layers of the report: one place that knows which metric comes from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tqtool.codec.terms import FLOAT16_BYTES, FLOAT32_BYTES, Law
from tqtool.dtypes import Float64Array
from tqtool.report.aggregate import Clusters, absent, head_means, summarize
from tqtool.report.layer_facts import LayerFacts
from tqtool.report.model import METRICS, Bucket, LayerValues, Row, Summary
from tqtool.validation.coders import Configuration, shared_bytes
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
    context: int | None  # tokens at which sizes are priced; None: those of the dump
    thinned_to: int | None  # queries of each head, where memory asked for fewer

    def facts(self, layer: int) -> LayerFacts:
        """Return the facts of a layer by its number."""
        return next(facts for facts in self.data.facts if facts.layer == layer)


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


def held_tokens(facts: LayerFacts, context: int | None) -> int:
    """Return the tokens that the cache of a layer holds: those of the dump, or of a context; a window holds no more."""
    return min(x for x in (context or facts.tokens, facts.window, facts.chunk) if x is not None)


def _row(measured: Measured, configuration: Configuration) -> Row:
    data = measured.data
    key_bytes = value_bytes = keys_stored = values_stored = tokens = 0
    for facts in data.facts:
        n = held_tokens(facts, measured.context)
        k, v = configuration.side_bytes(n, facts)
        key_bytes, value_bytes = key_bytes + facts.kv_heads * k, value_bytes + facts.kv_heads * v
        keys_stored += facts.kv_heads * n * facts.key_dim
        values_stored += facts.kv_heads * n * sum(facts.stored_dims[1:])
        tokens += facts.kv_heads * n
    total, stored = key_bytes + value_bytes, keys_stored + values_stored
    sides = [side for facts in data.facts for side in zip(facts.stored_dims, configuration.bits, strict=False)]
    return Row(
        source=data.name,
        config=configuration.name,
        kind=configuration.kind,
        bits_per_value=8 * total / stored,
        key_bits_per_value=8 * key_bytes / keys_stored,
        value_bits_per_value=8 * value_bytes / values_stored if values_stored else 8 * key_bytes / keys_stored,
        pair_bytes=total / tokens,
        ratio_fp32=FLOAT32_BYTES * stored / total,
        ratio_fp16=FLOAT16_BYTES * stored / total,
        shared_bytes=shared_bytes(sides),
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
    return all(
        any(_values(measured, result, configuration.pair, metric)[0] > 0 for result in measured.seeds[0])
        for quantized, metric in zip(configuration.quantized, ("k_rel_mse", "v_rel_mse"), strict=True)
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
        facts = measured.facts(result.layer)
        distortion = measured.plan.key_coders[pair[0]].distortion
        known = np.nan if distortion is None else distortion(facts.key_dim)
        return np.array([sigma_pred(noise, known, facts.scale, facts.key_dim)])
    found = _per_query(result, pair, metric)
    assert found is not None, metric
    return found


def _predictions(measured: Measured, configuration: Configuration) -> dict[str, float]:
    """What theory expects of the row: KL and value read-out error from D_b, output cosine on `gaussian`."""
    key, value = configuration.pair
    by_key, by_value = measured.plan.key_coders[key].distortion, measured.plan.value_coders[value].distortion
    if by_key is None or by_value is None:
        return {}
    results = measured.seeds[0]

    def value_distortion(facts: LayerFacts) -> float:
        return by_key(facts.key_dim) if facts.latent else by_value(facts.value_dim)

    noise, readout = [], []
    for result in results:
        facts, context = measured.facts(result.layer), result.queries["", ""]
        pooled = float(np.mean(context["score_noise"]))
        noise.append(sigma_pred(pooled, by_key(facts.key_dim), facts.scale, facts.key_dim) ** 2 / 2)
        readout.append((value_distortion(facts), mean(context["readout_noise"])))
    by_error = {error: np.array([x for d, x in readout if d == error]) for error, _ in readout}
    shares = {error: int(np.count_nonzero(~np.isnan(x))) for error, x in by_error.items()}
    known = {error: mean(x) for error, x in by_error.items() if shares[error]}
    errors = [(float(np.sqrt(error)) * x, shares[error]) for error, x in known.items()]
    predicted = {
        "kl": float(np.mean(noise)),
        "v_readout_err": _weighted(errors),
        "k_cos": _weighted([(float(np.sqrt(1 - by_key(f.key_dim))), f.kv_heads) for f in measured.data.facts]),
        "v_cos": _weighted([(float(np.sqrt(1 - value_distortion(f))), f.kv_heads) for f in measured.data.facts]),
    }
    if measured.data.kind == "synthetic" and measured.data.name == "gaussian":
        facts = measured.data.facts[0]
        key_d, value_d = by_key(facts.key_dim), by_value(facts.value_dim)
        predicted["cos"] = float(np.sqrt((1 - value_d) / (1 + key_d)))  # scores have standard deviation 1
    return predicted


def _weighted(parts: Sequence[tuple[float, int]]) -> float:
    """Return the weighted mean; where all are equal, that number to the last bit."""
    if not parts:
        return float("nan")
    first, total = parts[0][0], sum(weight for _, weight in parts)
    return first + sum(weight * (x - first) for x, weight in parts) / total


def _buckets(measured: Measured, configuration: Configuration) -> tuple[Bucket, ...]:
    """Means by position of the query: the first 4 tokens, then doubling; none where position has no meaning."""
    results = [r for seed in measured.seeds for r in seed if measured.facts(r.layer).causal]
    if not results:
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
