"""Arrays of a dump that are no keys, values or queries but bear on attention: never ignored in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tqtool.dumps.manifest import Manifest
from tqtool.errors import InputError

# Words of a name, the key that tells what they stand for, and what to do.
_MEANINGS = (
    (re.compile(r"masks?|padding"), "valid_tokens", "say which positions hold tokens: --tokens, or valid_tokens"),
    (re.compile(r"sinks?|aux"), "sinks", "tell the logits as sinks of each layer"),
    (re.compile(r"alibi|slopes?"), "alibi_slopes", "tell the slopes as alibi_slopes of each layer"),
    (re.compile(r"bias(es)?"), "score_bias", "a bias on scores is not measured; if it is none, move it away"),
)
_OF_THE_MODEL = {"weight", "proj"}  # words of a layer's weights


def refuse_unread(name: str, unread: Iterable[str], manifest: Manifest, *, tokens_told: bool) -> None:
    """Raises: `InputError` (code `attention`) for an array that bears on attention and that no manifest replaces."""
    claims = (manifest.all_layers, *manifest.by_layer.values())
    told = {key for _, key, _ in _MEANINGS for each in claims if getattr(each, key, None) is not None}
    told |= {"valid_tokens"} if tokens_told else set()
    for array in unread:
        words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", array).lower()))
        for pattern, key, hint in _MEANINGS:
            if key not in told and not words & _OF_THE_MODEL and any(map(pattern.fullmatch, words)):
                text = f"{name}: {array} may change attention and is not read"
                raise InputError(text, code="attention", hint=f"{hint} (docs/dump.md)", path=name)
