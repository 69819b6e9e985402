"""The cache for transformers: the same vectors as `TurboQuantCache`, and every way to generate text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from loops import case

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import tiny_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402

from tqtool.attention.cache import TurboQuantCache  # noqa: E402
from tqtool.codec.codec import decode, encode  # noqa: E402
from tqtool.codec.sizes import KVConfig  # noqa: E402
from tqtool.codec.spec import CodecSpec  # noqa: E402
from tqtool.errors import TqError  # noqa: E402
from tqtool.hf import turboquant_cache  # noqa: E402
from tqtool.hf.cache import TurboQuantLayer  # noqa: E402

GEMMA: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "head_dim": 32,
}
MODELS = {"LlamaConfig": {"head_dim": 32}, "Gemma3TextConfig": GEMMA}


class NaiveLayer(DynamicLayer):
    """Keeps every key and value as it came, and restores all codes anew for each forward pass."""

    def __init__(self, *, exact_chunk: bool, sinks: int = 0) -> None:
        super().__init__()
        self.exact_chunk, self.sinks = exact_chunk, sinks

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = key_states.shape[2] if self.exact_chunk else 0
        read = []
        for x, bits in zip(super().update(key_states, value_states), (4, 2), strict=True):
            spec = CodecSpec(x.shape[-1], bits, meta="bf16")
            restored = torch.from_numpy(decode(encode(x.numpy(), spec)))
            last = x.shape[2] - chunk
            first = min(self.sinks, last)
            read.append(torch.cat([x[:, :, :first], restored[:, :, first:last], x[:, :, last:]], 2))
        return read


def naive_cache(config: Any, **rules: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [NaiveLayer(**rules) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def prompt(batch: int = 2, length: int = 24) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (batch, length), generator=generator)
    ids[:, length // 2 :] = ids[:, : length - length // 2]  # so that a lookup in the prompt finds something
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :5], ids[0, :5] = 0, 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, cache: DynamicCache, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(7)
    given: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False} | options
    return model.generate(**inputs, cache=cache, **given, return_dict_in_generate=True)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, **MODELS[request.param])


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "greedy, a padded batch": (2, {}),
    "sampling": (1, {"do_sample": True, "num_return_sequences": 3}),
    "beams": (2, {"num_beams": 3, "num_return_sequences": 2}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 4}),
}


@pytest.mark.parametrize("exact_chunk", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_a_cache_that_restores_everything_anew(model: Any, way: str, exact_chunk: bool) -> None:
    batch, options = WAYS[way]
    rules: dict[str, Any] = {"exact_chunk": exact_chunk}
    ours = turboquant_cache(model.config, "K4/V2", sink_tokens=2, **rules)
    sequences = [
        generated(model, cache, prompt(batch), **options).sequences
        for cache in (ours, naive_cache(model.config, sinks=2, **rules))
    ]
    assert torch.equal(*sequences)
    assert sequences[0].shape[1] == 44
    assert any(isinstance(layer, TurboQuantLayer) for layer in ours.layers)


def test_assisted_decoding_gives_the_text_of_greedy_decoding(model: Any) -> None:
    assistant = tiny_model("LlamaConfig", num_hidden_layers=1)
    rules: dict[str, Any] = {"exact_chunk": False}  # else what is exact depends on the drafts
    answers = [
        generated(model, turboquant_cache(model.config, "K4/V2", **rules), prompt(1), **more).sequences
        for more in ({}, {"assistant_model": assistant})
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("meta", ["bf16", "range"])
def test_a_layer_holds_what_our_cache_holds(window: int, sinks: int, meta: Any) -> None:
    model = tiny_model("LlamaConfig", head_dim=32)
    rules: dict[str, Any] = {"sink_tokens": sinks, "residual_window": window, "meta": meta}
    layer = turboquant_cache(model.config, "K4/V2", exact_chunk=False, **rules).layers[0]
    ours = TurboQuantCache(KVConfig(4, 2), layers=1, kv_heads=2, head_dim=32, max_seq_len=64, batch=3, **rules)
    rng = np.random.default_rng(0)
    for count, cut in ((7, 0), (1, 0), (12, 4), (1, 0), (2, 0), (1, 3), (20, 0)):
        with case(count=count, cut=cut):
            k, v = rng.normal(size=(2, 3, count, 2, 32)).astype(np.float32)
            ours.append(0, k, v)
            read = layer.update(*(torch.from_numpy(x).transpose(1, 2) for x in (k, v)))
            for side, x, held in zip("kv", read, (ours.keys(0), ours.values(0)), strict=True):
                with case(side=side):
                    np.testing.assert_array_equal(x.transpose(1, 2).numpy(), held)
            ours.truncate(ours.seq_len - cut)
            layer.crop(-cut)
            assert layer.get_seq_length() == ours.seq_len


def test_the_running_chunk_is_exact_and_the_window_before_it() -> None:
    layer = turboquant_cache(tiny_model("LlamaConfig").config, "K2/V2", residual_window=3, sink_tokens=1).layers[0]
    chunks = torch.randn(3, 1, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    whole = torch.cat(list(chunks), 2)
    for i, chunk in enumerate(chunks):
        with case(i=i):
            keys, _ = layer.update(chunk, chunk)
            same = (keys == whole[:, :, : keys.shape[2]]).all(-1).all(1)[0]
            first = 6 * i
            assert same.nonzero()[:, 0].tolist() == sorted({0, *range(max(first - 3, 0), first + 6)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_kept(dtype: Any) -> None:
    layer = turboquant_cache(tiny_model("LlamaConfig").config, residual_window=1).layers[0]
    x = torch.randn(1, 2, 4, 16).to(dtype)
    layer.update(x, x)
    keys, values = layer.update(x[:, :, :1], x[:, :, :1])
    assert keys.dtype == values.dtype == dtype
    assert torch.equal(keys[:, :, 3], x[:, :, 3])  # the window
    assert not torch.equal(keys[:, :, 2], x[:, :, 2])


def test_a_copy_goes_its_own_way(model: Any) -> None:
    inputs = prompt(1)
    cache = turboquant_cache(model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :-1], cache=cache)
    answers = [generated(model, copy.deepcopy(cache), inputs).sequences for _ in range(2)]
    assert torch.equal(*answers)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] - 1


def test_a_reset_cache_takes_another_batch(model: Any) -> None:
    cache = turboquant_cache(model.config)
    first = generated(model, cache, prompt(1)).sequences
    cache.reset()
    assert cache.get_seq_length() == 0
    generated(model, cache, prompt(2))
    cache.reset()
    assert torch.equal(generated(model, cache, prompt(1)).sequences, first)


def test_only_full_attention_layers_are_replaced() -> None:
    model = tiny_model("Gemma3TextConfig", **GEMMA)
    kinds = [type(layer) for layer in turboquant_cache(model.config).layers]
    assert kinds == [DynamicSlidingWindowLayer, TurboQuantLayer, TurboQuantLayer]
    kinds = [type(layer) for layer in turboquant_cache(model.config, protect=(-1,)).layers]
    assert kinds == [DynamicSlidingWindowLayer, TurboQuantLayer, DynamicLayer]


def test_a_ninth_of_the_bytes_at_length() -> None:
    config = tiny_model("LlamaConfig", head_dim=128).config
    layer, plain = turboquant_cache(config, "K4/V2").layers[0], DynamicCache(config=config).layers[0]
    x = torch.randn(1, 2, 2048, 128)
    for each in (layer, plain):
        each.update(x, x)
    stored = 2 * 2048 * (128 * 4 // 8 + 2 + 128 * 2 // 8 + 2)
    assert stored <= layer.nbytes <= stored * 9 // 8
    assert plain.keys.nbytes + plain.values.nbytes > 9 * layer.nbytes


def test_a_padded_sequence_is_that_sequence_alone() -> None:
    model = tiny_model("LlamaConfig", head_dim=32)
    both = prompt(2)
    alone = {name: x[:1, 5:] for name, x in both.items()}
    for name in ("sdpa", "tqtool"):
        with case(name=name):
            model.set_attn_implementation(name)
            answers = [generated(model, turboquant_cache(model.config, "K6/V6"), each) for each in (both, alone)]
            assert torch.equal(answers[0].sequences[0, 5:], answers[1].sequences[0])


def test_chunks_are_the_whole_where_every_token_is_quantized(model: Any) -> None:
    ids = prompt(1)["input_ids"]
    logits = []
    for chunk in (24, 7):
        cache = turboquant_cache(model.config, "K4/V4", exact_chunk=False)
        with torch.no_grad():
            parts = [model(part, cache=cache).logits for part in ids.split(chunk, 1)]
        logits.append(torch.cat(parts, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5)


def refusal(run: Any) -> TqError:
    with pytest.raises(TqError) as caught:
        run()
    return caught.value


CONFIG = tiny_model("LlamaConfig").config
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"kv": "K16/V4"}, "K16/V4: a compressed cache has 1 to 8 bits a side"),
    ({"residual_window": -1}, "residual_window is -1, at least 0 is needed"),
    ({"sink_tokens": -2}, "sink_tokens is -2, at least 0 is needed"),
    ({"meta": "f16"}, "metadata form 'f16' is none of range, f32, bf16"),
    ({"key_scale_rule": "max"}, "scale rule 'max' is none of match, norm, lsq, unbiased"),
    ({"protect": (3,)}, "protect: no layer 3, the model has 3"),
    ({"protect": (0, 1, -1)}, "nothing to compress: every full-attention layer is protected"),
]


@pytest.mark.parametrize(("options", "text"), REFUSALS)
def test_what_no_cache_can_have_is_refused(options: dict[str, Any], text: str) -> None:
    assert str(refusal(lambda: turboquant_cache(CONFIG, **options))) == text


def test_a_model_without_full_attention_is_refused() -> None:
    config = tiny_model("Gemma3TextConfig", sliding_window=16, layer_types=["sliding_attention"] * 3).config
    assert (
        str(refusal(lambda: turboquant_cache(config))) == "nothing to compress: the model has no full-attention layer"
    )


def test_a_length_without_a_rotation_is_refused_at_the_first_token() -> None:
    layer = turboquant_cache(CONFIG).layers[0]
    x = torch.zeros(1, 2, 3, 18)
    error = refusal(lambda: layer.update(x, x))
    assert error.code == "dim"
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_nan_names_its_layer_and_leaves_the_cache_as_it_was(side: str) -> None:
    layer = turboquant_cache(CONFIG).layers[2]
    good = torch.ones(1, 2, 3, 16)
    layer.update(good, good)
    bad = good.clone()
    bad[0, 1, 2, 3] = float("nan")
    error = refusal(lambda: layer.update(*((bad, good) if side == "keys" else (good, bad))))
    assert error.code == "non-finite"
    assert str(error).startswith(f"layer 2, {side}: 1 NaN")
    assert layer.get_seq_length() == 3
    assert layer.update(good, good)[0].shape[2] == 6


def test_other_shapes_than_those_held_are_refused() -> None:
    layer = turboquant_cache(CONFIG).layers[0]
    layer.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))
    other = torch.ones(2, 2, 3, 16)
    error = refusal(lambda: layer.update(other, other))
    assert str(error) == "layer 0: 1 sequences of 2 heads of 16 in the cache, 2 of 2 of 16 come"


def test_cropping_takes_negative_numbers() -> None:
    with pytest.raises(ValueError, match="as a negative one"):
        turboquant_cache(CONFIG).layers[0].crop(3)


@pytest.mark.parametrize("function", ["sdpa", "tqtool"])
def test_a_compiled_model_breaks_at_the_cache_alone(function: str) -> None:
    model = tiny_model("LlamaConfig", num_hidden_layers=1)
    model.set_attn_implementation(function)
    ids = prompt(1)["input_ids"]
    cache, eager = turboquant_cache(model.config), turboquant_cache(model.config)
    with torch.no_grad():
        for each in (cache, eager):
            model(ids, cache=each)
        explained = torch._dynamo.explain(model)(ids[:, :1], cache=cache)
        model(ids[:, :1], cache=eager)
        again = torch.compile(model, backend="eager")(ids[:, 1:2], cache=cache)
        torch.testing.assert_close(again.logits, model(ids[:, 1:2], cache=eager).logits)
    # one place; PyTorch counts it anew for every function that it lies in
    assert {"TurboQuantLayer.update" in str(each.reason) for each in explained.break_reasons} == {True}
