"""One side, keys or values, of one layer of a cache that grows: the codes of every token, the exact rows of some.

What a read sees is `attention.stored.Stored`, as in `TurboQuantCache`; here the room grows with the tokens, and the
sequences of a batch can be chosen and repeated.
"""

from __future__ import annotations

import numpy as np

from tqtool.attention.stored import Stored
from tqtool.codec.spec import CodecSpec, Encoded
from tqtool.dtypes import Float32Array

SPARE = 8  # room grows by an eighth: each code is copied about eight times in all, and an eighth is idle at most
MIN_SPARE = 64  # tokens

Chosen = np.ndarray[tuple[int], np.dtype[np.int64]]


class GrowingSide:
    """Tokens (batch, n, kv_heads, dim), appended, cut off at the end and chosen along the batch."""

    def __init__(self, spec: CodecSpec, batch: int, kv_heads: int, *, sinks: int, window: int) -> None:
        """The first `sinks` and the newest `window` tokens stay readable as they came."""
        self.length = 0
        self._sinks, self._window = sinks, window
        self._room = spec.zeros((batch, 0, kv_heads))
        self._exact = np.empty((batch, 0, kv_heads, spec.dim), np.float32)
        self._slots: Chosen = np.empty(0, np.int64)  # of the exact rows, ascending

    @property
    def spec(self) -> CodecSpec:
        """The codec of this side."""
        return self._room.spec

    @property
    def encoded(self) -> Encoded:
        """The codes of the tokens, lead (batch, length, kv_heads)."""
        return self._room[:, : self.length]

    @property
    def exact(self) -> tuple[Chosen, Float32Array]:
        """Which tokens are kept exact, ascending, and their rows (batch, tokens, kv_heads, dim)."""
        return self._slots, self._exact

    @property
    def nbytes(self) -> int:
        """Bytes of codes, metadata and exact rows; the room for more counts."""
        return self._room.nbytes + self._exact.nbytes

    def append(self, encoded: Encoded, slots: Chosen, exact: Float32Array) -> None:
        """Append encoded tokens, lead (batch, n, kv_heads), and the exact rows of those in `slots`, until `trim`."""
        count = encoded.lead[1]
        self._reserve(self.length + count)
        self._room[:, self.length : self.length + count] = encoded
        self.length += count
        self._slots = np.concatenate([self._slots, slots])
        self._exact = np.concatenate([self._exact, exact], axis=1) if self._exact.shape[1] else exact

    def trim(self) -> None:
        """Let go of exact rows that are neither among the first `sinks` nor the newest `window` tokens."""
        kept = (self._slots < self._sinks) | (self._slots >= self.length - self._window)
        self._slots, self._exact = self._slots[kept], self._exact[:, kept]

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.length = min(self.length, length)
        kept = self._slots < self.length
        self._slots, self._exact = self._slots[kept], self._exact[:, kept]

    def take(self, sequences: Chosen) -> None:
        """Replace the batch by sequences of it, some perhaps several times."""
        self._room, self._exact = self.encoded[sequences], self._exact[sequences]

    def stored(self) -> Stored:
        """Return what attention reads now; later changes of this side do not change it, but for `truncate`."""
        row_of = np.full(self.length, -1)
        row_of[self._slots] = np.arange(len(self._slots))
        kv_heads = self._room.lead[2]
        return Stored(self.encoded, self._exact, np.broadcast_to(row_of[:, None], (self.length, kv_heads)))

    def _reserve(self, length: int) -> None:
        batch, room, kv_heads = self._room.lead
        if length <= room:
            return
        grown = self.spec.zeros((batch, length + max(length // SPARE, MIN_SPARE), kv_heads))
        grown[:, : self.length] = self.encoded
        self._room = grown
