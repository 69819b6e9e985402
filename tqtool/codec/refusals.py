"""The errors that say which values cannot be encoded: found in an array here, in a file by `health`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.blocks import block_rows, row_blocks
from tqtool.codec.reference import MAX_NORM, column_norms
from tqtool.dtypes import AnyArray, Float64Array
from tqtool.errors import InputError

Place = tuple[int, ...]


def refusal(x: AnyArray) -> InputError:
    """Return the error that says where x (..., dim) is not finite or too long. One of the two must hold."""
    found = [(name, int(at.sum()), _first(at)) for name, at in (("NaN", np.isnan(x)), ("Inf", np.isinf(x))) if at.any()]
    if found:
        return non_finite(found)
    for start, rows in row_blocks(x, block_rows(x.shape[-1])):
        bad = too_long(rows)
        if bad.any():
            row = int(bad.argmax())
            place = tuple(int(i) for i in np.unravel_index(start + row, x.shape[:-1]))
            return beyond_limit(place, float(lengths(rows[row].astype(np.float64))))
    raise AssertionError("an array was refused that has nothing wrong")


def non_finite(found: Iterable[tuple[str, int, Place]], *, label: str = "", path: str | None = None) -> InputError:
    """Return the error for values that are not finite: of each kind its name, how many there are, the first place."""
    found = list(found)
    counts = ", ".join(f"{count} {name}" for name, count, _ in found)
    places = ", ".join(f"first {name} at {list(place)}" for name, _, place in found)
    hint = "--nan zero sets these values to 0"
    return InputError(f"{_prefix(label)}{counts}; {places}", code="non-finite", hint=hint, path=path)


def beyond_limit(place: Place, norm: float, *, label: str = "", path: str | None = None) -> InputError:
    """Return the error for a vector that is too long."""
    text = f"{_prefix(label)}vector {list(place)} has norm {norm:.2g}, the limit is 2^120"
    return InputError(text, code="norm-range", hint="rescale the data", path=path)


def too_long(vectors: AnyArray) -> NDArray[np.bool_]:
    """Return which vectors (..., dim) the encoder finds too long: in its own arithmetic, rounded to float32 first."""
    with np.errstate(over="ignore"):
        columns = np.ascontiguousarray(vectors.reshape(-1, vectors.shape[-1]).T, np.float32)
    return ~(column_norms(columns) <= MAX_NORM).reshape(vectors.shape[:-1])


def lengths(vectors: Float64Array) -> Float64Array:
    """Return the lengths of finite vectors (..., dim); one beyond float64 is infinite."""
    exponents = np.frexp(np.abs(vectors).max(axis=-1))[1]
    scaled = np.ldexp(vectors, -exponents[..., None])
    found: Float64Array = np.ldexp(np.sqrt(np.einsum("...d,...d->...", scaled, scaled)), exponents)
    return found


def _first(found: NDArray[np.bool_]) -> Place:
    return tuple(int(i) for i in np.unravel_index(int(found.argmax()), found.shape))


def _prefix(label: str) -> str:
    return f"{label}: " if label else ""
