"""Attention layers of a model from its Hugging Face `config.json`: KV heads, head_dim and window of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqtool.codec.sizes import AttentionLayer
from tqtool.errors import InputError
from tqtool.escapes import parser_reason

WITH_CACHE = {"full_attention", "attention", "global", "global_attention"}
WINDOWED = {"sliding_attention", "local_attention", "chunked_attention", "sliding_window", "local"}
WITHOUT_CACHE = {
    "mamba",
    "mamba2",
    "linear_attention",
    "recurrent",
    "rwkv",
    "conv",
    "mlp",
    "moe",
    "ssm",
    "gated_deltanet",
}
MAX_CONFIG_BYTES = 16 << 20


def attention_layers(path: Path) -> tuple[AttentionLayer, ...]:
    """Return the layers that keep keys and values, in order. Layers without KV are left out.

    Understands `layer_types` or `layers_block_type` (hybrid models), `sliding_window` with `use_sliding_window`,
    `sliding_window_pattern`, `head_dim` or hidden_size / num_attention_heads, lists where layers differ, and a
    `text_config` inside. Raises `InputError` ("not-found", "is-directory", "unreadable", "model-config").
    """
    config = _read(path)
    config = config.get("text_config", config)
    count = _number(config, path, "num_hidden_layers", "n_layer", "num_layers")
    query_heads = _number(config, path, "num_attention_heads", "n_head")
    kv_heads = _per_layer(config.get("num_key_value_heads") or query_heads, count, path, "num_key_value_heads")
    head_dim = config.get("head_dim") or _number(config, path, "hidden_size", "n_embd") // query_heads
    head_dims = _per_layer(head_dim, count, path, "head_dim")
    types = _layer_types(config, count, path)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    layers = []
    for i, kind in enumerate(types):
        if kind in WITHOUT_CACHE:
            continue
        if kind in WINDOWED and not isinstance(window, int):
            raise InputError(f"{path}: layer {i} is {kind!r}, but sliding_window is missing", code="model-config")
        layers.append(AttentionLayer(kv_heads[i], head_dims[i], window if kind in WINDOWED else None))
    if not layers:
        raise InputError(f"{path}: no layer of this model keeps keys and values", code="model-config")
    return tuple(layers)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES)
        config = json.loads(raw)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", code="not-found", path=str(path)) from None
    except IsADirectoryError:
        hint = f"try {path / 'config.json'}"
        raise InputError(f"{path}: is a directory", code="is-directory", hint=hint, path=str(path)) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", code="unreadable", path=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({parser_reason(error)})", code="model-config", path=str(path)) from None
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise InputError(f"{path}: a model's config.json is an object", code="model-config", path=str(path))
    return config


def _number(config: dict[str, Any], path: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    found = ", ".join(f"{name}={config[name]!r}" for name in names if name in config)
    raise InputError(
        f"{path}: {found or 'none of ' + ', '.join(names)}; need a whole number above 0",
        code="model-config",
        path=str(path),
    )


def _per_layer(value: Any, count: int, path: Path, name: str) -> list[int]:
    values = value if isinstance(value, list) else [value] * count
    good = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values)
    if len(values) != count or not good:
        raise InputError(
            f"{path}: {name} is {value!r}; need a whole number, or one for each of {count} layers",
            code="model-config",
            path=str(path),
        )
    return values


def _layer_types(config: dict[str, Any], count: int, path: Path) -> list[str]:
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None:
        return _uniform_types(config, count)
    known = WITH_CACHE | WINDOWED | WITHOUT_CACHE
    unknown = [kind for kind in types if kind not in known] if isinstance(types, list) else [types]
    if unknown or len(types) != count:
        what = f"layer type {unknown[0]!r} is not known" if unknown else f"{len(types)} layer types for {count} layers"
        raise InputError(f"{path}: {what}", code="model-config", path=str(path))
    return list(types)


def _uniform_types(config: dict[str, Any], count: int) -> list[str]:
    slides = isinstance(config.get("sliding_window"), int) and config.get("use_sliding_window", True)
    if not slides:
        return ["full_attention"] * count
    if pattern := config.get("sliding_window_pattern"):  # every pattern-th layer is global
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    # Qwen2 slides only from max_window_layers on; models without that key slide everywhere.
    first = config.get("max_window_layers", 0)
    return ["full_attention" if i < first else "sliding_attention" for i in range(count)]
