"""`tqtool compress`: arrays of vectors to compressed files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.cli.jobs import expanded, jobs_of
from tqtool.cli.options import (
    DtypeOption,
    ForceOption,
    JsonOption,
    LawOption,
    LayoutOption,
    MetaOption,
    NameOption,
    OutputOption,
    ScaleRuleOption,
    SeedOption,
    parse_rules,
)
from tqtool.dumps.names import CONTAINER_SUFFIX
from tqtool.errors import UsageError

HELP = """Compress arrays of vectors to NAME.tq.safetensors, and say what it cost."""


def compress(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help=".npy, .npz, .safetensors, a folder of them, or - for stdin.",
        ),
    ],
    out: OutputOption = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="Bits a coordinate; 4 if not said.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "-c",
            "--config",
            help="Bits of keys and values, as K4/V2; the default where both are in a file.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        Literal["k", "v", "generic"] | None,
        typer.Option(
            help="What the data are; else their names tell.",
            show_default=False,
        ),
    ] = None,
    layout: LayoutOption = None,
    dtype: DtypeOption = None,
    axis: Annotated[
        int | None,
        typer.Option(
            help="The vector axis, if not the last.",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = 0,
    law: LawOption = "beta",
    scale_rule: ScaleRuleOption = "match",
    meta: MetaOption = "range",
    names: NameOption = None,
    nan: Annotated[Literal["error", "zero"], typer.Option(help="What to do with NaN and infinity.")] = "error",
    max_rel_error: Annotated[
        float | None,
        typer.Option(
            min=0, help="Write nothing and exit 1 beyond this relative error of a tensor.", show_default=False
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Write nothing and exit 1 if a vector's cosine is lower.",
            show_default=False,
        ),
    ] = None,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="Measure every vector and hash the source / neither; else a sample of 16,384 vectors.",
            show_default=False,
        ),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.codec.sizes import KVConfig
    from tqtool.container.compression import Limits, compress_arrays
    from tqtool.container.selection import Request, choose
    from tqtool.dumps.datafiles import open_file
    from tqtool.health import warnings_of
    from tqtool.rendering.answers.compress import compress_json, compress_line, equal_axes

    if bits is not None and config is not None:
        raise UsageError("--bits and --config contradict each other", code="usage")
    key_scale_rule, value_scale_rule = parse_rules(scale_rule)
    request = Request(
        bits=bits,
        config=None if config is None else KVConfig.parse(config),
        kind=kind,
        layout=layout,
        axis=axis,
        dtype=dtype,
        seed=seed,
        law=law,
        key_scale_rule=key_scale_rule,
        value_scale_rule=value_scale_rule,
        meta=meta,
        names=tuple(names or ()),
    )
    limits = Limits(max_rel_error, min_cosine)
    jobs = jobs_of(expanded(inputs), out, CONTAINER_SUFFIX, force=force, as_json=as_json)
    opened = [(open_file(path, dtype=dtype), target) for path, target in jobs]
    work = [(file, choose(file, request), target) for file, target in opened]
    settings = output.settings()
    if layout is None and axis is None:
        for line in {line: None for _, chosen, _ in work for line in equal_axes([entry for entry, _ in chosen])}:
            output.warn(line)
    results = []
    for file, chosen, target in work:
        for line in warnings_of([source for entry, source in chosen if hasattr(entry, "spec")]):
            output.warn(line)
        total = sum(source.nbytes for _, source in chosen)
        with output.progress(f"compress {Path(file.path).name}", total, unit_bytes=True) as advance:
            result = compress_arrays(
                file,
                chosen,
                target,
                stats="sample" if stats is None else "all" if stats else "none",
                nan_to_zero=nan == "zero",
                limits=limits,
                force=force,
                threads=settings.threads,
                advance=advance,
            )
        results.append(result)
        if result.exceeded:
            first, *others = result.exceeded
            more = f" (and {len(others)} more)" if others else ""
            output.print_error("limit", f"{file.path}: {first}{more}; not written", None)
        if not (as_json or result.exceeded):
            output.result(compress_line(result), target)
    if as_json:
        output.answer_json(compress_json(results))
    if any(result.exceeded for result in results):
        raise typer.Exit(1)
