"""`tqtool decompress`: compressed files back to arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tqtool.cli import output
from tqtool.cli.jobs import jobs_of
from tqtool.cli.options import ForceOption, JsonOption, NameOption, OutputOption
from tqtool.escapes import visible

HELP = """Restore compressed arrays: their names, shapes and types, to NAME.restored.npy, .npz or .safetensors."""


def decompress(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Compressed files, or - for stdin.",
        ),
    ],
    out: OutputOption = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16"] | None,
        typer.Option(
            help="Type to restore; else the source's.",
            show_default=False,
        ),
    ] = None,
    names: NameOption = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check every checksum first.",
        ),
    ] = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.container.decompression import check_damage, form_of, restore, restored_size, select
    from tqtool.container.format import open_container
    from tqtool.dumps.datafiles import RESTORED
    from tqtool.files import binary_size, output_file
    from tqtool.rendering.answers.decompress import decompress_json

    settings = output.settings()
    containers = [open_container(path) for path in inputs]
    forms = [form_of(out, container) for container in containers]
    suffixes = {path: f"{RESTORED}.{form}" for path, form in zip(inputs, forms, strict=True)}
    jobs = jobs_of(inputs, out, suffixes, force=force, as_json=as_json)
    results: list[dict[str, Any]] = []
    for container, form, (_, target) in zip(containers, forms, jobs, strict=True):
        chosen = select(container, names or [], dtype)
        if verify:
            check_damage(container, chosen, settings.threads)
        size = restored_size(chosen, form)
        with (
            output.progress(f"decompress {Path(container.path).name}", size, unit_bytes=True) as advance,
            output_file(target, force=force, size=size) as file,
        ):
            restore(container, chosen, form, file, threads=settings.threads, advance=advance)
            written = file.seek(0, 2)
        results.append(decompress_json(container.path, target, written, chosen))
        if not as_json:
            paths = f"{visible(container.path)} -> {visible(target)}"
            text = f"{paths}: {binary_size(container.nbytes)} -> {binary_size(written)}"
            output.result(f"{text}, {len(chosen)} tensor{'s' if len(chosen) > 1 else ''}", target)
    if as_json:
        output.answer_json({"schema": "tqtool.decompress/1", "files": results})
