"""A cache for transformers whose full-attention layers hold packed codes: `turboquant_cache`.

Every token is encoded when it comes. What attention reads of it is its restored codes, but for the first
`sink_tokens`, the newest `residual_window` tokens, and, with `exact_chunk`, the tokens of the running forward pass:
those are read as they came, as engines do it while a prompt runs. Codes lie in the host's memory on every device.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tqtool.codec.codec import encode
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.codec.terms import MAX_BITS, UNTOUCHED, Law, Meta, ScaleRule
from tqtool.dtypes import Float32Array
from tqtool.errors import InputError, UsageError
from tqtool.hf.attention import NAME, PackedTensor, to_numpy, to_torch
from tqtool.hf.sides import Chosen, GrowingSide

FUSED_QUERIES = 16  # of a forward pass; for more, restoring once costs less than reading codes for each


@dataclass(frozen=True, slots=True)
class Coding:
    """How the layers of a cache hold tokens. Raises: `UsageError` for what no cache can have."""

    kv: KVConfig
    residual_window: int = 0  # newest tokens that are read exactly
    sink_tokens: int = 0  # first tokens that are
    exact_chunk: bool = True  # whether those of the running forward pass are
    meta: Meta = "bf16"
    law: Law = "beta"
    key_scale_rule: ScaleRule = "match"
    value_scale_rule: ScaleRule = "match"
    seed: int = 0

    def __post_init__(self) -> None:
        if UNTOUCHED in (self.kv.key_bits, self.kv.value_bits):
            raise UsageError(f"{self.kv}: a compressed cache has 1 to {MAX_BITS} bits a side", code="usage")
        for name in ("residual_window", "sink_tokens"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}, at least 0 is needed", code="usage")
        self.specs(128, 128)  # a bad word is refused here, not in the middle of a forward pass

    def specs(self, key_dim: int, value_dim: int) -> tuple[CodecSpec, CodecSpec]:
        """Return the codecs of keys and values. Raises: `InputError` ("dim") for a length without a rotation."""
        key = CodecSpec(key_dim, self.kv.key_bits, self.law, self.key_scale_rule, self.meta, self.seed)
        return key, CodecSpec(value_dim, self.kv.value_bits, self.law, self.value_scale_rule, self.meta, self.seed)


class TurboQuantLayer(DynamicLayer):
    """One full-attention layer's keys and values in codes; transformers calls what it calls of a `DynamicLayer`."""

    is_croppable = True

    def __init__(self, layer: int, config: Any, coding: Coding) -> None:
        super().__init__()
        self.layer, self.coding = layer, coding
        self.config = config  # the decoder's, whose attention function decides what `update` returns
        self.sides: tuple[GrowingSide, GrowingSide] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantLayer:
        memo[id(self.config)] = self.config  # stays the model's, as its attention function may be changed later
        copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room; called by the first `update`. Raises: `InputError` ("dim") for a length without a rotation."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, kv_heads = key_states.shape[:2]
        sizes = {"sinks": self.coding.sink_tokens, "window": self.coding.residual_window}
        key, value = self.coding.specs(key_states.shape[-1], value_states.shape[-1])
        self.sides = GrowingSide(key, batch, kv_heads, **sizes), GrowingSide(value, batch, kv_heads, **sizes)
        self.is_initialized = True

    @torch.compiler.disable  # NumPy and C cannot be traced: the one break in a compiled graph
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode new tokens (batch, kv_heads, n, dim) and return all keys and values, or stand-ins for them."""
        if self.sides is None:
            self.lazy_initialization(key_states, value_states)
        assert self.sides is not None
        self._check(key_states, value_states)
        alone = self.get_seq_length() == 0
        new = [to_numpy(states) for states in (key_states, value_states)]
        codes = [self._encode(x, name) for x, name in zip(new, ("keys", "values"), strict=True)]
        for side, encoded, rows in zip(self.sides, codes, new, strict=True):
            side.append(encoded, np.arange(side.length, side.length + rows.shape[1]), rows)
        if not self.coding.exact_chunk:
            self._trim()
        read = tuple(side.stored() for side in self.sides)
        self._trim()
        if alone and self.coding.exact_chunk:
            return key_states, value_states
        key, value = (side.spec for side in self.sides)
        if self.config._attn_implementation == NAME and key_states.shape[2] <= FUSED_QUERIES and key.dim == value.dim:
            label = f"layer {self.layer}"
            return PackedTensor(read[0], key_states, label), PackedTensor(read[1], value_states, label)
        return to_torch(read[0].restored(), key_states), to_torch(read[1].restored(), value_states)

    def _encode(self, x: Float32Array, name: str) -> Encoded:
        assert self.sides is not None
        try:
            return encode(x, self.sides[name == "values"].spec)
        except InputError as error:
            raise InputError(f"layer {self.layer}, {name}: {error}", code=error.code) from error

    def _check(self, *states: torch.Tensor) -> None:
        """Raises: `InputError` unless new keys and values go with those held: a loaded file may be another model's."""
        for side, new in zip(self.sides or (), states, strict=True):
            batch, _, kv_heads = side.encoded.lead
            held, come = (batch, kv_heads, side.spec.dim), (new.shape[0], new.shape[1], new.shape[3])
            if held != come:
                text = "layer {}: {} sequences of {} heads of {} in the cache, {} of {} of {} come"
                raise InputError(text.format(self.layer, *held, *come), code="shape-mismatch")

    def _trim(self) -> None:
        for side in self.sides or ():
            side.trim()

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, metadata, exact rows, and the room for more tokens."""
        return sum(side.nbytes for side in self.sides or ())

    def get_seq_length(self) -> int:
        """Return how many tokens are held."""
        return self.sides[0].length if self.sides else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; the number is negative, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one")
        length = max(self.get_seq_length() + tokens_to_remove, 0)
        for side in self.sides or ():
            side.truncate(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace the batch by sequences of it, as a beam search asks."""
        self._take(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        if self.sides is not None:
            self._take(np.repeat(np.arange(self.sides[0].encoded.lead[0]), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences of the batch."""
        if self.sides is not None:
            self._take(np.arange(self.sides[0].encoded.lead[0])[indices.cpu().numpy()])

    def _take(self, sequences: Chosen) -> None:
        for side in self.sides or ():
            side.take(sequences)

    def reset(self) -> None:
        """Forget every token; the next may be of another batch size."""
        self.sides, self.is_initialized = None, False

    def offload(self) -> None:
        """Do nothing: codes lie in the host's memory."""

    def prefetch(self) -> None:
        """Do nothing: codes are read where they lie."""


def turboquant_cache(
    config: Any,
    kv: str | KVConfig = "K4/V2",
    *,
    residual_window: int = 0,
    sink_tokens: int = 0,
    exact_chunk: bool = True,
    protect: tuple[int, ...] = (),
    meta: Meta = "bf16",
    law: Law = "beta",
    key_scale_rule: ScaleRule = "match",
    value_scale_rule: ScaleRule = "match",
    seed: int = 0,
) -> DynamicCache:
    """Return a `DynamicCache` for a model's configuration whose full-attention layers hold codes.

    Sliding, linear and shared layers, and those in `protect` (negative numbers count from the last), stay as they are.
    Attention reads the first `sink_tokens`, the newest `residual_window` tokens and, with `exact_chunk`, those of the
    running forward pass exactly. While the model's attention function is "tqtool", decoding reads the codes; with any
    other, keys and values are restored for each step. Raises: `UsageError` for what no cache can have, or where no
    layer would be compressed.
    """
    coding = Coding(
        KVConfig.parse(kv) if isinstance(kv, str) else kv,
        residual_window,
        sink_tokens,
        exact_chunk,
        meta,
        law,
        key_scale_rule,
        value_scale_rule,
        seed,
    )
    return coded_cache(config, coding, protect)


def coded_cache(config: Any, coding: Coding, protect: tuple[int, ...] = ()) -> DynamicCache:
    """Return what `turboquant_cache` does, of a coding."""
    decoder = config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    count = len(cache.layers)
    for layer in protect:
        if not -count <= layer < count:
            raise UsageError(f"protect: no layer {layer}, the model has {count}", code="usage")
    kept = {layer % count for layer in protect}
    chosen = [i for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer and i not in kept]
    if not chosen:
        what = "every full-attention layer is protected" if protect else "the model has no full-attention layer"
        raise UsageError(f"nothing to compress: {what}", code="usage")
    for i in chosen:
        cache.layers[i] = TurboQuantLayer(i, decoder, coding)
    return cache
