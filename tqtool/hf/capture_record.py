"""What a model's attention reads, written to disk while the prompt runs in chunks.

The keys and values of a layer are those it adds to its cache, as the scores see them (after the rotary embedding).
Latent attention caches something else than its attention reads: there the cache is written, and what expands it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tqtool.errors import BugError, InputError, UsageError
from tqtool.hf.capture_facts import UNEXPLAINED, LayerFacts, declared_limits, explained, facts_of, limits_of
from tqtool.hf.capture_files import ArrayFile, FileFormat, StoredType
from tqtool.hf.models import LoadedModel
from tqtool.hf.steps import new_cache, step
from tqtool.hf.taps import AttentionCall, check_interface, listening, reach

SURVEYED = 4  # tokens that show the shapes of every layer
PROBED = 32  # tokens that show whether a model runs in chunks
CHUNK_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5}  # of logits, relative; 1.5e-7 is usual
COARSE_CHUNK_ROUNDING = 0.03  # in 16 bits
FILE_WORDS = {"rope_key": "rope"}  # a name that ends in `key` would be the keys of the layer
STORED = {torch.float16: "f16", torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class CaptureParams:
    """How much is captured, and how it is stored."""

    queries: int = 256  # of the last positions
    layers: tuple[int, ...] | None = None  # None: all that have keys and values of their own
    chunk: int = 512  # tokens that run through the model at once
    dtype: Literal["keep", "f16", "f32"] = "keep"  # keep: as the model computes them
    format: FileFormat | None = None  # None: npy, which has no bfloat16; then safetensors


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer of a dump to come: what the survey saw, and its files by what they hold."""

    facts: LayerFacts
    files: dict[str, ArrayFile] = field(default_factory=dict)  # k, v, q; of a latent layer latent, rope_key, kv_b, q


def survey(loaded: LoadedModel) -> tuple[LayerFacts, ...]:
    """Return what every layer is, from a few tokens run through the model; rules that need more are not seen yet.

    Raises: `InputError`, code `model`, for a model that cannot be listened to or has no attention with a cache.
    """
    check_interface(loaded)
    calls: dict[int, AttentionCall] = {}

    def hear(call: AttentionCall) -> None:
        if calls.setdefault(call.layer, call).module is not call.module:
            text = f"{loaded.name}: two attention modules call themselves layer {call.layer}"
            raise InputError(text, code="model", path=loaded.name)

    cache = new_cache(loaded)
    ids = torch.ones((1, SURVEYED), dtype=torch.long)
    with torch.inference_mode(), listening(loaded, hear):
        step(loaded, ids, cache, logits=1)
    if not calls:
        text = f"{loaded.name}: no causal attention was heard in {loaded.architecture}"
        raise InputError(text, code="model", path=loaded.name)
    count = max(loaded.layers, max(calls) + 1)
    return tuple(_surveyed(loaded, layer, calls.get(layer), cache) for layer in range(count))


def _surveyed(loaded: LoadedModel, layer: int, call: AttentionCall | None, cache: Any) -> LayerFacts:
    if call is None:
        types = getattr(loaded.text_config, "layer_types", None) or ()
        return LayerFacts(layer, "full" if types[layer : layer + 1] == ["full_attention"] else "linear")
    window, chunk = declared_limits(call, loaded.text_config)
    facts = facts_of(call, "sliding" if window else "chunked" if chunk else "full", (window, chunk))
    cached = _cached(cache, layer)
    if cached is None or getattr(call.module, "is_kv_shared_layer", False):
        return replace(facts, kind="shared")
    pairs = (("keys", cached[0], call.key), ("values", cached[1], call.value))
    other = [(side, mine, read) for side, mine, read in pairs if not _same(mine, read)]
    if not other:
        return facts
    if hasattr(call.module, "kv_b_proj"):
        return replace(facts, kind="latent", kv_heads=1)
    side, mine, read = other[0]
    shapes = f"{tuple(mine.shape[1:])} and {tuple(read.shape[1:])}"
    text = f"{loaded.name}: layer {layer} caches other {side} than its attention reads: {shapes}"
    raise InputError(text, code="model", path=loaded.name)


def _cached(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what a layer keeps in the cache, None where it keeps nothing of its own."""
    own = cache.layers[layer] if layer < len(cache.layers) else None
    keys, values = getattr(own, "keys", None), getattr(own, "values", None)
    return None if keys is None or not keys.numel() else (keys, values)


def plan_of(
    loaded: LoadedModel, surveyed: Sequence[LayerFacts], tokens: int, params: CaptureParams
) -> tuple[LayerPlan, ...]:
    """Return the files of every layer of a text of so many tokens.

    Raises: `InputError`, code `model`, if nothing is left to capture.
    """
    dtype = stored_type(loaded, params)
    form: FileFormat = params.format or ("safetensors" if dtype == "bf16" else "npy")
    if (form, dtype) == ("npy", "bf16"):
        hint = "leave --format out, or say --dtype f16 or f32"
        raise UsageError("--format npy has no bfloat16, which this model computes in", code="usage", hint=hint)
    plans = []
    for facts in surveyed:
        shapes: dict[str, tuple[int, int, int]] = {}
        if facts.kind not in ("shared", "linear", "cross") and (params.layers is None or facts.layer in params.layers):
            assert facts.heads is not None
            assert facts.kv_heads is not None
            assert facts.key_dim is not None
            assert facts.value_dim is not None
            shapes = {
                "k": (facts.kv_heads, tokens, facts.key_dim),
                "v": (facts.kv_heads, tokens, facts.value_dim),
                "q": (facts.heads, min(tokens, params.queries), facts.key_dim),
            }
            if facts.kind == "latent":  # what attention reads is as good as in the dump, and seventy times as long
                del shapes["k"], shapes["v"]
                module = _attention_module(loaded, facts.layer)
                rank = module.kv_b_proj.in_features
                shapes["latent"] = (1, tokens, rank)
                shapes["rope_key"] = (1, tokens, facts.key_dim - module.qk_nope_head_dim)
                shapes["kv_b"] = (facts.heads, module.kv_b_proj.out_features // facts.heads, rank)
        files = {
            part: ArrayFile(f"layer{facts.layer:02d}_{FILE_WORDS.get(part, part)}", shape, dtype, form)
            for part, shape in shapes.items()
        }
        plans.append(LayerPlan(facts, files))
    if not any(plan.files for plan in plans):
        chosen = "" if params.layers is None else f" among layers {', '.join(map(str, params.layers))}"
        text = f"{loaded.name}: no layer with keys and values of its own{chosen}"
        raise InputError(text, code="model", path=loaded.name)
    return tuple(plans)


def stored_type(loaded: LoadedModel, params: CaptureParams) -> StoredType:
    """Return the type of the files' values."""
    if params.dtype != "keep":
        return params.dtype
    kept: Any = STORED.get(loaded.model.dtype)
    if kept is None:
        text = f"{loaded.name}: computes in {loaded.model.dtype}, which no dump has"
        raise InputError(text, code="model", hint="say --dtype f16 or f32", path=loaded.name)
    chosen: StoredType = kept
    return chosen


def _attention_module(loaded: LoadedModel, layer: int) -> Any:
    return next(
        module
        for module in loaded.model.modules()
        if getattr(module, "layer_idx", None) == layer and hasattr(module, "kv_b_proj")
    )


def check_unchanged(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raise `BugError`, code `control`, unless a chunk's logits are the same bits with and without listening."""
    chunk = torch.tensor([list(ids)])
    with torch.inference_mode():
        plain = step(loaded, chunk, new_cache(loaded))
        with listening(loaded, lambda call: None):
            heard = step(loaded, chunk, new_cache(loaded))
    if not _same(plain, heard):
        gap = float((plain - heard).abs().max())
        text = (
            f"{loaded.name}: its logits differ by {gap:.3g} while it is listened to, so the dump would not be its own"
        )
        raise BugError(text, code="control", path=loaded.name)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN among them."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def runs_in_chunks(loaded: LoadedModel, ids: Sequence[int]) -> bool:
    """Return whether two steps over one cache give the logits of one step, up to rounding.

    Some models with state-space layers lose their state where a step of several tokens follows another.
    """
    probe = torch.tensor([list(ids[:PROBED])])
    half = probe.shape[1] // 2
    with torch.inference_mode():
        whole = step(loaded, probe, new_cache(loaded)).float()
        cache = new_cache(loaded)
        parts = torch.cat([step(loaded, probe[:, :half], cache), step(loaded, probe[:, half:], cache)], 1).float()
    allowed = CHUNK_ROUNDING.get(loaded.model.dtype, COARSE_CHUNK_ROUNDING)
    return not bool((whole - parts).norm() > allowed * whole.norm())  # NaN is for the recorder to name


def record(
    loaded: LoadedModel,
    ids: Sequence[int],
    plans: Sequence[LayerPlan],
    folder: Path,
    *,
    chunk: int,
    advance: Callable[[float], None] = lambda tokens: None,
) -> tuple[LayerPlan, ...]:
    """Run the tokens through the model, fill the files of `plans` in `folder`, and return what was seen of the rules.

    `advance` is told of every chunk's tokens. Raises: `InputError` ("non-finite", "range").
    """
    by_layer = {plan.facts.layer: _Recorder(plan, folder, len(ids)) for plan in plans if plan.files}
    for recorder in by_layer.values():
        recorder.create()

    def hear(call: AttentionCall) -> None:
        if call.layer in by_layer:
            by_layer[call.layer].hear(call)

    cache = new_cache(loaded)
    with torch.inference_mode(), listening(loaded, hear):
        for start in range(0, len(ids), chunk):
            part = torch.tensor([list(ids[start : start + chunk])])
            step(loaded, part, cache, logits=1)
            for recorder in by_layer.values():
                recorder.keep_latent(cache)
            advance(part.shape[1])
    return tuple(replace(plan, facts=by_layer[plan.facts.layer].facts()) if plan.files else plan for plan in plans)


class _Recorder:
    """One layer's files and what has been heard of it so far."""

    def __init__(self, plan: LayerPlan, folder: Path, tokens: int) -> None:
        self._plan, self._folder, self._tokens = plan, folder, tokens
        self._start = 0  # positions heard
        self._kept = 0  # positions of the latent written
        self._reached: list[torch.Tensor | None] = []
        self._explained = True

    def create(self) -> None:
        """Make the files."""
        for file in self._plan.files.values():
            file.create(self._folder)

    def hear(self, call: AttentionCall) -> None:
        """Write what the call adds, and hold its output against the facts at the end."""
        files, new, start = self._plan.files, call.new, self._start
        for part, x in (("k", call.key), ("v", call.value)):
            if part in files:
                files[part].write(self._folder, start, x[0, :, -new:])  # a cache has put older ones in front
        tail = self._tokens - files["q"].shape[1]
        if start + new > tail:
            first = max(start, tail)
            files["q"].write(self._folder, first - tail, call.query[0, :, first - start :])
        if start == 0 and "kv_b" in files:
            weight = call.module.kv_b_proj.weight
            files["kv_b"].write(self._folder, 0, weight.view(files["kv_b"].shape))
        reached = reach(call)
        self._reached.append(None if reached is None else reached.cpu())
        self._start = start + new
        if self._start == self._tokens and reached is not None:
            self._explained = explained(call, self._plan.facts, reached)

    def keep_latent(self, cache: Any) -> None:
        """Write what a latent layer has in the cache; its attention reads something else."""
        files = self._plan.files
        if "latent" not in files:
            return
        cached = _cached(cache, self._plan.facts.layer)
        assert cached is not None
        new = self._start - self._kept
        for part, x in zip(("latent", "rope_key"), cached, strict=True):
            files[part].write(self._folder, self._kept, x[0, :, -new:])
        self._kept = self._start

    def facts(self) -> LayerFacts:
        """Return the surveyed facts with what the masks of all positions showed."""
        facts = self._plan.facts
        reached = [each for each in self._reached if each is not None]
        limits = limits_of(torch.cat(reached)) if len(reached) == len(self._reached) else None
        if limits is None:
            return replace(facts, score_bias=facts.score_bias or "mask")
        if not self._explained:
            facts = replace(facts, score_bias=facts.score_bias or UNEXPLAINED)
        window, chunk = limits
        if (window, chunk) == (None, None):  # what the text is too short to show is believed
            window = facts.window if facts.window and facts.window >= self._tokens else None
            chunk = facts.chunk if facts.chunk and facts.chunk >= self._tokens else None
        if facts.kind != "latent":
            facts = replace(facts, kind="sliding" if window else "chunked" if chunk else "full")
        return replace(facts, window=window, chunk=chunk)
