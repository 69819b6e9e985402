"""Tiny random models of many architectures, and a tokenizer that knows every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
