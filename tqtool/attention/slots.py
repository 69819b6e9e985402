"""Which token sits in which slot of a cache: the bookkeeping that the float32 and the compressed cache share.

A slot is a place in the cache's arrays; a position counts the tokens written to a layer. They are the same until a
ring overwrites old slots or an eviction moves tokens down. What a query sees depends on positions alone, so a ring
needs no reordering.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.plain import AttentionConfig, sees
from tqtool.errors import UsageError

SlotChoice = NDArray[np.integer[Any]]  # (n,) or (n, kv_heads) slots to read, -1 for none
Number = TypeVar("Number", bound=np.generic)

EMPTY = -1


class Slots:
    """The positions of a cache's tokens, layer by layer."""

    def __init__(self, layers: int, max_seq_len: int, sink_tokens: int = 0) -> None:
        for name, value in (("layers", layers), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise UsageError(f"{name} is {value}, at least 1 is needed", code="usage")
        if not 0 <= sink_tokens <= max_seq_len:
            raise UsageError(f"{sink_tokens} sink tokens in a cache of {max_seq_len}", code="usage")
        self.sink_tokens = sink_tokens
        self._positions = np.full((layers, max_seq_len), EMPTY, np.int64)
        self._lengths = [0] * layers
        self._written = [0] * layers  # the next token's position
        self._in_order = [True] * layers

    @property
    def seq_len(self) -> int:
        """One more than the highest slot that holds a key in any layer."""
        return max(self._lengths)

    def length(self, layer: int) -> int:
        """One more than the highest slot of the layer that holds a key."""
        self.check(layer)
        return self._lengths[layer]

    def check(self, layer: int, slot: int = 0, count: int = 0) -> None:
        """Raises: `UsageError` unless the layer has slots `slot` to `slot + count - 1`."""
        layers, size = self._positions.shape
        if not 0 <= layer < layers:
            raise UsageError(f"layer {layer}: the cache has layers 0 to {layers - 1}", code="usage")
        if not 0 <= slot <= slot + count <= size:
            last = f" to {slot + count - 1}" if count > 1 else ""
            raise UsageError(
                f"slot {slot}{last}: the cache has slots 0 to {size - 1}",
                code="usage",
                hint=f"evict old tokens first, or write at pos % {size} to overwrite the oldest",
            )

    def fill(self, layer: int, slot: int, count: int) -> None:
        """Record `count` new tokens from `slot` on."""
        first = self._written[layer]
        self._positions[layer, slot : slot + count] = np.arange(first, first + count)
        self._written[layer] = first + count
        self._in_order[layer] &= slot == self._lengths[layer]
        self._lengths[layer] = max(self._lengths[layer], slot + count)

    def check_eviction(self, count: int, layer: int | None = None) -> None:
        """Raises: `UsageError` unless the `count` oldest tokens after the sinks are the first slots after them.

        Of one layer, or of all: then a layer that holds fewer tokens loses what it has.
        """
        layers = self._layers(layer)
        most = max(max(self._lengths[each] for each in layers) - self.sink_tokens, 0)
        if not 0 <= count <= most:
            raise UsageError(f"cannot evict {count} of {most} tokens", code="usage")
        for each in layers:
            held = self._positions[each, self.sink_tokens : self._lengths[each]]
            held = held[held != EMPTY]
            if np.any(np.diff(held) < 0):
                slot = int(np.flatnonzero(self._positions[each] == held.min())[0])
                raise UsageError(
                    f"the cache is used as a ring: the oldest token of layer {each} is in slot {slot}",
                    code="usage",
                    hint="a ring evicts by overwriting; only a cache filled in order can move tokens down",
                )

    def evict(self, count: int, layer: int | None = None) -> None:
        """Drop the `count` slots after the sinks and move the rest down, in one layer or in all."""
        for each in self._layers(layer):
            move_down(self._positions[each], self.sink_tokens, count, EMPTY)
            length = self._lengths[each]
            self._lengths[each] = max(length - count, min(length, self.sink_tokens))

    def _layers(self, layer: int | None) -> range:
        if layer is None:
            return range(len(self._lengths))
        self.check(layer)
        return range(layer, layer + 1)

    def check_truncation(self, length: int) -> None:
        """Raises: `UsageError` unless there are `length` tokens."""
        if not 0 <= length <= self.seq_len:
            raise UsageError(f"cannot truncate {self.seq_len} tokens to {length}", code="usage")

    def truncate(self, length: int) -> None:
        """Forget every slot from `length` on."""
        self._positions[:, length:] = EMPTY
        self._lengths = [min(old, length) for old in self._lengths]
        self._in_order = [old or length == 0 for old in self._in_order]
        self._written = [int(positions[:length].max(initial=EMPTY)) + 1 for positions in self._positions]

    def newest(self, layer: int, pos: int, q_len: int) -> bool:
        """Whether the layer was filled slot after slot and pos, pos + 1, ... are its last q_len tokens."""
        self.check(layer, pos, q_len)
        return self._in_order[layer] and pos + q_len == self._lengths[layer]

    def select(self, rows: NDArray[Number], layer: int, choice: SlotChoice | None) -> NDArray[Number]:
        """Return the rows (batch, n, kv_heads, ...) of the layer's filled slots, or of chosen ones.

        `rows` is (batch, max_seq_len, kv_heads, ...); the answer is a view unless slots are chosen.
        """
        if choice is None:
            return rows[:, : self.length(layer)]
        return rows[:, self.chosen(layer, choice, rows.shape[2]), np.arange(rows.shape[2])]

    def chosen(self, layer: int, choice: SlotChoice | None, kv_heads: int) -> NDArray[np.int64]:
        """Return the checked choice as (n, kv_heads); None chooses every filled slot."""
        length = self.length(layer)
        if choice is None:
            choice = np.arange(length)
        if choice.shape[1:] not in ((), (kv_heads,)) or not np.issubdtype(choice.dtype, np.integer):
            text = f"slots are {choice.dtype} {choice.shape}, need integers (n,) or (n, {kv_heads})"
            raise UsageError(text, code="usage")
        if choice.size and not EMPTY <= choice.min() <= choice.max() < length:
            raise UsageError(
                f"slots {choice.min()} to {choice.max()}: layer {layer} holds slots 0 to {length - 1}",
                code="usage",
                hint="-1 stands for no slot",
            )
        columns = choice.astype(np.int64)
        return np.broadcast_to(columns[:, None] if choice.ndim == 1 else columns, (len(choice), kv_heads))

    def seen(
        self, layer: int, pos: int, q_len: int, config: AttentionConfig, choice: SlotChoice | None
    ) -> NDArray[np.bool_]:
        """Return which slots the queries of tokens pos, pos + 1, ... see.

        (1, q_len, length), or (kv_heads, q_len, n) for chosen slots.
        """
        self.check(layer, pos, q_len)
        held = self._positions[layer, : self._lengths[layer]]
        queries = self._positions[layer, pos : pos + q_len]
        if np.any(queries == EMPTY):
            missing = pos + int(np.argmax(queries == EMPTY))
            raise UsageError(f"slot {missing}: layer {layer} holds no token there", code="usage")
        keys = held[None]
        if choice is not None:
            chosen = self.chosen(layer, choice, config.key_heads).T
            keys = np.where(chosen == EMPTY, EMPTY, held[chosen])
        seen = np.stack([sees(queries, row, causal=config.causal, window=config.window) for row in keys])
        seen &= (keys != EMPTY)[:, None]
        return seen

    def visible(self, layer: int, pos: int, config: AttentionConfig, choice: SlotChoice | None) -> NDArray[np.int64]:
        """Return the slots that the query of slot pos sees, -1 for none: (1, length), or (kv_heads, n) of a choice."""
        slots = self.chosen(layer, choice, 1 if choice is None else config.key_heads).T
        return np.where(self.seen(layer, pos, 1, config, choice)[:, 0], slots, EMPTY)


def move_down(rows: NDArray[Any], start: int, count: int, fill: int = 0) -> None:
    """Drop `count` rows from `start` on, move the rest down and fill what becomes free, in place."""
    rows[start : len(rows) - count] = rows[start + count :]
    rows[len(rows) - count :] = fill
