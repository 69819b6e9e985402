"""Lloyd-Max codebooks: the best scalar quantizers for one coordinate of a random unit vector.

A coordinate t of a unit vector of length dim lies in [-1, 1] with density ~ (1 - t^2)^(a - 1), so that
u = (1 + t)/2 is Beta(a, a). The law names a: `beta` is dim/2 (the specification), `sphere` (dim - 1)/2 (the
exact marginal of a uniformly random direction), `gaussian` the limit N(0, 1/dim). Every density is
log-concave, so the optimum is unique and odd: the half t >= 0 is solved, the other half is its mirror image.

Source: Max 1960 and Lloyd 1982 for the method; Zandieh et al. 2025, arXiv:2504.19874, Lemma 1 for the law.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tqtool.codec.rotation import MAX_DIM, MIN_DIM
from tqtool.codec.solved import Solution, solved
from tqtool.codec.terms import LAWS, MAX_BITS, Law
from tqtool.dtypes import Float32Array, Float64Array
from tqtool.errors import BugError, UsageError

RESIDUAL_LIMIT = 1e-12  # in sigma; ten times what rounding leaves in the worst book of all dims and widths
NEWTON_GOAL = 1e-11  # in sigma; rounding leaves corrections below this at every width
NEWTON_LIMIT = 1e-10  # in sigma; a larger last correction means that the fixed point was not reached
LLOYD_STEP = 1e-2  # in sigma; below this Newton takes over: Lloyd alone needs 680 rounds at 4 bits
LLOYD_ROUNDS = 1000
NEWTON_ROUNDS = 12
NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """A scalar quantizer for the coordinates of random unit vectors, centred on zero."""

    dim: int
    bits: int
    law: Law
    centroids: Float64Array  # (2**bits,) ascending, exactly odd-symmetric
    boundaries: Float64Array  # (2**bits - 1,) midpoints; a value on a boundary takes the upper code
    mse: float  # expected squared error per coordinate under its own law; times dim: of a unit vector
    entropy: float  # of a code, in bits
    distortion: float  # D_b: expected relative squared error of a vector, from the published float32 tables
    residual: float  # how far a boundary or centroid is from its definition, in standard deviations
    lloyd_steps: int
    newton_steps: int

    @property
    def tables(self) -> tuple[Float32Array, Float32Array]:
        """(boundaries, centroids), centred and rounded once: what the codec and the C runtime use."""
        return rounded(self.boundaries), rounded(self.centroids)

    @property
    def unit_tables(self) -> tuple[Float32Array, Float32Array]:
        """(boundaries, centroids) for u = (1 + t)/2, the specification's domain [0, 1]."""
        return rounded((1 + self.boundaries) / 2), rounded((1 + self.centroids) / 2)


def rounded(table: Float64Array) -> Float32Array:
    """Return a table as it is published: float32, read-only."""
    published = table.astype(np.float32)
    published.flags.writeable = False
    return published


def exponent(dim: int, law: Law) -> float:
    """The a of Beta(a, a), infinite for the Gaussian limit."""
    return {"beta": dim / 2, "sphere": (dim - 1) / 2, "gaussian": math.inf}[law]


def variance(dim: int, law: Law) -> float:
    """Variance of one coordinate."""
    return 1 / dim if law == "gaussian" else 1 / (2 * exponent(dim, law) + 1)


def peak(dim: int, law: Law) -> float:
    """Density of a coordinate at zero: 1/B(a, 1/2), exact to rounding through whole numbers."""
    if law == "gaussian":
        return math.sqrt(dim / (2 * math.pi))
    twice = round(2 * exponent(dim, law))
    n = twice // 2
    fourth, central = 1 << 2 * n, math.comb(2 * n, n)
    return fourth / central / math.pi if twice % 2 else n * central / fourth


def density(t: Float64Array, dim: int, law: Law) -> Float64Array:
    """Probability density of a coordinate at t."""
    if law == "gaussian":
        return np.asarray(peak(dim, law) * np.exp(t * t * (-dim / 2)))
    return np.asarray(peak(dim, law) * np.exp((exponent(dim, law) - 1) * np.log1p(-t * t)))


def tail(t: Float64Array, dim: int, law: Law) -> Float64Array:
    """Probability of a coordinate above t, for t >= 0."""
    from scipy import special

    if law == "gaussian":
        return np.asarray(special.ndtr(-math.sqrt(dim) * t))
    return np.asarray(special.betainc(exponent(dim, law), 0.5, (1 - t) * (1 + t)) / 2)


def moments(lo: Float64Array, hi: Float64Array, dim: int, law: Law) -> Float64Array:
    """Integral of t times the density over each [lo, hi], for 0 <= lo <= hi."""
    width = (hi - lo) * (hi + lo)  # hi^2 - lo^2 without its cancellation
    if law == "gaussian":
        return np.asarray(peak(dim, law) / dim * np.exp(lo * lo * (-dim / 2)) * -np.expm1(width * (-dim / 2)))
    a = exponent(dim, law)
    with np.errstate(divide="ignore", invalid="ignore"):  # edges on 1: log 0, and 0/0 in an empty cell
        fall = -np.expm1(a * np.log1p(-width / ((1 - lo) * (1 + lo))))
        values = peak(dim, law) / (2 * a) * np.exp(a * np.log1p(-lo * lo)) * fall
    return np.where(hi > lo, values, 0.0)


def masses(lo: Float64Array, hi: Float64Array, dim: int, law: Law) -> Float64Array:
    """Probability of each cell [lo, hi], for 0 <= lo <= hi, in closed form."""
    return tail(lo, dim, law) - tail(hi, dim, law)


def half_cells(boundaries: Float64Array, dim: int, law: Law) -> tuple[Float64Array, Float64Array]:
    """(masses, means) of the cells into which positive `boundaries` cut t >= 0, (len(boundaries) + 1,) each."""
    lo = np.append(0.0, boundaries)
    hi = np.append(boundaries, math.inf if law == "gaussian" else 1.0)
    mass = masses(lo, hi, dim, law)
    # Differences of tails lose digits in narrow cells: from 5 bits on some books would miss RESIDUAL_LIMIT.
    # 20 Gauss-Legendre nodes are exact to rounding in every inner cell, the widest being one sigma.
    half = (hi - lo)[:-1, None] / 2
    mass[:-1] = (density(lo[:-1, None] + half * (1 + NODES), dim, law) * half) @ WEIGHTS
    return mass, moments(lo, hi, dim, law) / mass


def midpoints(means: Float64Array) -> Float64Array:
    """Boundaries of the nearest-neighbour cells of ascending levels."""
    return (means[:-1] + means[1:]) / 2


def quantiles(p: Float64Array, dim: int, law: Law, *, root: float = 1.0) -> Float64Array:
    """Quantiles of a coordinate, or of the law whose density is the coordinate's to the power 1/root."""
    from scipy import special

    if law == "gaussian":
        return np.asarray(special.ndtri(p) * math.sqrt(root / dim))
    a = (exponent(dim, law) - 1) / root + 1
    return np.asarray(2 * special.betaincinv(a, a, p) - 1)


def start(bits: int, dim: int, law: Law) -> Float64Array:
    """First positive boundaries: the best ones for many levels, quantiles of the density to the power 1/3."""
    return quantiles(0.5 + np.arange(1, 2 ** (bits - 1)) / 2**bits, dim, law, root=3)


def newton_correction(b: Float64Array, mass: Float64Array, means: Float64Array, dim: int, law: Law) -> Float64Array:
    """The step that a Newton iteration for b = midpoints(means(b)) subtracts from the boundaries b."""
    from scipy.linalg import solve_banded

    if not len(b):  # one bit: nothing to correct, and older SciPy refuses an empty system
        return b
    f = density(b, dim, law)
    below = f * (b - means[:-1]) / mass[:-1] / 2  # half the derivative of the mean below each boundary
    above = f * (means[1:] - b) / mass[1:] / 2  # and of the mean above it
    bands = np.zeros((3, len(b)))
    bands[0, 1:] = -below[1:]
    bands[1] = 1 - below - above
    bands[2, :-1] = -above[:-1]
    return np.asarray(solve_banded((1, 1), bands, b - midpoints(means), check_finite=False))


@functools.cache
def lloyd_max(dim: int, bits: int, law: Law = "beta") -> Codebook:
    """The optimal codebook of 2**bits levels for one coordinate of a unit vector of length dim.

    Common ones were solved beforehand and are read from a file.

    Raises: `UsageError` outside 16 <= dim <= 1024, 1 <= bits <= 8 and `LAWS`; `BugError` if not converged.
    """
    _check_arguments(dim, bits, law)
    found = solved(dim, bits, law) or solve(dim, bits, law)
    return Codebook(
        dim,
        bits,
        law,
        centroids=_frozen(_centroids(found.means)),
        boundaries=_frozen(_boundaries(found.edges)),
        mse=found.mse,
        entropy=found.entropy,
        distortion=found.distortion,
        residual=found.residual,
        lloyd_steps=found.lloyd_steps,
        newton_steps=found.newton_steps,
    )


def solve(dim: int, bits: int, law: Law) -> Solution:
    """Solve a codebook: Lloyd's algorithm from a good start, then Newton's method for the same fixed point.

    Raises: `BugError` if it did not converge.
    """
    sigma = math.sqrt(variance(dim, law))
    b = start(bits, dim, law)
    moved, lloyd_steps = math.inf, 0
    while moved > LLOYD_STEP * sigma and lloyd_steps < LLOYD_ROUNDS:
        previous, b = b, midpoints(half_cells(b, dim, law)[1])
        moved, lloyd_steps = _largest(b - previous), lloyd_steps + 1
    moved, newton_steps = math.inf, 0
    while moved > NEWTON_GOAL * sigma and newton_steps < NEWTON_ROUNDS:
        correction = newton_correction(b, *half_cells(b, dim, law), dim, law)
        b = b - correction
        moved, newton_steps = _largest(correction), newton_steps + 1

    mass, means = half_cells(b, dim, law)
    residual = _largest(b - midpoints(means)) / sigma
    if not (residual <= RESIDUAL_LIMIT and moved <= NEWTON_LIMIT * sigma):  # false for NaN
        raise BugError(
            f"codebook for dim {dim}, {bits} bits, {law}: residual {residual:.2g} sigma, last Newton correction "
            f"{moved / sigma:.2g} sigma; the limits are {RESIDUAL_LIMIT:g} and {NEWTON_LIMIT:g}",
            code="not-converged",
        )
    return Solution(
        means,
        b,
        mse=float(variance(dim, law) - 2 * np.sum(mass * means**2)),
        entropy=float(-2 * np.sum(mass * np.log2(mass))),
        distortion=table_error(rounded(_boundaries(b)), rounded(_centroids(means)), dim),
        residual=residual,
        lloyd_steps=lloyd_steps,
        newton_steps=newton_steps,
    )


def _centroids(means: Float64Array) -> Float64Array:
    return np.concatenate([-means[::-1], means])


def _boundaries(edges: Float64Array) -> Float64Array:
    return np.concatenate([-edges[::-1], [0.0], edges])


def cells(boundaries: Float64Array, dim: int, law: Law) -> tuple[Float64Array, Float64Array]:
    """(masses, first moments) of the cells that any ascending boundaries cut, (len(boundaries) + 1,) each."""
    end = math.inf if law == "gaussian" else 1.0
    edges = np.concatenate([[-end], np.clip(boundaries, -end, end), [end]])
    lo, hi = edges[:-1], edges[1:]
    # A cell is the part of it above zero and the mirror image of the part below.
    above, below = (np.maximum(lo, 0), np.maximum(hi, 0)), (np.maximum(-hi, 0), np.maximum(-lo, 0))
    mass = masses(*above, dim, law) + masses(*below, dim, law)
    return mass, moments(*above, dim, law) - moments(*below, dim, law)


def table_error(boundaries: ArrayLike, centroids: ArrayLike, dim: int, law: Law = "sphere") -> float:
    """Expected squared error of a unit vector, dim * E(t - c)^2, when any centred table quantizes it.

    `boundaries` (levels - 1,) and `centroids` (levels,) need not be symmetric, optimal or within [-1, 1]. Of a
    published table under the `sphere` law, whatever law made it, it is D_b: a randomly rotated vector follows that law.
    """
    c = np.asarray(centroids, np.float64)
    mass, moment = cells(np.asarray(boundaries, np.float64), dim, law)
    return float(dim * (variance(dim, law) + np.sum(mass * c * c - 2 * moment * c)))


def _largest(values: Float64Array) -> float:
    """Largest magnitude, 0 for no values at all (1 bit has no positive boundary)."""
    return float(np.max(np.abs(values), initial=0.0))


def _frozen(values: Float64Array) -> Float64Array:
    values.flags.writeable = False
    return values


def _check_arguments(dim: int, bits: int, law: str) -> None:
    if not MIN_DIM <= dim <= MAX_DIM:
        raise UsageError(f"dim {dim} is outside {MIN_DIM} to {MAX_DIM}", code="usage")
    if not 1 <= bits <= MAX_BITS:
        raise UsageError(f"{bits} bits is outside 1 to {MAX_BITS}", code="usage")
    if law not in LAWS:
        raise UsageError(f"no law {law!r}", code="usage", hint=f"one of {', '.join(LAWS)}")
