"""`tqtool capture`: a model reads texts, and what its attention reads goes into dumps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.cli.options import (
    DeviceMapOption,
    DeviceOption,
    GgufOption,
    OfflineOption,
    RemoteCodeOption,
    RevisionOption,
    TorchDtypeOption,
)
from tqtool.errors import OutputError, UsageError

if TYPE_CHECKING:
    from tqtool.hf.capture import CaptureJob
    from tqtool.hf.models import LoadedModel


HELP = """Run texts through a model and write what every layer's attention reads: a dump for `validate`.

Keys, values and the last queries of each layer, as the scores see them, with a manifest that says how the layer
attends. Nothing is downloaded unless MODEL is a name on the hub.
"""


def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of config.json and weights, a .gguf file, or a name on the hub.",
            show_default=False,
        ),
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="FILE...", help="UTF-8 text files, - for stdin; a dump of each.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl", help='A dump of each line: {"text": …} or {"messages": […]}.', show_default=False
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="DUMP/",
            help="The dump's folder; several texts get one each in it.",
            show_default=False,
        ),
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text; the rest is left out.")] = 4096,
    queries: Annotated[int, typer.Option(min=1, help="Queries are kept of so many last positions.")] = 256,
    layers: Annotated[str, typer.Option(help="all, or numbers and ranges: 0,1,4-7,-1.")] = "all",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens that run through the model at once.")] = 512,
    dtype: Annotated[
        Literal["keep", "f16", "f32"], typer.Option(help="Type of the files; keep: as the model computes.")
    ] = "keep",
    file_format: Annotated[
        Literal["npy", "safetensors"] | None,
        typer.Option("--format", help="Of the files.", show_default="npy; safetensors for bfloat16"),
    ] = None,
    device: DeviceOption = "auto",
    torch_dtype: TorchDtypeOption = "auto",
    device_map: DeviceMapOption = None,
    revision: RevisionOption = None,
    gguf_file: GgufOption = None,
    offline: OfflineOption = False,
    trust_remote_code: RemoteCodeOption = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Hold the first chunk's logits against the untouched model's.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.hf.extra import quiet_libraries, require_extra

    if more and not text:
        raise UsageError(f"{more[0]}: is this a text? say --text {more[0]}", code="usage")
    if not text and prompts is None:
        raise UsageError("no text given", code="usage", hint="say --text FILE or --prompts FILE.jsonl")
    if not out and not dry_run:
        raise UsageError("-o is missing: the folder of the dump", code="usage", hint="for instance -o dump/")
    require_extra()
    quiet_libraries()
    from tqtool.hf.capture_files import check_absent
    from tqtool.hf.capture_texts import read_texts

    texts = read_texts([*(text or ()), *(more or ())], prompts)
    folder = Path(out or "dump")
    for path in [folder] if len(texts) == 1 else [folder / each.name for each in texts]:
        if not dry_run:
            check_absent(path, makes_parent=len(texts) > 1)
    from tqtool.hf.capture import capture_jobs
    from tqtool.hf.capture_record import CaptureParams, check_unchanged
    from tqtool.hf.models import ModelSource, load_model

    source = ModelSource(model, revision, gguf_file, offline, trust_remote_code, device, torch_dtype, device_map)
    _use_threads()
    loaded = load_model(source)
    if trust_remote_code:
        output.note(f"{model}: its own code may run, of commit {loaded.revision or 'unknown (a folder)'}")
    params = CaptureParams(queries, parse_layers(layers, loaded.layers), chunk, dtype, file_format)
    jobs = capture_jobs(loaded, texts, folder, params, max_tokens=max_tokens)
    _announce(loaded, jobs, chunk)
    if dry_run:
        _show(loaded, jobs, as_json=as_json)
        return
    if check:
        check_unchanged(loaded, jobs[0].ids[: jobs[0].chunk])
    _run(loaded, jobs, folder, as_json=as_json)


def _use_threads() -> None:
    from tqtool.hf.steps import use_threads

    if (threads := output.settings().threads) is not None:
        use_threads(threads)


def _announce(loaded: LoadedModel, jobs: tuple[CaptureJob, ...], chunk: int) -> None:
    """Say before it starts how much will be written, and what of the texts is left out."""
    from tqtool.files import binary_size

    for job in jobs:
        if job.left_out:
            output.note(
                f"{job.text.source}: the last {job.left_out:,} of {len(job.ids) + job.left_out:,} tokens are left out"
            )
        windows = {plan.facts.window for plan in job.layers if plan.files and plan.facts.window}
        if windows and len(job.ids) <= min(windows):
            output.note(f"{job.text.source}: {len(job.ids):,} tokens never reach past the window of {min(windows):,}")
    if any(job.chunk > chunk for job in jobs):
        output.note(f"{loaded.name}: in chunks {loaded.architecture} computes something else, so texts run whole")
    size, tokens = sum(job.size for job in jobs), sum(len(job.ids) for job in jobs)
    output.note(f"{loaded.name}: {binary_size(size)} for {tokens:,} tokens")


def _show(loaded: LoadedModel, jobs: tuple[CaptureJob, ...], *, as_json: bool) -> None:
    from tqtool.hf.capture import manifest
    from tqtool.rendering.answers.capture import capture_json, dump_text

    planned = [(str(job.folder), manifest(loaded, job, job.layers), job.size) for job in jobs]
    if as_json:
        output.answer_json(capture_json(planned, dry_run=True))
    else:
        output.answer("\n".join(dump_text(path, told, size, planned=True) for path, told, size in planned))


def _run(loaded: LoadedModel, jobs: tuple[CaptureJob, ...], folder: Path, *, as_json: bool) -> None:
    from tqtool.hf.capture import run_job
    from tqtool.rendering.answers.capture import capture_json, dump_text

    if len(jobs) > 1:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: {error.strerror}", code="write", path=str(folder)) from error
    done = []
    with output.progress("tokens", sum(len(job.ids) for job in jobs)) as advance:
        for job in jobs:
            told = run_job(loaded, job, advance)
            done.append((str(job.folder), told, job.size))
            if not as_json:
                output.answer(dump_text(*done[-1], planned=False))
    if as_json:
        output.answer_json(capture_json(done, dry_run=False))


def parse_layers(text: str, count: int) -> tuple[int, ...] | None:
    """Read `all`, or numbers and ranges of layers from 0, negative ones from the end; None means all."""
    if text.strip() == "all":
        return None
    found: set[int] = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        match = re.fullmatch(r"(-?\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            raise UsageError(f"--layers {part!r}: need all, a number, -1 or a range as 3-5", code="usage")
        low = int(match[1])
        low += count * (low < 0)
        high = low if match[2] is None else int(match[2])
        if not 0 <= low <= high < count:
            raise UsageError(f"--layers {part!r}: there are layers 0 to {count - 1}", code="usage")
        found |= set(range(low, high + 1))
    if not found:
        raise UsageError("--layers names no layer", code="usage", hint="say all, or for instance 0,1,-1")
    return tuple(sorted(found))
