"""The speeds that `tqtool bench` measured, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqtool.rendering.answers.doctor import engine_text
from tqtool.rendering.tables import Column, table_text

if TYPE_CHECKING:
    from tqtool.bench.cache import AttentionSpeed
    from tqtool.bench.codec import CodecSpeed, FusedSpeed
    from tqtool.doctor import Installation

BENCH_SCHEMA = "tqtool.bench/1"
MEBI = 1 << 20


def bench_text(codec: Sequence[CodecSpeed], fused: Sequence[FusedSpeed], setup: Installation, *, terminal: bool) -> str:
    """Return the two tables; fractions of memcpy and multiples of NumPy are the figures to compare."""
    copy = codec[0]
    copied = copy.vectors * copy.dim * 4 / copy.copy_seconds / 1e9
    tables = [
        f"engine: {engine_text(setup)}; memcpy {copied:.1f} GB/s on one thread",
        table_text(
            [Column(""), *map(Column, ("d", "bits", "threads", "GB/s", "Mvec/s", "of memcpy"))],
            [
                [
                    row.operation,
                    str(row.dim),
                    str(row.bits),
                    str(row.threads),
                    f"{row.gb_per_second:.2f}",
                    f"{row.vectors / row.seconds / 1e6:.2f}",
                    f"{row.of_memcpy:.3f}",
                ]
                for row in codec
            ],
            terminal=terminal,
        ),
    ]
    if fused:
        tables.append(
            table_text(
                [
                    Column("fused attention"),
                    *map(Column, ("d", "tokens", "KV heads", "group", "threads", "ms", "NumPy ms", "times NumPy")),
                ],
                [
                    [
                        str(row.config),
                        str(row.dim),
                        str(row.tokens),
                        str(row.kv_heads),
                        str(row.group),
                        str(row.threads),
                        f"{1e3 * row.seconds:.2f}",
                        f"{1e3 * row.numpy_seconds:.2f}",
                        f"{row.times_numpy:.2f}",
                    ]
                    for row in fused
                ],
                terminal=terminal,
            )
        )
    return "\n\n".join(tables)


def bench_json(
    codec: Sequence[CodecSpeed], fused: Sequence[FusedSpeed], setup: Installation, params: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON document; all that differs from run to run stands under `run`."""
    run = {
        "codec": [asdict(row) | {"gb_per_second": row.gb_per_second, "of_memcpy": row.of_memcpy} for row in codec],
        "attention": [asdict(row) | {"config": str(row.config), "times_numpy": row.times_numpy} for row in fused],
    }
    return _bench_document(run, setup, params)


def cache_text(speeds: Sequence[AttentionSpeed], *, terminal: bool) -> str:
    """Return one decoding step a row: time and bytes beside the float32 cache, and what storing a token adds."""
    titles = (
        "tokens",
        "f32 ms",
        "fused ms",
        "times",
        "differs",
        "f32 MiB",
        f"{speeds[0].config} MiB",
        "store us",
        "share",
        "f32 tok/s",
        "fused tok/s",
    )
    rows = [
        [
            f"{speed.tokens}",
            _milliseconds(speed.float32_seconds),
            _milliseconds(speed.fused_seconds),
            f"{speed.speedup:.2f}",
            f"{speed.agreement:.0e}",
            f"{speed.float32_bytes / MEBI:.4g}",
            f"{speed.packed_bytes / MEBI:.3g}",
            f"{1e6 * speed.work_seconds:.1f}",
            f"{speed.overhead:.1%}",
            *(f"{rate:.4g}" for rate in speed.tokens_per_second),
        ]
        for speed in speeds
    ]
    table = table_text([Column(title) for title in titles], rows, terminal=terminal)
    return f"{table}\n\n{_operations_text(speeds[-1], terminal=terminal)}"


def _operations_text(speed: AttentionSpeed, *, terminal: bool) -> str:
    """Return the operations of a head's step part by part, with their sum, and each as a share of the attention's."""
    parts = speed.operations | {"all": sum(speed.operations.values())}
    rows = [[name, f"{count:,}", f"{count / parts['attend']:.2%}"] for name, count in parts.items()]
    titles = f"one head of {speed.dim}, {speed.tokens:,} tokens", "operations", "of attention"
    return table_text([Column(title) for title in titles], rows, terminal=terminal)


def cache_json(speeds: Sequence[AttentionSpeed], setup: Installation, params: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of the same, in seconds, bytes and fractions."""
    rows = [
        asdict(speed)
        | {
            "config": str(speed.config),
            "speedup": speed.speedup,
            "overhead": speed.overhead,
            "call_overhead": speed.call_overhead,
            "tokens_per_second": speed.tokens_per_second,
            "operations": speed.operations,
        }
        for speed in speeds
    ]
    return _bench_document({"cache": rows}, setup, params)


def _bench_document(run: dict[str, Any], setup: Installation, params: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": BENCH_SCHEMA,
        "tool": f"tqtool {setup.tqtool}",
        "params": params,
        "environment": {"engine": setup.engine, "instructions": setup.instructions, "platform": setup.platform},
        "run": run,
    }


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"
