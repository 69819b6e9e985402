"""validate(): known figures of real dumps and of the specification, the control, options, determinism."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import naive_metrics as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.codec import decode, encode, expected_error
from tqtool.codec.spec import CodecSpec
from tqtool.dumps.dump import load_dump, sample_dump_path
from tqtool.errors import BugError, InputError
from tqtool.report.model import METRICS, Report, Row
from tqtool.report.params import Params
from tqtool.report.serialize import report_to_json
from tqtool.validation import coders
from tqtool.validation import measure as heads
from tqtool.validation import run as validation
from tqtool.validation.coders import SidePlan
from tqtool.validation.dataset import Dataset, evenly, from_arrays, from_synthetic, head_of
from tqtool.validation.dump_data import from_dump
from tqtool.validation.run import validate
from tqtool.validation.synthetic import synthetic_set

CONFIGS = ("K2/V2", "K3/V2", "K4/V2", "K3/V3", "K4/V3", "K4/V4")  # in no order of damage


def rows_by_config(report: Report) -> dict[str, Row]:
    return {row.config: row for row in report.rows}


def means(report: Report, metric: str) -> dict[str, float]:
    return {row.config: row.metrics[metric].mean for row in report.rows if row.kind != "control"}


def last_queries(data: Dataset, count: int) -> Dataset:
    def load(index: int, head: int):  # type: ignore[no-untyped-def]
        q, k, v = data.load(index, head)
        return q[:, -count:], k, v

    return replace(data, load=load, facts=tuple(replace(facts, queries=count) for facts in data.facts))


@pytest.fixture(scope="module")
def smollm(shared_dumps: Path) -> Report:
    return validate([from_dump(load_dump(shared_dumps / "smollm2-135m" / "kv"))], Params(CONFIGS))


@pytest.fixture(scope="module")
def shared_dumps() -> Path:
    folder = Path(__file__).resolve().parents[2] / "shared" / "dumps"
    if not folder.is_dir():
        pytest.skip("../shared/dumps (real dumps) is not beside this checkout")
    return folder


def test_the_real_dump_gives_the_known_cosines(smollm: Report) -> None:
    known = {"K4/V4": 0.990, "K4/V3": 0.984, "K4/V2": 0.962, "K3/V3": 0.963, "K3/V2": 0.942, "K2/V2": 0.879}
    for config, cos in means(smollm, "cos").items():
        assert abs(cos - known[config]) <= 0.004, config
    worst = {config: row.metrics["cos"].worst_layer for config, row in rows_by_config(smollm).items()}
    for config, cos in {"K4/V4": 0.981, "K4/V2": 0.942, "K3/V3": 0.928, "K2/V2": 0.781}.items():
        assert abs(worst[config] - cos) <= 0.006, config
    assert_allclose([means(smollm, "kl")[config] for config in ("K4/V4", "K4/V3", "K4/V2")], 0.027, atol=0.002)


def test_kl_then_read_out_error_rank_as_perplexity_does_and_cosine_does_not(smollm: Report) -> None:
    kl, readout, cos = (means(smollm, metric) for metric in ("kl", "v_readout_err", "cos"))
    by_damage = sorted(CONFIGS, key=lambda config: (kl[config], readout[config]))
    assert by_damage == ["K4/V4", "K4/V3", "K4/V2", "K3/V3", "K3/V2", "K2/V2"]  # the order of dumps/README.md
    assert cos["K3/V3"] > cos["K4/V2"]
    assert any(f.rule == "cosine_order" and "K4/V2 and K3/V3" in f.sentence for f in smollm.diagnosis)


def test_the_second_real_dump_gives_the_known_cosines(shared_dumps: Path) -> None:
    data = last_queries(from_dump(load_dump(shared_dumps / "qwen2-tiny-hd64" / "kv")), 256)
    report = validate([data], Params(CONFIGS))
    known = {"K4/V4": 0.995, "K4/V3": 0.989, "K4/V2": 0.965, "K3/V3": 0.983, "K3/V2": 0.959, "K2/V2": 0.938}
    for config, cos in means(report, "cos").items():
        assert abs(cos - known[config]) <= 0.004, config


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gaussian", {"K4/V2": 0.936, "K4/V3": 0.978, "K4/V4": 0.991, "K3/V2": 0.925, "K2/V2": 0.890, "K3/V3": 0.967}),
        (
            "correlated",
            {"K4/V2": 0.977, "K4/V3": 0.991, "K4/V4": 0.995, "K3/V2": 0.968, "K2/V2": 0.943, "K3/V3": 0.982},
        ),
    ],
)
def test_the_specifications_columns_are_reproduced(name: str, known: dict[str, float]) -> None:
    report = validate([from_synthetic(synthetic_set(name))], Params(CONFIGS))
    for config, row in rows_by_config(report).items():
        with case(config=config):
            if row.kind == "control":
                continue
            assert abs(row.metrics["cos"].mean - known[config]) <= (0.01 if config == "K2/V2" else 0.004), config
            if name == "gaussian":
                assert abs(row.predicted["cos"] - known[config]) < 0.0006
                assert row.metrics["k_distortion_ratio"].mean >= 0.97
            assert row.metrics["distortion_ratio"].mean <= 1.03
            assert row.verdict.startswith(("implementation healthy on synthetic data", "below lenient on synthetic"))
    assert rows_by_config(report)["K4/V2"].published == {"cos": "~0.94" if name == "gaussian" else "~0.975"}


def test_theory_predicts_kl_and_read_out_error_on_gaussian_data() -> None:
    report = validate([from_synthetic(synthetic_set("gaussian"))], Params(CONFIGS))
    for row in report.rows[1:]:
        with case(config=row.config):
            for metric in ("kl", "v_readout_err"):
                with case(metric=metric):
                    assert_allclose(row.metrics[metric].mean, row.predicted[metric], rtol=0.06)
            assert_allclose(row.metrics["sigma_rms"].mean, row.metrics["sigma_pred"].mean, rtol=0.05)


@pytest.fixture(scope="module")
def one_head() -> tuple[Row, dict[str, float]]:
    """What the report says of one causal head, and what plain loops say."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (60, 80, 80))
    report = validate([from_arrays(k[None], v[None], 3 * q[None])], Params(("K3/V2",), seeds=(5,)))
    specs = CodecSpec(32, 3, seed=5), CodecSpec(32, 2, seed=5)
    kh, vh = (decode(encode(x, spec)) for x, spec in zip((k, v), specs, strict=True))
    plain = naive.head_metrics(
        *(x.astype(float).tolist() for x in (3 * q, k, v, kh, vh)),
        distortion=lloyd_max(32, 3).distortion,
        expected=(expected_error(specs[0]), expected_error(specs[1])),
    )
    return report.rows[1], plain


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_agrees_with_plain_loops(metric: str, one_head: tuple[Row, dict[str, float]]) -> None:
    row, plain = one_head
    assert metric in plain, "a metric needs its plain loop in tests/naive_metrics.py"
    assert_allclose(row.metrics[metric].mean, plain[metric], rtol=1e-7)


def test_every_metric_has_a_row_of_its_own_in_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text("utf-8")
    table = page[page.index("| id | formula |") :].split("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted([*METRICS, "bits_per_value"])


def test_query_head_h_reads_kv_head_h_over_the_group() -> None:
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((8, 16, 64)), rng.standard_normal((2, 32, 64))
    data = from_arrays(k, k, q, causal=False)
    for h in range(2):
        with case(h=h):
            group = head_of(data, 0, h).q.reshape(16, 4, 64).transpose(1, 0, 2)
            assert (group == q[4 * h : 4 * h + 4].astype(np.float32)).all()


def test_the_report_is_the_same_for_any_threads_and_any_run() -> None:
    datasets = [from_dump(load_dump(sample_dump_path()), name="sample"), from_synthetic(synthetic_set("outlier"))]
    params = Params(("K4/V4", "K2/V2"), seeds=(0, 3), max_queries=40, residual_window=8)
    texts = {report_to_json(validate(datasets, params, threads=threads)) for threads in (1, 3)}
    assert len(texts) == 1


def test_units_can_run_in_other_processes() -> None:
    data, params = small(), Params(("K4/V4",), seeds=(0, 1), baselines=("q4_0", "kivi-2"))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        elsewhere = validate([data], params, executor=pool)
    assert report_to_json(elsewhere) == report_to_json(validate([data], params))


def test_a_bad_head_is_told_from_another_process_as_from_a_thread() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, 40, 32))
    data, params = from_arrays(k * 1e37, k, q), Params(("K4/V4",))
    with pytest.raises(InputError) as here:
        validate([data], params, threads=2)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(InputError) as there:
        validate([data], params, executor=pool)
    assert "layer 0, head 0: vector [0] has norm" in str(there.value)
    for fact in ("args", "code", "hint", "path"):
        with case(fact=fact):
            assert getattr(there.value, fact) == getattr(here.value, fact)


def test_the_block_size_does_not_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    data = from_dump(load_dump(sample_dump_path()), name="sample")
    whole = validate([data], Params(("K3/V3",), max_queries=64))
    monkeypatch.setattr(heads, "BLOCK_SCORES", 1)
    blocks = validate([data], Params(("K3/V3",), max_queries=64))
    for metric, summary in whole.rows[1].metrics.items():
        assert_allclose(blocks.rows[1].metrics[metric].mean, summary.mean, rtol=1e-8, err_msg=metric)


def test_a_control_that_is_off_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = coders.turboquant_coder

    def broken(bits: int, plan: SidePlan) -> heads.Coder:
        coder = original(bits, plan)
        return coder if bits != 16 else replace(coder, restore=lambda x, layer, seed: x.astype(np.float16))

    monkeypatch.setattr(coders, "turboquant_coder", broken)
    with pytest.raises(BugError, match="control row K16/V16 is off") as caught:
        validate([small()], Params(("K4/V4",)))
    assert caught.value.status == 70


def small(seed: int = 0, tokens: int = 48, queries: int = 16, heads: int = 2, dim: int = 32) -> Dataset:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, n, dim)) for n in (queries, tokens, tokens))
    return from_arrays(k, v, q)


def test_centring_keys_is_free_of_a_common_offset() -> None:
    plain = from_synthetic(synthetic_set("key-bias"))
    off, on = (validate([plain], Params(("K4/V4",), center_keys=c)).rows[1] for c in (False, True))
    assert_allclose(off.metrics["sigma_a"].mean, 0.98, atol=0.05)  # docs/metrics.md: 0.98 to 0.20
    assert_allclose(on.metrics["sigma_a"].mean, 0.20, atol=0.02)
    assert on.bits_per_value == off.bits_per_value + 32 / 256 / 2  # the mean: 4 bytes a coordinate and head


def test_case_ql02_fails_and_points_to_the_offset() -> None:
    rng = np.random.default_rng(32)  # cases/handover/ql02_key_bias.py
    bias = np.zeros(128)
    bias[[3, 67]] = (420.0, -430.0)
    bias += 2 * rng.standard_normal(128)
    k, v = bias + 2.0 * rng.standard_normal((256, 128)), rng.standard_normal((256, 128))
    q = 1.6 * rng.standard_normal((64, 128))
    q[:, [3, 67]] *= 0.02
    data = from_arrays(k[None], v[None], q[None], causal=False)
    plain, centred = (validate([data], Params(("K4/V4",), center_keys=c)) for c in (False, True))
    row = plain.rows[1]
    assert 0.990 < row.metrics["k_cos"].mean < 0.996
    assert row.metrics["kl"].mean > 5
    assert row.metrics["top1_decisive"].mean < 0.5
    assert row.level == "none"
    assert "--center-keys" in plain.diagnosis[0].sentence
    assert centred.rows[1].metrics["kl"].mean < 0.1


def test_protected_layers_sinks_and_the_recent_window_are_exact_and_counted() -> None:
    data = small(tokens=48, dim=32)
    whole = validate([data], Params(("K4/V2",))).rows[1]
    sinks = validate([data], Params(("K4/V2",), sink_tokens=4)).rows[1]
    recent = validate([data], Params(("K4/V2",), residual_window=12)).rows[1]
    pair, kept = 16 + 8 + 8 + 8, 2 * 64  # codes and metadata of K4 and V2 at dim 32; float16
    assert whole.pair_bytes == pair
    assert sinks.pair_bytes == (44 * pair + 4 * kept) / 48
    assert recent.pair_bytes == (36 * pair + 12 * kept) / 48
    for better in (sinks, recent):
        with case(config=better.config):
            assert better.metrics["rel_err"].mean < whole.metrics["rel_err"].mean
            assert better.metrics["k_distortion_ratio"].mean == pytest.approx(1, abs=0.2)
    protected = validate([data], Params(("K4/V2",), protect_layers=(0,)))
    assert protected.rows[1].status == "error"
    assert protected.rows[1].bits_per_value == 16
    assert not protected.gate.passed
    assert "nothing was quantized" in protected.gate.summary


def test_the_recent_window_follows_each_query() -> None:
    data = small(tokens=40, queries=40)
    assert validate([data], Params(("K2/V2",), residual_window=40)).rows[1].status == "error"
    almost = validate([data], Params(("K2/V2",), residual_window=39)).rows[1]
    assert almost.status != "error"
    assert almost.buckets[-1].values["rel_err"] > 1e-3  # the last query reads the first key from its code
    assert all(bucket.values["rel_err"] < 1e-12 for bucket in almost.buckets[:-1])


def test_proxy_queries_make_every_verdict_unverified() -> None:
    data = small()
    without = replace(
        data, load=lambda index, head: (None, *data.load(index, head)[1:]), facts=(replace(data.facts[0], queries=0),)
    )
    report = validate([without], Params(("K4/V4",)))
    assert report.sources[0].query_source == "proxy"
    assert report.rows[1].status == "unverified"
    assert "UNVERIFIED" in report.rows[1].verdict
    assert [notice.code for notice in report.warnings if notice.code == "proxy-queries"]
    unit = head_of(without, 0, 0)
    assert (unit.q == unit.k[1:]).all()  # key i reads the keys before it, never itself
    assert (unit.positions == np.arange(47)).all()


def test_zero_vectors_are_counted_and_leave_no_nan() -> None:
    rng = np.random.default_rng(21)  # cases/handover/nm01_zero_rows.py
    x = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    x[0, 1, 10:20] = 0
    x[0, 3] = 0
    x[0, 2, 5] = -0.0
    report = validate([from_arrays(x[0], x[0], x[0])], Params(("K4/V4",)))
    assert report.sources[0].zero_keys == report.sources[0].zero_values == 75
    row = report.rows[1]
    for metric in ("k_cos", "cos", "kl", "rel_err", "k_rel_mse"):
        assert math.isfinite(row.metrics[metric].mean), metric
    assert 0.994 < row.metrics["k_cos"].mean < 0.997


def test_seeds_are_reported_from_the_least_to_the_largest() -> None:
    data = small()
    singles = [validate([data], Params(("K2/V2",), seeds=(seed,))).rows[1].metrics["cos"] for seed in (0, 1, 2)]
    joint = validate([data], Params(("K2/V2",), seeds=(0, 1, 2))).rows[1].metrics["cos"]
    assert joint.seed_low == min(s.mean for s in singles)
    assert joint.seed_high == max(s.mean for s in singles)
    assert joint.mean == pytest.approx(np.mean([s.mean for s in singles]), rel=1e-8)
    assert joint.low == min(s.low for s in singles)
    assert joint.worst == min(s.worst for s in singles)


def test_positions_are_in_doubling_buckets_that_hold_every_query() -> None:
    report = validate([small(tokens=40, queries=40, heads=1)], Params(("K3/V3",)))
    row = report.rows[1]
    assert [(b.first, b.last) for b in row.buckets] == [(0, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
    assert [b.queries for b in row.buckets] == [4, 4, 8, 16, 8]
    total = sum(b.queries * b.values["kl"] for b in row.buckets) / 40
    assert total == pytest.approx(row.metrics["kl"].mean, rel=1e-7)
    assert row.buckets[0].values["kl"] < row.metrics["kl"].mean  # few keys, little to move
    assert report.rows[0].buckets[0].values["cos"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("count", "limit", "expected"), [(5, None, 5), (5, 9, 5), (10, 3, 3), (7, 1, 1), (1000, 999, 999)]
)
def test_thinning_keeps_the_last_query_and_spaces_the_rest(count: int, limit: int | None, expected: int) -> None:
    chosen = evenly(count, limit)
    assert len(chosen) == expected
    assert chosen[-1] == count - 1
    assert len(set(chosen.tolist())) == expected
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0


def test_memory_is_bounded_by_thinning_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 1000)
    report = validate([small(queries=48)], Params(("K4/V4",)))
    assert report.sources[0].queries < 48
    assert any(notice.code == "thinned" for notice in report.warnings)


@pytest.mark.parametrize("options", [{}, {"baselines": ("q8_0", "kivi-2")}, {"residual_window": 8, "window": 5}])
def test_the_memory_limit_counts_every_value_that_is_kept_of_a_query(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def counting(head: Any, plan: Any) -> int:
        counted.append(heads.values_per_query(head, plan))
        return counted[-1]

    monkeypatch.setattr(validation, "values_per_query", counting)
    measured = validation.measure(small(queries=48), Params(("K4/V2", "K3/V3"), **options))
    assert counted == [sum(map(len, measured.seeds[0][0].queries.values()))]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda q, k, v: (q, k, v[:, :-1]), "shape-mismatch", r"k is \(2, 48, 32\), v is \(2, 47, 32\)"),
        (lambda q, k, v: (q[:, :, :16], k, v), "shape-mismatch", "q is"),
        (lambda q, k, v: (np.concatenate([q, q[:1]]), k, v), "gqa", "3 query heads cannot share 2 key heads"),
        (
            lambda q, k, v: (q, np.where(k == k[1, 2, 3], np.nan, k), v),
            "non-finite",
            r"k of layer 0, head 1: 1 NaN; first NaN at \[2, 3\]",
        ),
        (
            lambda q, k, v: (np.where(q == q[0, 2, 3], np.inf, q), k, v),
            "non-finite",
            r"q of layer 0, head 0: 1 Inf; first Inf at \[0, 2, 3\]",
        ),
        (lambda q, k, v: (q, k * 1e37, v), "norm-range", r"layer 0, head 0: vector \[0\] has norm"),
        (lambda q, k, v: (q, k[:, :, :31], v[:, :, :31]), "shape-mismatch", "q is"),
        (lambda q, k, v: (q[:, :, :23], k[:, :, :23], v[:, :, :23]), "dim", "23"),
    ],
)
def test_unusable_data_are_refused(change: Callable, code: str, message: str) -> None:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    q, k, v = change(*(rng.standard_normal((2, n, 32)) for n in (16, 48, 48)))
    with pytest.raises(InputError, match=message) as caught:
        validate([from_arrays(k, v, q)], Params(("K4/V4",)))
    assert caught.value.code == code


def test_more_queries_than_keys_are_not_causal_unless_asked() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 30, 32)), rng.standard_normal((1, 20, 32))
    assert not validate([from_arrays(k, k, q)], Params(("K4/V4",))).sources[0].causal
    with pytest.raises(InputError, match="the first would see no key"):
        validate([from_arrays(k, k, q, causal=True)], Params(("K4/V4",)))


def test_the_window_of_the_model_hides_old_keys() -> None:
    data = small(tokens=40, queries=40)
    report = validate([data], Params(("K4/V4",), window=4))
    assert report.sources[0].n_eff_high <= 4


def test_the_attention_scale_is_the_factor_of_every_score() -> None:
    data = small()
    scaled = validate([data], Params(("K3/V3",), attention_scale="0.3"))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 32)) for n in (16, 48, 48))
    longer = validate([from_arrays(k, v, q * 0.3 * math.sqrt(32))], Params(("K3/V3",)))
    assert scaled.sources[0].scale == 0.3
    assert_allclose(scaled.rows[1].metrics["kl"].mean, longer.rows[1].metrics["kl"].mean, rtol=1e-5)


def test_an_untouched_side_is_exact_and_has_no_distortion_to_judge() -> None:
    row = validate([small(tokens=80, queries=40)], Params(("K16/V3",))).rows[1]
    assert row.status == "pass"
    assert row.metrics["kl"].max == 0
    assert row.metrics["rel_err"].mean == row.metrics["v_readout_err"].mean
    assert math.isnan(row.metrics["k_distortion_ratio"].mean)
    assert "untouched" in row.metrics["k_distortion_ratio"].reason
    assert row.metrics["distortion_ratio"].mean == row.metrics["v_distortion_ratio"].mean


def test_a_baseline_that_overflows_or_does_not_fit_is_left_out_with_a_warning() -> None:
    rng = np.random.default_rng(0)
    k = 1e9 * rng.standard_normal((1, 40, 80))
    report = validate([from_arrays(k, k, k * 1e-18)], Params(("K4/V4",), baselines=("q8_0", "fp16")))
    assert [row.config for row in report.rows] == ["K16/V16", "K4/V4"]
    assert [n.code for n in report.warnings if n.code in ("overflow", "baseline")] == ["baseline", "overflow"]
    assert any("65504" not in n.text and "beyond float16" in n.text for n in report.warnings)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_data_and_no_option_leave_an_infinite_or_unexplained_number(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    heads, group, dim = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([16, 20, 64])))
    tokens = data.draw(st.integers(2, 24))
    queries = data.draw(st.integers(0, tokens))
    k, v = rng.standard_normal((2, heads, tokens, dim))
    q = rng.standard_normal((heads * group, queries, dim)) if queries else None
    for x in (k, v) if q is None else (k, v, q):
        match data.draw(st.sampled_from(["as it is", "zero", "constant", "tiny", "huge"])):
            case "zero":
                x[:] = 0
            case "constant":
                x[:] = x[:, :1]
            case "tiny":
                x *= 1e-30
            case "huge":
                x *= 1e15
    params = Params(
        data.draw(st.sampled_from([("K4/V2",), ("K16/V3", "K1/V16"), ("K8/V8",)])),
        baselines=data.draw(st.sampled_from([(), ("fp16", "kivi-2", "turbo3")])),
        seeds=data.draw(st.sampled_from([(0,), (0, 5)])),
        center_keys=data.draw(st.booleans()),
        center_values=data.draw(st.booleans()),
        residual_window=data.draw(st.sampled_from([0, 2, 100])),
        sink_tokens=data.draw(st.sampled_from([0, 1, 50])),
        window=data.draw(st.sampled_from([None, 3])),
        max_queries=data.draw(st.sampled_from([None, 2])),
        recommend_widths=data.draw(st.sampled_from([(), (2, 4)])),
    )
    report = validate([from_arrays(k, v, q)], params)
    report_to_json(report)  # refuses what is infinite
    for row in report.rows:
        with case(config=row.config):
            assert [m for m, s in row.metrics.items() if math.isnan(s.mean) != bool(s.reason)] == []


@pytest.mark.parametrize("layout", ["htd", "thd", "bhtd", "bthd"])
def test_heads_are_read_one_at_a_time_from_any_layout(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(3)
    sequences = 2 if "b" in layout else 1
    q, k, v = (rng.standard_normal((sequences, h, n, 16)).astype(np.float16) for h, n in ((6, 7), (3, 20), (3, 20)))
    order = ["bhtd".index(axis) for axis in layout if axis != "b"]
    for name, x in (("q", q), ("k", k), ("v", v)):
        stored = x.transpose(0, *order) if "b" in layout else x[0].transpose(*(axis - 1 for axis in order))
        np.save(tmp_path / f"layer03_{name}.npy", np.ascontiguousarray(stored))
    data = from_dump(load_dump(tmp_path, layout=layout))
    facts = data.facts[0]
    assert (facts.kv_heads, facts.group, facts.queries, facts.tokens) == (3 * sequences, 2, 7, 20)
    for number in range(3 * sequences):
        with case(number=number):
            b, h = divmod(number, 3)
            mine_q, mine_k, mine_v = data.load(0, number)
            assert mine_q is not None
            assert (mine_q == q[b, 2 * h : 2 * h + 2]).all()
            assert (mine_k == k[b, h]).all()
            assert (mine_v == v[b, h]).all()


def test_queries_of_some_layers_only_are_refused(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 20, 16)).astype(np.float16)
    for name in ("layer00_k", "layer00_v", "layer00_q", "layer01_k", "layer01_v"):
        np.save(tmp_path / f"{name}.npy", x)
    with pytest.raises(InputError, match="layers 1 have no queries"):
        from_dump(load_dump(tmp_path, layout="htd"))
