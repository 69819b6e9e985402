"""What a foreign table costs against the optimum, which of its levels is off, and what probably went wrong.

Causes are recognised, not guessed: each is tried by making the table that the mistake would have made, and it is named
only if the levels agree with that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tqtool.codec.codebook import Codebook, cells, half_cells, lloyd_max, midpoints, quantiles, table_error, variance
from tqtool.codec.rotation import MAX_DIM, MIN_DIM
from tqtool.codec.terms import LAWS, Law
from tqtool.dtypes import Float64Array
from tqtool.errors import UsageError
from tqtool.foreign.tables import ForeignTable

Domain = Literal["centered", "unit", "unit-variance"]
Cause = Literal[
    "none",
    "digits",
    "law",
    "sigma",
    "equal-mass",
    "one-level",
    "uniform",
    "unconverged",
    "asymmetric",
    "boundaries",
    "unknown",
]

NORMAL_DIM = 128  # any will do: unit-variance levels of the Gaussian law do not depend on it
FLOAT32_STEP = 2.0**-24  # relative, and absolute in [0, 1]: half a unit in the last place
OPTIMAL = 1e-4  # in sigma: costs less than 1e-7 of the error
AGREES = 1e-3  # in sigma: closer than the tables of two different mistakes, further than printed digits
LLOYD_TRIALS = 400  # rounds of Lloyd's algorithm to follow from each start
UNIFORM_STARTS = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)  # half widths in sigma that programs begin with
NEGLIGIBLE = 1e-5  # of the error: what a coarse integral in the maker's program costs
SLOW = 0.3  # a round of Lloyd that covers less of the way to the optimum than this: the table is one of its rounds


@dataclass(frozen=True, slots=True, eq=False)
class Appraisal:
    """A foreign table beside the optimum of its law."""

    table: ForeignTable
    domain: Domain
    law: Law
    dim: int | None  # None: unit variance and no vector length, so the Gaussian law
    right: Float64Array  # (2**bits,) the optimal levels, in the table's own domain
    excess: float  # its expected squared error over the optimum's, less 1
    deviation: Float64Array  # (2**bits,) how far each level is from the optimum, in standard deviations
    cause: Cause
    sentence: str  # the cause in words

    @property
    def worst(self) -> int:
        """The index of the level that is off most."""
        return int(np.argmax(np.abs(self.deviation)))


def appraise(table: ForeignTable, *, dim: int | None = None, law: Law | None = None) -> Appraisal:
    """Hold a table against the optimum.

    The file's own length stands before `dim`; `law` stands before the file's own, and the `sphere` law, which rotated
    vectors follow, where neither is given.

    Raises: `UsageError` if the vector length is needed and unknown.
    """
    dim = table.dim or dim
    if dim is None:
        domain: Domain = "unit-variance"
        if _scale_mismatch(table, domain, NORMAL_DIM, "gaussian") > 2:
            raise UsageError(
                f"{table.name}: the vector length is not in the file and the levels have not variance 1",
                code="usage",
                hint=f"add --dim{_guess(table)}",
            )
        law = "gaussian"
    else:
        law = law or table.law or "sphere"
        domain = min(("centered", "unit", "unit-variance"), key=lambda each: _scale_mismatch(table, each, dim, law))
    book = lloyd_max(dim or NORMAL_DIM, table.bits, law)
    levels = _centered(table.levels, domain, book.dim)
    cuts = None if table.boundaries is None else _centered(table.boundaries, domain, book.dim)
    optimum = book.dim * book.mse
    sigma = math.sqrt(variance(book.dim, law))
    excess = table_error(midpoints(levels) if cuts is None else np.sort(cuts), levels, book.dim, law) / optimum - 1
    rounding = _unit(domain, book.dim) * (table.rounding + FLOAT32_STEP * np.maximum(np.abs(table.levels), 1e-30))
    cause, sentence = _cause(levels, cuts, rounding, book)
    deviation = (levels - book.centroids) / sigma
    if excess < NEGLIGIBLE and cause in ("digits", "unconverged", "asymmetric", "unknown"):
        cause, sentence = "none", f"optimal, but for {np.max(np.abs(deviation)):.1g} sigma"
    return Appraisal(
        table,
        domain,
        law,
        dim,
        right=_restated(book.centroids, domain, book.dim),
        excess=float(excess),
        deviation=deviation,
        cause=cause,
        sentence=sentence,
    )


def _unit(domain: Domain, dim: int) -> float:
    """The centred size of one unit of a domain."""
    return {"centered": 1.0, "unit": 2.0, "unit-variance": 1 / math.sqrt(dim)}[domain]


def _centered(values: Float64Array, domain: Domain, dim: int) -> Float64Array:
    return _unit(domain, dim) * (values - (0.5 if domain == "unit" else 0))


def _restated(values: Float64Array, domain: Domain, dim: int) -> Float64Array:
    return values / _unit(domain, dim) + (0.5 if domain == "unit" else 0)


def _scale_mismatch(table: ForeignTable, domain: Domain, dim: int, law: Law) -> float:
    """By what factor the table is wider or narrower than the optimum, if it is of this domain; at least 1."""
    right = float(np.sqrt(np.mean(lloyd_max(dim, table.bits, law).centroids ** 2)))
    found = float(np.sqrt(np.mean(_centered(table.levels, domain, dim) ** 2)))
    return max(found / right, right / found) if found else math.inf


def _guess(table: ForeignTable) -> str:
    """The vector length that the levels fit, as text for a hint."""
    levels = _centered(table.levels, "unit" if 0.4 < table.levels.mean() < 0.6 else "centered", NORMAL_DIM)
    ratio = np.mean(lloyd_max(NORMAL_DIM, table.bits, "gaussian").centroids ** 2) / np.mean(levels**2)
    return f"; these levels fit {NORMAL_DIM * ratio:.0f}" if 0.1 < ratio < 10 else ""


def _cause(
    levels: Float64Array, cuts: Float64Array | None, rounding: Float64Array, book: Codebook
) -> tuple[Cause, str]:
    """Name what made the levels differ from the book's; all centred."""
    dim, bits, law = book.dim, book.bits, book.law
    sigma = math.sqrt(variance(dim, law))
    off = np.abs(levels - book.centroids)

    def agrees(made: Float64Array) -> bool:
        return bool(np.max(np.abs(levels - made) - rounding) <= AGREES * sigma)

    if np.all(off <= rounding + OPTIMAL * sigma):
        if cuts is not None and np.max(np.abs(cuts - book.boundaries)) > AGREES * sigma:
            return "boundaries", "the levels are optimal, but the boundaries are not half way between them"
        if np.max(rounding) > AGREES * sigma:
            return "digits", f"right in the digits printed, which are too few: {np.max(off) / sigma:.1g} sigma are lost"
        return "none", f"optimal, to {np.max(off) / sigma:.1g} sigma"
    wrong = np.flatnonzero(off > rounding + OPTIMAL * sigma)
    if len(wrong) == 1 and len(levels) > 2:  # before what is told by a fit, which one level may not spoil
        return "one-level", f"only level {wrong[0]} is wrong, by {off[wrong[0]] / sigma:.2g} sigma: a slip of the pen?"
    for other in LAWS:
        made = lloyd_max(dim, bits, other).centroids
        if agrees(made) and np.max(np.abs(levels - made)) < np.max(off) / 2:
            return "law", f"this is the optimum of the {other} law, not of {law}"
    for other in LAWS:
        for ratio, made in _rescaled(levels, book, other):
            if agrees(made) and abs(ratio - 1) > AGREES:
                return "sigma", f"wrong sigma: every level is {ratio:.4f} of the right one{_known_ratio(ratio, dim)}"
    for other in LAWS:
        for name, made in _equal_mass(dim, bits, other):
            if agrees(made):
                return (
                    "equal-mass",
                    f"the levels are {name} of cells of equal probability; Lloyd's algorithm has not run",
                )
    if agrees(np.linspace(levels[0], levels[-1], len(levels))):
        return "uniform", "the levels are equally spaced: a uniform quantizer"
    if found := _lloyd_round(levels, dim, bits, law):
        return "unconverged", found
    lopsided = float(np.max(np.abs(levels + levels[::-1]))) / sigma
    mass, moment = cells(midpoints(levels), dim, law)
    moved = np.abs(np.divide(moment, mass, out=levels.copy(), where=mass > 0) - levels)
    slow = float(np.max(moved) / np.max(off)) < SLOW
    if lopsided > AGREES:
        also = ", and Lloyd's algorithm had not converged" if slow else ""
        return "asymmetric", f"the levels are not symmetric, by {lopsided:.3f} sigma{also}"
    if slow:
        return "unconverged", "not converged: Lloyd's algorithm moves the levels on, slowly, all in the right direction"
    if np.all(off <= AGREES * sigma):
        return "unknown", "close to the optimum, but not equal to any of the three laws"
    return "unknown", "no known mistake gives these levels"


def _ratio(levels: Float64Array, made: Float64Array) -> float:
    """The factor on `made` that fits the levels best; positive, since both ascend and `made` is odd."""
    return float(np.sum(levels * made) / np.sum(made**2))


def _rescaled(levels: Float64Array, book: Codebook, law: Law) -> Iterator[tuple[float, Float64Array]]:
    """Yield the table of the vector length that the levels fit best, and the book's own at their width."""
    own = fitted = lloyd_max(book.dim, book.bits, law)
    for _ in range(3):  # the shape depends on the length a little
        dim = round(fitted.dim / _ratio(levels, fitted.centroids) ** 2)
        fitted = lloyd_max(min(max(dim, MIN_DIM), MAX_DIM), book.bits, law)
    yield math.sqrt(book.dim / fitted.dim), fitted.centroids
    ratio = _ratio(levels, own.centroids)
    yield ratio, ratio * own.centroids


def _known_ratio(ratio: float, dim: int) -> str:
    """Name the slip behind a scale, where there is one."""
    known = {
        math.sqrt(0.5): "sigma = 1/sqrt(2 d) instead of 1/sqrt(d)",
        math.sqrt(2): "sigma = sqrt(2/d) instead of 1/sqrt(d)",
        math.sqrt(dim): "unit variance, not scaled by 1/sqrt(d)",
        0.5: "the width of the domain [0, 1] around zero",
    }
    name = next((text for value, text in known.items() if abs(ratio / value - 1) < 0.01), None)
    return f" ({name})" if name else f" (it fits d = {dim / ratio**2:.0f})"


def _equal_mass(dim: int, bits: int, law: Law) -> Iterator[tuple[str, Float64Array]]:
    """Yield the tables of cells of equal probability: their means, and their medians."""
    levels = 2**bits
    means = half_cells(quantiles(0.5 + np.arange(1, levels // 2) / levels, dim, law), dim, law)[1]
    medians = quantiles((np.arange(levels // 2, levels) + 0.5) / levels, dim, law)
    for name, upper in (("means", means), ("medians", medians)):
        yield name, np.append(-upper[::-1], upper)


def _lloyd_round(levels: Float64Array, dim: int, bits: int, law: Law) -> str | None:
    """Say which round of Lloyd's algorithm, from which of the usual starts, gives the levels, if one does."""
    half = 2 ** (bits - 1)
    sigma = math.sqrt(variance(dim, law))
    upper = levels[half:]
    best, sentence = AGREES * sigma, None
    if np.max(np.abs(levels + levels[::-1])) > best:
        return None
    for followed in dict.fromkeys((law, "gaussian")):
        for name, start in _starts(half, dim, bits, followed):
            c = start
            for rounds in range(1, LLOYD_TRIALS + 1):
                with np.errstate(invalid="ignore", divide="ignore"):  # empty cells of a start that is too wide
                    moved = half_cells(midpoints(c), dim, followed)[1]
                if not np.max(np.abs(moved - c)) > OPTIMAL * sigma:  # converged, or not a number
                    break
                c = moved
                if np.max(np.abs(c - upper)) < best:
                    best = float(np.max(np.abs(c - upper)))
                    sentence = (
                        f"not converged: as after {rounds} rounds of Lloyd's algorithm ({followed} law) from {name}"
                    )
    return sentence


def _starts(half: int, dim: int, bits: int, law: Law) -> Iterator[tuple[str, Float64Array]]:
    """Yield the usual first levels of Lloyd's algorithm, the upper half."""
    for name, made in _equal_mass(dim, bits, law):
        yield f"{name} of cells of equal probability", made[half:]
    spread = (np.arange(half) + 0.5) / half
    for width in UNIFORM_STARTS:
        yield f"even cells over +-{width:g} sigma", spread * width / math.sqrt(dim)
        yield f"even levels from -{width:g} to {width:g} sigma", spread / spread[-1] * width / math.sqrt(dim)
    yield "even cells over [-1, 1]", spread
