"""Run configurations over data into a Report: plan, measure every head, aggregate, judge. Values only, no text layout.

A unit of work is one KV head of one layer under one rotation seed, with all configurations; units share nothing and
merge in their order, so the report does not depend on threads. Memory: the queries of a head are thinned evenly
where the per-query values of all heads would pass `MAX_VALUES`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tqtool import __version__
from tqtool.aggregate import clusters, layer_name
from tqtool.codebook import distortion, lloyd_max
from tqtool.codec import engine, refusal
from tqtool.coders import head_bytes, shared_bytes, side_plan, turboquant_coder
from tqtool.dataset import Dataset, Head, heads_of
from tqtool.diagnosis import OFFSET_SHARE, diagnose
from tqtool.errors import BugError, InputError, UsageError
from tqtool.gates import decide, limit_of, reached, verdict
from tqtool.measure import Coder, HeadResult, Plan, measure_head
from tqtool.report import Input, LayerValues, Notice, Params, Report, Row, Source
from tqtool.report_json import rounded
from tqtool.rows import Configuration, Measured, layers_of, rows_of
from tqtool.sizes import MAX_BITS, UNTOUCHED, KVConfig
from tqtool.units import ordered_map

Array = NDArray[np.float64]

KL_TARGET = limit_of("balanced", "kl")
MAX_VALUES = 1 << 26  # float64 values per query held at once: 512 MiB
CONTROL = KVConfig(UNTOUCHED, UNTOUCHED)
CONTROL_LIMIT = 1e-12  # of 1 - cos and of KL: the control compares a thing with itself


def turboquant_rows(data: Dataset, params: Params) -> tuple[list[Configuration], dict[str, Coder], dict[str, Coder]]:
    """Return the control and the asked configurations, and their key and value coders by name."""
    keys, values = side_plan(params, "k"), side_plan(params, "v")
    configs = list(dict.fromkeys([CONTROL, *map(KVConfig.parse, params.configs)]))
    key_coders = {str(c.key_bits): turboquant_coder(c.key_bits, keys, data.layers) for c in configs}
    value_coders = {str(c.value_bits): turboquant_coder(c.value_bits, values, data.layers) for c in configs}

    def row(config: KVConfig) -> Configuration:
        def side_bytes(tokens: int, dim: int, layer: int) -> tuple[int, int]:
            return (
                head_bytes(config.key_bits, keys, tokens=tokens, dim=dim, layer=layer),
                head_bytes(config.value_bits, values, tokens=tokens, dim=dim, layer=layer),
            )

        return Configuration(
            name=str(config),
            kind="control" if config == CONTROL else "turboquant",
            pair=(str(config.key_bits), str(config.value_bits)),
            side_bytes=side_bytes,
            shared_bytes=lambda dim: shared_bytes({config.key_bits, config.value_bits}, dim),
        )

    return [row(config) for config in configs], key_coders, value_coders


def measure(
    data: Dataset,
    params: Params,
    *,
    threads: int | None = None,
    executor: Executor | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Measured:
    """Measure every configuration on every head; `advance(1)` is called after each head and seed.

    Raises: `InputError` for data that cannot be measured, `BugError` if the control row is not exact.
    """
    rows, key_coders, value_coders = turboquant_rows(data, params)
    causal = data.causal or data.proxies
    if params.window and not causal and data.kind == "dump":
        raise UsageError("a window needs a causal mask", code="usage", hint="leave out --no-causal or --window")
    plan = Plan(
        pairs=tuple(dict.fromkeys(row.pair for row in rows)),
        key_coders=key_coders,
        value_coders=value_coders,
        scale=float(params.attention_scale) if params.attention_scale else data.scale,
        causal=causal,
        window=params.window if causal else None,
        residual_window=params.residual_window,
        nosink_tokens=params.nosink_tokens,
        key_mean_removed=params.center_keys,
    )
    limit, thinned = _query_limit(data, plan, params)

    def units() -> Iterator[tuple[Head, int, int]]:
        for index in range(len(data.layers)):
            for head in _checked_heads(data, index, limit):
                for seed in params.seeds:
                    yield head, index, seed

    def run(unit: tuple[Head, int, int]) -> HeadResult:
        head, index, seed = unit
        try:
            return measure_head(head, plan, index, seed)
        except InputError as error:
            place = f"{data.name}: layer {head.layer}, head {head.head}"
            raise InputError(f"{place}: {error}", code=error.code, hint="rescale the data") from error

    found: list[list[HeadResult]] = [[] for _ in params.seeds]
    for number, result in enumerate(ordered_map(run, units(), threads=threads, executor=executor)):
        found[number % len(params.seeds)].append(result)
        advance(1)
    where = clusters([r.layer for r in found[0]], [r.head for r in found[0]], params.bootstrap_draws)
    seeds = tuple(map(tuple, found))
    measured = Measured(data, plan, tuple(rows), seeds, where, params.law, limit if thinned else None)
    _check_control(measured)
    return measured


def _query_limit(data: Dataset, plan: Plan, params: Params) -> tuple[int | None, bool]:
    """Return the most queries of each query head, and whether memory, not the user, set it."""
    columns = 4 + 11 * len(plan.key_coders) + 5 * len(plan.value_coders) + 4 * len(plan.pairs)
    affordable = MAX_VALUES // (columns * len(params.seeds) * len(data.layers) * data.query_heads)
    wanted = params.max_queries or max(data.queries, data.tokens)
    if wanted > affordable:
        return max(1, affordable), (data.queries or data.tokens) > affordable
    return params.max_queries, False


def _checked_heads(data: Dataset, index: int, limit: int | None) -> list[Head]:
    for name, x in zip("qkv", data.load(index), strict=True):
        if x is not None and not np.isfinite(x).all():
            raise InputError(
                f"{data.name}: {name} of layer {data.layers[index]}: {refusal(x)}",
                code="non-finite",
                hint="a query, key or value that is not finite has no attention; repair the capture",
            )
    return heads_of(data, index, limit)


def _check_control(measured: Measured) -> None:
    """Raises: `BugError` unless the untouched row is exact: then no other row could be trusted."""
    pair = (str(UNTOUCHED), str(UNTOUCHED))
    for results in measured.seeds:
        for result in results:
            cos, kl = result.queries[pair]["cos"], result.queries[pair[0], ""]["kl"]
            worst = max(np.nanmax(1 - cos, initial=0.0), np.nanmax(np.abs(kl), initial=0.0))
            if not worst <= CONTROL_LIMIT or not np.isfinite(kl).all():
                raise BugError(
                    f"the control row {CONTROL} is off by {worst:.2g} in layer {result.layer}, head {result.head}",
                    code="control",
                    hint="nothing was quantized there, so the measurement itself is wrong; please report it",
                )


def validate(
    datasets: Iterable[Dataset],
    params: Params,
    *,
    threads: int | None = None,
    executor: Executor | None = None,
    advance: Callable[[float], None] = lambda amount: None,
    command: str = "",
) -> Report:
    """Measure the datasets and return the report, levels judged, no gate asked.

    Raises: as `measure`.
    """
    sources: list[Source] = []
    rows: list[Row] = []
    layers: list[LayerValues] = []
    warnings: list[Notice] = []
    inputs: list[Input] = []
    for data in datasets:
        measured = measure(data, params, threads=threads, executor=executor, advance=advance)
        source = source_of(measured, params)
        sources.append(source)
        rows += judged(rows_of(measured), source)
        layers += layers_of(measured)
        warnings += warnings_of(measured, source)
        inputs += data.inputs
    report = Report(
        tool=f"tqtool {__version__}",
        command=command,
        inputs=tuple(inputs),
        params=params,
        sources=tuple(sources),
        rows=tuple(rows),
        layers=rounded(tuple(layers)),
        gate=decide("none", (), rows, sources),
        diagnosis=(),
        next="",
        warnings=tuple(warnings),
        recommendations=(),
        environment=environment(),
        run={},
    )
    findings, following = diagnose(report)
    return replace(report, diagnosis=findings, next=following)


def source_of(measured: Measured, params: Params) -> Source:
    """Return the facts of a dataset, as measured."""
    data, results = measured.data, measured.seeds[0]
    reads = [float(np.mean(r.queries["", ""]["n_eff"])) for r in results]
    offsets, outliers = (known([r.facts[name] for r in results]) for name in ("key_offset", "outlier_share"))
    return Source(
        name=data.name,
        kind=data.kind,
        layers=data.layers,
        kv_heads=data.kv_heads,
        query_heads=data.query_heads,
        tokens=data.tokens,
        queries=len(results[0].positions) * data.kv_heads // data.query_heads,
        dim=data.dim,
        query_source="synthetic" if data.kind == "synthetic" else "proxy" if data.proxies else "captured",
        causal=measured.plan.causal,
        scale=measured.plan.scale,
        n_eff_low=min(reads),
        n_eff_high=max(reads),
        key_offset=float(np.median(offsets)) if len(offsets) else 0.0,
        key_offset_worst=float(offsets.max(initial=0.0)),
        zero_keys=sum(int(r.facts["zero_keys"]) for r in results),
        zero_values=sum(int(r.facts["zero_values"]) for r in results),
        iid=all(r.facts["iid"] for r in results),
        min_key_bits=min_key_bits(measured, KL_TARGET),
        notes=data.notes,
        sink_share=float(np.mean([np.mean(r.queries["", ""]["sink_share"]) for r in results])),
        outlier_share=float(np.median(outliers)) if len(outliers) else 0.0,
    )


def known(values: Sequence[float]) -> Array:
    """Return the values that are not NaN."""
    return np.array([value for value in values if value == value])


def min_key_bits(measured: Measured, target: float) -> dict[str, int]:
    """Return, by layer, the fewest key bits with D_b <= target d / (c^2 M): half of what the KL target allows.

    Predicted from the exact attention, without quantizing; 16 where 8 bits are not enough.
    """
    found = {}
    for layer in dict.fromkeys(measured.where.layers):
        results = [r for r in measured.seeds[0] if r.layer == layer]
        noise = float(np.mean([np.mean(r.queries["", ""]["score_noise"]) for r in results]))
        dim = int(results[0].facts["dim"])
        allowed = target * dim / (measured.plan.scale**2 * noise) if noise > 0 else np.inf
        widths = (b for b in range(1, MAX_BITS + 1) if distortion(lloyd_max(dim, b, measured.law)) <= allowed)
        found[layer_name(layer)] = next(widths, UNTOUCHED)
    return found


def judged(rows: Sequence[Row], source: Source) -> list[Row]:
    """Return the rows with level, status, verdict and Pareto mark."""
    found = []
    for row in rows:
        level, misses = reached(row, source)
        status = row.status
        if status == "pass" and source.query_source == "proxy" and row.kind != "control":
            status = "unverified"
        known = replace(row, level="none" if status == "error" else level, misses=misses, status=status)
        known = replace(known, verdict=verdict(known, source), pareto=not any(beats(o, row) for o in rows))
        found.append(known)
    return found


def beats(one: Row, other: Row) -> bool:
    """Whether `one` is no worse than `other` in bits, KL and read-out error, and better in one of them."""
    a, b = _costs(one), _costs(other)
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def _costs(row: Row) -> tuple[float, float, float]:
    return row.bits_per_value, row.metrics["kl"].mean, row.metrics["v_readout_err"].mean


def warnings_of(measured: Measured, source: Source) -> list[Notice]:
    """Return what a reader must know about the data before reading the numbers."""
    found = []
    if source.zero_keys or source.zero_values:
        text = f"{source.zero_keys} zero keys and {source.zero_values} zero values are left out of cosines"
        found.append(Notice("zero-vectors", text, source.name))
    if source.query_source == "proxy":
        text = "no queries: keys stand in for them, every verdict is UNVERIFIED; capture queries too"
        found.append(Notice("proxy-queries", text, source.name))
    if source.key_offset_worst > OFFSET_SHARE:
        text = (
            f"keys share one constant vector with {source.key_offset:.0%} of their energy (median head; "
            f"worst {source.key_offset_worst:.0%}); try --center-keys"
        )
        found.append(Notice("key-offset", text, source.name))
    if source.iid and source.kind == "dump":
        text = "the data look independent and Gaussian: figures describe the codebook, not a model"
        found.append(Notice("iid", text, source.name))
    if measured.thinned_to is not None:
        text = f"queries were thinned evenly to {measured.thinned_to} of each head to bound memory"
        found.append(Notice("thinned", text, source.name))
    return found


def environment() -> dict[str, str]:
    """Return what the numbers were made with; nothing that names a machine."""
    return {
        "tqtool": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "engine": engine(),
        "system": platform.system(),
        "processor": platform.machine(),
    }
