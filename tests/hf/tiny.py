"""Tiny random models of many architectures, and a tokenizer that knows every byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tqtool.hf.models import LoadedModel

# Tiny models gain nothing from threads, and two test workers with two threads each fight for two cores.
torch.set_num_threads(1)

# Words enough for more than 300 tokens of one byte each; no two of its lines are alike.
TEXT = "".join(f"{i}: the quick brown fox jumps over {i * i} lazy dogs;\n" for i in range(40))
VOCABULARY = 257

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # attention far from uniform, so that a wrong scale or soft cap shows
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte and an end-of-text token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny_model(config: str, **settings: Any) -> Any:
    """Return a random model of a configuration class: the same weights every time, in evaluation mode."""
    made = getattr(transformers, config)(**COMMON | settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


def save_tiny(folder: Path, config: str = "LlamaConfig", **settings: Any) -> Path:
    """Write a tiny model and its tokenizer as a folder."""
    tiny_model(config, **settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Architecture:
    """A tiny configuration, and what each of its layers is: kind, and window, chunk, soft cap or sinks."""

    config: str
    kinds: str  # a letter a layer: f full, s sliding, c chunked, m latent, h shared, l linear
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Llama of LlamaConfig."""
        return self.config.removesuffix("Config").removesuffix("Text")


LIMIT = 48  # of every window and chunk
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 32}
SLIDING = {"sliding_window": LIMIT}
ARCHITECTURES = (
    Architecture("LlamaConfig", "fff"),
    Architecture("Qwen2Config", "fff"),
    Architecture("Qwen3Config", "fff", {"head_dim": 16}),
    Architecture("Qwen3MoeConfig", "fff", MOE | {"head_dim": 16}),
    Architecture("MistralConfig", "sss", SLIDING),
    Architecture("MixtralConfig", "sss", MOE | SLIDING),
    Architecture("GemmaConfig", "fff", {"head_dim": 16}),
    Architecture("Gemma2Config", "sfs", SLIDING | {"head_dim": 16, "attn_logit_softcapping": 3.0}),
    Architecture(
        "Gemma3TextConfig",
        "sfs",
        SLIDING | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    Architecture("GptOssConfig", "sfs", MOE | SLIDING | {"head_dim": 16}),
    Architecture(
        "Llama4TextConfig",
        "cccf",
        {
            "attention_chunk_size": LIMIT,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "num_hidden_layers": 4,
        },
    ),
    Architecture("DeepseekV3Config", "mmm", MLA | MOE),
    Architecture("DeepseekV2Config", "mmm", MLA | MOE),
    Architecture(
        "Qwen3NextConfig",
        "llf",
        MOE
        | {
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 32,
        },
    ),
    Architecture(
        "JambaConfig",
        "lflf",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "num_experts": 2,
        },
    ),
    Architecture(
        "Lfm2Config", "lfl", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    ),
    Architecture("PhiConfig", "fff"),
    Architecture("Phi3Config", "sss", SLIDING),
    Architecture("GPTNeoXConfig", "fff"),
    Architecture("GPT2Config", "fff", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    Architecture("OPTConfig", "fff", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Architecture("GPTJConfig", "fff", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8}),
    Architecture("OlmoConfig", "fff"),
    Architecture("Olmo2Config", "fff"),
    Architecture("Olmo3Config", "sss", SLIDING),
    Architecture("Starcoder2Config", "sss", SLIDING),
    Architecture("Glm4Config", "fff", {"head_dim": 16}),
    Architecture("CohereConfig", "fff"),
    Architecture("Cohere2Config", "sssf", SLIDING | {"num_hidden_layers": 4, "head_dim": 16}),
    Architecture("GraniteConfig", "fff", {"attention_multiplier": 0.0156}),
    Architecture("SmolLM3Config", "fff", {"no_rope_layer_interval": 2}),
    Architecture("StableLmConfig", "fff"),
    Architecture("NemotronConfig", "fff"),
    Architecture("PersimmonConfig", "fff"),
    Architecture("Ernie4_5Config", "fff", {"head_dim": 16}),
    Architecture("HeliumConfig", "fff", {"head_dim": 16}),
    Architecture(
        "Exaone4Config", "sssf", SLIDING | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window_pattern": 4}
    ),
    Architecture("ApertusConfig", "fff"),
    Architecture(
        "Gemma3nTextConfig",
        "sfshh",
        SLIDING
        | {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 5,
        },
    ),
    Architecture("BambaConfig", "lfl", MAMBA | {"attn_layer_indices": [1]}),
    Architecture("FalconH1Config", "fff", MAMBA | {"mamba_d_ssm": 128}),
)
# Refused: not on the attention interface, no attention, and a cache that holds other values than attention reads.
REFUSED = {
    "FalconConfig": "FalconForCausalLM does not use the attention interface of transformers",
    "BloomConfig": "BloomForCausalLM does not use the attention interface of transformers",
    "MptConfig": "MptForCausalLM does not use the attention interface of transformers",
    "MambaConfig": "no causal attention was heard in MambaForCausalLM",
    "DiffLlamaConfig": "layer 0 caches other values than its attention reads: (2, 4, 16) and (2, 4, 16)",
}


def loaded_tiny(config: str, **settings: Any) -> LoadedModel:
    """Return a tiny model as if it had been loaded."""
    model = tiny_model(config, **settings)
    return LoadedModel(model, byte_tokenizer(), f"tiny {config}", None, type(model).__name__)
