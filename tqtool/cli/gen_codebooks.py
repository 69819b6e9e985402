"""`tqtool gen-codebooks`: our tables, as a C header, JSON or npz."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.cli.options import BitsOption, DimsOption, ForceOption, LawOption, check_dims, integers
from tqtool.codec.terms import Law
from tqtool.errors import InputError, UsageError

if TYPE_CHECKING:
    from tqtool.codec.codebook import Codebook

Format = Literal["c-header", "json", "npz"]
SUFFIXES: dict[Format, str] = {"c-header": ".h", "json": ".json", "npz": ".npz"}
DEFAULT_FOLDER = Path("outputs")
STALE = 1
SAME = 1e-6  # in sigma: what float32 leaves of a level, and ten times as much


HELP = """Compute Lloyd-Max tables and write them as a C header, JSON or npz.

Prints for each table its iterations (Lloyd, then Newton), the residual in standard deviations, the relative
squared error and the cosine of a restored vector, and the entropy of a code in bits.
"""


def gen_codebooks(
    dims: DimsOption = "64,96,128,160",
    bits: BitsOption = "2,3,4",
    law: LawOption = "beta",
    out: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE|-", help="Default: outputs/tq_codebooks.h")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = "c-header",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the file is stale.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Like --check, and print what would change.")] = False,
    force: ForceOption = False,
) -> None:
    """Do what `HELP` says."""
    if force and (check or diff):
        raise UsageError("--check and --diff write nothing, so --force has no meaning", code="usage")
    if out == "":
        raise UsageError("-o names no file", code="usage", hint="for standard output use -o -")
    dim_list, bit_list = integers("--dims", dims), integers("--bits", bits)

    from tqtool import files
    from tqtool.codec.codebook import lloyd_max
    from tqtool.rendering.answers.gen_codebooks import codebook_table

    check_dims(dim_list)
    books = [lloyd_max(dim, width, law) for dim in dim_list for width in bit_list]
    data = _contents(books, form, dim_list, bit_list)
    counted = "1 table" if len(books) == 1 else f"{len(books)} tables"
    path = out or str(DEFAULT_FOLDER / f"tq_codebooks{SUFFIXES[form]}")
    if check or diff:
        _compare(path, data, form, law, show=diff)
        return
    if path == files.STREAM and form == "npz" and sys.stdout.isatty():
        raise UsageError("npz is binary; not written to a terminal", code="usage", hint="give a file with -o")
    if out is None:
        files.make_folder(DEFAULT_FOLDER)
    with files.output_file(path, force=force, size=len(data)) as file:
        file.write(data)
    if path == files.STREAM:
        for line in [counted, *codebook_table(books, terminal=False).split("\n")]:
            output.note(line)
        return
    color = output.stdout_has_color()
    output.answer(codebook_table(books, terminal=output.stdout_is_terminal(), color=color))
    output.answer(f"{path}: {counted}, {len(data)} bytes")


def _contents(books: Sequence[Codebook], form: Format, dims: Sequence[int], bits: Sequence[int]) -> bytes:
    from tqtool.export import header
    from tqtool.rendering.answers import gen_codebooks as codebooks

    if form == "npz":
        return codebooks.codebook_npz(books)
    if form == "json":
        return codebooks.codebook_json(books).encode()
    return header.codebook_header(dims, bits, books[0].law).encode()


def _compare(path: str, data: bytes, form: Format, law: Law, *, show: bool) -> None:
    """Say whether the file holds exactly `data`; exit 1 if not."""
    from tqtool.dumps.inputs import open_input

    if show and form == "npz":
        raise UsageError("--diff shows text and npz is binary", code="usage", hint="use --check")
    with open_input(path) as file:
        present = file.read()
    if present == data:
        output.answer(f"{path}: up to date")
        return
    if show:
        import difflib

        before, after = (part.decode("utf-8", "replace").splitlines(keepends=True) for part in (present, data))
        output.answer("".join(difflib.unified_diff(before, after, path, f"{path} (generated)")))
    else:
        for line in _moved_levels(path, law):
            output.answer(line)
    output.answer(f"{path}: stale; tqtool gen-codebooks --force with the same options writes it anew")
    raise typer.Exit(STALE)


def _moved_levels(path: str, law: Law) -> list[str]:
    """Return a line for each table of the file that has other levels than ours."""
    from tqtool.foreign.appraisal import appraise
    from tqtool.foreign.tables import read_tables

    lines = []
    try:
        found = [appraise(table, law=law) for table in read_tables(path) if table.dim is not None]
    except InputError:  # too little is left of the file to name a level
        return []
    for each in found:
        if abs(each.deviation[each.worst]) > SAME:
            values = f"{each.table.levels[each.worst]:.7g}, not {each.right[each.worst]:.7g}"
            lines.append(f"{each.table.name}: level {each.worst} is {values} ({each.deviation[each.worst]:+.1e} sigma)")
    return lines
