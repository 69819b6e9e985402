"""Every stress set is flagged for its own reason; at most three sentences; the next command can be copied."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pytest

from tqtool.cli.repeat import next_command, without_config
from tqtool.report.model import Report
from tqtool.report.params import Params
from tqtool.validation.dataset import Dataset, from_arrays, from_synthetic
from tqtool.validation.diagnosis import diagnose
from tqtool.validation.run import validate
from tqtool.validation.synthetic import synthetic_set

STRESS = ("peaky", "key-bias", "outlier")
CONFIGS = ("K4/V4", "K4/V2", "K3/V3", "K2/V2")


def rules(report: Report) -> list[str]:
    return [finding.rule for finding in report.diagnosis]


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("peaky", "one_side", "spend bits on K"),
        ("key-bias", "key_offset", "--center-keys"),
        ("value-mean", "cosine_blind", "dominated by the mean value vector"),
        ("sink", "sink", "The first token draws 49%"),
        ("outlier", "outlier_channels", "outlier channels carry 90%"),
    ],
)
def test_each_stress_set_is_flagged_for_its_own_reason(name: str, rule: str, words: str) -> None:
    report = validate([from_synthetic(synthetic_set(name))], Params(CONFIGS))
    assert report.diagnosis[0].rule == rule
    assert words in report.diagnosis[0].sentence


@pytest.mark.parametrize("name", ["gaussian", "correlated"])
def test_benign_sets_give_no_finding(name: str) -> None:
    assert rules(validate([from_synthetic(synthetic_set(name))], Params(CONFIGS))) == []


def test_there_are_three_sentences_at_most() -> None:
    report = validate([from_synthetic(synthetic_set(name)) for name in STRESS], Params(("K4/V4",)))
    assert len(report.diagnosis) == 3
    assert all("\n" not in finding.sentence for finding in report.diagnosis)


def test_centred_keys_are_not_told_to_centre() -> None:
    report = validate([from_synthetic(synthetic_set("key-bias"))], Params(("K4/V4",), center_keys=True))
    assert "key_offset" not in rules(report)


def layered(scales: list[float]) -> Dataset:
    """Layers whose queries are longer or shorter, so that the same key error moves attention more or less."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 256, 64)).astype(np.float32) for _ in range(3))
    one = from_arrays(k, v, q)

    def load(index: int, head: int):  # type: ignore[no-untyped-def]
        return q * np.float32(scales[index]), k[0], v[0]

    facts = tuple(replace(one.facts[0], layer=layer) for layer in range(len(scales)))
    return replace(one, facts=facts, load=load)


def test_a_bad_boundary_layer_is_named() -> None:
    report = validate([layered([1, 1, 1, 1, 1, 1, 4])], Params(("K4/V4",)))
    assert report.diagnosis[0].rule == "boundary_layers"
    assert report.diagnosis[0].sentence.startswith("Layer 6 is worst")
    assert "--protect-layers first2,last2" in report.diagnosis[0].sentence
    assert "boundary_layers" not in rules(validate([layered([1, 1, 1, 4, 1, 1, 1])], Params(("K4/V4",))))
    assert "boundary_layers" not in rules(validate([layered([1, 1, 4])], Params(("K4/V4",))))


def test_an_error_beyond_theory_is_flagged() -> None:
    report = validate([from_synthetic(synthetic_set("gaussian"))], Params(("K4/V4",)))
    metrics = report.rows[1].metrics
    worse = replace(metrics["distortion_ratio"], mean=1.5)
    row = replace(report.rows[1], metrics={**metrics, "distortion_ratio": worse})
    findings = diagnose(replace(report, rows=(report.rows[0], row)))
    assert findings[0].rule == "rotation_not_spreading"
    assert "1.50 times" in findings[0].sentence


def following(data: Dataset, command: str) -> str:
    report = validate([data], Params(("K4/V4",)), command=command)
    return next_command(report, diagnose(report))


def test_the_next_command_is_fitted_to_what_was_found() -> None:
    offset = synthetic_set("key-bias")
    data = from_arrays(offset.k, offset.v, offset.q, name="d", causal=False)
    assert following(data, "tqtool validate d") == "tqtool validate d --center-keys"
    proxied = replace(
        data,
        load=lambda index, head: (None, offset.k[head], offset.v[head]),
        facts=(replace(data.facts[0], queries=0),),
    )
    assert "--q" in following(proxied, "tqtool validate d")
    assert following(replace(data, name="sample"), "tqtool validate").startswith("tqtool validate FOLDER")
    assert following(from_synthetic(offset), "tqtool validate") == ""


def test_the_next_command_replaces_the_configurations() -> None:
    command = shlex.join(["tqtool", "validate", "a b", "-c", "K4/V4", "--config=K2/V2", "--config", "K3/V3", "--x"])
    assert without_config(command) == "tqtool validate 'a b' --x"


def test_advice_that_rests_on_stand_in_queries_says_so() -> None:
    offset = synthetic_set("key-bias")
    data = from_arrays(offset.k, offset.v, offset.q, name="d", causal=False)
    proxied = replace(
        data,
        load=lambda index, head: (None, offset.k[head], offset.v[head]),
        facts=(replace(data.facts[0], queries=0),),
    )
    mark = " (UNVERIFIED: keys stood in for the queries)."
    found = validate([proxied], Params(("K4/V4", "K2/V2"))).diagnosis
    assert found
    assert all(finding.sentence.endswith(mark) for finding in found if finding.rule != "rotation_not_spreading")
    assert not any(mark in finding.sentence for finding in validate([data], Params(("K4/V4", "K2/V2"))).diagnosis)


def test_a_run_of_nothing_but_the_control_is_told_to_measure_something() -> None:
    report = validate([from_synthetic(synthetic_set("gaussian"))], Params(("K16/V16",)))
    given = replace(report, command="tqtool validate d -c K16/V16", sources=(replace(report.sources[0], kind="dump"),))
    assert next_command(given, diagnose(given)) == "tqtool validate d"
