"""export-c: the folder from scratch, built and run; golden vectors; and what the command refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from loops import case

from tqtool.codec import reference
from tqtool.codec.golden import golden, golden_rows, on_boundary
from tqtool.codec.rotation import hadamard
from tqtool.codec.spec import CodecSpec
from tqtool.errors import UsageError
from tqtool.export.compiler import c_compiler, verify
from tqtool.export.package import export_files
from tqtool.runtime import binding as runtime

needs_compiler = pytest.mark.skipif(not c_compiler(), reason="no C compiler on this machine")
NAMES = {
    "Makefile",
    "README.md",
    "fa_tq_adapter.h",
    "test_turboquant.c",
    "tq_codebooks.h",
    "tq_example.c",
    "tq_golden.h",
    "turboquant.c",
    "turboquant.h",
    "turboquant_kernels.h",
    "turboquant_avx512.h",
}
KINDS = (
    "round trip",
    "rotation is orthogonal",
    "dot products are preserved",
    "attention is preserved",
    "determinism",
    "edge cases",
    "cache eviction by memmove",
    "bit packing of all level values",
    "cache",
    "codebook",
    "seed",
    "golden vectors",
    "metadata forms",
    "input types and layouts",
    "the cache is its plain model",
    "steps, rings and refusals",
    "prompts",
    "chosen slots",
    "states",
    "adapter",
)


@needs_compiler
@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_builds_and_runs_the_exported_folder(tqtool: Run, tmp_path: Path) -> None:
    done = tqtool("export-c", "engine", "--dims", "64,80", "--bits", "2,3,4")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "engine"
    assert {path.name for path in folder.iterdir()} == NAMES
    made = subprocess.run(
        ["make", "test-turboquant", "CFLAGS=-O1"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "warning" not in made.stderr
    assert re.findall(r"^ok +\d+ - (.*)$", made.stdout, re.MULTILINE) == list(KINDS)
    assert made.stdout.endswith(f"{len(KINDS)} passed, 0 failed\n")
    example = subprocess.run(["make", "example", "CFLAGS=-O1"], cwd=folder, capture_output=True, text=True, check=False)
    assert "warning" not in example.stderr
    lines = re.findall(r"^(float32|K4/V2) +([\d.]+) +(\d+) +([\d.]+)x *([\d.]*)", example.stdout, re.MULTILINE)
    (_, speed, whole, _, _), (_, other, packed, ratio, agreement) = lines
    assert min(float(speed), float(other)) > 0
    assert int(whole) == 4 * 256 * 2 * 2 * 64 * 4  # layers, slots, heads, sides, dim, bytes
    assert int(packed) == 4 * 256 * 2 * (32 + 16 + 4)
    assert ratio == "9.85"
    assert 20 < float(agreement) <= 100  # of 512 words; the weights are random
    shown = subprocess.run(
        ["make", "validate-turboquant", "CFLAGS=-O1"], cwd=folder, capture_output=True, text=True, check=True
    )
    rows = {(int(d), config): float(cos) for d, config, cos in re.findall(r"(\d+)  (K./V.) +(\S+)", shown.stdout)}
    assert 0.985 < rows[64, "K4/V4"] <= 1
    # The set of `tqtool validate`: .977 there at d = 128, the specification says about .975.
    (correlated,) = re.findall(r"64  K4/V2 +\S+ +(\S+)", shown.stdout)
    assert 0.965 < float(correlated) < 0.985
    assert rows[64, "K4/V4"] > rows[64, "K4/V3"] > rows[64, "K4/V2"] > 0.9


@needs_compiler
@pytest.mark.parametrize(
    ("dims", "bits", "law", "seed"), [((20,), (1, 3), "sphere", 42), ((104,), (4,), "gaussian", 7)]
)
def test_any_lengths_widths_laws_and_seeds_pass_their_tests(
    dims: tuple[int, ...], bits: tuple[int, ...], law: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqtool.export.compiler.VARIANTS", (("-O1",),))
    assert f"{len(KINDS)} passed, 0 failed\n" in verify(export_files(dims, bits, law, seed))  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("turboquant.c", "return z ^ (z >> 31);", "return z ^ (z >> 30);"),  # other signs
        ("turboquant_kernels.h", "p[0] = b0 + b4;", "p[0] = b0 - b4;"),  # a wrong butterfly
        ("turboquant_kernels.h", "(float)(norm / sqrt(energy))", "(float)norm / (float)sqrt(energy)"),  # rounds more
        ("tq_golden.h", "0x40", "0x41"),
    ],
)
def test_the_exported_tests_notice_a_changed_bit(
    file: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqtool.export.compiler.VARIANTS", (("-O1", "-DFA_TQ_PLAIN"),))
    files = export_files((64,), (4,))
    assert before in files[file]
    files[file] = files[file].replace(before, after, 1)
    with pytest.raises(subprocess.CalledProcessError) as failure:
        verify(files)
    assert "not ok" in failure.value.output


@needs_compiler
@pytest.mark.parametrize("language", ["c99", "c11", "c++11", "c++17"])
@pytest.mark.parametrize("family", ["gcc", "clang"])
def test_the_runtime_compiles_without_a_warning(family: str, language: str, tmp_path: Path) -> None:
    plus = language.startswith("c++")
    compiler = {"gcc": "g++", "clang": "clang++"}[family] if plus else family
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    for name, text in export_files((64,), (2,)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    warnings = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wfloat-conversion -Wdouble-promotion -Werror"
    flags = f"-fsyntax-only -std={language} {warnings} -Wmissing-declarations".split()
    (tmp_path / "engine.c").write_text(
        '#include "fa_tq_adapter.h"\nint engine(void);\nint engine(void) { return 0; }\n'
    )
    source = [*(["-x", "c++"] if plus else []), "turboquant.c", "engine.c"]
    done = subprocess.run([compiler, *flags, *source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_fast_math_is_refused_by_the_compiler(tmp_path: Path) -> None:
    for name, text in export_files((64,), (2,)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    build = [*c_compiler(), "-std=c99", "-fsyntax-only", "-ffast-math", "turboquant.c"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "without -ffast-math" in done.stderr


def test_the_exported_runtime_is_the_one_that_runs_here() -> None:
    files = export_files((64,), (2,))
    for name in ("turboquant.h", "turboquant.c", "turboquant_kernels.h", "turboquant_avx512.h"):
        with case(name=name):
            assert files[name] == (Path(runtime.__file__).parent / name).read_text("utf-8")


def test_the_folder_depends_on_nothing_but_its_options() -> None:
    assert export_files((64, 96), (2, 4), "sphere", 3) == export_files((64, 96), (2, 4), "sphere", 3)


def test_no_host_date_or_path_is_in_any_file() -> None:
    for name, text in export_files((64,), (4,)).items():
        assert not re.search(r"https?://|/(?:home|tmp)/|20\d\d-\d\d-\d\d", text), name


@pytest.mark.parametrize("dim", [20, 64, 96, 128, 160, 1024])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_golden_row_comes_out_exactly_on_a_boundary(dim: int, bits: int) -> None:
    boundaries = CodecSpec(dim, bits).boundaries
    column = on_boundary(dim, boundaries, 5)[:, None].copy()
    reference.normalize(column, reference.column_norms(column), 5)
    hadamard(column)
    assert np.isin(column, boundaries[boundaries != 0]).any()


def test_golden_rows_hold_every_fault_class() -> None:
    rows = golden_rows(128, CodecSpec(128, 4).boundaries, 0)
    stacked = np.stack(list(rows.values()))
    norms = np.linalg.norm(stacked.astype(np.float64), axis=1)
    assert len(rows) == 21
    assert np.isfinite(stacked).all()
    assert (norms == 0).sum() == 2
    assert norms.max() == 2.0**120
    assert 0 < norms[norms > 0].min() < 1e-44  # a single subnormal
    made = golden(stacked, CodecSpec(128, 4))
    assert (made.scales[norms == 0] == 0).all()
    assert np.isfinite(made.scales).all()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--dims", "90"), 2, r"error\[usage\].*90"),
        (
            ("--bits", "5"),
            2,
            r"error\[usage\]: 5 bits do not fit.*\n  hint: gen-codebooks --format json or npz writes 5",
        ),
        (("--bits", "x"), 2, r"error\[usage\]"),
        (("--seed", "-1"), 2, r"error\[usage\]"),
        (("--seed", str(2**63)), 2, r"error\[usage\]: seed"),
        (("--law", "normal"), 2, r"error\[usage\]"),
    ],
)
def test_what_export_refuses(arguments: tuple[str, ...], status: int, words: str, tqtool: Run, tmp_path: Path) -> None:
    done = tqtool("export-c", "out", *arguments)
    assert done.returncode == status, done.stderr
    assert re.search(words, done.stderr)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_name_is_refused(tqtool: Run, tmp_path: Path) -> None:
    done = tqtool("export-c", "")
    assert done.returncode == 2
    assert done.stderr.startswith("tqtool: error[usage]: DIR is empty: no folder is named\n")
    assert not list(tmp_path.iterdir())


def test_export_replaces_nothing_unasked(tqtool: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "Makefile").write_text("mine")
    done = tqtool("export-c", "out", "--dims", "64", "--bits", "2")
    assert done.returncode == 4
    assert "error[exists]: out/Makefile" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["Makefile"]
    assert tqtool("export-c", "out", "--dims", "64", "--bits", "2", "--force").returncode == 0
    assert (folder / "Makefile").read_text() != "mine"
    assert tqtool("export-c", "no/such/out").returncode == 4
    assert "is a file" in tqtool("export-c", "out/Makefile").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX paths")
def test_verify_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Exception, match="no C compiler found") as failure:
        verify({})
    assert failure.value.code == "compiler"  # type: ignore[attr-defined]
    assert failure.value.status == 6  # type: ignore[attr-defined]


def test_seeds_beyond_a_c_literal_are_refused() -> None:
    with pytest.raises(UsageError, match="seed"):
        export_files((64,), (2,), seed=2**63)


def test_every_public_function_is_called_by_an_exported_test() -> None:
    files = export_files((64,), (2,))
    for name in ("turboquant.h", "fa_tq_adapter.h"):
        declared = re.sub(r"/\*.*?\*/", "", files[name], flags=re.DOTALL)
        functions = set(re.findall(r"^(?:static inline )?[a-z][\w *]*?\b(fa_tq_\w+)\(", declared, re.MULTILINE))
        assert len(functions) > 5, name
        inner = {"fa_tq_gather", "fa_tq_scatter", "fa_tq_masked", "fa_tq_attend_stored"}  # the adapter's own steps
        assert {each for each in functions - inner if f"{each}(" not in files["test_turboquant.c"]} == set(), name
