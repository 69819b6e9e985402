"""`tqtool bench`: how fast the codec and the attention over a compressed cache are here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tqtool.cli import output
from tqtool.cli.options import BitsOption, DimsOption, JsonOption, check_dims, integers
from tqtool.parallel import limit_blas_threads

if TYPE_CHECKING:
    from tqtool.codec.sizes import KVConfig
    from tqtool.doctor import Installation

CACHE_LENGTHS = "128,512,2048,8192,32768,131072"


HELP = """Measure encode, decode and fused attention, as fractions of memcpy and multiples of NumPy in the same run.

With one thread and with all (`--threads N`: with N). NumPy's BLAS runs on one thread.

`--cache` measures instead one decoding step over a float32 cache and a compressed one of the same tokens: the
attention's time, how far the fused one differs from restoring every vector first, bytes, what storing a token adds.
"""


def bench(
    dims: DimsOption = "128,96",
    bits: BitsOption = "2,3,4",
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
    as_json: JsonOption = False,
) -> None:
    """Do what `HELP` says."""
    limit_blas_threads()
    from tqtool.bench.codec import codec_speeds, fused_speeds
    from tqtool.codec.sizes import KVConfig
    from tqtool.doctor import installation
    from tqtool.rendering.answers.bench import bench_json, bench_text

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


def _bench_cache(tokens: tuple[int, ...], config: KVConfig, setup: Installation, *, as_json: bool) -> None:
    from tqtool.bench.cache import attention_speed
    from tqtool.rendering.answers.bench import cache_json, cache_text

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
