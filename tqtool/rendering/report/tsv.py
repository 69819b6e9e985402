"""The report as tab-separated values: one line per source and configuration, full precision, fixed column order.

A number that was not measured is an empty cell; `_p01` and `_p99` are empty where fewer than 500 queries allow p5 and
p95 only.
"""

import math

from tqtool.report.model import METRICS, Report, Row, Summary

ROW_COLUMNS = (
    "source", "config", "kind", "bits_per_value", "key_bits_per_value", "value_bits_per_value", "pair_bytes",
    "ratio_fp32", "ratio_fp16", "shared_bytes", "level", "status", "verdict", "pareto",
)  # fmt: skip
SUFFIXES = ("", "_p01", "_p99", "_min", "_max", "_worst", "_worst_head", "_worst_layer", "_ci_low", "_ci_high")


def report_tsv(report: Report) -> str:
    """Return a header line and one line per row, in the report's order."""
    header = [*ROW_COLUMNS, *(metric + suffix for metric in METRICS for suffix in SUFFIXES)]
    lines = [header, *(_line(row) for row in report.rows)]
    return "".join("\t".join(cells) + "\n" for cells in lines)


def _line(row: Row) -> list[str]:
    cells = [_cell(getattr(row, name)) for name in ROW_COLUMNS]
    for metric in METRICS:
        cells += _summary_cells(row.metrics[metric]) if metric in row.metrics else [""] * len(SUFFIXES)
    return cells


def _summary_cells(summary: Summary) -> list[str]:
    low, high = (summary.low, summary.high) if summary.tail_percent == 1 else (math.nan, math.nan)
    values = (
        summary.mean, low, high, summary.min, summary.max, summary.worst, summary.worst_head, summary.worst_layer_name,
        summary.ci_low, summary.ci_high,
    )  # fmt: skip
    return [_cell(value) for value in values]


def _cell(value: float | int | str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)
