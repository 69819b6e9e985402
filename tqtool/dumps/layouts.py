"""Which axis is what: layers, batch, heads, tokens, dim. Sure or told, never guessed.

A layout is a string with one letter an axis: b batch, l layer, h heads, t tokens (n: vectors of one head), d dim.
"""

from __future__ import annotations

from tqtool.dumps.arrays import ArraySource
from tqtool.errors import InputError, UsageError

LAYOUTS = ("nd", "htd", "thd", "bhtd", "bthd", "lhtd", "lbhtd", "hdt")
MIN_AXES, MAX_AXES = 2, 6
CLEAR_RATIO = 4  # tokens outnumber heads at least so much where nothing else tells them apart


def check_layout(layout: str) -> None:
    """Raise `UsageError` unless the string is a layout; other orders of the same letters serve too."""
    letters = layout.replace("n", "t")
    if set(letters) <= set("lbhtd") and len(set(letters)) == len(letters) and {"t", "d"} <= set(letters):
        return
    raise UsageError(f"--layout {layout}: one of {' '.join(LAYOUTS)}", code="usage")


def vectors_last(source: ArraySource, *, layout: str | None = None, axis: int | None = None) -> ArraySource:
    """Return the array with its vector axis last, the others in their order.

    Raises `InputError` with code `shape` if the array has not the axes it should, `dim` if the vectors are empty.
    """
    shape = source.shape
    if not MIN_AXES <= len(shape) <= MAX_AXES:
        values = f"{len(shape)}-D array of {shape[0]} values" if len(shape) == 1 else f"{len(shape)}-D array"
        raise InputError(
            f"{source.label}: {values}; need (…, vectors, dim) of {MIN_AXES} to {MAX_AXES} axes",
            code="shape",
            hint="for one vector: x[None, :]" if len(shape) == 1 else None,
            path=source.path,
        )
    if layout is not None:
        check_layout(layout)
        _check_axes(source, layout)
        if axis is not None and axis % len(shape) != layout.index("d"):
            raise UsageError(f"--axis {axis} and --layout {layout} contradict each other", code="usage")
        axis = layout.index("d")
    axis = -1 if axis is None else axis
    if not -len(shape) <= axis < len(shape):
        raise InputError(f"{source.label}: {len(shape)}-D array has no axis {axis}", code="shape", path=source.path)
    if shape[axis] == 0:
        raise InputError(f"{source.label}: vectors of length 0, shape {shape}", code="dim", path=source.path)
    order = [i for i in range(len(shape)) if i != axis % len(shape)]
    return source.transposed((*order, axis % len(shape)))


def infer_layout(source: ArraySource, *, heads: int | None, numbered: bool) -> str:
    """Return the layout of an array whose last axis is dim.

    `heads` is the number of heads if a manifest tells it; `numbered` says that the name holds a layer number, so that
    a fourth axis is the batch and not the layers. Raises `InputError`, code `layout`, if two readings are left.
    """
    shape = source.shape
    if len(shape) == 2:
        return "td"
    if not 3 <= len(shape) <= 5:
        raise InputError(
            f"{source.label}: {len(shape)}-D array {shape}; need 2 to 5 axes", code="shape", path=source.path
        )
    lead = {3: "", 4: "b" if numbered or shape[0] == 1 else "l", 5: "lb"}[len(shape)]
    first, second = shape[-3:-1]
    if heads is not None:
        candidates = [pair for pair, size in (("ht", first), ("th", second)) if size == heads]
        told = f"; the manifest says {heads} heads"
    else:
        candidates = ["ht"] if CLEAR_RATIO * first <= second else ["th"] if CLEAR_RATIO * second <= first else []
        told = ""
    if len(candidates) != 1:
        heads_first, tokens_first = f"{lead}htd", f"{lead}thd"
        raise InputError(
            f"{source.label}: {shape}: tokens-first or heads-first?{told}",
            code="layout",
            hint=f"say --layout {heads_first} or --layout {tokens_first}",
            path=source.path,
        )
    return f"{lead}{candidates[0]}d"


def by_layer(source: ArraySource, layout: str) -> tuple[ArraySource, ...]:
    """Return the array's layers, one where the layout has no layer axis, each ([batch,] [heads,] tokens, dim)."""
    layout = layout.replace("n", "t")
    _check_axes(source, layout)
    order = [layout.index(letter) for letter in "lbhtd" if letter in layout]
    ordered = source.transposed(tuple(order))
    if "l" not in layout:
        return (ordered,)
    return tuple(ordered.take(0, index) for index in range(ordered.shape[0]))


def _check_axes(source: ArraySource, layout: str) -> None:
    if len(layout) != len(source.shape):
        raise InputError(
            f"{source.label}: {len(source.shape)}-D array {source.shape}; layout {layout} has {len(layout)} axes",
            code="shape",
            path=source.path,
        )
