"""Measure one KV head under many configurations: the inner loop of `validate`.

Keys alone decide the weights and values alone what is read out, so each key coder and each value coder is applied
once and the configurations are pairs of them. Queries run in blocks whose size depends on the data alone: the
numbers do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tqtool.dtypes import Float32Array, Float64Array
from tqtool.health import examine
from tqtool.validation import metrics
from tqtool.validation.dataset import Head
from tqtool.validation.visibility import seen_keys

Pair = tuple[str, str]  # names of a key and a value coder; "" = exact

BLOCK_SCORES = 1 << 17  # of one block: 1 MiB, so that the passes over it stay in the cache
MIN_BLOCK_QUERIES = 16


@dataclass(frozen=True, slots=True)
class Coder:
    """One way to store the keys or the values of a head."""

    name: str  # "4" for 4 bits, "q8_0" …
    restore: Callable[[Float32Array, int, int], Float32Array]  # (tokens, dim), layer, seed -> what decoding gives
    expected: Callable[[Float32Array, int], float] | None = None  # (x, layer) -> summed squared error in theory
    distortion: Callable[[int], float] | None = None  # D_b by dim, for the predictions


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure on every head."""

    pairs: tuple[Pair, ...]  # configurations as names of coders
    key_coders: Mapping[str, Coder]
    value_coders: Mapping[str, Coder]
    residual_window: int = 0  # the newest tokens, seen from each query, are exact
    nosink_tokens: int = 1
    key_mean_removed: bool = False  # for sigma_pred: the coders see keys less their mean


@dataclass(frozen=True, slots=True, eq=False)
class HeadResult:
    """What one head gave."""

    layer: int
    head: int
    positions: NDArray[np.intp]  # of each query in the model's sequence
    queries: Mapping[Pair, Mapping[str, Float64Array]]  # per query; ("", "") holds what needs no configuration
    storage: Mapping[Pair, Mapping[str, float]]  # per head: ("4", "") for a key coder, ("", "2") for a value coder
    facts: Mapping[str, float]  # of the data alone: sizes, key offset, zero vectors
    keys_seen: int  # by the query that sees most
    overflow: frozenset[str]  # coders that gave back what is not finite; their numbers mean nothing


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """The keys and values of a head in float64, exact and as each coder gives them back."""

    k: Float64Array  # (tokens, dim)
    v: Float64Array
    mean_k: Float64Array  # (dim,)
    mean_v: Float64Array
    keys: Mapping[str, Float64Array]
    values: Mapping[str, Float64Array]


def measure_head(unit: Head, seed: int, *, plan: Plan) -> HeadResult:
    """Return every metric of one head under one rotation seed."""
    keys, key_overflow = _restored(plan.key_coders, unit.k, unit.layer, seed)
    if unit.facts.latent:  # one stored vector is key and value: the bits of values say nothing
        values, value_overflow = {name: x[:, : unit.facts.value_dim] for name, x in keys.items()}, frozenset[str]()
    else:
        values, value_overflow = _restored(plan.value_coders, unit.v, unit.layer, seed)
    k, v = unit.k.astype(np.float64), unit.v.astype(np.float64)
    stored = _Stored(k, v, k.mean(axis=0), v.mean(axis=0), keys, values)
    blocks = [_measure_block(unit, start, stop, stored, plan) for start, stop in _blocks(len(unit.q), len(k))]
    queries = {
        pair: {name: np.concatenate([block[pair][name] for block in blocks]) for name in found}
        for pair, found in blocks[0].items()
    }
    storage: dict[Pair, dict[str, float]] = {}
    for name, coder in plan.key_coders.items():
        expected = coder.expected(unit.k, unit.layer) if coder.expected else 0.0
        storage[name, ""] = _storage("k", k, keys[name], expected)
        if unit.facts.latent:  # the rotation spreads an error evenly over the coordinates
            share = unit.facts.value_dim / unit.facts.key_dim
            storage[name, ""] = storage[name, ""] | _storage("v", v, values[name], share * expected)
    for name, coder in plan.value_coders.items():
        if unit.facts.latent:
            break
        expected = coder.expected(unit.v, unit.layer) if coder.expected else 0.0
        storage["", name] = _storage("v", v, values[name], expected)
    overflow = key_overflow | value_overflow
    positions = unit.positions + unit.facts.first_token
    return HeadResult(unit.layer, unit.head, positions, queries, storage, _facts(unit), _most_seen(unit), overflow)


def values_per_query(head: Head, plan: Plan) -> int:
    """Return how many numbers `measure_head` keeps of a query: counted, on one query and one key of a head."""
    one = replace(
        head, q=head.q[:1], positions=np.zeros(1, np.intp), k=head.k[:1], v=head.v[:1], sinks=None, slopes=None
    )
    keys, values = ({name: Coder(name, _exact) for name in of} for of in (plan.key_coders, plan.value_coders))
    result = measure_head(one, 0, plan=replace(plan, key_coders=keys, value_coders=values))
    return sum(len(metrics_of) for metrics_of in result.queries.values())


def _exact(x: Float32Array, layer: int, seed: int) -> Float32Array:
    return x


def _restored(
    coders: Mapping[str, Coder], x: Float32Array, layer: int, seed: int
) -> tuple[dict[str, Float64Array], frozenset[str]]:
    """What each coder gives back, and the names of those that overflow: for them the exact values stand in."""
    with np.errstate(over="ignore", invalid="ignore"):  # other engines' float16 scales; ours refuse such vectors
        found = {name: coder.restore(x, layer, seed).astype(np.float64) for name, coder in coders.items()}
    overflow = frozenset(name for name, other in found.items() if not np.isfinite(other).all())
    return found | {name: x.astype(np.float64) for name in overflow}, overflow


def _blocks(queries: int, keys: int) -> list[tuple[int, int]]:
    step = max(MIN_BLOCK_QUERIES, BLOCK_SCORES // keys)
    return [(start, min(start + step, queries)) for start in range(0, queries, step)]


def _measure_block(
    unit: Head, start: int, stop: int, stored: _Stored, plan: Plan
) -> dict[Pair, dict[str, Float64Array]]:
    facts, positions = unit.facts, unit.positions[start:stop]
    last = int(positions[-1]) + 1 if facts.causal else len(stored.k)  # keys beyond are seen by no query of the block
    q, k, v = unit.q[start:stop].astype(np.float64), stored.k[:last], stored.v[:last]
    seen = seen_keys(facts, positions, last)
    recent = np.arange(last) > positions[:, None] - plan.residual_window if plan.residual_window else None
    keys_seen = np.full(len(q), last) if seen is None else np.count_nonzero(seen, axis=1)
    sinks = None if unit.sinks is None else unit.sinks[start:stop, None]
    bias = None if unit.slopes is None else unit.slopes[start:stop, None] * (np.arange(last) - positions[:, None])
    if sinks is not None and seen is not None:
        seen = np.concatenate([seen, np.ones((len(q), 1), bool)], axis=1)

    def scores_of(keys: Float64Array) -> Float64Array:
        scores = q_scaled @ keys.T
        if facts.softcap is not None:
            scores /= facts.softcap
            np.tanh(scores, out=scores)
            scores *= facts.softcap
        if bias is not None:
            scores += bias
        return scores

    def weights_of(scores: Float64Array) -> metrics.Weights:
        """A learned sink is one more key, after the others: of value zero, and never quantized."""
        whole = scores if sinks is None else np.concatenate([scores, sinks], axis=1)
        return metrics.attention_weights(whole, seen)

    q_scaled = q * facts.scale
    exact_scores = scores_of(k)
    slope = None
    if facts.softcap is not None:
        slope = metrics.cap_slope(exact_scores if bias is None else exact_scores - bias, facts.softcap)
    kept_scores = exact_scores.copy() if recent is not None else exact_scores
    with_sink = weights_of(exact_scores)
    exact = with_sink.of_keys(last)
    output = _read(unit, start, exact.p @ v)
    mean_output = _read(unit, start, np.broadcast_to(stored.mean_v, (len(q), len(stored.mean_v))))
    count = metrics.TOP + plan.nosink_tokens
    top = metrics.top_keys(exact, count)
    rest = metrics.without_first(top, plan.nosink_tokens, metrics.TOP)
    centred_keys = k - stored.mean_k if plan.key_mean_removed else k
    found: dict[Pair, dict[str, Float64Array]] = {
        ("", ""): {
            "n_eff": metrics.n_eff(with_sink),
            "sink_share": metrics.sink_share(exact, plan.nosink_tokens),
            "score_noise": metrics.score_noise(exact, q, centred_keys, slope),
            "readout_noise": np.full(len(q), np.nan)  # what an expansion does to an error is not known beforehand
            if unit.readout is not None
            else metrics.readout_noise(exact, v, output),
        }
    }

    def compare(other: Float64Array, side: str) -> dict[str, Float64Array]:
        moved, moved_other = output - mean_output, other - mean_output
        return {
            f"cos{side}": metrics.cosine(output, other),
            f"rel_err{side}": metrics.rel_err(output, other),
            f"cos_centered{side}": metrics.cosine(moved, moved_other),
            f"rel_err_centered{side}": metrics.rel_err(moved, moved_other),
        }

    def read_out(weights: Float64Array, restored: Float64Array) -> Float64Array:
        mixed: Float64Array = weights @ restored
        if recent is not None:  # what the newest tokens lost in the product above is given back
            since = max(0, int(positions[0]) - plan.residual_window + 1)
            mixed += np.where(recent[:, since:], weights[:, since:], 0.0) @ (v[since:] - restored[since:])
        return _read(unit, start, mixed)

    restored_values = {name: restored[:last] for name, restored in stored.values.items()}
    for name, restored in restored_values.items():
        side = compare(read_out(exact.p, restored), "_vonly")
        place = (name, "") if facts.latent else ("", name)
        found[place] = side | {"v_readout_err": side["rel_err_vonly"]}
    for name in plan.key_coders:
        scores = scores_of(stored.keys[name][:last])
        if recent is not None:
            np.copyto(scores, kept_scores, where=recent)
        other_with_sink = weights_of(scores)
        other = other_with_sink.of_keys(last)
        ratio = metrics.log_ratio(with_sink, other_with_sink)
        other_top = metrics.top_keys(other, count)
        other_rest = metrics.without_first(other_top, plan.nosink_tokens, metrics.TOP)
        found[(name, "")] = (
            found.get((name, ""), {})
            | {
                "kl": metrics.kl(with_sink, ratio),
                "kl_nosink": metrics.kl_without(exact, other, ratio[:, :last], plan.nosink_tokens),
                "sigma_a": metrics.sigma_a(with_sink, ratio),
                "tv": metrics.tv(with_sink, other_with_sink),
                "top1_decisive": metrics.top1_decisive(exact, top, other_top),
                "mass_8": metrics.mass_8(exact, top, other_top, keys_seen),
                "mass_8_nosink": metrics.mass_8(exact, rest, other_rest, keys_seen - plan.nosink_tokens),
            }
            | compare(_read(unit, start, other.p @ v), "_konly")
        )
        for value_name in dict.fromkeys(value for key, value in plan.pairs if key == name):
            restored = restored_values[name if facts.latent else value_name]
            found[(name, value_name)] = compare(read_out(other.p, restored), "")
    return found


def _read(unit: Head, start: int, mixed: Float64Array) -> Float64Array:
    """Return what the heads make of mixed values, (queries, dim), of the rows from `start` on.

    Of a latent each query head has its own expansion; rows take turns among the heads.
    """
    if unit.readout is None:
        return mixed
    heads = len(unit.readout)
    output = np.empty((len(mixed), unit.readout.shape[1]))
    for first in range(min(heads, len(mixed))):
        output[first::heads] = mixed[first::heads] @ unit.readout[(start + first) % heads].T
    return output


def _storage(side: str, exact: Float64Array, restored: Float64Array, expected: float) -> dict[str, float]:
    error, energy = float(np.sum((restored - exact) ** 2)), float(np.sum(exact * exact))
    return {
        f"{side}_rel_mse": error / energy if energy > 0 else np.nan,
        f"{side}_distortion_ratio": error / expected if expected > 0 else np.nan,
        f"{side}_cos": metrics.mean(metrics.cosine(exact, restored)),
        f"{side}_norm_ratio": metrics.mean(metrics.norm_ratio(exact, restored)),
    }


def _most_seen(unit: Head) -> int:
    last = int(unit.positions[-1])
    seen = seen_keys(unit.facts, unit.positions[-1:], last + 1)
    return len(unit.k) if seen is None else int(np.count_nonzero(seen))


def _facts(unit: Head) -> dict[str, float]:
    keys, values = (examine(x[None]) for x in (unit.k, unit.v))
    return {
        "key_offset": keys.offset_share,
        "outlier_share": metrics.outlier_share(unit.k.astype(np.float64)),
        "zero_keys": float(keys.zero_vectors),
        "zero_values": float(values.zero_vectors),
        "norm_max": max(keys.norm_max, values.norm_max),
        "iid": float(keys.looks_iid and values.looks_iid),
    }
