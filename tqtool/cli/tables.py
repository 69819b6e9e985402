"""`tqtool gen-codebooks` and `tqtool check-codebooks`: our tables, and what somebody else's cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.codebook import Codebook

Format = Literal["c-header", "json", "npz"]
LawName = Literal["beta", "sphere", "gaussian"]  # codebook.Law, without importing NumPy for --help
SUFFIXES: dict[Format, str] = {"c-header": ".h", "json": ".json", "npz": ".npz"}
DEFAULT_FOLDER = Path("outputs")
STALE = 1


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gen-codebooks")(gen_codebooks)


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
    from tqtool import files
    from tqtool.codebook import lloyd_max
    from tqtool.rendering.codebooks import codebook_table

    if force and (check or diff):
        raise UsageError("--check and --diff write nothing, so --force has no meaning", code="usage")
    dim_list, bit_list = _integers("--dims", dims), _integers("--bits", bits)
    _check_dims(dim_list)
    books = [lloyd_max(dim, width, law) for dim in dim_list for width in bit_list]
    data = _contents(books, form, dim_list, bit_list)
    path = out or str(DEFAULT_FOLDER / f"tq_codebooks{SUFFIXES[form]}")
    if check or diff:
        _compare(path, data, form, show=diff)
        return
    if path == files.STREAM:
        _to_stdout(data, binary=form == "npz")
        output.note(f"{len(books)} tables\n" + codebook_table(books, terminal=False))
        return
    if out is None:
        DEFAULT_FOLDER.mkdir(exist_ok=True)
    with files.write_atomically(path, force=force, size=len(data)) as file:
        file.write(data)
    color = output.stdout_has_color()
    output.answer(codebook_table(books, terminal=output.stdout_is_terminal(), color=color))
    output.answer(f"{path}: {len(books)} tables, {len(data)} bytes")


def _integers(option: str, text: str) -> list[int]:
    """Return the numbers of a comma list; each may stand there once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"{option} {text!r}: not a comma list of whole numbers", code="usage")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text!r}: a number stands there twice", code="usage")
    return numbers


def _check_dims(dims: Sequence[int]) -> None:
    """Refuse lengths that no vector of ours can have, although their table exists."""
    from tqtool.rotation import nearest_dims, supported_dims

    for dim in dims:
        if dim not in supported_dims():
            raise UsageError(
                f"--dims {dim}: no Hadamard matrix of that order is built",
                code="dim",
                hint="nearest supported: " + ", ".join(map(str, nearest_dims(dim))),
            )


def _contents(books: Sequence[Codebook], form: Format, dims: Sequence[int], bits: Sequence[int]) -> bytes:
    from tqtool.rendering import codebooks, header

    if form == "npz":
        return codebooks.codebook_npz(books)
    if form == "json":
        return codebooks.codebook_json(books).encode()
    return header.codebook_header(dims, bits, books[0].law).encode()


def _to_stdout(data: bytes, *, binary: bool) -> None:
    if binary and sys.stdout.isatty():
        raise UsageError("npz is binary; not written to a terminal", code="usage", hint="give a file with -o")
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _compare(path: str, data: bytes, form: Format, *, show: bool) -> None:
    """Say whether the file holds exactly `data`; exit 1 if not."""
    from tqtool import files

    if show and form == "npz":
        raise UsageError("--diff shows text and npz is binary", code="usage", hint="use --check")
    with files.open_input(path) as file:
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
