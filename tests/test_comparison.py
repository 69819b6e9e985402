"""Two reports side by side: pairing, intervals, and what cannot be compared."""

import dataclasses
import math

import numpy as np
import pytest
from loops import case
from reports import sample_report

from tqtool.errors import InputError
from tqtool.rendering.report.comparison import comparison_json, comparison_text
from tqtool.report.comparison import compare_reports
from tqtool.report.model import Report


def shifted(report: Report, by: float, noise: float = 0.0) -> Report:
    """Return the report with `by` added to the KL of every head of K4/V4, and something different to each."""
    rng = np.random.default_rng(1)
    layers = []
    for v in report.layers:
        if v.config == "K4/V4":
            heads = tuple(x + by + noise * rng.standard_normal() for x in v.heads["kl"])
            v = dataclasses.replace(v, heads={**v.heads, "kl": heads})
        layers.append(v)
    rows = [
        dataclasses.replace(
            r, metrics={**r.metrics, "kl": dataclasses.replace(r.metrics["kl"], mean=r.metrics["kl"].mean + by)}
        )
        if r.config == "K4/V4"
        else r
        for r in report.rows
    ]
    return dataclasses.replace(report, rows=tuple(rows), layers=tuple(layers))


def kl(a: Report, b: Report, config: str = "K4/V4"):  # type: ignore[no-untyped-def]
    pair = next(pair for pair in compare_reports(a, b).pairs if pair.config == config)
    return next(d for d in pair.differences if d.metric == "kl")


def test_a_report_equals_itself() -> None:
    found = compare_reports(sample_report(), sample_report())
    assert {d.change for pair in found.pairs for d in pair.differences} == {"same"}
    assert (found.only_a, found.only_b, found.params, found.notes) == ({}, {}, {}, ())


def test_what_all_heads_share_shows_through_what_makes_them_differ() -> None:
    a = sample_report()  # head means of K4/V4 range from 0.014 to 0.047; the shift is 0.002
    d = kl(a, shifted(a, 0.002, noise=0.0005))
    assert d.difference == pytest.approx(0.002, abs=0.0003)  # the noise has a mean of its own
    assert 0.001 < d.ci_low < d.ci_high < 0.003
    assert d.change == "worse"
    assert kl(a, shifted(a, -0.002)).change == "better"


def test_a_difference_within_its_interval_is_unclear() -> None:
    a = sample_report()
    assert kl(a, shifted(a, 0.00001, noise=0.01)).change == "unclear"


def test_other_data_or_few_heads_give_no_interval() -> None:
    a = sample_report()
    other = dataclasses.replace(a, inputs=a.inputs[1:])
    d = kl(a, shifted(other, 0.002))
    assert math.isnan(d.ci_low)
    assert d.change == "unclear"
    assert "the inputs differ" in compare_reports(a, other).notes[0]
    few = sample_report(layers=(0, 1))
    assert math.isnan(kl(few, few).ci_low)


def test_single_sources_are_paired_whatever_their_names() -> None:
    found = compare_reports(sample_report(name="before"), sample_report(name="after"))
    assert {(pair.source_a, pair.source_b) for pair in found.pairs} == {("before", "after")}


def test_rows_without_partner_and_options_that_differ_are_named() -> None:
    a, b = sample_report(), sample_report(baselines=False)
    b = dataclasses.replace(b, params=dataclasses.replace(b.params, center_keys=True))
    found = compare_reports(a, b)
    assert dict(found.only_a) == {"smollm2-135m/kv": ("q4_0+H", "q8_0")}
    assert dict(found.params) == {"center_keys": ("False", "True")}


def test_nothing_in_common_is_an_error_that_says_what_there_is() -> None:
    a = sample_report()
    b = dataclasses.replace(a, rows=tuple(dataclasses.replace(r, config="K5/V5") for r in a.rows))
    with pytest.raises(InputError, match=r"a.json, b.json: no configuration in common") as caught:
        compare_reports(a, b, names=("a.json", "b.json"))
    assert caught.value.hint is not None
    assert "K5/V5 of smollm2-135m/kv" in caught.value.hint


def test_text_and_json_show_the_same_figures() -> None:
    a = sample_report()
    found = compare_reports(a, shifted(a, 0.002, noise=0.0005), names=("a\x1b.json", "b.json"))
    text = comparison_text(found)
    line = next(line for line in text.split("\n") if line.startswith("K4/V4"))
    assert line.split()[3:7] == ["kl", "0.0270", "0.0290", "+0.0020"]
    assert line.endswith("- worse")
    assert "\x1b" not in text
    assert "\x1b[31m- worse\x1b[0m" in comparison_text(found, color=True)
    plain = comparison_json(found)
    assert plain["schema"] == "tqtool.compare/1"
    assert plain["pairs"][0]["differences"][0]["change"] == "worse"


def test_a_number_that_one_report_lacks_is_a_dash_and_never_the_same() -> None:
    a = sample_report()
    bare = dataclasses.replace(a, rows=tuple(dataclasses.replace(row, metrics={}) for row in a.rows))
    for which, (one, other) in enumerate(((a, bare), (bare, a), (bare, bare))):
        with case(which=which):
            found = compare_reports(one, other)
            assert {d.change for pair in found.pairs for d in pair.differences} == {"unclear"}
    line = next(line for line in comparison_text(compare_reports(a, bare)).split("\n") if line.startswith("K4/V4"))
    assert line.split()[3:] == ["kl", "0.0270", "–", "–", "?", "unclear"]
