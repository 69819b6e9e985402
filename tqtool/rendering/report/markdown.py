"""The report as GitHub-flavoured Markdown, for a CI step summary or a pull-request comment.

Its first line is the verdict and ends in `MARKER`, an invisible comment by which a bot finds its own comment again.
It stays below `LIMIT` bytes, since GitHub drops a step summary past 1 MiB whole: what does not fit is left out and
named.
"""

import math
import re
from collections.abc import Sequence

from tqtool.rendering.report import figures, over_prompts
from tqtool.rendering.report.data import data_parts
from tqtool.rendering.report.figures import figure
from tqtool.report.gates import split_metric, worst_place
from tqtool.report.model import METRICS, Recommendation, Report, Row, Source

MARKER = "<!-- tqtool:report -->"
LIMIT = 900 * 1024
_RESERVE = 512  # bytes kept for the note about what was left out


def report_markdown(report: Report, limit: int = LIMIT) -> str:
    """Return the verdict line, a table per source, the diagnosis, and the rest folded, in at most `limit` bytes.

    The verdict line is there whatever the limit.
    """
    gated = figures.is_gated(report)
    symbol = "" if not gated else f"{figures.SYMBOLS['pass' if report.gate.passed else 'fail']} "
    text = f"**{symbol}{escape(figures.headline(report))[:2000]}** {MARKER}\n"
    left_out: list[str] = []
    for name, block in _blocks(report, gated):
        if len((text + block).encode()) + _RESERVE + 40 * len(left_out) < limit:
            text += "\n" + block
        else:
            left_out.append(name)
    if left_out:
        text += f"\n*Left out to stay below {limit // 1024} KiB: {len(left_out)} parts, the first is {left_out[0]}.*\n"
    return text


def escape(text: str) -> str:
    """Return text that Markdown shows as it is: one line, no markup, no mention of people."""
    text = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")


def code_block(text: str, language: str = "") -> str:
    """Return a fenced block; the fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}\n"


def _blocks(report: Report, gated: bool) -> list[tuple[str, str]]:
    """Return the named parts in order of importance of their kind."""
    blocks = []
    for source in report.sources:
        line = " · ".join(data_parts(source))
        table = _table(HEADER, [_cells(row, gated) for row in figures.rows_of(report, source)])
        blocks.append((f"the table of {source.name}", f"**{escape(source.name)}**: {escape(line)}\n\n{table}"))
    if report.prompts:
        rows = [[escape(cell) for cell in row] for row in over_prompts.rows(report)]
        blocks.append(("the table over dumps", f"{over_prompts.title(report)}\n\n{_table(over_prompts.HEADER, rows)}"))
    lines = [f"> **Warning:** {escape(text)}\n" for text in figures.warnings(report)]
    lines += [f"- {escape(sentence)}\n" for sentence in figures.diagnosis(report)]
    if lines:
        blocks.append(("the diagnosis", "".join(f"{line}\n" if line.startswith(">") else line for line in lines)))
    if report.next:
        blocks.append(("the next command", "Next:\n" + code_block(report.next, "sh")))
    if gated:
        blocks.append(("the gate's limits", _checks(report)))
    blocks += [(f"the recommendation for {rec.source}", _recommendation(rec)) for rec in report.recommendations]
    blocks += [(f"the layers of {source.name}", _layers(report, source)) for source in report.sources]
    blocks.append(("the provenance", _provenance(report)))
    return blocks


HEADER = ("config", "bits/value", "KL", "KL p99", "V read-out", "cos", "cos p1", "rel-err", "worst", "verdict")


def _cells(row: Row, gated: bool) -> list[str]:
    symbol = figures.SYMBOLS[figures.verdict_key(row, gated=gated)]
    mean, tail = figures.mean_text, figures.tail_text
    return [
        escape(row.config), f"{row.bits_per_value:.2f}", mean(row, "kl"), tail(row, "kl", "high"),
        mean(row, "v_readout_err"), mean(row, "cos"), tail(row, "cos", "low"), mean(row, "rel_err"),
        figures.worst_text(row), f"{symbol} {figures.verdict_word(row, gated=gated)}",
    ]  # fmt: skip


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers, but for the last if it is a verdict."""
    rule = [":--" if i == 0 or title in ("verdict", "where", "worst") else "--:" for i, title in enumerate(header)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n</details>\n"


def _checks(report: Report) -> str:
    rows = []
    for c in report.gate.checks:
        relation = "≥" if c.relation == ">=" else "≤"
        measured = figure(c.measured, split_metric(c.metric)[0])
        verdict = f"{figures.SYMBOLS[c.status]} {c.status}"
        rows.append(
            [escape(c.config), f"{escape(c.metric)} {relation} {c.limit:g}", measured, escape(worst_place(c)), verdict]
        )
    missed = sum(check.status != "pass" for check in report.gate.checks)
    summary = f"{escape(figures.gate_title(report))}: {missed} of {figures.plural(len(rows), 'limit')} missed"
    return _details(summary, _table(("config", "limit", "measured", "where", "verdict"), rows))


def _recommendation(rec: Recommendation) -> str:
    rows = [
        [f"L{c.layer:02d}", f"K{c.key_bits}/V{c.value_bits}", f"{c.bits_per_value:.2f}", figure(c.kl, "kl"),
         figure(c.v_readout_err)]
        for c in rec.layers
    ]  # fmt: skip
    rows.append(["all", "", f"{rec.bits_per_value:.2f}", figure(rec.kl), figure(rec.v_readout_err)])
    summary = f"Recommended bits per layer for {escape(rec.source)}, {escape(figures.recommendation_goal(rec))}"
    return _details(summary, _table(("layer", "bits", "bits/value", "KL", "V read-out"), rows))


LAYER_METRICS = ("kl", "v_readout_err")


def _layers(report: Report, source: Source) -> str:
    """Return a table for each of LAYER_METRICS: layers down, configurations across."""
    configs = [row.config for row in figures.rows_of(report, source) if row.kind != "control"]
    values = {(v.layer, v.config): v.values for v in report.layers if v.source == source.name}
    tables = []
    for metric in LAYER_METRICS:
        rows = [
            [f"L{layer:02d}", *(figure(values.get((layer, c), {}).get(metric, math.nan), metric) for c in configs)]
            for layer in source.layers
        ]
        title = METRICS[metric].title
        tables.append(f"{title[0].upper()}{title[1:]}\n\n" + _table(("layer", *map(escape, configs)), rows))
    return _details(f"Layers of {escape(source.name)}", "\n".join(tables))


def _provenance(report: Report) -> str:
    lines = [f"- {escape(i.path)}: {i.dtype} {list(i.shape)}, SHA-256 {i.sha256}\n" for i in report.inputs]
    lines += [f"- {escape(key)}: {escape(value)}\n" for key, value in report.environment.items()]
    body = code_block(report.command, "sh") + "\n" + " · ".join(figures.option_parts(report)) + "\n\n" + "".join(lines)
    return _details(f"Inputs and environment ({escape(report.tool)}, metric version {report.metric_version})", body)
