"""What a name says about an array: keys, values or queries, which layer, how many of the last positions.

Names are read as words: letters and digits between other characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["k", "v", "q"]
KIND_WORDS: dict[Kind, frozenset[str]] = {
    "k": frozenset(("k", "key", "keys")),
    "v": frozenset(("v", "value", "values")),
    "q": frozenset(("q", "query", "queries")),
}
MANIFEST = "manifest.json"
CONTAINER_SUFFIX = ".tq.safetensors"
_PAIRS = re.compile(r"past[_.]?key[_.]?values?|key[_.]?values?|kv[_.]?cache")  # say nothing about one side
_AFTER_KIND = re.compile(r"cache|states?|stacked|restored|rope|post|pre|last\d+|b?f(16|32|64)|\d+|l\d+|layers?\d*")
_LAYER = re.compile(r"(?<![a-z])(?:layers?|blk|blocks?|l)[_.\-\[]*(\d+)(?![a-z0-9])")
_BESIDE = re.compile(r"past|kv|self|attn|attention|model|decoder|transformer|h|cache|states?|tensors?|dump")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name says; None where it says nothing."""

    kind: Kind | None
    layer: int | None
    tail: int | None  # queries are of the last so many positions


def meaning(name: str) -> Meaning:
    """Read a file's stem, or a member's or tensor's name: `layer07_q_last256`, `model.layers.7.k`, `key_cache.7`.

    A weight (`layers.7.k_proj.weight`) has no kind: after the word for the kind only words for its form may follow. A
    number that no word calls a layer is one only where all other words are known: `Llama-3-8B_key` is of no layer.
    """
    text, words = _words(name)
    places = [(i, kind) for i, word in enumerate(words) for kind, known in KIND_WORDS.items() if word in known]
    kind: Kind | None = None
    if places:
        place, kind = places[-1]
        if not all(_AFTER_KIND.fullmatch(word) for word in words[place + 1 :]):
            kind = None
    known = {kind for kinds in KIND_WORDS.values() for kind in kinds}
    layers = {int(number) for number in re.findall(_LAYER, text)}
    if not layers and all(word in known or _BESIDE.fullmatch(word) or _AFTER_KIND.fullmatch(word) for word in words):
        layers = {int(word) for word in words if word.isdecimal()}
    tail = re.search(r"(?:^|[^a-z0-9])last(\d{1,9})(?![a-z0-9])", text)
    layer = layers.pop() if len(layers) == 1 else None
    return Meaning(kind, layer, int(tail[1]) if tail else None)


def bare_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers that stand alone in a name; among the names of a dump the one that varies is the layer."""
    return tuple(int(word) for word in _words(name)[1] if word.isdecimal())


def _words(name: str) -> tuple[str, list[str]]:
    text = _PAIRS.sub("", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    return text, [word for word in re.split(r"[^a-z0-9]+", text) if word]
