"""Captured dumps against the models themselves: the same logits, and the attention weights that they return."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from safetensors.torch import load_file  # noqa: E402
from tiny import ARCHITECTURES, LIMIT, REFUSED, TEXT, Architecture, loaded_tiny  # noqa: E402

from tqtool.dumps.dump import load_dump  # noqa: E402
from tqtool.dumps.names import meaning  # noqa: E402
from tqtool.errors import BugError, InputError, OutputError, TqError, UsageError  # noqa: E402
from tqtool.hf import capture_record, taps  # noqa: E402
from tqtool.hf.capture import capture_jobs, run_job  # noqa: E402
from tqtool.hf.capture_record import CaptureParams, check_unchanged  # noqa: E402
from tqtool.hf.capture_texts import Text  # noqa: E402
from tqtool.hf.models import LoadedModel  # noqa: E402
from tqtool.hf.steps import new_cache, step  # noqa: E402
from tqtool.hf.taps import AttentionCall  # noqa: E402
from tqtool.report.params import Params  # noqa: E402
from tqtool.validation.dump_data import from_dump  # noqa: E402
from tqtool.validation.run import validate  # noqa: E402

TOKENS, QUERIES, CHUNK = 160, 64, 60  # windows and chunks of 48 end within the text, and within a chunk
KINDS = {"f": "full", "s": "sliding", "c": "chunked", "m": "latent", "h": "shared", "l": "linear"}
Array = NDArray[Any]
every_architecture = pytest.mark.parametrize("one", ARCHITECTURES, ids=lambda one: one.name)


def dump_of(loaded: LoadedModel, folder: Path, *, tokens: int = TOKENS, **params: Any) -> dict[str, Any]:
    chosen = CaptureParams(**{"queries": QUERIES, "chunk": CHUNK} | params)
    (job,) = capture_jobs(loaded, [Text("text", "text.txt", TEXT)], folder, chosen, max_tokens=tokens)
    return run_job(loaded, job)


def arrays_of(folder: Path, layer: dict[str, Any]) -> dict[str, Array]:
    """The files of a layer; of a latent one also the keys and values that its heads read."""
    arrays = {part: np.load(folder / name) for part, name in layer["files"].items()}
    if "latent" in arrays:
        expanded = np.einsum("hor,tr->hto", arrays["kv_b"], arrays["latent"][0])  # heads, tokens, nope + value
        nope = expanded.shape[2] - layer["value_dim"]
        rope = np.broadcast_to(arrays["rope_key"], (layer["heads"], *arrays["rope_key"].shape[1:]))
        arrays["k"], arrays["v"] = np.concatenate([expanded[:, :, :nope], rope], axis=2), expanded[:, :, nope:]
    return arrays


def weights_of(layer: dict[str, Any], arrays: dict[str, Array]) -> Array:
    """Attention weights (heads, queries, tokens) by the manifest, in float64, one query after the other."""
    q, k = arrays["q"].astype(np.float64), arrays["k"].astype(np.float64)
    heads, queries, _ = q.shape
    tokens = k.shape[1]
    weights = np.zeros((heads, queries, tokens))
    for head in range(heads):
        keys = k[head // (heads // len(k))]
        for i in range(queries):
            position = tokens - queries + i
            first = 0
            if layer["window"] is not None:
                first = max(0, position - layer["window"] + 1)
            if layer["chunk"] is not None:
                first = position // layer["chunk"] * layer["chunk"]
            scores = keys[first : position + 1] @ q[head, i] * layer["scaling"]
            if layer["softcap"] is not None:
                scores = layer["softcap"] * np.tanh(scores / layer["softcap"])
            sink = [] if layer["sinks"] is None else [layer["sinks"][head]]
            shares = np.exp(scores - scores.max())
            total = shares.sum() + sum(np.exp(each - scores.max()) for each in sink)
            weights[head, i, first : position + 1] = shares / total
    return weights


def attentions_of(loaded: LoadedModel, ids: list[int]) -> list[Array]:
    """What the model itself returns, of the layers that have attention: (heads, queries, tokens)."""
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    return [each[0, :, -QUERIES:].double().numpy() for each in found if each is not None]


def logits_of(loaded: LoadedModel, chunk: int) -> torch.Tensor:
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:TOKENS]])
    cache = new_cache(loaded)
    with torch.inference_mode():
        return torch.cat([step(loaded, ids[:, i : i + chunk], cache) for i in range(0, TOKENS, chunk)], 1)


@every_architecture
def test_listening_changes_no_bit_of_the_logits(one: Architecture) -> None:
    loaded = loaded_tiny(one.config, **one.settings)
    for chunk in (TOKENS, CHUNK):
        with case(chunk=chunk):
            plain = logits_of(loaded, chunk)
            with taps.listening(loaded, lambda call: None):
                assert torch.equal(logits_of(loaded, chunk), plain)


@every_architecture
def test_a_dump_gives_the_attention_weights_that_the_model_returns(one: Architecture, tmp_path: Path) -> None:
    loaded = loaded_tiny(one.config, **one.settings)
    manifest = dump_of(loaded, tmp_path / "dump")
    layers = manifest["layers"]
    assert "".join(layer["kind"] for layer in layers) == "".join(KINDS[letter] for letter in one.kinds)
    returned = attentions_of(loaded, loaded.tokenizer(TEXT)["input_ids"][:TOKENS])
    attending = [layer for layer in layers if layer["kind"] != "linear"]
    assert len(returned) == len(attending)
    for layer, expected in zip(attending, returned, strict=True):
        with case(layer=layer, expected=expected):
            assert layer["score_bias"] is None
            if layer["kind"] != "shared":
                assert_allclose(weights_of(layer, arrays_of(tmp_path / "dump", layer)), expected, atol=2e-5)


def n_eff_of(weights: Array) -> float:
    """Mean over queries and heads of exp(entropy); what the weights lack to 1 is the learned sink's."""
    rest = 1 - weights.sum(-1, keepdims=True)
    shares = np.concatenate([weights, np.where(rest > 1e-4, rest, 0)], axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares > 0, shares * np.log(shares), 0)
    return float(np.exp(-terms.sum(-1)).mean())


@pytest.mark.parametrize(
    ("name", "fact", "other"),
    [
        ("Mistral", "window", LIMIT + 1),
        ("Llama4", "chunk", LIMIT + 1),
        ("Gemma2", "softcap", None),
        ("GptOss", "sinks", None),
        ("Granite", "scaling", 0.25),
    ],
)
def test_a_wrong_fact_would_show(name: str, fact: str, other: Any, tmp_path: Path) -> None:
    """What the tests above compare depends on the fact: they could fail."""
    one = next(each for each in ARCHITECTURES if each.name == name)
    layer = dump_of(loaded_tiny(one.config, **one.settings), tmp_path / "dump")["layers"][0]
    arrays = arrays_of(tmp_path / "dump", layer)
    assert layer[fact] != other
    right, wrong = weights_of(layer, arrays), weights_of(layer | {fact: other}, arrays)
    assert np.abs(right - wrong).max() > 1e-3  # 50 times what they allow


@every_architecture
def test_validate_measures_the_attention_that_the_model_returns(one: Architecture, tmp_path: Path) -> None:
    loaded = loaded_tiny(one.config, **one.settings)
    layers = dump_of(loaded, tmp_path / "dump")["layers"]
    report = validate([from_dump(load_dump(tmp_path / "dump"))], Params(configs=("K4/V4",)))
    measured = {each.layer: each.values["n_eff"] for each in report.layers if each.config == "K4/V4"}
    returned = attentions_of(loaded, loaded.tokenizer(TEXT)["input_ids"][:TOKENS])
    attending = [layer for layer in layers if layer["kind"] != "linear"]
    expected = {
        layer["layer"]: n_eff_of(weights) for layer, weights in zip(attending, returned, strict=True) if layer["files"]
    }
    assert measured == pytest.approx(expected, rel=1e-4)


@every_architecture
def test_chunks_give_the_dump_of_the_whole(one: Architecture, tmp_path: Path) -> None:
    loaded = loaded_tiny(one.config, **one.settings)
    whole = dump_of(loaded, tmp_path / "whole", chunk=TOKENS)
    for chunk in (CHUNK, 1) if one.name in ("Llama", "Gemma2", "DeepseekV3") else (CHUNK,):
        with case(chunk=chunk):
            parts = dump_of(loaded, tmp_path / f"parts{chunk}", chunk=chunk)
            assert parts == whole
            for layer in whole["layers"]:
                expected = arrays_of(tmp_path / "whole", layer)
                for part, x in arrays_of(tmp_path / f"parts{chunk}", layer).items():
                    with case(layer=layer, part=part, x=x):
                        assert_allclose(x, expected[part], atol=5e-4)


@pytest.mark.parametrize(
    ("name", "expected"), [("Llama", True), ("GptOss", True), ("FalconH1", True), ("Bamba", False)]
)
def test_a_model_that_loses_its_state_between_chunks_is_found(name: str, expected: bool, tmp_path: Path) -> None:
    one = next(each for each in ARCHITECTURES if each.name == name)
    loaded = loaded_tiny(one.config, **one.settings)
    params = CaptureParams(chunk=CHUNK)
    (job,) = capture_jobs(loaded, [Text("t", "t.txt", TEXT)], tmp_path / "dump", params, max_tokens=TOKENS)
    assert job.chunk == (CHUNK if expected else TOKENS)
    whole, parts = logits_of(loaded, TOKENS), logits_of(loaded, CHUNK)
    assert torch.allclose(whole, parts, atol=1e-5) == expected


def test_the_table_has_what_the_issue_asks_for() -> None:
    assert len(ARCHITECTURES) >= 25
    assert {letter for one in ARCHITECTURES for letter in one.kinds} == set(KINDS)


@pytest.mark.parametrize("config", REFUSED)
def test_a_model_that_cannot_be_listened_to_is_refused(config: str, tmp_path: Path) -> None:
    loaded = loaded_tiny(config)
    with pytest.raises(InputError) as caught:
        dump_of(loaded, tmp_path / "dump")
    assert (caught.value.code, str(caught.value)) == ("model", f"tiny {config}: {REFUSED[config]}")
    assert list(tmp_path.iterdir()) == []


def test_a_mask_of_another_kind_is_told_and_not_taken_for_causal(tmp_path: Path) -> None:
    layers = dump_of(loaded_tiny("DogeConfig"), tmp_path / "dump")["layers"]
    assert {layer["score_bias"] for layer in layers} == {"mask"}


def test_attention_that_the_facts_do_not_explain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that doubles the scores of one layer where nobody sees it."""
    loaded = loaded_tiny("LlamaConfig")
    own = taps._own_attention

    def doubling(module: Any, plain: str) -> Any:
        run = own(module, plain)
        if module.layer_idx != 1:
            return run
        return lambda module, query, *rest, **options: run(module, 40 * query, *rest, **options)

    monkeypatch.setattr(taps, "_own_attention", doubling)
    layers = dump_of(loaded, tmp_path / "dump")["layers"]
    assert [layer["score_bias"] for layer in layers] == [None, "unexplained", None]


def test_the_cache_of_latent_attention_expands_to_what_its_heads_read(tmp_path: Path) -> None:
    one = next(each for each in ARCHITECTURES if each.name == "DeepseekV3")
    loaded, read = loaded_tiny(one.config, **one.settings), {}
    manifest = dump_of(loaded, tmp_path / "dump")
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:TOKENS]])
    with torch.inference_mode(), taps.listening(loaded, lambda call: read.update({call.layer: (call.key, call.value)})):
        step(loaded, ids, new_cache(loaded))
    for layer in manifest["layers"]:
        arrays = arrays_of(tmp_path / "dump", layer)
        for part, x in zip("kv", read[layer["layer"]], strict=True):
            with case(layer=layer["layer"], part=part):
                assert_allclose(arrays[part], x[0].numpy(), atol=5e-4)


def test_files_that_are_no_keys_values_or_queries_have_no_such_name(tmp_path: Path) -> None:
    one = next(each for each in ARCHITECTURES if each.name == "DeepseekV3")
    for layer in dump_of(loaded_tiny(one.config, **one.settings), tmp_path / "dump")["layers"]:
        with case(layer=layer):
            kinds = {part: meaning(Path(name).stem) for part, name in layer["files"].items()}
            assert {part: each.kind for part, each in kinds.items() if each.kind} == {"q": "q"}
            assert {each.layer for each in kinds.values()} == {layer["layer"]}


def test_the_manifest_names_model_text_and_versions(tmp_path: Path) -> None:
    manifest = dump_of(loaded_tiny("LlamaConfig"), tmp_path / "dump")
    assert json.loads((tmp_path / "dump" / "manifest.json").read_text()) == manifest
    assert manifest["schema"] == "tqtool.dump/1"
    assert manifest["model"] == {
        "name": "tiny LlamaConfig",
        "revision": None,
        "architecture": "LlamaForCausalLM",
        "layers": 3,
        "context": 512,
        "dtype": "float32",
    }
    assert manifest["tokens"] == TOKENS
    assert manifest["query_tail"] == QUERIES
    import hashlib

    assert manifest["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert manifest["versions"]["torch"] == torch.__version__
    files = {path.name for path in (tmp_path / "dump").iterdir()}
    assert files == {name for layer in manifest["layers"] for name in layer["files"].values()} | {"manifest.json"}


def test_queries_of_a_short_text_are_of_all_positions(tmp_path: Path) -> None:
    manifest = dump_of(loaded_tiny("LlamaConfig"), tmp_path / "dump", tokens=40)
    assert (manifest["tokens"], manifest["query_tail"]) == (40, None)
    assert np.load(tmp_path / "dump" / "layer00_q.npy").shape == (4, 40, 16)


@pytest.mark.parametrize(("config", "limit"), [("MistralConfig", "window"), ("Llama4TextConfig", "chunk")])
def test_a_text_too_short_to_show_a_limit_leaves_the_declared_one(config: str, limit: str, tmp_path: Path) -> None:
    one = next(each for each in ARCHITECTURES if each.config == config)
    layer = dump_of(loaded_tiny(config, **one.settings), tmp_path / "dump", tokens=40)["layers"][0]
    assert layer["kind"] == KINDS[one.kinds[0]]
    assert layer[limit] == LIMIT


def test_what_the_mask_shows_wins_over_what_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(each for each in ARCHITECTURES if each.config == "MistralConfig")
    monkeypatch.setattr(capture_record, "declared_limits", lambda call, config: (7, None))
    layers = dump_of(loaded_tiny(one.config, **one.settings), tmp_path / "mistral")["layers"]
    assert {(layer["kind"], layer["window"]) for layer in layers} == {("sliding", LIMIT)}
    layers = dump_of(loaded_tiny("LlamaConfig"), tmp_path / "llama")["layers"]
    assert {(layer["kind"], layer["window"]) for layer in layers} == {("full", None)}


def test_chosen_layers_are_captured_and_the_others_described(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    everything, chosen = dump_of(loaded, tmp_path / "all"), dump_of(loaded, tmp_path / "one", layers=(1,))
    assert [bool(layer["files"]) for layer in chosen["layers"]] == [False, True, False]
    assert [layer | {"files": {}} for layer in chosen["layers"]] == [
        layer | {"files": {}} for layer in everything["layers"]
    ]
    for name in chosen["layers"][1]["files"].values():
        with case(name=name):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


def test_no_layer_left_is_refused(tmp_path: Path) -> None:
    one = next(each for each in ARCHITECTURES if each.name == "Jamba")
    with pytest.raises(InputError, match="no layer with keys and values of its own among layers 0, 2"):
        dump_of(loaded_tiny(one.config, **one.settings), tmp_path / "dump", layers=(0, 2))


@pytest.mark.parametrize("dtype", ["f16", "f32", "keep"])
@pytest.mark.parametrize("file_format", ["npy", "safetensors"])
def test_types_and_formats_hold_the_same_values(dtype: str, file_format: str, tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    exact = dump_of(loaded, tmp_path / "exact")
    other = dump_of(loaded, tmp_path / "other", dtype=dtype, format=file_format)
    name, stored = exact["layers"][2]["files"]["v"], other["layers"][2]["files"]["v"]
    expected = np.load(tmp_path / "exact" / name)
    if file_format == "npy":
        found = np.load(tmp_path / "other" / stored)
    else:
        found = load_file(tmp_path / "other" / stored)["layer02_v"].numpy()
    assert found.dtype == (np.float16 if dtype == "f16" else np.float32)
    assert_array_equal(found, expected.astype(found.dtype))


def test_bfloat16_is_kept_to_the_bit(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    loaded = replace(loaded, model=loaded.model.to(torch.bfloat16))
    kept: dict[str, torch.Tensor] = {}

    def hear(call: AttentionCall) -> None:
        kept.setdefault(f"layer{call.layer:02d}_k", call.key[0].clone())

    manifest = dump_of(loaded, tmp_path / "dump", chunk=TOKENS)
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:TOKENS]])
    with torch.inference_mode(), taps.listening(loaded, hear):
        step(loaded, ids, new_cache(loaded))
    for layer in manifest["layers"]:
        found = load_file(tmp_path / "dump" / layer["files"]["k"])
        for name, x in found.items():
            with case(layer=layer, name=name, x=x):
                assert x.dtype == torch.bfloat16
                assert torch.equal(x, kept[name])


def test_npy_has_no_bfloat16(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    loaded = replace(loaded, model=loaded.model.to(torch.bfloat16))
    with pytest.raises(UsageError, match="--format npy has no bfloat16, which this model computes in"):
        dump_of(loaded, tmp_path / "dump", format="npy")


@pytest.mark.parametrize(("value", "words"), [(np.nan, "is nan"), (np.inf, "is ")])
def test_values_that_are_not_finite_name_their_layer(value: float, words: str, tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight[0, 0] = value
    with pytest.raises(InputError) as caught:
        dump_of(loaded, tmp_path / "dump")
    assert caught.value.code == "non-finite"
    assert str(caught.value).startswith("layer01_v: head 0, token 0 ")
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_values_beyond_float16_are_told(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    with torch.no_grad():
        loaded.model.model.layers[2].self_attn.v_proj.weight *= 1e7
    with pytest.raises(InputError, match=r"layer02_v: \S+ is beyond float16") as caught:
        dump_of(loaded, tmp_path / "dump", dtype="f16")
    assert (caught.value.code, caught.value.hint) == ("range", "store it with --dtype f32")
    assert list(tmp_path.iterdir()) == []


def test_a_tap_that_changes_the_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_tiny("LlamaConfig")
    ids = loaded.tokenizer(TEXT)["input_ids"][:CHUNK]
    check_unchanged(loaded, ids)
    own = taps._own_attention

    def other(module: Any, plain: str) -> Any:
        run = own(module, plain)
        return lambda module, query, *rest, **options: run(module, query * 1.000001, *rest, **options)

    monkeypatch.setattr(taps, "_own_attention", other)
    with pytest.raises(BugError, match=r"its logits differ by \S+ while it is listened to") as caught:
        check_unchanged(loaded, ids)
    assert (caught.value.code, caught.value.status) == ("control", 70)


def test_the_model_is_as_it_was_after_a_capture_that_failed(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight[0, 0] = np.nan
    with pytest.raises(InputError):
        dump_of(loaded, tmp_path / "dump")
    assert loaded.model.config._attn_implementation == "sdpa"


def refusal(loaded: LoadedModel, folder: Path, text: str, **params: Any) -> TqError:
    with pytest.raises(TqError) as caught:
        capture_jobs(loaded, [Text("t", "t.txt", text)], folder, CaptureParams(**params), max_tokens=100)
    return caught.value


@pytest.mark.parametrize(("text", "found"), [("", "0 tokens"), ("x", "1 token"), ("x" * 15, "15 tokens")])
def test_a_text_of_few_tokens_is_refused(text: str, found: str, tmp_path: Path) -> None:
    error = refusal(loaded_tiny("LlamaConfig"), tmp_path / "dump", text)
    assert (error.code, str(error)) == ("text", f"t.txt: {found}, at least 16 are needed")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = refusal(loaded_tiny("LlamaConfig"), tmp_path / "dump", TEXT)
    assert isinstance(error, OutputError)
    assert "No space left on device (needs " in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from tqtool.hf.capture_files import ArrayFile

    def full(self: ArrayFile, folder: Path, at: int, part: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrayFile, "write", full)
    with pytest.raises(OutputError) as caught:
        dump_of(loaded_tiny("LlamaConfig"), tmp_path / "dump")
    assert (caught.value.code, str(caught.value)) == ("write", f"{tmp_path / 'dump'}: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_the_size_told_is_the_size_written(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig")
    params = CaptureParams(queries=QUERIES)
    (job,) = capture_jobs(loaded, [Text("t", "t.txt", TEXT)], tmp_path / "dump", params, max_tokens=TOKENS)
    run_job(loaded, job)
    arrays = [path for path in (tmp_path / "dump").iterdir() if path.suffix == ".npy"]
    assert job.size == sum(path.stat().st_size for path in arrays)


def test_texts_end_where_the_context_of_the_model_does(tmp_path: Path) -> None:
    loaded = loaded_tiny("LlamaConfig", max_position_embeddings=64)
    (job,) = capture_jobs(loaded, [Text("t", "t.txt", TEXT)], tmp_path / "d", CaptureParams(), max_tokens=4096)
    assert (len(job.ids), job.left_out) == (64, len(TEXT) - 64)
