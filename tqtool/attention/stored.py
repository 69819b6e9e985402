"""One side, keys or values, of a compressed cache: packed codes, their metadata, and the tokens kept in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.attention.slots import EMPTY, SlotChoice, Slots, move_down
from tqtool.codec.codec import decode
from tqtool.codec.spec import CodecSpec, Encoded

PARALLEL_WORK = 1 << 21  # coordinates read at once; below, threads cost more than they bring


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Rows of one side of a compressed cache, some of which are kept in float32 and count instead of their codes."""

    encoded: Encoded  # (batch, n, kv_heads, dim) when decoded
    exact: NDArray[np.float32]  # (batch, rows, kv_heads, dim)
    row_of: NDArray[np.int64]  # (n, kv_heads): the exact row of a vector, -1 for none

    def restored(self) -> NDArray[np.float32]:
        """Return the vectors (batch, n, kv_heads, dim)."""
        x = decode(self.encoded, threads=1 if self.encoded.codes.size < PARALLEL_WORK else None)
        places, heads = np.nonzero(self.row_of >= 0)
        x[:, places, heads] = self.exact[:, self.row_of[places, heads], heads]
        return x

    def part(self, near: slice) -> Stored:
        """Return a range of the vectors."""
        return Stored(self.encoded[:, near], self.exact, self.row_of[near])

    @property
    def protected(self) -> bool:
        """Whether rows may be kept in float32."""
        return bool(self.exact.shape[1])

    def exact_head(self, sequence: int, head: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return which of one head's vectors are exact, (m,) places, and they themselves (m, dim)."""
        places = np.flatnonzero(self.row_of[:, head] >= 0)
        return places, self.exact[sequence, self.row_of[places, head], head]


@dataclass(frozen=True, slots=True, eq=False)
class StoredSide:
    """Keys or values of a compressed cache: the specification's two arrays, and the protected rows."""

    encoded: Encoded  # of lead (layers, batch, max_seq_len, kv_heads)
    protected: ProtectedRows

    @classmethod
    def empty(
        cls, spec: CodecSpec, layers: int, length: int, token: tuple[int, int, int], sinks: int, window: int
    ) -> StoredSide:
        """Return room for `layers` x `length` tokens of shape `token` (batch, kv_heads, dim), all zero."""
        batch, kv_heads, _ = token
        return cls(spec.zeros((layers, batch, length, kv_heads)), ProtectedRows(layers, token, sinks, window))

    @property
    def spec(self) -> CodecSpec:
        """The codec of this side."""
        return self.encoded.spec

    @property
    def nbytes(self) -> int:
        """Bytes of codes, metadata and float32 rows."""
        return self.encoded.nbytes + self.protected.nbytes

    def store(self, layer: int, slot: int, x: NDArray[Any], encoded: Encoded) -> None:
        """Put encoded tokens x (batch, n, kv_heads, dim) in slots slot, slot + 1, ..."""
        self.encoded[layer, :, slot : slot + x.shape[1]] = encoded
        self.protected.write(layer, slot, x)

    def select(self, slots: Slots, layer: int, choice: SlotChoice | None) -> Stored:
        """Return the rows of a layer's filled slots, or of chosen ones."""
        arrays = {name: slots.select(rows[layer], layer, choice) for name, rows in self.encoded.arrays.items()}
        encoded = Encoded(self.spec, **arrays)
        chosen = slots.chosen(layer, choice, encoded.lead[2])
        distinct = chosen if choice is not None and choice.ndim == 2 else chosen[:, :1]
        row_of = np.broadcast_to(self.protected.row_of(layer, distinct), chosen.shape)
        return Stored(encoded, self.protected.rows(layer), row_of)

    def evict(self, slots: Slots, count: int, layer: int | None) -> None:
        """Drop `count` slots after the sinks in one layer, or in every one."""
        part = slice(None) if layer is None else slice(layer, layer + 1)
        for array in self.encoded.arrays.values():
            for rows in array[part].reshape(-1, *array.shape[2:]):
                move_down(rows[: slots.seq_len], slots.sink_tokens, count)
        self.protected.evict(count, part)

    def truncate(self, slots: Slots, length: int) -> None:
        """Forget every slot from `length` on."""
        for array in self.encoded.arrays.values():
            array[:, :, length : slots.seq_len] = 0
        self.protected.truncate(length)


class ProtectedRows:
    """The first `sinks` and the newest `window` tokens of one side of a cache, kept in float32."""

    def __init__(self, layers: int, token_shape: tuple[int, int, int], sinks: int, window: int) -> None:
        """`token_shape` is (batch, kv_heads, head_dim)."""
        batch, kv_heads, dim = token_shape
        self._sinks, self._window = sinks, window
        self._rows = np.zeros((layers, batch, sinks + window, kv_heads, dim), np.float32)
        self._slots = np.full((layers, sinks + window), EMPTY, np.int64)  # which slot a row keeps
        self._written = [0] * layers

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 rows."""
        return self._rows.nbytes

    def write(self, layer: int, slot: int, x: NDArray[Any]) -> None:
        """Keep what belongs here of new tokens x (batch, n, kv_heads, dim) in slots slot, slot + 1, ..."""
        if not self._slots.shape[1]:
            return
        turns = np.arange(x.shape[1])
        slots = slot + turns
        sink = slots < self._sinks
        kept = sink | (turns >= len(turns) - self._window)
        rows = np.where(sink, slots, self._sinks + (self._written[layer] + turns) % max(self._window, 1))[kept]
        held = self._slots[layer]
        held[(held >= slot) & (held < slot + len(slots))] = EMPTY
        held[rows] = slots[kept]
        self._rows[layer][:, rows] = x[:, kept]
        self._written[layer] += len(slots)

    def rows(self, layer: int) -> NDArray[np.float32]:
        """Return the layer's rows (batch, sinks + window, kv_heads, dim)."""
        rows: NDArray[np.float32] = self._rows[layer]
        return rows

    def row_of(self, layer: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row that keeps each slot, -1 for none; any shape."""
        held = self._slots[layer]
        if not len(held):
            return np.broadcast_to(np.int64(EMPTY), slots.shape)
        row_of = np.full(max(held.max(initial=EMPTY), slots.max(initial=EMPTY)) + 2, EMPTY)
        row_of[held] = np.arange(len(held))
        row_of[EMPTY] = EMPTY  # the last place, which stands for no slot
        return row_of[slots]

    def evict(self, count: int, layers: slice) -> None:
        """Follow `Slots.evict`."""
        held = self._slots[layers]
        moved = held >= self._sinks
        held[moved] -= count
        held[moved & (held < self._sinks)] = EMPTY

    def truncate(self, length: int) -> None:
        """Follow `Slots.truncate`."""
        dropped = self._slots >= length
        self._slots[dropped] = EMPTY
        # The rows of dropped tokens are the next to be filled.
        self._written = [old - int(count) for old, count in zip(self._written, dropped.sum(axis=1), strict=True)]
