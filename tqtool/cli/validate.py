"""`tqtool validate`: from a dump to a verdict per configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tqtool.cli import output
from tqtool.cli.options import (
    DtypeOption,
    ForceOption,
    FormatOption,
    HtmlOut,
    JsonOut,
    JunitOut,
    LawOption,
    LayoutOption,
    MarkdownOut,
    MetaOption,
    ReportJsonOption,
    ScaleRuleOption,
    TsvOut,
    integers,
    parse_layers,
    parse_rules,
    parse_span,
)
from tqtool.cli.repeat import next_command, reproduce
from tqtool.cli.report import Outputs, check_outputs, format_of, print_report, read_report, write_outputs
from tqtool.codec.sizes import KVConfig
from tqtool.errors import InputError, UsageError
from tqtool.parallel import default_threads, limit_blas_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tqtool.report.gates import Limit
    from tqtool.report.model import Gate, Report
    from tqtool.validation.dataset import Dataset

CONFIGS = "K4/V4,K4/V3,K4/V2,K3/V3,K3/V2,K2/V2"
MAX_REGRESS = 0.05
RECOMMEND_WIDTHS = (2, 3, 4, 5, 6, 8)

GateName = Literal["none", "strict", "balanced", "lenient"]


HELP = """Measure what K/V configurations do to attention, on a dump of real queries, keys and values.

Without a dump: the sample that ships with tqtool, and the two synthetic sets of the specification. Exits 1 when a
gate fails, when a configuration quantized nothing, or when no bits meet --budget or --target-kl.
"""


def validate(
    dump: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DUMP]...", help="A folder, or .npy, .npz and .safetensors files.", show_default=False),
    ] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="FILE", help="Keys.")] = None,
    v: Annotated[str | None, typer.Option("--v", metavar="FILE", help="Values.")] = None,
    q: Annotated[str | None, typer.Option("--q", metavar="FILE", help="Queries.")] = None,
    layout: LayoutOption = None,
    dtype: DtypeOption = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Synthetic sets, comma list; 'all' for every one.")
    ] = None,
    config: Annotated[str, typer.Option("-c", "--config", help="K/V bits, comma list; 16 = untouched.")] = CONFIGS,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Mask later keys.")] = None,
    attention_scale: Annotated[
        float | None, typer.Option(help="Factor of the scores; else the manifest's or 1/sqrt(dim).")
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window of the model, in tokens.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Soft cap of the scores; else the manifest's or none.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="A:B", help="Positions that hold tokens, B excluded: not padding, not unused.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens to price at; else the model's context or the dump's length.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Rotation seeds, comma list.")] = "0",
    max_queries: Annotated[int | None, typer.Option(min=1, help="Queries of each head, evenly spaced.")] = None,
    center_keys: Annotated[bool, typer.Option("--center-keys", help="Store keys less their mean.")] = False,
    center_values: Annotated[
        bool,
        typer.Option(
            "--center-values", help="Store values less their mean; hurts where sink tokens have small values."
        ),
    ] = False,
    protect_layers: Annotated[
        str, typer.Option(metavar="LIST", help="Layers kept untouched: numbers, ranges, 'first2', 'last2'.")
    ] = "",
    residual_window: Annotated[int, typer.Option(min=0, help="Newest tokens kept exact.")] = 0,
    sink_tokens: Annotated[int, typer.Option(min=0, help="First tokens kept exact.")] = 0,
    scale_rule: ScaleRuleOption = "match",
    meta: MetaOption = "range",
    law: LawOption = "beta",
    engines: Annotated[bool, typer.Option("--engines", help="Add the formats that engines ship.")] = False,
    baselines: Annotated[bool, typer.Option("--baselines", hidden=True, help="The old name of --engines.")] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Recommend bits per layer, for --budget or --target-kl.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(min=0.1, max=16.0, help="Bits a value, metadata included; implies --recommend.")
    ] = None,
    target_kl: Annotated[
        float | None, typer.Option(help="Mean attention KL in nats; implies --recommend. Default: balanced's.")
    ] = None,
    gate: Annotated[GateName, typer.Option(help="Fail (exit 1) unless every row reaches this level.")] = "none",
    gate_config: Annotated[Path | None, typer.Option(metavar="FILE", help="Limits from a TOML or JSON file.")] = None,
    minimum: Annotated[
        list[str] | None, typer.Option("--min", metavar="METRIC=X", help="Gate: at least X. Repeatable.")
    ] = None,
    maximum: Annotated[
        list[str] | None, typer.Option("--max", metavar="METRIC=X", help="Gate: at most X. Repeatable.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="REPORT.json", help="Gate: no worse than an earlier report.")
    ] = None,
    max_regress: Annotated[
        float | None,
        typer.Option(min=0.0, help="How much worse than --baseline is allowed; 0.05 is 5 %.", show_default="0.05"),
    ] = None,
    chosen: FormatOption = "auto",
    as_json: ReportJsonOption = False,
    json_out: JsonOut = None,
    markdown_out: MarkdownOut = None,
    html_out: HtmlOut = None,
    junit_out: JunitOut = None,
    tsv_out: TsvOut = None,
    force: ForceOption = False,
) -> None:
    """Do what `HELP` says."""
    limit_blas_threads()
    from tqtool.rendering.report.figures import recommendation_goal
    from tqtool.report.params import MAX_SEED, Params
    from tqtool.validation.engines import BASELINES
    from tqtool.validation.run import validate as run

    outputs = Outputs(json_out, markdown_out, html_out, junit_out, tsv_out)
    check_outputs(outputs, [*(dump or ()), *(path for path in (k, v, q, baseline) if path)], force=force)
    format_of(chosen, as_json=as_json)
    name, limits = asked_limits(gate, gate_config, minimum or (), maximum or ())
    if max_regress is not None and baseline is None:
        raise UsageError("--max-regress has no meaning without --baseline", code="usage")
    rules = parse_rules(scale_rule)
    span = parse_span("--tokens", tokens)
    data = datasets(dump or [], k, v, q, layout=layout, dtype=dtype, synthetic=synthetic, causal=causal, tokens=span)
    if span and all(one.kind == "synthetic" for one in data):
        raise UsageError("--tokens has no meaning without a dump", code="usage")
    if (limits or baseline) and any(one.proxies for one in data):
        bad = next(one for one in data if one.proxies)
        raise InputError(
            f"{bad.name}: a gate was asked, and there are no queries",
            code="no-queries",
            hint="capture queries with the keys and values, and give them with --q or beside them",
        )
    wanted = recommend or budget is not None or target_kl is not None
    numbers = sorted({number for one in data for number in one.layers if one.kind == "dump"})
    params = Params(
        configs=tuple(map(str, KVConfig.parse_list(config))),
        baselines=tuple(one.name for one in BASELINES) if engines or baselines else (),
        seeds=integers("--seeds", seeds, most=MAX_SEED),
        law=law,
        key_scale_rule=rules[0],
        value_scale_rule=rules[1],
        meta=meta,
        causal=causal,
        window=window,
        attention_scale="" if attention_scale is None else repr(attention_scale),
        softcap=softcap,
        tokens=span or (),
        context=context,
        max_queries=max_queries,
        center_keys=center_keys,
        center_values=center_values,
        protect_layers=parse_layers(protect_layers, numbers),
        residual_window=residual_window,
        sink_tokens=sink_tokens,
        recommend_widths=RECOMMEND_WIDTHS if wanted else (),
        budget=budget,
        target_kl=target_kl,
    )
    units = sum(one.units for one in data) * len(params.seeds)
    for line in dict.fromkeys(line for one in data for line in one.notes):
        output.note(line)
    threads, begun = output.settings().threads, datetime.now(UTC)
    with output.progress("measuring heads", units) as advance:
        report = run(data, params, threads=threads, advance=advance, command=reproduce(sys.argv[1:]))
    report = replace(
        finish(report, name, limits, baseline, MAX_REGRESS if max_regress is None else max_regress),
        run={
            "started": begun.isoformat(timespec="seconds"),
            "seconds": f"{(datetime.now(UTC) - begun).total_seconds():.2f}",
            "threads": str(threads or default_threads()),
        },
    )
    write_outputs(report, outputs, force=force)
    print_report(report, chosen, as_json=as_json)
    missed = [rec for rec in report.recommendations if not rec.feasible]
    for rec in missed:
        output.warn(f"{rec.source}: no bits meet {recommendation_goal(rec)}")
    if missed or not report.gate.passed:
        raise typer.Exit(1)


def datasets(
    dump: Sequence[str],
    k: str | None,
    v: str | None,
    q: str | None,
    *,
    layout: str | None,
    dtype: str | None,
    synthetic: str | None,
    causal: bool | None,
    tokens: tuple[int, int] | None,
) -> list[Dataset]:
    """Open what was asked for: dumps first, then synthetic sets."""
    from tqtool.dumps.dump import load_dump, load_dumps, sample_dump_path
    from tqtool.validation.dataset import from_synthetic
    from tqtool.validation.dump_data import from_dump
    from tqtool.validation.synthetic import DEFAULT, PURPOSE, synthetic_set

    found = []
    asked = bool(dump or k or v or q)
    if asked:
        one = bool(k or v or q)
        opened = (
            [load_dump(dump, k=k, v=v, q=q, layout=layout, dtype=dtype)]
            if one
            else load_dumps(dump, layout=layout, dtype=dtype)
        )
        found += [from_dump(each, causal=causal, tokens=tokens) for each in opened]
    elif layout is not None or dtype is not None:
        raise UsageError("--layout and --dtype have no meaning without a dump", code="usage")
    elif synthetic is None:
        found.append(from_dump(load_dump(sample_dump_path()), name="sample", causal=causal, tokens=tokens))
    names: tuple[str, ...] = () if asked else DEFAULT
    if synthetic is not None:
        names = tuple(PURPOSE) if synthetic == "all" else tuple(n.strip() for n in synthetic.split(",") if n.strip())
        if not names:
            raise UsageError("--synthetic names no set", code="usage", hint=f"there are {', '.join(PURPOSE)}")
    return found + [from_synthetic(synthetic_set(name)) for name in dict.fromkeys(names)]


def asked_limits(
    gate: GateName, path: Path | None, minimum: Sequence[str], maximum: Sequence[str]
) -> tuple[str, tuple[Limit, ...]]:
    """Return the gate's name and its limits: a level, then a file, then single conditions."""
    from tqtool.report.gate_files import load_limits
    from tqtool.report.gates import LEVELS, parse_limits

    names: list[str] = [] if gate == "none" else [gate]
    limits = () if gate == "none" else LEVELS[gate]
    if path is not None:
        level, more = load_limits(path)
        limits += (() if level == "none" else LEVELS[level]) + more
        names.append(path.name)
    limits += parse_limits(minimum, ">=") + parse_limits(maximum, "<=")
    names += [f"--min {text}" for text in minimum] + [f"--max {text}" for text in maximum]
    return " + ".join(names) or "none", limits


def finish(report: Report, name: str, limits: Sequence[Limit], baseline: str | None, max_regress: float) -> Report:
    """Return the report with its gate decided, and with what was only this run's."""
    from tqtool.escapes import sayable
    from tqtool.report.gates import against_baseline, conclude, decide, gated_rows
    from tqtool.report.serialize import mapped
    from tqtool.validation.diagnosis import diagnose

    gate: Gate = decide(name, limits, report.rows, report.sources)
    if baseline is not None:
        checks = against_baseline(report.rows, read_report(baseline), max_regress)
        words = f"baseline within {max_regress:.3g}"
        gate = conclude(words if name == "none" else f"{name} + {words}", [*gate.checks, *checks])
    report = replace(report, gate=gate, rows=gated_rows(report.rows, gate))
    return mapped(replace(report, next=next_command(report, diagnose(report))), str, sayable)
