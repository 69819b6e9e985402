"""A cache to a file and back: a prompt is read once, its cache loaded by every process that goes on from it.

The file is a container (docs/container.md): codes as they lie in memory, and what layers keep exactly.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from tqtool.codec.sizes import KVConfig
from tqtool.container.encoded import Contents, EncodedTensor, load_encoded, save_encoded
from tqtool.container.manifest import TensorKind
from tqtool.dtypes import AnyArray
from tqtool.errors import InputError, TqError, UsageError
from tqtool.files import FilePath
from tqtool.hf.cache import Coding, TurboQuantLayer, coded_cache
from tqtool.hf.sides import GrowingSide

SCHEMA = "tqtool.cache/1"
KEY = "tqtool.cache"  # of the container's metadata
TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
CODES, EXACT, EMPTY = "codes", "exact", "empty"  # what a layer holds
SIDES: tuple[tuple[str, TensorKind], ...] = (("keys", "k"), ("values", "v"))


def save_cache(cache: DynamicCache, path: FilePath, *, force: bool = False) -> None:
    """Write a cache of `turboquant_cache` that holds tokens.

    Raises: `UsageError` for a cache without codes or with layers whose state has no form in the file, `OutputError`.
    """
    coded = [layer for layer in cache.layers if isinstance(layer, TurboQuantLayer)]
    if not coded or coded[0].sides is None:
        raise UsageError("the cache holds no codes: run a prompt with a cache of turboquant_cache first", code="usage")
    tensors: dict[str, EncodedTensor] = {}
    copied: dict[str, tuple[str, AnyArray]] = {}
    layers: list[dict[str, Any]] = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, TurboQuantLayer) and layer.sides is not None:
            for side, (name, kind) in zip(layer.sides, SIDES, strict=True):
                slots, rows = side.exact
                tensors[f"layer{i}.{name}"] = EncodedTensor(side.encoded, kind, TYPES[layer.dtype])
                copied[f"layer{i}.{name}.exact"] = ("f32", rows)
                copied[f"layer{i}.{name}.slots"] = ("i64", slots)
            layers.append({"kind": CODES, "length": layer.get_seq_length()})
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized:
            for name, _ in SIDES:
                copied[f"layer{i}.{name}"] = _values(getattr(layer, name))
            layers.append({"kind": EXACT, "length": layer.get_seq_length()})
        elif type(layer) is DummyLayer or not layer.is_initialized:
            layers.append({"kind": EMPTY, "length": 0})
        else:
            raise UsageError(f"layer {i} is a {type(layer).__name__}, whose state cannot be saved", code="usage")
    first = coded[0]
    coding = asdict(first.coding) | {"kv": str(first.coding.kv)}
    facts = {"schema": SCHEMA, "model": first.config.model_type, "coding": coding, "layers": layers}
    save_encoded(path, Contents(tensors, copied, {KEY: json.dumps(facts)}), force=force)


def load_cache(path: FilePath, config: Any, *, device: str | torch.device = "cpu") -> DynamicCache:
    """Return the cache that `save_cache` wrote, for a model of the same configuration on that device.

    Raises: `InputError` ("not-found", "not-container"; "shape-mismatch" where the model is another),
    `IntegrityError` for damage.
    """
    contents = load_encoded(path)
    try:
        facts = json.loads(contents.metadata[KEY])
        if facts["schema"] != SCHEMA:
            raise ValueError(f"schema {facts['schema']!r}, need {SCHEMA!r}")
        coding = Coding(**facts["coding"] | {"kv": KVConfig.parse(facts["coding"]["kv"])})
        layers = [(str(each["kind"]), int(each["length"])) for each in facts["layers"]]
        model = str(facts["model"])
    except (KeyError, TypeError, ValueError, TqError) as error:
        text = f"{path}: holds no cache that this version can read: {' '.join(str(error).split())[:120]}"
        raise InputError(text, code="not-container", hint="save_cache writes one", path=str(path)) from error
    plain = DynamicCache(config=config).layers
    found = config.get_text_config(decoder=True).model_type
    if (found, len(plain)) != (model, len(layers)):
        text = f"{path}: the cache of a {model} of {len(layers)} layers, the model is a {found} of {len(plain)}"
        raise InputError(text, code="shape-mismatch", path=str(path))
    protect = tuple(i for i, (kind, _) in enumerate(layers) if kind != CODES and type(plain[i]) is DynamicLayer)
    cache = coded_cache(config, coding, protect)
    for i, (layer, (kind, length)) in enumerate(zip(cache.layers, layers, strict=True)):
        if isinstance(layer, TurboQuantLayer) != (kind == CODES):
            text = f"{path}: layer {i} holds {kind} tokens, the model's is a {type(plain[i]).__name__}"
            raise InputError(text, code="shape-mismatch", path=str(path))
        if isinstance(layer, TurboQuantLayer):
            key, value = (_filled(layer, contents, f"layer{i}.{name}") for name, _ in SIDES)
            layer.sides, layer.is_initialized = (key, value), True
        elif kind == EXACT:
            keys, values = (_tensor(*contents.copied[f"layer{i}.{name}"]).to(device) for name, _ in SIDES)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length
    return cache


def _filled(layer: TurboQuantLayer, contents: Contents, name: str) -> GrowingSide:
    encoded = contents.tensors[name].encoded
    batch, _, kv_heads = encoded.lead
    coding = layer.coding
    side = GrowingSide(encoded.spec, batch, kv_heads, sinks=coding.sink_tokens, window=coding.residual_window)
    rows, slots = (contents.copied[f"{name}.{part}"][1] for part in ("exact", "slots"))
    side.append(encoded, slots.astype(np.int64), rows.astype(np.float32))
    return side


def _values(x: torch.Tensor) -> tuple[str, AnyArray]:
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return "bf16", x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return TYPES[x.dtype], x.numpy()


def _tensor(dtype: str, values: AnyArray) -> torch.Tensor:
    if dtype == "bf16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
