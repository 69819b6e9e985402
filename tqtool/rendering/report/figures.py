"""Numbers and verdicts as people read them: the one place that decides digits, symbols and verdict words.

A number that was not measured is a dash; a cosine never rounds up to one and an error never down to zero.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from tqtool.escapes import visible
from tqtool.report.gates import limit_of
from tqtool.report.model import METRICS, Recommendation, Report, Row, Source, Summary
from tqtool.report.serialize import mapped

Tail = Literal["low", "high"]

MISSING = "–"
EXACT = 1e-12  # the control row's tolerance (metrics.md): below it an error is printed as 0
_NAN = math.nan
ABSENT = Summary(_NAN, _NAN, _NAN, 1, _NAN, _NAN, _NAN, "", _NAN, "", _NAN, _NAN, "", _NAN, _NAN, 0)
LEVELS = ("strict", "balanced", "lenient", "none")  # best first
LEVEL_WORDS = {"strict": "strict", "balanced": "balanced", "lenient": "lenient", "none": "no level"}
SYMBOLS = {
    "pass": "✓", "fail": "✗", "unverified": "?", "error": "!", "control": "=",
    "strict": "●●●", "balanced": "●●○", "lenient": "●○○", "none": "○○○",
}  # fmt: skip
ASCII_SYMBOLS = {
    "pass": "+", "fail": "x", "unverified": "?", "error": "!", "control": "=",
    "strict": "***", "balanced": "**-", "lenient": "*--", "none": "---",
}  # fmt: skip


def figure(value: float, metric: str = "") -> str:
    """Return a number in five or six characters: 0.0273, 2.1e-4, 0.9900, 48.3."""
    if math.isnan(value):
        return MISSING
    if METRICS[metric].better == "higher" if metric in METRICS else False:
        if abs(1 - value) < EXACT:
            return "1.0000"
        text = f"{value:.4f}"
        return ">.9999" if text == "1.0000" else text
    size = abs(value)
    if size < EXACT:
        return "0"
    if size < 0.001:
        return power(f"{value:.1e}")
    if size < 9.9995:
        return f"{value:.4f}" if size < 0.99995 else f"{value:.3f}"
    return f"{value:.1f}" if size < 9999.5 else power(f"{value:.2e}")


def power(text: str) -> str:
    """Return "2.1e-4" for "2.1e-04"."""
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def signed(value: float) -> str:
    """Return a difference with its sign: +0.0027, -2.1e-4, 0."""
    text = figure(abs(value))
    return text if text in ("0", MISSING) else f"{'-' if value < 0 else '+'}{text}"


def clean(text: str) -> str:
    """Return text as one line with control characters spelled out: names come from files, a terminal obeys them."""
    return visible(" ".join(text.split()))


def interval(low: float, high: float, metric: str = "") -> str:
    """Return "0.0210–0.0330", or "" where there is no interval."""
    return f"{figure(low, metric)}–{figure(high, metric)}" if low < high else ""


def summary(row: Row, metric: str) -> Summary:
    """Return a metric of a row, all NaN where it was not measured."""
    return row.metrics.get(metric, ABSENT)


def mean_text(row: Row, metric: str) -> str:
    """Return a metric's mean as text."""
    return figure(summary(row, metric).mean, metric)


def tail_text(row: Row, metric: str, side: Tail) -> str:
    """Return a metric's lower or upper tail as text; "p5:" or "p95:" before it where p1 and p99 need more queries."""
    found = summary(row, metric)
    shown = figure(found.low if side == "low" else found.high, metric)
    percent = found.tail_percent if side == "low" else 100 - found.tail_percent
    return shown if found.tail_percent == 1 or shown == MISSING else f"p{percent}:{shown}"


def bad_tail_text(row: Row, metric: str) -> str:
    """Return the tail on a metric's bad side with its name: "p99 0.1215", "p1 0.9147"; "" where it has none."""
    found, better = summary(row, metric), METRICS[metric].better
    value = found.low if better == "higher" else found.high
    if better == "neither" or math.isnan(value):
        return ""
    percent = found.tail_percent if better == "higher" else 100 - found.tail_percent
    return f"p{percent} {figure(value, metric)}"


def ci_text(row: Row, metric: str) -> str:
    """Return the 95 % interval of a metric's mean as text, "" where there is none."""
    return interval(summary(row, metric).ci_low, summary(row, metric).ci_high, metric)


def worst_text(row: Row) -> str:
    """Return the name of the head whose attention moves most, "" where none moves."""
    kl = summary(row, "kl")
    return kl.worst_head if kl.worst > EXACT else ""


def printable(report: Report) -> Report:
    """Return the report with every text in it made one line without control characters."""
    return mapped(report, str, clean)


def count(number: int) -> str:
    """Return 11520 as "11,520"."""
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """Return "1 layer", "2 layers"."""
    many = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count(number)} {noun if number == 1 else many}"


def verdict_key(row: Row, *, gated: bool) -> str:
    """Return the key of SYMBOLS for a row: its gate status where one was asked, else the level it reaches."""
    if row.kind == "control":
        return "control"
    if row.status in ("unverified", "error"):
        return row.status
    return row.status if gated else row.level


def verdict_word(row: Row, *, gated: bool) -> str:
    """Return one or two words for a table; `row.verdict` is the sentence."""
    words = {"pass": "pass", "fail": "FAIL", "unverified": "UNVERIFIED", "error": "NOT ENGAGED", "control": "control"}
    return (words | LEVEL_WORDS)[verdict_key(row, gated=gated)]


def is_gated(report: Report) -> bool:
    """Return whether a gate was asked for."""
    return bool(report.gate.checks) or report.gate.name != "none"


def diagnosis(report: Report) -> list[str]:
    """Return the diagnosis sentences, each with the source it is about where there are several."""
    return [_about(report, finding.source, finding.sentence) for finding in report.diagnosis]


def warnings(report: Report) -> list[str]:
    """Return the warnings, each with the source it is about where there are several."""
    return [_about(report, notice.source, notice.text) for notice in report.warnings]


def _about(report: Report, source: str, text: str) -> str:
    return f"{source}: {text}" if source and len(report.sources) > 1 else text


def gate_title(report: Report) -> str:
    """Return the gate's name as a title; some conditions hold without one: something must have been quantized."""
    return "Conditions" if report.gate.name == "none" else f"Gate {report.gate.name}"


def by_cost(rows: Iterable[Row]) -> list[Row]:
    """Return rows from most to fewest bits, at equal bits by (kl, v_readout_err); the control first, to read from."""

    def key(row: Row) -> tuple[bool, float, float, float]:
        kl, readout = summary(row, "kl").mean, summary(row, "v_readout_err").mean
        return row.kind != "control", -row.bits_per_value, _last_if_nan(kl), _last_if_nan(readout)

    return sorted(rows, key=key)


def _last_if_nan(x: float) -> float:
    return math.inf if math.isnan(x) else x


def rows_of(report: Report, source: Source) -> list[Row]:
    """Return the rows of one source, control first, then from most to fewest bits."""
    return by_cost(row for row in report.rows if row.source == source.name)


def option_parts(report: Report) -> list[str]:
    """Return the codec options: law, scale rule, metadata, seeds and whatever is not the default."""
    p = report.params
    rule = p.key_scale_rule if p.key_scale_rule == p.value_scale_rule else f"{p.key_scale_rule},{p.value_scale_rule}"
    parts = [f"law {p.law}", f"scale {rule}", f"metadata {p.meta}", f"seed{'s' * (len(p.seeds) > 1)} {ranges(p.seeds)}"]
    parts += [words for flag, words in ((p.center_keys, "keys centred"), (p.center_values, "values centred")) if flag]
    if p.protect_layers:
        parts.append(f"layers {ranges(p.protect_layers)} kept")
    parts += [
        f"{words} {n}" for n, words in ((p.residual_window, "residual window"), (p.sink_tokens, "sink tokens")) if n
    ]
    return parts


def ranges(numbers: Sequence[int]) -> str:
    """Return 0,1,2,5 as "0–2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def headline(report: Report) -> str:
    """Return the verdict of the whole report in one line: the gate's summary, or the best level reached."""
    if is_gated(report):
        return report.gate.summary
    if not report.sources:
        return "Nothing was measured"
    source = report.sources[0]
    name = f"{source.name}: " if len(report.sources) > 1 else ""  # the others are stress tests and theory
    rows = rows_of(report, source)
    engaged = [row for row in rows if row.kind == "turboquant" and row.status != "error"]
    beside = any(row.kind == "baseline" for row in rows)  # whose levels are not counted
    if not engaged:
        return f"{name}{'No TurboQuant row' if beside else 'Nothing'} was quantized"
    if source.query_source == "proxy":
        return f"{name}UNVERIFIED: there are no queries, keys stood in for them"
    best = min(engaged, key=lambda row: (LEVELS.index(row.level), row.bits_per_value))
    if best.level == "none":
        return f"{name}No {'TurboQuant row' if beside else 'configuration'} reaches the lenient level"
    cheapest = f"cheapest there is {best.config} at {best.bits_per_value:.2f} bits per value"
    if source.kind == "synthetic":
        return f"{name}Implementation healthy on synthetic data at level {best.level}; {cheapest}"
    by = " by the TurboQuant rows" if beside else ""
    return f"{name}Best level reached{by} is {best.level} attention fidelity; {cheapest}"


def shortfall(row: Row) -> str:
    """Return why a row is not one level better: "not balanced: kl 0.027 > 0.02 (worst L29.H0: 0.1)", or ""."""
    if not row.misses or row.level == "strict" or row.kind == "control":
        return ""
    return f"not {LEVELS[LEVELS.index(row.level) - 1]}: {row.misses[0]}"


SYNTHETIC = "Synthetic data: tells whether the implementation is healthy, nothing about a model."
SCOPE = (
    "Shows how far attention and its output move, layer by layer and head by head, on exactly these tokens.",
    "Does not show perplexity or task quality: errors compound over layers, and only a run of the model sees that.",
)


def recommendation_goal(rec: Recommendation) -> str:
    """Return what the recommendation was asked to meet, and whether it does."""
    goal = f"KL ≤ {figure(rec.target_kl)}" if math.isnan(rec.budget) else f"at most {rec.budget:g} bits per value"
    return goal if rec.feasible else f"{goal}: not reachable ({rec.reason})" if rec.reason else f"{goal}: not reachable"


def kl_limit(report: Report) -> tuple[str, float]:
    """Return the name and the value of the limit on mean KL to draw: the gate's, else the balanced level's."""
    limits = [check.limit for check in report.gate.checks if check.metric == "kl" and check.limit > 0]
    return (report.gate.name, min(limits)) if limits else ("balanced", limit_of("balanced", "kl"))
