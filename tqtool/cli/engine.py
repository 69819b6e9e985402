"""`tqtool export-c`, `tqtool bench` and `tqtool doctor`: the runtime handed out, timed and examined."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.tables import LawName, check_dims, integers
from tqtool.errors import OutputError, UsageError

if TYPE_CHECKING:
    from tqtool.codec.sizes import KVConfig
    from tqtool.doctor import Installation

FAILED = 1
CACHE_LENGTHS = "128,512,2048,8192,32768,131072"
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export-c")(export_c)
    app.command("bench")(bench)
    app.command("doctor")(doctor)


def export_c(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the files go; made if it does not exist.")],
    dims: Annotated[str, typer.Option(help="Vector lengths, comma list.")] = "64,96,128,160",
    bits: Annotated[str, typer.Option(help="Bits a coordinate, 1 to 4, comma list.")] = "2,3,4",
    law: Annotated[LawName, typer.Option(help="Law of a coordinate.")] = "beta",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the golden vectors' signs.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Compile and run the tests; exit 1 if one fails.")] = False,
    force: Annotated[bool, typer.Option("-f", "--force", help="Replace existing files.")] = False,
) -> None:
    """Write the C runtime, its tables, tests and golden vectors, as engines receive them.

    These are the files that tqtool itself runs, so what was validated is what ships.
    """
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
    _make_folder(folder)
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise OutputError(f"{folder}: the folder above it does not exist", code="write", path=str(folder)) from None
    except FileExistsError:
        raise OutputError(f"{folder}: is a file, not a folder", code="exists", path=str(folder)) from None
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", code="write", path=str(folder)) from None


def bench(
    dims: Annotated[str, typer.Option(help="Vector lengths, comma list.")] = "128,96",
    bits: Annotated[str, typer.Option(help="Bits a coordinate, comma list.")] = "2,3,4",
    tokens: Annotated[
        str | None,
        typer.Option(help="Cache lengths, comma list.", show_default="32768,2048; with --cache 128 to 131072"),
    ] = None,
    config: Annotated[str, typer.Option("-c", "--config", help="K/V bits of the attention rows.")] = "K4/V2",
    mebibytes: Annotated[int, typer.Option("--size", min=1, help="MiB of float32 vectors; well beyond caches.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the fastest of each row counts.")] = 7,
    cache: Annotated[
        bool, typer.Option("--cache", help="Only one decoding step over the float32 and the K/V cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure encode, decode and fused attention, as fractions of memcpy and multiples of NumPy in the same run.

    With one thread and with all (`--threads N`: with N). NumPy's BLAS runs on one thread.

    `--cache` measures instead one decoding step over a float32 cache and a compressed one of the same tokens: the
    attention's time, how far the fused one differs from restoring every vector first, bytes, what storing a token adds.
    """
    for name in BLAS_THREADS:  # heeded where NumPy is not loaded yet, as without -v
        os.environ.setdefault(name, "1")
    from tqtool.bench.codec import codec_speeds, fused_speeds
    from tqtool.codec.sizes import KVConfig
    from tqtool.doctor import installation
    from tqtool.rendering.answers.engine import bench_json, bench_text

    token_list = integers("--tokens", tokens or (CACHE_LENGTHS if cache else "32768,2048"), least=1)
    dim_list, bit_list = integers("--dims", dims), integers("--bits", bits)
    check_dims(dim_list)
    pair, setup = KVConfig.parse(config), installation()
    if cache:
        _bench_cache(token_list, pair, setup, as_json=as_json)
        return
    threads = sorted({1, output.settings().threads or setup.threads})
    codec = codec_speeds(
        [(dim, width) for dim in dim_list for width in bit_list], threads=threads, mebibytes=mebibytes, rounds=rounds
    )
    cases = [(count, group) for count in token_list for group in (1, 4)]
    fused = fused_speeds(cases, threads=threads, config=pair) if setup.engine == "runtime" else []
    if as_json:
        params = {"dims": dim_list, "bits": bit_list, "tokens": token_list, "config": str(pair), "mebibytes": mebibytes}
        output.answer_json(bench_json(codec, fused, setup, params | {"threads": threads, "rounds": rounds}))
    else:
        output.answer(bench_text(codec, fused, setup, terminal=output.stdout_is_terminal()))


def _bench_cache(tokens: list[int], config: KVConfig, setup: Installation, *, as_json: bool) -> None:
    from tqtool.bench.cache import attention_speed
    from tqtool.rendering.answers.engine import cache_json, cache_text

    threads = output.settings().threads or 1  # as many as NumPy's BLAS has
    with output.progress("decoding steps", len(tokens)) as advance:
        speeds = []
        for count in tokens:
            speeds.append(attention_speed(count, config, threads=threads))
            advance(1)
    if as_json:
        output.answer_json(cache_json(speeds, setup, {"tokens": tokens, "config": str(config), "threads": threads}))
    else:
        output.answer(cache_text(speeds, terminal=output.stdout_is_terminal()))


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions and the engine in use, and run a two-second self-test; exit 1 if it fails."""
    from tqtool import doctor as examination
    from tqtool.rendering.answers.engine import doctor_json, doctor_text

    setup, checks = examination.installation(), list(examination.self_test())
    if as_json:
        output.answer_json(doctor_json(setup, checks))
    else:
        output.answer(doctor_text(setup, checks, terminal=output.stdout_is_terminal()))
    if any(check.fault for check in checks):
        raise typer.Exit(FAILED)
