"""The C runtime, where it was compiled: the same operations as `reference`, the same bits, much faster.

Every call releases the interpreter lock, so threads run side by side; arrays are handed over as they lie in memory,
after their shapes and types were checked. `turboquant.h` beside this file says what the functions do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.codec.terms import METAS
from tqtool.errors import UsageError
from tqtool.parallel import default_threads, ordered_map

try:
    from tqtool.runtime._turboquant import ffi, lib
except ImportError:  # not compiled: the reference serves
    lib = ffi = None

API = 2  # FA_TQ_API of turboquant.h beside this file
stale = lib is not None and getattr(lib, "FA_TQ_API", 0) != API  # compiled for another version: it must not be called
if stale:
    lib = ffi = None

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # enum fa_tq_type


def available() -> bool:
    """Return whether the compiled runtime is loaded."""
    return lib is not None


def instructions() -> str:
    """Return the instruction set in use: "avx512", "avx2" or "plain"; "" without the runtime.

    It is the fastest that the build has and the processor runs, or the one that `TQTOOL_INSTRUCTIONS` names.
    """
    return "" if lib is None else os.environ.get("TQTOOL_INSTRUCTIONS") or instruction_sets()[0]


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that the build has and the processor runs, the fastest first."""
    names = map(lib.fa_tq_instruction_set, itertools.count())
    return tuple(ffi.string(name).decode() for name in itertools.takewhile(lambda name: name != ffi.NULL, names))


def selftest() -> str:
    """Return "" if every instruction set of this build gives the golden bits, else what is wrong."""
    error = lib.fa_tq_selftest()
    return "" if error == 0 else str(ffi.string(lib.fa_tq_strerror(error)).decode())


def encode_rows(rows: NDArray[np.floating], out: Encoded, *, plain: bool = False) -> int:
    """Encode rows (n, dim), float32, float16 or bfloat16, into out of lead (n,).

    Returns -1, or the index of the first row whose norm is not finite or exceeds 2^120. `plain` keeps to the kernels
    without special instructions, for tests.
    """
    spec, count = out.spec, len(rows)
    _require(rows.shape == (count, spec.dim))
    _require(out.lead == (count,))
    _require(all(array.flags.writeable for array in out.arrays.values()))
    bad = ffi.new("size_t *")
    state, source = _state(spec, spec, plain=plain), ffi.from_buffer(rows.view(np.uint8))
    error = lib.fa_tq_encode(state, True, source, _TYPES[rows.dtype.name], count, 1, _packed(out[:, None]), bad)
    if error in (lib.FA_TQ_ERR_VALUE, lib.FA_TQ_ERR_NORM):
        return int(bad[0])
    _require(error == 0, error)
    return -1


def decode_rows(encoded: Encoded, out: NDArray[np.float32], *, plain: bool = False) -> None:
    """Decode vectors of lead (n,) into out (n, dim): the inverse of `encode_rows`."""
    spec, count = encoded.spec, len(out)
    _require(encoded.lead == (count,))
    _require(out.shape == (count, spec.dim))
    state = _state(spec, spec, plain=plain)
    error = lib.fa_tq_decode(state, True, _packed(encoded[:, None]), count, 1, _floats(out, written=True))
    _require(error == 0, error)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Packed keys or values, and the tokens of them that are kept as they came and count instead of their codes."""

    encoded: Encoded  # of lead (batch, slots, kv_heads); any strides but in the last axes
    exact: NDArray[np.float32] | None = None  # (batch, rows, kv_heads, dim)
    row_of: NDArray[np.int32] | None = None  # (slots,): the exact row of a token, -1 for none


def attend(
    q: NDArray[np.float32],
    keys: Side,
    values: Side,
    *,
    scale: float,
    causal: bool = False,
    tokens: int | Sequence[int] | None = None,
    choice: NDArray[np.int32] | None = None,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """Return the attention of q (batch, q_len, q_heads, dim) on packed keys and values, same shape as q.

    keys and values are of one dim and one seed. The first `tokens` slots are read (default: all; one number, or one per
    batch entry), or of these only those of `choice` (1 or kv_heads, n), -1 for none. Query head h reads head
    h // (q_heads / kv_heads). With `causal` the queries are the newest: query i sees tokens - q_len + 1 + i tokens; one
    that sees none gives zeros. Float32 throughout; the same bits for any number of threads.
    """
    batch, q_len, q_heads, dim = q.shape
    key_spec, value_spec = keys.encoded.spec, values.encoded.spec
    slots, kv_heads = keys.encoded.lead[1:]
    lengths = list(tokens) if isinstance(tokens, Sequence) else [slots if tokens is None else tokens] * batch
    _require(len(lengths) == batch)
    _require(dim == key_spec.dim == value_spec.dim)
    _require(key_spec.seed == value_spec.seed)
    _require(keys.encoded.lead == values.encoded.lead == (batch, slots, kv_heads))
    if choice is not None:
        _require(choice.dtype == np.int32 and choice.shape[:-1] in ((1,), (kv_heads,)) and not (causal and q_len > 1))
        choice = np.ascontiguousarray(choice)
    _require(q_heads % kv_heads == 0)
    _require(all(0 <= length <= slots for length in lengths))
    group = q_heads // kv_heads
    q = np.ascontiguousarray(q, np.float32)
    out = np.empty_like(q)
    state = _state(key_spec, value_spec)
    rows_at_once = max(1, QUERIES // group)
    threads = default_threads() if threads is None else threads
    read = sum(lengths) if choice is None else choice.shape[-1] * batch
    if read * kv_heads * dim * -(-q_len // rows_at_once) < WORTH_THREADS:
        threads = 1
    shares = min(kv_heads, -(-threads // batch))  # a thread's heads lie side by side: it reads memory in order
    bounds = [kv_heads * i // shares for i in range(shares + 1)]

    def attend_unit(unit: tuple[int, int, int, int]) -> None:
        b, head, end, first = unit
        rows = min(rows_at_once, q_len - first)
        seen = max(0, lengths[b] - (q_len - first - rows)) if causal else lengths[b]
        facts = ffi.new("fa_tq_attention *")
        views = [_view(side, b) for side in (keys, values)]
        facts.keys, facts.values = (packed[0] for packed, _ in views)
        facts.tokens, facts.first_head, facts.heads = seen, head, end - head
        facts.rows, facts.query_heads, facts.group = rows, q_heads, group
        facts.scale, facts.causal = scale, causal
        if choice is not None:
            own = choice if len(choice) == 1 else choice[head:]
            facts.choice = (_ints(own), own.shape[1], 0 if len(choice) == 1 else own.shape[1], 1)
        scratch = np.empty(lib.fa_tq_attend_scratch(state, end - head, rows, group), np.float32)
        error = lib.fa_tq_attend(
            state,
            facts,
            _floats(q[b, first:]),
            _floats(scratch, written=True),
            _floats(out[b, first:], written=True),
        )
        _require(error == 0, error)

    units = [
        (b, head, end, first)
        for b in range(batch)
        for head, end in pairwise(bounds)
        for first in range(0, q_len, rows_at_once)
    ]
    for _ in ordered_map(attend_unit, units, threads=threads):
        pass
    return out


def scores(q: NDArray[np.float32], keys: Encoded) -> NDArray[np.float32]:
    """Return the products of queries (m, dim) and packed keys of lead (n,), shape (m, n): half of `attend`."""
    count, slots = len(q), len(keys.codes)
    state, out = _state(keys.spec, keys.spec), np.empty((count, slots), np.float32)
    scratch = np.empty(lib.fa_tq_attend_scratch(state, 1, count, 1), np.float32)
    _require(q.shape == (count, keys.spec.dim))
    error = lib.fa_tq_scores(
        state,
        _packed(keys[:, None]),
        slots,
        0,
        _floats(q),
        count,
        _floats(scratch, written=True),
        _floats(out, written=True),
    )
    _require(error == 0, error)
    return out


def mix(weights: NDArray[np.float32], values: Encoded) -> NDArray[np.float32]:
    """Return the weighted sums (m, dim) of packed values of lead (n,), weights (m, n): the other half."""
    count, slots = weights.shape
    state, out = _state(values.spec, values.spec), np.empty((count, values.spec.dim), np.float32)
    scratch = np.empty(lib.fa_tq_attend_scratch(state, 1, count, 1), np.float32)
    _require(values.lead == (slots,))
    error = lib.fa_tq_mix(
        state,
        _packed(values[:, None]),
        slots,
        0,
        _floats(weights),
        count,
        _floats(scratch, written=True),
        _floats(out, written=True),
    )
    _require(error == 0, error)
    return out


QUERIES = 16  # of one key-value head that share a pass over the keys and values
WORTH_THREADS = 1 << 22  # coordinates; fewer are read in the time that starting threads takes


def _view(side: Side, b: int) -> tuple[Any, Any]:
    """Return the C view of one sequence, and what it points to: to be kept as long as it is used."""
    packed = _packed(side.encoded[b])
    if side.exact is None or side.row_of is None:
        return packed, None
    rows = side.exact[b]
    _require(rows.flags.c_contiguous and rows.shape[1:] == (side.encoded.lead[2], side.encoded.spec.dim))
    _require(side.row_of.dtype == np.int32 and len(side.row_of) >= side.encoded.lead[1])
    _require(bool(len(side.row_of) == 0 or side.row_of.max() < len(rows)))
    exact = ffi.new("fa_tq_exact *", (_floats(rows), lib.FA_TQ_F32, rows[0].size, _ints(side.row_of)))
    packed.exact = exact
    return packed, exact


def _packed(side: Encoded) -> Any:
    """Return the C view of vectors of lead (slots, kv_heads): fields in the order of `fa_tq_packed`."""
    codes, meta = side.codes, side.meta
    size = meta.itemsize
    _require(codes.strides[-1] == 1 or codes.shape[-1] == 1)
    _require(meta.ndim == 2 or meta.strides[-1] == size)
    _require(not any(stride % size for stride in meta.strides))
    code_start, scale_start = (ffi.cast("void *", part.__array_interface__["data"][0]) for part in (codes, meta))
    scale_strides = (meta.strides[0] // size, meta.strides[1] // size)
    fields = (code_start, *codes.strides[:2], scale_start, *scale_strides, METAS.index(side.spec.meta), ffi.NULL)
    return ffi.new("fa_tq_packed *", fields)


def _require(holds: bool, error: int = 0) -> None:
    """Guard what the compiled code relies on; unlike an `assert` it stays under -O."""
    if not holds:
        raise ValueError(f"arrays do not fit each other{f' (error {error})' if error else ''}")


def _state(keys: CodecSpec, values: CodecSpec, *, plain: bool = False) -> Any:
    """Return the C state of these tables, for the instruction set in use; threads share it."""
    return _new_state(keys, values, "plain" if plain else os.environ.get("TQTOOL_INSTRUCTIONS", ""))


@cache
def _new_state(keys: CodecSpec, values: CodecSpec, wanted: str) -> Any:
    tables, alive = [], []
    for spec in (keys, values):
        boundaries, centroids = (_floats(np.array(part)) for part in (spec.boundaries, spec.centroids))
        alive += [boundaries, centroids]
        tables.append(
            ffi.new(
                "fa_tq_table *",
                {
                    "bits": spec.bits,
                    "scale_rule": getattr(lib, f"FA_TQ_{spec.scale_rule.upper()}"),
                    "boundaries": boundaries,
                    "centroids": centroids,
                },
            )
        )
    state = lib.fa_tq_init_with(keys.dim, *tables, keys.seed)
    if state == ffi.NULL:
        raise MemoryError(f"no runtime state for {keys}")
    if wanted and lib.fa_tq_use(state, wanted.encode()) != 0:
        lib.fa_tq_free(state)
        raise UsageError(
            f"TQTOOL_INSTRUCTIONS is {wanted!r}: this build on this processor has {', '.join(instruction_sets())}",
            code="usage",
        )
    return ffi.gc(state, lib.fa_tq_free)


def _floats(array: NDArray[np.float32], *, written: bool = False) -> Any:
    _require(array.dtype == np.float32)
    return ffi.from_buffer("float[]", array, require_writable=written)


def _ints(array: NDArray[np.int32]) -> Any:
    return ffi.from_buffer("int32_t[]", array)
