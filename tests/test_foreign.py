"""Other people's tables: every layout is read, every mistake is named, and no other list is taken for a table."""

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose, assert_array_equal

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.terms import LAWS
from tqtool.errors import TqError, UsageError
from tqtool.export.header import codebook_header
from tqtool.foreign.appraisal import appraise
from tqtool.foreign.tables import parse_tables, read_tables
from tqtool.rendering.answers.gen_codebooks import codebook_json, codebook_npz

FOUR = [-0.13, -0.04, 0.04, 0.13]
# engines.md, section 4 and 5: tables as shipped (facts, six digits)
TURBO4 = "0.006938, 0.020989, 0.035597, 0.051262, 0.068756, 0.089527, 0.117195, 0.173926"
LMDEPLOY = {2: "0.4527808,1.5104176", 3: "0.2450942,0.7560052,1.3439093,2.1519456"}


def listed(values: np.ndarray, digits: int = 9) -> str:
    return ",".join(f"{value:.{digits}g}" for value in values)


def verdict(text: str, **options: object):
    (table,) = parse_tables(text)
    return appraise(table, **options)  # type: ignore[arg-type]


def normal_rounds(rounds: int, bits: int) -> np.ndarray:
    """Unit-variance levels after so many rounds of Lloyd from cells of equal mass: plain Python, no SciPy."""
    normal, count = NormalDist(), 2**bits
    edges = [normal.inv_cdf(i / count) for i in range(1, count)]
    for _ in range(rounds + 1):
        cdf = [0.0, *map(normal.cdf, edges), 1.0]
        pdf = [0.0, *map(normal.pdf, edges), 0.0]
        levels = [(pdf[i] - pdf[i + 1]) / (cdf[i + 1] - cdf[i]) for i in range(count)]
        edges = [(a + b) / 2 for a, b in pairwise(levels)]
    return np.array(levels)


# Reading


@pytest.mark.parametrize(
    "text",
    [
        "static const float C2[4] = {-0.13f, -0.04f, 0.04f, 0.13f};",
        "constexpr std::array<float, 4> c{{-0.13f, -0.04f, .04f, 1.3e-1f}};",
        "#define LEVELS { -0.13f, -0.04f, \\\n  0.04f, 0.13f }",
        "let c: [f32; 4] = [-0.13, -0.04, 0.04, 0.13_f32];",
        "C = np.array([\n  -0.13,  # outer, d = 12\n  -0.04, 0.04, 0.13])",
        "float c[2][4] = { /* {1.0f, 2.0f} */ {- 0.13, -0.04, 0.04, 0.13}, {1, 2, 3, 4} };",
        "struct q t = { .n = 4, .c = { -0.13, -0.04, 0.04, 0.13, 0, 0, 0, 0 } };",
        "float c[] = { 0.13f, 0.04f, -0.04f, -0.13f };  // descending",
        "static const double half[2] = { 0.04, 0.13 }; const float c4[4] = {0.04, 0.13, 0, 0};",
        "-0.13 -0.04\n 0.04\t0.13\n",
        "[-0.13 -0.04 0.04 0.13]",
        '{"tables": [{"x": 1, "levels": [-0.13, -0.04, 0.04, 0.13]}], "ok": [true, null]}',
        "[-0.13, -0.04, 0.04, 0.13]",
    ],
)
def test_reasonable_layouts_are_read(text: str) -> None:
    found = parse_tables(text)
    assert found
    assert all(table.levels.tolist() == FOUR for table in found)
    assert all(table.bits == 2 for table in found)


@pytest.mark.parametrize(
    "text",
    [
        "int dims[4] = { 64, 96, 128, 160 }; float s[2] = { 0.0f, 1.0f };",
        "static const float signs[4] = { 1.f, -1.f, -1.f, 1.f }; float z[8] = {0.f};",
        "float m[2][4] = { { 0.3f, -0.2f, 0.1f, 0.9f }, { 0.1f * x, 0.2f, 0.3f, 0.4f } };",
        "void f(float a[4]) { a[0] = 0.1f; a[1] = 0.2f; g(0.1f, 0.2f); }",
        "float x[3] = { 0.1f, 0.2f, 0.3f };",
        "no numbers at all",
        "{ } [ ] { [ } ]",
        "{" * 5000 + "[" * 5000,
        "float x[4] = {0x1p99999f, 0x2p99999f, 0xp1, 1__0.5};",
        "[" * 20_000,
        "",
    ],
)
def test_other_lists_are_not_taken_for_tables(text: str) -> None:
    assert parse_tables(text) == []


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="{}[]()<>,;=\"'#/*\\+-.0123456789eExXpPfaFLT_MAX \n", max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    for table in parse_tables(text):
        with case(table=table):
            assert np.all(np.diff(table.levels) > 0)


def test_whole_numbers_are_levels_where_there_is_no_other_list() -> None:
    levels = "-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113"
    (table,) = parse_tables(f"static const int8_t kvalues[16] = {{ {levels} }};")
    assert (table.name, table.bits, table.levels[0]) == ("kvalues", 4, -127)


def test_boundaries_are_found_beside_their_levels() -> None:
    text = """static const float c3[8] = {-2.1f,-1.3f,-0.7f,-0.2f,0.2f,0.7f,1.3f,2.1f};
              static const float c2[4] = {-1.5f,-0.4f,0.4f,1.5f};
              static const float edges2[5] = {-INFINITY,-0.9f,0.0f,0.9f,INFINITY};
              static const float mid3[7] = {-1.7f,-1.0f,-0.45f,0.0f,0.45f,1.0f,1.7f};"""
    three, two = parse_tables(text.replace("INFINITY", "9.0f"))
    assert three.boundaries is not None
    assert two.boundaries is not None
    assert three.boundaries[0] == -1.7
    assert two.boundaries.tolist() == [-0.9, 0, 0.9]


def test_the_file_says_for_which_length_a_table_is() -> None:
    assert parse_tables("float codebook_d96[4] = {-0.15,-0.04,0.04,0.15};")[0].dim == 96
    assert parse_tables('{"128": {"2": [-0.13, -0.04, 0.04, 0.13]}}')[0].dim == 128
    assert parse_tables('{"head_dim": 64, "c": [-0.13, -0.04, 0.04, 0.13]}')[0].dim == 64
    assert parse_tables("float fd4096x[4] = {-0.13,-0.04,0.04,0.13};")[0].dim is None


def test_our_own_header_is_read_row_by_row() -> None:
    tables = parse_tables(codebook_header((64, 576), (1, 2, 4), "gaussian"))
    expected = [(dim, bits) for dim in (64, 576) for bits in (1, 2, 4)] * 2
    assert [(table.dim, table.bits) for table in tables] == expected
    assert {table.law for table in tables} == {"gaussian"}
    for table, (dim, bits) in zip(tables[6:], expected[6:], strict=True):
        with case(dim=dim, bits=bits):
            book = lloyd_max(dim, bits, "gaussian")
            assert_array_equal(table.levels.astype(np.float32), book.tables[1])
            assert_array_equal(np.asarray(table.boundaries, np.float32), book.tables[0])


# Judging


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dim", [16, 128, 1024])
def test_our_own_tables_cost_nothing_in_every_form(tmp_path: Path, law, dim: int) -> None:
    books = [lloyd_max(dim, bits, law) for bits in (1, 4, 8)]
    (tmp_path / "t.json").write_text(codebook_json(books))
    header = codebook_header((dim,), (1, 2, 3, 4), law)
    for table in (*read_tables(tmp_path / "t.json"), *parse_tables(header)):
        with case(table=table):
            found = appraise(table)
            assert (found.law, found.cause) == (law, "none")
            assert abs(found.excess) < 1e-7


def test_npz_is_read_with_length_and_law_from_the_names(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(codebook_npz([lloyd_max(96, 3, "beta"), lloyd_max(160, 8, "beta")]))
    tables = read_tables(tmp_path / "t.npz")
    assert [(table.dim, table.bits, table.law) for table in tables] == [(96, 3, "beta"), (160, 8, "beta")]
    assert all(appraise(table).cause == "none" for table in tables)
    np.save(tmp_path / "t.npy", np.array([FOUR, FOUR], np.float32))
    assert [table.dim for table in read_tables(tmp_path / "t.npy")] == [None, None]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_normal_levels_are_right_in_unit_variance(bits: int) -> None:  # case CB01
    found = verdict(listed(lloyd_max(128, bits, "gaussian").centroids * math.sqrt(128)))
    assert (found.domain, found.law, found.cause) == ("unit-variance", "gaussian", "none")
    assert abs(found.excess) < 1e-9


def test_the_table_of_turbo4_is_recognised() -> None:  # cases CB01 and CB02: the outer level is 0.1739
    found = verdict(TURBO4, dim=128)
    assert found.cause == "equal-mass"
    assert found.excess == pytest.approx(1.089, abs=0.001)  # engines.md measured about twice the error
    assert found.table.levels[found.worst] == -0.173926
    assert found.right[found.worst] == pytest.approx(-0.2376638, abs=1e-7)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_tables_of_lmdeploy_are_right(bits: int) -> None:
    found = verdict(LMDEPLOY[bits])
    assert (found.domain, found.cause) == ("unit-variance", "none")


def test_a_lopsided_table_is_recognised() -> None:
    """As lmdeploy's unused 4-bit table, which ends at 3.0."""
    levels = np.array([*normal_rounds(10, 4)[:-1], 3.0])
    found = verdict(listed(levels, 5))
    assert found.cause == "asymmetric"


@pytest.mark.parametrize("rounds", [1, 7, 50, 100])
def test_an_early_stop_is_counted(rounds: int) -> None:  # case CB01: loops of fixed length
    found = verdict(listed(normal_rounds(rounds, 4) / math.sqrt(128), 7), dim=128)
    assert found.cause == "unconverged"
    assert f"as after {rounds} rounds" in found.sentence
    assert found.sentence.endswith("from means of cells of equal probability")


@pytest.mark.parametrize(("bits", "cost"), [(2, 0.11), (3, 0.45), (4, 1.06)])
def test_levels_of_equal_mass_cost_what_case_cb02_says(bits: int, cost: float) -> None:
    found = verdict(listed(normal_rounds(0, bits) / math.sqrt(128)), dim=128)
    assert found.cause == "equal-mass"
    assert found.excess == pytest.approx(cost, abs=0.04)  # the case's figures are of one sample


def test_a_decoder_with_the_wrong_sigma_is_recognised() -> None:  # case CB03
    found = verdict(listed(lloyd_max(128, 3, "gaussian").centroids / math.sqrt(2)), dim=128)
    assert found.cause == "sigma"
    assert "0.7071" in found.sentence
    assert "1/sqrt(2 d)" in found.sentence
    assert verdict(listed(lloyd_max(256, 4, "sphere").centroids), dim=128).cause == "sigma"


def test_the_wrong_law_is_recognised() -> None:
    found = verdict(listed(lloyd_max(64, 4, "gaussian").centroids), dim=64)
    assert found.cause == "law"
    assert found.excess == pytest.approx(0.00434, abs=1e-5)  # resolutions.md, A6: 0.43 %
    assert verdict(listed(lloyd_max(64, 4, "gaussian").centroids), dim=64, law="gaussian").cause == "none"
    assert verdict(listed(lloyd_max(16, 4, "beta").centroids), dim=16).sentence.startswith(
        "this is the optimum of the beta"
    )


def test_unit_interval_tables_are_recognised() -> None:
    found = verdict(listed((1 + lloyd_max(96, 3, "sphere").centroids) / 2), dim=96)
    assert (found.domain, found.cause) == ("unit", "none")
    assert found.right[0] == pytest.approx((1 + lloyd_max(96, 3, "sphere").centroids[0]) / 2)


def test_one_wrong_level_is_named() -> None:
    levels = lloyd_max(128, 4, "sphere").centroids.copy()
    levels[11] += 0.01
    found = verdict(listed(levels), dim=128)
    assert (found.cause, found.worst) == ("one-level", 11)
    assert found.deviation[11] * math.sqrt(1 / 128) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_one_level_moved_by_little_is_no_wrong_sigma(bits: int) -> None:
    book = lloyd_max(128, bits, "sphere")
    levels = book.centroids.copy()
    levels[0] += 0.001 / math.sqrt(128)
    found = verdict(listed(levels), dim=128)
    assert (found.cause, found.worst) == ("one-level", 0)
    assert found.sentence == "only level 0 is wrong, by 0.001 sigma: a slip of the pen?"


def test_too_few_digits_are_recognised() -> None:
    levels = lloyd_max(1024, 4, "sphere").centroids
    assert verdict(",".join(f"{value:.3f}" for value in levels), dim=1024).cause == "digits"
    assert verdict(",".join(f"{value:.6f}" for value in levels), dim=1024).cause == "none"


def test_a_uniform_quantizer_is_recognised() -> None:
    assert verdict(listed(np.linspace(-2.4, 2.4, 16))).cause == "uniform"


def test_wrong_boundaries_cost_and_are_named() -> None:
    book = lloyd_max(128, 2, "sphere")
    text = json.dumps({"dim": 128, "centroids": book.centroids.tolist(), "boundaries": [-0.11, 0.0, 0.11]})
    found = verdict(text)
    assert found.cause == "boundaries"
    assert found.excess > 0.01


def test_noise_is_not_explained_away() -> None:
    levels = np.sort(np.random.default_rng(3).uniform(-2, 2, 8))
    assert verdict(listed(levels)).cause in ("asymmetric", "unknown")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-3, 3, allow_nan=False, width=32), min_size=4, max_size=4, unique=True),
    st.sampled_from([None, 16, 128, 1023]),
)
def test_any_levels_are_judged_without_warnings(levels: list[float], dim: int | None) -> None:
    for table in parse_tables(json.dumps({"x": sorted(levels), "y": "z"})):
        with case(table=table):
            try:
                found = appraise(table, dim=dim)
            except UsageError:
                assert dim is None
            else:
                assert found.excess > -1e-9
                assert math.isfinite(found.excess)


def test_a_table_without_a_length_is_refused_with_a_guess() -> None:
    with pytest.raises(UsageError, match="the vector length is not in the file") as caught:
        verdict(listed(lloyd_max(128, 4, "gaussian").centroids))
    assert caught.value.hint == "add --dim; these levels fit 128"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x7fELF\x00\x00" * 40, "no-tables"),
        (b"plain words", "no-tables"),
        (b"", "empty-file"),
        (b"\xff\xfe0\x00.\x005\x00", "no-tables"),
        (b"-1e-300, -1e-301, 1e-301, 1e-300", "no-tables"),
        (b"{" * 100_000, "no-tables"),
        (b"PK\x03\x04 not a zip", None),
        (b"\x20\0\0\0\0\0\0\0{ no json after all ", None),
        (b"\x93NUMPY\x01\x00", None),
        (b"float x[4] = {1e999, 2e999, 3e999, 4e9999999999};", "no-tables"),
        (b"[" + b"9" * 6000 + b".5, 1e" + b"9" * 6000 + b"]", "no-tables"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, data: bytes, code: str | None) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TqError) as caught:
        read_tables(tmp_path / "t")
    assert caught.value.status in (3, 5)
    assert code in (None, caught.value.code)


def test_a_comment_in_latin_1_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "t.h").write_bytes(b"/* f\xfcr d = 128 */ float c[4] = {-0.13, -0.04, 0.04, 0.13};")
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf[-0.13, -0.04, 0.04, 0.13]")
    assert [read_tables(tmp_path / name)[0].levels.tolist() for name in ("t.h", "t.json")] == [FOUR, FOUR]


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "t.h").open("wb") as file:
        file.write(b"/* ")
        file.truncate(1 << 34)
    with pytest.raises(TqError, match="not a C header, JSON or npz of tables"):
        read_tables(tmp_path / "t.h")


# The command


def test_check_codebooks_fails_what_costs_too_much(tqtool) -> None:
    done = tqtool("check-codebooks", TURBO4, "--dim", "128")
    assert done.returncode == 1
    assert "+108.9 %" in done.stdout
    assert "means of cells of equal probability" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAIL: the table costs over 0.1 % more")
    assert tqtool("check-codebooks", TURBO4, "--dim", "128", "--tolerance", "110").returncode == 0


def test_check_codebooks_accepts_our_own_files_from_standard_input(tqtool) -> None:
    books = [lloyd_max(dim, bits, "beta") for dim in (80, 128) for bits in (2, 3, 4)]
    texts = {"c-header": codebook_header((80, 128), (2, 3, 4)).encode(), "json": codebook_json(books).encode()}
    for form, data in (*texts.items(), ("npz", codebook_npz(books))):
        with case(form=form):
            done = tqtool("check-codebooks", "-", "--tolerance", "1e-4", "--json", input=data, text=False)
            assert done.returncode == 0, done.stderr
            document = json.loads(done.stdout)
            assert document["passed"] is True
            assert {table["cause"] for table in document["tables"]} == {"none"}
            assert len(document["tables"]) == (12 if form == "c-header" else 6)


def test_negative_levels_are_not_options(tqtool) -> None:
    levels = listed(lloyd_max(128, 2, "sphere").centroids)
    done = tqtool("check-codebooks", levels, "--dim", "128", "--bits", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert_allclose(json.loads(done.stdout)["tables"][0]["levels"], lloyd_max(128, 2, "sphere").centroids, atol=1e-10)


def test_length_width_and_law_select_and_override(tqtool, tmp_path: Path) -> None:
    (tmp_path / "t.h").write_text(codebook_header((64, 128), (2, 4), "beta"))
    done = tqtool("check-codebooks", "t.h", "--dim", "64", "--bits", "4", "--law", "sphere", "--json")
    tables = json.loads(done.stdout)["tables"]
    assert [(t["dim"], t["bits"], t["law"], t["cause"]) for t in tables] == [(64, 4, "sphere", "law")] * 2
    assert tables[1]["excess"] == pytest.approx(0.000303, abs=1e-6)  # resolutions.md, A6: at most 0.03 % at d = 64
    absent = tqtool("check-codebooks", "t.h", "--dim", "96")
    assert absent.returncode == 2
    assert "there are 2 bits at d = 128, 2 bits at d = 64, 4 bits at d = 128, 4 bits at d = 64" in absent.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["absent.h"], 3, "error[not-found]: absent.h: no such file"),
        (["."], 3, "error[is-directory]"),
        ([""], 2, "error[usage]: no file and no levels"),
        (["1,2,3"], 2, "error[usage]: 1,2,3: not 2, 4, 8 ... 256 ascending levels"),
        (["nan,1"], 2, "error[usage]: nan,1: not 2"),
        (["0.5,0.5"], 2, "error[usage]: 0.5,0.5: not 2"),
        (["0.04,0.13"], 2, "error[usage]: levels: the vector length is not in the file"),
        (["0.04,0.13", "--dim", "5"], 2, "error[usage]: dim 5 is outside 16 to 1024"),
        (["0.04,0.13", "--dim", "128", "--bits", "3"], 2, "error[usage]: 0.04,0.13: no such table; there are 2 bits"),
        (["0.04,0.13", "--dim", "128", "--tolerance", "nan"], 2, "error[usage]: "),
        (["0.04,0.13", "--dim", "128", "--tolerance", "-1"], 2, "error[usage]: "),
        (["--frobnicate"], 2, "error[usage]: no such option: --frobnicate"),
        ([], 2, "error[usage]: "),
    ],
)
def test_check_codebooks_refuses_in_one_line(tqtool, arguments: list[str], status: int, message: str) -> None:
    done = tqtool("check-codebooks", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert f"tqtool: {message}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "domain"), [("0.593034446f", "0.593034506f", "unit"), ("{ 64 }", "{ 96 }", "both")]
)
def test_a_header_of_ours_is_held_against_its_own_checksum(
    tqtool: Run, tmp_path: Path, old: str, new: str, domain: str
) -> None:
    assert tqtool("gen-codebooks", "--dims", "64", "--bits", "2", "-o", "t.h").returncode == 0
    whole = tqtool("check-codebooks", "t.h")
    assert (whole.returncode, "CRC-32" in whole.stdout) == (0, False)
    text = (tmp_path / "t.h").read_text()
    assert text.count(old) == 1
    (tmp_path / "t.h").write_text(text.replace(old, new))
    edited = tqtool("check-codebooks", "t.h", "--tolerance", "99")
    assert edited.returncode == 1
    domains = ["unit", "centered"] if domain == "both" else [domain]
    lines = [f"FAIL: the {name} tables are not those that the header's CRC-32 is of" for name in domains]
    assert edited.stdout.splitlines()[-len(lines) :] == lines
    document = json.loads(tqtool("check-codebooks", "t.h", "--json", "--tolerance", "99").stdout)
    assert (document["passed"], document["edited_domains"]) == (False, domains)
