"""Attention is a fact of a layer: each is measured as the model has it, or refused with what is missing."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive_metrics as naive
import numpy as np
import pytest
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose

from tqtool.codec.codec import decode, encode
from tqtool.codec.spec import CodecSpec
from tqtool.dumps.dump import load_dump
from tqtool.errors import InputError
from tqtool.report.layer_facts import LayerFacts
from tqtool.report.model import LayerValues, Report
from tqtool.report.params import Params
from tqtool.validation.dataset import Dataset, from_arrays
from tqtool.validation.dump_data import from_dump
from tqtool.validation.run import validate

Array = np.ndarray[Any, np.dtype[np.float32]]
PLAIN: dict[str, Any] = {}
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "not causal": {"causal": False},
    "scale": {"scale": 0.4},
    "window": {"window": 5},
    "chunk": {"chunk": 8},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": (1.5, -1.0, 0.0, 3.0)},
    "ALiBi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "all": {
        "scale": 0.5,
        "window": 20,
        "chunk": 12,
        "softcap": 3.0,
        "sinks": (2.0, 0.5, -0.5, 1.0),
        "alibi_slopes": (0.2, 0.1, 0.05, 0.02),
    },
}


def arrays(
    seed: int = 0, tokens: int = 30, queries: int = 9, dims: tuple[int, int] = (32, 16)
) -> tuple[Array, Array, Array]:
    """Two KV heads, four query heads."""
    rng = np.random.default_rng(seed)
    shapes = ((2, tokens, dims[0]), (2, tokens, dims[1]), (4, queries, dims[0]))
    k, v, q = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return k, v, np.float32(1.5) * q


def referee(k: Array, v: Array, q: Array, bits: tuple[int, int], facts: dict[str, Any]) -> dict[str, float]:
    """Every metric of a layer by plain loops; keys and values are all that the model had, from position 0 on."""
    found: dict[str, list[list[float]]] = {}
    heads, count = q.shape[:2]
    for h in range(heads):
        kv = h // (heads // len(k))
        kh, vh = (decode(encode(x[kv], CodecSpec(x.shape[2], b))) for x, b in zip((k, v), bits, strict=True))
        for i in range(count):
            position = k.shape[1] - count + i
            rules = {name: facts[name] for name in ("causal", "window", "chunk", "softcap") if name in facts}
            rules["scale"] = facts.get("scale", 1 / math.sqrt(k.shape[2]))
            rules["slope"] = facts["alibi_slopes"][h] if "alibi_slopes" in facts else 0.0
            s, t = (
                naive.scores_of_query(
                    q[h, i].astype(float).tolist(), dict(enumerate(x.astype(float).tolist())), position, **rules
                )
                for x in (k[kv], kh)
            )
            places, sink = list(s), [facts["sinks"][h]] if "sinks" in facts else []
            p, o = (naive.softmax([x[j] for j in places] + sink) for x in (s, t))  # the sink is one more key …
            exact, restored = (
                [x[j].astype(float).tolist() for j in places] + [[0.0] * v.shape[2]] * len(sink)  # … of value zero
                for x in (v[kv], vh)
            )
            out = naive.mix(p, exact)
            figures = {
                "n_eff": naive.n_eff(p),
                "kl": naive.kl(p, o),
                "tv": naive.tv(p, o),
                "sigma_a": naive.sigma_a(p, [s[j] for j in places] + sink, [t[j] for j in places] + sink),
                "v_readout_err": naive.rel_err(out, naive.mix(p, restored)),
                "cos": naive.cosine(out, naive.mix(o, restored)),
                "rel_err_konly": naive.rel_err(out, naive.mix(o, exact)),
            }
            rest = [n for n, j in enumerate(places) if j != 0]  # without the first token and the learned sink
            if rest:
                a, b = ([x[n] / math.fsum(x[m] for m in rest) for n in rest] for x in (p, o))
                figures["kl_nosink"] = naive.kl(a, b)
            if len(places) >= 16:
                figures["mass_8"] = naive.mass_8(p[: len(places)], o[: len(places)])
            for name, value in figures.items():
                found.setdefault(name, [[] for _ in k])[kv].append(value)
    return {name: float(np.mean([math.fsum(row) / len(row) for row in rows if row])) for name, rows in found.items()}


def layer_values(report: Report, layer: int, config: str = "K3/V2") -> LayerValues:
    return next(each for each in report.layers if (each.layer, each.config) == (layer, config))


@pytest.mark.parametrize("name", ATTENTION)
def test_every_attention_agrees_with_plain_loops(name: str) -> None:
    k, v, q = arrays()
    report = validate([from_arrays(k, v, q, facts=ATTENTION[name])], Params(("K3/V2",)))
    for metric, value in referee(k, v, q, (3, 2), ATTENTION[name]).items():
        found = layer_values(report, 0).values[metric]
        assert_allclose(found, value, rtol=1e-6, atol=1e-9, err_msg=metric)


def dataset_of(layers: list[tuple[tuple[Array, Array, Array], dict[str, Any]]]) -> Dataset:
    parts = [from_arrays(*kvq, facts={"layer": i} | facts) for i, (kvq, facts) in enumerate(layers)]
    return replace(
        parts[0], facts=tuple(p.facts[0] for p in parts), load=lambda index, head: parts[index].load(0, head)
    )


KINDS = ("plain", "window", "chunk", "soft cap", "sinks", "ALiBi", "scale", "not causal")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4), st.data())
def test_a_layer_is_measured_as_it_is_alone(kinds: list[str], data: st.DataObject) -> None:
    layers = []
    for i, kind in enumerate(kinds):
        dims = data.draw(st.sampled_from([(32, 32), (64, 16), (16, 48)]))
        tokens, queries = data.draw(st.sampled_from([(12, 5), (20, 20), (33, 1)]))
        layers.append((arrays(i, tokens, queries, dims), ATTENTION[kind]))
    params = Params(("K3/V2",), residual_window=data.draw(st.sampled_from([0, 3])), bootstrap_draws=10)
    together = validate([dataset_of(layers)], params)
    for i, (kvq, facts) in enumerate(layers):
        with case(i=i):
            alone = validate([from_arrays(*kvq, facts=facts)], params)
            one, other = layer_values(together, i).values, layer_values(alone, 0).values
            assert_allclose([one[metric] for metric in other], list(other.values()), rtol=0)


@pytest.mark.parametrize("name", ["window", "chunk"])
def test_keys_that_a_window_has_dropped_are_not_missed(name: str) -> None:
    """A cache that holds only the newest keys gives the figures of the queries whose keys are all there."""
    k, v, q = arrays(tokens=40, queries=20)
    facts, first = ATTENTION[name], 24  # window 5: queries from 28 on; chunks of 8: from 24 on
    usable = 12 if name == "window" else 16
    kept = from_arrays(k[:, first:], v[:, first:], q, causal=True, facts=facts | {"first_token": first})
    report = validate([kept], Params(("K3/V2",)))
    notices = {notice.code: notice.text for notice in report.warnings}
    assert notices["queries-left-out"].startswith(f"{20 - usable} queries of a query head in 1 layers (first: 0)")
    assert report.sources[0].queries == usable
    expected = referee(k, v, q[:, -usable:], (3, 2), facts)
    for metric in ("n_eff", "kl", "cos", "v_readout_err"):
        assert_allclose(layer_values(report, 0).values[metric], expected[metric], rtol=1e-6, err_msg=metric)
    assert report.rows[1].buckets[0].first == 16  # positions are the model's: 24 to 39 lie in 16–31 and 32–63


def test_prediction_of_score_noise_follows_the_cap_and_the_scale_of_the_layer() -> None:
    rng = np.random.default_rng(5)
    k, v, q = (
        rng.standard_normal((1, 512, 64)),
        rng.standard_normal((1, 512, 64)),
        6 * rng.standard_normal((1, 256, 64)),
    )
    for facts in ({"softcap": 3.0}, {"scale": 0.05}, {"softcap": 2.0, "scale": 0.3}):
        row = validate([from_arrays(k, v, q, facts=facts)], Params(("K4/V4",))).rows[1]
        assert_allclose(row.metrics["sigma_pred"].mean, row.metrics["sigma_rms"].mean, rtol=0.08, err_msg=str(facts))


def test_sizes_count_each_layer_and_side_at_its_own_dim() -> None:
    layers = [(arrays(0, dims=(192, 128)), PLAIN), (arrays(1, dims=(64, 64)), PLAIN)]
    row = validate([dataset_of(layers)], Params(("K4/V2",))).rows[1]
    first, second = (96 + 8) + (32 + 8), (32 + 8) + (16 + 8)  # bytes of a key and a value, range metadata
    assert row.pair_bytes == (first + second) / 2
    assert row.bits_per_value == 8 * (first + second) / (192 + 128 + 64 + 64)
    assert row.key_bits_per_value == 8 * (104 + 40) / (192 + 64)
    assert row.ratio_fp16 == 2 * (192 + 128 + 64 + 64) / (first + second)
    tables = {4: 31 * 4, 2: 7 * 4}  # levels and boundaries, float32
    assert row.shared_bytes == (24 + tables[4]) + (16 + tables[2]) + (8 + tables[4] + tables[2])  # signs and tables


# The cases of public reports -----------------------------------------------------------------------------------------


def report_case(shared: Path, name: str) -> Any:
    path = next((shared / "cases" / "reports").glob(f"{name}_*.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def n_eff_by_layer(run: Run, *arguments: object) -> list[float]:
    done = run("validate", *arguments, "-c", "K4/V4", "--json")
    assert done.returncode == 0, done.stderr
    return [each["values"]["n_eff"] for each in json.loads(done.stdout)["layers"] if each["config"] == "K4/V4"]


@pytest.mark.parametrize("order", ["more", "fewer"])
def test_rp01_every_layer_has_its_own_group(shared: Path, tqtool: Run, tmp_path: Path, order: str) -> None:
    case = report_case(shared, "rp01")
    case.make(tmp_path)
    right = [case.n_eff(*kvq) for kvq in case.layers(case.ORDERS[order]).values()]
    assert_allclose(n_eff_by_layer(tqtool, order), right, rtol=1e-6)


def test_rp03_a_short_layer_turns_no_mask_off(shared: Path, tqtool: Run, tmp_path: Path) -> None:
    case = report_case(shared, "rp03")
    case.make(tmp_path / "d")
    refused = tqtool("validate", "d", "-c", "K4/V4")
    assert refused.returncode == 3
    assert "error[keys-missing]: d: layer 0 holds 128 keys, another layer 512" in refused.stderr
    facts = {"schema": "tqtool.dump/1", "layers": [{"layer": 0, "window": 128, "first_token": 384}, {"layer": 1}]}
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(facts))
    short, full = n_eff_by_layer(tqtool, "d")
    assert_allclose(full, case.n_eff(*case.layers()[1], True), rtol=1e-6)
    k, v, q = case.layers()[0]
    assert_allclose(short, case.n_eff(k, v, q[:, -1:], True), rtol=1e-6)  # the one query whose 128 keys are stored


def test_rp11_unused_slots_are_refused_until_it_is_said_what_counts(shared: Path, tqtool: Run, tmp_path: Path) -> None:
    case = report_case(shared, "rp11")
    case.make(tmp_path)
    refused = tqtool("validate", "slots", "-c", "K4/V4")
    assert refused.returncode == 3
    assert "error[empty-slots]: slots: layer 0: the last 724 of 1024 positions are zero in every head" in refused.stderr
    assert "hint: --tokens 0:300 measures the others" in refused.stderr
    k, _, q = case.arrays()
    assert_allclose(n_eff_by_layer(tqtool, "cut"), [case.n_eff(k, q)], rtol=1e-6)
    (tmp_path / "slots" / "manifest.json").write_text('{"valid_tokens": [0, 300]}')
    assert_allclose(n_eff_by_layer(tqtool, "slots"), [case.n_eff(k, q)], rtol=1e-6)


@pytest.mark.parametrize("key", ["softcap", "attn_logit_softcapping"])
def test_rp25_the_soft_cap_of_a_manifest_is_measured(shared: Path, tqtool: Run, tmp_path: Path, key: str) -> None:
    case = report_case(shared, "rp25")
    case.make(tmp_path / "d")
    k, _, q = case.arrays()
    (tmp_path / "d" / "manifest.json").write_text(json.dumps({key: case.CAP}))
    assert_allclose(n_eff_by_layer(tqtool, "d"), [case.n_eff(k, q, case.CAP)], rtol=1e-6)


def test_rp27_values_may_be_shorter_than_keys(shared: Path, tqtool: Run, tmp_path: Path) -> None:
    report_case(shared, "rp27").make(tmp_path / "d")
    done = tqtool("validate", "d", "-c", "K4/V4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][1]["pair_bytes"] == 176


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a", "error[shape-mismatch]: a: layer 0: the name says queries of the last 256 positions, the array has 64"),
        ("b", "says queries of the last 32 positions, the arrays have 128"),
        ("c", "says 32 query heads, the arrays have 8"),
    ],
)
def test_rp28_what_is_claimed_is_held_against_the_arrays(
    shared: Path, tqtool: Run, tmp_path: Path, name: str, words: str
) -> None:
    report_case(shared, "rp28").make(tmp_path)
    done = tqtool("validate", name, "-c", "K4/V4")
    assert done.returncode == 3
    assert words in done.stderr


# The manifest --------------------------------------------------------------------------------------------------------


def dump_with(folder: Path, manifest: dict[str, Any] | None, layers: dict[int, tuple[Array, Array, Array]]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, kvq in layers.items():
        for kind, x in zip("kvq", kvq, strict=True):
            np.save(folder / f"layer{number:02d}_{kind}.npy", x)
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def described(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema": "tqtool.dump/1", "layers": [{"layer": i} | facts for i, facts in enumerate(layers)], **more}


def test_a_manifest_tells_the_attention_of_each_layer(tmp_path: Path) -> None:
    sinks, slopes = [1.0, 2.0, 3.0, 4.0], [0.5, 0.25, 0.125, 0.0625]
    manifest = described(
        {"kind": "sliding", "heads": 4, "kv_heads": 2, "key_dim": 32, "value_dim": 16, "scaling": 0.5, "window": 7},
        {"kind": "chunked", "chunk": 8, "softcap": 30.0, "sinks": sinks, "score_bias": None, "causal": True},
        {"kind": "full", "alibi_slopes": slopes, "files": {"k": "layer02_k.npy"}},
        {"kind": "cross", "window": None},
        {"kind": "linear"},
        model={"name": "M", "revision": "r1", "architecture": "A", "layers": 30, "context": 4096},
        tokens=30,
        text_sha256="abc",
        versions={"tqtool": "1"},
        query_tail=9,
    )
    folder = dump_with(tmp_path / "d", manifest, {i: arrays(i) for i in range(4)})
    data = from_dump(load_dump(folder))
    common: dict[str, Any] = {"kv_heads": 2, "query_heads": 4, "tokens": 30, "queries": 9, "causal": True}
    common |= {"key_dim": 32, "value_dim": 16}
    plain = 1 / math.sqrt(32)
    assert data.facts == (
        LayerFacts(layer=0, scale=0.5, window=7, **common),
        LayerFacts(layer=1, scale=plain, chunk=8, softcap=30.0, sinks=tuple(sinks), **common),
        LayerFacts(layer=2, scale=plain, alibi_slopes=tuple(slopes), **common),
        LayerFacts(layer=3, scale=plain, **(common | {"causal": False})),
    )
    assert (data.model, data.model_layers, data.model_context) == ("M", 30, 4096)
    assert "linear layers keep no keys and values of their own: 4" in data.notes
    assert "model M (architecture A, revision r1, text abc)" in data.notes
    source = validate([data], Params(("K4/V4",))).sources[0]
    assert source.layer_facts == data.facts
    assert (source.model, source.model_layers) == ("M", 30)


BAD_MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "newer": (
        {"schema": "tqtool.dump/2", "layers": []},
        "schema is 'tqtool.dump/2', this tqtool reads 'tqtool.dump/1'",
    ),
    "unknown key of a layer": (described({"rotary_scale": 2}), r"layers\[0\].rotary_scale is not understood"),
    "unknown key that bears on attention": ({"attention_sinks": [0.1]}, "attention_sinks may change attention"),
    "scale of another name": ({"query_pre_attn_scalar": 144}, "query_pre_attn_scalar may change attention"),
    "layers by number": ({"schema": "tqtool.dump/1", "layers": [0, 1]}, "layers is not a list of objects"),
    "a layer twice": ({"schema": "tqtool.dump/1", "layers": [{"layer": 0}, {"layer": 0}]}, r"layers\[1\].layer is 0"),
    "no kind": (described({"kind": "odd"}), r"layers\[0\].kind is 'odd', not one of full, sliding"),
    "no count": (described({"window": 0}), r"layers\[0\].window is 0, not a count"),
    "no number": (described({"softcap": -1}), r"layers\[0\].softcap is -1, not above 0"),
    "no list": (described({"sinks": 1.0}), r"layers\[0\].sinks is not a list of finite numbers"),
    "no flag": (described({"causal": "yes"}), r"layers\[0\].causal is 'yes', not true or false"),
    "no range": ({"valid_tokens": [5, 5]}, r"valid_tokens is \[5, 5\], not \[start, stop\]"),
    "two names": ({"q_tail": 9, "query_tail": 8}, "query_tail and q_tail contradict each other: 8, 9"),
    "latent": (described({"kind": "latent"}), r"layer 0: attention is latent \(MLA\)"),
    "another bias": (described({"score_bias": "relative"}), "scores of layer 0 carry a bias, 'relative', which is not"),
    "a layer not described": ({"schema": "tqtool.dump/1", "layers": [{"layer": 5}]}, "layer 0 is not described by"),
    "no cache": (described({"kind": "shared"}), "calls it shared, which keeps no keys and values"),
    "heads": (described({"heads": 8}), "says 8 query heads, the arrays have 4"),
    "kv_heads": ({"kv_heads": 2, "key_dim": 64}, "says 64 coordinates of a key, the arrays have 32"),
    "value_dim": (described({"value_dim": 32}), "says 32 coordinates of a value, the arrays have 16"),
    "sinks of other heads": (described({"sinks": [1.0]}), "gives 1 sinks for 4 query heads"),
    "all queries": (described({}, query_tail=None), "says that queries are of all positions"),
    "tail": (described({}, query_tail=16), "says queries of the last 16 positions, the arrays have 9"),
    "lost keys": (described({}, tokens=99), "layer 0 holds 30 keys, another layer 99"),
    "evicted": (
        described({"first_token": 4}),
        "the keys of positions 4 to 33 are stored, and its queries see all from 0",
    ),
    "window not held": (
        described({"first_token": 4, "window": 31}),
        "the keys of positions 4 to 33 are stored, and with a window of 31 every query sees some that are not",
    ),
    "window without mask": (described({"causal": False, "window": 8}), "layer 0: a window needs a causal mask"),
    "more queries than positions": (
        described({}, valid_tokens=[0, 5]),
        "layer 0: 9 queries but 5 positions that hold tokens",
    ),
    "beyond": ({"valid_tokens": [0, 50]}, "layer 0 holds positions 0 to 29, tokens 0:50 are not among them"),
}


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_what_a_manifest_says_is_understood_or_refused(tmp_path: Path, name: str) -> None:
    manifest, words = BAD_MANIFESTS[name]
    folder = dump_with(tmp_path / "d", manifest, {0: arrays()})
    with pytest.raises(InputError, match=words):
        validate([from_dump(load_dump(folder, layout="htd"))], Params(("K4/V4",)))


@pytest.mark.parametrize("key", ["rope_theta", "window_ppl", "max_abs_rounding_f16", "passage", "head_dim"])
def test_other_keys_of_a_manifest_are_ignored(tmp_path: Path, key: str) -> None:
    folder = dump_with(tmp_path / "d", {key: 1.5, "sliding_window": None, "attention_bias": False}, {0: arrays()})
    assert from_dump(load_dump(folder)).facts[0].window is None


def test_sequences_of_a_batch_have_the_sinks_of_their_heads(tmp_path: Path) -> None:
    k, v, q = (np.stack([x, y]) for x, y in zip(arrays(0), arrays(1), strict=True))
    sinks = (1.5, -1.0, 0.0, 3.0)
    folder = dump_with(tmp_path / "d", described({"heads": 4, "kv_heads": 2, "sinks": list(sinks)}), {0: (k, v, q)})
    report = validate([from_dump(load_dump(folder, layout="bhtd"))], Params(("K3/V2",)))
    both = [referee(k[b], v[b], q[b], (3, 2), {"sinks": sinks}) for b in range(2)]
    for metric in ("n_eff", "kl", "cos"):
        with case(metric=metric):
            assert_allclose(layer_values(report, 0).values[metric], np.mean([x[metric] for x in both]), rtol=1e-6)


def test_keys_standing_in_for_queries_have_no_sinks(tmp_path: Path) -> None:
    k, v, _ = arrays()
    folder = dump_with(tmp_path / "d", described({"sinks": [1.0] * 4}), {0: (k, v, k)})
    (folder / "layer00_q.npy").unlink()
    data = from_dump(load_dump(folder, layout="htd"))
    assert "learned sinks and ALiBi belong to query heads: without queries they are left out" in data.notes
    plain = validate([from_arrays(k, v)], Params(("K3/V2",)))
    found = layer_values(validate([data], Params(("K3/V2",))), 0).values
    assert_allclose(list(found.values()), list(layer_values(plain, 0).values.values()), rtol=0)
