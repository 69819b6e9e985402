"""The manifest beside a dump: what it tells of the model and of the attention of each layer (`docs/dump.md`).

What changes attention is understood or refused by name, never skipped: a dump measured as plain attention that is not
plain gives figures that look as good as right ones.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tqtool.dumps.inputs import is_file
from tqtool.dumps.names import MANIFEST, Kind
from tqtool.errors import InputError
from tqtool.escapes import parser_reason

SCHEMA = "tqtool.dump/1"
MAX_MANIFEST = 1 << 20
KINDS = ("full", "sliding", "chunked", "latent", "shared", "linear", "cross")
LATENT_PARTS = ("latent", "rope_key", "kv_b")  # the files of a latent layer, beside its queries
WITHOUT_CACHE = ("shared", "linear")  # keep no keys and values of their own: nothing to measure
ALIASES = {
    "query_heads": "heads",
    "q_tail": "query_tail",
    "attn_logit_softcapping": "softcap",
    "sliding_window": "window",
    "attention_chunk_size": "chunk",
}
# Names that other tools give to what changes attention: where one is told and is not among the known, it is refused.
_BEARS_ON_ATTENTION = re.compile(
    r".*soft_?cap.*|window(_size)?|.*(sliding|local|attention|attn)_window.*|.*chunk_size|.*sinks?|s_aux|.*alibi.*"
    r"|.*(attn|attention|score|position|relative).*bias.*|scale|.*(attn|attention|score|softmax|query|qk).*scal.*"
    r"|is_causal|.*mask|.*first_token.*|.*padding.*"
)


@dataclass(frozen=True, slots=True)
class AttentionClaims:
    """What a manifest tells of the attention of a layer, or of all layers; None where it is silent."""

    kind: str | None = None  # one of KINDS
    heads: int | None = None  # query heads
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    scaling: float | None = None  # of q.k
    window: int | None = None  # a query sees keys less than this many positions away
    chunk: int | None = None  # a query sees the keys of its own chunk of so many positions
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: tuple[float, ...] | None = None  # a learned logit of each query head
    alibi_slopes: tuple[float, ...] | None = None  # of each query head; less slope * distance is added to a score
    score_bias: str | None = None  # the name of another bias, which is not measured
    causal: bool | None = None
    first_token: int | None = None  # position of the first stored key

    def count(self, kind: Kind) -> int | None:
        """The number of heads of one side."""
        return self.heads if kind == "q" else self.kv_heads


CLAIMS = tuple(f.name for f in fields(AttentionClaims))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a `manifest.json` tells; None or empty where it is silent."""

    path: str | None = None
    model: str = ""
    model_layers: int | None = None
    model_context: int | None = None  # positions the model is made for
    origin: str = ""  # revision, architecture, text: what identifies the capture, for the notes
    tokens: int | None = None  # of the prompt
    query_tail: int | None = None  # queries are of the last so many positions
    all_queries: bool = False  # the manifest says outright that queries are of all positions
    valid_tokens: tuple[int, int] | None = None  # first and one past the last position that holds a token
    all_layers: AttentionClaims = field(default_factory=AttentionClaims)
    by_layer: Mapping[int, AttentionClaims] = field(default_factory=dict)
    latents: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # file names by LATENT_PARTS, of a layer

    def claims(self, layer: int | None) -> AttentionClaims:
        """Return what is told of a layer; what is told of all layers fills the gaps. None: of all layers."""
        own = self.by_layer.get(-1 if layer is None else layer)
        if own is None:
            return self.all_layers
        told = {name: getattr(own, name) for name in CLAIMS if getattr(own, name) is not None}
        return replace(self.all_layers, **told)


def find_manifest(folder: Path) -> Manifest:
    """Read the manifest in a folder, or in the one above; `InputError` with code `manifest` if it is damaged."""
    for place in (folder, folder.absolute().parent):
        path = place / MANIFEST
        if is_file(path):
            shown = folder / MANIFEST if place == folder else os.path.normpath(folder / ".." / MANIFEST)
            return read_manifest(path, str(shown))
    return Manifest()


def read_manifest(path: Path, shown: str) -> Manifest:
    """Read a manifest; `shown` is its name in messages. Raises `InputError` with code `manifest`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST + 1)
        if len(text) > MAX_MANIFEST:
            raise ValueError("longer than 1 MiB")
        found: Any = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{shown}: not readable as JSON: {parser_reason(error)}", code="manifest", path=shown
        ) from error
    try:
        if not isinstance(found, dict):
            raise _RefusedError("is not a JSON object")
        return _manifest(found, shown)
    except _RefusedError as refused:
        raise InputError(f"{shown}: {refused}", code="manifest", hint=refused.hint, path=shown) from None


class _RefusedError(Exception):
    """What is wrong with a manifest, without its name."""

    def __init__(self, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint


def _manifest(found: dict[str, Any], shown: str) -> Manifest:
    schema = found.get("schema")
    if schema not in (None, SCHEMA):
        raise _RefusedError(f"schema is {schema!r}, this tqtool reads {SCHEMA!r}", "was it written by a newer tqtool?")
    known = {"schema", "tokens", "query_tail", "valid_tokens", *CLAIMS, *ALIASES}
    for key, value in found.items():
        if key not in known and value not in (None, False) and _BEARS_ON_ATTENTION.fullmatch(key.lower()):
            raise _RefusedError(
                f"{key} may change attention and is not understood",
                f"say it as one of {', '.join(CLAIMS)}, of each layer if layers differ; or leave it out",
            )
    model = found.get("model")
    facts = model if isinstance(model, dict) else {"name": model, "layers": found.get("layers_in_model")}
    layers = found.get("layers")
    described = [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
    if schema is not None and (not isinstance(layers, list) or len(described) < len(layers)):
        raise _RefusedError("layers is not a list of objects", f"{SCHEMA} describes every layer; see docs/dump.md")
    by_layer: dict[int, AttentionClaims] = {}
    latents: dict[int, dict[str, str]] = {}
    for place, layer in enumerate(described):
        number = _count(layer, "layer", f"layers[{place}].", least=0)
        if number is None or number in by_layer:
            raise _RefusedError(f"layers[{place}].layer is {layer.get('layer')!r}, not a number of its own")
        unknown = next((key for key in layer if key not in {"layer", "files", *CLAIMS, *ALIASES}), None)
        if unknown is not None:
            raise _RefusedError(
                f"layers[{place}].{unknown} is not understood", f"a layer has {', '.join(CLAIMS)}, files"
            )
        by_layer[number] = _claims(layer, f"layers[{place}].")
        if by_layer[number].kind == "latent" and layer.get("files"):
            latents[number] = _latent_files(layer["files"], f"layers[{place}].")
    return Manifest(
        path=shown,
        model=str(facts.get("name") or ""),
        model_layers=_count(facts, "layers", "model."),
        model_context=_count(facts, "context", "model."),
        origin=_origin(found, facts),
        tokens=_count(found, "tokens", ""),
        query_tail=_count(found, "query_tail", ""),
        all_queries=schema is not None and "query_tail" in found and found["query_tail"] is None,
        valid_tokens=_range(found, "valid_tokens"),
        all_layers=_claims(found, ""),
        by_layer=by_layer,
        latents=latents,
    )


def _origin(found: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    parts = [(key, model.get(key)) for key in ("architecture", "revision")]
    parts.append(("text", found.get("text_sha256")))
    return ", ".join(f"{key} {value}" for key, value in parts if isinstance(value, str) and value)


def _claims(facts: Mapping[str, Any], where: str) -> AttentionClaims:
    kind = facts.get("kind")
    if kind is not None and kind not in KINDS:
        raise _RefusedError(f"{where}kind is {kind!r}, not one of {', '.join(KINDS)}")
    causal, bias = facts.get("causal"), facts.get("score_bias")
    if causal is not None and not isinstance(causal, bool):
        raise _RefusedError(f"{where}causal is {causal!r}, not true or false")
    return AttentionClaims(
        kind=kind,
        heads=_count(facts, "heads", where),
        kv_heads=_count(facts, "kv_heads", where),
        key_dim=_count(facts, "key_dim", where),
        value_dim=_count(facts, "value_dim", where),
        scaling=_positive(facts, "scaling", where),
        window=_count(facts, "window", where),
        chunk=_count(facts, "chunk", where),
        softcap=_positive(facts, "softcap", where),
        sinks=_numbers(facts, "sinks", where),
        alibi_slopes=_numbers(facts, "alibi_slopes", where),
        score_bias=str(bias) if bias else None,
        causal=causal,
        first_token=_count(facts, "first_token", where, least=0),
    )


def _latent_files(files: Any, where: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for part in LATENT_PARTS:
        name = files.get(part) if isinstance(files, dict) else None
        if isinstance(name, str) and name and Path(name).name == name:
            names[part] = name
        else:
            raise _RefusedError(f"{where}files.{part} is {name!r}, not the name of a file beside the manifest")
    return names


def _value(facts: Mapping[str, Any], key: str) -> tuple[Any, str]:
    """Return the value of a key, or of another name for it, and the name that was used."""
    names = [key, *(alias for alias, name in ALIASES.items() if name == key)]
    told = {name: facts[name] for name in names if facts.get(name) is not None}
    if len(set(map(repr, told.values()))) > 1:
        raise _RefusedError(f"{' and '.join(told)} contradict each other: {', '.join(map(repr, told.values()))}")
    name = next(iter(told), key)
    return told.get(name), name


def _count(facts: Mapping[str, Any], key: str, where: str, *, least: int = 1) -> int | None:
    value, name = _value(facts, key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise _RefusedError(f"{where}{name} is {value!r}, not a count")
    return value


def _positive(facts: Mapping[str, Any], key: str, where: str) -> float | None:
    value, name = _value(facts, key)
    if value is None:
        return None
    if not (_is_number(value) and 0 < value < math.inf):
        raise _RefusedError(f"{where}{name} is {value!r}, not above 0")
    return float(value)


def _numbers(facts: Mapping[str, Any], key: str, where: str) -> tuple[float, ...] | None:
    value, name = _value(facts, key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(_is_number(each) and math.isfinite(each) for each in value):
        raise _RefusedError(f"{where}{name} is not a list of finite numbers, one for each query head")
    return tuple(map(float, value))


def _range(facts: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = facts.get(key)
    if value is None:
        return None
    good = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not good or not 0 <= value[0] < value[1]:
        raise _RefusedError(f"{key} is {value!r}, not [start, stop]")
    return value[0], value[1]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
