"""Gates: limits on metrics, the levels that bundle them, what a row reaches; `docs/gates.md` says how they were set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tqtool.errors import InputError, UsageError
from tqtool.report.model import METRICS, Check, Gate, Level, Report, Row, Source, Status, Summary

Relation = Literal[">=", "<="]
SUFFIXES = ("_p01", "_p99", "_min", "_max", "_worst")


@dataclass(frozen=True, slots=True)
class Limit:
    """One condition: a metric id, with or without suffix, against a number."""

    metric: str
    relation: Relation
    value: float


def _level(at_least: Mapping[str, float], at_most: Mapping[str, float]) -> tuple[Limit, ...]:
    return (
        *(Limit(metric, ">=", value) for metric, value in at_least.items()),
        *(Limit(metric, "<=", value) for metric, value in at_most.items()),
    )


LEVELS: Mapping[Level, tuple[Limit, ...]] = {
    "strict": _level(
        {"cos": 0.999, "cos_p01": 0.995, "top1_decisive": 0.995},
        {
            "kl": 0.001,
            "kl_p99": 0.01,
            "kl_worst": 0.004,
            "v_readout_err": 0.03,
            "rel_err_p99": 0.10,
            "distortion_ratio": 1.03,
        },
    ),
    "balanced": _level(
        {"cos": 0.975, "cos_p01": 0.85, "top1_decisive": 0.97},
        {
            "kl": 0.03,
            "kl_p99": 0.20,
            "kl_worst": 0.10,
            "v_readout_err": 0.15,
            "rel_err_p99": 0.60,
            "distortion_ratio": 1.1,
        },
    ),
    "lenient": _level(
        {"cos": 0.94, "cos_p01": 0.78, "top1_decisive": 0.95},
        {
            "kl": 0.05,
            "kl_p99": 0.30,
            "kl_worst": 0.15,
            "v_readout_err": 0.27,
            "rel_err_p99": 0.80,
            "distortion_ratio": 1.3,
        },
    ),
}
MIN_KEYS, MIN_QUERIES = 64, 64  # fewer carry no level: docs/gates.md says how that was measured
GRAVITY: tuple[Status, ...] = ("error", "fail", "unverified", "pass")  # the gravest first
NOT_APPLICABLE = {"top1_decisive", "distortion_ratio"}  # without a value there is nothing to hold against a limit
REGRESSION = ("kl", "kl_worst", "v_readout_err", "v_readout_err_worst", "rel_err", "rel_err_worst")


def limit_of(level: Level, metric: str) -> float:
    """Return the limit of a metric at a level."""
    return next(limit.value for limit in LEVELS[level] if limit.metric == metric)


def parse_limits(texts: Iterable[str], relation: Relation) -> tuple[Limit, ...]:
    """Read `METRIC=X` options. Raises `UsageError`."""
    found = []
    for text in texts:
        metric, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            option = "--min" if relation == ">=" else "--max"
            raise UsageError(f"{option} {text}: need METRIC=NUMBER", code="usage", hint="for example cos_p01=0.9")
        found.append(Limit(known_metric(metric.strip()), relation, value))
    return tuple(found)


def split_metric(name: str) -> tuple[str, str]:
    """Return (id, suffix) of a gated name: "cos_p01" -> ("cos", "_p01")."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def known_metric(name: str) -> str:
    """Return the name of a metric, with or without suffix. Raises `UsageError` for another."""
    if split_metric(name)[0] not in METRICS:
        raise UsageError(
            f"no metric {name!r}",
            code="usage",
            hint=f"ids: {', '.join(METRICS)}; suffixes: {', '.join(SUFFIXES)}",
        )
    return name


def too_little(source: Source) -> str:
    """Return why a source is too small for a level, or "": a few keys or queries look better than a model is."""
    keys, queries = source.fewest_keys, source.fewest_queries
    if keys is not None and keys < MIN_KEYS:
        return f"queries see {keys} key{'s' * (keys != 1)} at most; {MIN_KEYS} are needed for a level"
    if queries is not None and queries < MIN_QUERIES:
        return f"a layer has {queries} quer{'y' if queries == 1 else 'ies'}; {MIN_QUERIES} are needed for a level"
    return ""


def check_row(row: Row, source: Source, limits: Sequence[Limit]) -> tuple[Check, ...]:
    """Hold one row against the limits, in their order."""
    return tuple(_check(row, source, limit) for limit in limits)


def _check(row: Row, source: Source, limit: Limit) -> Check:
    name, suffix = split_metric(limit.metric)
    summary = row.metrics[name]
    measured, where = limit_value(row, limit)
    status: Status
    reason, little = "", too_little(source)
    if math.isnan(measured):
        status, reason = ("pass" if name in NOT_APPLICABLE else "fail"), summary.reason
    elif not (measured >= limit.value if limit.relation == ">=" else measured <= limit.value):
        status = "fail"
    elif suffix in ("_p01", "_p99") and summary.tail_percent != 1:
        status, reason = "unverified", f"{summary.count} queries; 500 are needed for a 1 % tail"
    elif little:
        status, reason = "unverified", little
    elif source.query_source == "proxy":
        status, reason = "unverified", "queries are missing, keys stood in for them"
    else:
        status = "pass"
    facts = (limit.metric, limit.relation, measured, limit.value, status, where, reason, summary.worst)
    return Check(row.source, row.config, *facts)


def limit_value(row: Row, limit: Limit) -> tuple[float, str]:
    """Return what the row has for a limit, of its worst seed, and the layer and head to look at."""
    name, suffix = split_metric(limit.metric)
    return _measured(row.metrics[name], suffix, limit.relation)


def _measured(summary: Summary, suffix: str, relation: Relation) -> tuple[float, str]:
    values = {
        "": summary.seed_low if relation == ">=" else summary.seed_high,
        "_p01": summary.low,
        "_p99": summary.high,
        "_min": summary.min,
        "_max": summary.max,
        "_worst": summary.worst,
    }
    return values[suffix], summary.worst_head


def reached(row: Row, source: Source) -> tuple[Level, tuple[str, ...]]:
    """Return the best level whose conditions hold (tails of too few queries count) and what the next one misses.

    Too few keys or queries reach none.
    """
    if row.kind != "control" and (little := too_little(source)):
        return "none", (little,)
    misses: tuple[str, ...] = ()
    for level, limits in LEVELS.items():
        failed = [check for check in check_row(row, source, limits) if check.status == "fail"]
        if not failed:
            return level, misses
        misses = tuple(map(describe, failed))
    return "none", misses


def describe(check: Check) -> str:
    """Return "kl 0.033 > 0.03 (worst L19.H1: 0.0877)"; a worst head's own figure is "at" that head."""
    if math.isnan(check.measured):
        return f"{check.metric} not measured ({check.reason})"
    if check.status == "unverified":
        return f"{check.metric} UNVERIFIED ({check.reason})"
    sign = {">=": "<", "<=": ">"}[check.relation]
    own = split_metric(check.metric)[1] == "_worst"
    where = f" at {check.where}" if own and check.where else f" ({place})" if (place := worst_place(check)) else ""
    return f"{check.metric} {check.measured:.4g} {sign} {check.limit:g}{where}"


def worst_place(check: Check) -> str:
    """Return the head to look at, with its own mean where the check is of another figure: "worst L19.H1: 0.0877"."""
    if not check.where or split_metric(check.metric)[1] == "_worst":
        return check.where
    return f"worst {check.where}" + ("" if math.isnan(check.worst) else f": {check.worst:.4g}")


def verdict(row: Row, source: Source) -> str:
    """Return the words of a row. Synthetic data never earn more than a healthy implementation."""
    if row.kind == "control":
        return "control: exact"
    if row.status == "error":
        return "not engaged: nothing was quantized"
    if little := too_little(source):
        return f"UNVERIFIED: {little}"
    unverified = " (UNVERIFIED: proxy queries)" if source.query_source == "proxy" else ""
    if source.kind == "synthetic" or source.iid:
        what = "synthetic data" if source.kind == "synthetic" else "data that look independent and Gaussian"
        if row.level == "none":
            return f"below lenient on {what}"
        return f"implementation healthy on {what} ({row.level}){unverified}"
    level = "below lenient" if row.level == "none" else row.level
    return f"attention fidelity: {level}{unverified}"


def decide(name: str, limits: Sequence[Limit], rows: Sequence[Row], sources: Sequence[Source]) -> Gate:
    """Return the gate's outcome over every row but the control. Nothing quantized fails any gate, none included.

    That holds for a single row, and for a run that has no row but the control.
    """
    by_name = {source.name: source for source in sources}
    gated = [row for row in rows if row.kind != "control"]
    checks = [check for row in gated for check in check_row(row, by_name[row.source], limits)]
    checks += [not_engaged(row) for row in gated or rows if row.status == "error" or not gated]
    return conclude(name, checks)


def gated_rows(rows: Sequence[Row], gate: Gate) -> tuple[Row, ...]:
    """Return the rows with the status that the gate's checks give them: the gravest of each row."""
    found: dict[tuple[str, str], Status] = {}
    for check in gate.checks:
        key = (check.source, check.config)
        found[key] = min(found.get(key, "pass"), check.status, key=GRAVITY.index)
    return tuple(replace(row, status=found.get((row.source, row.config), row.status)) for row in rows)


def not_engaged(row: Row) -> Check:
    """Return the failed check of a row that quantized nothing."""
    reason = "bit-identical to the reference; nothing was quantized"
    return Check(row.source, row.config, "not-engaged", "<=", 1.0, 0.0, "error", "", reason)


def against_baseline(report: Sequence[Row], earlier: Report, allowed: float) -> list[Check]:
    """Return the checks that no row is worse than in an earlier report by more than `allowed` (0.05 is 5 %).

    Rows that only one of them has are left out. Raises `InputError` if they share none.
    """
    before = {(row.source, row.config): row for row in earlier.rows}
    shared = [row for row in report if row.kind != "control" and (row.source, row.config) in before]
    if not shared:
        raise InputError(
            "the baseline report has no row in common with this one",
            code="baseline",
            hint="compare runs over the same data and configurations",
        )
    checks = []
    for row in shared:
        for metric in REGRESSION:
            name, suffix = split_metric(metric)
            known = before[row.source, row.config].metrics
            if name not in known:
                raise InputError(f"the baseline report has no {name} of {row.config}", code="baseline")
            measured, where = _measured(row.metrics[name], suffix, "<=")
            limit = _measured(known[name], suffix, "<=")[0] * (1 + allowed)
            judged: Status = "unverified" if row.status == "unverified" else "pass"
            status = judged if measured <= limit else "fail"
            worst = row.metrics[name].worst
            checks.append(
                Check(row.source, row.config, metric, "<=", measured, limit, status, where, "baseline", worst)
            )
    return checks


def conclude(name: str, checks: Sequence[Check]) -> Gate:
    """Return the gate from its checks: anything but a pass fails it, if a gate was asked or nothing was quantized."""
    failed = [check for check in checks if check.status != "pass"]
    if name == "none" and not checks:
        return Gate("none", True, (), "no gate asked")
    if not failed:
        held = "1 condition holds" if len(checks) == 1 else f"{len(checks)} conditions hold"
        return Gate(name, True, tuple(checks), f"PASS: {held}")
    first = min(failed, key=lambda check: GRAVITY.index(check.status))
    more = f" ({len(failed)} of {len(checks)} conditions)" if len(checks) > 1 else ""
    what = f"{first.metric}: {first.reason}" if first.status == "error" else describe(first)
    return Gate(name, False, tuple(checks), f"FAIL {first.source} {first.config}: {what}{more}")
