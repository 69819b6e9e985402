"""The keys of a `config.json`: read one by one, and every key that could change the cache is read or refused.

A configuration that is not understood must not give a number. So a key counts as understood when it was asked for, or
when it is known to leave the cache alone (`IRRELEVANT`, `FORMS`); of the others, those whose names speak of heads,
layers, windows, latents or states (`SUSPECT`) are refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tqtool.errors import InputError

SUSPECT = re.compile(
    r"window|kv|head|latent|lora|share|layer|attn|attention|sliding|chunk|pattern|cache|compress|group|query|cross"
    r"|mla|index|sparse|rank|recurr|state|ssm|mamba|linear|conv|interval|period|local|global|hybrid|block|loop|cycle"
    r"|memory|encoder|(^|_)(key|value|dim|depth|offset)s?(_|$)"
)
# Keys that SUSPECT meets and that change no byte of the cache, by name ...
IRRELEVANT = re.compile(
    r"activation_sparsity_pattern|apply_residual_connection_post_layernorm|attention_multiplier|attn_impl|"
    r"attn_implementation|attn_output_gate|attn_scale|attn_temperature_tuning|attn_uses_sequence_id|"
    r"chunk_size_feed_forward|clip_qkv|compression_config|cross_attention_hidden_size|decoder_sparse_step|"
    r"do_layer_norm_before|encoder_no_repeat_ngram_size|expert_layer_offset|expert_layer_period|ffn_dim|"
    r"first_k_dense_replace|floor_scale|full_attn_alpha_factor|full_attn_beta_factor|head_bias|"
    r"hidden_size_per_layer_input|interleave_moe_layer_step|key_multiplier|laurel_rank|"
    r"layer_norm_elementwise_affine|layer_rope_theta|linear_attn_alpha_factor|linear_attn_beta_factor|"
    r"mask_index|mlp_layer_types|mlp_only_layers|moe_layer_end_index|moe_layer_freq|moe_layer_interval|"
    r"moe_layer_start_index|moe_layers|n_group|n_groups|n_inner|n_shared_experts|no_rope_layer_interval|"
    r"no_rope_layers|num_beam_groups|num_dense_layers|num_expert_group|num_ln_in_parallel_attn|"
    r"num_local_experts|num_mtp_layers|num_nextn_predict_layers|num_shared_experts|output_attentions|"
    r"output_hidden_states|parallel_attn|pretraining_tp|q_lora_rank|qk_layer_norms|qk_layernorm|qk_ln|"
    r"qkv_bias|query_pre_attn_scalar|reorder_and_upcast_attn|rope_scaling_layers|rotary_dim|"
    r"scale_attn_weights|scale_depth|share_encoder_decoder_embeddings|share_expert_dim|"
    r"shared_intermediate_size|tie_encoder_decoder|topk_group|unk_index|use_attention_gate|"
    r"use_bidirectional_attention|use_cache|use_cache_kernel|use_cache_quantization|use_flash_attention|"
    r"use_flash_attn|use_lm_head|use_qkv_bias|vocab_size_per_layer_input|word_embed_proj_dim"
)
# ... and by form: norms, biases, dropout, starting values, factors, experts, further prediction heads. A name with
# one of `TELLING` is never passed by its form alone.
FORMS = re.compile(
    r"(.*_)?layer_?norms?(_.*)?|.*_(eps|bias|dropout|dropout_prob|drop|pdrop|layerdrop)|layerdrop|(.*_)?init(ializer)?_.*"
    r"|.*_(multipliers?|scale|factor|softcapping|in_fp32|by_inverse_layer_idx)|lm_head_.*|mtp_.*|.*experts?(_.*)?|moe_.*"
    r"|(freeze|vision|image|audio|video)_.*|_?attn_implementation.*|.*_token_(id|index)|quantization.*"
)
TELLING = re.compile(r"kv|key_value|window|sliding|latent|lora|cache|compress|cla_")
# What a linear, recurrent or convolutional layer keeps instead of keys and values: a state of one size for any text.
STATE = re.compile(
    r"(use_)?mamba.*|n_mamba_heads|ssm_.*|state_size|time_step.*|chunk_size|lru_.*|linear_(key|value|num|conv|head).*"
    r"|conv_.*|conv1d_width|linear_a_.*|linear_dt.*|linear_allow.*|block_(auto_adjust_ff_dim|dim|ff_dim|ffn_dim_multiplier|mlp_init_scale|multiple_of|norm_eps|out_init_scale"
    r"|use_.*)|hidden_mamba_act|expand|block_size"
)
# A configuration that is written inside another holds only what differs from its family's own values; these are the
# values that are needed and that the plain rule (a KV head a query head, hidden_size / num_attention_heads) misses.
_GEMMA2 = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"num_key_value_heads": 8},
    "cohere2": {"sliding_window": 4096},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "exaone4": {"sliding_window": 4096},
    "falcon": {"multi_query": True},
    "falcon_h1": {"num_key_value_heads": 8},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": _GEMMA2,
    "gemma3_text": {"num_hidden_layers": 26, "num_attention_heads": 8, **_GEMMA2},
    "gemma3n_text": {
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "global_head_dim": 512,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "glm4v_text": {"num_key_value_heads": 2},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"window_size": 256},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "internlm3": {"num_key_value_heads": 2},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    "ministral": {"num_key_value_heads": 8},
    "ministral3": {"num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "olmo3": {"sliding_window": 4096},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"max_window_layers": 28},
    "qwen2_5_vl_text": {"num_key_value_heads": 8, "max_window_layers": 80},
    "qwen2_moe": {"max_window_layers": 28},
    "qwen2_vl_text": {"num_key_value_heads": 8, "max_window_layers": 80},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "recurrent_gemma": {"attention_window_size": 2048},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
    "vaultgemma": _GEMMA2,
}


class Config:
    """The keys of one text model; what was asked for counts as understood, and is told in `read`."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.family: str | None = values.get("model_type")
        self.read: dict[str, Any] = {}  # key -> value, in the order of the questions
        self._values = values
        self._understood: set[str] = {"model_type"}

    def get(self, *names: str) -> Any:
        """Return the value under the first of some names for one thing; None if it is absent, null or false.

        What is absent is taken from the family's own values (`DEFAULTS`), where there are any.
        """
        self._understood.update(names)
        for name in names:
            if (value := self._values.get(name)) not in (None, False, [], {}, ""):
                self.read[name] = value
                return value
        for name in names:
            if name not in self._values and (value := DEFAULTS.get(self.family or "", {}).get(name)):
                self.read[f"{self.family}'s own {name}"] = value
                return value
        return None

    def says(self, name: str) -> bool:
        """Whether a key is there at all; null and false are answers too."""
        return name in self._values

    def count(self, *names: str) -> int:
        """Return a whole number above 0; `InputError` if none of the names has one."""
        value = self.get(*names)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = ", ".join(f"{name}={self._values[name]!r}" for name in names if name in self._values)
        raise self.refusal(f"{found or 'none of ' + ', '.join(names)}; need a whole number above 0")

    def pass_over(self, *names: str) -> None:
        """Take keys for understood: something that was read decides what they would."""
        self._understood.update(names)

    def check_nothing_is_left(self, *, states: bool) -> None:
        """Raise `InputError` for a key that may change the cache and was not read.

        `states`: which layers keep a state instead of keys and values is known, so its sizes do not matter.
        """
        for name, value in self._values.items():
            if name in self._understood or IRRELEVANT.fullmatch(name) or value in (None, False, 0, "", [], {}):
                continue
            if FORMS.fullmatch(name) and not TELLING.search(name):
                continue
            if SUSPECT.search(name) and not (states and STATE.fullmatch(name)):
                raise self.refusal(
                    f"{name} is {shortly(value)}, which may change the cache and is not understood",
                    hint="count the layers yourself: --layers, --kv-heads, --head-dim",
                )

    def refusal(self, text: str, hint: str | None = None) -> InputError:
        """Return the error for a configuration that does not say what is needed."""
        return InputError(f"{self.path}: {text}", code="model-config", hint=hint, path=str(self.path))


def shortly(value: Any) -> str:
    """Return a value as JSON-like text of bounded length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
