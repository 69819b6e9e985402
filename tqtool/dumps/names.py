"""What a name says about an array: keys, values or queries, which layer, how many of the last positions.

Also the manifest that may lie beside a dump. Names are read as words: letters and digits between other characters.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqtool.errors import InputError
from tqtool.escapes import parser_reason

Kind = Literal["k", "v", "q"]
KIND_WORDS: dict[Kind, frozenset[str]] = {
    "k": frozenset(("k", "key", "keys")),
    "v": frozenset(("v", "value", "values")),
    "q": frozenset(("q", "query", "queries")),
}
MANIFEST = "manifest.json"
CONTAINER_SUFFIX = ".tq.safetensors"
MAX_MANIFEST = 1 << 20
_PAIRS = re.compile(r"past[_.]?key[_.]?values?|key[_.]?values?|kv[_.]?cache")  # say nothing about one side
_AFTER_KIND = re.compile(r"cache|states?|stacked|restored|rope|post|pre|last\d+|b?f(16|32|64)|\d+|l\d+|layers?\d*")
_LAYER = re.compile(r"(?:layers?|blk|blocks?|l)[_.\-\[]*(\d+)(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name says; None where it says nothing."""

    kind: Kind | None
    layer: int | None
    tail: int | None  # queries are of the last so many positions


def meaning(name: str) -> Meaning:
    """Read a file's stem, or a member's or tensor's name: `layer07_q_last256`, `model.layers.7.k`, `key_cache.7`.

    A weight (`layers.7.k_proj.weight`) has no kind: after the word for the kind only words for its form may follow.
    """
    text = _PAIRS.sub("", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    words = [word for word in re.split(r"[^a-z0-9]+", text) if word]
    places = [(i, kind) for i, word in enumerate(words) for kind, known in KIND_WORDS.items() if word in known]
    kind: Kind | None = None
    if places:
        place, kind = places[-1]
        if not all(_AFTER_KIND.fullmatch(word) for word in words[place + 1 :]):
            kind = None
    layers = set(re.findall(_LAYER, text)) or {word for word in words if word.isdecimal()}
    tail = re.search(r"(?:^|[^a-z0-9])last(\d{1,9})(?![a-z0-9])", text)
    layer = int(layers.pop()) if len(layers) == 1 else None
    return Meaning(kind, layer, int(tail[1]) if tail else None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a `manifest.json` tells; None where it is silent, other keys are ignored."""

    path: str | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    scaling: float | None = None
    q_tail: int | None = None

    def heads(self, kind: Kind) -> int | None:
        """The number of heads of one side."""
        return self.query_heads if kind == "q" else self.kv_heads


def find_manifest(folder: Path) -> Manifest:
    """Read the manifest in a folder, or in the one above; `InputError` with code `manifest` if it is damaged."""
    for place in (folder, folder.absolute().parent):
        path = place / MANIFEST
        if path.is_file():
            shown = folder / MANIFEST if place == folder else os.path.normpath(folder / ".." / MANIFEST)
            return _read_manifest(path, str(shown))
    return Manifest()


def _read_manifest(path: Path, shown: str) -> Manifest:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST + 1)
        if len(text) > MAX_MANIFEST:
            raise ValueError("longer than 1 MiB")
        found: Any = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{shown}: not readable as JSON: {parser_reason(error)}", code="manifest", path=shown
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"{shown}: is not a JSON object", code="manifest", path=shown)
    counts: dict[str, int | None] = {}
    for key in ("query_heads", "kv_heads", "q_tail"):
        value = counts[key] = found.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{shown}: {key} is {value!r}, not a count", code="manifest", path=shown)
    scaling = found.get("scaling")
    if scaling is not None:
        number = isinstance(scaling, (int, float)) and not isinstance(scaling, bool)
        if not (number and 0 < scaling < math.inf):
            raise InputError(f"{shown}: scaling is {scaling!r}, not above 0", code="manifest", path=shown)
        scaling = float(scaling)
    return Manifest(shown, scaling=scaling, **counts)
