"""Which axis is what: layers, batch, heads, tokens, dim. Sure or told, never guessed.

A layout is a string with one letter an axis: b batch, l layer, h heads, t tokens (n: vectors of one head), d dim.
"""

from __future__ import annotations

from collections.abc import Mapping

from tqtool.dumps.arrays import ArraySource
from tqtool.dumps.manifest import AttentionClaims
from tqtool.dumps.names import Kind
from tqtool.errors import InputError, UsageError

LAYOUTS = ("nd", "htd", "thd", "bhtd", "bthd", "lhtd", "lbhtd", "hdt")
MIN_AXES, MAX_AXES = 2, 6
MAX_HEADS = 128  # no model has more: a longer axis holds tokens
FEW_TOKENS = 16  # heads a token: a prompt of at most eight tokens, read tokens first


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


def infer_layout(arrays: Mapping[Kind, ArraySource], claims: AttentionClaims, *, numbered: bool) -> str:
    """Return the layout of a layer's arrays, whose last axis is dim; `InputError`, code `layout`, if two are left.

    What decides: the heads that a manifest tells; that query heads are a multiple of KV heads, and queries no more than
    keys; that no model has more than `MAX_HEADS` heads; and that caches are kept heads first, where tokens first would
    leave a token for `FEW_TOKENS` heads or more. `numbered` says that the names hold a layer number, so
    that a fourth axis is the batch and not the layers.
    """
    source = arrays["k"] if "k" in arrays else next(iter(arrays.values()))
    shape = source.shape
    if len(shape) == 2:
        return "td"
    if not 3 <= len(shape) <= 4:
        hint = "say --layout, such as lbhtd; pages of a paged cache must be put in the order of their tokens first"
        raise InputError(
            f"{source.label}: {len(shape)}-D array {shape}; need 2 to 4 axes, or --layout",
            code="layout" if len(shape) == 5 else "shape",
            hint=hint if len(shape) == 5 else None,
            path=source.path,
        )
    lead = "" if len(shape) == 3 else "b" if numbered or shape[0] == 1 else "l"
    alike = {kind: each.shape[-3:-1] for kind, each in arrays.items() if len(each.shape) == len(shape)}
    # Heads of each array where they come before the tokens, and where they come after.
    readings = {
        "ht": {kind: (first, second) for kind, (first, second) in alike.items()},
        "th": {kind: (second, first) for kind, (first, second) in alike.items()},
    }
    possible = [pair for pair, reading in readings.items() if _is_told(reading, claims)]
    if len(possible) == 2:
        misfits = {pair: _misfit(readings[pair], causal=claims.causal is not False) for pair in possible}
        possible = [pair for pair in possible if misfits[pair] is None]
        if not possible:
            raise InputError(
                f"{source.label}: heads-first {misfits['ht']}, tokens-first {misfits['th']}",
                code="gqa" if "share" in str(misfits["ht"]) else "layout",
                hint=_CHOICE.format(lead=lead),
                path=source.path,
            )
    if len(possible) == 1:
        return f"{lead}{possible[0]}d"
    first, second = shape[-3:-1]
    heads = _told_heads(readings["ht"], claims)
    if not heads and second >= FEW_TOKENS * first:
        return f"{lead}htd"
    told = f"; the manifest says {heads[1]} heads" if heads else ""
    raise InputError(
        f"{source.label}: {shape}: tokens-first or heads-first? {first} tokens of {second} heads, or {first} heads of "
        f"{second} tokens{told}",
        code="layout",
        hint=_CHOICE.format(lead=lead),
        path=source.path,
    )


_CHOICE = "say --layout {lead}htd or --layout {lead}thd"


def _is_told(reading: Mapping[Kind, tuple[int, int]], claims: AttentionClaims) -> bool:
    """Whether heads are as the manifest says, and where it is silent not more than any model has."""
    told = _told_heads(reading, claims)
    return reading[told[0]][0] == told[1] if told else all(heads <= MAX_HEADS for heads, _ in reading.values())


def _told_heads(reading: Mapping[Kind, tuple[int, int]], claims: AttentionClaims) -> tuple[Kind, int] | None:
    """Return the kind whose heads a manifest tells: the keys', else the queries'; all are held against it later."""
    kinds: tuple[Kind, ...] = ("k", "q")
    for kind in kinds:
        count = claims.count(kind)
        if kind in reading and count is not None:
            return kind, count
    return None


def _misfit(reading: Mapping[Kind, tuple[int, int]], *, causal: bool) -> str | None:
    """Return what keeps queries and keys from fitting each other in a reading."""
    if not {"k", "q"} <= set(reading):
        return None
    (heads, queries), (kv_heads, keys) = reading["q"], reading["k"]
    if kv_heads and heads % kv_heads:
        return f"{heads} query heads cannot share {kv_heads} key heads"
    return f"{queries} queries are more than {keys} keys" if causal and queries > keys else None


def other_reading(source: ArraySource, layout: str) -> str | None:
    """Return the layout with dim and tokens exchanged, where both are equally long and the shape cannot tell."""
    layout = layout.replace("n", "t")
    if source.shape[layout.index("t")] != source.shape[layout.index("d")]:
        return None
    return layout.translate(str.maketrans("td", "dt"))


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
