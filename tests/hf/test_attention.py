"""The attention function "tqtool": what it reads is what the model's own attention would have read."""

from __future__ import annotations

from typing import Any

import pytest
from loops import case

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import tiny_model  # noqa: E402

from tqtool.errors import InputError  # noqa: E402
from tqtool.hf import attention, turboquant_cache  # noqa: E402

MIXED = ["sliding_attention", "full_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "one head for all": ("LlamaConfig", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma 2, soft cap": ("Gemma2Config", {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma 3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "layer_types": MIXED}),
    "granite, its own scale": ("GraniteConfig", {"attention_multiplier": 0.05}),
    "gpt-oss, sinks": (
        "GptOssConfig",
        {"head_dim": 32, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
EAGER = ("Gemma2Config", "GptOssConfig")  # PyTorch's attention does not know their rules


def logits_by_steps(model: Any, cache: Any, ids: Any, mask: Any, steps: list[int]) -> Any:
    parts, done = [], 0
    with torch.no_grad():
        for part in ids.split(steps, 1):
            done += part.shape[1]
            parts.append(model(part, attention_mask=mask[:, :done], cache=cache).logits)
    return torch.cat(parts, 1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls that were answered from codes."""
    counted: list[int] = []
    answer = attention._Call.answer

    def counting(call: Any) -> Any:
        counted.append(call.query.shape[1])
        return answer(call)

    monkeypatch.setattr(attention._Call, "answer", counting)
    return counted


@pytest.mark.parametrize("padding", ["none", "left", "a gap"])
@pytest.mark.parametrize("rules", [{}, {"residual_window": 4, "sink_tokens": 2}, {"exact_chunk": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_codes_are_read_as_if_they_were_restored(
    name: str, rules: dict[str, Any], padding: str, reads: list[int]
) -> None:
    config, settings = MODELS[name]
    model = tiny_model(config, **settings)
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "a gap":
        mask[1, 7:11] = 0
    logits = []
    for function in ("eager" if config in EAGER else "sdpa", "tqtool"):
        model.set_attn_implementation(function)
        reads.clear()
        cache = turboquant_cache(model.config, "K4/V3", **rules)
        logits.append(logits_by_steps(model, cache, ids, mask, [20, 1, 1, 5, 1, 12]))
    seen = mask.bool()[..., None]
    # Where a later layer's code flips on the last bit of a float, a few logits move more than rounding does.
    apart = (logits[0] - logits[1]).abs() * seen
    assert apart.max() < 2e-3
    assert (apart > 5e-5).float().mean() < 0.05
    layers = sum(hasattr(layer, "sides") for layer in cache.layers)
    assert reads.count(1) == (0 if "GptOss" in config else 3 * layers)  # sinks beside the scores: restored


def test_a_model_that_changes_keys_after_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("LlamaConfig")
    model.set_attn_implementation("tqtool")
    cache = turboquant_cache(model.config)
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        model(ids, cache=cache)
    update = cache.update
    monkeypatch.setattr(cache, "update", lambda *args, **kwargs: [x * 2 for x in update(*args, **kwargs)])
    with pytest.raises(InputError, match=r"layer 0: the model computes aten\.mul.* holds as codes") as caught:
        model(ids[:, :1], cache=cache)
    assert caught.value.hint == "model.set_attn_implementation('sdpa') makes the cache restore them"


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x + 1,
        lambda x: x.transpose(1, 2),
        lambda x: x[:, :, -1],
        lambda x: torch.cat([x, x]),
        lambda x: x.clone(),
        lambda x: x.float() if x.dtype != torch.float32 else x.double(),
        lambda x: x.sum(),
        lambda x: x.unsqueeze(0),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: x.zero_(),
    ],
)
def test_stand_ins_have_a_shape_and_nothing_else(touch: Any) -> None:
    model = tiny_model("LlamaConfig")
    model.set_attn_implementation("tqtool")
    layer = turboquant_cache(model.config).layers[1]
    x = torch.randn(1, 2, 5, 16)
    layer.update(x, x)
    keys, values = layer.update(x[:, :, :1], x[:, :, :1])
    assert isinstance(keys, attention.PackedTensor)
    assert (keys.shape, keys.dtype, keys.device) == ((1, 2, 6, 16), x.dtype, x.device)
    assert repr(keys) == "PackedTensor(layer 1, shape=(1, 2, 6, 16), 4 bits)"
    for each in (keys, values):
        with case(each=each), pytest.raises(InputError, match="layer 1: the model computes"):
            touch(each)


def test_another_attention_function_gets_keys() -> None:
    model = tiny_model("LlamaConfig")
    layer = turboquant_cache(model.config).layers[0]
    x = torch.randn(1, 2, 5, 16)
    layer.update(x, x)
    for function, kind in (("tqtool", attention.PackedTensor), ("sdpa", torch.Tensor), ("eager", torch.Tensor)):
        with case(function=function, kind=kind):
            model.set_attn_implementation(function)
            assert type(layer.update(x[:, :, :1], x[:, :, :1])[0]) is kind


def test_without_a_cache_it_is_pytorchs_attention() -> None:
    model = tiny_model("LlamaConfig")
    ids = torch.arange(3, 33)[None]
    logits = []
    for function in ("sdpa", "tqtool"):
        model.set_attn_implementation(function)
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits)
    assert torch.equal(*logits)
