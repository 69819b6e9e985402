"""One function per metric of `validate`: formulas only, float64, one value per query (or per vector, or per head).

Shapes: scores, weights and their logarithms are (queries, keys); outputs are (queries, dim); vectors are (n, dim).
Where a key is not seen the weight and its logarithm are both 0, so that no sum meets 0 * inf. What is not defined
for a query (no such keys, an output of length 0) is NaN there. Source: the tables of `docs/metrics.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.plain import exponentials
from tqtool.dtypes import Float64Array

Index = NDArray[np.intp]

TOP = 8  # of mass_8
MASS_MIN_KEYS = 16  # with fewer keys the top 8 are most of them
OUTLIERS = 0.025  # of the channels: 3 of 128
DECISIVE = 2.0  # the best weight is at least so many times the second


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Attention weights p and their logarithms, (queries, keys); a learned sink is a column after the keys."""

    p: Float64Array
    log_p: Float64Array

    def of_keys(self, count: int) -> Weights:
        """Return the weights of the first `count` columns, not renormalised: those of the keys, without a sink."""
        return self if self.p.shape[1] == count else Weights(self.p[:, :count], self.log_p[:, :count])


def attention_weights(scores: Float64Array, seen: NDArray[np.bool_] | None = None) -> Weights:
    """Return the softmax over the seen keys (None: all); overwrites `scores`. Each query must see a key."""
    if seen is not None:
        np.copyto(scores, -np.inf, where=~seen)
    p = np.empty_like(scores)
    total = exponentials(scores, shifted=scores, out=p)
    p /= total
    scores -= np.log(total)
    if seen is not None:
        np.copyto(scores, 0.0, where=~seen)
    return Weights(p, scores)


def log_ratio(exact: Weights, other: Weights) -> Float64Array:
    """ln(p / p'), which is the score error with a constant per query taken away, and its sign turned."""
    return exact.log_p - other.log_p


def kl(exact: Weights, ratio: Float64Array) -> Float64Array:
    """sum_j p ln(p / p'), nats, the exact weights first; a learned sink counts as a key."""
    return row_products(exact.p, ratio)


def kl_without(exact: Weights, other: Weights, ratio: Float64Array, first: int) -> Float64Array:
    """KL of the weights renormalised over all keys but the first `first`, nats; NaN where nothing is left."""
    rest, other_rest = exact.p[:, first:].sum(axis=1), other.p[:, first:].sum(axis=1)
    inner = row_products(exact.p[:, first:], ratio[:, first:])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((rest > 0) & (other_rest > 0), inner / rest - np.log(rest / other_rest), np.nan)


def sigma_a(exact: Weights, ratio: Float64Array) -> Float64Array:
    """Standard deviation of the score error under the exact weights, nats.

    The constant that tells the log ratio from the score error drops out, as it does in softmax.
    """
    centred = ratio - kl(exact, ratio)[:, None]
    np.square(centred, out=centred)
    return np.sqrt(row_products(exact.p, centred))


def tv(exact: Weights, other: Weights) -> Float64Array:
    """Half the summed absolute difference: the share of attention moved."""
    moved = exact.p - other.p
    share: Float64Array = 0.5 * np.abs(moved, out=moved).sum(axis=1)
    return share


def n_eff(exact: Weights) -> Float64Array:
    """exp of the entropy: how many keys a query effectively reads."""
    return np.exp(-row_products(exact.p, exact.log_p))


def top_keys(weights: Weights, count: int) -> Index:
    """Return the indices of the `count` largest weights of each query, largest first, (queries, count)."""
    count = min(count, weights.p.shape[1])
    found = np.argpartition(weights.p, -count, axis=1)[:, -count:]
    found.sort(axis=1)  # equal weights: the lower index first
    order = np.argsort(-np.take_along_axis(weights.p, found, axis=1), axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)


def without_first(top: Index, first: int, count: int) -> Index:
    """Return the `count` best of `top` that are not among the first keys; top holds count + first of them."""
    order = np.argsort(top < first, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(top, order, axis=1)


def top1_decisive(exact: Weights, top: Index, other_top: Index) -> Float64Array:
    """1 where both have the same best key, 0 where not, NaN where p(1) < 2 p(2) or fewer than 2 keys are seen."""
    if top.shape[1] < 2:
        return np.full(len(top), np.nan)
    best = np.take_along_axis(exact.p, top[:, :2], axis=1)
    decisive = (best[:, 0] >= DECISIVE * best[:, 1]) & (np.count_nonzero(exact.p, axis=1) >= 2)
    return np.where(decisive, (top[:, 0] == other_top[:, 0]).astype(np.float64), np.nan)


def mass_8(exact: Weights, top: Index, other_top: Index, keys_seen: Index) -> Float64Array:
    """Exact mass of the other's top 8 over that of the exact top 8; NaN where fewer than 16 keys are seen."""
    mass, best = (np.take_along_axis(exact.p, t[:, :TOP], axis=1).sum(axis=1) for t in (other_top, top))
    with np.errstate(invalid="ignore"):
        return np.where((keys_seen >= MASS_MIN_KEYS) & (best > 0), mass / best, np.nan)


def row_products(x: Float64Array, y: Float64Array) -> Float64Array:
    """Return the dot product of each pair of rows."""
    products: Float64Array = np.einsum("ij,ij->i", x, y)
    return products


def lengths(x: Float64Array) -> Float64Array:
    """Return the L2 norm of each row."""
    return np.sqrt(row_products(x, x))


def cosine(x: Float64Array, other: Float64Array) -> Float64Array:
    """Cosine of each pair of rows; NaN where x is zero, 0 where only the other is."""
    product, norms = row_products(x, other), lengths(x) * lengths(other)
    with np.errstate(invalid="ignore"):
        cos = np.where(norms > 0, product / norms, 0.0)
    return np.where(lengths(x) > 0, cos, np.nan)


def rel_err(x: Float64Array, other: Float64Array) -> Float64Array:
    """|other - x| / |x| of each row; NaN where x is zero."""
    norm = lengths(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, lengths(other - x) / norm, np.nan)


def norm_ratio(x: Float64Array, other: Float64Array) -> Float64Array:
    """|other| / |x| of each row; NaN where x is zero."""
    norm = lengths(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, lengths(other) / norm, np.nan)


def score_noise(exact: Weights, q: Float64Array, k: Float64Array, slope: Float64Array | None = None) -> Float64Array:
    """|q|^2 sum_j p (1 - p) |k_j|^2: what turns a relative key error D into score noise.

    `slope` (queries, keys), where scores are capped: the derivative of the cap, whose square joins each term.
    """
    spread = exact.p * (1 - exact.p)
    if slope is not None:
        spread *= np.square(slope)
    return row_products(q, q) * (spread @ row_products(k, k))


def cap_slope(capped: Float64Array, cap: float) -> Float64Array:
    """Return the derivative of cap * tanh(s / cap) by s, from its value."""
    return 1 - np.square(capped / cap)


def sigma_pred(noise: float, distortion: float, scale: float, dim: int) -> float:
    """Predicted `sigma_a`, pooled: scale * sqrt(D M / dim), with M the mean of `score_noise`."""
    return float(scale * np.sqrt(distortion * noise / dim))


def readout_noise(exact: Weights, v: Float64Array, output: Float64Array) -> Float64Array:
    """sqrt(sum p^2 |v|^2) / |o|: times sqrt(D) it is the predicted `v_readout_err`; NaN where o is zero."""
    norm = lengths(output)
    spread = np.square(exact.p) @ row_products(v, v)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, np.sqrt(spread) / norm, np.nan)


def outlier_share(k: Float64Array) -> float:
    """Share of the energy about the mean that the strongest 2.5 % of channels hold; NaN where there is none."""
    channels = np.sort(np.square(k - k.mean(axis=0)).mean(axis=0))
    total = float(channels.sum())
    return float(channels[-max(1, round(OUTLIERS * len(channels))) :].sum()) / total if total > 0 else float("nan")


def sink_share(exact: Weights, first: int) -> Float64Array:
    """Attention on the first `first` keys."""
    share: Float64Array = exact.p[:, :first].sum(axis=1)
    return share


def mean(values: Float64Array) -> float:
    """Return the mean of the values that are defined, NaN where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
