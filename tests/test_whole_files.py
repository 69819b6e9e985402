"""Compression and restoring in one call: the same bytes as the commands, and refusals before any work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Run

import tqtool
from tqtool.container.compression import Limits
from tqtool.container.selection import Request


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(8)
    path = tmp_path / "layer00.npz"
    np.savez(path, **{f"layer00_{kind}": rng.standard_normal((2, 40, 64), dtype=np.float32) for kind in "kv"})
    return path


def test_one_call_does_what_the_command_does(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> None:
    command: Run = request.getfixturevalue("tqtool")
    wanted = Request(config=tqtool.KVConfig(3, 2), value_scale_rule="unbiased", seed=7)
    result = tqtool.compress_file(source, tmp_path / "ours.tq.safetensors", wanted)
    options = ("-c", "K3/V2", "--scale-rule", "match,unbiased", "--seed", "7", "-o", "theirs.tq.safetensors")
    assert command("compress", source, *options).returncode == 0
    ours = (tmp_path / "ours.tq.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.tq.safetensors").read_bytes()
    assert result.container_bytes == len(ours)
    restored = tqtool.decompress_file(tmp_path / "ours.tq.safetensors", tmp_path / "ours.npz", dtype="f16")
    assert command("decompress", "ours.tq.safetensors", "--dtype", "f16", "-o", "theirs.npz").returncode == 0
    assert [each.entry.name for each in restored] == ["layer00_k", "layer00_v"]
    with np.load(tmp_path / "ours.npz") as got, np.load(tmp_path / "theirs.npz") as right:
        assert {name: got[name].tobytes() for name in got} == {name: right[name].tobytes() for name in right}


def test_one_array_of_many_is_restored_by_name(source: Path, tmp_path: Path) -> None:
    tqtool.compress_file(source, tmp_path / "c.tq.safetensors")
    chosen = tqtool.decompress_file(tmp_path / "c.tq.safetensors", tmp_path / "v.npy", names=("layer00_v",))
    assert len(chosen) == 1
    assert np.load(tmp_path / "v.npy").shape == (2, 40, 64)


def test_beyond_a_limit_nothing_is_written(source: Path, tmp_path: Path) -> None:
    result = tqtool.compress_file(source, tmp_path / "c.tq.safetensors", limits=Limits(max_rel_error=1e-6))
    assert result.exceeded
    assert not (tmp_path / "c.tq.safetensors").exists()


def test_a_file_that_is_there_stays_unless_forced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "c.tq.safetensors"
    target.write_text("mine")
    with pytest.raises(tqtool.TqError, match="already exists") as caught:
        tqtool.compress_file(source, target)
    assert (caught.value.code, target.read_text()) == ("exists", "mine")
    tqtool.compress_file(source, target, force=True)
    with pytest.raises(tqtool.TqError, match="already exists"):
        tqtool.decompress_file(target, source)
    with pytest.raises(tqtool.TqError) as caught:
        tqtool.decompress_file(target, target, force=True)
    assert caught.value.code == "same-file"


def test_damage_is_found_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "c.tq.safetensors"
    tqtool.compress_file(source, target)
    content = bytearray(target.read_bytes())
    content[-100] ^= 1
    target.write_bytes(content)
    with pytest.raises(tqtool.TqError) as caught:
        tqtool.decompress_file(target, tmp_path / "back.npz")
    assert caught.value.code == "checksum"
    assert not (tmp_path / "back.npz").exists()
