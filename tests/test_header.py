"""The generated C header: every literal and checksum as a compiler reads them, in every dialect it may meet."""

import itertools
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from loops import case
from numpy.testing import assert_array_equal

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.rotation import supported_dims
from tqtool.errors import UsageError
from tqtool.export.header import c_float, codebook_header

ROOT = Path(__file__).resolve().parents[1]
STRICT = [
    "-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wfloat-conversion -Wdouble-promotion -Wundef "
    "-Wmissing-declarations -Wunused-const-variable=2 -Werror",
    "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wfloat-conversion -Wdouble-promotion -Wmissing-declarations "
    "-Wunused-const-variable -Werror",
]
C_DIALECTS, CXX_DIALECTS = ("c99", "c11", "c17"), ("c++98", "c++11", "c++17", "c++20")
COMPILERS = [
    (compiler, dialect)
    for compiler, dialects in (
        ("gcc", C_DIALECTS),
        ("clang", C_DIALECTS),
        ("g++", CXX_DIALECTS),
        ("clang++", CXX_DIALECTS),
    )
    for dialect in dialects
]

NOTHING = '#include "tq_codebooks.h"\n'
TWICE = """#include "tq_codebooks.h"
#include "tq_codebooks.h"
int other(void);
int other(void) { return fa_tq_codebook_index(128, 4); }
"""
PRINTER = """#include "tq_codebooks.h"
#include <stdio.h>
int other(void);
static void show(const char *name, const fa_tq_codebook *tables, uint32_t crc)
{
    int row, i;
    for (row = 0; row < FA_TQ_CODEBOOK_COUNT; ++row) {
        printf("%s %d %d", name, tables[row].bits, tables[row].levels);
        for (i = 0; i < 31; ++i) {
            const float *value = i < 15 ? &tables[row].boundaries[i] : &tables[row].centroids[i - 15];
            uint32_t word;
            memcpy(&word, value, sizeof word);
            printf(" %lx", (unsigned long)word);
        }
        printf("\\n");
    }
    printf("%s crc %lx %lx\\n", name, (unsigned long)crc, (unsigned long)fa_tq_codebooks_crc32(tables));
}
int main(void)
{
    const fa_tq_codebook *found = fa_tq_codebook_find_centered(96, 3);
    show("unit", fa_tq_codebooks_unit, FA_TQ_CODEBOOKS_CRC32_UNIT);
    show("centered", fa_tq_codebooks_centered, FA_TQ_CODEBOOKS_CRC32_CENTERED);
    printf("lookup %d %d %d %d %d\\n", other(), fa_tq_codebook_index(64, 2), fa_tq_codebook_index(65, 2),
           fa_tq_codebook_find(160, 5) == NULL, found != NULL && found->levels == 8);
    return 0;
}
"""


def compile_units(folder: Path, compiler: str, flags: str, units: dict[str, str], output: str = "") -> None:
    for name, text in units.items():
        (folder / name).write_text(text)
    target = ["-o", output] if output else ["-c"]
    done = subprocess.run(
        [compiler, *flags.split(), *units, *target], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def header() -> str:
    return codebook_header((64, 96, 128, 160), (2, 3, 4), "beta")


def test_the_tracked_header_is_fresh(header: str) -> None:
    assert (ROOT / "outputs" / "tq_codebooks.h").read_text() == header


@pytest.mark.parametrize(("compiler", "dialect"), COMPILERS)
def test_it_compiles_without_a_warning(tmp_path: Path, header: str, compiler: str, dialect: str) -> None:
    """Included twice, in two units, and by a file that uses nothing of it (case HD01)."""
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    (tmp_path / "tq_codebooks.h").write_text(header)
    suffix = "cpp" if "+" in dialect else "c"
    units = {f"{name}.{suffix}": text for name, text in (("nothing", NOTHING), ("twice", TWICE), ("main", PRINTER))}
    strict = STRICT[compiler.startswith("clang")]
    compile_units(tmp_path, compiler, f"-std={dialect} {strict}", units, "program")


@pytest.mark.parametrize("compiler", ["gcc", "clang", "g++", "clang++"])
def test_a_compiled_program_reads_every_literal_exactly(tmp_path: Path, header: str, compiler: str) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    (tmp_path / "tq_codebooks.h").write_text(header)
    suffix = "cpp" if "+" in compiler else "c"
    compile_units(tmp_path, compiler, "-O1", {f"twice.{suffix}": TWICE, f"main.{suffix}": PRINTER}, "program")
    lines = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout.splitlines()

    books = [lloyd_max(dim, bits) for dim in (64, 96, 128, 160) for bits in (2, 3, 4)]
    for name, begin in (("unit", 0), ("centered", 13)):
        with case(domain=name):
            payload = b""
            for line, book in zip(lines[begin : begin + 12], books, strict=True):
                with case(dim=book.dim, bits=book.bits):
                    domain, bits, levels, *words = line.split()
                    assert (domain, int(bits), int(levels)) == (name, book.bits, 2**book.bits)
                    values = np.array([int(word, 16) for word in words], np.uint32).view(np.float32)
                    tables = book.unit_tables if name == "unit" else book.tables
                    for found, table, padding in zip(
                        (values[:15], values[15:]), tables, (3.40282347e38, 0), strict=True
                    ):
                        with case(size=len(table)):
                            assert_array_equal(found[: len(table)], table)
                            assert_array_equal(found[len(table) :], np.float32(padding))
                    payload += struct.pack("<3i", book.dim, book.bits, 2**book.bits) + values.astype("<f4").tobytes()
            stated, computed = lines[begin + 12].split()[2:]
            assert int(stated, 16) == int(computed, 16) == zlib.crc32(payload)
    assert lines[26] == "lookup 8 0 -1 1 1"


def test_an_engine_may_own_the_struct(tmp_path: Path, header: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler here")
    own = "typedef struct engine { int bits, levels; float boundaries[15]; float centroids[16]; } fa_tq_codebook;\n"
    (tmp_path / "tq_codebooks.h").write_text(header)
    unit = f"#define FA_TQ_CODEBOOK_DEFINED\n{own}{TWICE}"
    compile_units(tmp_path, compiler, f"-std=c99 {STRICT[1]}", {"own.c": unit})
    broken = unit.replace("boundaries[15]", "boundaries[17]")
    with pytest.raises(AssertionError, match="fa_tq_codebook_size_check"):
        compile_units(tmp_path, compiler, "-std=c99", {"own.c": broken})


@pytest.mark.parametrize("law", ["beta", "sphere", "gaussian"])
def test_every_literal_of_every_supported_length_reads_back(law: str) -> None:
    text = codebook_header(supported_dims()[::7], (1, 2, 3, 4), law)  # type: ignore[arg-type]
    literals = iter(re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?(?=f[,\n])", text))
    for domain in ("unit_tables", "tables"):
        for dim, bits in itertools.product(supported_dims()[::7], (1, 2, 3, 4)):
            for table, size in zip(getattr(lloyd_max(dim, bits, law), domain), (15, 16), strict=True):  # type: ignore[arg-type]
                with case(domain=domain, dim=dim, bits=bits, size=size):
                    row = [np.float32(next(literals)) for _ in range(size)]
                    assert_array_equal(row[: len(table)], table)
    assert next(literals, None) is None


def test_the_header_names_no_date_path_or_machine(header: str) -> None:
    comment = header[: header.index("#ifndef")]
    assert "tqtool gen-codebooks --dims 64,96,128,160 --bits 2,3,4 --law beta" in comment
    assert not re.search(r"20\d\d-|/home|/tmp|/work", comment)
    assert "H D / sqrt(d)" in comment  # the order of signs and Hadamard, resolution A1
    assert max(map(len, header.splitlines())) <= 120


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (0.0, "0.0f"),
        (0.5, "0.5f"),
        (1.0, "1.0f"),
        (-2.0, "-2.0f"),
        (1e-42, "1.0005271e-42f"),
        (1e20, "1.00000002e+20f"),
    ],
)
def test_literals_are_floats_in_every_dialect(value: float, literal: str) -> None:
    assert c_float(value) == literal


def test_nine_digits_are_needed_and_enough() -> None:
    values = np.random.default_rng(1).uniform(-1, 1, 2000).astype(np.float32)
    assert all(np.float32(c_float(value)[:-1]) == value for value in values)


def test_widths_beyond_the_struct_are_refused() -> None:
    with pytest.raises(UsageError, match="5 bits do not fit the C header, whose struct holds 16 levels"):
        codebook_header((128,), (4, 5))


# The command


def test_gen_codebooks_writes_the_header_and_prints_the_figures(tqtool, tmp_path: Path, header: str) -> None:
    done = tqtool("gen-codebooks")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "tq_codebooks.h").read_text() == header
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["d", "bits", "Lloyd", "Newton", "residual", "relative", "MSE", "cosine", "entropy"]
    row = next(line for line in lines if line[:2] == ["128", "2"])
    assert (row[5], row[6]) == ("0.116006", "0.940210")
    assert all(float(line[4]) < 1e-12 for line in lines[1:13])


def test_gen_codebooks_does_not_overwrite_unasked(tqtool, tmp_path: Path) -> None:
    (tmp_path / "t.h").write_text("mine")
    done = tqtool("gen-codebooks", "-o", "t.h")
    assert (done.returncode, (tmp_path / "t.h").read_text()) == (4, "mine")
    assert done.stderr.startswith("tqtool: error[exists]: t.h: already exists")
    assert tqtool("gen-codebooks", "-o", "t.h", "--force").returncode == 0
    assert (tmp_path / "t.h").read_text().startswith("/* tq_codebooks.h")


def test_check_and_diff_say_whether_a_header_is_stale(tqtool, tmp_path: Path, header: str) -> None:
    (tmp_path / "t.h").write_text(header)
    fresh = tqtool("gen-codebooks", "-o", "t.h", "--check")
    assert (fresh.returncode, fresh.stdout) == (0, "t.h: up to date\n")
    (tmp_path / "t.h").write_text(header.replace("0.5f", "0.50001f", 1))
    stale = tqtool("gen-codebooks", "-o", "t.h", "--check")
    assert stale.returncode == 1
    assert stale.stdout.startswith("t.h: stale; ")
    diff = tqtool("gen-codebooks", "-o", "t.h", "--diff")
    assert diff.returncode == 1
    assert re.search(r"^-.* 0\.50001f,.*\n\+.* 0\.5f,", diff.stdout, re.MULTILINE)
    assert tqtool("gen-codebooks", "-o", "absent.h", "--check").returncode == 3
    assert (tmp_path / "t.h").read_text().count("0.50001f") == 1  # nothing was written


def test_check_names_the_level_that_is_off(tqtool, tmp_path: Path) -> None:
    options = ("gen-codebooks", "--dims", "64", "--bits", "2", "-o", "t.h")
    assert tqtool(*options).returncode == 0
    text = (tmp_path / "t.h").read_text()
    assert text.count("0.528039873f") == 1
    (tmp_path / "t.h").write_text(text.replace("0.593034446f", "0.593134446f"))
    stale = tqtool(*options, "--check")
    assert stale.returncode == 1
    first = stale.stdout.splitlines()[0]
    assert "level 3 is 0.5931344, not 0.5930344 (+1.6e-03 sigma)" in first


def test_one_table_is_one_table(tqtool) -> None:
    done = tqtool("gen-codebooks", "--dims", "64", "--bits", "2", "-o", "-")
    assert done.stderr.splitlines()[0] == "tqtool: 1 table"
    assert done.stderr.splitlines()[1].split()[:3] == ["tqtool:", "d", "bits"]


@pytest.mark.parametrize("form", ["json", "npz"])  # of the C header, the tracked file is the witness
def test_every_format_is_the_same_from_run_to_run(tqtool, form: str) -> None:
    options = ("gen-codebooks", "--dims", "80", "--bits", "1,4", "--format", form, "-o", "a." + form)
    assert tqtool(*options).returncode == 0
    assert tqtool(*options, "--check").returncode == 0


def test_json_and_npz_hold_the_tables_in_float64(tqtool, tmp_path: Path) -> None:
    options = ("gen-codebooks", "--dims", "576,64", "--bits", "8,3", "--law", "sphere", "-o")
    tqtool(*options, "t.npz", "--format", "npz")
    done = tqtool(*options, "-", "--format", "json")
    document = json.loads(done.stdout)
    assert [(table["dim"], table["bits"]) for table in document["tables"]] == [(576, 8), (576, 3), (64, 8), (64, 3)]
    with np.load(tmp_path / "t.npz") as arrays:
        assert document["law"] == "sphere"
        for table in document["tables"]:
            book = lloyd_max(table["dim"], table["bits"], "sphere")
            for kind in ("boundaries", "centroids"):
                with case(dim=book.dim, bits=book.bits, kind=kind):
                    assert_array_equal(table[kind], getattr(book, kind))
                    assert_array_equal(arrays[f"sphere_d{book.dim}_b{book.bits}_{kind}"], table[kind])


def test_the_header_on_stdout_is_only_the_header(tqtool, header: str) -> None:
    done = tqtool("gen-codebooks", "-o", "-")
    assert done.stdout == header
    assert "relative MSE" in done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "tqtool: 12 tables"
    assert len(lines) == 14  # and the titles; a table a line
    assert tqtool("-q", "gen-codebooks", "-o", "-").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["--dims", "90"],
            2,
            "error[usage]: --dims 90: no Hadamard matrix of that order is built\n  hint: nearest supported: 88, 96",
        ),
        (["--dims", "2048"], 2, "error[usage]: --dims 2048"),
        (
            ["--dims", "99999999999999999999"],
            2,
            "error[usage]: --dims '99999999999999999999': 99999999999999999999 is above 1000000000",
        ),
        (["--dims", "128,128"], 2, "error[usage]: --dims '128,128': a number stands there twice"),
        (["--dims", "128,"], 2, "error[usage]: --dims '128,': not a comma list of whole numbers"),
        (["--dims", "-128"], 2, "error[usage]: --dims '-128': not a comma list of whole numbers"),
        (["--dims", ""], 2, "error[usage]: --dims '': not a comma list of whole numbers"),
        (["--bits", "4.0"], 2, "error[usage]: --bits '4.0': not a comma list of whole numbers"),
        (["--bits", "0"], 2, "error[usage]: 0 bits is outside 1 to 8"),
        (["--bits", "9", "--format", "json"], 2, "error[usage]: 9 bits is outside 1 to 8"),
        (["--bits", "5"], 2, "error[usage]: 5 bits do not fit the C header"),
        (["--law", "cauchy"], 2, "error[usage]: Invalid value for '--law'"),
        (["--check", "--force"], 2, "error[usage]: --check and --diff write nothing"),
        (["--diff", "--format", "npz"], 2, "error[usage]: --diff shows text and npz is binary"),
        (["-o", ""], 2, "error[usage]: -o names no file"),
        (["-o", "no/such/dir.h"], 4, "error[write]: no/such/dir.h: no such directory"),
        (["-o", "."], 4, "error[write]: .: is a directory"),
        (["-o", ".", "--check"], 3, "error[is-directory]: .: is a directory"),
    ],
)
def test_gen_codebooks_refuses_in_one_line(tqtool, arguments: list[str], status: int, message: str) -> None:
    done = tqtool("gen-codebooks", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert f"tqtool: {message}" in done.stderr


@pytest.mark.parametrize(("left_out", "kept"), [("UNIT", "find_centered"), ("CENTERED", "find")])
def test_one_domain_can_be_left_out(left_out: str, kept: str, tmp_path: Path, header: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler here")
    (tmp_path / "tq_codebooks.h").write_text(header)
    use = (
        f"int main(void) {{ return fa_tq_codebook_{kept}(160, 4)->levels - 16 + fa_tq_codebook_index(128, 2) - 6; }}\n"
    )
    unit = f'#define FA_TQ_CODEBOOKS_NO_{left_out}\n#include "tq_codebooks.h"\n{use}'
    compile_units(tmp_path, compiler, f"-std=c99 {STRICT[1]} -Wno-missing-declarations", {"one.c": unit}, "one")
    assert subprocess.run([tmp_path / "one"], check=False).returncode == 0
    tables = (tmp_path / "one").read_bytes()
    book = lloyd_max(160, 4)
    for name, pair in (("UNIT", book.unit_tables), ("CENTERED", book.tables)):
        assert (pair[1].astype("<f4").tobytes() in tables) == (name != left_out), name
    with pytest.raises(AssertionError, match="both domains"):
        compile_units(tmp_path, compiler, "-DFA_TQ_CODEBOOKS_NO_CENTERED -DFA_TQ_CODEBOOKS_NO_UNIT", {"none.c": unit})
