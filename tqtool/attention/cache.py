"""Key-value caches with one interface: `KVCache` in float32 and `TurboQuantCache` compressed.

Both keep, per layer, what the specification's memory layout says, arrays [slot][head][...], so that an eviction is
one move an array. `seq_len` is one more than the highest slot that holds a key. A ring is a caller that writes at
`pos % max_seq_len`. After an error a cache is what it was before. The caches, and their bookkeeping in `slots` and
`stored`, are the only classes of the package that change.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.fused import chosen_attention, fused_attention
from tqtool.attention.plain import (
    AttentionConfig,
    attention,
    attention_mask,
    check_inputs,
    query_blocks,
)
from tqtool.attention.slots import SlotChoice, Slots, move_down
from tqtool.attention.stored import StoredSide
from tqtool.attention.tokens import check_tokens, finite, token_shape
from tqtool.codec.blocks import BLOCK_BYTES
from tqtool.codec.codec import attends, encode
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.codec.terms import UNTOUCHED, Law, Meta, ScaleRule
from tqtool.dtypes import FloatArray
from tqtool.errors import InputError, UsageError

Rows = NDArray[np.float32]


class KVCache:
    """A float32 cache of `batch` sequences; tokens are (batch, n, kv_heads, head_dim)."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, max_seq_len: int, batch: int = 1) -> None:
        """Allocate every slot at once. Raises: `UsageError` for sizes below 1."""
        self.token_shape = token_shape(batch, kv_heads, head_dim)
        self.slots = Slots(layers, max_seq_len)
        full = (layers, batch, max_seq_len, kv_heads, head_dim)
        self._keys, self._values = np.zeros(full, np.float32), np.zeros(full, np.float32)

    @property
    def seq_len(self) -> int:
        """One more than the highest slot that holds a key."""
        return self.slots.seq_len

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all slots."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, slot: int, k: FloatArray, v: FloatArray) -> None:
        """Store tokens in slots slot, slot + 1, ...; after an error nothing has changed."""
        check_tokens(k, v, self.token_shape)
        self.slots.check(layer, slot, k.shape[1])
        part = slice(slot, slot + k.shape[1])
        self._keys[layer, :, part], self._values[layer, :, part] = finite(k), finite(v)
        self.slots.fill(layer, slot, k.shape[1])

    def append(self, layer: int, k: FloatArray, v: FloatArray) -> None:
        """Store tokens in the slots after the layer's last."""
        self.write(layer, self.slots.length(layer), k, v)

    def keys(self, layer: int, slots: SlotChoice | None = None) -> Rows:
        """Return the layer's keys (batch, length, kv_heads, head_dim), or those of chosen slots."""
        return self.slots.select(self._keys[layer], layer, slots)

    def values(self, layer: int, slots: SlotChoice | None = None) -> Rows:
        """Return the layer's values, as `keys` does."""
        return self.slots.select(self._values[layer], layer, slots)

    def attention(
        self, q: FloatArray, layer: int, pos: int, config: AttentionConfig, slots: SlotChoice | None = None
    ) -> FloatArray:
        """Return attention over the layer for the queries of the tokens in slots pos, pos + 1, ...

        q is (batch, q_len, heads, head_dim). `slots` (n,) or (n, kv_heads) are the only ones read, -1 for none.
        """
        return plain_attention(q, self, layer, pos, config, slots)

    def evict(self, count: int, layer: int | None = None) -> None:
        """Drop the `count` oldest tokens of one layer, or of every one, and move the rest down."""
        self.slots.check_eviction(count, layer)
        part = slice(None) if layer is None else slice(layer, layer + 1)
        for side in (self._keys, self._values):
            for rows in side[part].reshape(-1, *side.shape[2:]):
                move_down(rows[: self.seq_len], 0, count)
        self.slots.evict(count, layer)

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on, as a rejected draft needs it."""
        self.slots.check_truncation(length)
        self._keys[:, :, length : self.seq_len], self._values[:, :, length : self.seq_len] = 0, 0
        self.slots.truncate(length)

    def clear(self) -> None:
        """Forget every token."""
        self.truncate(0)


class TurboQuantCache:
    """The cache in packed codes: `KVCache`'s interface at a fraction of its bytes.

    The first `sink_tokens` and the newest `residual_window` tokens are kept in float32 as well, and are what attention
    reads; an eviction spares the sinks.
    """

    def __init__(
        self,
        config: KVConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        batch: int = 1,
        law: Law = "beta",
        key_scale_rule: ScaleRule = "match",
        value_scale_rule: ScaleRule = "match",
        meta: Meta = "range",
        seed: int = 0,
        sink_tokens: int = 0,
        residual_window: int = 0,
        threads: int | None = None,
    ) -> None:
        """Allocate every slot at once. Raises: `UsageError` for sizes, `InputError` for a head_dim without rotation."""
        if UNTOUCHED in (config.key_bits, config.value_bits):
            raise UsageError(f"{config}: a compressed cache has 1 to 8 bits a side", code="usage")
        if residual_window < 0:
            raise UsageError(f"residual_window is {residual_window}, at least 0 is needed", code="usage")
        self.config = config
        self._threads = threads
        self.token_shape = token_shape(batch, kv_heads, head_dim)
        self.slots = Slots(layers, max_seq_len, sink_tokens)
        key, value = (
            CodecSpec(head_dim, bits, law, rule, meta, seed)
            for bits, rule in ((config.key_bits, key_scale_rule), (config.value_bits, value_scale_rule))
        )
        sizes = (layers, max_seq_len, self.token_shape, sink_tokens, residual_window)
        self._keys, self._values = StoredSide.empty(key, *sizes), StoredSide.empty(value, *sizes)

    @property
    def seq_len(self) -> int:
        """One more than the highest slot that holds a key."""
        return self.slots.seq_len

    @property
    def nbytes(self) -> int:
        """Bytes of codes, metadata and float32 rows, all slots: `sizes.cache_size` and the protected tokens."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, slot: int, k: FloatArray, v: FloatArray) -> None:
        """Compress tokens into slots slot, slot + 1, ...; after an error nothing has changed."""
        check_tokens(k, v, self.token_shape)
        self.slots.check(layer, slot, k.shape[1])
        keys, values = (self._encode(x, side.spec) for x, side in ((k, self._keys), (v, self._values)))
        self._keys.store(layer, slot, k, keys)
        self._values.store(layer, slot, v, values)
        self.slots.fill(layer, slot, k.shape[1])

    def append(self, layer: int, k: FloatArray, v: FloatArray) -> None:
        """Compress tokens into the slots after the layer's last."""
        self.write(layer, self.slots.length(layer), k, v)

    def quantize(self, layer: int, pos: int, vec: FloatArray, is_key: bool) -> None:
        """Compress one token's keys or values, (batch, kv_heads, head_dim) or flat in that order, into a slot."""
        batch, kv_heads, dim = self.token_shape
        if vec.size != batch * kv_heads * dim:
            raise InputError(f"vec is {vec.shape}, need {self.token_shape} or as many values", code="shape-mismatch")
        self.slots.check(layer, pos, 1)
        x = vec.reshape(batch, 1, kv_heads, dim)
        side = self._keys if is_key else self._values
        side.store(layer, pos, x, self._encode(x, side.spec))
        if is_key:
            self.slots.fill(layer, pos, 1)

    def dequantize(self, layer: int, start: int, count: int, is_key: bool) -> Rows:
        """Return the keys or values of slots start, start + 1, ..., (batch, count, kv_heads, head_dim)."""
        length = self.slots.length(layer)
        if not 0 <= start <= start + count <= length:
            text = f"slots {start} to {start + count - 1}: layer {layer} holds {length} tokens"
            raise UsageError(text, code="usage")
        side = self._keys if is_key else self._values
        return side.select(self.slots, layer, np.arange(start, start + count)).restored()

    def keys(self, layer: int, slots: SlotChoice | None = None) -> Rows:
        """Return the layer's restored keys (batch, length, kv_heads, head_dim), or those of chosen slots."""
        return self._keys.select(self.slots, layer, slots).restored()

    def values(self, layer: int, slots: SlotChoice | None = None) -> Rows:
        """Return the layer's restored values, as `keys` does."""
        return self._values.select(self.slots, layer, slots).restored()

    def attention(
        self, q: FloatArray, layer: int, pos: int, config: AttentionConfig, slots: SlotChoice | None = None
    ) -> FloatArray:
        """Return what `KVCache.attention` does, from the packed codes; q is never quantized."""
        keys = self._keys.select(self.slots, layer, slots)
        values = self._values.select(self.slots, layer, slots)
        k = np.broadcast_to(np.float32(0), keys.encoded.shape)  # a stand-in: only its shape is looked at
        check_inputs(q, k, config)
        if slots is None and self.slots.newest(layer, pos, q.shape[1]):
            return fused_attention(q, keys, values, config, threads=self._threads)
        if q.shape[1] == 1 and config.softcap is None and attends():
            keys, values = (side.select(self.slots, layer, None) for side in (self._keys, self._values))
            visible = self.slots.visible(layer, pos, config, slots)
            return chosen_attention(q, keys, values, config, visible, threads=self._threads)
        rules = replace(config, causal=False, window=None)  # positions decide, not slots
        out = np.empty(q.shape, np.float32)
        for part in query_blocks(q.shape[1], q.shape[0] * q.shape[2] * k.shape[1]):
            seen = self.slots.seen(layer, pos + part.start, part.stop - part.start, config, slots)
            out[:, part] = fused_attention(q[:, part], keys, values, rules, seen, threads=self._threads)
        return out

    def evict(self, count: int, layer: int | None = None) -> None:
        """Drop the `count` oldest tokens after the sinks of one layer, or of every one, and move the rest down."""
        self.slots.check_eviction(count, layer)
        for side in (self._keys, self._values):
            side.evict(self.slots, count, layer)
        self.slots.evict(count, layer)

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on, as a rejected draft needs it."""
        self.slots.check_truncation(length)
        for side in (self._keys, self._values):
            side.truncate(self.slots, length)
        self.slots.truncate(length)

    def clear(self) -> None:
        """Forget every token."""
        self.truncate(0)

    def _encode(self, x: Rows, spec: CodecSpec) -> Encoded:
        # Starting threads costs more than encoding a few tokens.
        return encode(x, spec, threads=1 if x.nbytes <= BLOCK_BYTES else self._threads)


def attention_cached(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    cache: KVCache | TurboQuantCache,
    layer: int,
    pos: int,
    config: AttentionConfig,
    *,
    plain: bool = False,
) -> FloatArray:
    """Store k and v in slots pos, pos + 1, ... of the cache and return the attention of q over the layer.

    q, k and v are (batch, n, heads, head_dim) of the same n tokens. `plain` restores the keys and values first.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[1] != k.shape[1]:
        raise InputError(f"q is {q.shape}, k is {k.shape}: they are of the same tokens", code="shape-mismatch")
    check_inputs(q, k, config, v)
    cache.write(layer, pos, k, v)
    if plain:
        return plain_attention(q, cache, layer, pos, config)
    return cache.attention(q, layer, pos, config)


def plain_attention(
    q: FloatArray,
    cache: KVCache | TurboQuantCache,
    layer: int,
    pos: int,
    config: AttentionConfig,
    slots: SlotChoice | None = None,
) -> FloatArray:
    """Return `cache.attention` computed from restored keys and values: the referee of the fused path."""
    k, v = cache.keys(layer, slots), cache.values(layer, slots)
    check_inputs(q, k, config, v)
    if slots is None and cache.slots.newest(layer, pos, q.shape[1]):
        return attention(q, k, v, config)
    rules = replace(config, causal=False, window=None)  # positions decide, not slots
    out = np.empty(q.shape, np.result_type(q, np.float32))
    for part in query_blocks(q.shape[1], q.shape[0] * q.shape[2] * k.shape[1]):
        seen = cache.slots.seen(layer, pos + part.start, part.stop - part.start, config, slots)
        heads = 1 if len(seen) == 1 else config.heads
        mask = np.where(seen, np.float32(0), np.float32(-np.inf)).repeat(heads // len(seen), axis=0)
        out[:, part] = attention_mask(q[:, part], k, v, mask[None], rules)
    return out
