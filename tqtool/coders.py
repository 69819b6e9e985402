"""The configurations that `validate` measures, as coders of one side: what decoding gives back, and at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.codebook import Law, distortion, lloyd_max
from tqtool.codec import CodecSpec, ScaleRule, decode, encode, expected_error
from tqtool.measure import Coder
from tqtool.report import Params
from tqtool.sizes import FLOAT16_BYTES, FLOAT32_BYTES, UNTOUCHED, Meta, packed_bytes, vector_bytes

Array32 = NDArray[np.float32]
Side = Literal["k", "v"]


@dataclass(frozen=True, slots=True)
class SidePlan:
    """How keys, or values, are stored: the options of one side."""

    rule: ScaleRule
    meta: Meta
    law: Law
    center: bool
    protected: frozenset[int]  # layer numbers
    sink_tokens: int
    residual_window: int

    def split(self, tokens: int) -> tuple[int, int]:
        """Return how many tokens of a cache are stored as codes and how many are kept exact."""
        kept = min(tokens, self.sink_tokens + self.residual_window)
        return tokens - kept, kept


def side_plan(params: Params, side: Side) -> SidePlan:
    """Return the options of one side."""
    return SidePlan(
        rule=params.key_scale_rule if side == "k" else params.value_scale_rule,
        meta=params.meta,
        law=params.law,
        center=params.center_keys if side == "k" else params.center_values,
        protected=frozenset(params.protect_layers),
        sink_tokens=params.sink_tokens,
        residual_window=params.residual_window,
    )


def turboquant_coder(bits: int, plan: SidePlan, layers: tuple[int, ...]) -> Coder:
    """Return the coder of one width; `layers` are the numbers of the dataset's layers."""

    def part(x: Array32) -> tuple[Array32, Array32]:
        coded = x[plan.sink_tokens :]
        mean = coded.mean(axis=0, dtype=np.float64) if plan.center and len(coded) else np.zeros(x.shape[1])
        return coded, mean.astype(np.float32)

    def spec(x: Array32, seed: int) -> CodecSpec:
        return CodecSpec(x.shape[1], bits, plan.law, plan.rule, plan.meta, seed)

    def restore(x: Array32, index: int, seed: int) -> Array32:
        if bits == UNTOUCHED or layers[index] in plan.protected or plan.split(len(x))[0] == 0:
            return x.copy()
        coded, mean = part(x)
        # Subtracting an all-zero mean is exact, and so is adding it back.
        restored = decode(encode(coded - mean, spec(x, seed), threads=1), threads=1) + mean
        return np.concatenate([x[: plan.sink_tokens], restored])

    def expected(x: Array32, index: int) -> float:
        if layers[index] in plan.protected:
            return 0.0
        coded, mean = part(x)
        energy = float(np.sum((coded - mean).astype(np.float64) ** 2))
        return energy * expected_error(spec(x, 0))

    def known_distortion(dim: int) -> float:
        return 0.0 if bits == UNTOUCHED else distortion(lloyd_max(dim, bits, plan.law))

    return Coder(str(bits), restore, None if bits == UNTOUCHED else expected, known_distortion)


def head_bytes(bits: int, plan: SidePlan, *, tokens: int, dim: int, layer: int) -> int:
    """Return the stored bytes of one side of one head: codes, metadata, tokens kept exact, and the mean."""
    if bits == UNTOUCHED or layer in plan.protected:
        return tokens * FLOAT16_BYTES * dim
    coded, kept = plan.split(tokens)
    mean = FLOAT32_BYTES * dim if plan.center else 0
    return coded * vector_bytes(dim, bits, plan.meta) + kept * FLOAT16_BYTES * dim + mean


def shared_bytes(widths: set[int], dim: int) -> int:
    """Return what all vectors share whatever their number: the signs and the tables of the widths in use."""
    tables = sum((2 * 2**bits - 1) * FLOAT32_BYTES for bits in widths - {UNTOUCHED})
    return packed_bytes(dim, 1) + tables if tables else 0
