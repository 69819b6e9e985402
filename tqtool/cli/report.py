"""`tqtool report`: a report that was measured before, in any format; and where a Report goes, for `validate` too.

To stdout in one format, and to files in others.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import (
    ForceOption,
    FormatOption,
    HtmlOut,
    JsonOut,
    JunitOut,
    MarkdownOut,
    ReportFormat,
    ReportJsonOption,
    TsvOut,
)
from tqtool.errors import OutputError, UsageError

if TYPE_CHECKING:
    from tqtool.report.model import Report

LIMIT = 512 << 20  # bytes; the largest real report is a thousand times smaller


HELP = """Render a report again, in any format, without measuring.

Exits 0 whatever the verdict in the report is; validate is what judges.
"""


def report(
    path: Annotated[str, typer.Argument(metavar="REPORT.json", help="Written by validate --json-out; - for stdin.")],
    chosen: FormatOption = "auto",
    as_json: ReportJsonOption = False,
    json_out: JsonOut = None,
    markdown_out: MarkdownOut = None,
    html_out: HtmlOut = None,
    junit_out: JunitOut = None,
    tsv_out: TsvOut = None,
    force: ForceOption = False,
) -> None:
    """Do what `HELP` says."""
    outputs = Outputs(json_out, markdown_out, html_out, junit_out, tsv_out)
    check_outputs(outputs, [path], force=force)
    measured = read_report(path)
    write_outputs(measured, outputs, force=force)
    print_report(measured, chosen, as_json=as_json)


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


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files asked for, by format."""

    json: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    junit: Path | None = None
    tsv: Path | None = None

    def asked(self) -> list[tuple[ReportFormat, Path]]:
        """Return format and path of each file asked for."""
        paths: list[tuple[ReportFormat, Path | None]] = [(f.name, getattr(self, f.name)) for f in fields(self)]  # type: ignore[misc]
        return [(name, path) for name, path in paths if path is not None]


def check_outputs(outputs: Outputs, inputs: list[str], *, force: bool) -> None:
    """Refuse what could not be written, before any work is done. A step summary is added to, so it may hold text."""
    from tqtool.files import STREAM, check_not_input, check_output, holds_nothing

    seen: dict[str, str] = {}
    for name, path in outputs.asked():
        if str(path) == STREAM:
            raise UsageError(f"--{name}-out needs a file name", code="usage", hint=f"for stdout use --format {name}")
        check_not_input(path, inputs)
        check_output(path, force=force or holds_nothing(path) or _is_summary(name, path))
        other = seen.setdefault(os.path.realpath(path), name)
        if other != name:
            raise UsageError(f"{path}: --{other}-out and --{name}-out name the same file", code="usage", path=str(path))


def write_outputs(report: Report, outputs: Outputs, *, force: bool) -> None:
    """Write the files asked for, each whole or not at all."""
    from tqtool.files import holds_nothing, write_text

    for name, path in outputs.asked():
        if _is_summary(name, path):
            _append(report, path)
        else:
            write_text(path, render(report, name), force=force or holds_nothing(path))
        output.note(f"wrote {path}")


def _is_summary(name: ReportFormat, path: Path) -> bool:
    """Return whether a file is the step summary of a CI run, to which every step adds its own."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    return bool(summary) and name == "markdown" and os.path.realpath(path) == os.path.realpath(summary)


def _append(report: Report, path: Path) -> None:
    """Add the report to a step summary, no longer than the runner takes the whole."""
    from tqtool.rendering.report.markdown import LIMIT as MOST
    from tqtool.rendering.report.markdown import report_markdown

    try:
        with path.open("ab") as file:
            there = file.tell()
            file.write((b"\n" if there else b"") + report_markdown(report, max(MOST - there, 0)).encode())
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}", code="write", path=str(path)) from error


def print_report(report: Report, chosen: ReportFormat, *, as_json: bool) -> None:
    """Print the report to stdout."""
    output.answer(render(report, format_of(chosen, as_json=as_json)))


def format_of(chosen: ReportFormat, *, as_json: bool) -> ReportFormat:
    """Return the format asked for by --format and --json. Raises `UsageError` where they contradict each other."""
    if as_json and chosen not in ("auto", "json"):
        raise UsageError(f"--json contradicts --format {chosen}", code="usage")
    return "json" if as_json else chosen


def render(report: Report, chosen: ReportFormat) -> str:
    """Return the report as text in a format; `auto` is fitted to the terminal where stdout is one."""
    if chosen in ("auto", "text"):
        from tqtool.rendering.report.terminal import report_terminal

        terminal = chosen == "auto" and output.stdout_is_terminal()
        width = shutil.get_terminal_size().columns if terminal else None
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
        return report_terminal(report, width, encoding.startswith("utf"), output.stdout_has_color())
    if chosen == "json":
        from tqtool.report.serialize import report_to_json

        return report_to_json(report)
    if chosen == "tsv":
        from tqtool.rendering.report.tsv import report_tsv

        return report_tsv(report)
    if chosen == "markdown":
        from tqtool.rendering.report.markdown import report_markdown

        return report_markdown(report)
    if chosen == "junit":
        from tqtool.rendering.report.junit import report_junit

        return report_junit(report)
    from tqtool.rendering.report.html import report_html

    return report_html(report)
