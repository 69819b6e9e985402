"""What a layer's attention does, as the manifest tells it: read from its calls, and proved by its own output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tqtool.hf.taps import AttentionCall

Kind = Literal["full", "sliding", "chunked", "latent", "shared", "linear", "cross"]
UNEXPLAINED = "unexplained"  # `score_bias` of a layer whose output these facts do not give
# Norm of the difference over the norm of the output. Attention in 16 bits may round its scores to 8 of them.
AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE_AGREEMENT = 0.1
PROVED_ROWS = 4  # positions of the last chunk whose output is computed again


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Shapes and rules of one layer; None where there is no attention to have them."""

    layer: int
    kind: Kind
    heads: int | None = None  # query heads
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    scaling: float | None = None  # of q.k
    window: int | None = None  # a query sees itself and window - 1 keys before it
    chunk: int | None = None  # a query sees the keys from the last multiple of chunk on
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: tuple[float, ...] | None = None  # a logit of each query head that takes part in the softmax
    alibi_slopes: tuple[float, ...] | None = None
    score_bias: str | None = None  # what else changes the scores; such a layer cannot be measured
    causal: bool = True
    first_token: int = 0  # position of the first key in the files

    def as_json(self) -> dict[str, Any]:
        """Return the facts as they stand in the manifest."""
        return asdict(self)


def facts_of(call: AttentionCall, kind: Kind, declared: tuple[int | None, int | None]) -> LayerFacts:
    """Return what one call shows; `declared` are the window and the chunk that the configuration speaks of."""
    options = call.options
    sinks = options.get("s_aux")
    scaling = options.get("scaling")
    return LayerFacts(
        layer=call.layer,
        kind=kind,
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        key_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        scaling=float(call.query.shape[3] ** -0.5 if scaling is None else scaling),
        window=declared[0],
        chunk=declared[1],
        softcap=None if options.get("softcap") is None else float(options["softcap"]),
        sinks=None if sinks is None else tuple(map(float, sinks.flatten().tolist())),
        score_bias="position_bias" if options.get("position_bias") is not None else None,
    )


def declared_limits(call: AttentionCall, text_config: Any) -> tuple[int | None, int | None]:
    """Return the window and the chunk that the call's options or the configuration name for this layer."""
    types = getattr(text_config, "layer_types", None) or ()
    kind = types[call.layer] if call.layer < len(types) else None
    if kind == "chunked_attention":
        return None, getattr(text_config, "attention_chunk_size", None)
    window = call.options.get("sliding_window")
    if window is None and kind == "sliding_attention":
        window = getattr(text_config, "sliding_window", None)
    return window, None


def limits_of(reached: torch.Tensor) -> tuple[int | None, int | None] | None:
    """Return (window, chunk) of a layer whose positions 0 … n-1 see so many keys each; None if it is neither.

    (None, None): every position sees all before it.
    """
    positions = torch.arange(len(reached), device=reached.device)
    limited = (reached != positions + 1).nonzero()
    if not len(limited):
        return None, None
    first = int(limited[0])  # a window of w shows first at position w, a chunk of c at position c
    if torch.equal(reached, (positions + 1).clamp(max=first)):
        return first, None
    if torch.equal(reached, positions % first + 1):
        return None, first
    return None


def explained(call: AttentionCall, facts: LayerFacts, reached: torch.Tensor) -> bool:
    """Return whether the facts give the layer's own output at the call's last positions."""
    rows = min(PROVED_ROWS, call.new)
    expected = _attention(call, facts, reached, rows)
    found = call.output[0, -rows:].float()
    if found.shape != expected.shape:
        return False
    allowed = AGREEMENT.get(call.output.dtype, COARSE_AGREEMENT)
    return bool((found - expected).norm() <= allowed * found.norm())


def _attention(call: AttentionCall, facts: LayerFacts, reached: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the output of the last `rows` positions, (rows, heads, value dim), by the manifest's rules."""
    assert facts.scaling is not None
    kv_heads, total = call.key.shape[1:3]
    q = call.query[0, :, -rows:].float().unflatten(0, (kv_heads, -1))  # (kv heads, group, rows, dim)
    k, v = call.key[0, :, None].float(), call.value[0, :, None].float()
    scores = q @ k.transpose(-1, -2) * facts.scaling  # (kv heads, group, rows, total)
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    own = torch.arange(total - rows, total, device=k.device)[:, None]
    keys = torch.arange(total, device=k.device)
    hidden = (keys > own) | (keys <= own - reached[-rows:, None])
    scores = scores.masked_fill(hidden, -torch.inf).flatten(0, 1)
    if facts.sinks is not None:
        logits = torch.tensor(facts.sinks, device=k.device)[:, None, None].expand(-1, rows, 1)
        scores = torch.cat([scores, logits], dim=-1)
    weights = scores.softmax(-1)[..., :total].unflatten(0, (kv_heads, -1))
    return (weights @ v).flatten(0, 1).transpose(0, 1)
