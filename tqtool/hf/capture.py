"""`capture`: a dump of every text, with the manifest that says how `validate` is to measure it (`docs/dump.md`)."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool import __version__
from tqtool.dumps.names import MANIFEST
from tqtool.files import check_space
from tqtool.hf.capture_files import new_folder
from tqtool.hf.capture_record import CaptureParams, LayerPlan, plan_of, record, runs_in_chunks, survey
from tqtool.hf.capture_texts import Text, token_ids
from tqtool.hf.extra import NEEDED, version_of
from tqtool.hf.models import LoadedModel

SCHEMA = "tqtool.dump/1"


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """One text, the folder its dump goes to, and the files that will be in it."""

    text: Text
    ids: tuple[int, ...]
    left_out: int  # tokens of the text beyond the limit
    folder: Path
    layers: tuple[LayerPlan, ...]
    chunk: int  # tokens a step; all of them where the model does not run in chunks

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return sum(file.size for layer in self.layers for file in layer.files.values())


def capture_jobs(
    loaded: LoadedModel, texts: Sequence[Text], out: Path, params: CaptureParams, *, max_tokens: int
) -> tuple[CaptureJob, ...]:
    """Return what is to be done, and refuse it before anything runs long.

    A single text's dump is `out` itself; several get a folder each in it. Texts end at `max_tokens`, or where the
    model's context does. Raises: `InputError`, `OutputError` where the disk lacks the room.
    """
    surveyed = survey(loaded)
    context = context_of(loaded)
    limit = min(max_tokens, context) if context is not None else max_tokens
    jobs = []
    chunked: bool | None = None
    for text in texts:
        ids, found = token_ids(loaded.tokenizer, text, limit)
        folder = out if len(texts) == 1 else out / text.name
        layers = plan_of(loaded, surveyed, len(ids), params)
        if chunked is None and params.chunk < len(ids):
            chunked = runs_in_chunks(loaded, ids)
        chunk = len(ids) if chunked is False else min(params.chunk, len(ids))
        jobs.append(CaptureJob(text, tuple(ids), found - len(ids), folder, layers, chunk))
    check_space(out, sum(job.size for job in jobs))
    return tuple(jobs)


def context_of(loaded: LoadedModel) -> int | None:
    """Return how many positions the model is made for, None where its configuration is silent."""
    told = getattr(loaded.text_config, "max_position_embeddings", None)
    return told if isinstance(told, int) and told > 0 else None


def run_job(
    loaded: LoadedModel, job: CaptureJob, advance: Callable[[float], None] = lambda tokens: None
) -> dict[str, Any]:
    """Write the dump of one text and return its manifest; the folder appears whole or not at all.

    `advance` is told of the tokens of every step.

    Raises: `InputError` for values that cannot be stored, `OutputError`.
    """
    with new_folder(job.folder) as folder:
        seen = record(loaded, job.ids, job.layers, folder, chunk=job.chunk, advance=advance)
        told = manifest(loaded, job, seen)
        (folder / MANIFEST).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


def manifest(loaded: LoadedModel, job: CaptureJob, layers: Sequence[LayerPlan]) -> dict[str, Any]:
    """Return the manifest of a dump, schema `tqtool.dump/1`."""
    queries = min((file.shape[1] for plan in layers if (file := plan.files.get("q"))), default=0)
    packages = (*NEEDED, "numpy")
    return {
        "schema": SCHEMA,
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "architecture": loaded.architecture,
            "layers": len(layers),
            "context": context_of(loaded),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        },
        "tokenizer": _tokenizer(loaded),
        "text_sha256": job.text.sha256,
        "tokens": len(job.ids),
        "query_tail": queries if queries < len(job.ids) else None,  # null: queries are of all positions
        "versions": {
            "tqtool": __version__,
            "python": platform.python_version(),
            **{name: version_of(name) for name in packages},
        },
        "layers": [
            plan.facts.as_json() | {"files": {part: file.file_name for part, file in plan.files.items()}}
            for plan in layers
        ],
    }


def _tokenizer(loaded: LoadedModel) -> dict[str, Any]:
    """Return what tells one tokenizer from another: its class, size, and a digest of its vocabulary."""
    words = json.dumps(sorted(loaded.tokenizer.get_vocab().items()))
    digest = hashlib.sha256(words.encode()).hexdigest()
    return {"class": type(loaded.tokenizer).__name__, "size": len(loaded.tokenizer), "vocabulary_sha256": digest}
