"""What is unusual about vectors before they are encoded: not finite, zero, far too long, offset, outliers, noise.

Counts and norms come from a pass over all vectors (`scan`), shapes of distributions from a sample (`examine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import prod, sqrt
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.refusals import Place, beyond_limit, lengths, non_finite, too_long
from tqtool.codec.rotation import rotate, supported_dims
from tqtool.dumps.arrays import ArraySource, Box
from tqtool.errors import InputError

EXAMINED = 32  # arrays of a file, evenly spaced
SAMPLE_HEADS = 8
SAMPLE_TOKENS = 512  # of each head, in windows spread over its length
SAMPLE_WINDOWS = 4
FLOAT16_MAX = 65504.0
OUTLIER = 5.0  # a channel whose root mean square is so many times the median channel's
LARGE_OFFSET = 0.5  # share of a head's energy that is one constant vector
# Independent normal vectors: bounds around the values of theory, far from any captured cache.
IID_SPREAD = (0.7, 1.4)  # standard deviation of the squared norm over that of theory
IID_KURTOSIS = (2.7, 3.2)
IID_CHANNEL = 1.3  # largest channel root mean square over the median one
MIN_IID_VECTORS = 64

Values = NDArray[np.float32] | NDArray[np.float64]

P = ParamSpec("P")
R = TypeVar("R")


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function look for signalling NaNs and values beyond float32 without NumPy's warnings of them."""

    @wraps(function)
    def looking(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(invalid="ignore", over="ignore"):
            return function(*args, **kwargs)

    return looking


@dataclass(frozen=True, slots=True)
class Health:
    """Findings about one array. Positions count along the source's axes, the vector axis last."""

    vectors: int  # all of them
    examined: int  # of those, by the fields from `zero_vectors` on
    nan: int
    inf: int
    first_nan: Place | None
    first_inf: Place | None
    zero_vectors: int
    norm_min: float  # of vectors that are not zero; 0 if there are none
    norm_max: float
    first_too_long: Place | None  # of the vectors beyond 2^120 or beyond float32
    offset_share: float  # mean over heads of |mean x|^2 / mean |x|^2
    outlier_channels: tuple[int, ...]  # in any head
    kurtosis: float  # of a vector's coordinates; 3 for normal ones
    rotated_kurtosis: float
    looks_iid: bool

    def findings(self) -> dict[str, str]:
        """Return what somebody should know before encoding: one line for each kind of finding."""
        found = {}
        part = "" if self.examined == self.vectors else f" in a sample of {self.examined:,}"
        if self.zero_vectors:
            found["zero"] = f"{self.zero_vectors:,} zero vectors{part}: they stay zero"
        if self.norm_max > FLOAT16_MAX:
            found["norm"] = f"norms up to {self.norm_max:.6g}: beyond float16, so engines that store it lose them"
        if self.offset_share > LARGE_OFFSET:
            found["offset"] = f"one constant vector holds {self.offset_share:.0%} of the energy of a head"
        if self.looks_iid:
            found["iid"] = "looks like independent normal noise: its figures describe the codebook, not a model"
        return found


def looks_transposed(shape: tuple[int, ...]) -> str | None:
    """Return the question to ask if the last axis looks like tokens, None if it looks like a vector."""
    likely = [size for size in shape[:-1] if 64 <= size <= 256 and size in supported_dims()]
    if likely and shape[-1] > max(256, *shape[:-1]):
        return f"last axis {shape[-1]} > axis of {likely[-1]}: is the vector axis last? (--axis says which it is)"
    return None


def warnings_of(sources: Sequence[ArraySource]) -> tuple[str, ...]:
    """Return what somebody should know before these arrays of a file are encoded, from samples of some of them.

    A finding about several arrays is one line, which names the first.
    """
    step = -(-len(sources) // EXAMINED) or 1
    examined = sources[::step]
    findings: dict[str, list[tuple[ArraySource, str]]] = {}
    for source in examined:
        found = examine(sample(source), vectors=source.count).findings()
        if question := looks_transposed(source.shape):
            found["axis"] = question
        for kind, text in found.items():
            findings.setdefault(kind, []).append((source, text))
    return tuple(
        f"{first.label}: {text}" + (f" (and {len(more)} more of {len(examined)} arrays examined)" if more else "")
        for (first, text), *more in findings.values()
    )


@quiet
def sample(source: ArraySource) -> Values:
    """Return vectors of up to 8 heads, (heads, tokens, dim): all if there are few, else windows spread evenly.

    The longest leading axis is taken for the tokens.
    """
    lead = source.shape[:-1]
    if prod(lead) == 0:
        return np.empty((0, 0, source.dim), np.float32)
    tokens = max(range(len(lead)), key=lead.__getitem__)
    others = [axis for axis in range(len(lead)) if axis != tokens]
    heads = prod(lead[axis] for axis in others)
    rows = []
    for head in np.unique(np.linspace(0, heads - 1, SAMPLE_HEADS).astype(int)).tolist():
        index = np.unravel_index(head, [lead[axis] for axis in others]) if others else ()
        fixed = {axis: range(int(i), int(i) + 1) for axis, i in zip(others, index, strict=True)}
        windows = []
        for window in _windows(lead[tokens]):
            box = tuple(fixed.get(axis, window) for axis in range(len(lead)))
            values = source.box((*box, range(source.dim))).reshape(-1, source.dim)
            windows.append(values.astype(np.float64 if source.dtype == "f64" else np.float32))
        rows.append(np.concatenate(windows))
    return np.stack(rows)


def _windows(length: int) -> list[range]:
    if length <= SAMPLE_TOKENS:
        return [range(length)]
    size = SAMPLE_TOKENS // SAMPLE_WINDOWS
    return [range(start, start + size) for start in np.linspace(0, length - size, SAMPLE_WINDOWS).astype(int).tolist()]


@quiet
def examine(x: Values, *, vectors: int | None = None) -> Health:
    """Return the health of x (heads, tokens, dim), one head a group with one mean; not finite values count as 0.

    `vectors` is how many there are of which x is a sample.
    """
    wide = _counted(x)
    exponent = int(np.frexp(np.abs(wide).max(initial=0))[1])
    wide = np.ldexp(wide, -exponent)  # exact; squares of float64 would overflow
    squares = np.einsum("htd,htd->ht", wide, wide)
    positive = squares[squares > 0]
    offset = _offset_share(wide, squares)
    channels = np.sqrt(np.mean(wide**2, axis=1)) if wide.size else np.zeros((0, x.shape[-1]))  # (heads, dim)
    typical = np.median(channels, axis=1, keepdims=True) if channels.size else channels
    outliers = np.flatnonzero((channels > OUTLIER * typical).any(axis=0) & (typical > 0).any(axis=0))
    unit = wide[squares > 0].astype(np.float32) / np.sqrt(positive)[:, None].astype(np.float32)
    kurtosis = _kurtosis(unit)
    rotated = _kurtosis(rotate(unit)) if len(unit) and x.shape[-1] in supported_dims() else kurtosis
    lively = typical[:, 0] > 0
    uneven = float((channels.max(axis=1)[lively] / typical[lively, 0]).max(initial=0))
    return Health(
        vectors=squares.size if vectors is None else vectors,
        examined=squares.size,
        nan=int(np.isnan(x).sum()),
        inf=int(np.isinf(x).sum()),
        first_nan=None,
        first_inf=None,
        zero_vectors=int((squares == 0).sum()),
        norm_min=float(np.ldexp(sqrt(positive.min()), exponent)) if len(positive) else 0.0,
        norm_max=float(np.ldexp(sqrt(positive.max(initial=0)), exponent)),
        first_too_long=None,
        offset_share=offset,
        outlier_channels=tuple(int(channel) for channel in outliers),
        kurtosis=kurtosis,
        rotated_kurtosis=rotated,
        looks_iid=_looks_iid(wide, positive, offset, kurtosis, uneven),
    )


def _counted(values: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the values as float64, those that are not finite or that float32 rounds to 0 as 0."""
    counts = np.isfinite(values) & (values.astype(np.float32) != 0)
    return np.where(counts, values.astype(np.float64), 0.0)  # bfloat16 and a number have no common type in NumPy 1


def _offset_share(wide: NDArray[np.float64], squares: NDArray[np.float64]) -> float:
    """Mean over heads of |mean x|^2 / mean |x|^2; one vector alone is no offset."""
    if wide.shape[1] < 2:
        return 0.0
    means = wide.mean(axis=1)
    energy = squares.mean(axis=1)
    shares = np.einsum("hd,hd->h", means, means)[energy > 0] / energy[energy > 0]
    return float(shares.mean()) if len(shares) else 0.0


def _kurtosis(unit: NDArray[np.float32]) -> float:
    """Mean over unit vectors of dim * sum of x^4."""
    return float(unit.shape[-1] * np.mean(np.sum(unit.astype(np.float64) ** 4, axis=-1))) if len(unit) else 0.0


def _looks_iid(
    wide: NDArray[np.float64], positive: NDArray[np.float64], offset: float, kurtosis: float, uneven: float
) -> bool:
    """Whether vectors are as independent normal ones are: norms, coordinates, channels, neighbours and mean."""
    dim, tokens = wide.shape[-1], wide.shape[1]
    if len(positive) < MIN_IID_VECTORS or tokens < 2:
        return False
    spread = float(positive.std() / positive.mean() / sqrt(2 / dim))
    pairs = np.einsum("htd,htd->ht", wide[:, :-1], wide[:, 1:])
    correlation = abs(float(pairs.mean())) / float(positive.mean())
    return (
        IID_SPREAD[0] < spread < IID_SPREAD[1]
        and IID_KURTOSIS[0] < kurtosis < IID_KURTOSIS[1]
        and uneven < IID_CHANNEL + 3 / sqrt(tokens)
        and correlation < 5 / sqrt(dim * pairs.size)
        and offset < 3 / tokens
    )


@quiet
def scan(source: ArraySource) -> Health:
    """Return the health of a whole array: counts, positions and norms of every vector, the rest from a sample."""
    total = replace(examine(sample(source), vectors=source.count), nan=0, inf=0, zero_vectors=0)
    norm_min, norm_max = np.inf, 0.0
    for box in source.boxes():
        values = source.box((*box, range(source.dim)))
        nan, inf = np.isnan(values), np.isinf(values)
        counted = _counted(values)
        norms = lengths(counted)
        positive = norms[norms > 0]
        norm_min = min(norm_min, float(positive.min(initial=np.inf)))
        norm_max = max(norm_max, float(positive.max(initial=0)))
        total = replace(
            total,
            nan=total.nan + int(nan.sum()),
            inf=total.inf + int(inf.sum()),
            first_nan=_earlier(total.first_nan, nan, box),
            first_inf=_earlier(total.first_inf, inf, box),
            first_too_long=_earlier(total.first_too_long, too_long(counted), box),
            zero_vectors=total.zero_vectors + int((norms == 0).sum()),
        )
    return replace(total, examined=source.count, norm_min=0.0 if norm_min == np.inf else norm_min, norm_max=norm_max)


def _earlier(place: Place | None, found: NDArray[np.bool_], box: Box) -> Place | None:
    """Return the first place of two: the one known, and the first true of a box."""
    if not found.any():
        return place
    index = np.unravel_index(int(found.argmax()), found.shape)
    starts = [indices.start for indices in box] + [0] * (found.ndim - len(box))
    here = tuple(int(i) + start for i, start in zip(index, starts, strict=True))
    return here if place is None else min(place, here)


@quiet
def refusal_of(source: ArraySource, *, nan_to_zero: bool = False) -> InputError:
    """Return the error that says what in the array cannot be encoded, and where; NaN can with `nan_to_zero`."""
    health = scan(source)
    kinds = (("NaN", health.nan, health.first_nan), ("Inf", health.inf, health.first_inf))
    found = [(name, count, place) for name, count, place in kinds if place is not None]
    if found and not nan_to_zero:
        return non_finite(found, label=source.label, path=source.path)
    place = health.first_too_long
    assert place is not None, "an array was refused that has nothing wrong"
    vector = source.box((*(range(i, i + 1) for i in place), range(source.dim)))
    return beyond_limit(place, float(lengths(_counted(vector)).max()), label=source.label, path=source.path)
