"""Dumps of any layout and origin give the same arrays; what can be read in two ways is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from tqtool.dumps.datafiles import open_arrays
from tqtool.dumps.dump import load_dump
from tqtool.dumps.names import Meaning, meaning
from tqtool.errors import InputError, TqError

SHARED = Path(__file__).parents[2] / "shared"
needs_dumps = pytest.mark.skipif(not (SHARED / "dumps").is_dir(), reason="../shared/dumps is absent")


def refused(code: str, *paths: Path, **options: Any) -> TqError:
    with pytest.raises(TqError) as caught:
        load_dump(paths, **options)
    assert caught.value.code == code, caught.value
    return caught.value


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer07_k", ("k", 7, None)),
        ("layer07_q_last256", ("q", 7, 256)),
        ("layer01_k_f32", ("k", 1, None)),
        ("layers.7.key", ("k", 7, None)),
        ("layers.7.value", ("v", 7, None)),
        ("model.layers.7.k", ("k", 7, None)),
        ("past_key_values.3.value", ("v", 3, None)),
        ("key_cache.12", ("k", 12, None)),
        ("value_cache", ("v", None, None)),
        ("cache_k_l5", ("k", 5, None)),
        ("keyStates", ("k", None, None)),
        ("kv_stacked_v", ("v", None, None)),
        ("queries", ("q", None, None)),
        ("past_key_values", (None, None, None)),
        ("model.layers.7.self_attn.k_proj.weight", (None, 7, None)),
        ("model.layers.7.self_attn.q_norm.weight", (None, 7, None)),
        ("tokens", (None, None, None)),
        ("kernel", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_names_tell_kind_layer_and_tail(name: str, expected: tuple[Any, ...]) -> None:
    assert meaning(name) == Meaning(*expected)


def test_a_folder_is_read_as_one_file_a_layer_and_kind(tmp_path: Path, rng: np.random.Generator) -> None:
    k, v, q = (rng.standard_normal((heads, 40, 64)).astype("f2") for heads in (2, 2, 6))
    folder = tmp_path / "kv"
    folder.mkdir()
    for number in (3, 11):  # the layers between have no cache
        np.save(folder / f"layer{number:02d}_k.npy", k + number)
        np.save(folder / f"layer{number:02d}_v.npy", v)
        np.save(folder / f"layer{number:02d}_q_last16.npy", q[:, -16:])
    np.save(folder / "tokens.npy", np.arange(40))
    (tmp_path / "manifest.json").write_text(json.dumps({"kv_heads": 2, "query_heads": 6, "scaling": 0.1}))
    dump = load_dump(folder)
    assert [layer.number for layer in dump.layers] == [3, 11]
    layer = dump.layers[0]
    assert (layer.kv_heads, layer.query_heads, layer.k.dim, layer.queries, layer.claims.scaling) == (2, 6, 64, 16, 0.1)
    got_q, got_k, _ = dump.layers[1].arrays()
    assert got_q is not None
    assert_array_equal(got_k, (k + 11).astype("f4"))
    assert_array_equal(got_q, q[:, -16:].astype("f4"))
    assert any("ignored tokens.npy" in note for note in dump.notes)
    assert {entry.dtype for entry in dump.inputs()} == {"f16"}


@pytest.mark.parametrize("layout", ["htd", "thd", "hdt", "bhtd", "bthd", "dht"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
def test_every_layout_order_and_type_gives_the_same_layer(tmp_path: Path, layout: str, order: Any, dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((1, 3, 20, 32)).astype(np.float16)
    axes = ["bhtd".index(letter) for letter in layout]
    arranged = x.transpose([*axes, *(axis for axis in range(4) if axis not in axes)])
    arranged = arranged.reshape(arranged.shape[: len(layout)])
    np.save(tmp_path / "k.npy", np.asarray(arranged.astype(dtype), order=order))
    np.save(tmp_path / "v.npy", np.asarray(-arranged.astype(dtype), order=order))
    dump = load_dump(k=tmp_path / "k.npy", v=tmp_path / "v.npy", layout=layout)
    _, k, v = dump.layers[0].arrays()
    assert_array_equal(k, x[0].astype("f4"))
    assert_array_equal(v, -x[0].astype("f4"))


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_boxes_agree_with_numpy(
    tmp_path: Path, rng: np.random.Generator, order: tuple[int, ...], fortran: bool
) -> None:
    x = rng.standard_normal((3, 2, 4, 16)).astype("f4")
    stored = x.transpose(order)
    np.save(tmp_path / "x.npy", np.asfortranarray(stored) if fortran else stored)
    (source,) = open_arrays(tmp_path / "x.npy")
    source = source.transposed(tuple(np.argsort(order).tolist()))
    assert source.shape == x.shape
    for block in (1, 64, 300, 1000, 1 << 20):
        with case(block=block):
            seen = np.full(x.shape, np.nan, "f4")
            for box in source.boxes(block):
                with case(box=box):
                    assert 4 * np.prod([len(r) for r in box]) * 16 <= max(block, 64)
                    seen[tuple(slice(r.start, r.stop) for r in box)] = source.box((*box, range(16)))
            assert_array_equal(seen, x)
    taken = source.take(1, 1)
    assert_array_equal(taken.read(), x[:, 1])
    assert_array_equal(taken.take(0, 1).read(), x[1, 1])


def test_restored_copies_do_not_count_beside_their_originals(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 130, 16))
    for name in ("layer0_k", "layer0_v"):
        np.save(tmp_path / f"{name}.restored.npy", x + 1)
    assert_array_equal(load_dump(tmp_path).layers[0].arrays()[1], (x + 1).astype("f4"))
    for name in ("layer0_k", "layer0_v"):
        np.save(tmp_path / f"{name}.npy", x)
    dump = load_dump(tmp_path)
    assert_array_equal(dump.layers[0].arrays()[1], x.astype("f4"))
    assert any("ignored layer0_k.restored.npy" in note for note in dump.notes)


def test_stacked_layers_and_batches(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 2, 130, 16)).astype("f4")
    np.save(tmp_path / "all_k.npy", x)
    np.save(tmp_path / "all_v.npy", -x)
    dump = load_dump(tmp_path)
    assert [layer.number for layer in dump.layers] == [0, 1, 2, 3]
    assert_array_equal(dump.layers[2].arrays()[2], -x[2])
    batch = load_dump(tmp_path, layout="bhtd")
    assert (len(batch.layers), batch.layers[0].kv_heads) == (1, 8)
    assert_array_equal(batch.layers[0].arrays()[1], x.reshape(8, 130, 16))


def test_two_readings_are_refused_with_the_candidates(tmp_path: Path, rng: np.random.Generator) -> None:
    for name in "kv":
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((8, 8, 128)))
    error = refused("layout", tmp_path)
    assert "(8, 8, 128): tokens-first or heads-first?" in str(error)
    assert error.hint == "say --layout htd or --layout thd"
    assert load_dump(tmp_path, layout="thd").layers[0].kv_heads == 8
    (tmp_path / "manifest.json").write_text('{"kv_heads": 5}')
    refused("layout", tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    def save(**shapes: tuple[int, ...]) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, shape in shapes.items():
            np.save(folder / f"{name}.npy", rng.standard_normal(shape))
        return folder

    long, short = (2, 8, 256, 128), (2, 8, 255, 128)
    error = refused("shape-mismatch", save(layer1_k=long, layer1_v=short))
    assert "k is (2, 8, 256, 128), v is (2, 8, 255, 128)" in str(error)
    error = refused("gqa", save(k=(5, 64, 16), v=(5, 64, 16), q=(12, 64, 16)))
    assert "12 query heads cannot share 5 key heads" in str(error)
    refused("unpaired", save(layer0_k=(2, 64, 16)))
    refused("ambiguous", save(layer0_k=(2, 64, 16), layer0_keys=(2, 64, 16), layer0_v=(2, 64, 16)))
    refused("ambiguous", save(layer0_k=(2, 64, 16), layer0_v=(2, 64, 16), k=(2, 64, 16), v=(2, 64, 16)))
    refused("no-tensors", save(tokens=(3, 4)))
    refused("no-tensors", save())
    refused("not-found", tmp_path / "absent.npy")
    refused("usage", tmp_path, k=tmp_path / "k.npy")
    refused("usage", Path("-"))
    refused("usage", save(k=(2, 64, 16), v=(2, 64, 16)), layout="xyz")


def test_archives_and_layers_of_different_lengths(tmp_path: Path, rng: np.random.Generator) -> None:
    """Layers may differ in dim and heads, and some have no cache at all."""
    layers = {2: (4, 130, 64), 5: (1, 140, 128), 9: (2, 150, 96)}
    tensors = {
        f"model.layers.{number}.{side}": rng.standard_normal(shape).astype(np.float16)
        for number, shape in layers.items()
        for side in ("key", "value")
    }
    tensors["model.layers.2.self_attn.k_proj.weight"] = rng.standard_normal((64, 64)).astype(np.float16)
    save_file(tensors, tmp_path / "cache.safetensors")
    np.savez(tmp_path / "stored.npz", **tensors)
    np.savez_compressed(tmp_path / "packed.npz", **tensors)
    for name in ("cache.safetensors", "stored.npz", "packed.npz"):
        with case(name=name):
            dump = load_dump(tmp_path / name)
            assert [(layer.number, layer.k.dim) for layer in dump.layers] == [(2, 64), (5, 128), (9, 96)]
            for layer in dump.layers:
                with case(layer=layer.number):
                    _, k, v = layer.arrays()
                    assert_array_equal(k, tensors[f"model.layers.{layer.number}.key"].astype("f4"))
                    assert_array_equal(v, tensors[f"model.layers.{layer.number}.value"].astype("f4"))
            assert any("k_proj.weight" in note for note in dump.notes)


def test_an_archive_that_promises_more_than_it_holds(tmp_path: Path) -> None:
    """A member's size is believed by nobody: the disk is asked first, and what comes out is counted."""
    np.savez_compressed(tmp_path / "kv.npz", k=np.zeros((64, 16)), v=np.zeros((64, 16)))
    raw = (tmp_path / "kv.npz").read_bytes()
    size = (64 * 16 * 8 + 128).to_bytes(4, "little")
    assert raw.count(size) >= 2
    bomb = raw.replace(size, (2**31).to_bytes(4, "little"))
    (tmp_path / "bomb.npz").write_bytes(bomb)
    with pytest.raises(TqError) as caught:
        load_dump(tmp_path / "bomb.npz").layers[0].arrays()
    assert caught.value.code in ("npz-damaged", "write", "npy-trailing")


@pytest.mark.parametrize("text", ["[1]", "{", '{"kv_heads": 0}', '{"scaling": NaN}', '{"q_tail": "8"}', "[" * 9999])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    for name in "kv":
        np.save(tmp_path / f"{name}.npy", np.ones((2, 64, 16)))
    (tmp_path / "manifest.json").write_text(text)
    assert "manifest.json" in str(refused("manifest", tmp_path))


@needs_dumps
def test_the_captured_dumps() -> None:
    dump = load_dump(SHARED / "dumps/smollm2-135m/kv")
    assert [layer.number for layer in dump.layers] == [0, 1, 10, 20, 29]
    for layer in dump.layers:
        with case(layer=layer.number):
            found = (layer.kv_heads, layer.query_heads, layer.k.dim, layer.queries, layer.claims.scaling)
            assert found == (3, 9, 64, 256, 0.125)
    other = load_dump(SHARED / "dumps/qwen2-tiny-hd64/kv")
    stacked = load_dump(
        k=SHARED / "dumps/qwen2-tiny-hd64/kv_stacked_k.npy", v=SHARED / "dumps/qwen2-tiny-hd64/kv_stacked_v.npy"
    )
    for one, two in zip(other.layers, stacked.layers, strict=True):
        for a, b in zip(one.arrays()[1:], two.arrays()[1:], strict=True):
            with case(layer=one.number):
                assert_array_equal(a, b)
    whole = load_dump(SHARED / "dumps/smollm2-135m/past_key_values.safetensors")
    assert [layer.number for layer in whole.layers] == list(range(30))
    _, k, _ = whole.layers[10].arrays()
    assert_array_equal(k, dump.layers[2].arrays()[1][:, :256])
    with pytest.raises(InputError, match="some names tell a layer"):
        load_dump(SHARED / "dumps/qwen2-tiny-hd64")
