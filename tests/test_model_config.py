"""A model's configuration gives the cache of its family, or is refused by the key that is not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from tqtool.codec.sizes import AttentionLayer, KVConfig, cache_size
from tqtool.dumps.model_config import read_model
from tqtool.errors import InputError

LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (AttentionLayer(8, 128),) * 4),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, (AttentionLayer(32, 128),) * 4),
        ({**LLAMA, "head_dim": 64}, (AttentionLayer(8, 64),) * 4),
        ({"text_config": LLAMA, "vision_config": {}}, (AttentionLayer(8, 128),) * 4),
        ({**LLAMA, "sliding_window": 512}, (AttentionLayer(8, 128, 512),) * 4),
        ({**LLAMA, "sliding_window": 512, "use_sliding_window": False}, (AttentionLayer(8, 128),) * 4),
        (
            {**LLAMA, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (AttentionLayer(8, 128, 512), AttentionLayer(8, 128)) * 2,
        ),
        (
            {**LLAMA, "sliding_window": 512, "sliding_window_pattern": 4},
            (AttentionLayer(8, 128, 512),) * 3 + (AttentionLayer(8, 128),),
        ),
        ({**LLAMA, "layers_block_type": ["mamba", "attention", "mamba", "attention"]}, (AttentionLayer(8, 128),) * 2),
        ({**LLAMA, "head_dim": [64, 64, 128, 128]}, (AttentionLayer(8, 64),) * 2 + (AttentionLayer(8, 128),) * 2),
    ],
)
def test_model_configurations_are_read(tmp_path: Path, config: Any, expected: tuple[AttentionLayer, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_model(path).layers == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "is an object"),
        ('{"text_config": 3}', "is an object"),
        ("{}", "none of num_hidden_layers"),
        (json.dumps({**LLAMA, "num_hidden_layers": "four"}), "num_hidden_layers='four'"),
        (json.dumps({**LLAMA, "num_hidden_layers": True}), "num_hidden_layers=True"),
        (json.dumps({**LLAMA, "num_key_value_heads": [8, 8]}), "one for each of 4 layers"),
        (json.dumps({**LLAMA, "layer_types": ["conv1d"] * 4}), "layer type 'conv1d' is not known"),
        (json.dumps({**LLAMA, "layer_types": ["full_attention"]}), "1 layer types for 4 layers"),
        (json.dumps({**LLAMA, "layer_types": "full_attention"}), "layer type 'full_attention' is not known"),
        (json.dumps({**LLAMA, "layer_types": ["sliding_attention"] * 4}), "sliding_window is missing"),
        (json.dumps({**LLAMA, "layer_types": ["mamba"] * 4}), "no layer of this model keeps"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_model_configurations_that_say_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_model(path)
    assert caught.value.code == "model-config"


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def layers(*kinds: tuple[int, AttentionLayer]) -> list[AttentionLayer]:
    return [layer for count, layer in kinds for _ in range(count)]


def attending(
    *places: int, of: int, layer: AttentionLayer, other: AttentionLayer | None = None
) -> list[AttentionLayer]:
    return [kind for i in range(of) if (kind := layer if i in places else other) is not None]


MLA = {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048, "num_hidden_layers": 3}
PLAIN = {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 1024, "num_hidden_layers": 12}
FULL = AttentionLayer(4, 64)
SLIDES = AttentionLayer(4, 64, 512)
WINDOW = {**PLAIN, "sliding_window": 512}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

# What each family's own code allocates; for the families of the transformers library held against its cache classes.
FAMILIES: dict[str, tuple[dict[str, Any], list[AttentionLayer]]] = {
    "latent": (
        {**MLA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
         "q_lora_rank": 1536, "v_head_dim": 128, "first_k_dense_replace": 1, "n_shared_experts": 1, "topk_group": 4,
         "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "n_group": 8, "attention_bias": False},
        layers((3, AttentionLayer(1, 576, None, 0))),
    ),
    "latent without a family": (
        {**MLA, "kv_lora_rank": 256, "qk_rope_head_dim": 32},
        layers((3, AttentionLayer(1, 288, None, 0))),
    ),
    "two attentions a layer": (
        {"model_type": "longcat_flash", "num_layers": 2, "num_attention_heads": 8, "hidden_size": 512,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        layers((4, AttentionLayer(1, 576, None, 0))),
    ),
    "falcon 7b": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544,
         "multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 71, "parallel_attn": True,
         "alibi": False, "num_ln_in_parallel_attn": None},
        layers((2, AttentionLayer(1, 64))),
    ),
    "falcon 7b, its switch left out": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544},
        layers((2, AttentionLayer(1, 64))),
    ),
    "falcon 40b": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 128, "hidden_size": 8192,
         "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
        layers((2, AttentionLayer(8, 64))),
    ),
    "falcon without sharing": (
        {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1024,
         "multi_query": False, "num_kv_heads": 16},
        layers((2, AttentionLayer(16, 64))),
    ),
    "first falcon 40b": (
        {"model_type": "RefinedWeb", "n_layer": 2, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192},
        layers((2, AttentionLayer(8, 64))),
    ),
    "starcoder": (
        {"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 48, "n_embd": 6144, "multi_query": True},
        layers((2, AttentionLayer(1, 128))),
    ),
    "jamba": (
        {**PLAIN, "model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
         "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 256, "use_mamba_kernels": True},
        attending(4, of=12, layer=FULL),
    ),
    "pattern": (
        {**PLAIN, "model_type": "nemotron_h", "hybrid_override_pattern": NEMOTRON, "num_hidden_layers": len(NEMOTRON),
         "head_dim": 64, "ssm_state_size": 128, "mamba_num_heads": 128, "chunk_size": 128, "conv_kernel": 4},
        layers((4, FULL)),
    ),
    "interval": (
        {**PLAIN, "model_type": "qwen3_next", "head_dim": 64, "full_attention_interval": 4,
         "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4},
        layers((3, FULL)),
    ),
    "interval left out": ({**PLAIN, "model_type": "qwen3_next", "head_dim": 64}, layers((3, FULL))),
    "indices": ({**PLAIN, "model_type": "bamba", "attn_layer_indices": [3, 9], "mamba_n_heads": 8}, layers((2, FULL))),
    "flags": ({**PLAIN, "attn_type_list": [0, 0, 1] * 4}, layers((4, FULL))),
    "recurrent": (
        {**PLAIN, "model_type": "recurrent_gemma", "attention_window_size": 512, "lru_width": 1024,
         "block_types": ["recurrent", "recurrent", "attention"]},
        layers((4, SLIDES)),
    ),
    "gemma 2": ({**WINDOW, "model_type": "gemma2", "head_dim": 64, "query_pre_attn_scalar": 64,
                 "attn_logit_softcapping": 50.0}, [SLIDES, FULL] * 6),
    "gemma 3": (
        {"model_type": "gemma3", "text_config": {**WINDOW, "model_type": "gemma3_text", "head_dim": 64}},
        attending(5, 11, of=12, layer=FULL, other=SLIDES),
    ),
    "gemma 3 with its pattern": (
        {**WINDOW, "model_type": "gemma3_text", "head_dim": 64, "_sliding_window_pattern": 4},
        [SLIDES, SLIDES, SLIDES, FULL] * 3,
    ),
    "gemma 3 as it is written in another": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                                                 "num_hidden_layers": 34, "sliding_window": 1024}},
        attending(5, 11, 17, 23, 29, of=34, layer=AttentionLayer(4, 256), other=AttentionLayer(4, 256, 1024)),
    ),
    "gemma 3n": (
        {**WINDOW, "model_type": "gemma3n_text", "head_dim": 64, "num_kv_shared_layers": 5, "laurel_rank": 64,
         "activation_sparsity_pattern": [0.95] * 12, "vocab_size_per_layer_input": 262144, "altup_num_inputs": 4},
        [*[SLIDES] * 4, FULL, SLIDES, SLIDES],
    ),
    "gemma 4": (
        {**WINDOW, "model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128, "num_kv_shared_layers": 0},
        attending(5, 11, of=12, layer=AttentionLayer(4, 128), other=SLIDES),
    ),
    "gemma 4 whose last layer sees all": (
        {**WINDOW, "model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 8,
         "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        attending(5, 7, of=8, layer=AttentionLayer(2, 128), other=SLIDES),
    ),
    "gemma 4 layer by layer": (
        {**WINDOW, "model_type": "gemma4_text", "head_dim": 64,
         "per_layer_config": {"05": {"head_dim": 128, "num_key_value_heads": 2}, "11": {"head_dim": 128}}},
        [*[SLIDES] * 5, AttentionLayer(2, 128), *[SLIDES] * 5, AttentionLayer(4, 128)],
    ),
    "gpt-oss": ({**WINDOW, "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 32}, [SLIDES, FULL] * 6),
    "command r7b": (
        {**WINDOW, "model_type": "cohere2", "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"},
        [SLIDES, SLIDES, SLIDES, FULL] * 3,
    ),
    "exaone 4": ({**WINDOW, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}, [*[SLIDES] * 3, FULL] * 3),
    "cwm": ({**WINDOW, "model_type": "cwm"}, [FULL, SLIDES, SLIDES, SLIDES] * 3),
    "llama 4": (
        {"text_config": {**PLAIN, "model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": 512,
                         "interleave_moe_layer_step": 1, "no_rope_layers": [], "attn_temperature_tuning": True}},
        [*[SLIDES] * 3, FULL] * 3,
    ),
    "llama 4 with its list": (
        {**PLAIN, "model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": 512,
         "no_rope_layers": [1, 0] * 6},
        [SLIDES, FULL] * 6,
    ),
    "llama 4 without chunks": (
        {**PLAIN, "model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": None}, layers((12, FULL))
    ),
    "qwen 2": ({**WINDOW, "model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 4}, [FULL] * 12),
    "qwen 2, its switch left out": ({**WINDOW, "model_type": "qwen2", "max_window_layers": 4}, [FULL] * 12),
    "qwen 2 that slides": (
        {**WINDOW, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
        [FULL] * 4 + [SLIDES] * 8,
    ),
    "mistral": ({**WINDOW, "model_type": "mistral"}, [SLIDES] * 12),
    "mistral, heads left out": (
        {"model_type": "mistral", "num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 2,
         "sliding_window": None},
        layers((2, AttentionLayer(8, 128))),
    ),
    "gpt-2": ({"model_type": "gpt2", "n_layer": 2, "n_head": 12, "n_embd": 768, "n_inner": None,
               "attn_pdrop": 0.1, "reorder_and_upcast_attn": False}, layers((2, AttentionLayer(12, 64)))),
    "bloom": ({"model_type": "bloom", "n_layer": 2, "n_head": 16, "hidden_size": 1024, "slow_but_exact": False,
               "apply_residual_connection_post_layernorm": False}, layers((2, AttentionLayer(16, 64)))),
    "first bloom": ({"n_layer": 2, "num_attention_heads": 16, "n_embed": 1024}, layers((2, AttentionLayer(16, 64)))),
    "gpt-neo": (
        {"model_type": "gpt_neo", "num_layers": 4, "num_heads": 16, "hidden_size": 1024, "window_size": 256,
         "attention_types": [[["global", "local"], 2]]},
        [AttentionLayer(16, 64), AttentionLayer(16, 64, 256)] * 2,
    ),
    "mpt": ({"model_type": "mpt", "n_layers": 2, "n_heads": 32, "d_model": 4096,
             "attn_config": {"attn_type": "multihead_attention", "alibi": True}}, layers((2, AttentionLayer(32, 128)))),
    "mpt that shares": ({"model_type": "mpt", "n_layers": 2, "n_heads": 32, "d_model": 4096,
                         "attn_config": {"attn_type": "multiquery_attention"}}, layers((2, AttentionLayer(1, 128)))),
    "dbrx": ({"model_type": "dbrx", "n_layers": 2, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
             layers((2, AttentionLayer(8, 128)))),
    "chatglm": ({"model_type": "chatglm", "num_layers": 2, "num_attention_heads": 32, "hidden_size": 4096,
                 "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2},
                layers((2, AttentionLayer(2, 128)))),
    "values shorter than keys": (
        {**PLAIN, "head_dim": 192, "v_head_dim": 128, "layer_types": ["full_attention", "sliding_attention"] * 6,
         "sliding_window": 512, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128},
        [AttentionLayer(4, 192, None, 128), AttentionLayer(8, 192, 512, 128)] * 6,
    ),
    "experts and the rest": (
        {**PLAIN, "model_type": "qwen3_moe", "head_dim": 64, "mlp_only_layers": [0], "decoder_sparse_step": 1,
         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "layer_norm_eps": 1e-6, "attention_dropout": 0.0,
         "num_beam_groups": 1, "rope_scaling": {"type": "yarn"}, "use_cache": True, "output_attentions": False,
         "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48, "id2label": {"0": "LABEL_0"}},
        layers((12, FULL)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_read_as_their_code_allocates(tmp_path: Path, name: str) -> None:
    config, expected = FAMILIES[name]
    assert list(read_model(written(tmp_path, config)).layers) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_latent_dim": 64}, "kv_latent_dim is 64"),
        ({"cross_layer_sharing": [0, 0, 1, 1]}, "cross_layer_sharing is"),
        ({"kv_cache_groups": 2}, "kv_cache_groups is 2"),
        ({"kv_scale_factor": 2}, "kv_scale_factor is 2"),  # the form of a factor, and of a cache
        ({"index_n_heads": 64, "index_head_dim": 128}, "index_n_heads is 64"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads is 32"),  # which layers are linear is not said
        ({"mamba_d_state": 16}, "mamba_d_state is 16"),
        ({"compress_rates": [4, 128]}, "compress_rates is"),
        ({"block_configs": [{"attention": {"no_op": True}}]}, "block_configs is"),
        ({"local_attention": 128}, "local_attention is 128"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla"),
        ({"cross_attention_layers": [3, 8]}, "cross-attention layers"),
        ({"add_cross_attention": True}, "cross-attention layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"sliding_window": 64, "model_type": "newest"}, "sliding_window is 64, and which layers of 'newest' slide"),
        ({"sliding_window": 64, "sliding_window_pattern": "LX"}, "need a whole number, or letters L and G"),
        ({"sliding_window": 64, "model_type": "cohere2", "layer_switch": 4, "order_of_interleaved_layers": "global"},
         "order_of_interleaved_layers is 'global'"),
        ({"layer_types": ["indexed_attention"] * 12}, "layer type 'indexed_attention' is not known"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern is 'M\\*'; need one of"),
        ({"attn_layer_period": "8"}, "attn_layer_period is '8'"),
        ({"attn_layer_indices": [12]}, "need numbers below 12"),
        ({"attn_type_list": [0, 2] * 6}, "need 0 or 1 for each of 12 layers"),
        ({"full_attention_interval": 2.5}, "full_attention_interval is 2.5"),
        ({"model_type": "recurrent_gemma", "block_types": ["rest"]}, "need recurrent and attention"),
        ({"num_kv_shared_layers": 12}, "need a number below the 12 layers"),
        ({"kv_lora_rank": 512}, "none of qk_rope_head_dim"),
        ({"attention_chunk_size": 512, "no_rope_layers": [1]}, "need 0 or 1 for each of 12 layers"),
        ({"attention_types": [[1]]}, "not lists of types and counts"),
        ({"per_layer_config": [1]}, "not an object of objects"),
        ({"per_layer_config": {"3": {"sliding_window": 4}}}, "per_layer_config of layer 3 has 'sliding_window'"),
        ({"global_head_dim": "wide"}, "need numbers above 0"),
        ({"attn_config": {"sliding_window_size": 4096}}, "attn_config has 'sliding_window_size'"),
        ({"num_hidden_layers": 1 << 20}, "at most 16384 are believed"),
        ({"model_type": 3}, "model_type is 3, not a name"),
        ({"text_config": PLAIN, "llm_config": PLAIN}, "text_config and llm_config: which is the model of the text"),
    ],
)  # fmt: skip
def test_a_key_that_may_change_the_cache_is_refused_by_name(tmp_path: Path, more: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_model(written(tmp_path, {**PLAIN, **more}))
    assert caught.value.code == "model-config"
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_what_was_read_is_told(tqtool: Run, tmp_path: Path) -> None:
    written(tmp_path, {**MLA, "model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    result = tqtool("size", "--model", "config.json", "--tokens", 10)
    assert "3 layers x 1 latent x 576 x 10 tokens" in result.stdout
    assert "kv_lora_rank 512, qk_rope_head_dim 64" in result.stdout
    assert "counted once, with the bits of the keys" in result.stdout
    answer = json.loads(tqtool("size", "--model", "config.json", "--tokens", 10, "-c", "k16v16", "--json").stdout)
    assert answer["rows"][0]["total_bytes"] == 3 * 10 * 576 * 2
    assert answer["layers"][0] == {"kv_heads": 1, "head_dim": 576, "value_dim": 0, "window": None}
    assert "kv_lora_rank 512" in answer["read"]


def test_a_familys_own_value_is_told_as_such(tmp_path: Path) -> None:
    config = {"model_type": "mistral", "num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 2}
    assert "mistral's own num_key_value_heads 8" in read_model(written(tmp_path, config)).read


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert len(read_model(path).layers) == 4


@pytest.mark.parametrize(
    ("layer", "config", "total"),
    [
        (AttentionLayer(1, 576, None, 0), "K4/V2", 576 // 2 + 8),
        (AttentionLayer(1, 576, None, 0), "K16/V2", 576 * 2),
        (AttentionLayer(2, 192, None, 128), "K4/V2", 2 * (192 // 2 + 128 // 4 + 16)),
    ],
)
def test_latents_and_uneven_pairs_cost_what_is_stored(layer: AttentionLayer, config: str, total: int) -> None:
    assert cache_size(KVConfig.parse(config), [layer], tokens=1).total == total
