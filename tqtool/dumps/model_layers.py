"""Which layers of a model keep keys and values, and which of those for the newest tokens only.

A configuration tells this in one of many ways: a list of types, a pattern, a period, or nothing but a window, where
the family's own rule holds. A window without a known rule is refused: read as "every layer" it would make the cache
of a model whose layers alternate too small.
"""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

from tqtool.dumps.model_keys import Config, shortly

Kind = Literal["full", "window", "chunk", "none"]  # "none": a state, or nothing, instead of keys and values
TYPES: dict[str, Kind] = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "hybrid"), "full"),
    **dict.fromkeys(("sliding_attention", "local_attention", "sliding_window", "local", "hybrid_sliding"), "window"),
    "chunked_attention": "chunk",
    **dict.fromkeys(
        ("mamba", "mamba2", "linear_attention", "recurrent", "rwkv", "conv", "mlp", "moe", "ssm", "gated_deltanet"),
        "none",
    ),
}
WINDOW_KEYS = ("sliding_window", "attention_window_size", "window_size", "sliding_window_size")
PERIOD_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch", "global_attn_every_n_layers")
PATTERN_KEYS = (*PERIOD_KEYS, "use_sliding_window", "max_window_layers", "order_of_interleaved_layers")
PERIODS = ("full_attention_interval", "attn_layer_period", "attn_layer_offset")
HYBRID_KEYS = (
    *PERIODS,
    "hybrid_override_pattern",
    "block_types",
    "attn_layer_indices",
    "full_attn_idxs",
    "attn_type_list",
)
# One letter a layer, repeated: L slides, G sees all. Of families that leave it to their code.
CYCLES = {
    "afmoe": "LLLG",
    "cohere2": "LLLG",
    "cwm": "GLLL",
    "exaone4": "LLLG",
    "exaone_moe": "LLLG",
    "gemma2": "LG",
    "gemma3_text": "LLLLLG",
    "gemma3n_text": "LLLLG",
    "gemma4_text": "LLLLLG",
    "gpt_oss": "LG",
    "granite_swa": "GLLL",
    "granitemoe_swa": "GLLL",
    "olmo3": "LLLG",
    "vaultgemma": "LG",
}
EVERYWHERE = {  # families whose layers all slide when there is a window
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
}
FROM_A_LAYER_ON = {"dots1", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3"}
UNLESS_ASKED = FROM_A_LAYER_ON - {"dots1"} | {"qwen2_moe", "qwen3_moe", "smollm3"}  # use_sliding_window is false


def layer_kinds(config: Config, count: int) -> tuple[list[Kind], bool]:
    """Return the kind of each layer, and whether the configuration told which keep a state.

    Raises `InputError` where several readings are left.
    """
    kinds, told = _kinds(config, count)
    if config.family == "gemma4_text":
        kinds[-1] = "full"  # its code makes the last layer see all
    return kinds, told


def _kinds(config: Config, count: int) -> tuple[list[Kind], bool]:
    kinds = _told(config, count)
    if kinds is not None:
        config.pass_over(*WINDOW_KEYS, *PATTERN_KEYS, *HYBRID_KEYS, "attention_chunk_size", "attention_types")
        return kinds, True
    attends = _attending(config, count)
    slides = _windows(config, count)
    if attends is None:
        return slides, config.family == "falcon_h1"  # each of its layers keeps both
    return [kind if attend else "none" for kind, attend in zip(slides, attends, strict=True)], True


def _told(config: Config, count: int) -> list[Kind] | None:
    """Return the kinds from a list of types, one a layer."""
    types = config.get("layer_types", "layers_block_type", "attention_layers")
    if types is None and (nested := config.get("attention_types")):  # [[["global", "local"], 12]]
        try:
            types = [kind for kinds, times in nested for kind in kinds * times]
        except (TypeError, ValueError):
            raise config.refusal(f"attention_types is {shortly(nested)}, not lists of types and counts") from None
    if types is None:
        return None
    unknown = [kind for kind in types if kind not in TYPES] if isinstance(types, list) else [types]
    if unknown or len(types) != count:
        what = f"layer type {unknown[0]!r} is not known" if unknown else f"{len(types)} layer types for {count} layers"
        raise config.refusal(what)
    return [TYPES[kind] for kind in types]


def _attending(config: Config, count: int) -> list[bool] | None:
    """Return which layers of a hybrid model attend; None where nothing says that it is one."""
    if pattern := config.get("hybrid_override_pattern"):
        if not isinstance(pattern, str) or len(pattern) != count or not set(pattern) <= set("M*-E"):
            raise config.refusal(
                f"hybrid_override_pattern is {shortly(pattern)}; need one of M * - E for each of {count} layers"
            )
        return [letter == "*" for letter in pattern]
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset") or 0
        if not _whole(period) or not _whole(offset):
            raise config.refusal(f"attn_layer_period is {period!r}, attn_layer_offset {offset!r}; need whole numbers")
        return [i % period == offset for i in range(count)]
    if interval := config.get("full_attention_interval"):
        if not _whole(interval):
            raise config.refusal(f"full_attention_interval is {interval!r}; need a whole number")
        return [(i + 1) % interval == 0 for i in range(count)]
    indices = config.get("attn_layer_indices", "full_attn_idxs")
    if indices is not None:
        if not isinstance(indices, list) or not all(_whole(i) and i < count for i in indices):
            raise config.refusal(f"attention layers are {shortly(indices)}; need numbers below {count}")
        return [i in indices for i in range(count)]
    if flags := config.get("attn_type_list"):  # MiniMax-01: 1 attends, 0 is linear
        if not isinstance(flags, list) or len(flags) != count or not set(flags) <= {0, 1}:
            raise config.refusal(f"attn_type_list is {shortly(flags)}; need 0 or 1 for each of {count} layers")
        return [flag == 1 for flag in flags]
    if config.family == "recurrent_gemma":
        blocks = config.get("block_types") or ["recurrent", "recurrent", "attention"]
        if not isinstance(blocks, list) or not set(map(str, blocks)) <= {"recurrent", "attention"}:
            raise config.refusal(f"block_types is {shortly(blocks)}; need recurrent and attention")
        return [blocks[i % len(blocks)] == "attention" for i in range(count)]
    return None


def _windows(config: Config, count: int) -> list[Kind]:
    """Return which layers slide, from the window, a pattern beside it and the family's rule."""
    if config.says("attention_chunk_size") or config.family == "llama4_text":
        return _chunked(config, count)
    asked = config.get("use_sliding_window")
    window = config.get(*WINDOW_KEYS)
    period = config.get(*PERIOD_KEYS)
    first = config.get("max_window_layers")
    refused = config.says("use_sliding_window") or config.family in UNLESS_ASKED
    if window is None or (refused and not asked):
        config.pass_over("order_of_interleaved_layers")
        return ["full"] * count
    if period is None and config.family in {*FROM_A_LAYER_ON, None} and (first is not None or config.family):
        return ["full" if first is None or i < first else "window" for i in range(count)]
    if period is None and config.family == "qwen2_moe":
        return ["window" if i % 2 == 0 and i < (first or 0) else "full" for i in range(count)]
    if period is None and (config.family is None or config.family in EVERYWHERE):
        return ["window"] * count
    if period is None and config.family == "recurrent_gemma":
        return ["window"] * count
    cycle = _cycle(config, period)
    return ["window" if cycle[i % len(cycle)] == "L" else "full" for i in range(count)]


def _cycle(config: Config, period: int | str | None) -> str:
    if isinstance(period, str) and period and set(period) <= set("LG"):
        return period
    own = CYCLES.get(config.family or "", "")
    if _whole(period):
        order = config.get("order_of_interleaved_layers")
        if order not in (None, "local_attn_first"):
            raise config.refusal(f"order_of_interleaved_layers is {order!r}, which is not understood")
        return "G" + "L" * (period - 1) if own.startswith("G") else "L" * (period - 1) + "G"
    if period is None and own:
        return own
    if period is not None:
        raise config.refusal(f"sliding_window_pattern is {shortly(period)}; need a whole number, or letters L and G")
    window = next(name for name in WINDOW_KEYS if config.get(name))
    raise config.refusal(
        f"{window} is {config.get(window)!r}, and which layers of {config.family!r} slide is not known",
        hint='add "layer_types" to it: full_attention or sliding_attention for each layer',
    )


def _chunked(config: Config, count: int) -> list[Kind]:
    """Return the kinds of Llama 4: layers with rotary positions see their chunk, the others all."""
    if config.get("attention_chunk_size") is None:
        return ["full"] * count
    flags = config.get("no_rope_layers")  # 1: with rotary positions
    if flags is None:
        every = config.get("no_rope_layer_interval") or 4
        flags = [int((i + 1) % every != 0) for i in range(count)] if _whole(every) else None
    if not isinstance(flags, list) or len(flags) != count or not set(map(str, flags)) <= {"0", "1"}:
        raise config.refusal(f"no_rope_layers is {shortly(flags)}; need 0 or 1 for each of {count} layers")
    return ["chunk" if flag else "full" for flag in flags]


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
