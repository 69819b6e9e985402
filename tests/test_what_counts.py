"""What is counted: positions that hold tokens, data enough for a level, bits of what is stored, the worst head."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from numpy.testing import assert_allclose

from tqtool.codec.sizes import vector_bytes
from tqtool.dumps.dump import load_dump, sample_dump_path
from tqtool.errors import InputError
from tqtool.rendering.report.data import data_parts
from tqtool.report.gates import LEVELS, MIN_KEYS, MIN_QUERIES, against_baseline, decide, describe
from tqtool.report.model import LayerValues, Report
from tqtool.report.params import Params
from tqtool.validation.dataset import from_arrays
from tqtool.validation.dump_data import from_dump
from tqtool.validation.run import validate

Array = np.ndarray[Any, np.dtype[np.float32]]


def arrays(seed: int = 0, tokens: int = 80, queries: int = 40) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    k, v, q = (rng.standard_normal((h, n, 32)).astype(np.float32) for h, n in ((2, tokens), (2, tokens), (4, queries)))
    return k, v, q


def write(folder: Path, layers: dict[int, tuple[Array, ...]]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, kvq in layers.items():
        for kind, x in zip("kvq", kvq, strict=False):
            np.save(folder / f"layer{number:02d}_{kind}.npy", x)
    return folder


def padded(x: Array, before: int, after: int, fill: Array | None = None) -> Array:
    """Positions of zeros, or of copies of one vector of each head, (heads, dim)."""
    row = np.zeros((len(x), x.shape[2]), np.float32) if fill is None else fill
    ends = [np.repeat(row[:, None], count, axis=1) for count in (before, after)]
    return np.concatenate([ends[0], x, ends[1]], axis=1)


def values(report: Report, layer: int = 0) -> dict[str, float]:
    found: LayerValues = next(each for each in report.layers if (each.layer, each.config) == (layer, "K4/V3"))
    return dict(found.values)


def measured(folder: Path, tokens: tuple[int, int] | None = None) -> Report:
    return validate([from_dump(load_dump(folder, layout="htd"), tokens=tokens)], Params(("K4/V3",), bootstrap_draws=10))


FILL = np.random.default_rng(9).standard_normal((2, 32)).astype(np.float32)
ENDS: dict[str, tuple[int, int, Array | None, str, str]] = {
    "zeros at the end": (0, 30, None, "the last 30 of 110 positions are zero", "0:80"),
    "zeros in front": (25, 0, None, "the first 25 of 105 positions are zero", "25:105"),
    "one zero": (0, 1, None, "the last 1 of 81 positions are zero", "0:80"),
    "both": (20, 7, None, "the first 20 and the last 7 of 107 positions are zero", "20:100"),
    "copies at the end": (0, 30, FILL, "the last 30 of 110 positions are one repeated vector", "0:80"),
    "copies in front": (12, 0, FILL, "the first 12 of 92 positions are one repeated vector", "12:92"),
    "many": (0, 3000, None, "the last 3000 of 3080 positions are zero", "0:80"),
}


@pytest.mark.parametrize("name", ENDS)
def test_positions_without_a_token_are_refused_until_it_is_said_what_counts(tmp_path: Path, name: str) -> None:
    before, after, fill, words, hint = ENDS[name]
    k, v, q = arrays()
    folder = write(tmp_path / "d", {3: (padded(k, before, after, fill), padded(v, before, after, fill), q)})
    with pytest.raises(InputError, match=f"layer 3: {words} in every head") as caught:
        from_dump(load_dump(folder, layout="htd"))
    assert caught.value.code == "empty-slots"
    assert f"--tokens {hint} measures the others" in str(caught.value.hint)
    plain = values(measured(write(tmp_path / "plain", {3: (k, v, q)})), 3)
    start, stop = map(int, hint.split(":"))
    assert_allclose(list(values(measured(folder, (start, stop)), 3).values()), list(plain.values()), rtol=0)


@pytest.mark.parametrize("side", ["k", "v"])
def test_one_side_of_zeros_is_enough(tmp_path: Path, side: str) -> None:
    k, v, q = arrays()
    {"k": k, "v": v}[side][:, -5:] = 0
    with pytest.raises(InputError, match="the last 5 of 80 positions are zero"):
        from_dump(load_dump(write(tmp_path / "d", {0: (k, v, q)}), layout="htd"))


def test_queries_of_every_slot_are_cut_like_the_keys(tmp_path: Path) -> None:
    """A padded batch: queries of all positions, the first of them padding."""
    k, v, q = arrays(tokens=70, queries=70)
    folder = write(tmp_path / "d", {0: (padded(k, 10, 0, FILL), padded(v, 10, 0, FILL), padded(q, 10, 0))})
    plain = write(tmp_path / "plain", {0: (k, v, q)})
    assert_allclose(list(values(measured(folder, (10, 80))).values()), list(values(measured(plain)).values()), rtol=0)


def test_equal_tokens_at_an_end_are_tokens(tmp_path: Path) -> None:
    """Before rotary embedding equal tokens have equal keys and values in the first layer, not in later ones."""
    layers = {i: arrays(i) for i in range(2)}
    for x in layers[0][:2]:
        x[:, -3:] = x[:, -3:-2]
    assert from_dump(load_dump(write(tmp_path / "d", layers), layout="htd")).facts[0].tokens == 80
    layers[0][0][0, -1, 0] += 1  # one head alone: values are alike, keys are not
    assert from_dump(load_dump(write(tmp_path / "e", {0: layers[0]}), layout="htd")).facts[0].tokens == 80


def test_a_head_of_zeros_is_no_padding(tmp_path: Path) -> None:
    k, v, q = arrays()
    v[0] = 0
    v[1, -4:] = v[1, -4:-3]
    assert from_dump(load_dump(write(tmp_path / "d", {0: (k, v, q)}), layout="htd")).facts[0].tokens == 80
    assert (
        from_dump(load_dump(write(tmp_path / "e", {0: (k, np.zeros_like(v), q)}), layout="htd")).facts[0].tokens == 80
    )


@pytest.mark.parametrize("text", ["", "5", "5:5", "9:2", "-1:5", "a:b", "0:1:2", "0:9999999999999"])
def test_a_range_that_is_none_is_refused(tqtool: Run, text: str) -> None:
    done = tqtool("validate", f"--tokens={text}")
    assert done.returncode == 2
    assert f"error[usage]: --tokens {text!r}: need A:B with A below B" in done.stderr


def test_tokens_soft_cap_and_context_are_options(tqtool: Run, tmp_path: Path) -> None:
    k, v, q = arrays()
    write(tmp_path / "slots", {0: (padded(k, 0, 20), padded(v, 0, 20), q)})
    options = ("--tokens", "0:80", "--softcap", "1.5", "--residual-window", "16", "--context", "4096", "--recommend")
    done = tqtool("validate", "slots", "-c", "K4/V4", "--json", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    facts = {"softcap": 1.5}
    right = validate([from_arrays(k, v, q, facts=facts)], Params(("K4/V4",), residual_window=16))
    assert_allclose(report["rows"][1]["metrics"]["kl"]["mean"], right.rows[1].metrics["kl"].mean, rtol=1e-8)
    coded = vector_bytes(32, 4, "range")
    assert report["rows"][1]["bits_per_value"] == 8 * ((4096 - 16) * coded + 16 * 64) / (4096 * 32)
    assert report["sources"][0]["context"] == 4096
    assert "positions 0 to 79 are measured, others hold no tokens" in report["sources"][0]["notes"]
    assert "options" not in tqtool("validate", "slots", "--tokens", "0:200").stderr
    assert tqtool("validate", "--synthetic", "gaussian", "--tokens", "0:5").returncode == 2


# Enough for a level ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "queries", "words"),
    [
        (1, 1, "queries see 1 key at most; 64 are needed for a level"),
        (MIN_KEYS - 1, 40, "queries see 63 keys at most; 64 are needed for a level"),
        (80, 15, "a layer has 60 queries; 64 are needed for a level"),
        (MIN_KEYS, MIN_QUERIES // 4, ""),
    ],
)
def test_too_few_keys_or_queries_carry_no_level(tokens: int, queries: int, words: str) -> None:
    data = from_arrays(*arrays(tokens=tokens, queries=queries))
    report = validate([data], Params(("K8/V8",), recommend_widths=(4, 8)))
    row = report.rows[1]
    gate = decide("mine", [limit for limit in LEVELS["lenient"] if limit.metric == "kl"], report.rows, report.sources)
    baseline = against_baseline(report.rows, report, 0.05)
    if not words:
        assert row.level in ("strict", "balanced")
        assert gate.passed
        assert {check.status for check in baseline} == {"pass"}
        assert report.recommendations
        return
    assert (row.level, row.status, row.verdict, row.misses) == ("none", "unverified", f"UNVERIFIED: {words}", (words,))
    assert not gate.passed
    assert gate.checks[0].reason == words
    assert {check.status for check in baseline} == {"unverified"}
    assert report.recommendations == ()
    assert [n.text for n in report.warnings if n.code == "too-little"] == [
        f"no level, no gate and no recommendation from so little: {words}"
    ]
    assert report.rows[0].verdict == "control: exact"


def test_one_token_passes_no_gate(tqtool: Run, tmp_path: Path) -> None:
    write(tmp_path / "one", {0: tuple(x[:, :1] for x in arrays())})
    done = tqtool("validate", "one", "--layout", "htd", "-c", "K4/V2", "--max", "kl=0.1", "--recommend")
    assert done.returncode == 1
    assert "balanced" not in done.stdout.split("no level")[0]
    assert "queries see 1 key at most" in done.stdout


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"residual_window": 20, "sink_tokens": 4}, {"center_keys": True, "center_values": True}]
)
@pytest.mark.parametrize("context", [None, 1000])
def test_a_recommendation_counts_what_a_row_counts(options: dict[str, Any], context: int | None) -> None:
    params = Params(("K4/V4",), recommend_widths=(4,), budget=10.0, context=context, **options)
    report = validate([from_arrays(*arrays())], params)
    assert_allclose(report.recommendations[0].bits_per_value, report.rows[1].bits_per_value, rtol=1e-12)
    tokens, exact = context or 80, options.get("residual_window", 0) + options.get("sink_tokens", 0)
    side = (tokens - exact) * vector_bytes(32, 4, "range") + exact * 64 + (4 * 32 if "center_keys" in options else 0)
    assert report.rows[1].bits_per_value == 8 * side / (tokens * 32)


def test_a_window_is_priced_at_what_the_layer_holds() -> None:
    """A sliding layer never holds more than its window, however long the context."""
    params = Params(("K4/V4",), residual_window=16, context=100_000)
    facts = {"window": 70}
    row = validate([from_arrays(*arrays(), facts=facts)], params).rows[1]
    assert row.bits_per_value == 8 * ((70 - 16) * vector_bytes(32, 4, "range") + 16 * 64) / (70 * 32)


def test_the_context_of_the_model_prices_the_residual_window(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", {0: arrays()})
    (folder / "manifest.json").write_text(json.dumps({"model": {"name": "M", "context": 8000, "layers": 12}}))
    data = from_dump(load_dump(folder, layout="htd"))
    report = validate([data], Params(("K4/V4",), residual_window=16))
    assert report.rows[1].bits_per_value == 8 * ((8000 - 16) * vector_bytes(32, 4, "range") + 16 * 64) / (8000 * 32)
    assert report.sources[0].context == 8000
    assert data_parts(report.sources[0])[:2] == ["M", "1 of 12 layers × 2 KV heads × 80 tokens × dim 32"]


# What the report says -------------------------------------------------------------------------------------------------


def test_the_data_line_shows_ranges_and_which_layers_differ(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers = {}
    for number, (kv, tokens, key, value) in enumerate(((2, 80, 64, 32), (4, 1200, 32, 32), (2, 80, 64, 64))):
        shapes = ((kv, tokens, key), (kv, tokens, value), (8, 30, key))
        layers[number] = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    folder = write(tmp_path / "d", layers)
    described = [
        {"layer": 0, "window": 40, "first_token": 1120, "sinks": [0.0] * 8},
        {"layer": 1, "softcap": 50.0, "alibi_slopes": [0.1] * 8},
        {"layer": 2, "kind": "cross", "scaling": 0.5},
    ]
    (folder / "manifest.json").write_text(json.dumps({"schema": "tqtool.dump/1", "layers": described}))
    source = validate([from_dump(load_dump(folder, layout="htd"))], Params(("K4/V4",))).sources[0]
    assert data_parts(source)[:-1] == [
        "3 layers × 2–4 KV heads × 80–1,200 tokens × key dim 32–64, value dim 32–64",
        "8 query heads × 30 queries",
        "causal but in layer 2",
        "scale 0.125–0.5",
        "window 40 in layer 0",
        "soft cap 50 in layer 1",
        "learned sinks in layer 0",
        "ALiBi in layer 1",
        "oldest keys dropped in layer 0",
    ]


def test_the_head_behind_a_figure_is_named_with_its_own() -> None:
    data = from_dump(load_dump(sample_dump_path()), name="sample")
    report = validate([data], Params(("K2/V2",)))
    checks = {check.metric: check for check in decide("g", LEVELS["balanced"], report.rows, report.sources).checks}
    summary = report.rows[1].metrics["kl"]
    assert (checks["kl"].worst, checks["kl"].where) == (summary.worst, summary.worst_head)
    assert describe(checks["kl"]) == (f"kl {summary.mean:.4g} > 0.03 (worst {summary.worst_head}: {summary.worst:.4g})")
    assert describe(checks["kl_worst"]) == f"kl_worst {summary.worst:.4g} > 0.1 at {summary.worst_head}"
    assert math.isfinite(checks["cos_p01"].worst)


# Arrays that say how the model attends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("attention_mask", {"valid_tokens": [0, 80]}),
        ("layer00_sinks", {"sinks": [0.0] * 4}),
        ("alibi_slopes", {"alibi_slopes": [0.1] * 4}),
        ("position_bias", None),
    ],
)
def test_an_array_that_bears_on_attention_is_told_or_refused(
    tmp_path: Path, name: str, told: dict[str, Any] | None
) -> None:
    folder = write(tmp_path / "d", {0: arrays()})
    np.save(folder / f"{name}.npy", np.ones((1, 80), np.float32))
    with pytest.raises(InputError, match=f"{name} may change attention and is not read") as caught:
        from_dump(load_dump(folder, layout="htd"))
    assert caught.value.code == "attention"
    if told is not None:
        (folder / "manifest.json").write_text(json.dumps(told))
        assert from_dump(load_dump(folder, layout="htd")).facts[0].tokens == 80
