"""`tqtool inspect`: what is in a file, without reading its data unless asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import DtypeOption, JsonOption
from tqtool.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from tqtool.container.format import Container, Damage


HELP = """List a file's tensors: shapes, types, bits, bytes, seed, law, version."""


def inspect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A compressed file, .npy, .npz, .safetensors, or -.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every checksum of a compressed file.")] = False,
    health: Annotated[
        bool, typer.Option("--health", help="Read the values of plain arrays and say what is unusual.")
    ] = False,
    dtype: DtypeOption = None,
    axis: Annotated[int, typer.Option(help="The vector axis, for --health.")] = -1,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.container.format import is_container, open_container
    from tqtool.dumps.arrays import FLOAT_TYPES
    from tqtool.dumps.datafiles import open_file
    from tqtool.dumps.inputs import open_input
    from tqtool.dumps.layouts import vectors_last
    from tqtool.health import scan
    from tqtool.rendering.answers import inspect as render

    terminal = output.stdout_is_terminal()
    file = open_input(path)
    if is_container(file, path):
        if health:
            raise UsageError("--health reads plain arrays; this file is compressed", code="usage", path=path)
        container = open_container(path, file=file)
        damage = _verified(container) if verify else None
        if as_json:
            output.answer_json(render.container_json(container, damage))
        else:
            output.answer(render.container_text(container, damage, terminal=terminal))
        if damage:
            raise IntegrityError(
                f"{container.path}: {damage[0]}", code="checksum", hint=render.undamaged(container, damage), path=path
            )
        return
    if verify:
        raise UsageError("--verify checks compressed files; plain arrays have no checksums", code="usage", path=path)
    opened = open_file(path, dtype=dtype, file=file)
    found = {}
    if health:
        floats = [source for source in opened.arrays if source.dtype in FLOAT_TYPES and len(source.shape) > 1]
        with output.progress("health", sum(source.nbytes for source in floats), unit_bytes=True) as advance:
            for source in floats:
                found[source.name] = scan(vectors_last(source, axis=axis))
                advance(source.nbytes)
    if as_json:
        output.answer_json(render.data_json(opened, found))
    else:
        output.answer(render.data_text(opened, found, terminal=terminal))


def _verified(container: Container) -> list[Damage]:
    with output.progress("verify", None, unit_bytes=True):
        return list(container.damage(threads=output.settings().threads))
