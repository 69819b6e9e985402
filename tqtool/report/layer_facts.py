"""What attention one layer has: read from a manifest or the arrays, measured by, and shown in the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What attention one layer has, and what a source holds of it: facts of a layer, never of all by the first."""

    layer: int
    kv_heads: int
    query_heads: int
    tokens: int  # keys of a head
    queries: int  # of a query head; 0 where they are missing and keys stand in
    key_dim: int
    value_dim: int
    scale: float  # c of s = c q.k
    causal: bool
    window: int | None = None  # a query sees keys less than this many positions away
    chunk: int | None = None  # a query sees the keys of its own chunk of so many positions
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: tuple[float, ...] = ()  # a learned logit of each query head, one more key of value zero
    alibi_slopes: tuple[float, ...] = ()  # of each query head: slope * distance is taken off a score
    first_token: int = 0  # position of the first stored key
    latent: bool = False  # one stored vector a token is key and, in its first value_dim coordinates, value

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Lengths of the vectors that are stored of a token and KV head: key and value, or a latent that is both."""
        return (self.key_dim,) if self.latent else (self.key_dim, self.value_dim)
