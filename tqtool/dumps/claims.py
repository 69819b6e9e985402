"""What a name or a manifest claims of a layer, held against its arrays: neither is believed where they disagree."""

from __future__ import annotations

from tqtool.dumps.manifest import WITHOUT_CACHE, AttentionClaims, Manifest
from tqtool.errors import InputError

_CLAIMED = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "key_dim": "coordinates of a key",
    "value_dim": "coordinates of a value",
}


def refuse_unmeasurable(manifest: Manifest) -> None:
    """Raises: `InputError` for a dump with attention that `validate` has not, rather than measure it as another."""
    described = {"": manifest.all_layers} | {f" of layer {number}": each for number, each in manifest.by_layer.items()}
    for of_layer, claims in described.items():
        if claims.score_bias:
            text = f"scores{of_layer} carry a bias, {claims.score_bias!r}, which is not measured"
            hint = "ALiBi is measured: give its slopes as alibi_slopes"
            raise InputError(f"{manifest.path}: {text}", code="attention", hint=hint, path=manifest.path)


def check_claims(
    where: str, manifest: Manifest, number: int, found: dict[str, int], tail: int | None, path: str
) -> AttentionClaims:
    """Return what the manifest tells of a layer.

    `found` holds heads, kv_heads, key_dim, value_dim, tokens and queries of the arrays (heads and queries 0: no
    queries); `tail` is the number of last positions that the name of the queries tells.

    Raises: `InputError` (code `manifest`, `shape-mismatch`) where manifest or name say otherwise than the arrays.
    """
    claims = manifest.claims(number)
    if manifest.by_layer and number not in manifest.by_layer:
        raise InputError(
            f"{where} is not described by {manifest.path}, which describes others",
            code="manifest",
            hint="describe every layer, or none",
            path=path,
        )
    if claims.kind == "latent":  # one whose files the manifest names does not come here
        text = f"{where}: attention is latent (MLA): its cache stores a latent, not keys and values"
        hint = "name the files latent, rope_key and kv_b in the manifest (docs/dump.md), as tqtool capture does"
        raise InputError(text, code="attention", hint=hint, path=path)
    if claims.kind in WITHOUT_CACHE:
        text = f"{where}: {manifest.path} calls it {claims.kind}, which keeps no keys and values of its own"
        raise InputError(text, code="manifest", path=path)
    for key, words in _CLAIMED.items():
        told, there = getattr(claims, key), found[key]
        if told is not None and there and told != there:
            text = f"{where}: {manifest.path} says {told} {words}, the arrays have {there}"
            raise InputError(text, code="manifest", path=path)
    for key in ("sinks", "alibi_slopes"):
        numbers, heads = getattr(claims, key), found["heads"]
        if numbers is not None and heads and len(numbers) != heads:
            text = f"{where}: {manifest.path} gives {len(numbers)} {key} for {heads} query heads"
            raise InputError(text, code="manifest", path=path)
    if found["queries"]:
        _check_tail(where, manifest, claims, found, tail, path)
    return claims


def _check_tail(
    where: str, manifest: Manifest, claims: AttentionClaims, found: dict[str, int], tail: int | None, path: str
) -> None:
    """Fewer positions than the tail are no contradiction: a short prompt has no more."""
    total = max(manifest.tokens or 0, (claims.first_token or 0) + found["tokens"])
    queries = found["queries"]
    if manifest.all_queries and queries != total and claims.kind != "cross":
        text = f"{where}: {manifest.path} says that queries are of all positions ({total}), the arrays have {queries}"
        raise InputError(text, code="manifest", path=path)
    if manifest.query_tail is not None and queries != min(manifest.query_tail, total):
        told = f"queries of the last {manifest.query_tail} positions"
        text = f"{where}: {manifest.path} says {told}, the arrays have {queries}"
        raise InputError(text, code="manifest", path=path)
    if tail is not None and queries != min(tail, total):
        text = f"{where}: the name says queries of the last {tail} positions, the array has {queries}"
        raise InputError(text, code="shape-mismatch", hint="was the capture interrupted?", path=path)
