"""The configurations that `validate` measures, as coders of one side: what decoding gives back, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.codec import decode, encode, expected_error
from tqtool.codec.sizes import KVConfig, vector_bytes
from tqtool.codec.spec import CodecSpec
from tqtool.codec.terms import FLOAT16_BYTES, FLOAT32_BYTES, UNTOUCHED, Law, Meta, ScaleRule, packed_bytes
from tqtool.dtypes import Float32Array
from tqtool.report.layer_facts import LayerFacts
from tqtool.report.params import Params
from tqtool.validation.dataset import Dataset
from tqtool.validation.engines import Baseline, VectorFormat, baseline
from tqtool.validation.measure import Coder, Pair

Side = Literal["k", "v"]

CONTROL = KVConfig(UNTOUCHED, UNTOUCHED)


@dataclass(frozen=True, slots=True)
class SidePlan:
    """How keys, or values, are stored: the options of one side."""

    scale_rule: ScaleRule
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
        scale_rule=params.key_scale_rule if side == "k" else params.value_scale_rule,
        meta=params.meta,
        law=params.law,
        center=params.center_keys if side == "k" else params.center_values,
        protected=frozenset(params.protect_layers),
        sink_tokens=params.sink_tokens,
        residual_window=params.residual_window,
    )


def turboquant_coder(bits: int, plan: SidePlan) -> Coder:
    """Return the coder of one width. Made of plain functions, so that any executor can carry it elsewhere."""
    return Coder(
        name=str(bits),
        restore=partial(restore, bits=bits, plan=plan),
        expected=None if bits == UNTOUCHED else partial(expected_energy, bits=bits, plan=plan),
        distortion=partial(known_distortion, bits=bits, law=plan.law),
    )


def restore(x: Float32Array, layer: int, seed: int, *, bits: int, plan: SidePlan) -> Float32Array:
    """Return what decoding gives for the keys or values of a head, (tokens, dim)."""
    if bits == UNTOUCHED or layer in plan.protected or plan.split(len(x))[0] == 0:
        return x.copy()
    coded, mean = _coded(x, plan)
    spec = CodecSpec(x.shape[1], bits, plan.law, plan.scale_rule, plan.meta, seed)
    # Subtracting an all-zero mean is exact, and so is adding it back.
    restored = decode(encode(coded - mean, spec, threads=1), threads=1) + mean
    return np.concatenate([x[: plan.sink_tokens], restored])


def expected_energy(x: Float32Array, layer: int, *, bits: int, plan: SidePlan) -> float:
    """Return the summed squared error that theory expects of `restore`, mean over rotations."""
    if layer in plan.protected:
        return 0.0
    coded, mean = _coded(x, plan)
    energy = float(np.sum((coded - mean).astype(np.float64) ** 2))
    return energy * expected_error(CodecSpec(x.shape[1], bits, plan.law, plan.scale_rule, plan.meta))


def _coded(x: Float32Array, plan: SidePlan) -> tuple[Float32Array, Float32Array]:
    """Return the tokens that become codes and what is taken off them first, (dim,)."""
    coded = x[plan.sink_tokens :]
    mean = coded.mean(axis=0, dtype=np.float64) if plan.center and len(coded) else np.zeros(x.shape[1])
    return coded, mean.astype(np.float32)


def known_distortion(dim: int, *, bits: int, law: Law) -> float:
    """Return D_b of a width."""
    return 0.0 if bits == UNTOUCHED else lloyd_max(dim, bits, law).distortion


def head_bytes(bits: int, plan: SidePlan, *, tokens: int, dim: int, layer: int) -> int:
    """Return the stored bytes of one side of one head: codes, metadata, tokens kept exact, and the mean."""
    if bits == UNTOUCHED or layer in plan.protected:
        return tokens * FLOAT16_BYTES * dim
    coded, kept = plan.split(tokens)
    mean = FLOAT32_BYTES * dim if plan.center else 0
    return coded * vector_bytes(dim, bits, plan.meta) + kept * FLOAT16_BYTES * dim + mean


def shared_bytes(sides: Iterable[tuple[int, int]]) -> int:
    """Return what all vectors share whatever their number: signs and tables of the (dim, bits) in use."""
    in_use = {(dim, bits) for dim, bits in sides if bits != UNTOUCHED}
    tables: int = sum((2 * 2**bits - 1) * FLOAT32_BYTES for _, bits in in_use)
    return sum(packed_bytes(dim, 1) for dim in {dim for dim, _ in in_use}) + tables


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """One row to measure: a pair of coders and what it stores."""

    name: str
    kind: Literal["control", "turboquant", "baseline"]
    pair: Pair
    quantized: tuple[bool, bool]  # whether keys, values should be changed
    side_bytes: Callable[[int, LayerFacts], tuple[int, int]]  # (tokens, layer) -> bytes of K and V of one head
    bits: tuple[int, int] = (UNTOUCHED, UNTOUCHED)  # of ours: the tables that all vectors of a side share
    note: str = ""


def configurations(data: Dataset, params: Params) -> tuple[list[Configuration], dict[str, Coder], dict[str, Coder]]:
    """Return the control, the asked configurations and the baselines, and the key and value coders by name."""
    keys, values = side_plan(params, "k"), side_plan(params, "v")
    configs = list(dict.fromkeys([CONTROL, *map(KVConfig.parse, params.configs)]))
    key_widths, value_widths = (
        dict.fromkeys((*(c.key_bits for c in configs), *params.recommend_widths)),
        dict.fromkeys((*(c.value_bits for c in configs), *params.recommend_widths)),
    )
    key_coders = {str(bits): turboquant_coder(bits, keys) for bits in key_widths}
    value_coders = {str(bits): turboquant_coder(bits, values) for bits in value_widths}
    rows = [turboquant_row(config, keys, values) for config in configs]
    for one in baselines_for(data, params):
        key_coders[one.key.name], value_coders[one.value.name] = baseline_coder(one.key), baseline_coder(one.value)
        rows.append(baseline_row(one))
    return rows, key_coders, value_coders


def turboquant_row(config: KVConfig, keys: SidePlan, values: SidePlan) -> Configuration:
    """Return a configuration of ours."""

    def side_bytes(tokens: int, facts: LayerFacts) -> tuple[int, int]:
        return (
            head_bytes(config.key_bits, keys, tokens=tokens, dim=facts.key_dim, layer=facts.layer),
            0
            if facts.latent
            else head_bytes(config.value_bits, values, tokens=tokens, dim=facts.value_dim, layer=facts.layer),
        )

    return Configuration(
        name=str(config),
        kind="control" if config == CONTROL else "turboquant",
        pair=(str(config.key_bits), str(config.value_bits)),
        quantized=(config.key_bits != UNTOUCHED, config.value_bits != UNTOUCHED),
        side_bytes=side_bytes,
        bits=(config.key_bits, config.value_bits),
    )


def baselines_for(data: Dataset, params: Params) -> list[Baseline]:
    """Return the asked baselines that can store this dataset's vectors."""
    return [one for one in map(baseline, params.baselines) if unfit_dim(one, data) is None]


def unfit_dim(one: Baseline, data: Dataset) -> tuple[int, str] | None:
    """Return the first length of vectors that a baseline cannot store, and why; None where it stores all."""
    dims = dict.fromkeys(dim for facts in data.facts for dim in facts.stored_dims)
    return next(((dim, reason) for dim in dims if (reason := one.dims(dim))), None)


def baseline_coder(form: VectorFormat) -> Coder:
    """Return an engine's format as a coder; no rotation seed plays a part in it."""
    return Coder(form.name, partial(_restore_format, form.restore))


def _restore_format(
    function: Callable[[Float32Array], Float32Array], x: Float32Array, layer: int, seed: int
) -> Float32Array:
    return function(x)


def baseline_row(one: Baseline) -> Configuration:
    """Return an engine's choice as a row. Layers that the engine leaves in float16 are noted, not simulated."""
    notes = [f"{one.engine}: {one.note}" if one.note else one.engine]
    if one.skipped:
        notes.append(
            f"the engine also keeps {one.skipped} layers of a model in float16, which this row neither does nor counts"
        )
    exact = one.key.name == "fp16"
    return Configuration(
        name=one.name,
        kind="baseline",
        pair=(one.key.name, one.value.name),
        quantized=(not exact, not exact),
        side_bytes=lambda tokens, facts: (
            one.key.stored_bytes(tokens, facts.key_dim),
            0 if facts.latent else one.value.stored_bytes(tokens, facts.value_dim),
        ),
        note="; ".join(notes),
    )
