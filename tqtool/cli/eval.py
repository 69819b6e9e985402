"""`tqtool eval`: what a compressed cache changes in a model's own predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tqtool import __version__
from tqtool.cli import output
from tqtool.cli.options import (
    DeviceMapOption,
    DeviceOption,
    ForceOption,
    GgufOption,
    HtmlOut,
    JsonOption,
    JsonOut,
    LawOption,
    MarkdownOut,
    MetaOption,
    OfflineOption,
    RemoteCodeOption,
    RevisionOption,
    ScaleRuleOption,
    SeedOption,
    TorchDtypeOption,
    parse_rules,
)
from tqtool.cli.report import Outputs, check_outputs
from tqtool.codec.sizes import KVConfig
from tqtool.errors import UsageError

if TYPE_CHECKING:
    from tqtool.hf.cache import Coding
    from tqtool.hf.evaluate import TokenText
    from tqtool.hf.models import LoadedModel
    from tqtool.report.evaluation import Evaluation


HELP = """Measure what quantized caches change in a model's predictions of a text.

Perplexity, divergence of the next token, greedy text and hidden facts, in two settings: every token quantized, and
the current chunk exact as engines have it.
"""


def eval(  # noqa: A001 (the command's name)
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
        list[str] | None, typer.Option("--text", metavar="FILE...", help="UTF-8 text files.", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help='A text a line: {"text": …} or {"messages": […]}.', show_default=False),
    ] = None,
    config: Annotated[str, typer.Option("-c", "--config", help="K/V bits, comma list.")] = "K4/V4,K4/V2",
    baselines: Annotated[
        str, typer.Option(metavar="LIST", help="fp8, quanto; installed: those that are; none.")
    ] = "installed",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text; the rest is left out.")] = 1024,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens that run through the model at once.")] = 256,
    residual_window: Annotated[
        int, typer.Option(min=0, help="Newest tokens before the current chunk that stay exact, where the chunk does.")
    ] = 0,
    sink_tokens: Annotated[int, typer.Option(min=0, help="First tokens that stay exact, in both settings.")] = 0,
    greedy: Annotated[int, typer.Option(min=0, help="Tokens decoded greedily after each text.")] = 32,
    needles: Annotated[int, typer.Option(min=0, max=10, help="Facts hidden in each text and asked for; 0: none.")] = 5,
    law: LawOption = "beta",
    scale_rule: ScaleRuleOption = "match",
    meta: MetaOption = "bf16",
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    torch_dtype: TorchDtypeOption = "auto",
    device_map: DeviceMapOption = None,
    revision: RevisionOption = None,
    gguf_file: GgufOption = None,
    offline: OfflineOption = False,
    trust_remote_code: RemoteCodeOption = False,
    json_out: JsonOut = None,
    markdown_out: MarkdownOut = None,
    html_out: HtmlOut = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    from tqtool.hf.extra import quiet_libraries, require_extra

    if more and not text:
        raise UsageError(f"{more[0]}: is this a text? say --text {more[0]}", code="usage")
    if not text and prompts is None:
        raise UsageError("no text given", code="usage", hint="say --text FILE or --prompts FILE.jsonl")
    configs = KVConfig.parse_list(config)
    if not configs:
        raise UsageError("--config names no configuration", code="usage", hint="for example -c K4/V4,K4/V2")
    key_rule, value_rule = parse_rules(scale_rule)
    files = [*(text or ()), *(more or ())]
    outputs = Outputs(json_out, markdown_out, html_out)
    check_outputs(outputs, [*files, *([prompts] if prompts else [])], force=force)
    require_extra()
    quiet_libraries()
    from tqtool.hf.cache import Coding
    from tqtool.hf.capture_texts import read_texts
    from tqtool.hf.models import ModelSource, load_model
    from tqtool.hf.steps import use_threads

    codings = [
        Coding(each, residual_window, sink_tokens, True, meta, law, key_rule, value_rule, seed) for each in configs
    ]
    chosen = _baselines(baselines)
    texts = read_texts(files, prompts)
    if (threads := output.settings().threads) is not None:
        use_threads(threads)
    source = ModelSource(model, revision, gguf_file, offline, trust_remote_code, device, torch_dtype, device_map)
    loaded = load_model(source)
    from tqtool.hf.evaluate import tokens_of

    read = [tokens_of(loaded, each, max_tokens=max_tokens, chunk=chunk) for each in texts]
    evaluation = _run(loaded, read, codings, chosen, chunk, greedy, needles)
    _write(evaluation, outputs, force=force)
    _show(evaluation, as_json=as_json)


def _baselines(names: str) -> list[str]:
    from tqtool.hf.candidates import BASELINES, installed_baselines

    if names.strip() in ("none", "installed"):
        return [] if names.strip() == "none" else installed_baselines()
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in BASELINES:
            raise UsageError(
                f"--baselines {name!r}: there are {', '.join(BASELINES)}, installed and none", code="usage"
            )
    return chosen


def _run(
    loaded: LoadedModel,
    texts: list[TokenText],
    codings: list[Coding],
    baselines: list[str],
    chunk: int,
    greedy: int,
    needles: int,
) -> Evaluation:
    from tqtool.hf.candidates import candidates, compressed_layers
    from tqtool.hf.evaluate import evaluate as measure
    from tqtool.hf.evaluate import steps_of
    from tqtool.report.evaluation import Evaluation as Measured

    caches = candidates(loaded.model.config, codings, baselines)
    total = sum(steps_of(text, len(caches), greedy=greedy, needles=needles) for text in texts)
    with output.progress("tokens", total) as advance:
        rows = measure(loaded, texts, caches, chunk=chunk, greedy=greedy, needles=needles, advance=advance)
    one = codings[0]
    return Measured(
        model=loaded.name,
        revision=loaded.revision,
        architecture=loaded.architecture,
        layers=loaded.layers,
        compressed_layers=compressed_layers(loaded.model.config),
        texts=tuple(text.facts for text in texts),
        chunk=chunk,
        residual_window=one.residual_window,
        sink_tokens=one.sink_tokens,
        greedy_tokens=greedy,
        options={
            "law": one.law,
            "key rule": one.key_scale_rule,
            "value rule": one.value_scale_rule,
            "meta": one.meta,
            "seed": str(one.seed),
        },
        rows=rows,
        tool=f"tqtool {__version__}",
    )


def _write(evaluation: Evaluation, outputs: Outputs, *, force: bool) -> None:
    from tqtool.files import holds_nothing, write_text

    for name, path in outputs.asked():
        write_text(path, _rendered(evaluation, name), force=force or holds_nothing(path))
        output.note(f"wrote {path}")


def _rendered(evaluation: Evaluation, name: str) -> str:
    import json

    from tqtool.rendering.answers.eval import evaluation_html, evaluation_markdown
    from tqtool.report.evaluation import evaluation_json

    if name == "json":
        return json.dumps(evaluation_json(evaluation), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return evaluation_html(evaluation) if name == "html" else evaluation_markdown(evaluation)


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    from tqtool.rendering.answers.eval import evaluation_text
    from tqtool.report.evaluation import evaluation_json

    if as_json:
        output.answer_json(evaluation_json(evaluation))
    else:
        output.answer(evaluation_text(evaluation, terminal=output.stdout_is_terminal()))
