"""What inspect says: the tensors of a file, its damage, its health; tables for people, values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqtool.container.format import Container, Damage
from tqtool.container.manifest import Compressed, Entry
from tqtool.dumps.datafiles import DataFile
from tqtool.dumps.names import meaning
from tqtool.escapes import visible
from tqtool.files import binary_size
from tqtool.health import Health
from tqtool.rendering.tables import Column, table_text

LEFT = "left"


def container_text(container: Container, damage: Sequence[Damage] | None, *, terminal: bool) -> str:
    """Return what is in a compressed file; `damage` is None where it was not looked for."""
    metadata = container.header.metadata
    title = (
        f"{visible(container.path)}: tqtool format {container.version}, {binary_size(container.nbytes)}, "
        f"written by {visible(metadata.get('tq_producer', 'an unknown tool'))} from a .{container.source} file"
    )
    titles = ("tensor", "shape", "dtype", "kind", "bits", "law", "scale", "meta", "seed", "bytes", "rel err")
    rows = []
    for entry in container.entries:
        start = [entry.name, _shape(entry.shape), entry.dtype]
        if isinstance(entry, Compressed):
            spec = entry.spec
            error = "" if entry.error is None else f"{entry.error**0.5:.4f}"
            size = str(entry.count * spec.vector_bytes)
            facts = [entry.kind, str(spec.bits), spec.law, spec.scale_rule, spec.meta, str(spec.seed), size, error]
        else:
            facts = ["copied", "", "", "", "", "", str(container.tensor(entry.name).nbytes), ""]
        rows.append([*start, *facts])
    columns = [Column(name, "left" if i in (0, 1, 2, 3, 5, 6, 7) else "right") for i, name in enumerate(titles)]
    lines = [title, "", table_text(columns, rows, terminal=terminal)]
    if container.unknown:
        lines += ["", f"metadata that this version does not know: {', '.join(map(visible, container.unknown))}"]
    if damage is not None:
        lines += ["", *(f"DAMAGED {each}" for each in damage)] if damage else ["", "every checksum matches"]
    return "\n".join(lines)


def undamaged(container: Container, damage: Sequence[Damage]) -> str:
    """Return the hint that names the tensors that can still be read."""
    broken = {each.tensor for each in damage}
    whole = [entry.name for entry in container.entries if not broken & entry.tensors().keys()]
    return f"undamaged and readable with --name: {', '.join(whole)}" if whole else "copy it again"


def container_json(container: Container, damage: Sequence[Damage] | None) -> dict[str, Any]:
    """Return what is in a compressed file as JSON."""
    return {
        "schema": "tqtool.inspect/1",
        "path": container.path,
        "format": "tqtool",
        "version": container.version,
        "producer": container.header.metadata.get("tq_producer"),
        "source": container.source,
        "bytes": container.nbytes,
        "tensors": [
            entry_json(entry)
            | ({"source_sha256": entry.source_sha256, "rel_mse": entry.error} if isinstance(entry, Compressed) else {})
            for entry in container.entries
        ],
        "unknown_metadata": list(container.unknown),
        "damage": None if damage is None else list(map(_damage_json, damage)),
    }


def entry_json(entry: Entry) -> dict[str, Any]:
    """Return a tensor of a container as JSON."""
    facts: dict[str, Any] = {"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype}
    if not isinstance(entry, Compressed):
        return facts | {"copied": True}
    spec = entry.spec
    return facts | {
        "axis": entry.axis,
        "kind": entry.kind,
        "bits": spec.bits,
        "law": spec.law,
        "scale_rule": spec.scale_rule,
        "meta": spec.meta,
        "seed": spec.seed,
        "stored_bytes": entry.count * spec.vector_bytes,
    }


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {"tensor": damage.tensor, "chunk": damage.chunk, "chunks": damage.chunks, "rows": damage.rows}


def data_text(file: DataFile, health: Mapping[str, Health], *, terminal: bool) -> str:
    """Return what is in a plain file, and the health of the arrays it is known of."""
    columns = [Column(title, "left") for title in ("array", "shape", "dtype", "reads as")] + [Column("bytes")]
    rows = [
        [source.name, _shape(source.shape), source.dtype, _reading(source.name), str(source.nbytes)]
        for source in file.arrays
    ]
    title = (
        f"{visible(file.path)}: .{file.format}, {binary_size(file.nbytes)}, {len(rows)} array{'s' * (len(rows) != 1)}"
    )
    lines = [title, "", table_text(columns, rows, terminal=terminal)]
    if file.ignored:
        lines += ["", f"members that are no arrays: {', '.join(map(visible, file.ignored))}"]
    for name, found in health.items():
        lines += ["", f"health of {name}:", *(f"  {line}" for line in _health_lines(found))]
    return "\n".join(lines)


def _health_lines(found: Health) -> list[str]:
    bad = f"{found.nan:,} NaN, {found.inf:,} Inf"
    for kind, place in (("NaN", found.first_nan), ("Inf", found.first_inf)):
        if place is not None:
            bad += f"; first {kind} at {list(place)}"
    too_long = "" if found.first_too_long is None else f"; beyond the limit at {list(found.first_too_long)}"
    outliers = ", ".join(map(str, found.outlier_channels[:12])) or "none"
    if len(found.outlier_channels) > 12:
        outliers += f" and {len(found.outlier_channels) - 12} more"
    return [
        f"values not finite  {bad}" if found.nan or found.inf else "values not finite  none",
        f"zero vectors       {found.zero_vectors:,} of {found.vectors:,}",
        f"norms              {found.norm_min:.6g} to {found.norm_max:.6g}{too_long}",
        f"constant offset    {found.offset_share:.1%} of the energy of a head",
        f"outlier channels   {outliers}",
        f"kurtosis           {found.kurtosis:.2f}, after rotation {found.rotated_kurtosis:.2f} (normal: 3)",
        f"independent noise  {'yes: its figures describe the codebook, not a model' if found.looks_iid else 'no'}",
    ]


def data_json(file: DataFile, health: Mapping[str, Health]) -> dict[str, Any]:
    """Return what is in a plain file as JSON."""
    return {
        "schema": "tqtool.inspect/1",
        "path": file.path,
        "format": file.format,
        "bytes": file.nbytes,
        "tensors": [
            {
                "name": source.name,
                "shape": list(source.shape),
                "dtype": source.dtype,
                "kind": meaning(source.name).kind,
                "layer": meaning(source.name).layer,
                "bytes": source.nbytes,
                "health": _health_json(health[source.name]) if source.name in health else None,
            }
            for source in file.arrays
        ],
        "ignored": list(file.ignored),
    }


def _health_json(found: Health) -> dict[str, Any]:
    return {
        "vectors": found.vectors,
        "nan": found.nan,
        "inf": found.inf,
        "first_nan": found.first_nan,
        "first_inf": found.first_inf,
        "first_too_long": found.first_too_long,
        "zero_vectors": found.zero_vectors,
        "norm_min": found.norm_min,
        "norm_max": found.norm_max,
        "offset_share": found.offset_share,
        "outlier_channels": found.outlier_channels,
        "kurtosis": found.kurtosis,
        "rotated_kurtosis": found.rotated_kurtosis,
        "looks_iid": found.looks_iid,
    }


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _reading(name: str) -> str:
    said = meaning(name)
    kind = {"k": "keys", "v": "values", "q": "queries"}.get(said.kind or "", "")
    return f"{kind} of layer {said.layer}" if kind and said.layer is not None else kind
