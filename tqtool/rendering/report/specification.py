"""The specification's own table of output cosines, with theory and what was measured beside its figures."""

from __future__ import annotations

from collections.abc import Sequence

from tqtool.rendering.report.figures import MISSING, figure
from tqtool.rendering.tables import Column, table_text
from tqtool.report.model import Report, Row, Source

COLUMN_NAMES = {"gaussian": "Gaussian", "correlated": "realistic"}  # what the specification calls the two sets
FOOTNOTE = (
    "The specification's target, above 0.999 at K4/V2, is out of reach: no 2-bit code of independent Gaussian values "
    "gets beyond 0.968. These two sets show that the codec is healthy, and nothing about a model."
)


def compared_sources(report: Report) -> list[Source]:
    """Return the synthetic sources that the specification gives figures for, if they accompany a dump."""
    if all(source.kind == "synthetic" for source in report.sources):
        return []
    names = {row.source for row in report.rows if row.published}
    return [source for source in report.sources if source.kind == "synthetic" and source.name in names]


def specification_table(report: Report, sources: Sequence[Source]) -> str:
    """Return the table: a configuration a row, for each source the specification's figure, theory and ours."""
    columns = [Column("config", "left")]
    rows = {(row.source, row.config): row for row in report.rows if row.kind == "turboquant"}
    configs = list(dict.fromkeys(config for source, config in rows))
    cells: list[list[str]] = [[config] for config in configs]
    for source in sources:
        found = [rows.get((source.name, config)) for config in configs]
        theory = any(row is not None and "cos" in row.predicted for row in found)
        columns += [
            Column(f"{COLUMN_NAMES.get(source.name, source.name)}: spec"),
            *[Column("theory")] * theory,
            Column("measured"),
        ]
        for line, row in zip(cells, found, strict=True):
            line += [_published(row), *[_predicted(row)] * theory, _measured(row)]
    return table_text(columns, cells, terminal=False)


def _published(row: Row | None) -> str:
    return MISSING if row is None else row.published.get("cos", MISSING)


def _predicted(row: Row | None) -> str:
    return MISSING if row is None or "cos" not in row.predicted else figure(row.predicted["cos"], "cos")


def _measured(row: Row | None) -> str:
    return MISSING if row is None else figure(row.metrics["cos"].mean, "cos")
