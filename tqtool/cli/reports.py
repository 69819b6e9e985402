"""`tqtool report` and `tqtool compare`: reports that were measured before, rendered again or set side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.renderings import (
    ForceOption,
    FormatOption,
    HtmlOut,
    JsonOption,
    JsonOut,
    JunitOut,
    MarkdownOut,
    Outputs,
    TsvOut,
    check_outputs,
    print_report,
    write_outputs,
)
from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.report.model import Report


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("report")(report)
    app.command("compare")(compare)


def report(
    path: Annotated[str, typer.Argument(metavar="REPORT.json", help="Written by validate --json-out; - for stdin.")],
    chosen: FormatOption = "auto",
    as_json: JsonOption = False,
    json_out: JsonOut = None,
    markdown_out: MarkdownOut = None,
    html_out: HtmlOut = None,
    junit_out: JunitOut = None,
    tsv_out: TsvOut = None,
    force: ForceOption = False,
) -> None:
    """Render a report again, in any format, without measuring.

    Exits 0 whatever the verdict in the report is; validate is what judges.
    """
    outputs = Outputs(json_out, markdown_out, html_out, junit_out, tsv_out)
    check_outputs(outputs, [path], force=force)
    measured = read_report(path)
    write_outputs(measured, outputs, force=force)
    print_report(measured, chosen, as_json=as_json)


def compare(
    a: Annotated[str, typer.Argument(metavar="A.json", help="A report; - for stdin.")],
    b: Annotated[str, typer.Argument(metavar="B.json", help="The report to compare with it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Set two reports side by side: what changed from A to B, for each configuration they share.

    Differences are paired by layer and head, with a 95 % interval, where both measured the same data.
    """
    from tqtool.rendering.report.comparison import comparison_json, comparison_text
    from tqtool.report.comparison import compare_reports

    if a == b == "-":
        raise UsageError("only one of the reports can come from stdin", code="usage")
    found = compare_reports(read_report(a), read_report(b), names=(a, b))
    if as_json:
        output.answer_json(comparison_json(found))
    else:
        output.answer(comparison_text(found, color=output.stdout_has_color()))


def read_report(path: str) -> Report:
    """Read a report that `validate` wrote.

    Raises: InputError (codes of `open_input`, and `report` for anything that is no report), IntegrityError with code
    `format-newer` for a schema this version does not know.
    """
    from tqtool.dumps.inputs import open_input
    from tqtool.errors import InputError
    from tqtool.files import STREAM
    from tqtool.report.serialize import report_from_json

    with open_input(path) as file:
        path = "stdin" if path == STREAM else path
        if file.size > LIMIT:
            raise InputError(
                f"{path}: {file.size} bytes is too long for a report, the limit is {LIMIT}", code="report", path=path
            )
        data = file.read()
    try:
        text = data.decode("utf-8-sig")  # Windows shells write a byte-order mark
    except UnicodeDecodeError:
        raise InputError(
            f"{path}: not JSON: the file is not text",
            code="report",
            path=path,
            hint="give the file of validate --json-out",
        ) from None
    return report_from_json(text, path)


LIMIT = 512 << 20  # bytes; the largest real report is a thousand times smaller
