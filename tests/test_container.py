"""The compressed file: what goes in comes out, other readers agree, and no byte is left unwatched."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import case
from numpy.testing import assert_allclose, assert_array_equal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import tqtool
from tqtool.codec.codec import decode, encode
from tqtool.codec.sizes import KVConfig
from tqtool.codec.spec import CodecSpec
from tqtool.container import pipeline
from tqtool.container.compression import Result, compress_arrays
from tqtool.container.decompression import check_damage, form_of, restore, select
from tqtool.container.format import CHUNK, open_container
from tqtool.container.selection import Request, choose
from tqtool.dtypes import AnyArray
from tqtool.dumps.datafiles import open_file
from tqtool.errors import InputError
from tqtool.files import output_file


def compress(source: Path, target: Path, request: Request | None = None, **options: Any) -> Result:
    request = request or Request()
    file = open_file(source, dtype=request.dtype)
    return compress_arrays(file, choose(file, request), target, **options)


def decompress(source: Path, target: Path, *names: str, dtype: str | None = None, threads: int = 2) -> None:
    container = open_container(source)
    chosen = select(container, names, dtype)
    check_damage(container, chosen, threads)
    with output_file(target, force=True) as file:
        restore(container, chosen, form_of(str(target), container), file, threads=threads)


def restored(x: AnyArray, **options: Any) -> AnyArray:
    """What the codec alone makes of an array."""
    return decode(encode(x, CodecSpec(x.shape[-1], **options)))


@pytest.fixture
def x() -> AnyArray:
    return np.random.default_rng(3).standard_normal((2, 3, 50, 64)).astype(np.float32)


def test_round_trip_is_the_codec_and_nothing_else(tmp_path: Path, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    result = compress(tmp_path / "kv.npy", tmp_path / "kv.tq.safetensors")
    decompress(tmp_path / "kv.tq.safetensors", tmp_path / "back.npy")
    back = np.load(tmp_path / "back.npy")
    assert_array_equal(back, restored(x))
    quality = result.qualities[0]
    assert quality is not None
    wide, error = x.astype(np.float64), (back - x).astype(np.float64)
    assert quality.error == pytest.approx((error**2).sum() / (wide**2).sum(), rel=1e-6)
    cosines = (wide * back).sum(-1) / np.linalg.norm(wide, axis=-1) / np.linalg.norm(back.astype(np.float64), axis=-1)
    assert quality.cos_min == pytest.approx(cosines.min(), abs=1e-9)
    assert quality.cos_mean == pytest.approx(cosines.mean(), abs=1e-9)
    assert quality.cos_p1 == pytest.approx(np.quantile(cosines, 0.01), abs=1e-9)
    assert (tmp_path / "kv.tq.safetensors").stat().st_size == result.container_bytes


@pytest.mark.parametrize("meta", ["range", "f32", "bf16"])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_the_package_reads_what_we_write(tmp_path: Path, x: AnyArray, meta: Any, bits: int) -> None:
    np.save(tmp_path / "kv.npy", x)
    compress(tmp_path / "kv.npy", tmp_path / "kv.tq.safetensors", Request(bits=bits, meta=meta))
    encoded = encode(x, CodecSpec(64, bits, meta=meta))
    tensors = load_file(tmp_path / "kv.tq.safetensors")
    assert_array_equal(tensors["kv.codes"], encoded.codes)
    assert_array_equal(tensors["kv.meta"].view(np.uint8), encoded.meta.view(np.uint8))
    boundaries, centroids = encoded.spec.book.tables
    assert_array_equal(tensors[f"tq.centroids.beta.64.{bits}"], centroids)
    assert_array_equal(tensors[f"tq.boundaries.beta.64.{bits}"], boundaries)
    with safe_open(tmp_path / "kv.tq.safetensors", "np") as file:
        metadata = file.metadata()
        sizes = [file.get_slice(name).get_dtype() for name in file.offset_keys()]
        assert list(file.offset_keys())[-1] == "tq.sha256"
    widths = [{"F32": 4, "U32": 4, "BF16": 2, "U8": 1}[size] for size in sizes]
    assert widths == sorted(widths, reverse=True)
    assert (metadata["format"], metadata["tq_version"], metadata["tq_requires"]) == ("tqtool", "1.0", "")
    described = json.loads(metadata["tq_manifest"])["tensors"]["kv"]
    assert described["shape"] == [2, 3, 50, 64]
    assert described["source_sha256"] == hashlib.sha256(x.tobytes()).hexdigest()
    assert str(tmp_path) not in str(metadata)


def test_checksums_are_those_of_the_format(tmp_path: Path) -> None:
    """Computed here from the file's bytes alone, as another reader would."""
    x = np.random.default_rng(4).standard_normal((40000, 64)).astype(np.float32)
    np.save(tmp_path / "kv.npy", x)
    compress(tmp_path / "kv.npy", tmp_path / "kv.tq.safetensors")
    raw = (tmp_path / "kv.tq.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    assert length % 64 == 0
    header = json.loads(raw[8:length])
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    crcs = []
    for name, (start, stop) in places.items():
        if name not in ("tq.crc32", "tq.sha256"):
            crcs += [zlib.crc32(raw[length + at : length + min(at + CHUNK, stop)]) for at in range(start, stop, CHUNK)]
    start, stop = places["tq.crc32"]
    assert_array_equal(np.frombuffer(raw[length + start : length + stop], "<u4"), crcs)
    ends = hashlib.sha256(raw[:length]).digest() + hashlib.sha256(raw[length + start : length + stop]).digest()
    assert raw[-64:] == ends


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_codes_do_not_depend_on_layout_type_container_blocks_or_threads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    lead = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4), label="lead"))
    dim = data.draw(st.sampled_from([16, 80, 96]), label="dim")
    bits = data.draw(st.integers(1, 8), label="bits")
    axis = data.draw(st.integers(0, len(lead)), label="axis")
    seed = data.draw(st.integers(0, 2**64 - 1), label="seed")
    values = np.random.default_rng(seed).standard_normal((*lead, dim)).astype(np.float16)
    form = data.draw(st.sampled_from(["npy", "npz", "safetensors"]), label="form")
    kind = data.draw(st.sampled_from(["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"]), label="type")
    order: Any = data.draw(st.sampled_from("CF"), label="order")
    if form == "safetensors":  # which the package writes in C order and the machine's byte order only
        kind, order = kind.replace(">", "<"), "C"
    moved = np.asarray(np.moveaxis(values, -1, axis).astype(kind), order=order)
    save = {"npy": np.save, "npz": lambda path, x: np.savez_compressed(path, x=x)}
    save.get(form, lambda path, x: save_file({"x": x}, path))(folder / f"x.{form}", moved)
    threads = data.draw(st.sampled_from([1, 3]), label="threads")
    block = data.draw(st.sampled_from([1, 1000, 10_000, 1 << 23]), label="block")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "BLOCK_BYTES", block)
        request = Request(bits=bits, axis=axis, seed=seed)
        compress(folder / f"x.{form}", folder / "x.tq.safetensors", request, threads=threads)
    expected = encode(values, CodecSpec(dim, bits, seed=seed))
    tensors = load_file(folder / "x.tq.safetensors")
    assert_array_equal(tensors["x.codes"], expected.codes)
    assert_array_equal(tensors["x.meta"], expected.meta)
    decompress(folder / "x.tq.safetensors", folder / f"back.{form}", threads=threads)
    back = {"npy": np.load, "npz": lambda path: np.load(path)["x"]}.get(form, lambda path: load_file(path)["x"])(
        folder / f"back.{form}"
    )
    assert back.dtype == np.dtype(kind)  # the source's byte order too
    assert_array_equal(np.moveaxis(back, axis, -1), decode(expected).astype(back.dtype))


def test_every_array_comes_back_in_its_own_byte_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "k": rng.standard_normal((3, 64)).astype(">f4"),
        "steps": np.arange(5, dtype=">i4"),
        "v": np.ones((3, 64), np.float32),
    }
    np.savez(tmp_path / "kv.npz", **arrays)
    compress(tmp_path / "kv.npz", tmp_path / "kv.tq.safetensors")
    decompress(tmp_path / "kv.tq.safetensors", tmp_path / "back.npz")
    with np.load(tmp_path / "back.npz") as back:
        assert {name: back[name].dtype.str for name in back} == {"k": ">f4", "steps": ">i4", "v": "<f4"}
        assert_array_equal(back["steps"], arrays["steps"])
        assert_allclose(back["k"].astype(np.float64), arrays["k"], atol=0.6)


def test_same_bytes_for_any_threads(tmp_path: Path, x: AnyArray) -> None:
    np.save(tmp_path / "kv.npy", x)
    written = set()
    for index, threads in enumerate((1, 2, 5)):
        target = tmp_path / f"{index}.tq.safetensors"
        compress(tmp_path / "kv.npy", target, threads=threads)
        written.add(target.read_bytes())
    assert len(written) == 1


def test_pair_of_a_safetensors_dump(tmp_path: Path, x: AnyArray) -> None:
    """Keys and values are compressed, all else is copied; order, names, types and metadata come back."""
    tensors = {
        "layers.0.key": x.astype(np.float16),
        "layers.0.value": x.astype(ml_dtypes.bfloat16),
        "layers.0.query": x,
        "positions": np.arange(50),
        "mask": np.ones((50,), bool),
        "scalar": np.array(3.0),
    }
    save_file(tensors, tmp_path / "kv.safetensors", {"model": "tiny"})
    result = compress(tmp_path / "kv.safetensors", tmp_path / "kv.tq.safetensors")
    assert {entry.name: entry.spec.bits for entry, _ in result.compressed} == {"layers.0.key": 4, "layers.0.value": 2}
    decompress(tmp_path / "kv.tq.safetensors", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    for name in ("layers.0.query", "positions", "mask", "scalar"):
        with case(name=name):
            assert back[name].dtype == tensors[name].dtype
            assert_array_equal(back[name], tensors[name])
    assert_array_equal(back["layers.0.key"], restored(tensors["layers.0.key"]).astype(np.float16))
    value = restored(tensors["layers.0.value"], bits=2).astype(ml_dtypes.bfloat16)
    assert_array_equal(back["layers.0.value"].view(np.uint16), value.view(np.uint16))
    with safe_open(tmp_path / "kv.safetensors", "np") as one, safe_open(tmp_path / "back.safetensors", "np") as two:
        assert two.metadata() == {"model": "tiny"}
        assert one.offset_keys() == two.offset_keys()
    decompress(tmp_path / "kv.tq.safetensors", tmp_path / "one.npy", "layers.0.key", dtype="f32")
    assert_array_equal(np.load(tmp_path / "one.npy"), restored(tensors["layers.0.key"]))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_pair_of_an_npz(tmp_path: Path, x: AnyArray, save: Any) -> None:
    big = np.asarray(x.astype(">f8"), order="F")
    save(tmp_path / "kv.npz", k=x, v=big, steps=np.arange(6, dtype=">i4").reshape(2, 3, order="F"))
    result = compress(tmp_path / "kv.npz", tmp_path / "kv.tq.safetensors", Request(config=KVConfig(3, 16)))
    assert [entry.name for entry, _ in result.compressed] == ["k"]
    decompress(tmp_path / "kv.tq.safetensors", tmp_path / "back.npz")
    with np.load(tmp_path / "back.npz") as back:
        assert back.files == ["k", "v", "steps"]
        assert_array_equal(back["k"], restored(x, bits=3))
        assert_array_equal(back["v"], x)
        assert_array_equal(back["steps"], np.arange(6).reshape(2, 3, order="F"))


def test_bfloat16_bits(tmp_path: Path, x: AnyArray) -> None:
    """Case FF01: bit patterns are refused as numbers, and give the codes of the decoded values."""
    bits = x.astype(ml_dtypes.bfloat16)
    for name, stored in (("u", bits.view("<u2")), ("b", bits.view("<u2").astype(">u2")), ("v", bits.view("V2"))):
        with case(name=name):
            np.save(tmp_path / f"{name}.npy", stored)
            with pytest.raises(tqtool.TqError):
                compress(tmp_path / f"{name}.npy", tmp_path / f"{name}.tq.safetensors")
            compress(tmp_path / f"{name}.npy", tmp_path / f"{name}.tq.safetensors", Request(dtype="bf16"))
            codes = load_file(tmp_path / f"{name}.tq.safetensors")[f"{name}.codes"]
            assert_array_equal(codes, encode(bits, CodecSpec(64)).codes)
            decompress(tmp_path / f"{name}.tq.safetensors", tmp_path / "back.npy")
            back = np.load(tmp_path / "back.npy").astype("<u2").view(ml_dtypes.bfloat16)
            assert_array_equal(back.astype("f4"), restored(bits).astype(ml_dtypes.bfloat16).astype("f4"))


def test_a_norm_that_only_rounding_takes_beyond_the_limit_is_refused_with_its_place(tmp_path: Path) -> None:
    x = np.random.default_rng(11).standard_normal((3, 200, 64))
    x[:2] *= 2.0**100
    x[2] *= 2.0**120 * (1 - 1e-10) / np.linalg.norm(x[2], axis=1, keepdims=True)
    rounded = np.linalg.norm(x[2].astype(np.float32).astype(np.float64), axis=1)
    first = int((rounded > 2.0**120).argmax())
    np.save(tmp_path / "kv.npy", x)
    with pytest.raises(InputError, match=rf"kv\.npy: vector \[2, {first}\] has norm 1\.3e\+36, the limit is"):
        compress(tmp_path / "kv.npy", tmp_path / "kv.tq.safetensors")


def test_tables_in_the_file_are_those_that_decode(tmp_path: Path, x: AnyArray) -> None:
    """A file keeps its meaning when a later release solves its tables otherwise: here they are exchanged."""
    np.save(tmp_path / "kv.npy", x)
    compress(tmp_path / "kv.npy", tmp_path / "kv.tq.safetensors")
    other = CodecSpec(64, 4, "gaussian")
    tensors = load_file(tmp_path / "kv.tq.safetensors")
    raw = bytearray((tmp_path / "kv.tq.safetensors").read_bytes())
    table = tensors["tq.centroids.beta.64.4"].tobytes()
    at = raw.index(table)
    raw[at : at + len(table)] = other.book.tables[1].tobytes()
    (tmp_path / "other.tq.safetensors").write_bytes(raw)
    container = open_container(tmp_path / "other.tq.safetensors")
    chosen = select(container, (), None)
    with output_file(tmp_path / "back.npy") as file:
        restore(container, chosen, "npy", file)
    encoded = encode(x, CodecSpec(64))
    expected = decode(type(encoded)(other, encoded.codes, encoded.meta))
    assert_array_equal(np.load(tmp_path / "back.npy"), expected)
