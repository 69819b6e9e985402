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
from functools import partial
from typing import Any

import numpy as np

from tqtool import __version__
from tqtool.codec.codec import engine
from tqtool.codec.terms import UNTOUCHED
from tqtool.dumps.inputs import Input
from tqtool.errors import BugError, InputError, UsageError
from tqtool.escapes import sayable
from tqtool.parallel import ordered_map
from tqtool.report.aggregate import clusters
from tqtool.report.gates import decide, reached, too_little, verdict
from tqtool.report.model import LayerValues, Notice, Recommendation, Report, Row, Source
from tqtool.report.params import Params
from tqtool.report.prompts import over_prompts
from tqtool.report.serialize import mapped, rounded
from tqtool.validation.coders import CONTROL, configurations
from tqtool.validation.dataset import Dataset, Head, head_of
from tqtool.validation.diagnosis import MOST, diagnose
from tqtool.validation.facts import cross_check, recommended, source_of, warnings_of
from tqtool.validation.measure import HeadResult, Plan, measure_head, values_per_query
from tqtool.validation.rows import Measured, layers_of, rows_of
from tqtool.validation.visibility import check_visibility

Unit = tuple[Head, int]  # and its rotation seed

MAX_VALUES = 1 << 26  # float64 values per query held at once: 512 MiB
CONTROL_LIMIT = 1e-12  # of 1 - cos and of KL: the control compares a thing with itself


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
    data = with_options(data, params)
    rows, key_coders, value_coders = configurations(data, params)
    plan = Plan(
        pairs=tuple(dict.fromkeys(row.pair for row in rows)),
        key_coders=key_coders,
        value_coders=value_coders,
        residual_window=params.residual_window,
        nosink_tokens=params.nosink_tokens,
        key_mean_removed=params.center_keys,
    )
    limit, thinned = _query_limit(data, plan, params)

    def units() -> Iterator[Unit]:
        for index in range(len(data.layers)):
            for number in range(data.facts[index].kv_heads):
                head = head_of(data, index, number, limit)
                for seed in params.seeds:
                    yield head, seed

    found: list[list[HeadResult]] = [[] for _ in params.seeds]
    run = partial(_run, plan=plan, name=data.name)
    for number, result in enumerate(ordered_map(run, units(), threads=threads, executor=executor)):
        found[number % len(params.seeds)].append(result)
        advance(1)
    where = clusters([r.layer for r in found[0]], [r.head for r in found[0]], params.bootstrap_draws)
    seeds = tuple(map(tuple, found))
    context = params.context or data.model_context
    measured = Measured(data, plan, tuple(rows), seeds, where, params.law, context, limit if thinned else None)
    _check_control(measured)
    return measured


def with_options(data: Dataset, params: Params) -> Dataset:
    """Return the data with the attention that options ask for in every layer; they win over a manifest.

    Raises: `InputError` (code `attention`, `keys-missing`) where a layer cannot be measured that way.
    """
    asked: dict[str, Any] = {}
    if params.attention_scale:
        asked["scale"] = float(params.attention_scale)
    if params.softcap is not None:
        asked["softcap"] = params.softcap
    if params.window is not None:
        asked["window"] = params.window
    layers = [replace(facts, **asked) for facts in data.facts]
    if data.kind == "synthetic":  # never causal, so a window says nothing of them
        layers = [facts if facts.causal else replace(facts, window=None) for facts in layers]
    check_visibility(data.name, layers)
    return replace(data, facts=tuple(layers))


def _run(unit: Unit, *, plan: Plan, name: str) -> HeadResult:
    head, seed = unit
    try:
        return measure_head(head, seed, plan=plan)
    except InputError as error:
        place = f"{name}: layer {head.layer}, head {head.head}"
        raise InputError(f"{place}: {error}", code=error.code, hint=error.hint) from error


def _query_limit(data: Dataset, plan: Plan, params: Params) -> tuple[int | None, bool]:
    """Return the most queries of each query head, and whether memory, not the user, set it."""
    columns = values_per_query(head_of(data, 0, 0, 1), plan)
    heads = sum(facts.query_heads if facts.queries else facts.kv_heads for facts in data.facts)
    affordable = MAX_VALUES // (columns * len(params.seeds) * heads)
    longest = max(facts.queries or facts.tokens for facts in data.facts)
    if (params.max_queries or longest) > affordable:
        return max(1, affordable), longest > affordable
    return params.max_queries, False


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


def _check_layers(sets: Sequence[Dataset], params: Params) -> None:
    there = sorted({layer for data in sets for layer in data.layers})
    for layer in params.protect_layers:
        if layer not in there:
            raise UsageError(
                f"protect_layers {layer}: no such layer; there are {', '.join(map(str, there))}", code="usage"
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

    Raises: as `measure`, and `UsageError` for a layer to protect that no dataset has.
    """
    sources: list[Source] = []
    rows: list[Row] = []
    layers: list[LayerValues] = []
    warnings: list[Notice] = []
    inputs: list[Input] = []
    recommendations: list[Recommendation] = []
    sets = [with_options(data, params) for data in datasets]  # what cannot be measured is refused before the rest
    _check_layers(sets, params)
    if params.recommend_widths and (latent := [f.layer for data in sets for f in data.facts if f.latent]):
        text = f"--recommend: layer {latent[0]} stores a latent, whose bits for keys and values cannot be parted"
        raise UsageError(text, code="usage", hint="compare rows instead, for instance -c K4/V4,K3/V3")
    for data in sets:
        measured = measure(data, params, threads=threads, executor=executor, advance=advance)
        source = source_of(measured, params)
        sources.append(source)
        found = judged(rows_of(measured), source)
        rows += found
        layers += layers_of(measured)
        warnings += warnings_of(measured, source, params) + cross_check(found)
        inputs += data.inputs
        if params.recommend_widths and data.kind == "dump" and not too_little(source):
            recommendations.append(recommended(measured, params))
    report = Report(
        tool=f"tqtool {__version__}",
        command=command,
        inputs=tuple(inputs),
        params=params,
        sources=tuple(sources),
        rows=tuple(replace(row, metrics=rounded(row.metrics)) for row in rows),
        layers=rounded(tuple(layers)),
        gate=decide("none", (), rows, sources),
        diagnosis=(),
        next="",
        warnings=tuple(warnings),
        recommendations=tuple(recommendations),
        environment=environment(),
        run={},
        prompts=rounded(over_prompts(rows, sources)),
    )
    return mapped(replace(report, diagnosis=diagnose(report)[:MOST]), str, sayable)


def judged(rows: Sequence[Row], source: Source) -> list[Row]:
    """Return the rows with level, status, verdict and Pareto mark."""
    found = []
    for row in rows:
        level, misses = reached(row, source)
        status = row.status
        if status == "pass" and row.kind != "control" and (source.query_source == "proxy" or too_little(source)):
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
