"""`tqtool export-c`: the C runtime as engines receive it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import BitsOption, DimsOption, ForceOption, LawOption, SeedOption, check_dims, integers
from tqtool.errors import UsageError

FAILED = 1


HELP = """Write the C runtime, its tables, tests and golden vectors, as engines receive them.

These are the files that tqtool itself runs, so what was validated is what ships.
"""


def export_c(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the files go; made if it does not exist.")],
    dims: DimsOption = "64,96,128,160",
    bits: BitsOption = "2,3,4",
    law: LawOption = "beta",
    seed: SeedOption = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Compile and run the tests; exit 1 if one fails.")] = False,
    force: ForceOption = False,
) -> None:
    """Do what `HELP` says."""
    import subprocess

    if not directory:
        raise UsageError("DIR is empty: no folder is named", code="usage", hint="for the current folder write .")
    folder = Path(directory)
    from tqtool import files
    from tqtool.export import compiler
    from tqtool.export.package import export_files

    dim_list, bit_list = integers("--dims", dims), integers("--bits", bits)
    check_dims(dim_list)
    contents = export_files(dim_list, bit_list, law, seed)
    files.make_folder(folder)
    for name in contents:
        files.check_output(folder / name, force=force)  # all or none
    for name, text in contents.items():
        files.write_text(folder / name, text, force=force)
        output.answer(f"{folder / name}: {len(text.encode())} bytes")
    if not verify:
        return
    try:
        output.answer(compiler.verify(contents))
    except subprocess.CalledProcessError as failure:
        output.answer(failure.output)
        output.answer(f"failed: {failure.cmd}")
        raise typer.Exit(FAILED) from None
