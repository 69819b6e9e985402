"""The facts of a dataset as the report states them: what was measured, what it looks like, what to be warned of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tqtool.codec.codebook import lloyd_max
from tqtool.codec.terms import MAX_BITS, UNTOUCHED
from tqtool.health import FLOAT16_MAX, LARGE_OFFSET
from tqtool.report.aggregate import layer_name
from tqtool.report.gates import limit_of, too_little
from tqtool.report.model import Notice, Recommendation, Row, Source
from tqtool.report.params import Params
from tqtool.validation.coders import SidePlan, head_bytes, side_plan, unfit_dim
from tqtool.validation.engines import BASELINES
from tqtool.validation.measure import Pair
from tqtool.validation.metrics import mean
from tqtool.validation.recommend import LayerCurve, Width, recommend
from tqtool.validation.rows import Measured, held_tokens, overflowed
from tqtool.validation.visibility import left_out

SMALL_KL = 0.5  # nats; beyond it the second order says nothing
KL_GAP = 0.3


def kl_target(params: Params) -> float:
    """Return the KL that a layer is allowed: the user's, else the balanced level's."""
    return limit_of("balanced", "kl") if params.target_kl is None else params.target_kl


def source_of(measured: Measured, params: Params) -> Source:
    """Return the facts of a dataset, as measured."""
    data, results = measured.data, measured.seeds[0]
    first = data.facts[0]
    reads = [float(np.mean(r.queries["", ""]["n_eff"])) for r in results]
    offsets, outliers = (np.array([r.facts[name] for r in results]) for name in ("key_offset", "outlier_share"))
    return Source(
        name=data.name,
        kind=data.kind,
        layers=data.layers,
        kv_heads=first.kv_heads,
        query_heads=first.query_heads,
        tokens=first.tokens,
        queries=len(results[0].positions) // first.group,
        dim=first.key_dim,
        query_source="synthetic" if data.kind == "synthetic" else "proxy" if data.proxies else "captured",
        causal=all(facts.causal for facts in data.facts),
        scale=first.scale,
        n_eff_low=min(reads),
        n_eff_high=max(reads),
        key_offset=float(np.median(offsets)),
        key_offset_worst=float(offsets.max()),
        zero_keys=sum(int(r.facts["zero_keys"]) for r in results),
        zero_values=sum(int(r.facts["zero_values"]) for r in results),
        iid=all(r.facts["iid"] for r in results),
        min_key_bits=min_key_bits(measured, kl_target(params)),
        notes=data.notes,
        sink_share=float(np.mean([np.mean(r.queries["", ""]["sink_share"]) for r in results])),
        outlier_share=float(np.median(outliers[~np.isnan(outliers)])) if not np.isnan(outliers).all() else 0.0,
        layer_facts=data.facts,
        model=data.model,
        model_layers=data.model_layers,
        context=measured.context,
        fewest_keys=min(max(r.keys_seen for r in results if r.layer == layer) for layer in data.layers),
        fewest_queries=min(sum(len(r.positions) for r in results if r.layer == layer) for layer in data.layers),
        queries_left_out=sum(left_out(facts) for facts in data.facts),
    )


def min_key_bits(measured: Measured, target: float) -> dict[str, int]:
    """Return, by layer, the fewest key bits with D_b <= target d / (c^2 M): half of what the KL target allows.

    Predicted from the exact attention, without quantizing; 16 where 8 bits are not enough.
    """
    found = {}
    for layer in dict.fromkeys(measured.where.layers):
        results = [r for r in measured.seeds[0] if r.layer == layer]
        noise = float(np.mean([np.mean(r.queries["", ""]["score_noise"]) for r in results]))
        facts = measured.facts(layer)
        dim = facts.key_dim
        allowed = target * dim / (facts.scale**2 * noise) if noise > 0 else np.inf
        widths = (b for b in range(1, MAX_BITS + 1) if lloyd_max(dim, b, measured.law).distortion <= allowed)
        found[layer_name(layer)] = next(widths, UNTOUCHED)
    return found


def warnings_of(measured: Measured, source: Source, params: Params) -> list[Notice]:
    """Return what a reader must know about the data before reading the numbers."""
    found = []
    if source.zero_keys or source.zero_values:
        text = f"{source.zero_keys} zero keys and {source.zero_values} zero values are left out of cosines"
        found.append(Notice("zero-vectors", text, source.name))
    if source.query_source == "proxy":
        text = "no queries: keys stand in for them, every verdict is UNVERIFIED; capture queries too"
        found.append(Notice("proxy-queries", text, source.name))
    if little := too_little(source):
        found.append(
            Notice("too-little", f"no level, no gate and no recommendation from so little: {little}", source.name)
        )
    if source.key_offset_worst > LARGE_OFFSET:
        text = (
            f"keys share one constant vector with {source.key_offset:.0%} of their energy (median head; "
            f"worst {source.key_offset_worst:.0%}); "
            + ("--center-keys takes it off" if params.center_keys else "try --center-keys")
        )
        found.append(Notice("key-offset", text, source.name))
    if source.queries_left_out:
        layers = [facts.layer for facts in source.layer_facts if left_out(facts)]
        text = (
            f"{source.queries_left_out} queries of a query head in {len(layers)} layers (first: {layers[0]}) are left "
            "out: some of the keys they see are no longer stored"
        )
        found.append(Notice("queries-left-out", text, source.name))
    if source.iid and source.kind == "dump":
        theory = ", ".join(
            f"{np.sqrt(1 - lloyd_max(source.dim, bits, params.law).distortion):.4f} at {bits}" for bits in (2, 3, 4)
        )
        text = (
            "the data look independent and Gaussian: figures describe the codebook, not a model; theory gives a vector "
            f"cosine of {theory} bits for any such data"
        )
        found.append(Notice("iid", text, source.name))
    norm = max(r.facts["norm_max"] for r in measured.seeds[0])
    if norm > FLOAT16_MAX:
        text = f"vectors are up to {norm:.6g} long: beyond float16, so engines that store norms in it lose them"
        found.append(Notice("norm-range", text, source.name))
    if params.center_values:
        text = (
            "values are stored less their mean over all tokens; where sink tokens carry small values this can hurt: "
            "compare v_readout_err without --center-values"
        )
        found.append(Notice("center-values", text, source.name))
    if any(facts.latent for facts in source.layer_facts):
        text = "a latent layer stores one vector a token, with the bits of the keys: those of the values do nothing"
        found.append(Notice("latent", text, source.name))
    for one in BASELINES:
        if one.name in params.baselines and (unfit := unfit_dim(one, measured.data)):
            text = f"baseline {one.name} is left out: it {unfit[1]}, these vectors have {unfit[0]} coordinates"
            found.append(Notice("baseline", text, source.name))
    for name in overflowed(measured):
        text = f"{name} is left out: its float16 numbers overflow on vectors this long"
        found.append(Notice("overflow", text, source.name))
    if measured.thinned_to is not None:
        text = f"queries were thinned evenly to {measured.thinned_to} of each head to bound memory"
        found.append(Notice("thinned", text, source.name))
    return found


def cross_check(rows: Sequence[Row]) -> list[Notice]:
    """Return a warning where KL is far from half the variance of the score noise, which small noise makes it."""
    found = []
    for row in rows:
        kl, half = row.metrics["kl"].mean, row.metrics["sigma_rms"].mean ** 2 / 2
        if half > 0 and kl < SMALL_KL and abs(kl / half - 1) > KL_GAP:
            text = f"{row.config}: KL {kl:.3g} is far from sigma_a^2/2 = {half:.3g}; read the tails, not the means"
            found.append(Notice("kl-gap", text, row.source))
    return found


def recommended(measured: Measured, params: Params) -> Recommendation:
    """Return the bits of every layer under the budget, else for the KL target."""
    curves = [_layer_curve(measured, params, layer) for layer in dict.fromkeys(measured.where.layers)]
    if params.budget is None:
        return recommend(measured.data.name, curves, target_kl=kl_target(params))
    return recommend(measured.data.name, curves, budget=params.budget)


def _layer_curve(measured: Measured, params: Params, layer: int) -> LayerCurve:
    """What each width costs and damages in one layer. A protected layer has one choice; 16 bits damage nothing."""
    results = [r for seed in measured.seeds for r in seed if r.layer == layer]
    facts = measured.facts(layer)
    tokens = held_tokens(facts, measured.context)
    keys, values = side_plan(params, "k"), side_plan(params, "v")
    widths = () if layer in params.protect_layers else params.recommend_widths

    def choice(bits: int, metric: str, pair: Pair, plan: SidePlan, dim: int) -> Width:
        error = mean(np.array([mean(r.queries[pair][metric]) for r in results]))
        stored = facts.kv_heads * head_bytes(bits, plan, tokens=tokens, dim=dim, layer=layer)
        return Width(bits, stored, error)

    return LayerCurve(
        layer,
        keys=tuple(choice(b, "kl", (str(b), ""), keys, facts.key_dim) for b in (*widths, UNTOUCHED)),
        values=tuple(choice(b, "v_readout_err", ("", str(b)), values, facts.value_dim) for b in (*widths, UNTOUCHED)),
        coordinates=facts.kv_heads * tokens * (facts.key_dim + facts.value_dim),
    )
