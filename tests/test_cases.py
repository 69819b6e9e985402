"""Sixteen inputs made from public bug reports, each with its right answer (`../shared/cases/README.md`)."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
from conftest import Run
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

import tqtool as tq
from tqtool.attention.plain import AttentionConfig, attention
from tqtool.codec.sizes import KVConfig, vector_bytes

Case = Callable[[str], Any]
THEORY = {2: 0.117482, 3: 0.034548, 4: 0.009501}


@pytest.fixture
def case(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Load a case's script as a module."""
    folder = shared / "cases" / "handover"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(shared / "cases"))
    monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def restored(x: np.ndarray, bits: int, **options: Any) -> np.ndarray:
    return tq.decode(tq.encode(x, tq.CodecSpec(x.shape[-1], bits, **options))).astype(np.float64)


def rel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return np.linalg.norm(x - y, axis=-1) / np.linalg.norm(x, axis=-1)


def cos(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (x * y).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))


def levels_text(levels: np.ndarray) -> str:
    return ",".join(f"{level:.9g}" for level in levels)


def test_cb01_levels_are_converged(case: Case) -> None:
    known = {
        1: [0.797884561],
        2: [0.452780035, 1.510417608],
        3: [0.245094179, 0.756005281, 1.343909279, 2.151945705],
        4: [0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571],
    }
    assert case("cb01_gauss_levels").expected() == known
    for bits, half in known.items():
        with loops.case(bits=bits, half=half):
            levels = tq.lloyd_max(128, bits, "gaussian").centroids * np.sqrt(128)
            np.testing.assert_allclose(levels[2**bits // 2 :], half, atol=1e-6, rtol=0)
    np.testing.assert_allclose(tq.lloyd_max(128, 2, "sphere").centroids[2:], [0.0399916, 0.1330415], atol=2e-5)
    np.testing.assert_allclose(
        tq.lloyd_max(128, 3, "sphere").centroids[4:], [0.0216043, 0.0665856, 0.1181398, 0.1883972], atol=2e-5
    )
    assert tq.lloyd_max(128, 4, "sphere").centroids[-1] == pytest.approx(0.2376638, abs=2e-5)


def test_cb01_unconverged_levels_are_named(case: Case, tqtool: Run) -> None:
    early = case("cb01_gauss_levels").early_stop(50) / np.sqrt(128)
    result = tqtool("check-codebooks", levels_text(early), "--dim", 128, "--bits", 4)
    assert result.returncode == 1
    assert "not converged: as after 50 rounds" in result.stdout


def test_cb02_equal_mass_cells_are_named(case: Case, tqtool: Run) -> None:
    x = case("cb02_equal_mass").inputs()["x"]
    for bits, theory in THEORY.items():
        with loops.case(bits=bits, theory=theory):
            assert (rel(x, restored(x, bits)) ** 2).mean() == pytest.approx(theory, rel=0.04)
    outer = case("cb01_gauss_levels").early_stop(0) / np.sqrt(128)
    assert outer[-1] == pytest.approx(0.173926, abs=1e-6)
    result = tqtool("check-codebooks", levels_text(outer), "--dim", 128, "--bits", 4)
    assert result.returncode == 1
    assert "equal probability" in result.stdout


def test_cb03_the_norm_is_kept_and_a_wrong_sigma_is_named(case: Case, tqtool: Run) -> None:
    x = case("cb03_decode_scale").inputs()["x"]
    for rule, ratio in (("norm", 0.98), ("match", 1.0)):
        with loops.case(rule=rule, ratio=ratio):
            y = restored(x, 3, scale_rule=rule)
            assert (np.linalg.norm(y, axis=1) / np.linalg.norm(x, axis=1)).mean() == pytest.approx(ratio, abs=0.004)
            assert rel(x, y).mean() == pytest.approx(0.184, abs=0.002)
    wrong = tq.lloyd_max(128, 3, "gaussian").centroids / np.sqrt(2)
    result = tqtool("check-codebooks", levels_text(wrong), "--dim", 128, "--bits", 3)
    assert result.returncode == 1
    assert "sigma" in result.stdout


def test_ro01_constant_rows_are_spread(case: Case) -> None:
    x = case("ro01_dc_vector").inputs()["x"]
    y = restored(x, 4)
    assert rel(x, y).max() <= 0.25
    assert cos(x, y).min() >= 0.975


def test_ro03_every_head_dim_is_exact(case: Case) -> None:
    inputs = case("ro03_head_dim_80").inputs()
    for dim, error, size in ((80, 0.094, 40), (96, 0.094, 48), (160, 0.098, 80)):
        with loops.case(dim=dim, error=error, size=size):
            x = inputs[f"x{dim}"]
            encoded = tq.encode(x, tq.CodecSpec(dim, 4))
            assert encoded.codes.shape[-1] == size
            assert rel(x, tq.decode(encoded)).mean() == pytest.approx(error, abs=0.003)
            np.testing.assert_allclose(tq.unrotate(tq.rotate(x)), x, atol=3e-6)


def test_pk01_three_bit_codes_are_one_lsb_stream(case: Case) -> None:
    module = case("pk01_three_bit_bytes")
    for count, size in ((8, 3), (80, 30), (100, 38), (128, 48)):
        with loops.case(count=count, size=size):
            codes = module.idx(count).astype(np.uint8)
            packed = tq.pack(codes, 3)
            assert len(packed) == size
            assert_array_equal(packed, module.lsb(module.idx(count)))
            assert_array_equal(tq.unpack(packed, 3, count), codes)
    assert tq.pack(module.idx(8).astype(np.uint8), 3).tobytes().hex() == "88c6fa"
    assert tq.pack(module.idx(100).astype(np.uint8), 3)[-1] == 0x06


def test_pk03_sizes_are_true(case: Case, tqtool: Run, tmp_path: Path) -> None:
    for dim, bits, norm_bytes, size, bits_per_value, _ in case("pk03_true_bits").rows():
        with loops.case(dim=dim, bits=bits):
            stored = vector_bytes(dim, bits, "bf16" if norm_bytes == 2 else "f32")
            assert stored == size
            assert 8 * stored / dim == pytest.approx(bits_per_value, abs=1e-4)
    assert KVConfig(4, 2).pair_bytes(128, "bf16") == 100
    assert 4 * 64 / KVConfig(4, 2).pair_bytes(64, "bf16") == pytest.approx(4.923, abs=1e-3)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((500, 128)).astype(np.float16))
    assert tqtool("compress", "x.npy", "--bits", 4, "--meta", "bf16").returncode == 0
    answer = json.loads(tqtool("inspect", "x.tq.safetensors", "--json").stdout)
    raw = (tmp_path / "x.tq.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    payload = len(raw) - header
    shared_by_all = 4 * 31 + 16 + 64 + 4 * 6  # the table, the signs, SHA-256, CRCs
    assert payload == pytest.approx(500 * 66 + shared_by_all, abs=64)
    assert answer["tensors"]


def test_nm01_zero_vectors_come_back_as_zeros(case: Case, tqtool: Run, tmp_path: Path) -> None:
    k = case("nm01_zero_rows").inputs()["k"]
    y = restored(k, 4)
    zero = (k == 0).all(-1)
    assert zero.sum() == 75
    assert_array_equal(y[zero], 0)
    assert np.isfinite(y).all()
    np.save(tmp_path / "k.npy", k)
    result = tqtool("compress", "k.npy")
    assert result.returncode == 0
    assert "75 zero vectors" in result.stdout + result.stderr
    assert "nan" not in result.stdout.lower()


def test_nm02_sums_of_float16_do_not_overflow(case: Case) -> None:
    k = case("nm02_fp16_sum_overflow").inputs()["k"]
    y = restored(k, 4)
    assert np.linalg.norm(k[0, 0, 0].astype(float)) == pytest.approx(519.8, abs=0.1)
    assert rel(k, y).mean() <= 0.2
    assert cos(k, y).min() >= 0.985


@pytest.mark.parametrize("meta", ["range", "f32", "bf16"])
def test_nm03_norms_beyond_float16_are_kept(case: Case, meta: str) -> None:
    v = case("nm03_norm_over_65504").inputs()["v"]
    y = restored(v, 4, meta=meta)
    assert np.isfinite(y).all()
    assert rel(v, y).max() <= 0.25


def test_nm05_non_finite_values_are_refused_with_both_places(case: Case, tqtool: Run, tmp_path: Path) -> None:
    k = case("nm05_nan_inf").inputs()["k"]
    np.save(tmp_path / "k.npy", k)
    result = tqtool("compress", "k.npy")
    assert result.returncode == 3
    assert "error[non-finite]: k.npy: 1 NaN, 1 Inf" in result.stderr
    assert "[1, 2, 17, 5]" in result.stderr
    assert "[0, 3, 30, 127]" in result.stderr
    assert not (tmp_path / "k.tq.safetensors").exists()
    clean = np.nan_to_num(k, nan=0, posinf=0, neginf=0)
    np.save(tmp_path / "clean.npy", clean)
    assert tqtool("compress", "k.npy", "--nan", "zero").returncode == 0
    assert tqtool("compress", "clean.npy").returncode == 0
    for name in ("k", "clean"):
        with loops.case(name=name):
            assert tqtool("decompress", f"{name}.tq.safetensors", "-o", f"{name}.back.npy").returncode == 0
    assert_array_equal(np.load(tmp_path / "k.back.npy"), np.load(tmp_path / "clean.back.npy"))


def validate_json(tqtool: Run, tmp_path: Path, arrays: dict[str, np.ndarray], *options: object) -> dict[str, Any]:
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = [part for name in arrays for part in (f"--{name}", f"{name}.npy")]
    result = tqtool("validate", *files, "--no-causal", "--json", *options)
    assert result.returncode in (0, 1), result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_ql01_iid_data_is_shown_as_such(case: Case, tqtool: Run, tmp_path: Path) -> None:
    inputs = case("ql01_iid_is_blind").inputs()
    for bits, expected in ((2, 0.9406), (3, 0.9831), (4, 0.9954)):
        with loops.case(bits=bits, expected=expected):
            y = restored(inputs["k"], bits)
            assert cos(inputs["k"], y).mean() == pytest.approx(expected, abs=0.002)
    answer = validate_json(tqtool, tmp_path, inputs)
    assert "iid" in json.dumps([answer["warnings"], answer["diagnosis"]])


def test_ql02_a_constant_key_offset_fails_and_is_named(case: Case, tqtool: Run, tmp_path: Path) -> None:
    inputs = case("ql02_key_bias").inputs()
    answer = validate_json(tqtool, tmp_path, inputs, "-c", "K4/V4", "--min", "cos=0.9")
    text = json.dumps(answer)
    assert "--center-keys" in text
    shown = tqtool(
        "validate", "--k", "k.npy", "--v", "v.npy", "--q", "q.npy", "--no-causal", "-c", "K4/V4", "--min", "cos=0.9"
    )
    assert shown.returncode == 1
    assert "K4/V4" in shown.stdout
    centred = tqtool(
        "validate",
        "--k",
        "k.npy",
        "--v",
        "v.npy",
        "--q",
        "q.npy",
        "--no-causal",
        "-c",
        "K4/V4",
        "--center-keys",
        "--max",
        "kl=0.1",
    )
    assert centred.returncode == 0, centred.stderr
    assert (
        tqtool(
            "validate", "--k", "k.npy", "--v", "v.npy", "--q", "q.npy", "--no-causal", "-c", "K4/V4", "--max", "kl=5"
        ).returncode
        == 1
    )


def test_ql04_query_heads_share_key_heads_in_blocks(case: Case, tqtool: Run, tmp_path: Path) -> None:
    inputs = case("ql04_gqa_map").inputs()
    q, k, v = (inputs[name].transpose(0, 2, 1, 3) for name in "qkv")
    out = attention(q, k, v, AttentionConfig(8, 64, kv_heads=2))
    for head in range(8):
        with loops.case(head=head):
            np.testing.assert_allclose(
                out[0, :, head], np.broadcast_to(inputs["v"][0, head // 4, 0], (16, 64)), rtol=1e-6
            )
    answer = validate_json(tqtool, tmp_path, inputs, "-c", "K4/V4")
    assert answer["rows"]
    np.save(tmp_path / "q.npy", inputs["q"][:, :5])
    refused = tqtool("validate", "--k", "k.npy", "--v", "v.npy", "--q", "q.npy", "--no-causal", "--layout", "bhtd")
    assert refused.returncode == 3
    assert "error[gqa]" in refused.stderr
    assert "5 query heads cannot share 2 key heads" in refused.stderr


def test_ff01_bf16_bits_are_never_taken_for_numbers(case: Case, tqtool: Run, tmp_path: Path) -> None:
    inputs = case("ff01_bf16_uint16").inputs()
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
    refused = tqtool("compress", "k_bf16_bits.npy")
    assert refused.returncode == 3
    assert "error[dtype]: k_bf16_bits.npy: dtype uint16 is not floating point" in refused.stderr
    assert "--dtype bf16" in refused.stderr
    assert tqtool("compress", "k_bf16_bits.npy", "--dtype", "bf16").returncode == 0
    assert tqtool("compress", "k_back.npy").returncode == 0
    taken = load_file(tmp_path / "k_bf16_bits.tq.safetensors")
    decoded = load_file(tmp_path / "k_back.tq.safetensors")
    codes = [{name: t for name, t in file.items() if name.endswith(".codes")} for file in (taken, decoded)]
    assert_array_equal(next(iter(codes[0].values())), next(iter(codes[1].values())))
    assert rel(inputs["k_fp32"], inputs["k_back"]).mean() == pytest.approx(0.0017, abs=2e-4)


def test_hd01_the_header_compiles_everywhere_without_a_warning(case: Case, tqtool: Run, tmp_path: Path) -> None:
    compiler, compiler_cxx = shutil.which("cc"), shutil.which("c++")
    if compiler is None or compiler_cxx is None:
        pytest.skip("no C and C++ compiler on this machine")
    module = case("hd01_header_two_units")
    assert tqtool("gen-codebooks", "-o", "cb.h").returncode == 0
    units = {"one.c": module.C1, "two.c": module.C2, "three.cpp": '#include "cb.h"\n#include "cb.h"\n'}
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    flags = [*module.FLAGS_C.split(), "-Wunused-const-variable=2"]
    commands = [
        [compiler, *flags, "-c", "one.c"],
        [compiler, *flags, "-c", "two.c"],
        [compiler_cxx, *module.FLAGS_CXX.split(), "-c", "three.cpp"],
        [compiler, "one.o", "two.o", "-o", "program"],
        ["./program"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command
    literals = set(re.findall(r"-?\d+\.\d*(?:e[-+]?\d+)?(?=f\b)", (tmp_path / "cb.h").read_text()))
    for bits in (2, 3, 4):
        for level in tq.lloyd_max(128, bits).tables[1]:
            with loops.case(bits=bits, level=level):
                assert any(np.float32(literal) == level for literal in literals)
