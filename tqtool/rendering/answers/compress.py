"""What compress says: a line a file for people, values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from tqtool.container.compression import Result
from tqtool.container.manifest import Compressed, Entry
from tqtool.container.pipeline import Quality
from tqtool.escapes import visible
from tqtool.files import binary_size
from tqtool.rendering.answers.inspect import entry_json

RATED_BYTES = 16 << 20  # of smaller files the time is that of making the tables


def compress_line(result: Result) -> str:
    """Return the one line about a compressed file; the time at its end is all that differs between two runs."""
    before, after = result.source_bytes, result.container_bytes
    names = f"{visible(result.path)} -> {visible(result.output)}"
    parts = [f"{names}: {binary_size(before)} -> {binary_size(after)} ({before / after:.2f}x)"]
    if result.compressed:
        parts.append(f"{result.bits_per_value:.3g} bits/value")
        parts.append(_vectors_text([entry for entry, _ in result.compressed]))
    groups: dict[str, list[tuple[Compressed, Quality]]] = {}
    for entry, quality in result.compressed:
        side = {"k": "K", "v": "V"}.get(entry.kind, "")
        groups.setdefault(f"{side}{entry.spec.bits}", []).append((entry, quality))
    for name, pairs in groups.items():
        if text := _quality_text([quality for _, quality in pairs]):
            parts.append(f"{name}: {text}" if len(groups) > 1 else text)
    zero = sum(quality.zero_vectors for _, quality in result.compressed)
    replaced = sum(quality.replaced for _, quality in result.compressed)
    if zero:
        parts.append(f"{zero:,} zero vectors")
    if replaced:
        parts.append(f"{replaced:,} values set to 0")
    rate = f" ({result.source_bytes / result.seconds / 1e9:.2g} GB/s)" if result.source_bytes >= RATED_BYTES else ""
    parts.append(f"{result.seconds:.2f} s{rate}")
    return ", ".join(parts)


def _vectors_text(entries: Sequence[Compressed]) -> str:
    """Return which axis the vectors lie along: `vectors of 128 along axis 2 of (8, 512, 128)`."""
    first = entries[0]
    places = {(entry.spec.dim, entry.axis, entry.shape) for entry in entries}
    more = f" and {len(places) - 1} other shapes" if len(places) > 1 else ""
    return f"vectors of {first.spec.dim} along axis {first.axis} of {first.shape}{more}"


def _quality_text(qualities: Sequence[Quality]) -> str:
    """Return error and cosines over several tensors: means by vectors measured, worst p1 and minimum."""
    measured = sum(quality.measured for quality in qualities)
    if not measured:
        return ""

    def mean(values: Sequence[float]) -> float:
        return sum(q.measured * value for q, value in zip(qualities, values, strict=True)) / measured

    error = mean([quality.error for quality in qualities])
    return (
        f"rel err {sqrt(error):.4f} (D {error / mean([q.expected for q in qualities]):.3f} of theory), "
        f"cos {mean([q.cos_mean for q in qualities]):.4f} p1 {min(q.cos_p1 for q in qualities):.4f} "
        f"min {min(q.cos_min for q in qualities):.4f}"
    )


def equal_axes(entries: Sequence[Entry]) -> list[str]:
    """Return a warning for each shape whose last axis is as long as another: the shape cannot tell the vectors'."""
    shapes: dict[tuple[int, ...], list[Compressed]] = {}
    for entry in entries:
        if (
            isinstance(entry, Compressed)
            and entry.spec.dim in entry.shape[: entry.axis] + entry.shape[entry.axis + 1 :]
        ):
            shapes.setdefault(entry.shape, []).append(entry)
    return [
        f"{visible(same[0].name)}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: {shape} has several axes of "
        f"{same[0].spec.dim}; vectors are taken along the last, axis {same[0].axis}: --axis or --layout says otherwise"
        for shape, same in shapes.items()
    ]


def compress_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return the JSON of `compress`; only `run` differs between two runs."""
    return {
        "schema": "tqtool.compress/1",
        "files": [
            {
                "input": result.path,
                "output": None if result.exceeded else result.output,
                "source_bytes": result.source_bytes,
                "container_bytes": result.container_bytes,
                "ratio": result.source_bytes / result.container_bytes,
                "bits_per_value": result.bits_per_value,
                "exceeded": list(result.exceeded),
                "tensors": [
                    entry_json(entry) | {"quality": quality_json(quality)}
                    for entry, quality in zip(result.entries, result.qualities, strict=True)
                ],
            }
            for result in results
        ],
        "run": {"seconds": [round(result.seconds, 4) for result in results]},
    }


def quality_json(quality: Quality | None) -> dict[str, Any] | None:
    """Return a quality as JSON; what was not measured is null."""
    if quality is None:
        return None
    counts = {
        "vectors": quality.vectors,
        "zero_vectors": quality.zero_vectors,
        "replaced_values": quality.replaced,
        "measured_vectors": quality.measured,
    }
    figures = {
        "rel_error": quality.rel_error,
        "rel_mse": quality.error,
        "distortion_ratio": quality.ratio,
        "cos_mean": quality.cos_mean,
        "cos_p01": quality.cos_p1,
        "cos_min": quality.cos_min,
    }
    return counts | {name: value if quality.measured else None for name, value in figures.items()}
