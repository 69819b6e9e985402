"""`tqtool compare`: two reports side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import JsonOption
from tqtool.cli.report import read_report
from tqtool.errors import UsageError

HELP = """Set two reports side by side: what changed from A to B, for each configuration they share.

Differences are paired by layer and head, with a 95 % interval, where both measured the same data.
"""


def compare(
    a: Annotated[str, typer.Argument(metavar="A.json", help="A report; - for stdin.")],
    b: Annotated[str, typer.Argument(metavar="B.json", help="The report to compare with it.")],
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.rendering.report.comparison import comparison_json, comparison_text
    from tqtool.report.comparison import compare_reports

    if a == b == "-":
        raise UsageError("only one of the reports can come from stdin", code="usage")
    found = compare_reports(read_report(a), read_report(b), names=(a, b))
    if as_json:
        output.answer_json(comparison_json(found))
    else:
        output.answer(comparison_text(found, color=output.stdout_has_color()))
