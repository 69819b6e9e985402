"""The report as one HTML file that opens from disk: no script runs in it and no request leaves it.

Selection, hover and folding are CSS and HTML alone, so the page is the same with scripts disabled and its policy
forbids them. The template is `templates/report.html.j2`; this module gives it numbers as text and plots as coordinates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tqtool.rendering.report import figures, over_prompts
from tqtool.rendering.report.data import data_parts
from tqtool.rendering.report.figures import figure, summary
from tqtool.rendering.report.plot import pareto_panel
from tqtool.rendering.report.specification import compared_sources
from tqtool.report.gates import LEVELS, limit_of, split_metric
from tqtool.report.model import METRICS, LayerValues, Report, Row, Source
from tqtool.report.serialize import to_plain
from tqtool.templating import template

MAP_METRICS = ("kl", "tv", "v_readout_err", "rel_err", "cos")
MAP_CELLS = 4000  # a heat map with more is drawn with one mean and one worst head per layer
PAGE_CELLS = 8000  # the same for all maps of a page together, which keeps the file small
SHADES = 9
LEAST_RANGE = math.log(4)  # a map whose heads differ by less does not use all shades: it is even, and looks so


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric of one configuration: rows of (text, shade), shade 0 (best) to SHADES - 1, or "x" unknown."""

    config: int  # index of the configuration among the source's rows
    metric: int  # index in MAP_METRICS
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    worst: tuple[tuple[str, str], ...]  # the worst heads by name, with their value
    low: str  # of the best head
    high: str


def report_html(report: Report) -> str:
    """Return the complete page."""
    report = replace(report, run={})  # so that the page is the same from run to run
    cells = sum(
        len(source.layers) * source.kv_heads * len(MAP_METRICS) * (len(figures.rows_of(report, source)) - 1)
        for source in report.sources
    )
    gated = figures.is_gated(report)
    sources = [_source(report, source, gated, binned=cells > PAGE_CELLS) for source in report.sources]
    return _template()(
        report=report,
        gated=gated,
        headline=figures.headline(report),
        scope=figures.SCOPE,
        synthetic=figures.SYNTHETIC,
        state=("pass" if report.gate.passed else "fail") if gated else "",
        symbols=figures.SYMBOLS,
        sources=sources,
        options=figures.option_parts(report),
        diagnosis=figures.diagnosis(report),
        warnings=figures.warnings(report),
        gate_title=figures.gate_title(report),
        missed=sum(check.status != "pass" for check in report.gate.checks),
        goal=figures.recommendation_goal,
        prompts=over_prompts,
        json=report_data(report),
    )


def report_data(report: Report) -> str:
    """Return the report's JSON for a script element: no "<" is left in it, so nothing can end the element."""
    text = json.dumps(to_plain(report), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


@cache
def _template() -> Callable[..., str]:
    filters: dict[str, Callable[..., str]] = {
        "figure": figure,
        "base": lambda name: split_metric(name)[0],
        "mean": figures.mean_text,
        "tail": figures.tail_text,
        "ci": figures.ci_text,
        "bad_tail": figures.bad_tail_text,
        "worst": figures.worst_text,
        "shortfall": figures.shortfall,
    }
    return template("report.html.j2", filters, html=True)


def _source(report: Report, source: Source, gated: bool, *, binned: bool) -> dict[str, Any]:
    """Return what the template shows of one source."""
    rows = figures.rows_of(report, source)
    stored = [row for row in rows if row.kind != "control"]
    names = [row.config for row in stored]
    values = [v for v in report.layers if v.source == source.name and v.config in names]
    limits = [(level, limit_of(level, "kl")) for level in LEVELS]
    asked = [(report.gate.name, check.limit) for check in report.gate.checks if check.metric in ("rel_err",)]
    panels = [
        pareto_panel(stored, "kl", METRICS["kl"].title, limits),
        pareto_panel(stored, "rel_err", METRICS["rel_err"].title, asked[:1]),
    ]
    binned = binned or len(source.layers) * source.kv_heads > MAP_CELLS
    columns = ("mean", "worst") if binned else tuple(f"H{h}" for h in range(source.kv_heads))
    maps = [
        _heat_map(c, m, columns, [v for v in values if v.config == config], binned=binned)
        for m in range(len(MAP_METRICS))
        for c, config in enumerate(names)
    ]
    return {
        "source": source,
        "compared": source in compared_sources(report),
        "parts": data_parts(source),
        "rows": rows,
        "stored": stored,
        "keys": [figures.verdict_key(row, gated=gated) for row in rows],
        "words": [figures.verdict_word(row, gated=gated) for row in rows],
        "panels": [panel for panel in panels if panel],
        "causes": _causes(stored),
        "metrics": [metric for metric in METRICS.values() if any(metric.id in row.metrics for row in rows)],
        "maps": [heat for heat in maps if heat],
        "chosen": _chosen(stored, gated),
        "map_metrics": [METRICS[metric] for metric in MAP_METRICS],
        "binned": binned,
        "buckets": _buckets(stored),
        "published": any(row.published for row in stored),
        "predicted": [key for key in METRICS if any(key in row.predicted or key in row.published for row in stored)],
    }


def _chosen(rows: Sequence[Row], gated: bool) -> int:
    """Return the index of the row whose heat map is shown first: the cheapest of the best verdict."""
    order = ("pass", *figures.LEVELS, "unverified", "fail", "error")
    ours = [i for i, row in enumerate(rows) if row.kind == "turboquant"]

    def rank(i: int) -> tuple[int, int, float]:
        key = figures.verdict_key(rows[i], gated=gated)
        return order.index(key), figures.LEVELS.index(rows[i].level), rows[i].bits_per_value

    return min(ours, key=rank, default=0)


def _causes(rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
    """Return each row with the widths (percent of the largest) of its K-only and V-only output error."""
    pairs = [(row, summary(row, "rel_err_konly").mean, summary(row, "rel_err_vonly").mean) for row in rows]
    known = [(row, k, v) for row, k, v in pairs if k >= 0 and v >= 0]
    largest = max((x for _, k, v in known for x in (k, v)), default=0.0)
    return [(row, round(100 * k / largest, 1), round(100 * v / largest, 1)) for row, k, v in known] if largest else []


def _heat_map(
    config: int, metric: int, columns: tuple[str, ...], values: Sequence[LayerValues], *, binned: bool
) -> HeatMap | None:
    """Return one map on a logarithmic scale of shades of its own, None where nothing of it was measured."""
    name = MAP_METRICS[metric]
    higher = METRICS[name].better == "higher"

    def badness(x: float) -> float:
        return max(1 - x if higher else x, figures.EXACT)

    heads = {v.layer: [x for x in v.heads.get(name, ()) if not math.isnan(x)] for v in values}
    ranked = sorted(
        (-badness(x), f"L{v.layer:02d}.H{h}", x) for v in values for h, x in enumerate(v.heads.get(name, ())) if x == x
    )
    if not ranked:
        return None
    low, high = math.log(-ranked[-1][0]), math.log(-ranked[0][0])
    middle, half = (low + high) / 2, max(high - low, LEAST_RANGE) / 2

    def cell(x: float) -> tuple[str, str]:
        if math.isnan(x):
            return figures.MISSING, "x"
        share = (math.log(badness(x)) - middle) / (2 * half) + 0.5
        return compact(x), str(min(max(int(share * SHADES), 0), SHADES - 1))

    rows = []
    for v in values:
        worst = max(heads[v.layer], key=badness, default=math.nan)
        shown = (v.values.get(name, math.nan), worst) if binned else v.heads.get(name, ())
        rows.append((f"L{v.layer:02d}", tuple(map(cell, shown))))
    top = tuple((where, figure(x, name)) for _, where, x in ranked[:5])
    return HeatMap(config, metric, columns, tuple(rows), top, figure(ranked[-1][2], name), figure(ranked[0][2], name))


def compact(x: float) -> str:
    """Return a number in four characters or so: .027, 2e-4, 1.2, .990."""
    if abs(x) < 0.0005:
        return "0" if abs(x) < figures.EXACT else figures.power(f"{x:.0e}")
    if abs(x) < 0.9995:
        return f"{x:.3f}".replace("0.", ".", 1)
    return ">.999" if x < 1 else f"{x:.2f}" if x < 9.995 else f"{x:.3g}"


def _buckets(rows: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """Return position, query count and KL of each row, one entry per position bucket."""
    have = [row for row in rows if len(row.buckets) > 1]
    if not have:
        return []
    return [
        (
            f"{bucket.first}–{bucket.last}",
            figures.count(bucket.queries),
            [
                figure(row.buckets[i].values.get("kl", math.nan), "kl") if i < len(row.buckets) else figures.MISSING
                for row in rows
            ],
        )
        for i, bucket in enumerate(have[0].buckets)
    ]
