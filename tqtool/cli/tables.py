"""`tqtool gen-codebooks` and `tqtool check-codebooks`: our tables, and what somebody else's cost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.codec.codebook import Codebook
    from tqtool.foreign.tables import ForeignTable

Format = Literal["c-header", "json", "npz"]
LawName = Literal["beta", "sphere", "gaussian"]  # codebook.Law, without importing NumPy for --help
SUFFIXES: dict[Format, str] = {"c-header": ".h", "json": ".json", "npz": ".npz"}
DEFAULT_FOLDER = Path("outputs")
STALE = 1
TOO_DEAR = 1


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gen-codebooks")(gen_codebooks)
    # A list of levels begins with a minus sign: Typer must not take it for an option.
    app.command("check-codebooks", context_settings={"ignore_unknown_options": True})(check_codebooks)


def gen_codebooks(
    dims: Annotated[str, typer.Option(help="Vector lengths, comma list.")] = "64,96,128,160",
    bits: Annotated[str, typer.Option(help="Bits a coordinate, comma list; a C header takes 1 to 4.")] = "2,3,4",
    law: Annotated[
        LawName, typer.Option(help="Law of a coordinate: Beta(d/2), the exact sphere marginal, or the normal limit.")
    ] = "beta",
    out: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE|-", help="Default: outputs/tq_codebooks.h")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = "c-header",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the file is stale.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Like --check, and print what would change.")] = False,
    force: Annotated[bool, typer.Option("-f", "--force", help="Replace an existing file.")] = False,
) -> None:
    """Compute Lloyd-Max tables and write them as a C header, JSON or npz.

    Prints for each table its iterations (Lloyd, then Newton), the residual in standard deviations, the relative
    squared error and the cosine of a restored vector, and the entropy of a code in bits.
    """
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
    path = out or str(DEFAULT_FOLDER / f"tq_codebooks{SUFFIXES[form]}")
    if check or diff:
        _compare(path, data, form, show=diff)
        return
    if path == files.STREAM and form == "npz" and sys.stdout.isatty():
        raise UsageError("npz is binary; not written to a terminal", code="usage", hint="give a file with -o")
    if out is None:
        DEFAULT_FOLDER.mkdir(exist_ok=True)
    with files.output_file(path, force=force, size=len(data)) as file:
        file.write(data)
    if path == files.STREAM:
        output.note(f"{len(books)} tables\n" + codebook_table(books, terminal=False))
        return
    color = output.stdout_has_color()
    output.answer(codebook_table(books, terminal=output.stdout_is_terminal(), color=color))
    output.answer(f"{path}: {len(books)} tables, {len(data)} bytes")


def check_codebooks(
    tables: Annotated[
        str,
        typer.Argument(metavar="FILE|LEVELS|-", help="A C header or other source, JSON, npy, npz, or a comma list."),
    ],
    dim: Annotated[int | None, typer.Option(help="Vector length; of a file that names lengths, only this one.")] = None,
    bits: Annotated[int | None, typer.Option(min=1, max=8, help="Only the tables of this width.")] = None,
    law: Annotated[
        LawName | None,
        typer.Option(help="Law to compare with.  [default: the file's own, else sphere]", show_default=False),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Accepted cost, in % of the squared error.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what somebody else's tables cost, which level is off, and the likely cause.

    Tables may be centred, in [0, 1], or of unit variance; boundaries are used where the file has them. The cost is the
    squared error beyond that of the optimal table; exit 1 if a table costs more than --tolerance.
    """
    from tqtool.foreign.appraisal import appraise
    from tqtool.rendering.answers.check_codebooks import appraisal_json, appraisal_text

    if tolerance != tolerance:
        raise UsageError("--tolerance nan is not a number", code="usage")
    found = [appraise(table, dim=dim, law=law) for table in _foreign_tables(tables, dim, bits)]
    if as_json:
        output.answer_json(appraisal_json(found, tolerance / 100))
    else:
        width = shutil.get_terminal_size().columns if output.stdout_is_terminal() else None
        output.answer(appraisal_text(found, tolerance / 100, width=width, color=output.stdout_has_color()))
    if any(each.excess > tolerance / 100 for each in found):
        raise typer.Exit(TOO_DEAR)


def _foreign_tables(source: str, dim: int | None, bits: int | None) -> list[ForeignTable]:
    """Return the tables of a file, or of a comma list where no file has that name."""
    from tqtool import files
    from tqtool.dumps.datafiles import listed
    from tqtool.foreign import tables as foreign
    from tqtool.foreign.listings import bare_list

    if not source:
        raise UsageError("no file and no levels: the argument is empty", code="usage")
    if not Path(source).exists() and bare_list(source):
        found = foreign.parse_tables(source)
        if not found:
            raise UsageError(
                f"{source}: not 2, 4, 8 ... 256 ascending levels",
                code="usage",
                hint="give all levels, or the positive half of a symmetric table",
            )
    elif source.startswith("-") and source != files.STREAM and not Path(source).exists():
        raise UsageError(f"no such option: {source}", code="usage", hint="tqtool check-codebooks --help lists them")
    else:
        found = foreign.read_tables(source)
    chosen = [t for t in found if bits in (None, t.bits) and (dim is None or t.dim in (None, dim))]
    if not chosen:
        there = sorted({f"{t.bits} bits" + (f" at d = {t.dim}" if t.dim else "") for t in found})
        raise UsageError(f"{source}: no such table; there are {listed(there)}", code="usage")
    return chosen


def integers(option: str, text: str, *, least: int = 0) -> list[int]:
    """Return the numbers of a comma list, none below `least`; each may stand there once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"{option} {text!r}: not a comma list of whole numbers", code="usage")
    numbers = [int(part) for part in parts]
    if min(numbers) < least:
        raise UsageError(f"{option} {text!r}: {min(numbers)} is below {least}", code="usage")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text!r}: a number stands there twice", code="usage")
    return numbers


def check_dims(dims: Sequence[int]) -> None:
    """Refuse lengths that no vector of ours can have, although their table exists."""
    from tqtool.codec.rotation import nearest_dims, supported_dims

    for dim in dims:
        if dim not in supported_dims():
            raise UsageError(
                f"--dims {dim}: no Hadamard matrix of that order is built",
                code="usage",
                hint="nearest supported: " + ", ".join(map(str, nearest_dims(dim))),
            )


def _contents(books: Sequence[Codebook], form: Format, dims: Sequence[int], bits: Sequence[int]) -> bytes:
    from tqtool.export import header
    from tqtool.rendering.answers import gen_codebooks as codebooks

    if form == "npz":
        return codebooks.codebook_npz(books)
    if form == "json":
        return codebooks.codebook_json(books).encode()
    return header.codebook_header(dims, bits, books[0].law).encode()


def _compare(path: str, data: bytes, form: Format, *, show: bool) -> None:
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
    output.answer(f"{path}: stale; tqtool gen-codebooks --force with the same options writes it anew")
    raise typer.Exit(STALE)
