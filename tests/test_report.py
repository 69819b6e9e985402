"""The Report value and its JSON: exact inverses, and refusals that name the place."""

import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tqtool.errors import InputError, IntegrityError
from tqtool.report.model import (
    METRICS,
    SCHEMA,
    Bucket,
    Finding,
    Gate,
    Input,
    LayerValues,
    Notice,
    Report,
    Row,
    Source,
    Summary,
)
from tqtool.report.params import Params
from tqtool.report.serialize import report_from_json, report_to_json

FLOATS = st.one_of(st.floats(allow_infinity=False), st.sampled_from([0.1, 1e-300, math.nan]))
st.register_type_strategy(float, FLOATS)
st.register_type_strategy(
    Mapping, lambda kind: st.dictionaries(st.text(max_size=5), st.from_type(kind.__args__[1]), max_size=2)
)
POSITIVE = st.floats(1e-300, 1e300)
st.register_type_strategy(  # those that can be: `test_params.py` has the others
    Params,
    st.builds(
        Params,
        configs=st.lists(st.builds("K{}/V{}".format, st.integers(1, 8), st.integers(1, 8)), min_size=1).map(tuple),
        seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, unique=True).map(tuple),
        causal=st.sampled_from([None, True]),
        window=st.none() | st.integers(1),
        attention_scale=st.just("") | POSITIVE.map(repr),
        softcap=st.none() | POSITIVE,
        tokens=st.sampled_from([(), (0, 5)]),
        context=st.none() | st.integers(1),
        max_queries=st.none() | st.integers(1),
        protect_layers=st.lists(st.integers(0), unique=True).map(tuple),
        residual_window=st.integers(0),
        sink_tokens=st.integers(0),
        nosink_tokens=st.integers(0),
        bootstrap_draws=st.integers(1),
        recommend_widths=st.sampled_from([(2,), (3, 8)]),
        budget=st.none() | st.floats(0.1, 16),
        target_kl=st.none(),
    )
    | st.builds(Params, st.just(("K4/V2",)), target_kl=st.none() | POSITIVE),
)
REPORTS = st.from_type(Report)


def tiny() -> Report:
    nan = math.nan
    cos = Summary(
        0.99,
        0.9,
        1.0,
        1,
        0.8,
        1.0,
        0.97,
        "L01.H0",
        0.98,
        "L01",
        0.985,
        0.995,
        "cluster bootstrap",
        0.989,
        0.991,
        600,
    )
    absent = Summary(
        nan,
        nan,
        nan,
        1,
        nan,
        nan,
        nan,
        "",
        nan,
        "",
        nan,
        nan,
        "",
        nan,
        nan,
        3,
        "3 decisive queries, 20 are needed",
    )
    row = Row(
        "dump",
        "K4/V2",
        "turboquant",
        3.5,
        4.5,
        2.5,
        112.0,
        9.14,
        4.57,
        88,
        "lenient",
        "pass",
        "attention fidelity: lenient",
        ("kl 0.03 > 0.02",),
        True,
        {"cos": cos, "top1_decisive": absent},
        {"cos": 0.98},
        {"cos": "~0.94"},
        (Bucket(0, 3, 4, {"kl": 0.1}),),
    )
    source = Source(
        "dump",
        "dump",
        (0, 1),
        1,
        2,
        64,
        32,
        128,
        "captured",
        True,
        0.0884,
        3.0,
        9.0,
        0.1,
        0.2,
        0,
        0,
        False,
        {"L00": 4},
        ("layer00_k.npy: k of layer 0",),
    )
    return Report(
        "tqtool 0.1.0",
        "tqtool validate dump",
        (Input("k.npy", "00", (1, 64, 128), "float16"),),
        Params(("K4/V2",)),
        (source,),
        (row,),
        (LayerValues("dump", "K4/V2", 0, {"cos": 0.99}, {"cos": (0.99,)}),),
        Gate("none", True, (), "no gate asked"),
        (Finding("k", "spend bits on K"),),
        "",
        (Notice("zero", "3 zero vectors"),),
        (),
        {"engine": "reference"},
        {"seconds": "1.0"},
    )


@pytest.fixture
def tiny_report() -> Report:
    return tiny()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(REPORTS)
def test_json_is_an_exact_inverse(report: Report) -> None:
    plain = json.loads(report_to_json(report)) | {"schema": SCHEMA}
    text = json.dumps(plain, ensure_ascii=False, indent=1) + "\n"
    assert report_to_json(report_from_json(text)) == text


def test_absent_numbers_are_null_and_come_back_as_nan(tiny_report: Report) -> None:
    text = report_to_json(tiny_report)
    assert "NaN" not in text
    assert "Infinity" not in text
    back = report_from_json(text)
    summary = back.rows[0].metrics["top1_decisive"]
    assert math.isnan(summary.mean)
    assert summary.reason
    assert back.rows[0].metrics["cos"] == tiny_report.rows[0].metrics["cos"]


def test_a_key_with_a_default_may_be_absent_and_an_unknown_key_is_ignored(tiny_report: Report) -> None:
    plain = json.loads(report_to_json(tiny_report))
    del plain["params"]["bootstrap_draws"]
    plain["later"] = {"added": 1}
    assert report_from_json(json.dumps(plain)).params == tiny_report.params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("rows"), "r.json: report: 'rows' is missing"),
        (lambda p: p.update(schema="tqtool.compare/1"), "schema is 'tqtool.compare/1'"),
        (lambda p: p["rows"][0].update(level="superb"), "report.rows[0].level: 'superb' is none of"),
        (lambda p: p["rows"][0].update(shared_bytes=True), "report.rows[0].shared_bytes: expected int"),
        (lambda p: p["rows"][0].update(pair_bytes="1"), "report.rows[0].pair_bytes: expected float"),
        (lambda p: p["rows"][0].update(metrics=[]), "report.rows[0].metrics: expected an object"),
        (lambda p: p.update(layers={}), "report.layers: expected a list"),
        (lambda p: p.update(gate=None), "report.gate: expected an object"),
    ],
)
def test_a_damaged_report_is_refused_with_the_place(tiny_report: Report, change, message: str) -> None:  # type: ignore[no-untyped-def]
    plain = json.loads(report_to_json(tiny_report))
    change(plain)
    with pytest.raises(InputError, match=r"r\.json") as caught:
        report_from_json(json.dumps(plain), "r.json")
    assert message in str(caught.value)
    assert caught.value.code == "report"


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"schema": 1}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        report_from_json(text)


def test_every_metric_is_described_under_its_own_id() -> None:
    assert all(metric.id == key and metric.title for key, metric in METRICS.items())
    assert Params(configs=("K4/V4",)).seeds == (0,)


def test_a_later_schema_asks_for_an_upgrade(tiny_report: Report) -> None:
    text = report_to_json(tiny_report).replace(SCHEMA, "tqtool.validate/2")
    with pytest.raises(IntegrityError, match=r"written as tqtool.validate/2; this tqtool reads tqtool.validate/1"):
        report_from_json(text)


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity", "1e999"])
def test_a_number_that_is_no_finite_float_is_refused(tiny_report: Report, value: str) -> None:
    plain = json.loads(report_to_json(tiny_report))
    plain["sources"][0]["scale"] = "HERE"
    with pytest.raises(InputError, match="scale: expected float"):
        report_from_json(json.dumps(plain).replace('"HERE"', value))


def test_half_a_surrogate_pair_is_refused(tiny_report: Report) -> None:
    plain = json.loads(report_to_json(tiny_report))
    plain["command"] = "\ud800"
    with pytest.raises(InputError, match=r"command: .* is not valid text"):
        report_from_json(json.dumps(plain))
