"""Which file becomes which: inputs expanded, outputs named, and refused before any work is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tqtool.cli import output
from tqtool.dumps.names import CONTAINER_SUFFIX
from tqtool.errors import InputError, UsageError
from tqtool.files import STREAM, check_not_input, check_output, names_folder


def expanded(inputs: Sequence[str]) -> list[str]:
    """Return the files that the inputs stand for: a folder for its dump files, queries excepted (no cache has them)."""
    from tqtool.dumps.datafiles import folder_files, listed
    from tqtool.dumps.inputs import is_folder
    from tqtool.dumps.names import meaning

    files: list[str] = []
    for path in inputs:
        if not is_folder(path):
            files.append(path)
            continue
        chosen, ignored = folder_files(Path(path))
        queries = [member.name for member in chosen if meaning(member.stem).kind == "q"]
        if len(queries) == len(chosen):
            hint = "name the files themselves, for instance those of a latent"
            text = f"{path}: no keys and values in this folder, only queries"
            raise InputError(text, code="no-tensors", hint=hint, path=path)
        files.extend(str(member) for member in chosen if member.name not in queries)
        if ignored := [*queries, *ignored]:
            output.note(f"{path}: ignored {listed(ignored)}")
    return files


def jobs_of(
    inputs: Sequence[str], out: str | None, suffix: str | dict[str, str], *, force: bool, as_json: bool
) -> list[tuple[str, str]]:
    """Return (input, output) pairs; refuses outputs that cannot be written before any work is done."""
    jobs = []
    for path in inputs:
        if out == STREAM or (out is None and path == STREAM):
            target = STREAM
        elif out is not None and not (names_folder(out) or out.endswith("/")):
            target = out
        else:
            name = "stdin" if path == STREAM else Path(path).name
            name = Path(name).stem if isinstance(suffix, str) else name.removesuffix(CONTAINER_SUFFIX)
            folder = Path(path).parent if out is None else Path(out)
            target = str(folder / f"{name}{suffix if isinstance(suffix, str) else suffix[path]}")
        jobs.append((path, target))
    twice = next((target for _, target in jobs if sum(target == other for _, other in jobs) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{twice}: two inputs would take this name",
            code="usage",
            hint="give -o an existing folder, or run them one at a time",
        )
    for _, target in jobs:
        if target == STREAM:
            if as_json:
                raise UsageError("--json and the data cannot both go to standard output", code="usage")
            if sys.stdout.isatty():
                raise UsageError("binary data would go to the terminal", code="usage", hint="say -o FILE, or pipe it")
        else:
            check_not_input(target, list(inputs))
            check_output(target, force=force)
    return jobs
