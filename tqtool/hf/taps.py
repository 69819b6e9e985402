"""Listening to a model's attention: queries, keys, values and rules of every call, without changing a bit of it.

Any model that takes its attention from the interface of transformers can be heard; no model is named here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tqtool.errors import InputError
from tqtool.hf.models import LoadedModel

NAME = "tqtool_tap"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of a layer's attention; a sequence at a time, so every tensor's first axis is 1."""

    layer: int
    module: Any
    query: torch.Tensor  # (1, heads, new, key dim), as the scores see them: after the rotary embedding
    key: torch.Tensor  # (1, kv heads, total, key dim): those of the cache in front, the new ones last
    value: torch.Tensor  # (1, kv heads, total, value dim)
    mask: torch.Tensor | None  # None: causal
    options: dict[str, Any]  # scaling, sliding_window, softcap, s_aux and whatever else this model passes
    output: torch.Tensor  # (1, new, heads, value dim)

    @property
    def new(self) -> int:
        """How many positions this call adds."""
        return int(self.query.shape[2])


@contextmanager
def listening(loaded: LoadedModel, hear: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Tell `hear` of every call of the decoder's self-attention while the block runs.

    Raises: `InputError`, code `model`, for a model that does not use the attention interface.
    """
    decoder = decoder_of(loaded)
    check_interface(loaded)
    plain = decoder.config.get_text_config(decoder=True)._attn_implementation
    inside = {id(module) for module in decoder.modules()}  # a vision tower has attention and layer numbers of its own

    def tap(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,  # by this name: some models pass it as a keyword
        **options: Any,
    ) -> Any:
        result = _own_attention(module, plain)(module, query, key, value, attention_mask, **options)
        layer = getattr(module, "layer_idx", None)
        if layer is not None and id(module) in inside and _is_self_attention(module):
            mask = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4 else None
            hear(AttentionCall(layer, module, query, key, value, mask, options, result[0]))
        return result

    AttentionInterface.register(NAME, tap)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[plain])  # else the masks are silently others
    decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(plain)


def decoder_of(loaded: LoadedModel) -> Any:
    """Return the module of the decoder's layers; in a model of text alone, the model less its head."""
    found = loaded.model.get_decoder()
    return found if hasattr(found, "set_attn_implementation") else loaded.model


def check_interface(loaded: LoadedModel) -> None:
    """Raise `InputError`, code `model`, unless the decoder takes its attention from the interface."""
    if not decoder_of(loaded)._can_set_attn_implementation():
        text = f"{loaded.name}: {loaded.architecture} does not use the attention interface of transformers"
        hint = "take its keys and values from the cache: docs/model.md, Other engines"
        raise InputError(text, code="model", hint=hint, path=loaded.name)


def _own_attention(module: Any, plain: str) -> Callable[..., Any]:
    """Return the function that this module would have called: each modeling file has its own eager one."""
    names = inspect.unwrap(type(module).forward).__globals__
    own: Callable[..., Any] = names["ALL_ATTENTION_FUNCTIONS"].get_interface(
        plain, names.get("eager_attention_forward")
    )
    return own


def _is_self_attention(module: Any) -> bool:
    return bool(getattr(module, "is_causal", True)) and not getattr(module, "is_cross_attention", False)


def reach(call: AttentionCall) -> torch.Tensor | None:
    """Return how many keys each new position sees, shape (new,): itself and so many before it, without a gap.

    None where the mask is anything else: one that leaves gaps, differs between heads, or adds to the scores.
    """
    total, new = call.key.shape[2], call.new
    own = torch.arange(total - new, total, device=call.key.device)
    if call.mask is None:
        return own + 1
    mask = call.mask[0, :, :, :total]  # (1 or heads, new, total)
    if mask.dtype != torch.bool:
        lowest = torch.finfo(mask.dtype).min
        if not ((mask == 0) | (mask <= lowest / 2)).all():
            return None
        mask = mask == 0
    counts = mask.sum(-1)  # (1 or heads, new)
    keys = torch.arange(total, device=mask.device)
    run = (keys <= own[:, None]) & (keys > own[:, None] - counts[0][:, None])
    return counts[0] if (mask == run).all() else None
