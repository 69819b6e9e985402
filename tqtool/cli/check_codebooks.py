"""`tqtool check-codebooks`: what somebody else's tables cost."""

from __future__ import annotations

import shutil
import stat
from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import JsonOption
from tqtool.codec.terms import Law
from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.foreign.tables import ForeignTable

TOO_DEAR = 1


HELP = """Say what somebody else's tables cost, which level is off, and the likely cause.

Tables may be centred, in [0, 1], or of unit variance; boundaries are used where the file has them. The cost is the
squared error beyond that of the optimal table; exit 1 if a table costs more than --tolerance.
"""


def check_codebooks(
    tables: Annotated[
        str,
        typer.Argument(metavar="FILE|LEVELS|-", help="A C header or other source, JSON, npy, npz, or a comma list."),
    ],
    dim: Annotated[int | None, typer.Option(help="Vector length; of a file that names lengths, only this one.")] = None,
    bits: Annotated[int | None, typer.Option(min=1, max=8, help="Only the tables of this width.")] = None,
    law: Annotated[
        Law | None,
        typer.Option(help="Law to compare with.  [default: the file's own, else sphere]", show_default=False),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Accepted cost, in % of the squared error.")] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.foreign.appraisal import appraise
    from tqtool.rendering.answers.check_codebooks import appraisal_json, appraisal_text

    if tolerance != tolerance:
        raise UsageError("--tolerance nan is not a number", code="usage")
    found = [appraise(table, dim=dim, law=law) for table in _foreign_tables(tables, dim, bits)]
    edited = _edited_domains(tables)
    if as_json:
        output.answer_json(appraisal_json(found, tolerance / 100, edited))
    else:
        width = shutil.get_terminal_size().columns if output.stdout_is_terminal() else None
        output.answer(appraisal_text(found, tolerance / 100, edited, width=width, color=output.stdout_has_color()))
    if edited or any(each.excess > tolerance / 100 for each in found):
        raise typer.Exit(TOO_DEAR)


def _edited_domains(source: str) -> tuple[str, ...]:
    """Return the domains of a header of ours that its own checksum does not fit; other sources have none."""
    from tqtool.dumps.inputs import mode_of, open_input
    from tqtool.foreign.own_header import edited_domains
    from tqtool.foreign.tables import MAX_TEXT

    if not stat.S_ISREG(mode_of(source)):
        return ()
    with open_input(source) as file:
        return edited_domains(file.read(MAX_TEXT).decode("utf-8", "replace"))


def _foreign_tables(source: str, dim: int | None, bits: int | None) -> list[ForeignTable]:
    """Return the tables of a file, or of a comma list where no file has that name."""
    from tqtool import files
    from tqtool.dumps.datafiles import listed
    from tqtool.dumps.inputs import mode_of
    from tqtool.foreign import tables as foreign
    from tqtool.foreign.listings import bare_list

    if not source:
        raise UsageError("no file and no levels: the argument is empty", code="usage")
    if not mode_of(source) and bare_list(source):
        found = foreign.parse_tables(source)
        if not found:
            raise UsageError(
                f"{source}: not 2, 4, 8 ... 256 ascending levels",
                code="usage",
                hint="give all levels, or the positive half of a symmetric table",
            )
    elif source.startswith("-") and source != files.STREAM and not mode_of(source):
        raise UsageError(f"no such option: {source}", code="usage", hint="tqtool check-codebooks --help lists them")
    else:
        found = foreign.read_tables(source)
    chosen = [t for t in found if bits in (None, t.bits) and (dim is None or t.dim in (None, dim))]
    if not chosen:
        there = sorted({f"{t.bits} bits" + (f" at d = {t.dim}" if t.dim else "") for t in found})
        raise UsageError(f"{source}: no such table; there are {listed(there)}", code="usage")
    return chosen
