"""The C runtime against the reference, bit for bit, and its attention against plain formulas."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from equality import DTYPES, differences, hard_rows
from loops import case
from numpy.testing import assert_allclose, assert_array_equal

from tqtool.codec.codec import decode, encode
from tqtool.codec.rotation import rotate, unrotate
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.codec.terms import SCALE_RULES
from tqtool.errors import UsageError
from tqtool.runtime import binding as runtime

pytestmark = pytest.mark.skipif(not runtime.available(), reason="the C runtime was not compiled")

SAMPLE = 120  # of the whole matrix, which tests/slow/equality.py runs
DIMS = (16, 20, 24, 28, 36, 60, 64, 72, 80, 96, 104, 112, 128, 144, 160, 192, 200, 256, 576, 1024)


def sample() -> list[tuple[int, int, str, int, int]]:
    rng = np.random.default_rng(0)
    return [
        (
            DIMS[i % len(DIMS)],
            int(rng.integers(1, 9)),
            SCALE_RULES[rng.integers(4)],
            int(rng.choice([1, 2, 7, 8, 9, 16, 33])),
            int(rng.integers(3)),
        )
        for i in range(SAMPLE)
    ]


@pytest.mark.parametrize(("dim", "bits", "rule", "count", "dtype"), sample())
def test_runtime_and_reference_agree_on_every_bit(dim: int, bits: int, rule: str, count: int, dtype: int) -> None:
    spec = CodecSpec(dim, bits, scale_rule=rule, seed=dim % 3)  # type: ignore[arg-type]
    assert differences(hard_rows(dim, bits, count, spec.seed, DTYPES[dtype]), spec) == []


@pytest.mark.parametrize("dim", DIMS)
def test_rotations_agree_on_every_bit(dim: int) -> None:
    rows = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    spec = CodecSpec(dim, 1, seed=5)
    lib, ffi, state = runtime.lib, runtime.ffi, runtime._state(spec, spec)
    for turn, right in ((lib.fa_tq_rotate, rotate(rows, 5)), (lib.fa_tq_rotate_inverse, unrotate(rows, 5))):
        with case(turn=turn, right=right):
            out = np.empty_like(rows)
            for source, target in zip(rows, out, strict=True):
                turn(state, ffi.from_buffer("float[]", source), ffi.from_buffer("float[]", target))
            assert out.tobytes() == right.tobytes()


@pytest.mark.parametrize("meta", ["range", "f32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_public_codec_gives_the_reference_bytes(meta: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((3, 257, 96)).astype(np.float32)
    spec = CodecSpec(96, 3, meta=meta)  # type: ignore[arg-type]
    fast = encode(x, spec, threads=threads)
    fast_decoded = decode(fast, threads=threads)
    monkeypatch.setenv("TQTOOL_ENGINE", "reference")
    slow = encode(x, spec, threads=1)
    assert fast.codes.tobytes() == slow.codes.tobytes()
    assert fast.meta.tobytes() == slow.meta.tobytes()
    assert fast_decoded.tobytes() == decode(slow, threads=1).tobytes()


@pytest.mark.parametrize(("value", "bad"), [(np.nan, 11), (np.inf, 11), (-np.inf, 11), (1e38, 11), (1e36, -1)])
def test_the_first_refused_row_is_named(value: float, bad: int) -> None:
    spec = CodecSpec(64, 4)
    rows = np.ones((20, 64), np.float32)
    rows[11, 63] = value
    rows[17, 0] = rows[19, 5] = np.float32(1) if bad < 0 else np.float32(np.nan)
    for plain in (False, True):
        with case(plain=plain):
            assert runtime.encode_rows(rows, spec.zeros((20,)), plain=plain) == bad


def test_every_instruction_set_gives_the_golden_bits() -> None:
    assert runtime.selftest() == ""
    assert runtime.instructions() == runtime.instruction_sets()[0]
    assert runtime.instruction_sets()[-1] == "plain"


def test_an_instruction_set_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQTOOL_INSTRUCTIONS", "plain")
    assert runtime.instructions() == "plain"
    monkeypatch.setenv("TQTOOL_INSTRUCTIONS", "sse9")
    there = re.escape(", ".join(runtime.instruction_sets()))
    with pytest.raises(UsageError, match=f"TQTOOL_INSTRUCTIONS is 'sse9': this build on this processor has {there}"):
        encode(np.ones((1, 64), np.float32), CodecSpec(64))


SETS = runtime.instruction_sets() if runtime.available() else ()


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "tokens", "heads", "group", "q_len"),
    [
        (128, 300, 2, 1, 1),
        (96, 130, 1, 4, 3),
        (20, 5, 2, 3, 40),
        (1024, 9, 1, 1, 2),
        (80, 33, 2, 2, 20),
        (64, 70, 1, 7, 1),
        (28, 17, 1, 1, 1),
        (72, 40, 2, 8, 2),
        (112, 65, 1, 5, 1),
    ],
)
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "meta"), [(4, 2, "range"), (3, 3, "f32"), (8, 1, "bf16"), (2, 4, "bf16"), (1, 5, "f32")]
)
def test_fused_attention_equals_decoding_first(
    instructions: str,
    dim: int,
    tokens: int,
    heads: int,
    group: int,
    q_len: int,
    causal: bool,
    key_bits: int,
    value_bits: int,
    meta: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TQTOOL_INSTRUCTIONS", instructions)
    rng = np.random.default_rng(dim)
    k, v = rng.standard_normal((2, 2, tokens, heads, dim)).astype(np.float32)
    q = rng.standard_normal((2, q_len, heads * group, dim)).astype(np.float32)
    keys = encode(k, CodecSpec(dim, key_bits, meta=meta))  # type: ignore[arg-type]
    values = encode(v, CodecSpec(dim, value_bits, meta=meta))  # type: ignore[arg-type]
    scale = 2 / np.sqrt(dim)
    sides = runtime.Side(keys), runtime.Side(values)
    out = runtime.attend(q, *sides, scale=scale, causal=causal, threads=1)
    whole = decode(keys).astype(np.float64).repeat(group, axis=2)
    scores = np.einsum("bqhd,bthd->bhqt", q.astype(np.float64), whole) * scale
    seen = np.tri(q_len, tokens, tokens - q_len, dtype=bool) if causal else np.ones((q_len, tokens), bool)
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    expected = np.einsum("bhqt,bthd->bqhd", weights, decode(values).astype(np.float64).repeat(group, axis=2))
    assert_allclose(out, expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    monkeypatch.setattr(runtime, "WORTH_THREADS", 0)
    for threads in (2, 3):
        with case(threads=threads):
            again = runtime.attend(q, *sides, scale=scale, causal=causal, threads=threads)
            assert again.tobytes() == out.tobytes()


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("dim", "bits"), [(128, 4), (96, 3), (20, 2), (64, 6), (576, 1), (28, 4)])
@pytest.mark.parametrize("queries", [1, 2, 3, 7])
def test_the_halves_of_attention_equal_products_of_decoded_vectors(
    instructions: str, dim: int, bits: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQTOOL_INSTRUCTIONS", instructions)
    rng = np.random.default_rng([dim, queries])
    encoded = encode(rng.standard_normal((75, dim)).astype(np.float32), CodecSpec(dim, bits))
    q, weights = rng.standard_normal((queries, dim)).astype(np.float32), rng.random((queries, 75)).astype(np.float32)
    whole = decode(encoded).astype(np.float64)
    assert_allclose(runtime.scores(q, encoded), q @ whole.T, rtol=0, atol=4e-6 * np.sqrt(dim) * 4)
    assert_allclose(runtime.mix(weights, encoded), weights @ whole, rtol=0, atol=4e-6 * 75)


def test_attention_reads_the_first_tokens_of_each_batch_entry() -> None:
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 2, 50, 2, 64)).astype(np.float32)
    q = rng.standard_normal((2, 1, 2, 64)).astype(np.float32)
    sides = runtime.Side(encode(k, CodecSpec(64, 4))), runtime.Side(encode(v, CodecSpec(64, 2)))
    both = runtime.attend(q, *sides, scale=0.125, tokens=[7, 50])
    assert_array_equal(both[1], runtime.attend(q, *sides, scale=0.125)[1])
    short = (runtime.Side(encode(x[:1, :7], CodecSpec(64, bits))) for x, bits in ((k, 4), (v, 2)))
    assert_array_equal(both[0], runtime.attend(q[:1], *short, scale=0.125)[0])
    assert_array_equal(runtime.attend(q, *sides, scale=0.125, tokens=0), 0)


def test_encode_and_decode_need_at_most_a_mebibyte_beside_their_results() -> None:
    x = np.random.default_rng(2).standard_normal((1 << 16, 128), dtype=np.float32)  # 32 MiB
    spec, out = CodecSpec(128, 4), np.empty_like(x)
    encoded = encode(x[:9], spec, threads=1)  # tables and state are made once
    decode(encoded, threads=1)
    tracemalloc.start()
    try:
        encoded = encode(x, spec, threads=1)
        _, peak = tracemalloc.get_traced_memory()
        assert peak - encoded.nbytes < 1 << 20
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        decode(encoded, out=out, threads=1)
        assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_that_do_not_fit_never_reach_the_compiled_code() -> None:
    spec = CodecSpec(64, 4)
    rows, out = np.ones((3, 64), np.float32), spec.zeros((3,))
    read_only = spec.zeros((3,))
    read_only.codes.flags.writeable = False
    for wrong in (
        lambda: runtime.encode_rows(rows[:, :32], out),
        lambda: runtime.encode_rows(rows, out[:2]),
        lambda: runtime.encode_rows(rows.astype(np.float64)[:, :32], out),
        lambda: Encoded(spec, out.codes, out.meta[:1]),
        lambda: Encoded(spec, out.codes, out.meta.astype(np.float64)),
        lambda: Encoded(spec, out.codes[:, :31], out.meta),
        lambda: runtime.encode_rows(rows, read_only),
        lambda: runtime.encode_rows(np.ones((64, 3), np.float32).T, out),
        lambda: runtime.decode_rows(out, rows[:2]),
    ):
        with case(wrong=wrong), pytest.raises((ValueError, BufferError)):
            wrong()


def test_decode_writes_into_the_array_it_is_given() -> None:
    encoded = encode(np.ones((3, 5, 64), np.float32), CodecSpec(64, 3))
    out = np.empty((3, 5, 64), np.float32)
    assert decode(encoded, out=out) is out
    assert_array_equal(out, decode(encoded))
    for wrong in (np.empty((15, 64), np.float32), np.empty((3, 5, 64)), np.empty((3, 5, 128), np.float32)[..., ::2]):
        with case(wrong=wrong), pytest.raises(ValueError, match="need a contiguous float32 array"):
            decode(encoded, out=wrong)  # type: ignore[arg-type]


def test_the_package_works_without_the_compiled_runtime() -> None:
    program = (
        "import sys; sys.modules['tqtool.runtime._turboquant'] = None\n"
        "import numpy as np, tqtool.codec.codec as codec\n"
        "assert codec.engine() == 'reference'\n"
        "codec.decode(codec.encode(np.ones((2, 64), np.float32), codec.CodecSpec(64)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_runtime_compiled_for_another_version_is_left_alone() -> None:
    program = (
        "import sys, types\n"
        "old = types.ModuleType('tqtool.runtime._turboquant')\n"
        "old.ffi, old.lib = object(), types.SimpleNamespace(FA_TQ_API=0)\n"
        "sys.modules[old.__name__] = old\n"
        "sys.argv = ['tqtool', '-v', 'doctor']\n"
        "from tqtool.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "engine: the NumPy reference; the C runtime was compiled for another version: reinstall" in done.stderr
    assert "the NumPy reference: the C runtime was compiled for another version of tqtool; reinstall it" in done.stdout


def test_the_number_of_the_api_rises_with_its_declarations() -> None:
    header = (Path(runtime.__file__).parent / "turboquant.h").read_text("ascii")
    declared = header[header.index("/* [cdef:") : header.index("/* [end of cdef] */")]
    text = re.sub(r"/\*.*?\*/|\s+", "", declared, flags=re.DOTALL)
    found = runtime.API, runtime.lib.FA_TQ_API, hashlib.sha256(text.encode()).hexdigest()[:16]
    assert found == (2, 2, "37e73f0969f756e1"), "raise FA_TQ_API and runtime.API, then put the new values here"
