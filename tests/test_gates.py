"""Levels, limits, checks: what passes, what fails, what is UNVERIFIED, and what the line says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loops import case

from tqtool.errors import InputError, UsageError
from tqtool.report.gate_files import load_limits
from tqtool.report.gates import (
    LEVELS,
    Limit,
    against_baseline,
    check_row,
    conclude,
    decide,
    describe,
    gated_rows,
    parse_limits,
    reached,
    split_metric,
    verdict,
)
from tqtool.report.model import METRICS, Report, Row, Source
from tqtool.report.params import Params
from tqtool.validation.dataset import from_arrays, from_synthetic
from tqtool.validation.run import validate
from tqtool.validation.synthetic import synthetic_set


@pytest.fixture(scope="module")
def gaussian() -> Report:
    return validate([from_synthetic(synthetic_set("gaussian"))], Params(("K4/V4", "K2/V2")))


@pytest.fixture
def row(gaussian: Report) -> Row:
    return gaussian.rows[1]


@pytest.fixture
def source(gaussian: Report) -> Source:
    return gaussian.sources[0]


def with_metric(row: Row, metric: str, **changes: float | int | str) -> Row:
    return replace(row, metrics={**row.metrics, metric: replace(row.metrics[metric], **changes)})  # type: ignore[arg-type]


def test_levels_name_known_metrics_and_tighten_from_lenient_to_strict() -> None:
    for level, limits in LEVELS.items():
        with case(level=level):
            assert [limit.metric for limit in limits] == [limit.metric for limit in LEVELS["strict"]]
            assert all(split_metric(limit.metric)[0] in METRICS for limit in limits)
    for strict, balanced, lenient in zip(*LEVELS.values(), strict=True):
        with case(metric=strict.metric):
            order = [strict.value, balanced.value, lenient.value]
            assert order == sorted(order, reverse=strict.relation == ">=")
            assert len(set(order)) == 3


@pytest.mark.parametrize(("name", "passes"), [("gaussian", True), ("correlated", True), ("sink", True)])
def test_balanced_passes_4_bits_on_benign_sets(name: str, passes: bool) -> None:
    report = validate([from_synthetic(synthetic_set(name))], Params(("K4/V4",)))
    assert decide("balanced", LEVELS["balanced"], report.rows, report.sources).passed is passes


@pytest.mark.parametrize("name", ["peaky", "key-bias", "value-mean", "outlier"])
def test_balanced_fails_4_bits_on_every_stress_set(name: str) -> None:
    report = validate([from_synthetic(synthetic_set(name))], Params(("K4/V4",)))
    gate = decide("balanced", LEVELS["balanced"], report.rows, report.sources)
    assert not gate.passed
    failed = {check.metric for check in gate.checks if check.status == "fail"}
    assert "kl" in failed
    if name == "value-mean":  # cosine alone would have passed it
        assert failed == {"kl"}
        assert report.rows[1].metrics["cos"].mean == pytest.approx(0.9988, abs=0.0005)


def test_a_broken_key_side_never_passes_by_its_cosine() -> None:
    """Keys wrong, values nearly constant: the output hardly moves, and the gate sees it all the same."""
    rng = np.random.default_rng(1)
    q, k = 4 * rng.standard_normal((2, 300, 64)), rng.standard_normal((2, 300, 64))
    v = 30 * rng.standard_normal(64) + rng.standard_normal((2, 300, 64))
    report = validate([from_arrays(k, v, q)], Params(("K2/V8",)))
    assert report.rows[1].metrics["cos"].mean > 0.99
    for level in ("strict", "balanced", "lenient"):
        with case(level=level):
            assert not decide(level, LEVELS[level], report.rows, report.sources).passed  # type: ignore[index]


def test_the_failure_line_names_metric_value_limit_layer_and_head(row: Row, source: Source) -> None:
    bad = with_metric(row, "cos", low=0.873, worst_head="L27.H3")
    (check,) = check_row(bad, source, [Limit("cos_p01", ">=", 0.9)])
    check = replace(check, worst=math.nan)
    assert describe(check) == "cos_p01 0.873 < 0.9 (worst L27.H3)"
    assert describe(replace(check, worst=0.31)) == "cos_p01 0.873 < 0.9 (worst L27.H3: 0.31)"
    assert describe(replace(check, metric="cos_worst")) == "cos_worst 0.873 < 0.9 at L27.H3"
    gate = conclude("balanced", [check])
    assert not gate.passed
    assert gate.summary == "FAIL gaussian K4/V4: cos_p01 0.873 < 0.9 (worst L27.H3)"


def test_a_tail_of_few_queries_is_unverified_and_does_not_pass(row: Row, source: Source) -> None:
    few = with_metric(row, "kl", tail_percent=5, count=499)
    (check,) = check_row(few, source, [Limit("kl_p99", "<=", 1.0)])
    assert check.status == "unverified"
    assert not conclude("x", [check]).passed
    (mean,) = check_row(few, source, [Limit("kl", "<=", 1.0)])
    assert mean.status == "pass"
    assert reached(few, source)[0] != "none"  # without a gate the level is told from the tail there is


def test_the_worst_seed_is_gated(row: Row, source: Source) -> None:
    spread = with_metric(row, "kl", mean=0.01, seed_low=0.005, seed_high=0.02)
    assert check_row(spread, source, [Limit("kl", "<=", 0.015)])[0].status == "fail"
    spread = with_metric(row, "cos", mean=0.98, seed_low=0.96, seed_high=0.99)
    assert check_row(spread, source, [Limit("cos", ">=", 0.97)])[0].status == "fail"


def test_a_number_that_is_missing_fails_except_where_it_cannot_exist(row: Row, source: Source) -> None:
    lost = with_metric(row, "kl", mean=math.nan, seed_low=math.nan, seed_high=math.nan)
    assert check_row(lost, source, [Limit("kl", "<=", 1.0)])[0].status == "fail"
    assert math.isnan(row.metrics["top1_decisive"].mean)  # flat attention decides nothing
    assert check_row(row, source, [Limit("top1_decisive", ">=", 0.97)])[0].status == "pass"


def test_proxy_queries_pass_no_gate(row: Row, source: Source) -> None:
    proxied = replace(source, query_source="proxy", kind="dump")
    (check,) = check_row(row, proxied, [Limit("kl", "<=", 1.0)])
    assert check.status == "unverified"
    assert "UNVERIFIED" in verdict(row, proxied)


def test_words_never_promise_more_than_was_measured(row: Row, source: Source) -> None:
    for made in (replace(source, kind="synthetic"), replace(source, kind="dump"), replace(source, iid=True)):
        for level in ("strict", "balanced", "lenient", "none"):
            with case(kind=made.kind, iid=made.iid, level=level):
                words = verdict(replace(row, level=level), made)  # type: ignore[arg-type]
                assert "safe" not in words.lower()
                assert "quality" not in words.lower()
    assert verdict(row, source).startswith("implementation healthy on synthetic data")
    assert verdict(row, replace(source, kind="dump", iid=False)).startswith("attention fidelity")


def test_nothing_quantized_fails_without_a_gate(gaussian: Report) -> None:
    rows = [replace(gaussian.rows[1], status="error")]
    gate = decide("none", (), rows, gaussian.sources)
    assert not gate.passed
    assert "nothing was quantized" in gate.summary
    assert gated_rows(rows, gate)[0].status == "error"


def test_the_control_is_never_gated(gaussian: Report) -> None:
    gate = decide("x", [Limit("kl", "<=", -1.0)], gaussian.rows, gaussian.sources)
    assert {check.config for check in gate.checks} == {"K4/V4", "K2/V2"}


def test_rows_take_the_gravest_status_of_their_checks(gaussian: Report) -> None:
    gate = decide("x", [Limit("kl", "<=", 0.03), Limit("cos", ">=", 0.0)], gaussian.rows, gaussian.sources)
    assert [row.status for row in gated_rows(gaussian.rows, gate)] == ["pass", "pass", "fail"]


def test_limits_are_read_from_options(row: Row) -> None:
    assert parse_limits(["cos_p01=0.9", " kl = 1e-2"], ">=") == (Limit("cos_p01", ">=", 0.9), Limit("kl", ">=", 0.01))
    for text in ("cos", "cos=", "cos=high", "cos=nan", "cos=inf", "=1"):
        with case(text=text), pytest.raises(UsageError):
            parse_limits([text], ">=")
    with pytest.raises(UsageError, match="no metric 'cosine'"):
        parse_limits(["cosine=0.9"], ">=")


def test_a_gate_file_is_toml_or_json(tmp_path: Path) -> None:
    toml, other = tmp_path / "gate.toml", tmp_path / "gate.json"
    toml.write_text('level = "lenient"\n[min]\ncos_p01 = 0.8\n[max]\nkl = 0.04\n')
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())  # as Windows editors write it
    other.write_text(json.dumps({"level": "lenient", "min": {"cos_p01": 0.8}, "max": {"kl": 0.04}}))
    expected = ("lenient", (Limit("cos_p01", ">=", 0.8), Limit("kl", "<=", 0.04)))
    assert load_limits(toml) == load_limits(other) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no limits"),
        ("# kl", "holds no limits"),
        ("{}", "holds no limits"),
        ('level = "none"', "holds no limits"),
        ("[min]", "holds no limits"),
        ("level = 3", "level 3 is not known"),
        ("level = []", r"level \[\] is not known"),
        ("[minimum]\ncos = 1", "minimum is not known"),
        ("[min]\ncos = true", "min must be a table of numbers"),
        ("min = 3", "min must be a table of numbers"),
        ("[max]\nkl = nan", "max must be a table of numbers"),
        ("{", "neither TOML nor JSON"),
        ("[" * 5000, "neither TOML nor JSON"),
        ('{"a":' * 5000, "neither TOML nor JSON"),
    ],
)
def test_a_bad_gate_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gate"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_limits(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        load_limits(tmp_path / "none")


def test_a_regression_is_measured_against_the_same_row(gaussian: Report) -> None:
    assert all(check.status == "pass" for check in against_baseline(gaussian.rows, gaussian, 0.0))
    worse = [with_metric(row, "kl", seed_high=row.metrics["kl"].seed_high * 1.06) for row in gaussian.rows]
    failed = [check for check in against_baseline(worse, gaussian, 0.05) if check.status == "fail"]
    assert {(check.config, check.metric) for check in failed} == {("K4/V4", "kl"), ("K2/V2", "kl")}
    assert not [check for check in against_baseline(worse, gaussian, 0.07) if check.status == "fail"]
    bare = replace(gaussian, rows=tuple(replace(row, metrics={}) for row in gaussian.rows))
    with pytest.raises(InputError, match="has no kl of K4/V4"):
        against_baseline(gaussian.rows, bare, 0.05)
    with pytest.raises(InputError, match="no row in common"):
        against_baseline([replace(gaussian.rows[1], config="K8/V8")], gaussian, 0.05)
