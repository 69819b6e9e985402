"""Two reports set side by side: what changed from A to B in each configuration that both hold.

Where both measured the same data the difference is taken head by head, so that what makes heads differ cancels, and
carries a 95 % interval from a bootstrap over the (layer, head) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tqtool.errors import InputError
from tqtool.report.aggregate import CONFIDENCE, MIN_CLUSTERS, clusters
from tqtool.report.model import METRICS, LayerValues, Report, Row

COMPARED = ("kl", "v_readout_err", "rel_err", "cos")
Change = Literal["better", "worse", "same", "unclear"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric's macro mean in both reports; NaN where it is missing."""

    metric: str
    a: float
    b: float
    difference: float  # b - a; mean over the heads of both where the data are the same
    ci_low: float  # NaN where the data differ or there are fewer than 8 heads
    ci_high: float
    change: Change  # "unclear": the interval holds 0, or there is none and the means differ or are missing


@dataclass(frozen=True, slots=True)
class RowPair:
    """One configuration of one source in both reports."""

    source_a: str
    source_b: str
    config: str
    bits_a: float
    bits_b: float
    verdict_a: str
    verdict_b: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All configurations in common, and what stands in the way of comparing."""

    names: tuple[str, str]
    pairs: tuple[RowPair, ...]
    only_a: Mapping[str, tuple[str, ...]]  # source -> configurations without a partner
    only_b: Mapping[str, tuple[str, ...]]
    params: Mapping[str, tuple[str, str]]  # options that differ
    notes: tuple[str, ...]


def compare_reports(a: Report, b: Report, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Return the comparison. A single source is paired with a single source whatever their names; else names decide.

    Raises: InputError (code `nothing-in-common`) where no configuration is in both.
    """
    renamed = {b.sources[0].name: a.sources[0].name} if len(a.sources) == len(b.sources) == 1 else {}
    rows_a = {(row.source, row.config): row for row in a.rows}
    rows_b = {(renamed.get(row.source, row.source), row.config): row for row in b.rows}
    shared = [key for key in rows_a if key in rows_b and rows_a[key].kind != "control"]
    if not shared:
        raise InputError(
            f"{names[0]}, {names[1]}: no configuration in common", code="nothing-in-common", path=names[1],
            hint=f"{names[0]} holds {_held(a)}; {names[1]} holds {_held(b)}",
        )  # fmt: skip
    same = _same_data(a, b)
    options = {
        name: (str(getattr(a.params, name)), str(getattr(b.params, name)))
        for name in type(a.params).__dataclass_fields__
        if getattr(a.params, name) != getattr(b.params, name) and name not in ("configs", "baselines")
    }
    notes = []
    if not same:
        notes.append("the inputs differ: differences are between means, without intervals")
    if a.metric_version != b.metric_version:
        notes.append(f"metric versions {a.metric_version} and {b.metric_version}: figures may not be comparable")
    if a.tool != b.tool:
        notes.append(f"written by {a.tool} and {b.tool}")
    return Comparison(
        names=names,
        pairs=tuple(_pair(a, b, rows_a[key], rows_b[key], same) for key in shared),
        only_a=_grouped(key for key in rows_a if key not in rows_b),
        only_b=_grouped(key for key in rows_b if key not in rows_a),
        params=options,
        notes=tuple(notes),
    )


def _grouped(keys: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for source, config in keys:
        found[source] = (*found.get(source, ()), config)
    return found


def _held(report: Report) -> str:
    return ", ".join(f"{row.config} of {row.source}" for row in report.rows[:4] if row.kind != "control") or "nothing"


def _same_data(a: Report, b: Report) -> bool:
    """Return whether both reports saw the same queries, keys and values."""
    return _data(a) == _data(b)


def _data(report: Report) -> tuple[object, ...]:
    shapes = [(s.layers, s.kv_heads, s.queries, s.query_source, s.causal, s.scale) for s in report.sources]
    synthetic = [s.name for s in report.sources if s.kind == "synthetic"]
    recipe = (report.params.synthetic_recipe, report.params.synthetic_seed) if synthetic else ()
    return [i.sha256 for i in report.inputs], shapes, synthetic, recipe


def _pair(a: Report, b: Report, row_a: Row, row_b: Row, same: bool) -> RowPair:
    heads_a, heads_b = _heads(a.layers, row_a), _heads(b.layers, row_b)
    differences = tuple(
        _difference(metric, row_a, row_b, heads_a.get(metric, {}), heads_b.get(metric, {}), same) for metric in COMPARED
    )
    return RowPair(
        source_a=row_a.source,
        source_b=row_b.source,
        config=row_a.config,
        bits_a=row_a.bits_per_value,
        bits_b=row_b.bits_per_value,
        verdict_a=row_a.verdict,
        verdict_b=row_b.verdict,
        differences=differences,
    )


def _heads(layers: Sequence[LayerValues], row: Row) -> dict[str, dict[tuple[int, int], float]]:
    """Return the mean of each (layer, head) of a row, by metric."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for v in layers:
        if (v.source, v.config) == (row.source, row.config):
            for metric, heads in v.heads.items():
                found.setdefault(metric, {}).update({(v.layer, h): x for h, x in enumerate(heads) if not math.isnan(x)})
    return found


def _difference(
    metric: str,
    row_a: Row,
    row_b: Row,
    heads_a: Mapping[tuple[int, int], float],
    heads_b: Mapping[tuple[int, int], float],
    same: bool,
) -> Difference:
    nan = math.nan
    a = row_a.metrics[metric].mean if metric in row_a.metrics else nan
    b = row_b.metrics[metric].mean if metric in row_b.metrics else nan
    keys = sorted(heads_a.keys() & heads_b.keys())
    deltas = np.array([heads_b[key] - heads_a[key] for key in keys])
    known = not math.isnan(b - a)  # heads alone cannot stand in for a mean that one report does not have
    difference = float(deltas.mean()) if known and same and len(keys) else b - a
    low = high = nan
    if known and same and len(keys) >= MIN_CLUSTERS:
        where = clusters([layer for layer, _ in keys], [head for _, head in keys], draws=1000)
        low, high = (float(x) for x in np.percentile(where.draws @ deltas / len(keys), CONFIDENCE))
    return Difference(metric, a, b, difference, low, high, _change(metric, difference, low, high))


def _change(metric: str, difference: float, low: float, high: float) -> Change:
    if difference == 0:
        return "same"
    if math.isnan(low) or low <= 0 <= high:
        return "unclear"
    return "better" if (difference > 0) == (METRICS[metric].better == "higher") else "worse"
