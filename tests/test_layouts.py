"""Axes are sure or told, never guessed: what a shape allows twice is refused with both readings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run

from tqtool.dumps.dump import Dump, load_dump
from tqtool.dumps.names import Meaning, meaning
from tqtool.errors import TqError

Shape = tuple[int, ...]


def saved(folder: Path, manifest: Any = None, **shapes: Shape) -> Path:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        np.save(folder / f"{name}.npy", rng.standard_normal(shape).astype(np.float32))
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def axes(dump: Dump) -> tuple[int, int, int]:
    """KV heads, tokens, dim of the first layer."""
    k = dump.layers[0].k
    return k.shape[-3], k.shape[-2], k.shape[-1]


@pytest.mark.parametrize(
    ("k", "q"),
    [
        ((1, 32, 8, 128), None),  # short prompts of models without shared heads, either order
        ((1, 8, 32, 128), None),
        ((32, 6, 128), (32, 6, 128)),
        ((6, 32, 128), (6, 32, 128)),
        ((32, 20, 128), (32, 20, 128)),
        ((1, 8, 1, 64), None),
        ((1, 40, 10, 128), None),
        ((32, 8, 128), None),
        ((8, 8, 128), None),
        ((2, 20, 64), None),
        ((64, 2, 64), None),
    ],
)
def test_what_two_readings_allow_is_refused_with_both(tmp_path: Path, k: Shape, q: Shape | None) -> None:
    shapes = {"layer0_k": k, "layer0_v": k} | ({} if q is None else {"layer0_q": q})
    with pytest.raises(TqError) as caught:
        load_dump(saved(tmp_path, **shapes))
    first, second = k[-3:-1]
    assert caught.value.code == "layout"
    assert f"{k}: tokens-first or heads-first?" in str(caught.value)
    assert f"{first} tokens of {second} heads, or {first} heads of {second} tokens" in str(caught.value)
    lead = "b" * (len(k) == 4)
    assert caught.value.hint == f"say --layout {lead}htd or --layout {lead}thd"


@pytest.mark.parametrize("shape", [(2, 64, 64), (4, 80, 64), (8, 128, 128), (1, 2, 32, 64)])
def test_heads_stand_first_where_the_other_reading_is_a_prompt_of_a_few_tokens(tmp_path: Path, shape: Shape) -> None:
    assert axes(load_dump(saved(tmp_path, layer0_k=shape, layer0_v=shape, layer0_q=shape)))[:2] == shape[-3:-1]


@pytest.mark.parametrize("layout", ["htd", "thd"])
def test_the_option_decides(tmp_path: Path, layout: str) -> None:
    dump = load_dump(saved(tmp_path, k=(32, 6, 128), v=(32, 6, 128)), layout=layout)
    assert axes(dump) == ((32, 6, 128) if layout == "htd" else (6, 32, 128))


@pytest.mark.parametrize(
    ("k", "q", "manifest", "expected"),
    [
        ((32, 6, 128), (32, 6, 128), {"kv_heads": 32}, (32, 6, 128)),  # told by the manifest
        ((32, 6, 128), (32, 6, 128), {"kv_heads": 6, "query_heads": 6}, (6, 32, 128)),
        ((32, 300, 128), None, None, (32, 300, 128)),  # no model has 300 heads
        ((300, 32, 128), None, None, (32, 300, 128)),
        ((2, 64, 64), (4, 64, 64), None, (2, 64, 64)),  # query heads are a multiple of the KV heads
        ((64, 2, 64), (64, 4, 64), None, (2, 64, 64)),
        ((3, 128, 64), (9, 32, 64), None, (3, 128, 64)),  # queries of the last positions only
        ((128, 3, 64), (32, 9, 64), None, (3, 128, 64)),
        ((8, 128, 64), (8, 32, 64), None, (8, 128, 64)),
    ],
)
def test_one_reading_needs_no_option(tmp_path: Path, k: Shape, q: Shape | None, manifest: Any, expected: Shape) -> None:
    shapes = {"layer0_k": k, "layer0_v": k} | ({} if q is None else {"layer0_q": q})
    assert axes(load_dump(saved(tmp_path, manifest, **shapes))) == expected


def test_a_manifest_that_fits_neither_axis_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"kv_heads": 5}, k=(8, 300, 64), v=(8, 300, 64))
    with pytest.raises(TqError, match="the manifest says 5 heads") as caught:
        load_dump(folder)
    assert caught.value.code == "layout"


def test_a_layout_that_a_manifest_contradicts_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"kv_heads": 8}, k=(8, 300, 64), v=(8, 300, 64))
    with pytest.raises(TqError, match="says 8 KV heads, the arrays have 300") as caught:
        load_dump(folder, layout="thd")
    assert caught.value.code == "manifest"


def test_pages_of_a_cache_are_no_layers(tmp_path: Path) -> None:
    folder = saved(tmp_path, kv_k=(2, 8, 16, 4, 128), kv_v=(2, 8, 16, 4, 128))
    with pytest.raises(TqError, match="5-D array") as caught:
        load_dump(folder)
    assert caught.value.code == "layout"
    assert "paged" in str(caught.value.hint)
    assert len(load_dump(folder, layout="lbthd").layers) == 2


@pytest.mark.parametrize("options", [{}, {"layout": "htd"}])
def test_as_many_tokens_as_coordinates_are_told(tmp_path: Path, options: dict[str, Any]) -> None:
    dump = load_dump(saved(tmp_path, layer0_k=(2, 64, 64), layer0_v=(2, 64, 64), layer0_q=(4, 64, 64)), **options)
    said = [note for note in dump.notes if "as many tokens as coordinates" in note]
    assert axes(dump) == (2, 64, 64)
    assert bool(said) != bool(options)
    assert all("is read as htd, and could be hdt (and 2 more)" in note for note in said)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3-8B_key", ("k", None, None)),
        ("Llama-3_key", ("k", None, None)),
        ("model_3_key", ("k", 3, None)),
        ("mistral_7_k", ("k", None, None)),  # the l of a word is no layer
        ("small_3_v", ("v", None, None)),
        ("Qwen2.5-7B_layer12_q_last64", ("q", 12, 64)),
        ("decoder.3.self_attn.k", ("k", 3, None)),
        ("layer07_k_7", ("k", 7, None)),
    ],
)
def test_a_number_of_a_model_is_no_layer(name: str, expected: tuple[Any, ...]) -> None:
    assert meaning(name) == Meaning(*expected)


def test_the_number_that_varies_is_the_layer(tmp_path: Path) -> None:
    shapes = {f"Llama-3_{number}_{kind}": (2, 300, 64) for number in (4, 11) for kind in "kv"}
    assert [layer.number for layer in load_dump(saved(tmp_path, **shapes)).layers] == [4, 11]


def test_one_model_in_the_name_is_one_layer(tmp_path: Path) -> None:
    folder = saved(tmp_path, **{"Llama-3-8B_key": (8, 300, 64), "Llama-3-8B_value": (8, 300, 64)})
    assert [layer.number for layer in load_dump(folder).layers] == [0]


def test_compress_says_which_axis_it_codes_along(tqtool: Run, tmp_path: Path) -> None:
    saved(tmp_path, layer0_v=(4, 96, 128))
    result = tqtool("compress", "layer0_v.npy")
    assert result.returncode == 0
    assert "vectors of 128 along axis 2 of (4, 96, 128)" in result.stdout + result.stderr
    assert "several axes" not in result.stderr


@pytest.mark.parametrize(("options", "warned"), [((), True), (("--axis", "1"), False), (("--layout", "htd"), False)])
def test_compress_warns_where_the_shape_cannot_tell_the_axis(
    tqtool: Run, tmp_path: Path, options: tuple[str, ...], warned: bool
) -> None:
    saved(tmp_path, layer0_v=(4, 128, 128))
    result = tqtool("compress", "layer0_v.npy", *options)
    assert result.returncode == 0
    text = "layer0_v: (4, 128, 128) has several axes of 128; vectors are taken along the last, axis 2"
    assert (text in result.stderr) is warned
