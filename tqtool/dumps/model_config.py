"""The cache of a model from its Hugging Face `config.json`: heads, vector lengths and window of each layer.

What is read is told (`ModelCache.read`), what may matter and is not understood is refused: "exact memory" is exact or
is not given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.codec.sizes import AttentionLayer
from tqtool.dumps.model_keys import Config, shortly
from tqtool.dumps.model_layers import WINDOW_KEYS, Kind, layer_kinds
from tqtool.errors import InputError
from tqtool.escapes import parser_reason

MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 1 << 14  # far beyond any model; a count is not believed further
TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class ModelCache:
    """What a model caches, and from which keys that is known."""

    layers: tuple[AttentionLayer, ...]  # those that keep keys and values, in order
    read: tuple[str, ...]  # "num_hidden_layers 61", ...


def read_model(path: Path) -> ModelCache:
    """Return what the layers of a model keep for a token; layers without keys and values are left out.

    Raises `InputError` ("not-found", "is-directory", "unreadable", "model-config").
    """
    config = Config(path, _text_part(_read(path), path))
    if config.get("is_encoder_decoder"):
        raise config.refusal("is_encoder_decoder: the cache of an encoder's output is not counted here")
    if other := config.get("cross_attention_layers") or config.get("add_cross_attention"):
        what = "keys and values of another input are not counted here"
        raise config.refusal(f"cross-attention layers ({shortly(other)}): {what}")
    count = _layer_count(config)
    query_heads = config.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    kinds, states = layer_kinds(config, count)
    kinds = _without_shared(config, kinds)
    windows = [_window(config, i, kind) for i, kind in enumerate(kinds)]
    layers = _latents(config, windows) or _heads_and_dims(config, kinds, windows, query_heads)
    config.check_nothing_is_left(states=states)
    kept = tuple(layer for layer, kind in zip(layers, kinds, strict=True) if kind != "none")
    if not kept:
        raise config.refusal("no layer of this model keeps keys and values")
    return ModelCache(kept, tuple(f"{name} {shortly(value)}" for name, value in config.read.items()))


def _text_part(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the part of a configuration that describes the model of the text."""
    config = config.get("thinker_config", config)
    parts = [name for name in TEXT_PARTS if isinstance(config, dict) and config.get(name) is not None]
    if len(parts) > 1:
        message = f"{path}: {' and '.join(parts)}: which is the model of the text?"
        raise InputError(message, code="model-config", path=str(path))
    text = config[parts[0]] if parts else config
    if not isinstance(text, dict):
        raise InputError(f"{path}: a model's config.json is an object", code="model-config", path=str(path))
    text = {"model_type": config.get("model_type"), **text}  # some parts leave it to the whole
    family = text["model_type"]
    if family is not None and not isinstance(family, str):
        raise InputError(f"{path}: model_type is {shortly(family)}, not a name", code="model-config", path=str(path))
    return text


def _layer_count(config: Config) -> int:
    if config.family == "nemotron_h" and isinstance(types := config.get("layers_block_type"), list):
        return len(types)  # written without a count
    count = config.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
    if config.family == "longcat_flash" and not config.says("num_hidden_layers"):
        count *= 2  # each of its layers attends twice
    if count > MAX_LAYERS:
        raise config.refusal(f"{count} layers; at most {MAX_LAYERS} are believed")
    return count


def _without_shared(config: Config, kinds: list[Kind]) -> list[Kind]:
    """Return the kinds with the last `num_kv_shared_layers` layers, which read what earlier ones keep, as "none"."""
    shared = config.get("num_kv_shared_layers")
    if shared is None:
        return kinds
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < len(kinds):
        raise config.refusal(f"num_kv_shared_layers is {shared!r}; need a number below the {len(kinds)} layers")
    first = len(kinds) - shared
    return [kind if i < first else "none" for i, kind in enumerate(kinds)]


def _window(config: Config, index: int, kind: Kind) -> int | None:
    if kind in ("full", "none"):
        return None
    window = config.get("attention_chunk_size") if kind == "chunk" else config.get(*WINDOW_KEYS)
    window = window or config.get(*WINDOW_KEYS, "attention_chunk_size")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise config.refusal(f"layer {index} is {kind!r}, but sliding_window is missing")
    return window


def _latents(config: Config, windows: list[int | None]) -> list[AttentionLayer] | None:
    """Return layers that keep one latent and one rotary key for all heads (MLA); None for other models.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1: (kv_lora_rank + qk_rope_head_dim) numbers a token and layer.
    """
    if config.get("kv_lora_rank") is None:
        return None
    config.pass_over("qk_nope_head_dim", "v_head_dim", "qk_head_dim", "head_dim", "num_key_value_heads")
    dim = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    return [AttentionLayer(1, dim, window, value_dim=0) for window in windows]


def _heads_and_dims(
    config: Config, kinds: list[Kind], windows: list[int | None], query_heads: int
) -> list[AttentionLayer]:
    count = len(kinds)
    heads = _per_layer(config, "num_key_value_heads", _kv_heads(config, query_heads), count)
    head_dim = config.get("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        head_dim = config.count("hidden_size", "n_embd", "d_model", "n_embed", "model_dim") // query_heads
    dims = _per_layer(config, "head_dim", head_dim, count)
    value_dim = config.get("v_head_dim")
    value_dims = dims if value_dim is None else _per_layer(config, "v_head_dim", value_dim, count)
    slide = [config.get(f"swa_{name}") for name in ("num_key_value_heads", "head_dim", "v_head_dim")]
    wide = config.get("global_head_dim")
    few = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    config.pass_over("num_global_key_value_heads", "swa_num_attention_heads")
    layers = []
    for i, kind in enumerate(kinds):
        layer = (heads[i], dims[i], value_dims[i])
        if kind in ("window", "chunk"):
            sliding_dim = slide[1] or layer[1]
            values = slide[2] or (layer[2] if value_dim is not None else sliding_dim)
            layer = (slide[0] or layer[0], sliding_dim, values)
        elif kind == "full":
            layer = (few or layer[0], wide or layer[1], wide or layer[2])
        numbers = _overridden(config, i, layer)
        if not all(type(number) is int and number > 0 for number in numbers) and kind != "none":
            raise config.refusal(f"layer {i}: heads, key and value length are {shortly(numbers)}; need numbers above 0")
        kv_heads, dim, values = numbers
        layers.append(AttentionLayer(kv_heads, dim, windows[i], None if values == dim else values))
    return layers


def _overridden(config: Config, index: int, layer: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return heads, key and value length of a layer as `per_layer_config` has them."""
    table = config.get("per_layer_config")
    if table is None:
        return layer
    if isinstance(table, dict) and all(isinstance(entry, dict) for entry in table.values()):
        found = [entry for name, entry in table.items() if name.isdecimal() and int(name) == index]
        entry: dict[str, Any] = found[0] if found else {}
        unknown = set(entry) - {"num_key_value_heads", "head_dim", "v_head_dim", "num_attention_heads"}
        if not unknown:
            dim = entry.get("head_dim", layer[1])
            values = entry.get("v_head_dim", dim if "head_dim" in entry else layer[2])
            return entry.get("num_key_value_heads", layer[0]), dim, values
        raise config.refusal(f"per_layer_config of layer {index} has {sorted(unknown)[0]!r}, which is not understood")
    raise config.refusal(f"per_layer_config is {shortly(table)}, not an object of objects")


def _kv_heads(config: Config, query_heads: int) -> Any:
    """Return the KV heads: a number, or a list with one for each layer."""
    if config.family in ("falcon", "RefinedWeb", "RefinedWebModel") or config.says("new_decoder_architecture"):
        if config.get("new_decoder_architecture") or config.family == "RefinedWeb":
            config.pass_over("multi_query")
            return config.get("num_kv_heads", "n_head_kv", "num_key_value_heads") or query_heads
        config.pass_over("num_kv_heads", "n_head_kv", "num_key_value_heads")
        return 1 if config.get("multi_query") else query_heads
    if config.get("multi_query"):
        config.pass_over("num_key_value_heads")
        return 1
    if config.get("multi_query_attention"):
        return config.count("multi_query_group_num")
    config.pass_over("multi_query_group_num")
    if isinstance(nested := config.get("attn_config"), dict):
        for name in ("sliding_window_size", "reuse_kv_layer_idx"):  # of later MPT models; -1 is none
            if nested.get(name) not in (None, -1):
                raise config.refusal(f"attn_config has {name!r}, which may change the cache and is not understood")
        if nested.get("attn_type") == "multiquery_attention":
            return 1
        return nested.get("kv_n_heads") or query_heads
    if config.get("use_cla"):
        raise config.refusal("use_cla: layers share keys and values, and which do is not understood")
    config.pass_over("cla_share_factor", "use_cla")
    return config.get("num_key_value_heads", "num_kv_heads", "n_kv_heads") or query_heads


def _per_layer(config: Config, name: str, value: Any, count: int) -> list[int]:
    values = value if isinstance(value, list) else [value] * count
    good = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values)
    if len(values) != count or not good:
        raise config.refusal(f"{name} is {value!r}; need a whole number, or one for each of {count} layers")
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES)
        config = json.loads(raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", code="not-found", path=str(path)) from None
    except IsADirectoryError:
        hint = f"try {path / 'config.json'}"
        raise InputError(f"{path}: is a directory", code="is-directory", hint=hint, path=str(path)) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", code="unreadable", path=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({parser_reason(error)})", code="model-config", path=str(path)) from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: a model's config.json is an object", code="model-config", path=str(path))
    return config
