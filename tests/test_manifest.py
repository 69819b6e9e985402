"""The manifest of a container: what it says comes back, and what cannot be right is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqtool.codec.spec import CodecSpec
from tqtool.container.format import plan
from tqtool.container.manifest import Compressed, Copied, Entry, file_metadata, parse_manifest
from tqtool.dumps.safetensors import Header
from tqtool.errors import InputError, IntegrityError, UsageError

K = Compressed("k", "f32", (4, 128), 1, "k", CodecSpec(128, 3), "0" * 64, 0.034)
STEPS = Copied("steps", "i64", (5,))
ENTRIES: tuple[Entry, ...] = (K, STEPS)


def header_with(manifest: str) -> Header:
    tensors = plan(ENTRIES, "npz", {"model": "m"}).tensors
    return Header(tensors, {"tq_manifest": manifest}, b"", "kv.tq.safetensors")


def described(change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> str:
    manifest = json.loads(file_metadata(ENTRIES, "npz", {"model": "m"})["tq_manifest"])
    change(manifest)
    return json.dumps(manifest)


def of_k(**facts: Any) -> str:
    return described(lambda manifest: manifest["tensors"]["k"].update(facts))


def without(key: str) -> str:
    return described(lambda manifest: manifest["tensors"]["k"].pop(key))


def test_the_manifest_comes_back() -> None:
    assert parse_manifest(header_with(described())) == (ENTRIES, "npz", {"model": "m"})


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "[] is not an object"),
        ('{"source":"npz","source":"npz"}', "the same key twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "a number of thousands of digits"),
        (described(lambda m: m.pop("source")), "source is missing"),
        (described(lambda m: m.update(source="gguf")), "source 'gguf' is none of npy, npz, safetensors"),
        (described(lambda m: m.update(source=1)), "source is 1, not text"),
        (described(lambda m: m.update(metadata=[])), "[] is not an object"),
        (described(lambda m: m.update(metadata={"a": 1})), "metadata 'a' is 1, not text"),
        (described(lambda m: m.update(tensors=[])), "tensors is [], not an object"),
        (described(lambda m: m["tensors"].update(k=None)), "tensor 'k': None is not an object"),
        (described(lambda m: m["tensors"]["steps"].pop("dtype")), "tensor 'steps': dtype is missing"),
        (without("axis"), "tensor 'k': axis is missing"),
        (without("error"), "tensor 'k': error is missing"),
        (of_k(shape=4), "tensor 'k': shape is 4, not a list"),
        (of_k(shape=[4, -1]), "tensor 'k': shape is [4, -1], not a list of sizes"),
        (of_k(axis=2), "tensor 'k': axis 2 of an array of shape (4, 128); 2 to 6 axes are possible"),
        (of_k(axis=True), "tensor 'k': axis is True, not a whole number"),
        (of_k(dtype="i8"), "tensor 'k': dtype 'i8' is none of f16, bf16, f32, f64"),
        (of_k(kind="q"), "tensor 'k': kind 'q' is none of k, v, generic"),
        (of_k(bits=9), "tensor 'k': 9 bits: a code has 1 to 8 bits"),
        (of_k(bits=4.0), "tensor 'k': bits is 4.0, not a whole number"),
        (of_k(shape=[4, 90]), "tensor 'k': vector length 90: no Hadamard matrix of that order is built"),
        (of_k(law="normal"), "tensor 'k': law 'normal' is none of beta, sphere, gaussian"),
        (of_k(scale_rule=["match"]), "tensor 'k': scale_rule is ['match'], not text"),
        (of_k(meta="f16"), "tensor 'k': meta 'f16' is none of range, f32, bf16"),
        (of_k(seed=-1), "tensor 'k': seed -1 is not a 64-bit unsigned number"),
        (of_k(rotation="dct"), "tensor 'k': rotation 'dct' is none of hadamard-signs"),
        (of_k(layout="planes"), "tensor 'k': layout 'planes' is none of lsb-dense"),
        (of_k(source_sha256="00"), "tensor 'k': source_sha256 is '00', not 64 digits"),
        (of_k(error="small"), "tensor 'k': error is 'small', not a number"),
        (of_k(error=float("inf")), "Infinity is no JSON number"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused_in_words(manifest: str, said: str) -> None:
    with pytest.raises(IntegrityError) as refused:
        parse_manifest(header_with(manifest))
    assert str(refused.value).startswith(f"kv.tq.safetensors: damaged header: manifest: {said}")
    assert (refused.value.code, refused.value.hint) == ("header", "copy it again")


def test_what_the_manifest_promises_is_there() -> None:
    with pytest.raises(IntegrityError, match=r"damaged header: tensor 'k.meta' should be F32 \(2, 2\)"):
        parse_manifest(header_with(of_k(axis=0, shape=[128, 2])))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(key=st.sampled_from(sorted(json.loads(described())["tensors"]["k"])), value=ANY_JSON)
def test_any_value_in_any_field_is_understood_or_refused_without_words_of_python(key: str, value: Any) -> None:
    said = ""
    try:
        parse_manifest(header_with(of_k(**{key: value})))
    except IntegrityError as error:
        said = str(error)
    assert "Error" not in said


def seeded(name: str, dim: int, seed: int) -> Compressed:
    return Compressed(name, "f32", (4, dim), 1, "k", CodecSpec(dim, seed=seed))


def test_one_file_holds_one_seed_for_each_vector_length() -> None:
    """`tq.signs.DIM` leaves out the seed: the second tensor would be restored with the first one's signs."""
    with pytest.raises(UsageError) as refused:
        plan([seeded("a", 128, 0), seeded("b", 64, 1), seeded("c", 128, 7)], "npz", {})
    assert str(refused.value) == (
        "tensor 'c': seed 7 for vectors of 128 coordinates; 'a' has 0, and a file holds one for each length"
    )
    assert refused.value.hint == "give both the same seed, or write two files"


def test_seeds_may_differ_between_vector_lengths() -> None:
    placed = plan([seeded("a", 128, 0), seeded("b", 64, 1)], "npz", {})
    assert {"tq.signs.64", "tq.signs.128"} <= {tensor.name for tensor in placed.tensors}


def test_a_format_that_could_not_be_restored_is_not_written() -> None:
    with pytest.raises(UsageError, match=r"source format 'gguf' is none of npy, npz, safetensors"):
        plan(ENTRIES, "gguf", {})  # type: ignore[arg-type]


def test_names_of_the_formats_own_tensors_are_refused() -> None:
    with pytest.raises(InputError, match=r"tensor 'tq.x': names that begin with tq. are the format's own"):
        plan([Copied("tq.x", "i64", (5,))], "npz", {})
