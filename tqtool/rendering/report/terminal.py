"""The report on a terminal, and as plain text off one: data, table, layers, diagnosis, next step, gate last."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tqtool.rendering.report import figures, over_prompts
from tqtool.rendering.report.data import data_parts
from tqtool.rendering.report.figures import figure
from tqtool.rendering.report.specification import FOOTNOTE, compared_sources, specification_table
from tqtool.rendering.tables import Column, table_text
from tqtool.report.model import NAN, Report, Row, Source

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=#"
COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
VERDICT_COLOUR = {
    "pass": "green", "strict": "green", "balanced": "green", "lenient": "yellow", "unverified": "yellow",
    "fail": "red", "error": "red", "none": "red", "control": "dim",
}  # fmt: skip
NARROWEST = 40  # below this many columns lines are longer than the window rather than unreadable


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the report's table: its title, its text for a row, and the width it needs to be shown at."""

    title: str
    text: Callable[[Row], str]
    tier: int  # terminal columns from which it is shown; 80 is always
    drop: int = 0  # where names are long: dropped in this order, 0 never
    rare: bool = False  # shown only where a row has it


def mean(metric: str) -> Callable[[Row], str]:
    """Return the function that prints a metric's mean."""
    return lambda row: figures.mean_text(row, metric)


def tail(metric: str, side: Literal["low", "high"]) -> Callable[[Row], str]:
    """Return the function that prints a metric's lower or upper tail."""
    return lambda row: figures.tail_text(row, metric, side)


FIELDS = (
    Field("config", lambda row: row.config, 80),
    Field("bits/value", lambda row: f"{row.bits_per_value:.2f}", 80),
    Field("B/pair", lambda row: f"{row.pair_bytes:.6g}", 150, drop=2),
    Field("vs fp16", lambda row: f"{row.ratio_fp16:.2f}x", 110, drop=4),
    Field("cos mean", mean("cos"), 80),
    Field("theory", lambda row: figure(row.predicted.get("cos", NAN), "cos"), 80, drop=9, rare=True),
    Field("spec", lambda row: row.published.get("cos", figures.MISSING), 80, drop=10, rare=True),
    Field("cos p1", tail("cos", "low"), 110, drop=8),
    Field("rel-err", mean("rel_err"), 80, drop=7),
    Field("rel-err p99", tail("rel_err", "high"), 150, drop=3),
    Field("KL", mean("kl"), 80),
    Field("KL 95 % CI", lambda row: figures.ci_text(row, "kl"), 150, drop=6),
    Field("KL p99", tail("kl", "high"), 110, drop=5),
    Field("V read-out", mean("v_readout_err"), 80),
    Field("sigma_a", mean("sigma_a"), 150),
    Field("top1", mean("top1_decisive"), 150, drop=1),
    Field("worst", figures.worst_text, 80),
)


def report_terminal(report: Report, width: int | None = None, unicode: bool = True, color: bool = False) -> str:
    """Return the whole report as text; `width` None: every column, nothing wrapped, as for a file or a pipe."""
    paint, report = _painter(color), figures.printable(report)
    blocks = [_flow([f"{report.tool} validate", *figures.option_parts(report)], width, paint("dim"))]
    compared = compared_sources(report)
    for source in (source for source in report.sources if source not in compared):
        blocks += [_heading(source, width, paint), _table(report, source, width, unicode, paint)]
        blocks += [_sparklines(report, source, width, unicode, paint)]
    if compared:
        title = paint("bold")("The specification's table: output cosine on synthetic data")
        footnote = _wrap(FOOTNOTE, width, paint("dim"))
        blocks += [f"{title}\n{specification_table(report, compared)}\n{footnote}"]
    blocks += [_prompts(report, width), _recommendations(report)]
    blocks += ["\n".join(_wrap(f"warning: {text}", width, paint("yellow")) for text in figures.warnings(report))]
    blocks += ["\n".join(_wrap(sentence, width) for sentence in figures.diagnosis(report))]
    if report.next:
        blocks += [f"{paint('bold')('Next:')} {report.next}"]  # never wrapped: it is there to be copied
    blocks += [_gate_line(report, width, unicode, paint)]
    text = "\n\n".join(block for block in blocks if block) + "\n"
    return text if unicode else to_ascii(text)


def to_ascii(text: str) -> str:
    """Return the text in ASCII: the few signs this module uses have a twin, any other character is escaped."""
    for sign, twin in (("×", "x"), ("·", "-"), ("–", "-"), ("≥", ">="), ("≤", "<="), ("…", "..."), ("σ", "sigma")):
        text = text.replace(sign, twin)
    return text.encode("ascii", "backslashreplace").decode()


Paint = Callable[[str], Callable[[str], str]]


def _painter(color: bool) -> Paint:
    def paint(name: str) -> Callable[[str], str]:
        return lambda text: f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if color and text else text

    return paint


def _wrap(text: str, width: int | None, style: Callable[[str], str] = str, indent: str = "") -> str:
    if width is None:
        return style(text)
    lines = textwrap.wrap(text, max(width, NARROWEST), subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(map(style, lines))


def _heading(source: Source, width: int | None, paint: Paint) -> str:
    lines = [paint("bold")(source.name), _flow(data_parts(source), width)]
    if source.kind == "synthetic":
        lines.append(_wrap(figures.SYNTHETIC, width, paint("dim")))
    return "\n".join(lines)


def _flow(parts: Sequence[str], width: int | None, style: Callable[[str], str] = str) -> str:
    """Return parts joined by dots, a line broken between parts only."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if width is None or len(longer) <= max(width, NARROWEST) or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(map(style, lines))


def _table(report: Report, source: Source, width: int | None, unicode: bool, paint: Paint) -> str:
    gated = figures.is_gated(report)
    rows = figures.rows_of(report, source)
    symbols = figures.SYMBOLS if unicode else figures.ASCII_SYMBOLS
    keys = [figures.verdict_key(row, gated=gated) for row in rows]
    verdicts = [f"{symbols[key]} {figures.verdict_word(row, gated=gated)}" for key, row in zip(keys, rows, strict=True)]
    fields = [field for field in FIELDS if width is None or field.tier <= max(width, 80)]
    fields = [f for f in fields if not f.rare or any(f.text(row) != figures.MISSING for row in rows)]
    while True:
        cells = [[field.text(row) for field in fields] for row in rows]
        lines = _lines(fields, cells, verdicts)
        droppable = [field for field in fields if field.drop]
        if width is None or max(map(len, lines)) <= width or not droppable:
            break
        fields.remove(min(droppable, key=lambda field: field.drop))
    painted = [paint("bold")(lines[0])]
    for line, key, word in zip(lines[1:], keys, verdicts, strict=True):
        colour = paint(VERDICT_COLOUR[key])
        painted.append(colour(line) if key == "control" else line.removesuffix(word) + colour(word))
    return "\n".join(painted)


def _lines(fields: Sequence[Field], cells: Sequence[Sequence[str]], verdicts: Sequence[str]) -> list[str]:
    columns = [Column(field.title, "left" if field.title in ("config", "worst") else "right") for field in fields]
    columns.append(Column("verdict", "left"))
    rows = [[*row, verdict] for row, verdict in zip(cells, verdicts, strict=True)]
    return table_text(columns, rows, terminal=False).split("\n")


def _sparklines(report: Report, source: Source, width: int | None, unicode: bool, paint: Paint) -> str:
    """Return one line per configuration: attention KL by layer, on a scale that has the limit in its middle."""
    if len(source.layers) < 2:
        return ""
    curves: dict[str, list[float]] = {
        row.config: [] for row in figures.rows_of(report, source) if row.kind != "control"
    }
    for v in report.layers:
        if v.source == source.name and v.config in curves:
            curves[v.config].append(v.values.get("kl", math.nan))
    curves = {config: curve for config, curve in curves.items() if any(x > figures.EXACT for x in curve)}
    if not curves:
        return ""
    level, limit = figures.kl_limit(report)
    steps = BLOCKS if unicode else ASCII_BLOCKS
    name_width = max(map(len, curves))
    room = None if width is None else max(8, width - name_width - 20)
    lines = []
    for config, curve in curves.items():
        over = sum(x > limit for x in curve)
        binned = [max(part, key=_or_low) for part in _bins(curve, room)]
        bars = (paint("red" if x > limit else "green")(_step(x / limit, steps)) for x in binned)
        lines.append(f"{config:<{name_width}}  {''.join(bars)}  {over} of {len(curve)} over")
    head = (
        f"KL by layer ({figures.ranges(source.layers)}); from {steps[len(steps) // 2]} "
        f"over the {level} limit {limit:g}; {2 if unicode else 4}x a step"
    )
    return "\n".join([_wrap(head, width, paint("dim")), *lines])


def _step(ratio: float, steps: str) -> str:
    """Return the sign of a value as a share of its limit: the upper half of the signs is over it."""
    if math.isnan(ratio):
        return " "
    width = 1 if len(steps) == 8 else 2  # in bits: a factor of two or four
    index = math.floor(math.log2(min(max(ratio, 1e-30), 1e30)) / width) + len(steps) // 2
    if ratio <= 1:
        index = min(index, len(steps) // 2 - 1)  # a value on the limit is within it
    return steps[min(max(index, 0), len(steps) - 1)]


def _or_low(x: float) -> float:
    return -math.inf if math.isnan(x) else x


def _bins(values: Sequence[float], room: int | None) -> list[Sequence[float]]:
    """Return neighbouring values in at most `room` groups."""
    size = 1 if room is None else -(-len(values) // room)
    return [values[i : i + size] for i in range(0, len(values), size)]


def _prompts(report: Report, width: int | None) -> str:
    if not report.prompts:
        return ""
    columns = [Column(title, "left" if title in ("config", "in") else "right") for title in over_prompts.HEADER]
    title = _wrap(over_prompts.title(report), width)
    return f"{title}\n" + table_text(columns, over_prompts.rows(report), terminal=False)


def _recommendations(report: Report) -> str:
    blocks = []
    for rec in report.recommendations:
        columns = [Column(t) for t in ("layer", "K bits", "V bits", "bits/value", "KL", "V read-out", "")]
        rows = [
            [f"L{c.layer:02d}", str(c.key_bits), str(c.value_bits), f"{c.bits_per_value:.2f}", figure(c.kl),
             figure(c.v_readout_err), "protect" if c.protect else ""]
            for c in rec.layers
        ]  # fmt: skip
        total = ["all", "", "", f"{rec.bits_per_value:.2f}", figure(rec.kl), figure(rec.v_readout_err), ""]
        title = f"Recommended bits per layer for {rec.source}, {figures.recommendation_goal(rec)}"
        blocks.append(f"{title}\n" + table_text(columns, [*rows, total], terminal=False))
    return "\n\n".join(blocks)


def _gate_line(report: Report, width: int | None, unicode: bool, paint: Paint) -> str:
    symbols = figures.SYMBOLS if unicode else figures.ASCII_SYMBOLS
    if not figures.is_gated(report):
        return _wrap(figures.headline(report), width, paint("bold"))
    key = "pass" if report.gate.passed else "fail"
    line = f"{symbols[key]} {figures.gate_title(report)}: {report.gate.summary}"
    return _wrap(line, width, lambda text: paint("bold")(paint(VERDICT_COLOUR[key])(text)), indent="  ")
