"""Renderings of a Report as text: what each must say, that it is well formed, and that no report breaks it."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import case
from reports import sample_report

from tqtool.rendering.report.figures import clean, figure, headline, ranges, signed
from tqtool.rendering.report.html import report_html
from tqtool.rendering.report.junit import report_junit
from tqtool.rendering.report.markdown import LIMIT, MARKER, code_block, escape, report_markdown
from tqtool.rendering.report.terminal import report_terminal
from tqtool.rendering.report.tsv import report_tsv
from tqtool.report.model import METRICS, Check, Finding, Report, Row, Source, Summary
from tqtool.report.serialize import report_from_json, report_to_json

RENDERINGS: dict[str, Callable[[Report], str]] = {
    "terminal": report_terminal,
    "narrow": lambda r: report_terminal(r, 80, unicode=False, color=True),
    "tsv": report_tsv,
    "markdown": report_markdown,
    "junit": report_junit,
    "html": report_html,
    "json": report_to_json,
}
FORBIDDEN = ("safe to deploy", "quality ok")  # metrics.md: a dump without logits never says so


@pytest.mark.parametrize(("value", "metric", "text"), [
    (0.02734, "kl", "0.0273"), (0.000213, "kl", "2.1e-4"), (1e-16, "kl", "0"), (48.31, "n_eff", "48.3"),
    (0.99, "cos", "0.9900"), (0.99996, "cos", ">.9999"), (1.0, "cos", "1.0000"), (1 - 1e-14, "cos", "1.0000"),
    (math.nan, "cos", "–"), (0.99996, "kl", "1.000"), (1234567.0, "", "1.23e6"), (-0.5, "cos", "-0.5000"),
])  # fmt: skip
def test_a_figure_never_rounds_an_error_away(value: float, metric: str, text: str) -> None:
    assert figure(value, metric) == text


def test_small_texts() -> None:
    assert (signed(0.0027), signed(-0.5), signed(0.0), signed(math.nan)) == ("+0.0027", "-0.5000", "0", "–")
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert clean("a\x1b[31mb\nc\t\u202ed") == r"a\u001b[31mb c \u202ed"


@pytest.mark.parametrize("name", RENDERINGS)
def test_every_rendering_names_all_rows_and_the_verdict(name: str) -> None:
    text = RENDERINGS[name](sample_report())
    for row in sample_report().rows:
        with case(config=row.config):
            assert row.config in text.replace("\\_", "_") or (name == "junit" and row.kind == "control")
    assert not [words for words in FORBIDDEN if words in text.lower()]


@pytest.mark.parametrize("name", RENDERINGS)
def test_a_rendering_of_the_json_is_the_rendering_of_the_report(name: str) -> None:
    report = sample_report()
    assert RENDERINGS[name](report_from_json(report_to_json(report))) == RENDERINGS[name](report)


@pytest.mark.parametrize("name", [name for name in RENDERINGS if name != "json"])
def test_times_are_in_the_json_only(name: str) -> None:
    report = sample_report()
    later = dataclasses.replace(report, run={"started": "2031-01-01T00:00:00Z", "seconds": "99", "threads": "64"})
    assert RENDERINGS[name](later) == RENDERINGS[name](report)


# Terminal


@pytest.mark.parametrize("width", [80, 100, 109, 110, 150])
def test_the_two_metrics_that_decide_are_in_every_table(width: int) -> None:
    titles = next(line for line in report_terminal(sample_report(), width).split("\n") if line.startswith("config"))
    assert " KL " in titles
    assert "V read-out" in titles
    assert titles.count("cos ") <= (1 if width < 110 else 2)


@pytest.mark.parametrize("width", [80, 110, 150])
@pytest.mark.parametrize("gate", ["none", "balanced"])
def test_the_terminal_report_keeps_to_the_width(width: int, gate: str) -> None:
    text = report_terminal(sample_report(gate=gate, layers=tuple(range(200))), width)
    long = [line for line in text.split("\n") if len(line) > width]
    assert [line for line in long if not line.startswith("Next: ")] == []  # a command is for copying, never broken


def test_wider_terminals_show_more_columns() -> None:
    def columns(width: int | None) -> int:
        text = report_terminal(sample_report(), width)
        return len(next(line for line in text.split("\n") if line.startswith("config ")).split("  "))

    assert columns(80) < columns(110) < columns(150) <= columns(None)


def test_the_table_has_a_word_and_a_symbol_for_each_verdict_and_colour_is_extra() -> None:
    plain, coloured = report_terminal(sample_report(), 110), report_terminal(sample_report(), 110, color=True)
    assert re.sub("\x1b\\[[0-9]+m", "", coloured) == plain
    assert "✗ FAIL" in plain
    assert "✓ pass" in plain
    assert "= control" in plain
    assert "\x1b[2mK16/V16" in coloured


def test_the_last_line_is_the_gate_and_the_next_command_stands_before_it() -> None:
    lines = report_terminal(sample_report(), 80).rstrip("\n").split("\n")
    assert lines[-1].startswith("✗ Gate balanced: FAIL K4/V4: kl 0.027 > 0.02 at layer 29 head 1")
    assert lines[-3].startswith("Next: tqtool validate")


def test_ascii_output_is_ascii() -> None:
    assert report_terminal(sample_report(), 80, unicode=False).isascii()


def test_sparklines_have_the_limit_in_the_middle() -> None:
    text = report_terminal(sample_report(baselines=False), None)
    assert "from ▅ over the balanced limit 0.02" in text
    assert (
        "K4/V4  ▄▅▅▅▆  4 of 5 over" in text
    )  # 0.0162 0.0216 0.0243 0.0324 0.0405: one below, two to the power of one above
    assert "K2/V2  █████  5 of 5 over" in text


def test_control_characters_of_a_name_never_reach_the_terminal() -> None:
    text = report_terminal(sample_report(name="kv\x1b]0;owned\x07\r\nrow"), None)
    assert not set(text) & {"\x1b", "\x07", "\r"}


# Machine formats


def test_tsv_has_one_full_precision_line_per_row_and_stable_columns() -> None:
    report = sample_report()
    rows = list(csv.DictReader(io.StringIO(report_tsv(report)), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [row["config"] for row in rows] == [row.config for row in report.rows]
    for row, parsed in zip(report.rows, rows, strict=True):
        with case(config=row.config):
            assert float(parsed["kl"]) == row.metrics["kl"].mean
            assert float(parsed["cos_p01"]) == row.metrics["cos"].low
    assert rows[6]["k_distortion_ratio"] == ""  # the control: NaN is an empty cell
    assert list(rows[0])[:4] == ["source", "config", "kind", "bits_per_value"]


def test_junit_has_a_case_per_limit_and_tells_failures_from_errors() -> None:
    report = sample_report()
    checks = list(report.gate.checks)
    checks[0] = dataclasses.replace(checks[0], status="error", reason="K4/V4 is bit-identical to the reference")
    checks[1] = dataclasses.replace(checks[1], status="unverified", reason="200 queries; a tail needs 500")
    root = ElementTree.fromstring(
        report_junit(dataclasses.replace(report, gate=dataclasses.replace(report.gate, checks=tuple(checks))))
    )
    assert len(root.findall(".//testcase")) == len(checks) == int(root.get("tests", ""))
    failed = sum(check.status == "fail" for check in checks)
    assert len(root.findall(".//failure")) == failed == int(root.get("failures", ""))
    assert [e.get("message") for e in root.findall(".//error")] == [checks[0].reason, checks[1].reason]
    messages = {f.get("message") for f in root.findall(".//failure")}
    assert {"kl 0.098 > 0.02", "cos_p01 0.886 < 0.9"} <= messages
    assert {p.get("name") for p in root.findall(".//property")} >= {"K4/V4 v_readout_err", "K2/V2 n_eff"}


def test_junit_is_xml_whatever_the_names_are() -> None:
    report = sample_report(name='a<b>&"\x00\x1b\ud7ff]]>')
    assert ElementTree.fromstring(report_junit(report)).find("testsuite") is not None


# Markdown


def test_markdown_begins_with_the_verdict_and_the_marker() -> None:
    first, blank, second = report_markdown(sample_report()).split("\n")[:3]
    assert first == "**✗ FAIL K4/V4: kl 0.027 &gt; 0.02 at layer 29 head 1 (21 more)** <!-- tqtool:report -->"
    assert (blank, second[:21]) == ("", "**smollm2-135m/kv**: ")


def test_markdown_stays_below_its_limit_and_says_what_is_missing() -> None:
    report = sample_report()
    long = "x" * 5000
    many = tuple(Finding("rule", long) for _ in range(300))
    text = report_markdown(dataclasses.replace(report, diagnosis=many))
    assert len(text.encode()) < LIMIT
    assert "Left out to stay below 900 KiB: 1 parts, the first is the diagnosis." in text
    assert text.count("<details>") == text.count("</details>") > 0


@given(st.text(max_size=60))
def test_escaped_text_is_one_line_without_markup(text: str) -> None:
    escaped = escape(text)
    assert not re.search(r"(?<!\\)[|`*_<>\[\]]", escaped.replace("\\\\", ""))
    assert "\n" not in escaped
    assert "@" not in escaped


def test_a_code_block_cannot_be_left_from_inside() -> None:
    assert code_block("a ```` b", "sh") == "`````sh\na ```` b\n`````\n"


def test_markdown_tables_have_the_same_number_of_cells_in_each_line() -> None:
    text = report_markdown(sample_report(name="a|b"))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        with case(block=block):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")}) == 1


def test_marker_is_stable() -> None:  # bots look for it in comments that older versions wrote
    assert MARKER == "<!-- tqtool:report -->"


# Verdicts


def levels(report: Report, **level: str) -> Report:
    rows = [dataclasses.replace(r, level=level.get(r.config.replace("/", ""), "none")) for r in report.rows]  # type: ignore[arg-type]
    return dataclasses.replace(report, rows=tuple(rows))


def with_source(report: Report, **changes: object) -> Report:
    return dataclasses.replace(report, sources=(dataclasses.replace(report.sources[0], **changes),))  # type: ignore[arg-type]


def test_without_a_gate_the_headline_names_the_cheapest_row_at_the_best_level() -> None:
    report = sample_report(gate="none", baselines=False)
    found = headline(levels(report, K4V4="balanced", K4V3="balanced", K4V2="lenient"))
    assert found == "Best level reached is balanced attention fidelity; cheapest there is K4/V3 at 4.50 bits per value"
    beside = sample_report(gate="none")  # with baselines, whose levels are not what is asked about
    assert headline(levels(beside, K4V4="balanced", K4V3="balanced")) == found.replace(
        "reached is", "reached by the TurboQuant rows is"
    )
    assert headline(levels(beside)) == "No TurboQuant row reaches the lenient level"
    assert headline(levels(report)) == "No configuration reaches the lenient level"


def test_synthetic_data_and_proxy_queries_never_vouch_for_a_model() -> None:
    report = levels(sample_report(gate="none"), K4V4="balanced")
    synthetic = headline(with_source(report, kind="synthetic", query_source="synthetic"))
    assert "Implementation healthy on synthetic data" in synthetic
    assert "fidelity" not in synthetic
    assert headline(with_source(report, query_source="proxy")).startswith("UNVERIFIED")


def test_with_several_sources_sentences_say_which_one_they_are_about() -> None:
    report = sample_report()
    two = dataclasses.replace(report, sources=(*report.sources, dataclasses.replace(report.sources[0], name="other")))
    for name in ("terminal", "markdown", "html"):
        with case(name=name):
            assert "smollm2-135m/kv: Keys decide here" in RENDERINGS[name](two)
            assert "smollm2-135m/kv: Keys decide here" not in RENDERINGS[name](report)


# Any report


def absent(row: Row) -> Row:
    nan = math.nan
    gone = Summary(nan, nan, nan, 5, nan, nan, nan, "", nan, "", nan, nan, "", nan, nan, 0, "no queries")
    return dataclasses.replace(row, metrics=dict.fromkeys(METRICS, gone), predicted={}, published={}, buckets=())


@pytest.mark.parametrize("name", RENDERINGS)
def test_missing_numbers_are_dashes_not_errors(name: str) -> None:
    report = sample_report()
    empty = dataclasses.replace(report, rows=tuple(map(absent, report.rows)), layers=())
    assert RENDERINGS[name](empty)
    bare = dataclasses.replace(report, rows=tuple(dataclasses.replace(r, metrics={}, buckets=()) for r in report.rows))
    assert RENDERINGS[name](bare)
    assert RENDERINGS[name](dataclasses.replace(report, sources=(), rows=(), layers=(), recommendations=()))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_odd_number_or_name_breaks_a_rendering(data: st.DataObject) -> None:
    report = sample_report(layers=(0, 7), kv_heads=2)
    number = st.one_of(st.floats(allow_infinity=False), st.just(math.nan), st.just(0.0))
    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
    rows = []
    for row in report.rows[:4]:
        metrics = {
            m: dataclasses.replace(s, mean=data.draw(number), low=data.draw(number), ci_low=data.draw(number))
            for m, s in row.metrics.items()
            if m in ("kl", "cos", "rel_err", "rel_err_konly", "rel_err_vonly")
        }
        odd_row = {"bits_per_value": data.draw(number), "verdict": data.draw(text), "config": data.draw(text)}
        rows.append(dataclasses.replace(row, metrics=metrics, **odd_row))  # type: ignore[arg-type]
    layers = tuple(
        dataclasses.replace(v, values={"kl": data.draw(number)}, heads={"kl": (data.draw(number), data.draw(number))})
        for v in report.layers[:4]
    )
    check: Check = dataclasses.replace(report.gate.checks[0], measured=data.draw(number), where=data.draw(text))
    source: Source = dataclasses.replace(report.sources[0], scale=data.draw(number), n_eff_low=data.draw(number))
    odd = dataclasses.replace(
        report, rows=tuple(rows), layers=layers, sources=(source,), command=data.draw(text), next=data.draw(text),
        gate=dataclasses.replace(report.gate, name=data.draw(text), checks=(check,)),
    )  # fmt: skip
    for name, rendering in RENDERINGS.items():
        assert rendering(odd), name
    ElementTree.fromstring(report_junit(odd))
