"""The answers of `tqtool bench` and `tqtool doctor`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqtool.rendering.tables import Column, table_text

if TYPE_CHECKING:
    from tqtool.bench.cache import AttentionSpeed
    from tqtool.bench.codec import CodecSpeed, FusedSpeed
    from tqtool.doctor import Installation, SelfTest

BENCH_SCHEMA = "tqtool.bench/1"
MEBI = 1 << 20
DOCTOR_SCHEMA = "tqtool.doctor/1"
ENGINES = {
    "runtime": "the C runtime ({})",
    "reference": "the NumPy reference: the C runtime was not compiled at installation, or is switched off",
    "stale": "the NumPy reference: the C runtime was compiled for another version of tqtool; reinstall it",
}


def bench_text(codec: Sequence[CodecSpeed], fused: Sequence[FusedSpeed], setup: Installation, *, terminal: bool) -> str:
    """Return the two tables; fractions of memcpy and multiples of NumPy are the figures to compare."""
    copy = codec[0]
    copied = copy.vectors * copy.dim * 4 / copy.copy_seconds / 1e9
    tables = [
        f"engine: {_engine(setup)}; memcpy {copied:.1f} GB/s on one thread",
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
        ]
        for speed in speeds
    ]
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


def doctor_text(setup: Installation, checks: Sequence[SelfTest], *, terminal: bool) -> str:
    """Return what is installed and the outcome of the self-test."""
    rows = [
        ("tqtool", setup.tqtool),
        ("python", f"{setup.python}, {setup.platform}"),
        *setup.packages.items(),
        *(
            (name, version or "not installed (only the tests compare with it: tqtool[compare])")
            for name, version in setup.extras.items()
        ),
        ("engine", _engine(setup)),
        ("C compiler", setup.compiler or "none found; needed by `export-c --verify` and to build the runtime"),
        ("threads", str(setup.threads)),
        *((check.name, f"FAILED: {check.fault}" if check.fault else "ok") for check in checks),
    ]
    return table_text([Column("", "left"), Column("", "left")], rows, terminal=terminal).strip("\n")


def doctor_json(setup: Installation, checks: Sequence[SelfTest]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": DOCTOR_SCHEMA,
        **asdict(setup),
        "checks": [{"name": check.name, "passed": not check.fault, "fault": check.fault or None} for check in checks],
    }


def _engine(setup: Installation) -> str:
    return ENGINES["stale" if setup.stale else setup.engine].format(setup.instructions)
